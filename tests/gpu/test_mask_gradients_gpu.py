"""Gradients under masks on a Hopper GPU, beside autograd in fp64 through lambdas of ours."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from tests.gpu.helpers import graph_of_passes
from tests.tensors import normal
from tests.test_mask_calls import BACKWARD, dense, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]
LENGTHS = (70, 70), (300, 700), (700, 300)


def made(queries: int, keys: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (2, queries, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim)
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def there(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}


def near(found: Any, expected: Any, dtype: torch.dtype) -> None:
    most = 4e-3 if dtype == torch.float16 else 3e-2
    for ours, true in zip(found, expected, strict=True):
        off = (ours.double().cpu() - true).abs().max()
        assert off <= most * true.abs().max().clamp(min=1), off


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
@pytest.mark.parametrize(("call", "sees"), BACKWARD, ids=range(len(BACKWARD)))
def test_they_are_those_of_what_is_seen(call, sees, dim, dtype, deterministic):
    for lengths in LENGTHS:
        cpu = made(*lengths, dim, dtype)
        exact = [x.double().requires_grad_() for x in cpu]
        blind = dense(*exact, sees)[1] == -torch.inf

        def shown(b: Any, i: Any, j: Any, blind: Tensor = blind) -> Any:
            return sees(b, i, j) | (blind[:, :1, :, None] & (j == 0))

        out, lse = dense(*exact, shown)
        expected = gradients(out, lse.masked_fill(blind, -torch.inf), exact)
        leaves = [x.cuda().requires_grad_() for x in cpu]
        how = dict(return_lse=True, deterministic=deterministic)
        found = fagen.attention(*leaves, **there(call), **how)
        near(gradients(*found, leaves), expected, dtype)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_documents_are_those_of_their_own_calls(dim):
    """Varlen sequences of documents by tables, some of one row; and windows across them."""
    ends = torch.tensor([0, 1, 130, 131, 400, 700, 1_000], device="cuda")
    row = torch.arange(1_000, device="cuda")
    which = torch.bucketize(row, ends[1:], right=True)
    first, last = (ends[which + more].int() for more in (0, 1))
    leaves = [x[0].cuda().requires_grad_() for x in made(1_000, 1_000, dim, torch.float16)]
    dout = torch.randn_like(leaves[0])
    at = torch.tensor([0, 1_000], dtype=torch.int32, device="cuda")
    for window in (None, (99, 3)):
        given = dict(mask="document", first=first, last=last, window=window)
        whole = fagen.attention_varlen(*leaves, at, **given)
        found = torch.autograd.grad(whole, leaves, dout)
        alone = fagen.attention_varlen(*leaves, ends.int(), window=window)
        theirs = torch.autograd.grad(alone, leaves, dout)
        near(found, [x.double().cpu() for x in theirs], torch.float16)


def test_tables_that_fall_hang_nothing():
    q, k, v = (x.cuda().requires_grad_() for x in made(2_000, 2_000, 64, torch.float16))
    dice = torch.Generator("cuda").manual_seed(0)
    how = dict(generator=dice, device="cuda", dtype=torch.int32)
    for deterministic in (False, True):
        first, last = (torch.randint(-99, 2_100, (2, 2_000), **how) for _ in range(2))
        given = dict(mask="document", first=first, last=last, deterministic=deterministic)
        fagen.attention(q, k, v, **given).sum().backward()
        torch.cuda.synchronize()


def test_both_passes_replay_in_a_graph():
    leaves = [x.cuda().requires_grad_() for x in made(700, 700, 128, torch.bfloat16)]
    dout = torch.randn_like(leaves[0])

    def step() -> None:
        fagen.attention(*leaves, causal=True, window=100).backward(dout)

    graph = graph_of_passes(step, leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    found = [x.grad.clone() for x in leaves]
    for leaf in leaves:
        leaf.grad = None
    step()
    near(found, [x.grad.double().cpu() for x in leaves], torch.bfloat16)
