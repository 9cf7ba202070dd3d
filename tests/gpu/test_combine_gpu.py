"""Combining on a Hopper GPU: its numbers, its bits, its bandwidth, and what overlaps with it."""

import math

import pytest
import torch

import fagen
from fagen import registry
from fagen.kinds.combine.verify import HEADS, VERIFICATION, bandwidth
from tests.combine_helpers import SPREAD
from tests.gpu.helpers import graph_of, same
from tests.tensors import normal

pytestmark = pytest.mark.gpu

COMMITTED = [path.stem for path in registry.schedules("combine")]
SLUGS = list(dict.fromkeys([*COMMITTED, *SPREAD]))
OF_A_COPY = 0.85
MEGABYTES = (64, 512)


@pytest.mark.parametrize("slug", SLUGS)
def test_it_is_near_fp64_and_has_the_emulations_bits(pair_of, slug):
    plan, binary = pair_of(slug)
    VERIFICATION.errors(plan, binary, print)


@pytest.mark.parametrize("megabytes", MEGABYTES)
@pytest.mark.parametrize("splits", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("slug", COMMITTED)
def test_it_is_nearly_as_fast_as_a_copy(pair_of, slug, splits, megabytes):
    plan, binary = pair_of(slug)
    found = bandwidth(plan, binary, splits, megabytes * 2**20 // plan.moved(1, splits))
    print(slug, found)
    assert found.ratio >= OF_A_COPY


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_packed_sequences_may_have_any_lengths(pair_of, splits):
    plan, binary = pair_of("comb_fp32_d128_obf16_varlen")
    rows = 64 * 2**20 // plan.moved(1, splits)
    found = bandwidth(plan, binary, splits, rows, uneven=True)
    print(found)
    assert found.ratio >= OF_A_COPY


@pytest.mark.parametrize("slug", ["comb_fp32_d128_obf16", "comb_fp32_d128_obf16_varlen"])
@pytest.mark.parametrize("splits", [1, 2, 16, 64])
def test_a_small_one_is_quick(pair_of, slug, splits):
    """A token's splits are folded one after another, by one warp of each scheduler at most.

    So nothing hides what a step takes: a weight by shuffle, a load from shared memory, and products
    and sums that are rounded one by one. 16 splits took 2.5 µs and 64 took 6.5: 84 ns each.
    """
    plan, binary = pair_of(slug)
    found = bandwidth(plan, binary, splits, HEADS)
    print(found)
    assert found.microseconds < 2.5 + 0.085 * splits


@pytest.mark.parametrize("varlen", [False, True])
def test_the_call_and_its_emulation_have_the_same_bits(pair_of, varlen):
    outs, lses = normal(5, 6, 8, 128), normal(5, 8, 6, seed=1)
    more = {}
    if varlen:
        counts, ends = torch.tensor([5, 0, 3]), torch.tensor([0, 2, 3, 6])
        more = dict(num_splits=counts.int(), cu_seqlens=ends.int())
    expected = fagen.combine(outs, lses, out_dtype=torch.bfloat16, **more)
    on_gpu = {name: tensor.cuda() for name, tensor in more.items()}
    found = fagen.combine(outs.cuda(), lses.cuda(), out_dtype=torch.bfloat16, **on_gpu)
    assert same([x.cpu() for x in found], expected)


def test_what_the_launch_before_it_writes_is_seen(pair_of):
    pair_of("comb_fp32_d128_obf16")
    outs = torch.full((4, 64, 8, 32, 128), math.nan, device="cuda")
    lses = torch.full((4, 64, 32, 8), math.nan, device="cuda")
    source, source_lses = torch.randn_like(outs), torch.randn_like(lses)
    expected = fagen.combine(source, source_lses, out_dtype=torch.bfloat16)
    for _ in range(20):
        outs.fill_(math.nan)
        lses.copy_(source_lses)
        outs.copy_(source)
        assert same(fagen.combine(outs, lses, out_dtype=torch.bfloat16), expected)


def test_what_the_launch_before_it_writes_of_sequences_is_seen(pair_of):
    pair_of("comb_fp32_d128_obf16_varlen")
    outs, lses = torch.randn(4, 640, 8, 128, device="cuda"), torch.randn(4, 8, 640, device="cuda")
    kinds = [
        dict(
            num_splits=torch.randint(0, 5, (64,), dtype=torch.int32, device="cuda"),
            cu_seqlens=torch.randint(0, 641, (65,), dtype=torch.int32, device="cuda").sort().values,
        )
        for _ in range(2)
    ]
    packing = {name: tensor.clone() for name, tensor in kinds[0].items()}
    rights = [fagen.combine(outs, lses, **kind) for kind in kinds]
    results = []
    for turn in range(20):
        for name, tensor in packing.items():
            tensor.copy_(kinds[turn % 2][name])
        results.append(fagen.combine(outs, lses, **packing))
    assert same(results, rights * 10)


def test_a_graph_replays_it_on_other_numbers(pair_of):
    outs, lses = torch.randn(4, 3, 5, 8, 128, device="cuda"), torch.randn(4, 3, 8, 5, device="cuda")
    graph, results = graph_of(lambda: fagen.combine(outs.mul_(1), lses))
    outs.normal_()
    lses.normal_()
    graph.replay()
    assert same(results, fagen.combine(outs, lses))
