"""Gradients of fagen.attention_varlen on CPU tensors: what they are, who asks, what is refused."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fagen
from fagen.dispatch.select import buildable
from fagen.errors import UntunedWarning
from fagen.flash_attn_interface import flash_attn_varlen_func
from fagen.problem import Problem
from fagen.runtime import backward, op
from tests.varlen_helpers import packed

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

CLOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
Leaves = tuple[Tensor, Tensor, Tensor]


def attended(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Out (S, H, Dv) and the log-sum-exp (H, S) of one sequence, by nothing but torch."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ keys.mT * q.shape[2] ** -0.5
    rows, columns = scores.shape[1:]
    row, key = torch.arange(rows)[:, None], torch.arange(columns)
    seen = key <= row + columns - rows if causal else torch.ones(rows, columns, dtype=torch.bool)
    blind = ~seen.any(1)
    # a row that sees no key must not spoil what autograd makes of the others
    scores = scores.masked_fill(~seen & ~blind[:, None], -math.inf)
    out = (scores.softmax(-1) @ values).masked_fill(blind[:, None], 0)
    return out.transpose(0, 1), scores.logsumexp(-1).masked_fill(blind, 0)


def exact(
    tensors: Leaves,
    offsets: tuple[Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    used: list[int] | None = None,
) -> Leaves:
    """Gradients by torch's own autograd in fp64, sequence by sequence; zeros in rows of none."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    total = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
    at_q, at_k = (pairwise(at.tolist()) for at in offsets)
    for number, ((top, bottom), (first, last)) in enumerate(zip(at_q, at_k, strict=True)):
        last = last if used is None else first + used[number]
        if top == bottom or first == last:
            continue
        of = q[top:bottom], k[first:last], v[first:last]
        out, lse = attended(*of, causal=causal)
        total = total + (out * dout[top:bottom].double()).sum()
        if dlse is not None:
            total = total + (lse * dlse[:, top:bottom].double()).sum()
    return torch.autograd.grad(total, (q, k, v))


def leaves(*given: Tensor) -> Leaves:
    q, k, v = (x.detach().clone().requires_grad_() for x in given)
    return q, k, v


def near(found: Tensor | None, fine: Tensor) -> bool:
    assert found is not None and found.is_contiguous()
    close = CLOSE[found.dtype] * (1 + float(fine.abs().max() if fine.numel() else 0))
    return bool(((found.double() - fine).abs() <= close).all())


# ---- what they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_they_are_those_of_each_sequence(dtype: torch.dtype, causal: bool) -> None:
    *qkv, at_q, at_k = packed(dtype=dtype, gap=2)
    tensors = leaves(*qkv)
    out, lse = fagen.attention_varlen(*tensors, at_q, at_k, causal=causal, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    kept = lse.masked_fill(lse == -math.inf, 0)
    torch.autograd.backward((out, kept), (dout, dlse))
    fine = exact(tensors, (at_q, at_k), dout, dlse, causal=causal)
    for tensor, right in zip(tensors, fine, strict=True):
        assert near(tensor.grad, right)


def test_v_may_have_a_head_dim_of_its_own() -> None:
    *qkv, at_q, at_k = packed(head_dim=40, head_dim_v=24)
    tensors = leaves(*qkv)
    with pytest.warns(
        UntunedWarning, match="gradients of .*varlen: bwd_fp16_d40v24_full_.*_varlen"
    ):
        out = fagen.attention_varlen(*tensors, at_q, at_k)
    assert isinstance(out, Tensor)
    out.backward(torch.ones_like(out))
    fine = exact(tensors, (at_q, at_k), torch.ones_like(out))
    for tensor, right in zip(tensors, fine, strict=True):
        assert near(tensor.grad, right)


@pytest.mark.parametrize("which", range(3))
def test_only_what_is_asked_for_has_one(which: int) -> None:
    *qkv, at_q, at_k = packed()
    qkv[which].requires_grad_()
    out = fagen.attention_varlen(*qkv, at_q, at_k, causal=True)
    assert isinstance(out, Tensor)
    out.backward(torch.ones_like(out))
    fine = exact((qkv[0], qkv[1], qkv[2]), (at_q, at_k), torch.ones_like(out), causal=True)
    assert near(qkv[which].grad, fine[which])
    assert [x.grad is None for x in qkv] == [i != which for i in range(3)]


def test_the_log_sum_exp_alone_has_some() -> None:
    *qkv, at_q, at_k = packed(((9, 30), (40, 7)))
    tensors = leaves(*qkv)
    _, lse = fagen.attention_varlen(*tensors, at_q, at_k, return_lse=True)
    lse.sum().backward()
    zeros = torch.zeros_like(tensors[0]).detach()
    fine = exact(tensors, (at_q, at_k), zeros, torch.ones_like(lse))
    for tensor, right in zip(tensors, fine, strict=True):
        assert near(tensor.grad, right)


def test_keys_that_are_not_used_have_zeros_whatever_they_hold() -> None:
    *qkv, at_q, at_k = packed()
    used = [5, 3, 20, 0, 0, 32]
    unused = torch.ones(len(qkv[1]), dtype=torch.bool)
    for begin, count in zip(at_k.tolist()[:-1], used, strict=True):
        unused[begin : begin + count] = False
    qkv[1][unused], qkv[2][unused] = math.nan, math.nan
    tensors = leaves(*qkv)
    out = fagen.attention_varlen(
        *tensors, at_q, at_k, seqused_k=torch.tensor(used, dtype=torch.int32), causal=True
    )
    assert isinstance(out, Tensor)
    out.sum().backward()
    clean = leaves(tensors[0], *(x.detach().masked_fill(unused[:, None, None], 0) for x in qkv[1:]))
    fine = exact(clean, (at_q, at_k), torch.ones_like(out), causal=True, used=used)
    for tensor, right in zip(tensors, fine, strict=True):
        assert near(tensor.grad, right)
    for tensor in tensors[1:]:
        assert tensor.grad is not None and not tensor.grad[unused].any()


def test_a_neighbours_nan_does_not_leak_and_rows_of_none_get_zeros() -> None:
    lengths = ((33, 40), (9, 9), (20, 70))
    *qkv, at_q, at_k = packed(lengths, gap=4)
    right = leaves(*qkv)
    out = fagen.attention_varlen(*right, at_q, at_k, causal=True)
    assert isinstance(out, Tensor)
    out.sum().backward()
    of = slice(int(at_q[1]), int(at_q[2])), slice(int(at_k[1]), int(at_k[2]))
    outside = [torch.ones(len(x), dtype=torch.bool) for x in qkv]
    for mask, place in zip(outside, (of[0], of[1], of[1]), strict=True):
        mask[place] = False
    poisoned = leaves(
        *(x.masked_fill(m[:, None, None], math.nan) for x, m in zip(qkv, outside, strict=True))
    )
    found = fagen.attention_varlen(*poisoned, at_q, at_k, causal=True)
    assert isinstance(found, Tensor)
    found.backward(torch.ones_like(found))
    for a, b, place in zip(poisoned, right, (of[0], of[1], of[1]), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad[place], b.grad[place]) and b.grad[place].any()
        assert not a.grad[:4].any() and not a.grad[-4:].any()


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 5)], [(4, 0)], [(0, 0), (0, 0)]])
def test_where_there_is_nothing_to_do_there_are_zeros(lengths: list[tuple[int, int]]) -> None:
    *qkv, at_q, at_k = packed(lengths)
    tensors = leaves(*qkv)
    fagen.attention_varlen(*tensors, at_q, at_k).sum().backward()  # type: ignore[union-attr]
    assert all(x.grad is not None and not x.grad.any() for x in tensors)


@pytest.mark.parametrize(
    "used",
    [
        lambda out: out.sum(),  # a gradient whose strides are all 0
        lambda out: (out.transpose(0, 1).contiguous() * 1.0).sum(),
        lambda out: out[..., 1:].sum() + out[..., :1].sum(),
    ],
)
def test_a_gradient_of_the_output_may_lie_anyhow(used: Callable[[Any], Tensor]) -> None:
    *qkv, at_q, at_k = packed()
    tensors = leaves(*qkv)
    out = fagen.attention_varlen(*tensors, at_q, at_k)
    used(out).backward()
    fine = exact(tensors, (at_q, at_k), torch.ones_like(tensors[0]))
    for tensor, right in zip(tensors, fine, strict=True):
        assert near(tensor.grad, right)


def test_flash_attention_3s_call_has_the_same() -> None:
    *qkv, at_q, at_k = packed()
    ours, theirs = leaves(*qkv), leaves(*qkv)
    fagen.attention_varlen(*ours, at_q, at_k, causal=True).sum().backward()  # type: ignore[union-attr]
    out = flash_attn_varlen_func(*theirs, at_q, at_k, 70, 130, causal=True)
    assert isinstance(out, Tensor)
    out.sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


# ---- who asks -----------------------------------------------------------------------------------


def test_a_call_that_needs_none_never_asks_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("no gradient is needed")

    monkeypatch.setattr(backward, "kernel_of_gradients", asked)
    *qkv, at_q, at_k = packed()
    tensors = leaves(*qkv)
    with torch.no_grad():
        assert not fagen.attention_varlen(*tensors, at_q, at_k).requires_grad  # type: ignore[union-attr]
    assert not fagen.attention_varlen(*qkv, at_q, at_k).requires_grad  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="no gradient"):
        fagen.attention_varlen(*tensors, at_q, at_k)


def test_an_activation_may_be_computed_again() -> None:
    *qkv, at_q, at_k = packed()
    once, again = leaves(*qkv), leaves(*qkv)
    fagen.attention_varlen(*once, at_q, at_k).sum().backward()  # type: ignore[union-attr]
    checkpoint(fagen.attention_varlen, *again, at_q, at_k, use_reentrant=False).sum().backward()
    for a, b in zip(once, again, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_offsets_that_were_changed_meanwhile_are_noticed() -> None:
    *qkv, at_q, at_k = packed()
    out = fagen.attention_varlen(*leaves(*qkv), at_q, at_k)
    at_q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[union-attr]


def test_compiled_with_open_sizes_it_is_one_graph(fresh_dynamo: None) -> None:
    def loss(*given: Tensor) -> Tensor:
        return fagen.attention_varlen(*given, causal=True).float().sum()  # type: ignore[union-attr]

    loss(*leaves(*packed()[:3]), *packed()[3:])
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (((5, 5), (0, 7), (40, 40)), ((9, 9), (20, 31), (1, 3), (2, 2))):
        *qkv, at_q, at_k = packed(lengths)
        tensors = leaves(*qkv)
        compiled(*tensors, at_q, at_k).backward()
        fine = exact(tensors, (at_q, at_k), torch.ones_like(tensors[0]), causal=True)
        for tensor, right in zip(tensors, fine, strict=True):
            assert near(tensor.grad, right)


@pytest.mark.parametrize("used", [None, torch.tensor([5, 3, 20, 0, 0, 32], dtype=torch.int32)])
def test_opcheck(used: Tensor | None) -> None:
    *qkv, at_q, at_k = packed()
    tensors = leaves(*qkv)
    fagen.attention_varlen(*tensors, at_q, at_k)
    slug = "fwd_fp16_d64_full_m192n128_varlen_q2"
    with_grad = getattr(torch.ops.fagen, f"{slug}_with_grad").default
    checked = torch.library.opcheck(with_grad, (*tensors, at_q, at_k, 0.125, used))
    assert set(checked.values()) == {"SUCCESS"}
    out, lse = with_grad(*qkv, at_q, at_k, 0.125, used)
    gradients = op.emulated("bwd_fp16_d64_full_m128n128_varlen")
    given = (torch.ones_like(out), *qkv, at_q, at_k, out, lse, 0.125, None, used)
    assert set(torch.library.opcheck(gradients, given).values()) == {"SUCCESS"}


# ---- which kernel, and what is refused ----------------------------------------------------------


def test_the_committed_kernels_serve_and_deterministic_ones_are_derived() -> None:
    def usual(deterministic: bool) -> tuple[str, bool]:
        problem = Problem(
            "bf16", 128, 128, "causal", "bf16", "", 0, "backward", deterministic, "varlen"
        )
        found = buildable(problem)
        return found.schedules[0].slug, found.derived

    assert usual(False) == ("bwd_bf16_d128_causal_m64n128_varlen", False)
    assert usual(True) == ("bwd_bf16_d128_causal_m64n128_varlen_det", True)


def test_gradients_of_gradients_are_refused() -> None:
    *qkv, at_q, at_k = packed()
    q, k, v = leaves(*qkv)
    out = fagen.attention_varlen(q, k, v, at_q, at_k)
    assert isinstance(out, Tensor)
    with pytest.raises(
        ValueError, match="requires a gradient, and second derivatives are not supported"
    ):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_torch_func_is_refused() -> None:
    q, k, v, at_q, at_k = packed()
    said = (
        r"this op has no backward: fagen\.attention_varlen, or .*, has gradients by autograd .*func"
    )
    with pytest.raises(ValueError, match=said):
        torch.func.grad(lambda t: fagen.attention_varlen(t, k, v, at_q, at_k).float().sum())(q)  # type: ignore[union-attr]


def test_head_dims_that_no_kernel_has_are_refused_with_what_to_do() -> None:
    *_, at_q, at_k = packed(((8, 8),))
    q, v = (torch.randn(8, 1, d).half().requires_grad_() for d in (256, 192))
    said = r"no kernel computes those of float16, head_dim 256 and 192 \(V\), full, backward pass"
    with pytest.raises(ValueError, match=said), pytest.warns(UntunedWarning):
        fagen.attention_varlen(q, q, v, at_q, at_k)
    with torch.no_grad():
        fagen.attention_varlen(q, q, v, at_q, at_k)
