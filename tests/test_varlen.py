"""fagen.attention_varlen on CPU tensors: what it takes and gives, and how it refuses the rest."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.dispatch import tables
from fagen.dispatch.rows import Row
from fagen.errors import UntunedWarning
from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.runtime import op
from fagen.runtime.checks import checked
from tests.fresh import asked_for
from tests.op_helpers import refusal
from tests.stubs import StubOp
from tests.tensors import normal
from tests.varlen_helpers import LENGTHS, exact, offsets, packed

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

SLUG = "fwd_bf16_d64v32_causal_m64n48_varlen"  # of no file
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def called(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    out, lse = fagen.attention_varlen(*given, return_lse=True, **named)
    return out, lse


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_sequence_attends_to_itself(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, at_q, at_k = packed(dtype=dtype)
    out, lse = called(q, k, v, at_q, at_k, causal=causal)
    assert (out.dtype, out.shape) == (dtype, (119, 4, 64))
    assert (lse.dtype, lse.shape) == (torch.float32, (4, 119))
    wanted, wanted_lse = exact(q, k, v, at_q, at_k, causal=causal)
    torch.testing.assert_close(out.double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    assert torch.equal(out, fagen.attention_varlen(q, k, v, at_q, at_k, causal=causal))  # type: ignore[arg-type]


def test_it_is_what_the_committed_schedule_computes_of_each_sequence_alone() -> None:
    q, k, v, at_q, at_k = packed(((70, 200), (300, 300)), head_dim=128)
    out, lse = called(q, k, v, at_q, at_k, causal=True)
    of = plan(Schedule.from_slug("fwd_fp16_d128_causal_m128n128_varlen"))
    for rows, keys in ((slice(0, 70), slice(0, 200)), (slice(70, 370), slice(200, 500))):
        alone, lse_alone = emulate(of, q[None, rows], k[None, keys], v[None, keys], 128**-0.5)
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], lse_alone[0])


def test_without_offsets_of_keys_there_are_as_many_as_queries() -> None:
    q, k, v, at_q, _ = packed([(length, length) for length in (9, 0, 33)])
    wanted = fagen.attention_varlen(q, k, v, at_q, at_q, causal=True)
    assert torch.equal(fagen.attention_varlen(q, k, v, at_q, causal=True), wanted)  # type: ignore[arg-type]


def test_scale_is_that_of_the_scores() -> None:
    q, k, v, at_q, at_k = packed()
    out = fagen.attention_varlen(q, k, v, at_q, at_k, scale=0.25)
    twice = fagen.attention_varlen(q * 2, k, v, at_q, at_k)
    assert torch.equal(out, twice)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_of_seqused_k_keys_alone_are_seen(causal: bool) -> None:
    q, k, v, at_q, at_k = packed()
    used = torch.tensor([5, 3, 20, 0, 0, 32], dtype=torch.int32)
    kept, of = [], []
    for begin, count in zip(at_k.tolist()[:-1], used.tolist(), strict=True):
        kept += range(begin, begin + count)
        of.append(count)
    wanted = called(q, k[kept], v[kept], at_q, offsets(of), causal=causal)
    unused = torch.ones(len(k), dtype=torch.bool)
    unused[kept] = False
    k[unused], v[unused] = math.nan, math.nan
    found = called(q, k, v, at_q, at_k, seqused_k=used, causal=causal)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    more = torch.full_like(used, 1_000)  # than there are
    q, k, v, at_q, at_k = packed()
    found, wanted = (
        called(q, k, v, at_q, at_k, seqused_k=more, causal=causal),
        called(q, k, v, at_q, at_k, causal=causal),
    )
    assert torch.equal(found[0], wanted[0])


def test_nothing_is_seen_of_neighbours_nor_of_what_lies_around() -> None:
    q, k, v, at_q, at_k = packed(gap=6)
    right, right_lse = called(q, k, v, at_q, at_k, causal=True)
    begin, end = at_k[5].item(), at_k[6].item()
    rows = slice(int(at_q[5]), int(at_q[6]))
    outside = torch.ones(len(k), dtype=torch.bool)
    outside[begin:end] = False
    k[outside], v[outside] = math.nan, math.inf
    out, lse = called(q, k, v, at_q, at_k, causal=True)
    assert torch.equal(out[rows], right[rows]) and torch.equal(lse[:, rows], right_lse[:, rows])
    assert out[rows].isfinite().all()


def test_rows_that_see_no_key_are_zeros() -> None:
    q, k, v, at_q, at_k = packed(((3, 0), (7, 4)))
    out, lse = called(q, k, v, at_q, at_k, causal=True)
    assert not out[:6].any() and (lse[:, :6] == -math.inf).all()
    assert out[6:].any() and lse[:, 6:].isfinite().all()


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 5)], [(4, 0)], [(0, 0), (0, 0)]])
def test_there_may_be_nothing_to_do(lengths: list[tuple[int, int]]) -> None:
    q, k, v, at_q, at_k = packed(lengths)
    out, lse = called(q, k, v, at_q, at_k)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (4, len(q)) and (lse == -math.inf).all()


def test_there_may_be_no_sequence() -> None:
    q, k, v, *_ = packed([(0, 0)])
    assert called(q, k, v, offsets([]))[0].shape == (0, 4, 64)


def test_many_sequences_are_one_as_well_as_another() -> None:
    lengths = [(1 + i * 37 % 5, 1 + i * 11 % 7) for i in range(1_100)]
    q, k, v, at_q, at_k = packed(lengths, head_dim=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        out, _ = called(q, k, v, at_q, at_k, causal=True)
    wanted, _ = exact(q, k, v, at_q, at_k, causal=True)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)


def test_offsets_that_lead_out_of_the_tensors_are_cut_off() -> None:
    q, k, v, at_q, at_k = packed(((9, 20), (11, 30)))
    wanted = called(q, k, v, at_q, at_k)
    at_q[2], at_k[0], at_k[2] = 2_000, -5, 1 << 30
    found = called(q, k, v, at_q, at_k)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    at_k[0], at_k[2] = -(2**31), 2**31 - 1
    found = called(q, k, v, at_q, at_k)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_layouts_are_free() -> None:
    q, k, v, at_q, at_k = packed()
    right = fagen.attention_varlen(q, k, v, at_q, at_k)
    one = torch.cat((k, v), 1)  # slices of one buffer, heads before rows
    one = one.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(fagen.attention_varlen(q, one[:, :2], one[:, 2:], at_q, at_k), right)  # type: ignore[arg-type]


def test_hints_of_the_longest_change_nothing() -> None:
    q, k, v, at_q, at_k = packed()
    right = fagen.attention_varlen(q, k, v, at_q, at_k)
    hinted = fagen.attention_varlen(q, k, v, at_q, at_k, max_seqlen_q=1, max_seqlen_k=1)
    assert torch.equal(hinted, right)  # type: ignore[arg-type]


# ---- which schedule -----------------------------------------------------------------------------


def test_a_problem_that_nobody_tuned_has_a_derived_kernel_which_is_said_once() -> None:
    q, k, v, at_q, at_k = packed(head_dim=72, head_dim_v=40)
    with pytest.warns(UntunedWarning, match=r"head_dim 72 and 40 \(V\), full, varlen: fwd_fp16_"):
        out, _ = called(q, k, v, at_q, at_k)
    wanted, _ = exact(q, k, v, at_q, at_k)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(q, k, v, at_q, at_k)
        called(*packed())  # there is a file for it


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"q": normal(1, 9, 4, 64)},
            "q has 4 dimensions; it must have 3: (total, heads, head_dim)",
        ),
        ({"v": normal(9, 64)}, "v has 2 dimensions; it must have 3"),
        ({"cu_seqlens_q": torch.zeros(1, 7)}, "cu_seqlens_q has shape (1, 7); it must be (batch +"),
        ({"cu_seqlens_k": torch.zeros(0)}, "cu_seqlens_k has shape (0,); it must be (batch + 1)"),
        (
            {"cu_seqlens_k": offsets([1, 2])},
            "cu_seqlens_k has shape (3); it must be (offsets = 7)",
        ),
        (
            {"cu_seqlens_q": torch.arange(7)},
            "cu_seqlens_q is not int32, which this kernel takes; cu_seqlens_q.to(torch.int32) co",
        ),
        (
            {"seqused_k": torch.ones(7, dtype=torch.int32)},
            "seqused_k has shape (7); it must be (offsets - 1 = 6)",
        ),
        ({"k": normal(215, 3, 64).half()}, "v has shape (215, 2, 64); it must be (total_k = 215"),
        ({"q": normal(119, 5, 64).half()}, "heads = 5 must be a multiple of kv_heads = 2"),
        (
            {"k": normal(215, 2, 64)},
            "k is not float16, which this kernel takes; k.to(torch.float16",
        ),
        ({"q": normal(119, 4, 64)}, "q is float32; use fp16 or bf16: q.to(torch.bfloat16)"),
        (
            {"q": normal(119, 4, 64).to(torch.float8_e4m3fn)},
            "q_descale is missing: a number of an e4m3 tensor is its value times its descale",
        ),
        ({"q": normal(119, 4, 60).half()}, "q and k have head_dim 60; it must be a multiple of 8"),
        ({"scale": 0.0}, "scale is 0; it must be finite and above 0"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], said: str) -> None:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given: dict[str, Any] = dict(zip(names, packed(), strict=True))
    with pytest.raises(ValueError, match=re.escape(said)):
        fagen.attention_varlen(**given | change)


# ---- traced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_ready_it_compiles_into_one_graph(fresh_dynamo: None, dynamic: bool) -> None:
    def twice(*given: Tensor) -> Tensor:
        q, *rest = given
        out, lse = fagen.attention_varlen(q * 2, *rest, causal=True, return_lse=True)
        return out + lse.T[..., None]

    called(*packed(), causal=True)
    compiled = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in (LENGTHS, ((9, 9), (20, 31))):
        given = packed(lengths)
        assert torch.equal(compiled(*given).nan_to_num(), twice(*given).nan_to_num())


@pytest.mark.parametrize("gradient", [False, True])
def test_prepared_a_call_finds_its_kernels(
    gradient: bool, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = packed()
    of = dict(dtype=given[0].dtype, head_dim=64, causal=True, device="cpu")
    slug = fagen.prepare_varlen(**of, gradient=gradient)
    assert "_varlen" in slug and slug == fagen.prepare_varlen(**of)
    monkeypatch.setattr(op, "ready", None)  # nothing is readied any more
    q, k, v, *offsets = given
    q.requires_grad_(gradient)
    compiled = torch.compile(fagen.attention_varlen, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, *offsets, causal=True)
    assert out.requires_grad == gradient


# ---- which kernel -------------------------------------------------------------------------------

OTHER = "fwd_fp16_d64_causal_m128n64_varlen"
OTHER_BY = "bwd_fp16_d64_causal_m64n64_varlen"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's table with kernels of packed sequences, which are of no file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tables.table_at.cache_clear()
    listed = [OTHER, OTHER_BY, f"{OTHER_BY}_det", "fwd_e4m3_d64_full_m64n64_varlen"]
    rows = [Row("NVIDIA H200", slug) for slug in listed]
    tables.update(tmp_path / "fagen" / tables.NAME, rows)
    yield
    tables.table_at.cache_clear()


def test_a_row_of_a_table_says_which_kernel_serves(table: None) -> None:
    given = packed(head_dim=64)
    out = fagen.attention_varlen(*given, causal=True)
    assert torch.equal(out, fagen.attention_varlen(*given, causal=True, schedule=OTHER))
    of: dict[str, Any] = {"dtype": "fp16", "head_dim": 64}
    assert fagen.prepare_varlen(**of, causal=True, device="cpu") == OTHER
    assert fagen.prepare_varlen(**of, device="cpu") == "fwd_fp16_d64_full_m192n128_varlen_q2"
    of["dtype"] = "e4m3"
    for out_dtype in ("bf16", "fp16"):  # one row is for both types of O
        slug = fagen.prepare_varlen(**of, out_dtype=out_dtype, device="cpu")
        assert slug.startswith("fwd_e4m3_d64_full_m64n64_varlen")
        assert slug.endswith("_ofp16") == (out_dtype == "fp16")
    found = fagen.pick(dtype="fp16", head_dim=64, causal=True, lengths="varlen")
    assert found.slug == OTHER and found.why.endswith("for any number of keys on NVIDIA H200")


def test_a_row_of_a_table_says_which_kernel_computes_gradients(table: None) -> None:
    q, *rest = packed(head_dim=64)
    fagen.attention_varlen(q.requires_grad_(), *rest, causal=True).sum().backward()
    assert asked_for("backward") == {OTHER_BY} and q.grad is not None
    kind: dict[str, Any] = {"lengths": "varlen", "kind": "backward", "causal": True}
    for deterministic, slug in ((False, OTHER_BY), (True, f"{OTHER_BY}_det")):
        more = kind | {"deterministic": deterministic}
        assert fagen.pick(dtype="fp16", head_dim=64, **more).slug == slug


# ---- ahead of time ------------------------------------------------------------------------------


def test_what_no_kernel_computes_is_not_prepared() -> None:
    with pytest.raises(ValueError, match="dtype is float16"):
        fagen.prepare_varlen(dtype="fp16", head_dim=64, out_dtype="bf16", device="cpu")
    with pytest.raises(ValueError, match="head_dim 20"):
        fagen.prepare_varlen(dtype="fp16", head_dim=20, device="cpu")


# ---- the op, over a C function that stands in for the kernel ------------------------------------


def given_to(slug_op: Callable[..., Any], change: dict[str, Any] | None = None) -> Any:
    q, k, v, at_q, at_k = packed(dtype=torch.bfloat16, head_dim_v=32)
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "scale": 0.1}
    named |= {"seqused_k": None} | (change or {})
    return slug_op(*named.values())


def test_opcheck_finds_nothing(stub_op: Callable[[str], StubOp]) -> None:
    of = stub_op(SLUG)
    for one in (of.op, of.alone, op.emulated(SLUG)):
        given_to(lambda *given, one=one: torch.library.opcheck(one, given))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cu_seqlens_k": offsets([1])}, "cu_seqlens_k has shape (2); it must be (offsets = 7)"),
        ({"seqused_k": offsets([1])}, "seqused_k has shape (2); it must be (offsets - 1 = 6)"),
        ({"q": normal(119, 4, 64)}, "q is not bfloat16"),
        (
            {"k": normal(215, 2, 64).bfloat16().transpose(0, 2).contiguous().transpose(0, 2)},
            "k has stride 430 in dimension 2, which must be 1",
        ),
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


# ---- queries of which a part is used ------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [None, (7, 0, 40, 3)])
def test_rows_behind_the_used_queries_are_nobodys(
    causal: bool, keys: tuple[int, ...] | None
) -> None:
    at_q, at_k = (
        torch.tensor(x, dtype=torch.int32) for x in ((0, 9, 20, 20, 60), (0, 12, 50, 90, 95))
    )
    used = torch.tensor((5, 0, 3, 99), dtype=torch.int32)  # of 9, 11, 0 and 40
    seen = None if keys is None else torch.tensor(keys, dtype=torch.int32)
    q, k, v, dout = (
        normal(*shape, seed=i, dtype=torch.float16)
        for i, shape in enumerate(((60, 4, 32), (95, 2, 32), (95, 2, 32), (60, 4, 32)))
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    more: dict[str, Any] = dict(causal=causal, seqused_k=seen, return_lse=True)
    out, lse = fagen.attention_varlen(*leaves, at_q, at_k, seqused_q=used, **more)
    gradients = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    wanted = [torch.zeros_like(x) for x in (out, *leaves)]
    wanted_lse = torch.full_like(lse, -torch.inf)
    for i in range(4):
        rows = slice(int(at_q[i]), int(at_q[i] + min(used[i], at_q[i + 1] - at_q[i])))
        columns = slice(int(at_k[i]), int(at_k[i + 1]))
        alone = [
            x[s].clone().requires_grad_()
            for x, s in zip((q, k, v), (rows, columns, columns), strict=True)
        ]
        one = [torch.tensor((0, len(x)), dtype=torch.int32) for x in alone[:2]]
        of = {"seqused_k": None if seen is None else seen[i : i + 1]}
        found, found_lse = fagen.attention_varlen(*alone, *one, **more | of)
        made = torch.autograd.grad(
            (found, found_lse), alone, (dout[rows], torch.ones_like(found_lse))
        )
        for into, x, s in zip(wanted, (found, *made), (rows, rows, columns, columns), strict=True):
            into[s] = x.detach()
        wanted_lse[:, rows] = found_lse.detach()
    for x, y in zip((out, lse, *gradients), (wanted[0], wanted_lse, *wanted[1:]), strict=True):
        assert torch.equal(x.detach(), y)


def test_used_queries_have_descales_of_their_sequences() -> None:
    at = torch.tensor((0, 20, 50), dtype=torch.int32)
    used = torch.tensor((11, 30), dtype=torch.int32)
    q, k, v = (normal(50, 2, 32, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    sizes = torch.tensor(((0.5, 2.0), (4.0, 0.25)))
    of = {f"{name}_descale": sizes for name in "qkv"}
    whole = fagen.attention_varlen(q, k, v, at, **of)
    part = fagen.attention_varlen(q, k, v, at, seqused_q=used, **of)
    assert torch.equal(part[:11], whole[:11]) and torch.equal(part[20:], whole[20:])  # type: ignore[index]
    assert not part[11:20].any()  # type: ignore[index]
