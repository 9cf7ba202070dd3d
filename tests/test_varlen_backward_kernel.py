"""Kernels of varlen sequences' gradients: their text on the simulated GPU, their proof, tiles."""

import math
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from fagen import registry, simulator
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


PAIR = "bwd_fp16_d256_causal_m64n64_varlen_dss1_intra_c2"
NARROW = ("bwd_fp16_d72_causal_m64n128_varlen", "bwd_bf16_d80_full_m64n128_varlen")


@pytest.mark.parametrize("slug", some((*VARLEN_GRADIENTS, *NARROW, PAIR), VARLEN_GRADIENTS[:1]))
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


# sequences of which some are long; a group is shared out where tiles of one take too long
LONG = Case(((200, 205), (5, 5), (128, 128), (0, 9), (70, 20)), 4, 1, gap=3, used=True)


def shared_out(kernel: str) -> str:
    """The text of a kernel to which sums of parts of dK and dV cost nothing."""
    text, count = re.subn(
        r"kSumming = \d+,\s*kSummedBytes = \d+;", "kSumming = 0, kSummedBytes = 1e9f;", kernel
    )
    assert count == 1
    return text


def telling(kernel: str) -> str:
    """The text of a kernel that says which tiles it lists."""
    place = "params.listed[place] = {"
    assert kernel.count(place) == 1
    what = "int(place), sequence_index, first_key, first_head, left"
    return kernel.replace(
        place, f'std::printf("%d %d %d %d %d\\n", {what}), std::fflush(stdout), {place}'
    )


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared out"])
def test_tiles_are_listed_once_each_and_a_sequences_own_in_the_order_of_its_keys(
    shared: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = registry.plan_of(SMALL)
    kernel = render(plan).kernel
    library = simulator.build(telling(shared_out(kernel) if shared else kernel))
    VARLEN_RULE.error(plan, partial(simulator.call, plan, library), LONG, 0, "cpu")
    listed = sorted(tuple(map(int, line.split())) for line in capfd.readouterr().out.splitlines())
    assert [place for place, *_ in listed] == list(range(len(listed)))
    heads: dict[tuple[int, int], int] = {}
    for _, sequence, first_key, first_head, count in listed:
        tile = sequence, first_key
        assert heads.setdefault(tile, 0) == first_head  # one share after another, and no head twice
        heads[tile] += count
        assert first_key == 0 or (sequence, first_key - plan.block_n) in heads
    assert set(heads.values()) == {LONG.heads}
    blocks = [-(-keys // plan.block_n) for keys in (205 + 3, 5 + 3, 128 + 3, 9 + 3, 20 + 3)]
    assert len(heads) == sum(blocks) + 2  # and of what lies before and behind them all
    assert listed[0][1] == (2 if shared else 1) and (len(listed) > len(heads)) == shared


@pytest.mark.parametrize(
    "slug", some((SMALL, "bwd_fp16_d72v136_full_m64n64_varlen_dss1", PAIR), (SMALL,))
)
def test_groups_of_long_sequences_are_shared_out(slug: str) -> None:
    plan = registry.plan_of(slug)
    kernel = shared_out(render(plan).kernel)
    check(
        plan,
        VARLEN_RULE,
        partial(simulator.call, plan, simulator.build(kernel)),
        cases=(LONG,),
        device="cpu",
    )
    without = kernel.replace("if (sequence.kept < 0 ||", "if (true ||")
    assert without != kernel
    library = simulator.build(without)
    assert not VARLEN_RULE.error(plan, partial(simulator.call, plan, library), LONG, 0, "cpu").ok


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
    assert len(combinations) == 12
    # of 256 one for sequences of few tokens too
    assert Counter(problem.head_dim for problem in problems) == {64: 4, 128: 4, 256: 8}


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
