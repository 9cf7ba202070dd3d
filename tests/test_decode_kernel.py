"""The kernels of decoding: their own text on the simulated GPU, and their compiler."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen import registry, simulator
from fagen.build import build
from fagen.errors import DeviceError
from fagen.kinds.decode.plan import Plan
from fagen.kinds.decode.verify import RULE, Case, inputs, outputs, small_cases
from fagen.measure.proof import check
from fagen.problem import Sizes
from fagen.render import render
from fagen.runtime.c_interface import described
from tests.decode_helpers import SPREAD, planned
from tests.often import some
from tests.test_masks import FUTURE, WINDOW

COMMITTED = tuple(path.stem for path in registry.schedules("decode"))
FIRST = SPREAD[0]
OFTEN = (*SPREAD[:4], *SPREAD[-2:])
# two steps of a chunk, the second with larger scores, and a last block that is not full
RISING = Case(Sizes(2, 8, 2, 1, 64 * 17), (64 * 17, 64 * 16 + 5), rises=True, sigma=6.0)


def ran(plan: Plan, library: Path, case: Case, seed: int = 0) -> dict[str, Tensor]:
    """What the kernels make of a case."""
    given = inputs(plan, case, 0, "cpu")
    found = outputs(given)
    simulator.call(plan, library, seed=seed, **given, **found)
    return found


def built(plan: Plan) -> Path:
    return simulator.build(render(plan).kernel)


@pytest.mark.parametrize("slug", some((*SPREAD, *COMMITTED), OFTEN))
def test_the_kernels_are_right_whatever_happens_when(slug):
    plan = planned(slug)
    assert simulator.check(plan, render(plan).kernel, seeds=1) == len(small_cases(plan)) + 1


@pytest.mark.parametrize("mask", [WINDOW, FUTURE], ids=lambda mask: str(mask.name))
def test_a_mask_is_a_row_of_a_table(mask):
    plan = planned("dec_fp16_d64_causal_r8n64_c2")
    plan = replace(plan, slug=plan.slug.replace("causal", mask.name), mask=mask)
    library = built(plan)

    def run(**given):
        simulator.call(plan, library, **given)

    cases = [Case(Sizes(2, 4, 2, 3, 200), (200, 70)), Case(Sizes(1, 2, 2, 9, 5))]
    check(plan, RULE, run, cases=cases, device="cpu")


def test_bits_are_the_same_whatever_happens_when_and_in_tiles_of_any_rows():
    """A row has the bits of its own scores: not of those beside it in a tile, nor of its place."""
    case = Case(Sizes(2, 8, 2, 3, 64 * 17), (64 * 17, 700), sigma=6.0)
    first = None
    for slug in (
        FIRST,
        f"{FIRST}_runs",
        "dec_fp16_d128_causal_r16n64_nospec",
        "dec_fp16_d128_causal_r24n64_runs_q1_b1",
    ):
        plan = planned(slug)
        library = built(plan)
        for seed in (0, 5):
            found = ran(plan, library, case, seed)
            first = first or found
            assert all(torch.equal(found[name], first[name]) for name in first), (slug, seed)


@pytest.mark.parametrize("kv_heads", [1, 3, 5, 11, 12])
def test_any_number_of_tiles_goes_through_a_run_abreast(kv_heads):
    """Of 8 thread blocks 8, 6, 5, 8 and 6 have a run, in groups of 1, 3, 5, 1 and 6."""
    case = Case(Sizes(3, 2 * kv_heads, kv_heads, 1, 64 * 17), (64 * 17, 70, 300))
    runs, turns = (planned(f"dec_fp16_d64_causal_r8n64{by}") for by in ("_runs", ""))
    one, other = (ran(plan, built(plan), case) for plan in (runs, turns))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lengths", [None, (64 * 17,) * 4, (64 * 17, 70, 64 * 17, 64 * 17)])
def test_alike_tiles_stay_whole(lengths):
    """Two for each of 4 runs. Where the host knows of no lengths nothing is to be merged."""
    case = Case(Sizes(8, 4, 2, 1, 64 * 17), lengths and 2 * lengths)
    runs, turns = (planned(f"dec_fp16_d64_causal_r8n64{by}") for by in ("_runs", ""))
    one, other = (ran(plan, built(plan), case) for plan in (runs, turns))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lengths", [(1_024, 1_024, 70, 70), (70, 1_024, 0, 1_000)])
def test_chunks_too_long_for_runs_are_dealt_in_turns(lengths):
    """Of 8 runs: 5 steps of a chunk, 4 … 6 of a run, and more chunks than runs."""
    case = Case(Sizes(4, 3, 1, 1, 1_024), lengths)
    runs, turns = (planned(f"dec_fp16_d64_causal_r8n64_c4{by}") for by in ("_runs", ""))
    one, other = (ran(plan, built(plan), case) for plan in (runs, turns))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_so_are_the_tiles_of_chunks_in_several_groups():
    """Of 11 KV heads each is a group: 27 steps of a run, of which the longest chunk has 17."""
    case = Case(Sizes(2, 11, 11, 1, 1_024), (1_024, 70))
    runs, turns = (planned(f"dec_fp16_d64_causal_r8n64_c1{by}") for by in ("_runs", ""))
    one, other = (ran(plan, built(plan), case) for plan in (runs, turns))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_more_rows_of_chunks_or_steps_of_runs_than_can_be_numbered_are_refused():
    """2^26 rows of 16 chunks; in runs also 2^19 tiles of 2^11 steps and 16 chunks."""
    one = torch.zeros(1, 1, 1, 128, dtype=torch.float16)
    room = torch.empty(1, dtype=torch.uint8).expand(2**40)  # nobody writes to it
    for slug, sizes in ((FIRST, (32, 32, 64)), (f"{FIRST}_runs", (1, 8, 2**17))):
        plan, (queries, heads, keys) = planned(slug), sizes
        q, k = one.expand(2**16, queries, heads, -1), one.expand(2**16, keys, 8, -1)
        out = torch.empty(q.shape, dtype=q.dtype) if slug != FIRST else q
        given = {"q": q, "k": k, "v": k, "scale": 0.1, "out": out}
        with pytest.raises(ValueError, match=r"there are 2\^30 rows of chunks or .*more"):
            described(plan, built(plan), given, workspace=room)(None)


_MEET = "    meet();\n#pragma unroll\n    for (int j = 0; j < kRows / 4; ++j) {\n      "
# what is there, and what is left of it: a number is wrong then, or nobody can go on
FAULTS = {
    "K or V is not waited for": ("shared.full[tile.stage].wait(tile.phase);", ""),
    "nor are the queries": ("shared.q_full[q.stage].wait(q.phase);", ""),
    "a buffer is filled before it has been read": (
        "shared.empty[tile.stage].wait(tile.phase ^ 1);",
        "",
    ),
    "S is read before it is there": ("wgmma_wait<0>();\n#pragma unroll", "#pragma unroll"),
    "V behind the end stays what it was": ("      clear_values(", "      if (false) clear_values("),
    "no reference is outgrown": ("meet_and_vote(outgrown(s))", "meet_and_vote(false)"),
    "maxima are read too early": (f"{_MEET}float maximum", f"{_MEET[12:]}float maximum"),
    "sums are read too early": (f"{_MEET}const int row", f"{_MEET[12:]}const int row"),
    "what was summed does not follow the reference": ("sum[j] *= factor;", ""),
}
# the same of chunks of one block: the ring has place for a third one's
SHORT = Case(Sizes(8, 8, 2, 1, 512), (512,) * 8)
SHORT_FAULTS = {
    "queries are filled before they have been read": (
        "shared.q_empty[q.stage].wait(q.phase ^ 1);",
        "",
    ),
}
# the same of a kernel whose blocks fold chunks that follow each other: some of several tiles
MANY = Case(Sizes(8, 8, 2, 1, 64 * 17), (64 * 17, 64 * 16 + 5, 300, 70, 70, 70, 70, 70))
RUN_FAULTS = {
    "a chunk goes on with the sums before": ("        begin(unit);\n      }", "      }"),
    "a chunk's end is not seen": ("key + kBlockN == unit.first_key + chunk", "false"),
    "tiles stay whole that are not alike": (
        "params.level && __all_sync",
        "params.level || __all_sync",
    ),
    "a fold goes on with the next tile": ("      begin_fold();\n", ""),
    "blocks abreast take the same tile": (
        " + int(blockIdx.x) - params.abreast.divide(blockIdx.x) * abreast",
        "",
    ),
    "a block folds what another one began": ("folds = unit.chunk == 0;", "folds = true;"),
    "merge begins anew": ("maximum = __ldcg(&folded->maximum);", ""),
    "merge forgets the state's sum": ("sum = __ldcg(&folded->sum);", ""),
    "merge counts chunks twice": ("of_sequence - begun;", "of_sequence;"),
}
# and where chunks are too long for a run's share
LONG = Case(Sizes(4, 3, 1, 1, 1_024), (1_024, 1_024, 70, 70))
TURN_FAULTS = {
    "chunks are passed over": ("at += params.abreast.divide", "at += 2 * params.abreast.divide"),
    "a chunk goes on to the end": ("min(unit.first_key + keys, unit.sequence.length)", "2 * keys"),
    "sequences count as in runs": ("(in_turns ? chunks_of", "(false ? chunks_of"),
}
GROUPS = Case(Sizes(2, 11, 11, 1, 1_024), (1_024, 70))
GROUP_FAULTS = {
    "all groups are the first": (
        "group = rank - unit.chunk * params.tile_groups.value;",
        "group = 0;",
    ),
}
# and of one whose references are the caller's
MISSED = Case(Sizes(2, 8, 2, 1, 64 * 17), (64 * 17, 900), references=(0.0, -1e3, 30.0, 1e3))
UNIFIED_FAULTS = {
    "no row fails": ("!(total >= kLeastMean * keys)", "false"),
    "nobody asks whether one has": ("__syncthreads_or(consumer.failed)", "__syncthreads_or(false)"),
    "all rows of a unit are computed again": ("exact ? !repeats[j] : row", "row"),
    "the second time keeps the reference": ("exact ? -INFINITY : params", "params"),
}
QUICK = (
    "V behind the end stays what it was",
    "no reference is outgrown",
    "a block folds what another one began",
    "no row fails",
)


def faults() -> list[object]:
    found = [
        *((FIRST, RISING, name, *fault) for name, fault in FAULTS.items()),
        *((FIRST, SHORT, name, *fault) for name, fault in SHORT_FAULTS.items()),
        *((f"{FIRST}_runs", MANY, name, *fault) for name, fault in RUN_FAULTS.items()),
        *((f"{FIRST}_c4_runs", LONG, name, *fault) for name, fault in TURN_FAULTS.items()),
        *((f"{FIRST}_c1_runs", GROUPS, name, *fault) for name, fault in GROUP_FAULTS.items()),
        *((f"{FIRST}_unified", MISSED, name, *fault) for name, fault in UNIFIED_FAULTS.items()),
    ]
    long = pytest.mark.long
    return [pytest.param(*one, id=one[2], marks=[] if one[2] in QUICK else [long]) for one in found]


@pytest.mark.parametrize(("slug", "case", "name", "right", "left"), faults())
def test_each_wait_and_each_care_is_needed(slug, case, name, right, left):
    plan = planned(slug)
    kernel = render(plan).kernel
    assert right in kernel, "the kernel has changed: say it here too"
    library = simulator.build(kernel.replace(right, left))
    healthy = ran(plan, built(plan), case)
    for seed in range(12):
        try:
            found = ran(plan, library, case, seed)
        except DeviceError:
            return
        if not all(torch.equal(found[key], healthy[key]) for key in healthy):
            return
    pytest.fail("nothing showed")


@pytest.mark.parametrize(
    "slug",
    ["dec_fp16_d128_causal_r32n64", pytest.param(SPREAD[-1], marks=pytest.mark.long)],
)
def test_a_kernel_compiles_as_its_plan_says(slug):
    """Of so many rows the first kernel is the one that takes most registers."""
    plan = planned(slug)
    binary = build(render(plan), plan, binding=False)
    assert abs(binary.report.registers - plan.modelled_registers) <= 16


# rows of 96 numbers, in a warp and a half, and of 32, in half of one
MERGED = ("dec_fp16_d96_full_r24n64_c20", "dec_bf16_d32_full_r8n64_c64")
WIDTHS = tuple(f"dec_bf16_d{d}_causal_r8n64{by}" for d in range(16, 257, 8) for by in ("", "_runs"))


@pytest.mark.parametrize("slug", some((*MERGED, *SPREAD, *COMMITTED, *WIDTHS), MERGED))
def test_it_compiles_without_a_spill_but_where_its_schedule_allows_one(slug):
    """Where nothing else is in line a call would be refused."""
    plan = planned(slug)
    report = build(render(plan), plan, binding=False).report
    assert (report.spill_store_bytes > 0) == (plan.max_spill_bytes > 0), "as its schedule says"
