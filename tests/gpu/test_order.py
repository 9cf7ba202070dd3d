"""Tiles handed out while other calls run: every tile once, and the same bits in every call."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.kinds.forward.operands import arguments, launch, outputs
from fagen.kinds.forward.verify.dense import shape_error
from fagen.measure.inputs import inputs, softmax_scale
from tests.gpu.conftest import Committed
from tests.gpu.helpers import by_threads

pytestmark = pytest.mark.gpu

HAMMERED = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_fp16_d64_causal_m256n64_s4_q2_nointer",
    "fwd_bf16_d256_causal_m128n64_half",
    "fwd_fp16_d128_full_m192n64_s3",
    "fwd_fp16_d256_full_m128n64_half_nointer_c2",
)
# batch, seqlen_q, seqlen_k, heads, kv_heads
SIZES = (
    (1, 1, 1, 1, 1),  # one tile
    (1, 100, 64, 1, 1),  # one tile, of which a causal mask leaves 36 rows no key
    (1, 900, 130, 4, 2),  # whole tiles without a key
    (2, 300, 333, 4, 2),  # fewer tiles than SMs
    (1, 64, 5_000, 8, 8),  # one tile a head, of many blocks
    (3, 1_000, 1_000, 8, 1),  # some rounds, one head of K and V
    (1, 4_100, 4_100, 4, 2),  # long tiles and short ones
    (40, 130, 130, 4, 4),  # many short tiles
)
CALLS = 10_000
SLEEP = 10_000_000  # GPU clock cycles: some 5 ms, in which the host fills all queues


@pytest.fixture(scope="module")
def kernels(built_together):
    """The kernels of HAMMERED."""
    build = built_together(HAMMERED)
    return [Committed(build(slug)) for slug in HAMMERED]


@dataclass
class Job:
    """A call, and what it gave when nothing else ran."""

    op: Any
    given: tuple[Any, ...]
    wanted: tuple[Tensor, ...]

    def run(self, bad: Tensor) -> None:
        """Call it on the current stream, and add to `bad` the numbers whose bits differ."""
        for found, wanted in zip(self.op(*self.given), self.wanted, strict=True):
            bad.add_((bits(found) != bits(wanted)).sum())


def bits(x: Tensor) -> Tensor:
    """The numbers as integers: minus infinity and NaN compare like any other."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.fixture(scope="module")
def jobs(kernels):
    """Every kernel at every size, each run once by itself, into outputs full of NaN."""
    made = []
    for number, (kernel, sizes) in enumerate((k, s) for k in kernels for s in SIZES):
        case = kernel.cell(*sizes)
        given = (*inputs(case, seed=number), softmax_scale(case.problem.head_dim))
        expected = kernel.poisoned(*given)
        torch.cuda.synchronize()
        assert not any(bool(x.isnan().any()) for x in expected), f"{kernel.plan.slug} at {sizes}"
        made.append(Job(kernel.op, given, expected))
    return made


def test_two_streams_and_two_graphs_at_once_give_the_bits_of_a_call_alone(jobs):
    bad = torch.zeros(4, dtype=torch.int64, device="cuda")
    for job in jobs:
        job.run(bad[0])  # whatever is set up once for a stream is set up before the capture
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs = []
    for index in (2, 3):
        graphs.append(torch.cuda.CUDAGraph())
        # on a stream that eager calls use too: a captured call must share nothing with them
        with torch.cuda.graph(graphs[-1], stream=streams[index - 2]):
            for job in jobs:
                job.run(bad[index])
    torch.cuda.synchronize()
    dice, calls, rounds = random.Random(0), len(jobs), 0
    while calls < CALLS:
        if rounds % 10 == 0:
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP)
        for graph, stream in zip(graphs, streams[2:], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        orders = [dice.sample(jobs, len(jobs)) for _ in range(2)]
        for pair in zip(*orders, strict=True):
            for index, job in enumerate(pair):
                with torch.cuda.stream(streams[index]):
                    job.run(bad[index])
        calls, rounds = calls + 4 * len(jobs), rounds + 1
    torch.cuda.synchronize()
    assert bad.tolist() == [0, 0, 0, 0], f"numbers that differ, of {calls} calls in four queues"
    wrong = Job(jobs[0].op, jobs[0].given, tuple(x + 1 for x in jobs[0].wanted))
    wrong.run(bad[0])
    assert bad[0] > 0, "a difference is seen"


def test_threads_on_one_stream_and_on_their_own_give_the_same_bits(jobs):
    shared = torch.cuda.Stream()
    streams = [shared, shared, torch.cuda.Stream(), torch.cuda.default_stream()]
    bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()

    def work(index):
        dice = random.Random(index)
        with torch.cuda.stream(streams[index]):
            for _ in range(10):
                for job in dice.sample(jobs, len(jobs)):
                    job.run(bad[index])

    by_threads(work, len(streams))
    torch.cuda.synchronize()
    assert [int(count) for count in bad] == [0] * len(streams)


@pytest.mark.parametrize("slug", HAMMERED)
def test_a_call_leaves_its_workspace_as_it_found_it(slug, kernels):
    kernel = next(one for one in kernels if one.plan.slug == slug)
    for sizes in SIZES:
        given = arguments(kernel.plan, *inputs(kernel.cell(*sizes)))
        into = outputs(kernel.plan, given[0])
        run = launch(kernel.plan, kernel.binary.library, given, into)  # one workspace for all
        run()
        expected = [x.clone() for x in into]
        for _ in range(50):
            for x in into:
                x.fill_(float("nan"))
            run()
            assert all(torch.equal(bits(x), bits(y)) for x, y in zip(into, expected, strict=True))


@pytest.mark.parametrize("slug", HAMMERED)
def test_every_tile_is_computed_at_sizes_drawn_at_random(slug, kernels):
    kernel = next(one for one in kernels if one.plan.slug == slug)
    dice = random.Random(slug)
    for number in range(12):
        kv_heads = dice.choice((1, 2, 3))
        keys = dice.randint(1, 3_000)
        queries = dice.randint(1, 3_000) if dice.random() < 0.5 else keys
        heads = kv_heads * dice.choice((1, 2, 5))
        case = kernel.cell(dice.choice((1, 2, 3)), queries, keys, heads, kv_heads)
        error = shape_error(case, kernel.poisoned, *inputs(case, seed=number))
        assert error.ok, f"{case}: {error}"
