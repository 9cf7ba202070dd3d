"""Search of the backward pass: what is tried, refused and predicted, and a whole one replayed."""

from itertools import product

import pytest

from fagen.arch import SM90
from fagen.dispatch.select import buildable
from fagen.kinds.backward import cost
from fagen.kinds.backward.keys import Schedule
from fagen.paths import locate
from fagen.problem import Problem, Sizes, flops, standard_sizes
from fagen.search.files import read_spaces
from fagen.search.space import survey
from fagen.vocab import MASKS, PLAIN_MASKS
from tests.recordings import toml

TEXT = toml(
    backward={"dtype": "fp16", "head_dim": 64, "mask": ["full", "causal"]},
    shapes=[{"seqlen": 512}, {"seqlen": 4096}],
)
FORWARD = TEXT.replace("[backward]", "[attention]")


def values(slug: str) -> dict[str, object]:
    return Schedule.from_slug(slug).values()


# ---- the prediction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slug", "clocks"),
    [  # of a call of 4,096 rows and keys as ncu counted them on an H200, less TILE for each tile of
        # the SM that has most: 256 steps; and less by what they have gained since
        ("bwd_fp16_d128_full_m64n128", 3_483 * 587 / 612),
        ("bwd_fp16_d64_full_m128n128", 3_996 * 517 / 527),
    ],
)
def test_a_step_takes_about_as_long_as_measured_kernels_of_its_tile(slug, clocks):
    step = cost.step(values(slug))
    statistics = 2 * values(slug)["block_m"]  # clocks of the tensor cores
    assert step.tensor == 2_560 + statistics and step.bound == "tensor"
    assert step.clocks == pytest.approx(clocks, rel=0.07)


def test_a_step_of_fewer_keys_is_bound_by_what_l2_adds_up():
    step = cost.step(values("bwd_fp16_d64_full_m64n64"))
    assert step.bound == "l2" and step.tensor == 640 + 64
    assert (
        step.clocks / 64**2 > 1.4 * cost.step(values("bwd_fp16_d64_full_m128n128")).clocks / 128**2
    )


@pytest.mark.parametrize("worse", ["s1", "dos1", "dss1"])
def test_fewer_buffers_are_slower(worse):
    sizes = standard_sizes(64)
    usual = "bwd_fp16_d64_full_m128n128"
    assert cost.seconds(values(f"{usual}_{worse}"), sizes) > cost.seconds(values(usual), sizes)


@pytest.mark.parametrize(
    ("slug", "seqlen", "tflops"),
    [  # benchmarks/notes/log.md, on an H200 in bursts
        ("bwd_fp16_d128_causal_m64n128", 16_384, 656),
        ("bwd_fp16_d128_full_m64n128", 4_096, 612),
        ("bwd_fp16_d64_full_m128n128", 16_384, 568),
        ("bwd_fp16_d64_causal_m128n128", 4_096, 481),
        ("bwd_fp16_d128_full_m64n128_det", 512, 369),
        ("bwd_fp16_d128_full_m64n128_det", 16_384, 644),
        ("bwd_fp16_d128_causal_m64n128_det", 1_024, 360),
        ("bwd_fp16_d256_full_m64n64_dss1_intra_c2", 16_384, 598),
        ("bwd_fp16_d256_causal_m64n64_dss1_intra_c2", 1_024, 325),
    ],
)
def test_speeds_are_near_those_of_such_kernels(slug, seqlen, tflops):
    problem = Problem.of(Schedule.from_slug(slug))
    sizes = standard_sizes(problem.head_dim, seqlen)
    surveyed = flops(problem, sizes) / cost.seconds(values(slug), sizes) / 1e12
    assert surveyed == pytest.approx(tflops, rel=0.12)


@pytest.mark.parametrize("mask", list(PLAIN_MASKS))
@pytest.mark.parametrize("lengths", [(1, 1), (100, 300), (300, 100), (257, 257), (64, 640)])
def test_steps_are_the_blocks_of_rows_that_see_any_of_a_tiles_keys(mask, lengths):
    sizes = Sizes(1, 1, 1, *lengths)
    for m, n in product((64, 128), repeat=2):
        for left in range(0, sizes.seqlen_k, n):
            blocks = set()
            for row in range(sizes.seqlen_q):
                first, last = MASKS[mask].keys(row, *lengths)
                if max(first, left) < min(last, left + n, sizes.seqlen_k):
                    blocks.add(row // m)
            assert cost._steps(m, mask, left, n, sizes) == len(blocks)


def test_grouped_heads_make_fewer_tiles_of_more_steps():
    ungrouped, grouped = Sizes(8, 32, 32, 4_096, 4_096), Sizes(8, 32, 8, 4_096, 4_096)
    steps, tiles = cost.grid(64, 128, "causal", ungrouped)
    steps_grouped, tiles_grouped = cost.grid(64, 128, "causal", grouped)
    assert tiles_grouped == tiles / 4
    assert steps_grouped == pytest.approx(steps, rel=0.02)
    few = Sizes(1, 8, 1, 4_096, 4_096)  # 32 tiles for 132 SMs: the longest decides
    assert cost.grid(64, 128, "causal", few) == (8 * 64, 1)
    assert cost.grid(64, 128, "full", few) == (8 * 64, 1)


def test_the_kernels_around_it_move_bytes():
    sizes = standard_sizes(128)
    # FlashAttention-3's take 66 and 46 microseconds, of which sums that are cleared are 32
    assert cost.rows_seconds(64, "fp16", 128, 128, sizes) == pytest.approx(80e-6, rel=0.1)
    whole = cost.seconds(values("bwd_fp16_d128_full_m64n128"), Sizes(1, 1, 1, 1, 1))
    assert whole > 2 * SM90.launch_seconds


# ---- the space ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(locate("cli.py").parent.glob("spaces/bwd_*.toml")))
def test_committed_spaces_hold_what_serves_and_predict_it_among_the_best(path):
    (declared,) = read_spaces(path)
    assert declared.kind == "backward"
    for target in declared.targets():
        assert target.kind == "backward" and target.name.startswith("bwd_fp16_d")
        surveyed = survey(declared, target)
        assert 0 < len(surveyed.points) <= surveyed.total == declared.points / 2
        slugs = [surveyed.schedule(point).slug for point in surveyed.best]
        serving = [
            schedule.slug for schedule in buildable(target).schedules if schedule.slug in slugs
        ]
        usual = surveyed.predicted(surveyed.best[slugs.index(serving[0])])
        assert usual < declared.effort.prune * surveyed.predicted(surveyed.best[0]), (
            "it is not left out"
        )
        assert len(set(slugs)) == len(slugs), "each schedule is one point"


@pytest.mark.parametrize("dims", ["80", "96", "112", "160", "192", "192v128"])
def test_a_space_of_a_head_dim_without_a_schedule_is_tried_in_half_a_minute(dims):
    (declared,) = read_spaces(locate("cli.py").parent / "spaces" / f"bwd_fp16_d{dims}.toml")
    assert {target.mask for target in declared.targets()} == {*PLAIN_MASKS}
    for target in declared.targets():
        surveyed = survey(declared, target)
        first, *_ = buildable(target).schedules
        # 20 CPU-seconds a kernel, and a second each on a GPU
        assert 4 <= len(surveyed.points) <= 6 and len(declared.shapes) <= 3
        assert not declared.effort.long_runs
        predicted = {
            surveyed.schedule(point).slug: surveyed.predicted(point) for point in surveyed.points
        }
        assert predicted[first.slug] == min(predicted.values()), "what is derived is predicted best"
