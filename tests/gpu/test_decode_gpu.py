"""Decoding on a Hopper GPU: its numbers, its bits alone, CUDA graphs, streams, and its speed."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest
import torch

import fagen
from fagen import flow, registry
from fagen.kinds.decode.proof import Case, check, verification_cases
from fagen.kinds.decode.reference import attend
from fagen.kinds.decode.speed import timed
from fagen.problem import Sizes
from fagen.runtime.c_interface import bind, call
from fagen.vocab import MASKS
from tests.decode_helpers import SPREAD
from tests.gpu.conftest import BUILDERS

pytestmark = pytest.mark.gpu

COMMITTED = [path.stem for path in registry.schedules("decode")]
SLUGS = list(dict.fromkeys([*COMMITTED, *SPREAD]))
FIRST = "dec_fp16_d128_causal_r8n64"
LONGEST = 5_000


@pytest.fixture(scope="module")
def built(hopper):
    """Plan and Binary by slug, all compiled in parallel beforehand."""

    @cache
    def build(slug):
        return flow.built(registry.from_slug(slug), binding=True)

    with ThreadPoolExecutor(BUILDERS) as builders:
        list(builders.map(build, SLUGS))
    return build


@pytest.mark.parametrize("slug", SLUGS)
def test_it_is_near_fp64_and_each_sequence_has_the_bits_that_it_has_alone(built, slug):
    plan, binary = built(slug)
    run = partial(call, plan, binary.library)
    check(plan, run, verification_cases(plan), device="cuda", progress=print)


def caches(batch=6, queries=2, heads=32, kv_heads=8, head_dim=128, dtype=torch.float16):
    q = torch.randn(batch, queries, heads, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, LONGEST, kv_heads, head_dim, device="cuda", dtype=dtype)
    return q, k, v


def lengths(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def right(q, k, v, used):
    scale = q.shape[3] ** -0.5
    return attend(q, k, v, mask=MASKS["causal"], scale=scale, seqused_k=used)[0]


def test_a_graph_is_replayed_with_other_lengths():
    q, k, v = caches()
    used = lengths(1, 64, 65, 1_000, 4_999, LONGEST)
    run = partial(fagen.attention_decode, q, k, v, seqused_k=used)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for turn in range(5):
        used.copy_(lengths(*[turn * 1_000 + i for i in range(6)]))
        if turn == 3:
            used.zero_()
        out.fill_(math.nan)
        for _ in range(turn):
            graph.replay()  # one upon another
        graph.replay()
        assert torch.equal(out, run())
        assert (out.double() - right(q, k, v, used)).abs().max() < 2e-3


def test_what_the_launch_before_writes_is_seen():
    """Lengths, keys, values and queries, each written just before; what reads it comes after."""
    q, k, v = caches()
    used = lengths(*[4_000] * 6)
    expected = fagen.attention_decode(q, k, v, seqused_k=used)
    late = [torch.full_like(x, math.nan) for x in (q, k, v)]
    late_used = torch.zeros_like(used)
    for _ in range(50):
        for into, x in zip(late, (q, k, v), strict=True):
            into.copy_(x)
        late_used.copy_(used)
        found = fagen.attention_decode(*late, seqused_k=late_used)
        for into in late:
            into.fill_(math.nan)
        late_used.zero_()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("queries", [1, 4, 8])
def test_a_sequences_bits_are_those_that_it_has_alone_in_any_batch_and_however_chunks_are_dealt(
    queries,
):
    q, k, v = caches(batch=12, queries=queries)
    used = lengths(*(1 + (i * 2_711) % LONGEST for i in range(12)))
    alone = [
        fagen.attention_decode(q[i : i + 1], k[i : i + 1], v[i : i + 1], seqused_k=used[i : i + 1])
        for i in range(12)
    ]
    slug = f"dec_fp16_d128_causal_r{max(8, 4 * queries)}n64"
    generator = torch.Generator().manual_seed(0)
    for turn in range(50):
        # from one sequence to more than there are tiles for all multiprocessors
        size = int(torch.randint(1, 60, (1,), generator=generator))
        picked = torch.randint(0, 12, (size,), generator=generator).cuda()
        for schedule in (None, slug, f"{slug}_runs")[: 3 if turn < 5 else 1]:
            out = fagen.attention_decode(
                q[picked], k[picked], v[picked], seqused_k=used[picked], schedule=schedule
            )
            for place, i in enumerate(picked.tolist()):
                assert torch.equal(out[place], alone[i][0]), (size, i, schedule)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("batch", [32, 128])
def test_tiles_that_stay_whole_have_the_same_bits(batch, queries):
    """One or four for nearly each thread block; not merged, and as if lengths were not alike."""
    keys = 2_048
    q, k, v = (x[:, :keys] for x in caches(batch=batch, queries=queries))
    slug = f"dec_fp16_d128_causal_r{max(8, 4 * queries)}n64"

    def run(by, used):
        return fagen.attention_decode(q, k, v, seqused_k=used, schedule=f"{slug}{by}")

    turns = run("", None)
    assert (turns.double() - right(q, k, v, lengths(*[keys] * batch))).abs().max() < 2e-3
    for used in (None, lengths(*[keys] * batch)):
        assert torch.equal(run("_runs", used), turns)
    unlike = lengths(*[keys] * (batch - 1), 100)
    assert torch.equal(run("_runs", unlike), run("", unlike))


def test_a_reference_that_misses_costs_no_accuracy():
    q, k, v = caches(queries=1)
    used = lengths(1, 64, 65, 1_000, 4_999, LONGEST)
    expected = right(q, k, v, used)
    for at in (0.0, -9.0, 9.0, -1e4, 1e4, math.nan):
        reference = torch.full((32,), at, device="cuda")
        reference[::3] = 0.5
        found = fagen.attention_decode(q, k, v, seqused_k=used, reference=reference)
        assert (found.double() - expected).abs().max() < 2e-3


def test_results_are_the_same_a_thousand_times_under_load():
    q, k, v = caches()
    used = lengths(10, 5_000, 3_000, 0, 64, 777)
    first = fagen.attention_decode(q, k, v, seqused_k=used)
    other = torch.cuda.Stream()
    load = torch.randn(2_048, 2_048, device="cuda", dtype=torch.float16)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1_000):
        if turn % 10 == 0:
            with torch.cuda.stream(other):
                load @ load
        differing += (fagen.attention_decode(q, k, v, seqused_k=used) != first).sum()
    assert differing.item() == 0


def test_two_streams_do_not_disturb_each_other():
    made = [caches() for _ in range(2)]
    expected = [fagen.attention_decode(*tensors) for tensors in made]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in made]
    found = [[], []]
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(fagen.attention_decode(*made[i]))
    torch.cuda.synchronize()
    for own, mine in zip(found, expected, strict=True):
        assert all(torch.equal(one, mine) for one in own)


def test_the_call_and_its_emulation_agree_and_torch_compiles_it():
    q, k, v = caches(batch=2)
    used = lengths(4_000, 33)
    out, lse = fagen.attention_decode(q, k, v, seqused_k=used, return_lse=True)
    again, sums = fagen.attention_decode(
        q.cpu(), k.cpu(), v.cpu(), seqused_k=used.cpu(), return_lse=True
    )
    assert (out.cpu().float() - again.float()).abs().max() < 2e-3
    assert torch.allclose(lse.cpu(), sums, atol=1e-4)
    compiled = torch.compile(fagen.attention_decode, fullgraph=True)
    assert torch.equal(
        compiled(q, k, v, seqused_k=used), fagen.attention_decode(q, k, v, seqused_k=used)
    )


def test_the_op_is_what_torch_asks_of_one(built):
    from fagen.runtime.op import load

    q, k, v = caches(batch=2, queries=1)
    op = load(built(FIRST)[1])
    torch.library.opcheck(op, (q, k, v, 0.1), {"seqused_k": lengths(10, 4_000)})


def test_rows_of_the_cache_beyond_four_gigabytes_are_found():
    """Strides of more than 2^31 elements between sequences, as views of a large pool have them."""
    pool = torch.zeros(2**31 + 2**20, device="cuda", dtype=torch.float16)
    k = pool.as_strided((2, 128, 1, 128), (2**31, 128, 128, 1))
    k.copy_(torch.randn(2, 128, 1, 128, device="cuda"))
    q = torch.randn(2, 1, 4, 128, device="cuda", dtype=torch.float16)
    found = fagen.attention_decode(q, k, k)
    assert torch.equal(found, fagen.attention_decode(q, k.contiguous(), k.contiguous()))


def test_a_million_keys_are_as_near_to_fp64_as_the_rule_asks(built):
    plan, binary = built(FIRST)
    cases = [Case(Sizes(1, 8, 2, 2, keys), sigma=2.0) for keys in (8_192, 2**20, 2**20 + 17)]
    check(plan, partial(call, plan, binary.library), cases, device="cuda", progress=print)


@pytest.mark.parametrize(
    ("sizes", "microseconds"),
    # a half more than what was aimed at: this is to find what is badly wrong
    [(Sizes(1, 32, 8, 1, 8_192), 20), (Sizes(32, 32, 8, 1, 4_096), 190)],
)
def test_it_is_not_slow(built, sizes, microseconds):
    plan, binary = built(FIRST)
    found = timed(plan, binary.library, sizes)
    print(found)
    assert found.microseconds < microseconds


def test_an_exactly_sized_workspace_full_of_no_numbers_will_do(built):
    plan, binary = built(FIRST)
    q, k, v = caches(batch=3, queries=1)
    out = torch.full_like(q, math.nan)
    launch = bind(plan, binary.library, q=q, k=k, v=v, scale=0.1, out=out)
    launch()
    first = out.clone()
    out.fill_(math.nan)
    launch()  # upon what the first call has left
    assert torch.equal(out, first) and torch.isfinite(out).all()
