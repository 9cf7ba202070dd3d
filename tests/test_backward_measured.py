"""Gradients measured without a GPU: peers by torch's own ops, kernels by what emulates them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fagen import registry
from fagen.errors import DeviceError, VerificationError
from fagen.kinds.backward import operands
from fagen.kinds.backward import verify as verification
from fagen.kinds.backward.emulate import compute
from fagen.kinds.backward.oracle import gradients
from fagen.measure import cells, peers
from fagen.measure.gradients import attended, output_gradient
from fagen.measure.inputs import cell_of, inputs
from fagen.measure.rows import DETERMINISTIC
from fagen.measure.timing import BURST, Call
from fagen.problem import Cell, Problem, Sizes
from fagen.registry import plan_of
from fagen.vocab import MASKS, PLAIN_MASKS
from tests.aten import passes_on_a_cpu
from tests.made_up_gpu import race_on_a_cpu

SLUG = "bwd_fp16_d64_{}_m128n128"
SCALE = 0.125
REFUSING = peers.peer("cudnn")  # on a CPU, as it is


def binary_of(slug: str) -> Any:
    """What is read of a Binary that is not loaded."""
    return SimpleNamespace(slug=slug, plan=plan_of(slug))


def cell(mask: str, *lengths: int, heads: int = 2, kv_heads: int = 1) -> Cell:
    return Cell(Problem("fp16", 64, 64, mask, kind="backward"), Sizes(1, heads, kv_heads, *lengths))


@pytest.fixture
def torch_on_a_cpu(monkeypatch):
    """torch's backends take tensors on a CPU; the names of their passes that were called."""
    with passes_on_a_cpu() as called:
        # what SDPA itself would refuse, for it knows of none
        monkeypatch.setattr(peers, "_sdpa", lambda *args: Call(lambda: None))
        yield called


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "causal"), [("cudnn", False), ("flash", False), ("flash", True)]
)
def test_a_backends_passes_are_called_without_autograd_on_its_own_results(
    torch_on_a_cpu, backend, causal
):
    q, k, v = inputs(cell("full", 40, 70), device="cpu")
    dout = output_gradient(q, v)
    assert torch.equal(dout, output_gradient(q, v)) and dout.shape == q.shape
    passes = attended(backend, q, k, v, causal=causal)
    mask = MASKS["causal" if causal else "full"]
    out, lse, *expected = gradients(dout, q, k, v, mask=mask, scale=SCALE)
    assert passes.out.is_contiguous() and passes.lse.is_contiguous()
    torch.testing.assert_close(passes.out.double(), out, atol=2e-3, rtol=0)
    torch.testing.assert_close(passes.lse.double(), lse, atol=1e-4, rtol=0)
    for result, grad in zip(passes.backward(dout), expected, strict=True):
        assert not result.requires_grad
        torch.testing.assert_close(result.double(), grad, atol=1e-2, rtol=0)
    assert torch_on_a_cpu == [backend, f"{backend}_backward"]


def test_a_row_without_keys_has_minus_infinity_whatever_a_backend_calls_it(torch_on_a_cpu):
    q, k, v = inputs(cell("causal", 9, 4), device="cpu")
    assert attended("flash", q, k, v, causal=True).lse[0, 0, :5].tolist() == [-math.inf] * 5


def test_a_peer_that_refuses_says_why():
    q, k, v = inputs(cell("causal", 5, 5), device="cpu")
    for case, words in (
        (cell("causal", 5, 5), "torch's CUDNN_ATTENTION refuses"),
        (cell("causal", 5, 9), "top left"),
        (Cell(Problem("fp16", 64, 64, "window", kind="backward"), Sizes(1, 2, 1, 5, 5)), "window"),
    ):
        with pytest.raises(DeviceError, match=words):
            REFUSING.bind(case, q, k, v)
    with pytest.raises(DeviceError, match="backward pass is not timed"):
        peers.peer("efficient").bind(cell("full", 5, 5), q, k, v)


def test_what_a_backend_says_of_its_op_is_a_refusal_too(monkeypatch):
    monkeypatch.setattr(peers, "_sdpa", lambda *args: Call(lambda: None))
    q, k, v = inputs(cell("full", 5, 5), device="cpu")
    with pytest.raises(DeviceError, match="torch's flash, called without autograd, refuses"):
        peers.peer("fa2").bind(cell("full", 5, 5), q, k, v)


# ---- a race -------------------------------------------------------------------------------------


@pytest.fixture
def raced(monkeypatch, torch_on_a_cpu):
    """A race on a CPU in which fagen takes a millisecond and cuDNN two; `off` spoils a gradient."""
    race = SimpleNamespace(off={}, called=torch_on_a_cpu)

    def kernel(plan, *args):
        return tuple(x * race.off.get(i, 1) for i, x in enumerate(compute(plan, *args)))

    race_on_a_cpu(monkeypatch, kernel, {"cudnn": 2e-3})

    def run(case: Cell, *names: str):
        ours = peers.ours(binary_of(SLUG.format(case.problem.mask)))
        others = [peers.peer(name) for name in names]
        return cells.race(case, [ours, *others], regimes=[BURST], progress=None)

    race.run = run
    return race


@pytest.mark.parametrize("mask", list(PLAIN_MASKS))
def test_a_race_of_gradients_compares_all_three_and_counts_five_products(raced, mask):
    case = cell(mask, 150, 150)
    rows = raced.run(case, "cudnn", "fa2")
    assert [row.implementation for row in rows] == ["fagen", "cudnn", "fa2"]
    assert {row.pass_ for row in rows} == {"backward"} and {row.cell for row in rows} == {case}
    assert rows[0].schedule == SLUG.format(mask) and rows[1].schedule is None
    forward = Cell(Problem("fp16", 64, 64, mask), case.sizes)
    assert rows[0].tflops == pytest.approx(2.5 * forward.flops / 1e9)
    assert rows[0].tflops == pytest.approx(2 * rows[1].tflops)


def test_queries_aligned_to_the_bottom_right_are_compared_with_whom_has_that(raced):
    rows = raced.run(cell("causal", 40, 170), "cudnn", "fa2")
    assert [row.implementation for row in rows] == ["fagen", "fa2"]
    rows = raced.run(cell("causal", 170, 40), "fa2")  # with rows that see no key
    assert len(rows) == 2


@pytest.mark.parametrize("gradient", range(3))
def test_a_wrong_gradient_is_not_timed(raced, gradient):
    raced.off[gradient] = 1.1
    with pytest.raises(VerificationError, match=r"m128n128 differs from cudnn by .* not timed"):
        raced.run(cell("full", 70, 70), "cudnn")


# ---- what kernels are given ----------------------------------------------------------------------


def test_operands_are_of_a_quick_forward_pass_or_of_one_in_fp32():
    case = cell("causal", 33, 50)
    plan = plan_of(SLUG.format("causal"))
    q, k, v = inputs(case, device="cpu")
    dout, *same, out, lse, scale = operands.arguments(plan, q, k, v)
    exact, exact_lse, *_ = gradients(dout, q, k, v, mask=plan.mask, scale=scale)
    assert scale == SCALE and [x.data_ptr() for x in same] == [x.data_ptr() for x in (q, k, v)]
    assert out.dtype == q.dtype and out.is_contiguous() and lse.is_contiguous()
    torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)
    into = operands.outputs(plan, (dout, q, k, v, out, lse, scale))
    assert [x.shape for x in into] == [q.shape, k.shape, v.shape]
    assert all(bool(x.isnan().all()) for x in into)
    assert operands.alike(plan) != operands.alike(plan_of(SLUG.format("full")))
    assert verification.CONTENDER.compared(into) == into


def test_a_kernel_is_called_what_its_schedule_says(monkeypatch):
    monkeypatch.setattr(peers.op, "load", lambda binary: None)
    usual = SLUG.format("full")
    for slug, name in ((usual, "fagen"), (f"{usual}_det", DETERMINISTIC)):
        assert peers.ours(binary_of(slug)).name == name
        assert cell_of(plan_of(slug), Sizes(1, 2, 1, 9, 9)) == cell("full", 9, 9)


def test_schedules_of_both_passes_are_benched(monkeypatch):
    """`fagen bench` takes what is searched, and so what has peers."""
    from fagen.commandline.console import raced as having_peers

    both = tuple(map(registry.from_slug, (SLUG.format("full"), "fwd_fp16_d64_full_m128n128")))
    assert having_peers(both, every=False) == both
