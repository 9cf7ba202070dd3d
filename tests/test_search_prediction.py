"""The predicted time of a kernel, beside what was measured."""

import math

import pytest

from fagen import search
from fagen.kinds.forward import cost
from fagen.kinds.forward.keys import Schedule
from fagen.problem import Sizes
from fagen.vocab import SIXTEEN_BITS
from tests.recordings import DATABASES


def in_16_bits(path):
    """What a search found there: slugs of e4m3 meant other kernels when it ran."""
    return [result for result in search.found(path) if result.target.dtype in SIXTEEN_BITS]


# ---- the prediction ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DATABASES, ids=lambda path: path.stem)
def test_nine_predictions_of_ten_are_within_three_tenths_of_what_was_measured(path):
    timed = [result for result in in_16_bits(path) if result.marks.slugs()]
    assert timed
    for result in timed:
        marks = result.marks
        errors = sorted(
            abs(math.log(cost.seconds(Schedule.from_slug(slug).values(), size) / measured))
            for slug in marks.slugs()
            for size in result.sizes
            if (measured := marks.seconds(slug, size))
        )
        assert errors[len(errors) * 9 // 10] < math.log(1.3), result.target


def test_a_causal_grid_in_strides_waits_for_its_longest_tiles_and_lpt_does_not():
    size = Sizes(32, 16, 16, 512, 512)
    strided, _ = cost.grid(128, 128, "causal", "persistent", size)
    dealt, _ = cost.grid(128, 128, "causal", "lpt", size)
    assert strided > 1.3 * dealt  # 132 is a multiple of 4 tiles: some blocks get long ones only


def test_a_pair_of_causal_blocks_goes_as_far_as_the_longer_of_its_tiles():
    size = Sizes(33, 16, 16, 512, 512)
    unpaired, tiles = cost.grid(128, 128, "causal", "lpt", size)  # 1, 2, 3, 4 steps
    paired, as_many = cost.grid(128, 128, "causal", "lpt", size, cluster=2)  # 2, 2, 4, 4
    assert tiles == as_many
    assert paired == pytest.approx(unpaired * 3 / 2.5)
    # three tiles of a head: the fourth of two pairs has no row, and takes as long
    assert cost.grid(192, 128, "full", "persistent", size, cluster=2) == pytest.approx(
        cost.grid(128, 128, "full", "persistent", size)
    )


def test_a_step_names_what_is_busiest():
    busiest = cost.step(Schedule.from_slug("fwd_fp16_d256_full_m64n80").values())
    assert busiest.clocks > max(busiest.parts().values())
    assert busiest.bound in busiest.parts()


# ---- a whole search, replayed --------------------------------------------------------------------


@pytest.mark.parametrize("path", DATABASES, ids=lambda path: path.stem)
def test_the_prediction_correlates_with_what_was_measured(path):
    correlations = {
        result.target.name: result.correlation
        for result in in_16_bits(path)
        if len(result.marks.slugs()) >= 24
    }
    assert correlations and min(correlations.values()) >= 0.6, correlations
