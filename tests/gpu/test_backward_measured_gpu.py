"""Gradients measured on a Hopper GPU: the peers' own passes, a race, a search's round, a call."""

import pytest
import torch

import fagen
from benchmarks.launch import launch_costs
from fagen.dispatch.rows import Row
from fagen.dispatch.tables import table_at, update
from fagen.kinds.backward.oracle import gradients
from fagen.measure import rounds
from fagen.measure.cells import race
from fagen.measure.gradients import attended, output_gradient
from fagen.measure.inputs import cell_of, inputs, softmax_scale
from fagen.measure.peers import ours, peer
from fagen.measure.rounds import BRIEF, CUDNN, Kernel
from fagen.measure.timing import BURST, captured
from fagen.problem import Cell, Problem, Sizes
from fagen.vocab import MASKS, PLAIN_MASKS
from tests.attention_helpers import torch_asks
from tests.fresh import asked_for
from tests.gpu.helpers import same

pytestmark = pytest.mark.gpu

SLUGS = ("bwd_bf16_d128_causal_m64n128", "bwd_fp16_d64_full_m128n128")
SIZES = (Sizes(2, 8, 8, 1_024, 1_024), Sizes(1, 8, 2, 777, 777))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["cudnn", "fa2"])
@pytest.mark.parametrize("mask", list(PLAIN_MASKS))
def test_a_peers_gradients_are_near_fp64_and_may_be_captured(name, mask, sizes):
    case = Cell(Problem("bf16", 128, 128, mask, kind="backward"), sizes)
    q, k, v = inputs(case)
    call = peer(name).bind(case, q, k, v)
    scale = softmax_scale(128)
    expected = gradients(output_gradient(q, v), q, k, v, mask=MASKS[mask], scale=scale)[2:]
    for found, exact in zip(call.once(), expected, strict=True):
        assert found.shape == exact.shape
        assert float((found.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())
    replayed = captured(call, 2)
    replayed.run()
    torch.cuda.synchronize()


@pytest.mark.parametrize("lengths", [(100, 333), (333, 100), (256, 256)])
def test_a_backends_results_are_what_kernels_of_gradients_take(lengths):
    case = Cell(Problem("fp16", 64, 64, "causal"), Sizes(2, 4, 2, *lengths))
    q, k, v = inputs(case)
    made = attended("flash", q, k, v, causal=True)
    zeros = torch.zeros_like(output_gradient(q, v))
    out, lse, *_ = gradients(zeros, q, k, v, mask=MASKS["causal"], scale=0.125)
    assert torch.equal(made.lse.isinf(), lse.isinf())
    seen = ~lse.isinf()
    torch.testing.assert_close(made.lse[seen].double(), lse[seen], atol=1e-3, rtol=0)
    torch.testing.assert_close(made.out.double(), out, atol=5e-3, rtol=0)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_race_has_fagen_cudnn_and_fa2(built_together, slug):
    built = built_together(SLUGS)(slug)
    for sizes in SIZES:
        case = cell_of(built.plan, sizes)
        rows = race(case, [ours(built.binary), peer("cudnn"), peer("fa2")], regimes=[BURST])
        assert [row.implementation for row in rows] == ["fagen", "cudnn", "fa2"]
        assert all(row.pass_ == "backward" and row.tflops > 1 for row in rows)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_search_checks_and_times_a_kernel_beside_cudnn(built_together, slug):
    built = built_together(SLUGS)(slug)
    case = cell_of(built.plan, Sizes(1, 8, 8, 512, 512))
    kernel = Kernel(slug, built.binary.library)
    rounds.quick_check(case, kernel)
    laps = rounds.side_by_side(case, [kernel], kernel, regime=BRIEF, repeats=(0, 1))
    assert {lap.slug for lap in laps} == {slug, CUDNN}
    assert all(0 < lap.seconds < 1e-2 for lap in laps)


def test_a_call_is_its_three_kernels_and_allocates_gradients_and_workspace(built_together):
    built = built_together(SLUGS)(SLUGS[0])
    cost = launch_costs(built.plan, built.binary)["torch op"]
    assert (cost.kernels, cost.memsets, cost.copies, cost.allocations) == (3, 0, 0, 4)


@pytest.mark.usefixtures("nothing_is_ready")
def test_a_row_of_a_table_serves_the_gradients_of_a_call(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table_at.cache_clear()
    slug = "bwd_fp16_d64_causal_m64n128"
    update(tmp_path / "fagen" / "dispatch.toml", [Row(torch.cuda.get_device_name(), slug, 0, 500)])
    found = {}
    for keys in (400, 600):
        tensors = [x.requires_grad_() for x in inputs(
            Cell(Problem("fp16", 64, 64, "causal"), Sizes(1, 4, 2, keys, keys))
        )]  # fmt: skip
        out = fagen.attention(*tensors, causal=True)
        dout = torch.ones_like(out)
        out.backward(dout)
        qkv = [x.detach() for x in tensors]
        expected = gradients(dout, *qkv, mask=MASKS["causal"], scale=0.125)[2:]
        for tensor, exact in zip(tensors, expected, strict=True):
            assert tensor.grad is not None
            off = float((tensor.grad.double() - exact).abs().max())
            assert off < 0.01 * (1 + exact.abs().max())
        found[keys] = asked_for("backward")
    table_at.cache_clear()
    assert found[400] == {slug} < found[600] and len(found[600]) == 2


@pytest.mark.filterwarnings("ignore::fagen.UntunedWarning")
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_have_the_same_bits_each_time_where_torch_asks_for_that(causal):
    case = Cell(Problem("fp16", 64, 64, "full"), Sizes(2, 8, 2, 1_500, 1_500))
    tensors = [x.requires_grad_() for x in inputs(case)]
    results = []
    with torch_asks():
        for _ in range(20):
            out = fagen.attention(*tensors, causal=causal)
            results.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    assert all(same(again, results[0]) for again in results[1:])
