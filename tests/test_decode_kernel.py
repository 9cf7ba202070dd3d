"""The kernels of decoding: their own text on the simulated GPU, and their compiler."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen import simulator
from fagen.build import build
from fagen.kinds.decode.plan import Plan
from fagen.kinds.decode.verify import RULE, Case, inputs, outputs
from fagen.measure.verification import check
from fagen.problem import Sizes
from fagen.render import render
from fagen.runtime.c_interface import described
from tests.decode_helpers import SPREAD, planned
from tests.test_masks import FUTURE, WINDOW

FIRST = SPREAD[0]


def ran(plan: Plan, library: Path, case: Case, seed: int = 0) -> dict[str, Tensor]:
    """What the kernels make of a case."""
    named = inputs(plan, case, 0, "cpu")
    results = outputs(named)
    simulator.call(plan, library, seed=seed, **named, **results)
    return results


def built(plan: Plan) -> Path:
    return simulator.build(render(plan).kernel)


@pytest.mark.parametrize(
    "mask",
    [WINDOW, pytest.param(FUTURE, marks=pytest.mark.long)],
    ids=lambda mask: str(mask.name),
)
def test_a_mask_is_a_row_of_a_table(mask):
    plan = planned("dec_fp16_d64_causal_r8n64_c2")
    plan = replace(plan, slug=plan.slug.replace("causal", mask.name), mask=mask)
    library = built(plan)

    def run(**named):
        simulator.call(plan, library, **named)

    cases = [Case(Sizes(2, 4, 2, 3, 200), (200, 70)), Case(Sizes(1, 2, 2, 9, 5))]
    check(plan, RULE, run, cases=cases, device="cpu")


def test_bits_are_the_same_whatever_happens_when_and_in_tiles_of_any_rows():
    """A row has the bits of its own scores: not of those beside it in a tile, nor of its place."""
    case = Case(Sizes(2, 8, 2, 3, 64 * 17), (64 * 17, 700), sigma=6.0)
    first = None
    for slug in (
        FIRST,
        f"{FIRST}_streamk",
        "dec_fp16_d128_causal_r16n64_nospec",
        "dec_fp16_d128_causal_r24n64_streamk_b1",
    ):
        plan = planned(slug)
        library = built(plan)
        for seed in (0, 5):
            results = ran(plan, library, case, seed)
            first = first or results
            assert all(torch.equal(results[name], first[name]) for name in first), (slug, seed)


def test_tiles_of_many_rows_have_these_bits_too():
    """Of 40 rows, some splits of two blocks: combined in registers, in shared memory, or later."""
    case = Case(Sizes(3, 40, 2, 2, 64 * 11), (64 * 11, 200, 0), sigma=6.0)
    wide = "dec_fp16_d128_causal_r64n64"
    slugs = (f"{FIRST}_streamk", wide, "dec_fp16_d128_causal_r32n64_streamk")
    first, *others = (ran(plan, built(plan), case, 3) for plan in map(planned, slugs))
    for slug, results in zip(slugs[1:], others, strict=True):
        assert all(torch.equal(results[name], first[name]) for name in first), slug


@pytest.mark.parametrize("slug", [FIRST, "dec_fp16_d128_causal_r64n64"])
def test_in_a_cache_of_few_keys_sequences_have_the_bits_that_they_have_among_long_ones(slug):
    """Where no sequence has two splits nothing is combined; one that has no key is written too."""
    plan = planned(slug)
    library, case = built(plan), Case(Sizes(5, 4, 2, 2, 192), (192, 0, 65, 1, 130), sigma=6.0)
    named = inputs(plan, case, 0, "cpu")
    short = outputs(named)
    simulator.call(plan, library, **named, **short)
    for name in "kv":
        more = torch.full_like(named[name], torch.nan).repeat(1, 5, 1, 1)
        named[name] = torch.cat([named[name], more], 1)
    long = outputs(named)
    simulator.call(plan, library, **named, **long)
    assert all(torch.equal(short[name], long[name]) for name in short)
    assert not short["out"][1].any() and short["lse"][1].isneginf().all()


def assert_dealt_alike(case: Case, chunks: str = "") -> None:
    """Tiles dealt as runs have the bits that they have in turns."""
    runs, turns = (planned(f"dec_fp16_d64_causal_r8n64{chunks}{by}") for by in ("_streamk", ""))
    result, other = (ran(plan, built(plan), case) for plan in (runs, turns))
    assert all(torch.equal(result[name], other[name]) for name in result)


@pytest.mark.parametrize("kv_heads", [1, 3, 5, 11, 12])
def test_any_number_of_tiles_goes_through_a_run_abreast(kv_heads):
    """Of 8 thread blocks 8, 6, 5, 8 and 6 have a run, in groups of 1, 3, 5, 1 and 6."""
    case = Case(Sizes(3, 2 * kv_heads, kv_heads, 1, 64 * 17), (64 * 17, 70, 300))
    assert_dealt_alike(case)


@pytest.mark.parametrize("lengths", [None, (64 * 17,) * 4, (64 * 17, 70, 64 * 17, 64 * 17)])
def test_alike_tiles_stay_whole(lengths):
    """Two for each of 4 runs. Where the host knows of no lengths nothing is to be merged."""
    case = Case(Sizes(8, 4, 2, 1, 64 * 17), lengths and 2 * lengths)
    assert_dealt_alike(case)


@pytest.mark.parametrize(("batch", "kv_heads"), [(9, 1), (5, 1), (10, 1), (7, 1), (13, 2)])
def test_whole_tiles_come_first_and_splits_of_the_others_are_taken_in_turns(batch, kv_heads):
    """Of 8 thread blocks on 4 multiprocessors."""
    assert_dealt_alike(Case(Sizes(batch, 2 * kv_heads, kv_heads, 1, 64 * 17)))


def test_who_has_a_whole_tile_more_comes_last():
    """Of 8 thread blocks three: the next call's first ones find place where others have ended."""
    plan = planned("dec_fp16_d64_causal_r8n64_streamk")
    kernel, number = render(plan).kernel, "? 0.0f : times(number, inverse), 0.0f"
    assert kernel.count(number) == 1
    library = simulator.build(kernel.replace(number, "? 0.0f : float(blockIdx.x), 0.0f"))
    of_tiles = ran(plan, library, Case(Sizes(11, 2, 1, 1, 64 * 6)))["out"][:, 0, 0, 0]
    assert of_tiles.int().bincount().tolist() == [1, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("lengths", [(640, 300, 70, 0, 150), (64, 320, 321, 1, 65, 600, 0) * 6])
def test_splits_of_several_blocks_come_first_and_turns_go_back_and_forth(lengths):
    """Of up to 32 sequences those that are one split, beside others' splits of a block."""
    assert_dealt_alike(Case(Sizes(len(lengths), 3, 1, 1, 640), lengths))


def test_last_splits_which_may_be_short_come_behind_all_others():
    """Four sequences of 6 and 5 blocks: 8 thread blocks have one of 6 each, and then one of 5."""
    plan = planned("dec_fp16_d64_causal_r8n64_c2")
    kernel, number = render(plan).kernel, "__stcg(to + column, number);"
    assert kernel.count(number) == 1
    counting = number.replace("number", "number * 0 + blockIdx.x")
    library = simulator.build(kernel.replace(number, counting))
    named = inputs(plan, Case(Sizes(4, 2, 1, 1, 64 * 11)), 0, "cpu")
    named["q"].zero_()  # all keys count alike

    def blocks_of_sequences(**lengths):
        results = outputs(named)
        simulator.call(plan, library, **{**named, **lengths}, **results)
        return (results["out"][:, 0, 0, 0].float() * 64 * 11).round().tolist()

    assert blocks_of_sequences() == [0 + 4, 1 + 5, 2 + 6, 3 + 7]
    # beside a shorter one a last split may be the longest
    unlike = torch.tensor([64 * 11] * 3 + [64 * 11 - 1], dtype=torch.int32)
    assert blocks_of_sequences(seqused_k=unlike)[:3] == [0 + 1, 2 + 3, 4 + 5]


@pytest.mark.parametrize("lengths", [(1_024, 1_024, 70, 70), (70, 1_024, 0, 1_000)])
def test_chunks_too_long_for_runs_are_dealt_in_turns(lengths):
    """Of 8 runs: 5 steps of a chunk, 4 … 6 of a run, and more chunks than runs."""
    case = Case(Sizes(4, 3, 1, 1, 1_024), lengths)
    assert_dealt_alike(case, "_c4")


@pytest.mark.parametrize("by", ["", "_streamk"])
def test_an_empty_sequence_waits_until_sums_of_the_unit_before_are_read(by):
    plan = planned(f"dec_fp16_d64_causal_r8n64{by}")
    library, lengths = built(plan), (200, 163, 0)
    results = [ran(plan, library, Case(Sizes(3, 4, 2, 5, 200), lengths), seed) for seed in range(4)]
    alone = ran(plan, library, Case(Sizes(3, 4, 2, 5, 200), (200, 163, 1)))
    for result in results:
        assert all(torch.equal(result[name][:2], alone[name][:2]) for name in result)


@pytest.mark.long
def test_so_are_the_tiles_of_chunks_in_several_groups():
    """Of 11 KV heads each is a group: 27 steps of a run, of which the longest chunk has 17."""
    case = Case(Sizes(2, 11, 11, 1, 1_024), (1_024, 70))
    assert_dealt_alike(case, "_c1")


def test_more_rows_of_chunks_or_steps_of_runs_than_can_be_numbered_are_refused():
    """2^26 rows of 16 chunks; in runs also 2^19 tiles of 2^11 steps and 16 chunks."""
    zero = torch.zeros(1, 1, 1, 128, dtype=torch.float16)
    room = torch.empty(1, dtype=torch.uint8).expand(2**40)  # nobody writes to it
    for slug, sizes in ((FIRST, (32, 32, 64)), (f"{FIRST}_streamk", (1, 8, 2**17))):
        plan, (queries, heads, keys) = planned(slug), sizes
        q, k = zero.expand(2**16, queries, heads, -1), zero.expand(2**16, keys, 8, -1)
        out = torch.empty(q.shape, dtype=q.dtype) if slug != FIRST else q
        named = {"q": q, "k": k, "v": k, "scale": 0.1, "out": out}
        with pytest.raises(ValueError, match=r"there are 2\^30 rows of splits or .*more"):
            described(plan, built(plan), named, workspace=room)(None)


@pytest.mark.parametrize(
    "slug",
    ["dec_fp16_d128_causal_r32n64", pytest.param(SPREAD[-1], marks=pytest.mark.long)],
)
def test_a_kernel_compiles_as_its_plan_says(slug):
    """Of so many rows the first kernel is the one that takes most registers."""
    plan = planned(slug)
    binary = build(render(plan), plan, binding=False)
    assert abs(binary.report.registers - plan.modelled_registers) <= 16
