"""fagen.attention_varlen in e4m3 on CPU tensors: descales by sequence, and the calls over it."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from benchmarks.launch import as_called
from fagen import registry
from fagen.dispatch.select import buildable
from fagen.errors import ScheduleError, UntunedWarning
from fagen.flash_attn_interface import flash_attn_varlen_func
from fagen.kinds.forward import operands
from fagen.kinds.forward.emulate import emulate_fp8
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.reference import reference
from fagen.problem import Problem
from fagen.runtime import op
from fagen.runtime.checks import checked
from tests.op_helpers import refusal
from tests.stubs import StubOp
from tests.tensors import normal
from tests.varlen_helpers import E4M3, LENGTHS, Packed8, far, packed, packed8

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

ROUNDING = 0.04  # of P, whose mantissa has three bits; all else is exact, or nearly so
SLUG = "fwd_e4m3_d64v32_causal_m64n32_varlen"  # of no file


def usual_of(head_dim: int, mask: str) -> Schedule:
    """The schedule that a call has."""
    of = Problem("e4m3", head_dim, head_dim, mask, "bf16", "rows", 0, lengths="varlen")
    found = buildable(of).schedules[0]
    assert isinstance(found, Schedule)
    return found


def called(of: Packed8, **more: Any) -> tuple[Tensor, Tensor]:
    out, lse = fagen.attention_varlen(*of.tensors, return_lse=True, **of.named | more)
    return out, lse


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_sequence_has_descales_of_its_own(
    head_dim: int, causal: bool, by_column: bool
) -> None:
    of = packed8(head_dim=head_dim, by_column=by_column)
    out, lse = called(of, causal=causal)
    assert (out.dtype, out.shape) == (torch.bfloat16, (119, 4, head_dim))
    assert (lse.dtype, lse.shape) == (torch.float32, (4, 119))
    right, right_lse = of.exact(causal=causal)
    assert far(out, right) < ROUNDING
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-3)
    assert torch.equal(out, fagen.attention_varlen(*of.tensors, causal=causal, **of.named))  # type: ignore[arg-type]


def test_it_is_what_the_committed_schedule_computes_of_each_sequence_alone() -> None:
    of = packed8(((70, 200), (300, 300)), head_dim=128, by_column=True)
    out, lse = called(of, causal=True)
    planned = plan(usual_of(128, "causal"))
    q, k, v = of.tensors[:3]
    for one, (rows, keys) in enumerate(
        ((slice(0, 70), slice(0, 200)), (slice(70, 370), slice(200, 500)))
    ):
        descales = [of.named[f"{name}_descale"][one : one + 1] for name in "qkv"]
        descales[:2] = [x[..., None] for x in descales[:2]]
        means = (of.named[name][one : one + 1] for name in ("v_mean", "k_mean"))
        sequence = q[None, rows], k[None, keys], v[None, keys]
        alone, lse_alone = emulate_fp8(planned, *sequence, 128**-0.5, *descales, *means)
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], lse_alone[0])


def test_one_descale_serves_for_all_in_any_of_its_shapes() -> None:
    q, k, v, *at = packed8().tensors
    shapes: list[Callable[[float, int], Tensor]] = [
        lambda x, heads: torch.tensor(x),
        lambda x, heads: torch.full((1, 1), x),
        lambda x, heads: torch.full((1, heads), x),
        lambda x, heads: torch.full((6, 1), x),
        lambda x, heads: torch.tensor(x).expand(6, heads),  # strides of 0
        lambda x, heads: torch.full((6, heads, 1), x),
    ]
    found = []
    for of in shapes:
        descales = {"q_descale": of(0.5, 4), "k_descale": of(0.25, 2), "v_descale": of(2.0, 2)}
        found.append(fagen.attention_varlen(q, k, v, *at, causal=True, **descales))
    assert all(torch.equal(out, found[0]) for out in found)  # type: ignore[arg-type]
    plain = fagen.attention_varlen(
        *(q, k, v, *at), causal=True, scale=0.125 * 64**-0.5, **dict.fromkeys(of_ones(), ONE)
    )
    assert torch.equal(found[0], plain * 2)  # type: ignore[arg-type, operator]


ONE = torch.ones(())


def of_ones() -> tuple[str, ...]:
    return "q_descale", "k_descale", "v_descale"


def test_what_quantize_makes_of_all_sequences_at_once_is_taken() -> None:
    *qkv, at_q, at_k = packed(dtype=torch.bfloat16)
    (q, q_descale), (k, k_descale) = (fagen.quantize(x[None], scales="head") for x in qkv[:2])
    v, v_descale, v_mean = fagen.quantize(qkv[2][None], scales="column", center=True)
    numbers = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out = fagen.attention_varlen(q[0], k[0], v[0], at_q, at_k, v_mean=v_mean, **numbers)
    right = fagen.attention_varlen(*qkv, at_q, at_k)
    assert far(out, right.double()) < 0.1  # type: ignore[arg-type, union-attr]


def test_of_seqused_k_keys_alone_are_seen() -> None:
    of = packed8()
    used = torch.tensor([5, 3, 20, 0, 0, 32], dtype=torch.int32)
    right, _ = called(of, seqused_k=used)
    _, k, v, _, at_k = of.tensors
    for begin, count, end in zip(at_k[:-1].tolist(), used.tolist(), at_k[1:].tolist(), strict=True):
        for x in (k, v):
            x.view(torch.uint8)[begin + count : end] = 0xFF
    out, _ = called(of, seqused_k=used)
    assert torch.equal(out, right) and out.isfinite().all()


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nothing_is_seen_of_neighbours_nor_of_what_lies_around(nan: int) -> None:
    of = packed8(gap=6, by_column=True)
    right, right_lse = called(of, causal=True)
    q, k, v, at_q, at_k = of.tensors
    rows, keys = slice(int(at_q[5]), int(at_q[6])), slice(int(at_k[5]), int(at_k[6]))
    for x, mine in ((q, rows), (k, keys), (v, keys)):
        kept = x[mine].clone()
        x.view(torch.uint8).fill_(nan)
        x[mine] = kept
    for numbers in of.named.values():
        numbers[:5] = torch.nan
    out, lse = called(of, causal=True)
    assert torch.equal(out[rows], right[rows]) and torch.equal(lse[:, rows], right_lse[:, rows])
    assert out[rows].isfinite().all()


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 5)], [(4, 0)], [(0, 0), (0, 0)]])
def test_there_may_be_nothing_to_do(lengths: list[tuple[int, int]]) -> None:
    out, lse = called(packed8(lengths, by_column=True))
    assert not out.any() and (lse == -torch.inf).all()


def test_out_is_bf16_or_what_out_dtype_says() -> None:
    of = packed8()
    wide, _ = called(of)
    half, _ = called(of, out_dtype=torch.float16)
    assert (wide.dtype, half.dtype) == (torch.bfloat16, torch.float16)
    torch.testing.assert_close(half.bfloat16(), wide, rtol=2**-7, atol=0)


def test_a_schedule_that_is_named_says_what_out_is() -> None:
    of = packed8()
    slug = "fwd_e4m3_d64_full_m64n64_varlen_ofp16"
    out, _ = called(of, schedule=slug)
    assert out.dtype == torch.float16
    assert far(out, of.exact()[0]) < ROUNDING
    with pytest.raises(ScheduleError, match="the call asks for"):
        called(of, schedule=slug, out_dtype=torch.bfloat16)


def test_head_dims_that_nobody_tuned_have_a_derived_kernel() -> None:
    of = packed8(head_dim=96, head_dim_v=48)
    with pytest.warns(UntunedWarning, match=r"V row-major.*varlen: fwd_e4m3_d96v48_full_m128n128_"):
        out, _ = called(of)
    assert far(out, of.exact()[0]) < ROUNDING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(of)


def test_what_is_timed_is_what_the_call_computes() -> None:
    of = plan(usual_of(64, "causal"))
    q, k, v = (normal(2, 70, heads, 64, seed=heads).half() for heads in (4, 2, 2))
    given = operands.arguments(of, q, k, v)
    out = op.alone(op.emulation(of.slug))(*given)
    real = operands.real(of, operands.operands(of, q, k, v))
    right, _ = reference(*real, mask="causal", scale=64**-0.5)
    assert far(out.unflatten(0, (2, 70)), right) < ROUNDING
    tensors, keys = as_called(of, Problem.of(of.schedule), given)
    assert torch.equal(fagen.attention_varlen(*tensors, causal=True, **keys), out)  # type: ignore[arg-type]


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q_descale": None}, "q_descale is missing: a number of an e4m3 tensor is its value ti"),
        ({"v_descale": None}, "v_descale is missing: a number of an e4m3 tensor is its value ti"),
        ({"k_descale": torch.ones(2)}, "k_descale has shape (2,); it must be one number (), (bat"),
        (
            {"q_descale": torch.ones(6, 4, 3)},
            "q_descale has 3 blocks of rows for a head; of packed sequences a head has one number, "
            "() or (batch, heads), and of v also one for each column",
        ),
        (
            {"q_descale": torch.ones(5, 4)},
            "q_descale has shape (5, 4, 1); it must be (offsets - 1 = 6 or 1, heads = 4 or 1, 1)",
        ),
        (
            {"k_descale": torch.ones(6, 4)},
            "k_descale has shape (6, 4, 1); it must be (offsets - 1 = 6 or 1, kv_heads = 2 or 1, 1",
        ),
        ({"v_descale": torch.ones(6, 2).double()}, "v_descale is not float32"),
        (
            {"v_mean": torch.ones(6, 2, 32)},
            "v_mean has shape (6, 2, 32); it must be (offsets - 1 = 6 or 1, kv_heads = 2 or 1, 64 ",
        ),
        ({"out_dtype": torch.float32}, "out_dtype is torch.float32; it must be one of"),
        (
            {"k": normal(215, 2, 64).half()},
            "k is not float8_e4m3fn, which this kernel takes; fagen.quantize(k[None]) makes it so",
        ),
        ({"q": torch.ones(119, 4, 40).to(E4M3)}, "in e4m3 it must be a multiple of 16 up to 256"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], said: str) -> None:
    of = packed8()
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, of.tensors, strict=True)) | of.named
    with pytest.raises(ValueError, match=re.escape(said)):
        fagen.attention_varlen(**given | change)


@pytest.mark.parametrize(
    "more", [{"q_descale": ONE}, {"v_mean": ONE}, {"out_dtype": torch.float16}]
)
def test_beside_16_bits_they_are_refused(more: dict[str, Any]) -> None:
    said = "descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors"
    with pytest.raises(ValueError, match=f"{said}.*q is float16"):
        fagen.attention_varlen(*packed(), **more)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"v_layout": "columns"}, 'must be "rows" with lengths = "varlen"'),
        ({"scales": "block"}, 'with lengths = "varlen" there are scales = "head" and "tensor"'),
    ],
)
def test_what_a_schedule_cannot_have_is_said(keys: dict[str, Any], said: str) -> None:
    usual = {"head_dim": 64, "dtype": "e4m3", "mask": "full", "block_m": 128, "block_n": 64}
    with pytest.raises(ScheduleError, match=re.escape(said)):
        Schedule.make(**usual | {"lengths": "varlen"} | keys)


def test_the_committed_ones_are_of_three_head_dims_and_both_masks() -> None:
    slugs = [path.stem for path in registry.schedules("forward") if "_varlen" in path.stem]
    found = [registry.from_slug(slug) for slug in slugs if "e4m3" in slug]
    asked = {(one.attention.head_dim, one.attention.mask) for one in found}
    assert len(found) == len(asked) == 6
    assert {one.fp8.v_layout for one in found} == {"rows"}


# ---- flash_attn_varlen_func ---------------------------------------------------------------------


def test_flash_attention_3s_call_takes_descales_by_kv_head() -> None:
    of = packed8()
    shared = of.named["q_descale"][:, ::2]
    spread = of.named | {"q_descale": shared.repeat_interleave(2, 1)}
    wanted = fagen.attention_varlen(*of.tensors, causal=True, return_lse=True, **spread)
    out, lse = flash_attn_varlen_func(
        *(*of.tensors, 70, 130),
        causal=True,
        return_attn_probs=True,
        **of.named | {"q_descale": shared},
    )
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


def test_its_descales_may_be_left_out_and_are_1() -> None:
    of = packed8()
    out = flash_attn_varlen_func(*of.tensors, 70, 130)
    wanted = fagen.attention_varlen(*of.tensors, **dict.fromkeys(of_ones(), ONE))
    assert torch.equal(out, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k_descale": torch.ones(2, 2)}, "k_descale has shape (2, 2); it must be (batch = 6, kv_"),
        ({"q_descale": torch.ones(6, 4)}, "q_descale has shape (6, 4); it must be (batch = 6, kv_"),
        ({"q": torch.ones(2, 119, 4, 64).to(E4M3)}, "q has 4 dimensions; it must have 3"),
    ],
)
def test_its_wrong_arguments_are_named(change: dict[str, Any], said: str) -> None:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, packed8().tensors, strict=True)) | change
    with pytest.raises(ValueError, match=re.escape(said)):
        flash_attn_varlen_func(**given, max_seqlen_q=70, max_seqlen_k=130)


# ---- traced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_ready_it_compiles_into_one_graph(fresh_dynamo: None, dynamic: bool) -> None:
    def both(*given: Tensor) -> Tensor:
        *tensors, q_descale, k_descale, v_descale = given
        out, lse = fagen.attention_varlen(
            *tensors,
            causal=True,
            return_lse=True,
            q_descale=q_descale * 2,
            k_descale=k_descale,
            v_descale=v_descale,
        )
        return out + lse.T[..., None]

    called(packed8(), causal=True)
    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in (LENGTHS, ((9, 9), (20, 31))):
        of = packed8(lengths)
        given = *of.tensors, *of.named.values()
        assert torch.equal(compiled(*given).nan_to_num(), both(*given).nan_to_num())


# ---- the op, over a C function that stands in for the kernel ------------------------------------


def given_to(call: Callable[..., Any], change: dict[str, Any] | None = None) -> Any:
    of = packed8(head_dim_v=32, by_column=True)
    q, k, v, at_q, at_k = of.tensors
    numbers = {
        name: x if x.dim() == 3 else x[..., None].contiguous() for name, x in of.named.items()
    }
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "scale": 0.1}
    return call(*(named | {"seqused_k": None} | numbers | (change or {})).values())


@pytest.mark.usefixtures("comparable")
def test_opcheck_finds_nothing(stub_op: Callable[[str], StubOp]) -> None:
    of = stub_op(SLUG)
    for one in (of.op, of.alone, op.emulated(SLUG)):
        given_to(lambda *given, one=one: torch.library.opcheck(one, given))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"q_descale": torch.ones(5, 4, 1)},
            "q_descale has shape (5, 4, 1); it must be (offsets - 1 = 6 or 1, heads = 4 or 1, 1)",
        ),
        ({"k_mean": torch.ones(6, 2, 64).half()}, "k_mean is not float32"),
        ({"v": normal(215, 2, 32).bfloat16()}, "v is not float8_e4m3fn"),
    ],
)
def test_the_op_refuses_in_the_same_words_everywhere(
    stub_op: Callable[[str], StubOp], change: dict[str, Any], said: str
) -> None:
    of = stub_op(SLUG)
    names = [one.name for one in of.plan.signature.arguments]
    calls = [
        of.op,
        of.alone,
        op.emulated(SLUG),
        lambda *given: checked(of.plan, dict(zip(names, given, strict=True))),
    ]
    words = {refusal(lambda call=call: given_to(call, change)) for call in calls}
    (found,) = words
    assert found.startswith(f"fagen::{SLUG}: {said}")
