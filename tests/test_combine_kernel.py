"""The kernel of combining: its own text, run on a CPU."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fagen import simulator
from fagen.kinds.combine.emulate import compute
from fagen.kinds.combine.plan import Plan
from fagen.kinds.combine.verify import RULE
from fagen.measure.verification import Run, check
from fagen.render import render
from tests.combine_helpers import SPREAD, planned
from tests.often import some


def on_cpu(plan: Plan) -> Run:
    """The kernel's text on the simulated GPU, given inputs and outputs by name."""
    return partial(simulator.call, plan, simulator.build(render(plan).kernel))


@pytest.mark.parametrize("slug", some(SPREAD, SPREAD[:4]))
def test_the_kernels_own_text_has_the_emulations_bits(slug):
    plan = planned(slug)
    errors = check(plan, RULE, on_cpu(plan), device="cpu")
    assert all(error.differing == 0 for error in errors)


@pytest.mark.parametrize("slug", some(("comb_fp32_d8_varlen", SPREAD[1]), SPREAD[1:2]))
def test_a_row_finds_its_sequence_wherever_it_lies(slug):
    plan = planned(slug)
    kernel = on_cpu(plan)
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, rows: int) -> Tensor:
        return torch.randint(0, rows + 1, (batch + 1,), generator=generator).sort().values

    def padded(batch: int, starts: Tensor) -> Tensor:
        return torch.cat((starts, starts[-1:].expand(batch + 1 - len(starts))))

    packings = (
        (torch.arange(101), 100),  # a row each
        (torch.arange(1200), 1199),
        (torch.arange(41) * 3 + 2, 130),  # rows over at both ends
        *((drawn(batch, 90), 97) for batch in (0, 1, 2, 30, 31, 32, 33, 64, 1023, 1025, 2500)),
        (torch.cat((torch.zeros(2000), torch.arange(50))), 49),  # the first ones are empty
        (padded(1100, torch.arange(50)), 60),  # the last ones are
        (padded(500, torch.tensor([0, 7, 7, 8, 60])), 70),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1000]), 1000),
        (torch.full((70,), 5), 9),
        (torch.arange(70) + 1000, 9),  # all of them behind the rows
        (torch.arange(70).flip(0), 64),  # no packing at all: anything, but an end
    )
    for starts, rows in packings:
        batch = len(starts) - 1
        counts = torch.randint(-1, 5, (batch,), generator=generator).int()
        named = dict(
            outs=torch.randn(3, rows, 1, plan.head_dim, generator=generator),
            lses=torch.randn(3, 1, rows, generator=generator),
            num_splits=counts,
            cu_seqlens=starts.int(),
        )
        expected = compute(plan, **named)
        out, lse = (torch.full_like(tensor, math.nan) for tensor in expected)
        kernel(**named, out=out, lse=lse)
        if starts.equal(starts.sort().values):
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_no_splits_at_all_are_zeros_and_minus_infinity():
    plan = planned("comb_fp32_d128_obf16")
    named = dict(outs=torch.empty(0, 2, 3, 5, 128), lses=torch.empty(0, 2, 5, 3))
    out = torch.full((2, 3, 5, 128), math.nan, dtype=torch.bfloat16)
    lse = torch.full((2, 5, 3), math.nan)
    on_cpu(plan)(**named, out=out, lse=lse)
    assert torch.all(out == 0) and torch.all(lse == -math.inf)


def test_what_comes_from_another_launch_is_read_past_the_read_only_cache():
    text = render(planned("comb_fp32_d128_obf16_varlen")).kernel
    kernel = text[text.index("combine(const __grid_constant__") :]
    assert "__ldg" not in text and "ld.global.nc" not in text
    reads = (kernel.index(word) for word in ("count_splits(", "load_lses(0)", "load_split(stage)"))
    assert kernel.index("griddepcontrol.wait") < min(reads)
