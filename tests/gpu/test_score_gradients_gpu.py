"""Gradients through scores and of sinks on a Hopper GPU, beside autograd in fp64."""

import math

import pytest
import torch
from torch import Tensor

import fagen
from fagen.kinds.backward.oracle import gradients
from fagen.vocab import MASKS, SCORES
from tests.gpu.helpers import graph_of_passes

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::fagen.UntunedWarning")]

CAP = 3.0


def tensors(dim: int, dtype: torch.dtype, queries: int = 700, keys: int = 900) -> list[Tensor]:
    dice = torch.Generator("cuda").manual_seed(dim)
    shapes = [(2, rows, heads, dim) for rows, heads in ((queries, 8), (keys, 2), (keys, 2))]
    made = [torch.randn(shape, generator=dice, device="cuda") for shape in shapes]
    made[0] *= 3
    return [x.to(dtype).requires_grad_() for x in made]


def near(found: list[Tensor], dout: Tensor, sinks: Tensor | None) -> bool:
    """Whether gradients of leaves are those of a causal call with a cap of CAP."""
    leaves = [x.detach() for x in found[:3]]
    how = dict(mask=MASKS["causal"], score=SCORES["softcap"].bound({"softcap": CAP}))
    exact = gradients(dout, *leaves, **how, scale=leaves[0].shape[3] ** -0.5, sinks=sinks)[2:]
    most = 2e-3 if found[0].dtype == torch.float16 else 1e-2
    return all(
        bool((x.grad.double() - y).norm() < (most if x.dim() > 1 else 0.05) * y.norm())
        for x, y in zip(found, exact, strict=True)  # rows' parts of sinks differ in sign
        if x.grad is not None
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("sink", [None, torch.float32, torch.bfloat16])
def test_softcap_and_sinks_have_the_gradients_of_fp64(dim, dtype, sink):
    leaves = tensors(dim, dtype)
    dout = torch.randn_like(leaves[0])
    sinks = None
    if sink is not None:
        sinks = torch.tensor([1.0, -2.0, 0.5, 4.0] * 2, device="cuda").to(sink).requires_grad_()
        leaves.append(sinks)
    bits = []
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        out = fagen.attention(*leaves[:3], causal=True, softcap=CAP, sinks=sinks)
        out.backward(dout)
        assert near(leaves, dout, None if sinks is None else sinks.detach())
        bits.append([x.grad for x in leaves[1:]])
    assert all(map(torch.equal, *bits))  # but dq, which is added up in any order


def test_varlen_sequences_have_them_and_of_a_text():
    q, k, v = tensors(128, torch.bfloat16)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    at = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (700, 900)]
    text = dict(score="cap * tanh(score / cap)", cap=CAP)
    dout = torch.randn_like(q)
    fagen.attention_varlen(*flat, *at, causal=True, **text).backward(dout.flatten(0, 1))
    for leaf, own in zip((q, k, v), flat, strict=True):
        leaf.grad = own.grad.unflatten(0, (2, -1))
    assert near([q, k, v], dout, None)


def test_rows_without_keys_and_what_is_not_taken_leave_no_nan():
    q, k, v = tensors(64, torch.float16, 900, 700)
    sinks = torch.zeros(8, device="cuda", requires_grad=True)
    text = "where(score > 0.0, log(1.0 + score), 0.5 * score)"
    out, lse = fagen.attention(q, k, v, causal=True, score=text, sinks=sinks, return_lse=True)
    (out.float().sum() + lse.sum()).backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v, sinks))
    assert bool((q.grad[:, :200] == 0).all())
    alone = torch.tensor([-math.inf] * 8, device="cuda", requires_grad=True)
    fagen.attention(q, k, v, causal=True, sinks=alone).float().sum().backward()
    assert bool((alone.grad == 0).all())


def test_both_passes_replay_in_a_graph():
    leaves = tensors(128, torch.bfloat16)
    sinks = torch.linspace(-2, 2, 8, device="cuda").requires_grad_()
    dout = torch.randn_like(leaves[0])

    def step():
        fagen.attention(*leaves, causal=True, softcap=CAP, sinks=sinks).backward(dout)

    graph = graph_of_passes(step, [*leaves, sinks])
    with torch.no_grad():
        for leaf in (*leaves, sinks):
            leaf.copy_(torch.randn_like(leaf) * 2)
    graph.replay()
    assert near([*leaves, sinks], dout, sinks.detach())
