"""Kernels of varlen sequences' gradients: their text on the simulated GPU, their proof, tiles."""

import math
import re
from functools import partial
from typing import Any

import pytest
import torch

from fagen import registry, simulator
from fagen.errors import ScheduleError
from fagen.kinds.backward import Schedule
from fagen.kinds.backward.verify import VARLEN_RULE
from fagen.measure.sequences import UNTOUCHED, Case
from fagen.measure.verification import check
from fagen.problem import Problem
from fagen.render import render
from tests.backward_helpers import in_parts
from tests.often import some
from tests.varlen_helpers import VARLEN_GRADIENTS, emulated, extreme_cases

COMMITTED = [path.stem for path in registry.schedules("backward") if "varlen" in path.stem]
SMALL = "bwd_fp16_d16_causal_m64n64_varlen"


# ---- on the simulated GPU -----------------------------------------------------------------------


NARROW = ("bwd_fp16_d72_causal_m64n128_varlen", "bwd_bf16_d80_full_m64n128_varlen")


@pytest.mark.parametrize("slug", some((*VARLEN_GRADIENTS, *NARROW), VARLEN_GRADIENTS[:1]))
def test_they_are_right_for_large_groups_and_any_rows_to_keys(slug: str) -> None:
    plan = registry.plan_of(slug)
    library = simulator.build(in_parts(render(plan).kernel))  # as of very many heads
    run = partial(simulator.call, plan, library)
    check(plan, VARLEN_RULE, run, cases=extreme_cases(plan), device="cpu")


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 70, 40, 130],  # backwards
        [-9, 65, 65, 1 << 30],  # out of the tensor
        [200, 10, 0, 0],
        [5, -(2**31), 2**31 - 1, 130],
        [0, 130, 0, 130],  # the same rows twice
        [0, 130, 0, 130, 64, 64, 130, 0, 128],
    ],
    ids=str,
)
def test_offsets_that_are_wrong_write_nothing_outside_and_end(offsets: list[int]) -> None:
    """What they compute of such sequences is nobody's; that they end, and where they write, is."""
    plan = registry.plan_of(SMALL)
    library = simulator.build(render(plan).kernel)
    at = torch.tensor(offsets, dtype=torch.int32)
    q, k, v, dout, out = (torch.randn(130, 2, 16).half() for _ in range(5))
    room = torch.full((3, 140, 2, 16), 7.0).half()
    into = dict(zip(("dq", "dk", "dv"), (x[5:135] for x in room), strict=True))
    named = dict(q=q, k=k, v=v, dout=dout, out=out, lse=torch.zeros(2, 130), scale=0.25)
    simulator.call(plan, library, **named, cu_seqlens_q=at, cu_seqlens_k=at, **into)
    assert (room[:, :5] == 7).all() and (room[:, 135:] == 7).all()


@pytest.mark.parametrize("offsets", [[], [5], [5, 5], [68, 70]], ids=str)
def test_gradients_of_rows_of_no_sequence_are_zeros(offsets: list[int]) -> None:
    plan = registry.plan_of(SMALL)
    library = simulator.build(render(plan).kernel)
    at = torch.tensor(offsets, dtype=torch.int32)
    tensors = {name: torch.full((70, 2, 16), math.nan).half() for name in ("q", "k", "v")}
    tensors |= {name: tensors["q"].clone() for name in ("dout", "out")}
    into = {f"d{name}": torch.full((70, 2, 16), UNTOUCHED).half() for name in ("q", "k", "v")}
    named = dict(lse=torch.full((2, 70), math.nan), cu_seqlens_q=at, cu_seqlens_k=at, scale=0.25)
    simulator.call(plan, library, **tensors, **named, **into)
    others = torch.ones(70, dtype=torch.bool)
    others[slice(*offsets) if len(offsets) == 2 else slice(0, 0)] = False
    for result in into.values():
        assert not result[others].any() and (result[~others] != UNTOUCHED).all()


def test_sums_in_order_have_the_same_bits_whatever_happens_when() -> None:
    plan = registry.plan_of("bwd_fp16_d32_full_m64n64_varlen_det")
    library = simulator.build(render(plan).kernel)
    case, results = Case(((100, 150), (3, 200)), 2, 1), []

    def kernel(*, seed: int, **named: Any) -> None:
        simulator.call(plan, library, seed=seed, **named)
        results.append(named["dq"].clone())

    for seed in range(3):
        VARLEN_RULE.error(plan, partial(kernel, seed=seed), case, 0, "cpu")
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("slug", [*VARLEN_GRADIENTS, *NARROW])
def test_the_rule_is_kept_for_large_groups_and_any_rows_to_keys(
    slug: str,
) -> None:
    plan = registry.plan_of(slug)
    cases = extreme_cases(plan)
    check(plan, VARLEN_RULE, emulated(plan), cases=cases, device="cpu")


# ---- schedules ----------------------------------------------------------------------------------


def test_the_committed_ones_are_of_three_head_dims_two_dtypes_and_both_masks() -> None:
    problems = [Problem.of(registry.from_slug(slug)) for slug in COMMITTED]
    combinations = {(problem.dtype, problem.head_dim, problem.mask) for problem in problems}
    assert len(combinations) == len(problems) == 12
    assert {problem.head_dim for problem in problems} == {64, 128, 256}


def test_pairs_of_thread_blocks_do_not_go_with_varlen() -> None:
    message = '= 2 does not go with lengths = "varlen"; use 1'
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.from_slug("bwd_fp16_d256_full_m64n64_varlen_c2")


def test_there_is_a_record_for_each_block_of_rows_wherever_sequences_begin() -> None:
    """Sequence i begins at slot offsets[i] / block + i, as the kernels' text has it."""
    plan = registry.plan_of(SMALL)
    dice = torch.Generator().manual_seed(0)
    for batch in (1, 2, 7, 40):
        for most in (1, 64, 65, 300):
            lengths = torch.randint(0, most + 1, (batch,), generator=dice).tolist()
            at = [0]
            for length in lengths:
                at.append(at[-1] + length)
            slots = [
                at[i] // plan.block_m + i + block
                for i, length in enumerate(lengths)
                for block in range(-(-length // plan.block_m))
            ]
            assert len(set(slots)) == len(slots)
            sizes = {"total_q": at[-1], "offsets": batch + 1, "heads": 1}
            records = plan.launches.workspace.at(sizes) // plan.record_bytes
            assert max(slots, default=0) < records or not slots
