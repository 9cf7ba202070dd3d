"""Each statement that orders a kernel's threads is needed: without it the simulated GPU says so."""

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fagen import registry
from fagen.kind import Plan, load_named
from fagen.kinds.combine.verify import Case as CombineCase
from fagen.kinds.decode.verify import Case as DecodeCase
from fagen.measure.sequences import Case
from fagen.measure.verification import check
from fagen.problem import Sizes
from fagen.render import render
from tests.faulted import Faulted, Run, Scene
from tests.mutants import Fault, Faults


def scene(*cases: Any) -> Scene:
    """Cases of a kind's rule, or without any all small ones, and whether they are right."""

    def calls(plan: Plan, run: Run) -> None:
        rule = load_named(registry.kind(plan.kind).verification).rule(plan)
        check(plan, rule, run, cases=cases or None, small=True, device="cpu")

    return calls


@dataclass(frozen=True)
class Tried:
    """A kernel on trial: where its faults are to show, and constants of its text that differ."""

    scenes: tuple[Scene, ...] = ()
    constants: tuple[tuple[str, int], ...] = ()
    careful: tuple[str, ...] = ()  # functions whose decisions are tried too: see Faults
    sections: bool = False  # of one head
    small: int | None = 0  # of the small cases of its kind's rule, which is to be right, so many


SHORT = ((7, 9), (64, 64), (1, 1))
# short ones, long ones, those whose last tile has rows for some; of few keys, of many, of none
MIXED = Case(
    ((3, 3), (200, 90), (5, 7), (65, 70), (9, 0), (40, 40), (300, 100), *SHORT * 8), 2, 1, gap=1
)
# in which most faults show, in a tenth of the time
FEW = Case(((130, 140), (7, 9)), 2, 1, gap=1)
# of many blocks of rows, of one, of none
ROWS = Case(((64 * 5 + 3, 261), (7, 9), (0, 5), (200, 70)), 2, 1, gap=1)
# blocks that only the last rows of a tile see, tile after tile
LONG = Case(((130, 330), (200, 200), (7, 9), (128, 128), (256, 261)), 4, 2)
# heads that are done while others are in work, of one step or of two; a group in several shares,
# with more blocks of rows than thread blocks
EARLY = scene(Sizes(1, 6, 6, 64 + 9, 2 * 128 + 3), Sizes(1, 16, 16, 40, 100))
SHARES = scene(Sizes(1, 18, 1, 64 + 9, 100))
# several heads of a group in one thread block, several thread blocks for a group, heads without one
STEPS = scene(Sizes(1, 4, 1, 64 * 3 + 3, 261), Sizes(1, 2, 2, 64 * 5 + 3, 261))
FEW_STEPS = scene(Sizes(1, 2, 2, 64 + 9, 140))
# whose tiles are in work at once, and add to the same dQ
ONE_HEAD = scene(Sizes(1, 1, 1, 64 * 4 + 9, 64 * 5 + 3))

# many tiles for each thread block; of one block of keys, or of none
MANY_HEADS = scene(Sizes(1, 8, 2, 130, 300), Sizes(2, 4, 4, 300, 40), Sizes(1, 2, 2, 131, 0))
# the second with a block that a tile's first warpgroup skips, whose place nothing fills again
CHUNKS = scene(Sizes(1, 3, 1, 130, 300), Sizes(1, 1, 1, 128, 384))
# two steps of a split, the second with larger scores, and a last block that is not full
RISING = DecodeCase(
    Sizes(2, 8, 2, 1, 64 * 17), (64 * 17, 64 * 16 + 5), rises=True, sigma=6.0, per_sequence=False
)
ONE_BLOCK = DecodeCase(
    Sizes(8, 8, 2, 1, 512), (512,) * 8, per_sequence=False
)  # the ring has place for a third one's
# splits that follow each other, some of several tiles; too long for a run's share; of many groups
RUNS = DecodeCase(
    Sizes(8, 8, 2, 1, 64 * 17), (64 * 17, 64 * 16 + 5, 300, 70, 70, 70, 70, 70), per_sequence=False
)
TURNS = DecodeCase(Sizes(4, 3, 1, 1, 1_024), (1_024, 1_024, 70, 70), per_sequence=False)
GROUPS = DecodeCase(Sizes(2, 11, 11, 1, 1_024), (1_024, 70), per_sequence=False)
MISSED = DecodeCase(
    Sizes(2, 8, 2, 1, 64 * 17),
    (64 * 17, 900),
    references=(0.0, -1e3, 30.0, 1e3),
    per_sequence=False,
)
# four SMs are simulated: of five KV heads the last two fill up
FILLING_UP = Case(((530, 530), (9, 0), (129, 129)), 5, 5, gap=1)

KERNELS = {
    "fwd_fp16_d128_causal_m128n128": Tried((MANY_HEADS,), small=2),
    "fwd_fp16_d256_causal_m128n64_split4": Tried((CHUNKS,)),
    "fwd_fp16_d256_full_m64n64_reusev_pm64_smemtotals_c2": Tried((MANY_HEADS,)),
    "fwd_e4m3_d64_full_m128n128": Tried(small=3),
    "fwd_e4m3_d96_causal_m128n64_nointra_pm1_pc32": Tried((MANY_HEADS,), small=1),
    "fwd_fp16_d64_causal_m128n64_varlen": Tried(
        (scene(FEW, MIXED, LONG),),
        careful=(
            "TileRing::pass_on",
            "Consumer::(place|begin_turn|next_with_rows)",
            "Consumer::run: q.advance.*",
        ),
    ),
    "fwd_fp16_d64_causal_m64n64_varlen": Tried(
        (scene(FILLING_UP, MIXED),),
        (("kL2Bytes", 0),),
        careful=("TileFinder::(find_range|count_up_to|look|find|next_class|tile_of|find_row)",),
    ),
    "fwd_e4m3_d64_causal_m64n64_varlen": Tried(
        (scene(MIXED, LONG),),
        careful=(
            "produce_transposed_v|transpose_block|transpose|TileFinder::(tile_of|find_row)|Consumer::mean_score",
        ),
    ),
    "bwd_fp16_d128_causal_m64n128": Tried(
        (STEPS,), (("kMultiprocessors", 8), ("kLeastSteps", 2), ("kLaunch", 0))
    ),
    "bwd_fp16_d64_causal_m64n64_det": Tried(
        (FEW_STEPS, STEPS), (("kLaunch", 0),), careful=("add_dq",)
    ),
    "bwd_bf16_d256_causal_m64n64_dss1_c2": Tried((STEPS, ONE_HEAD)),
    "bwd_fp16_d128_causal_m64n128_persist_post": Tried(
        (EARLY, SHARES, ONE_HEAD), (("kMultiprocessors", 4),), sections=True
    ),
    "bwd_fp16_d16_causal_m64n64_varlen": Tried((scene(ROWS),)),
    "dec_fp16_d128_causal_r8n64": Tried((scene(RISING, ONE_BLOCK),)),
    "dec_fp16_d128_causal_r8n64_c4_streamk": Tried(
        (scene(RISING, RUNS, TURNS, GROUPS),),
        careful=(
            "Units::Units: .*all_sync.*",
            "Units::parts_of",
            "Units::next: (- unit.split.*|min\\(unit.first_key.*|at \\+= .*)",
            "tile_of",
            "Consumer::settle: (sum|reference|for).*",
            "Consumer::begin_combining: combined_reference.*",
            "Consumer::take: (combines|begin).*",
            "Consumer::take: .*== unit.first_key.*",
            "Consumer::weigh_keys: clear_values.*",
            "combine_partial_outputs: (- begun|reference = .*|sum = .*) left out",
        ),
    ),
    "dec_fp16_d128_causal_r8n64_fixed": Tried(
        (scene(MISSED),),
        careful=(
            r"Consumer::(begin|takes|first_reference): \? .*",
            r"Consumer::finish: (\? .*|failed .*)",
            "decode: if .*syncthreads_or.*",
        ),
    ),
    "comb_fp32_d128_obf16_varlen": Tried(
        (scene(CombineCase(9, 2, 1, 3, "rising"), CombineCase(16, 40, 1, 2, "some")),), small=None
    ),
}


# of which a sample is tried each time: they have all kinds of statements but one
SAMPLED = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_fp16_d64_causal_m128n64_varlen",
    "bwd_fp16_d64_causal_m64n64_det",
    "dec_fp16_d128_causal_r8n64_c4_streamk",
    "comb_fp32_d128_obf16_varlen",
)
SEEDS = 8


def planned(slug: str) -> Plan:
    plan = registry.plan_of(slug)
    return replace(plan, l2_share_bytes=1) if KERNELS[slug].sections else plan


@cache
def faults_of(slug: str) -> Faults:
    """A kernel's text and its faults."""
    kernel = render(planned(slug)).kernel
    for name, value in KERNELS[slug].constants:
        kernel, count = re.subn(rf"\b{name} = [^;]+;", f"{name} = {value};", kernel)
        assert count == 1
    return Faults(kernel, KERNELS[slug].careful)


@cache
def faulted(slug: str) -> Faulted:
    """A kernel with all its faults, which without one is right."""
    tried, plan = KERNELS[slug], planned(slug)
    in_any_order = plan.kind == "backward" and not plan.deterministic
    kernel = Faulted(plan, faults_of(slug), loose="dq" if in_any_order else "")
    for calls in tried.scenes:
        kernel.record(calls)
    if tried.small is not None:
        kernel.record(scene(), tried.small)
    return kernel


# ---- faults that do not show --------------------------------------------------------------------

SURVIVE = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["survives"]


def entry(slug: str, fault: Fault) -> int | None:
    """Which entry of the list a fault of a kernel is, if it is listed."""
    for number, one in enumerate(SURVIVE):
        if re.fullmatch(one.get("kernels", ".*"), slug) and any(
            re.fullmatch(pattern, str(fault)) for pattern in one["faults"]
        ):
            return number
    return None


@cache
def samples(kind: str) -> dict[str, list[Fault]]:
    """Of each kind of statement of a kind's kernels, and what is wrong with it, one that shows."""
    alike: dict[tuple[str, str], dict[str, list[Fault]]] = {}
    slugs = [slug for slug in SAMPLED if planned(slug).kind == kind]
    for slug in slugs:
        for fault in faults_of(slug).faults:
            if entry(slug, fault) is None:
                key = (fault.kind if fault.orders else "", fault.what)
                alike.setdefault(key, {}).setdefault(slug, []).append(fault)
    chosen: dict[str, list[Fault]] = {slug: [] for slug in slugs}
    for turn, kernels in enumerate(alike.values()):  # one kernel after another
        slug = [*kernels][turn % len(kernels)]
        chosen[slug].append(kernels[slug][turn % len(kernels[slug])])
    return chosen


@pytest.mark.parametrize("slug", SAMPLED)
def test_one_fault_of_each_kind_shows(slug: str) -> None:
    tried = faulted(slug)
    faults = samples(tried.plan.kind)[slug]
    unseen = [str(fault) for fault in faults if tried.end(fault.number, SEEDS) == "survives"]
    assert faults and not unseen


@pytest.mark.long
@pytest.mark.parametrize("slug", KERNELS)
def test_every_fault_shows_but_those_that_are_listed(slug: str) -> None:
    kernel = faulted(slug)
    assert kernel.end(0, SEEDS) == "survives"  # without a fault
    survivors = {
        str(fault) for fault in kernel.faults if kernel.end(fault.number, SEEDS) == "survives"
    }
    listed = {str(fault) for fault in kernel.faults if entry(slug, fault) is not None}
    assert survivors == listed


@pytest.mark.long
def test_every_entry_of_the_list_is_of_a_kernel() -> None:
    met = {entry(slug, fault) for slug in KERNELS for fault in faults_of(slug).faults}
    assert met >= set(range(len(SURVIVE)))
