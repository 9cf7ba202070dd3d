"""Folders with kernels of masks, scores and sinks: what chooses, by struct and by name."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen
from fagen import registry, vendor
from fagen.errors import FagenError, ScheduleError
from fagen.problem import Problem, Sizes
from fagen.vendor import jax_package, torch_package
from tests.test_vendor_select import all_of, dispatcher, modules_of

__all__ = ["modules_of"]  # a fixture

PLAIN = "fwd_fp16_d64_causal_m128n128"
WINDOW = "fwd_fp16_d64_window_m64n64"
CHUNKED = "fwd_fp16_d64_chunked_m64n64"
DOCUMENT = "fwd_fp16_d64_document_m64n64"
EACH = "fwd_fp16_d64_causal_by_sequence_m64n64"
CAPPED = "fwd_fp16_d64_causal_m128n64_softcap"
BOTH = "fwd_fp16_d64_window_m64n64_softcap_sinkbf16"
SUNK = tuple(f"fwd_fp16_d64_causal_m128n64_sink{dtype}" for dtype in ("bf16", "fp32"))
PACKED = "fwd_fp16_d64_window_m64n64_sinkfp16_varlen"
DECODE = "dec_fp16_d64_window_r8n64"
DECODE_CAPPED = "dec_fp16_d64_causal_r8n64_softcap"
ALL = (PLAIN, WINDOW, CHUNKED, DOCUMENT, EACH, CAPPED, BOTH, *SUNK, PACKED, DECODE, DECODE_CAPPED)
SIZES = Sizes(2, 4, 2, 100, 100)


def test_in_c_each_struct_has_what_chooses_among_its_kernels(tmp_path: Path) -> None:
    own = dispatcher(all_of(*ALL), tmp_path)
    chosen = {
        "forward": (PLAIN,),
        "forward_window": (WINDOW,),
        "forward_document": (DOCUMENT,),
        "forward_causal_by_sequence": (EACH,),
        "forward_softcap": (CAPPED,),
        "forward_sink": SUNK,
        "forward_window_softcap_sink": (BOTH,),
        "forward_varlen_window_sink": (PACKED,),
        "decode_window": (DECODE,),
        "decode_softcap": (DECODE_CAPPED,),
    }
    assert {*own.tables} == {*chosen, "forward_chunked"}
    for name, slugs in chosen.items():
        for slug in slugs:
            problem = Problem.of(registry.from_slug(slug))
            assert own.slug(problem, SIZES, name) == slug
            assert own.slug(replace(problem, head_dim=128), SIZES, name) == ""
            assert own.slug(replace(problem, sink="fp16" * (not problem.sink)), SIZES, name) == ""
    assert own.slug(replace(Problem.of(registry.from_slug(WINDOW)), mask="full"), SIZES) == ""


def test_rows_that_count_clocks_may_be_of_several_structs(tmp_path: Path) -> None:
    tiles = "fwd_bf16_d64_causal_m256n64{}_s4_q2_nointer", "fwd_bf16_d64_causal_m128n128{}_q2"
    own = dispatcher(
        all_of(*(tile.format(s) for s in ("", "_sinkbf16") for tile in tiles)), tmp_path
    )
    for sink in ("", "_sinkbf16"):
        many, few = (tile.format(sink) for tile in tiles)
        problem = Problem.of(registry.from_slug(many))
        for seqlen, slug in ((16384, many), (128, few)):
            sizes = Sizes(1, 32, 8, seqlen, seqlen)
            assert own.slug(problem, sizes, f"forward{'_sink' * bool(sink)}") == slug


def test_a_text_that_nothing_tells_is_called_by_its_own_name(tmp_path: Path) -> None:
    from fagen.masking import masked

    mask = masked(print, False, None, "k_idx <= 2 * q_pos", {}).name
    hidden = registry.from_slug(PLAIN).but(mask=mask, block_n=64)
    own = dispatcher([registry.from_slug(PLAIN), hidden], tmp_path)
    assert [row.problem.mask for row in own.tables["forward"].rows] == ["causal"] * 2
    assert own.slug(Problem.of(registry.from_slug(PLAIN)), SIZES) == PLAIN


def tensors(*leading: int) -> list[torch.Tensor]:
    return [torch.empty(*leading, 4, 64, dtype=torch.float16) for _ in range(3)]


LENGTHS = torch.zeros(2, dtype=torch.int32)
SINKS = torch.zeros(4, dtype=torch.bfloat16)
CALLS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"causal": True}, PLAIN, {}),
    ({"causal": 1}, PLAIN, {}),
    ({"window": (None, 0)}, PLAIN, {}),
    ({"causal": True, "window": 5}, WINDOW, {"window_left": 4, "window_right": 0}),
    ({"window": (3, -1)}, WINDOW, {"window_left": 3, "window_right": 1 << 30}),
    ({"mask": "chunked", "chunk": 8}, CHUNKED, {"chunk": 8}),
    ({"mask": "document", "first": 1, "last": 2}, DOCUMENT, {"first": 1, "last": 2}),
    ({"causal": LENGTHS}, EACH, {"causal_of": LENGTHS}),
    ({"causal": True, "softcap": 2.0}, CAPPED, {"softcap": 2.0}),
    ({"causal": True, "softcap": 0.0}, PLAIN, {}),
    ({"causal": True, "sinks": SINKS}, SUNK[0], {"sinks": SINKS}),
    ({"causal": True, "sinks": SINKS.float()}, SUNK[1], {}),
    (
        {"causal": True, "window": 5, "softcap": 2.0, "sinks": SINKS},
        BOTH,
        {"window_left": 4, "window_right": 0, "softcap": 2.0, "sinks": SINKS},
    ),
]


def test_a_package_for_torch_takes_them_by_the_names_of_fagens_calls(modules_of: Any) -> None:
    modules = modules_of(all_of(*ALL))
    attention = modules["_attention"].attention
    q, k, v = tensors(2, 100)
    for call, slug, values in CALLS:
        op, _, named = attention(q, k, v, return_lse=True, **call)
        assert op == slug and values.items() <= named.items()
    at = torch.tensor([0, 100], dtype=torch.int32)
    varlen = modules["_varlen"].attention_varlen
    op, _, named = varlen(*tensors(100), at, causal=True, window=5, sinks=SINKS.half())
    assert op == f"{PACKED}_without_lse" and {"window_left", "sinks", "seqused_k"} < {*named}
    decode = modules["_decode"].attention_decode
    assert decode(q[:, :2], k, v, window=5)[0] == f"{DECODE}_without_lse"
    assert decode(q[:, :2], k, v, softcap=3.0)[0] == f"{DECODE_CAPPED}_without_lse"
    for wrong, error, words in (
        ({"window": 0}, ValueError, "window is 0; it must be a number of keys"),
        ({"window": 3, "mask": "chunked", "chunk": 3}, ValueError, "are several masks, whose and"),
        (
            {"causal": True, "mask": "document"},
            ValueError,
            "are several masks, whose and is a text",
        ),
        ({"causal": "a"}, TypeError, "causal is 'a'; it must be True or False"),
        ({"causal": True, "sinks": LENGTHS}, ValueError, "sinks are int32; they must be one of"),
        ({"softcap": 2.0}, ValueError, "has no kernel for torch.float16, 64, 64, full_softcap"),
    ):
        with pytest.raises(error, match=words):
            attention(q, k, v, **wrong)
    with pytest.raises(ValueError, match="computes it: add bwd_fp16_d64_window_m128n128_und"):
        attention(q.requires_grad_(), k, v, causal=True, window=5)


def test_a_package_for_torch_differentiates_them_where_it_has_the_kernel() -> None:
    schedules = all_of(BOTH, "bwd_fp16_d64_window_m64n64_softcap_sinkbf16")
    texts = torch_package.texts(vendor.folder_of(vendor.asked("demo", schedules, "torch")))
    (own,) = (text for path, text in texts.items() if path.endswith("/_gradients.py"))
    keeps = "q, k, v, ctx.scale, ctx.window_left, ctx.window_right, ctx.softcap, sinks = inputs"
    assert keeps in own and "dq, dk, dv, dsinks = gradients_of(" in own
    assert "deltas = dq, dk, dv, None, None, None, None, dsinks" in own
    (call,) = (text for path, text in texts.items() if path.endswith("/_attention.py"))
    assert "any([tensor.requires_grad for tensor in needed])" in call


def test_folders_without_them_say_nothing_of_them() -> None:
    folder = vendor.folder_of(vendor.asked("demo", all_of(PLAIN), "jax"))
    assert not any("softcap" in text for path, text in jax_package.texts(folder).items()
                   if path.startswith("jax/"))  # fmt: skip


def test_masks_that_are_said_together_are_a_kernels_that_is_their_and(modules_of: Any) -> None:
    def of(**how: Any) -> Any:
        return fagen.pick(dtype="fp16", head_dim=64, **how).schedule.but(block_m=64, q_stages=None)

    both = of(mask="document", window=5), of(mask="chunked", window=5, softcap=2.0)
    decode = fagen.pick(dtype="fp16", head_dim=64, mask="chunked", window=5, kind="decode").schedule
    modules = modules_of([*all_of(PLAIN, DOCUMENT), *both, decode])
    attention = modules["_attention"].attention
    q, k, v = tensors(2, 100)
    spans = dict(mask="document", first=1, last=2)
    for call, schedule, values in (
        (dict(window=5, **spans), both[0], {"window_left": 4, "window_right": 4, "first": 1}),
        (dict(causal=True, window=5, **spans), both[0], {"window_right": 0, "last": 2}),
        (dict(causal=True, window=3, mask="chunked", chunk=7, softcap=2.0), both[1], {"chunk": 7}),
    ):
        op, _, named = attention(q, k, v, return_lse=True, **call)
        assert op == schedule.slug and values.items() <= named.items()
    found = modules["_decode"].attention_decode(q[:, :2], k, v, window=3, mask="chunked", chunk=7)
    assert found[0] == f"{decode.slug}_without_lse"
    with pytest.raises(ValueError, match="this folder has no kernel of causal and document: fagen"):
        attention(q, k, v, causal=True, **spans)


def test_a_package_for_jax_knows_who_chooses_for_which_struct() -> None:
    folder = vendor.folder_of(vendor.asked("demo", all_of(*ALL), "jax"))
    files = jax_package.texts(folder)
    for name, keys in {
        "_attention": {
            "",
            "window",
            "chunked",
            "document",
            "softcap",
            "sink",
            "causal by sequence",
        },
        "_decode": {"window", "softcap"},
        "_varlen": {"float16 window sink"},
    }.items():
        tree = ast.parse(files[f"jax/demo/{name}.py"])
        picks = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_PICKS"
        )
        assert keys <= {*picks} and all(
            f"demo_{pick}(" in files["src/demo.c"] for pick in picks.values()
        )


def test_no_kernel_may_have_the_name_of_what_chooses(tmp_path: Path) -> None:
    manifest = tmp_path / "vendor.toml"
    manifest.write_text(f'name = "demo"\n[kernels]\nforward_window = "{WINDOW}"\n')
    with pytest.raises((FagenError, ScheduleError), match="would be the name of another function"):
        vendor.read(manifest)
