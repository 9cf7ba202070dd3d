"""What a search tries next: chooser, marks and tournament, without compiler and GPU."""

import math
import random
from collections import Counter

import pytest

from fagen.kinds.forward import cost
from fagen.kinds.forward.keys import Schedule
from fagen.problem import Sizes
from fagen.search.choice import Chooser, spearman
from fagen.search.declared import Effort
from fagen.search.marks import BRIEF, LONG, PEER_NAMES, Marks
from fagen.search.tasks import GOOD, Compiled, Time
from fagen.search.tournament import STAGES, Tournament
from tests.recordings import SPACE, surveyed

# ---- what is tried next --------------------------------------------------------------------------


def test_rank_correlation_is_spearmans():
    rising = [(float(i), float(i**3)) for i in range(20)]
    assert spearman(rising) == pytest.approx(1)
    assert spearman([(a, -b) for a, b in rising]) == pytest.approx(-1)
    assert spearman([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(0.8)
    assert spearman([(1, 1), (1, 2), (1, 3)]) == 0


def test_a_chooser_gives_each_point_once():
    text = SPACE + "\n[tile]\nblock_m = 128\nblock_n = [64, 128]\n"
    survey = surveyed(text)
    chooser = Chooser(survey, 100.0)
    slugs = []
    while schedule := chooser.next():
        slugs.append(schedule.slug)
    assert len(slugs) == len(set(slugs)) == len(survey.points)


def test_a_chooser_learns_what_the_prediction_does_not_know():
    survey = surveyed()
    untold = Chooser(survey, 2.0)
    foretold = [untold.next().tile.block_m for _ in range(60)]
    liked = Counter(foretold).most_common(1)[0][0]  # what the prediction puts first is slow

    def truth(schedule: Schedule) -> float:
        slow = 1.5 if schedule.tile.block_m == liked else 1.0
        return slow * cost.predictor(survey.sizes)(schedule.values())[-1]

    chooser = Chooser(survey, 2.0)
    chosen = []
    for _ in range(60):
        chosen.append(chooser.next())
        chooser.tell(chosen[-1], truth(chosen[-1]))
    heights = [schedule.tile.block_m for schedule in chosen]
    assert heights[0] == foretold[0], "as long as nothing is known, the prediction decides"
    assert heights.count(liked) < foretold.count(liked) / 2
    assert heights[-12:].count(liked) <= 4  # now and then the tile tried least


def test_a_prediction_that_does_not_correlate_leaves_nothing_out():
    survey = surveyed()
    chooser = Chooser(survey, 1.1)
    dice = random.Random(0)
    pruned = sum(
        survey.predicted(p) <= 1.1 * survey.predicted(survey.best[0]) for p in survey.points
    )
    count = 0
    while count < pruned + 20:
        schedule = chooser.next()
        assert schedule is not None
        count += 1
        chooser.tell(schedule, dice.random() + 1)
    assert chooser.correlation < 0.6


# ---- marks ---------------------------------------------------------------------------------------


SIZES = (Sizes(32, 16, 16, 512, 512), Sizes(1, 16, 16, 16_384, 16_384))
WEIGHTS = (1.0, 3.0)


def marked(*times: tuple[str, int, str, int, float]) -> Marks:
    marks = Marks(SIZES, WEIGHTS)
    for slug, size, regime, number, ratio in times:
        marks.add(Time(slug, SIZES[size], regime, number, 1e-3 * ratio, 1e-3, 1_600 + number))
    return marks


def test_a_mark_is_the_weighted_mean_of_the_ratios_to_the_anchor():
    marks = marked(("a", 0, BRIEF, 0, 2.0), ("a", 1, BRIEF, 0, 0.5))
    assert math.exp(marks.mark("a")) == pytest.approx(2.0**0.25 * 0.5**0.75)
    assert marks.mark("b") is None
    assert marked(("a", 0, BRIEF, 0, 2.0)).mark("a") is None  # not at every size


def test_a_disturbed_brief_run_does_not_count():
    marks = marked(*(("a", size, BRIEF, n, r) for size in (0, 1) for n, r in ((0, 1.0), (1, 3.0))))
    assert marks.mark("a") == 0


def test_long_runs_decide_where_there_are_any():
    both = [(slug, size, BRIEF, 0, r) for slug, r in (("a", 0.9), ("b", 1.0)) for size in (0, 1)]
    assert marked(*both).leader().slug == "a"
    long = [(slug, size, LONG, n, r) for slug, r in (("a", 1.0), ("b", 0.9)) for size in (0, 1)
            for n in (0, 1)]  # fmt: skip
    lead = marked(*both, *long).leader()
    assert (lead.slug, lead.second) == ("b", "a")
    assert lead.sure


def test_a_lead_within_the_noise_is_not_sure():
    dice = random.Random(1)
    times = [
        (slug, size, LONG, n, r * math.exp(dice.gauss(0, 0.02)))
        for slug, r in (("a", 0.999), ("b", 1.0))
        for size in (0, 1)
        for n in range(3)
    ]
    lead = marked(*times).leader()
    assert not lead.sure
    assert lead.error > 0.005


@pytest.mark.parametrize("peer", sorted(PEER_NAMES))
def test_the_peer_is_no_kernel(peer):
    marks = marked(*((slug, size, BRIEF, 0, r) for slug, r in (("a", 0.8), (peer, 1.0))
                     for size in (0, 1)))  # fmt: skip
    assert marks.slugs() == ["a"]
    assert marks.over_peer("a") == pytest.approx(1.25)
    assert marks.clocks == (1_600, 1_600)


# ---- a tournament --------------------------------------------------------------------------------


def tournament(compile_at_most: int = 40) -> Tournament:
    survey = surveyed()
    effort = Effort(compile=compile_at_most)
    return Tournament(survey, effort, [survey.schedule(survey.best[0]).slug])


def play(it: Tournament, speed=lambda slug: 1.0, bad=(), wrong=()) -> list:
    """Compile and time whatever a tournament asks for; return its rounds."""
    rounds = []
    for _ in range(10_000):
        if it.done:
            return rounds
        while slug := it.next_compile(0.0):
            it.compiling(slug)
            outcome = "spills" if slug in bad else GOOD
            it.add_compiled(Compiled(slug, slug, "nvcc", outcome, library="x"), ready=True)
        if task := it.next_round(0.0, lambda job: True):
            rounds.append(task)
            it.round_over(task)
            for kernel in task.kernels:
                if kernel.slug in wrong:
                    it.add_wrong(kernel.slug, "is wrong")
                    continue
                for size in task.sizes:
                    for n in task.repeats:
                        it.add_time(
                            Time(kernel.slug, size, task.regime, n, speed(kernel.slug), 1.0)
                        )
    raise AssertionError("it never ends")


def test_a_tournament_halves_its_field_and_ends_with_long_runs_of_a_few():
    dice = random.Random(3)
    speeds: dict[str, float] = {}
    it = tournament()
    rounds = play(it, lambda slug: speeds.setdefault(slug, math.exp(dice.gauss(0, 0.1))))
    last = {stage: set() for stage in {(s.regime, s.repeats) for s in STAGES}}
    for task in rounds:
        last[task.regime, task.repeats] |= {kernel.slug for kernel in task.kernels}
    sizes = [len(last[s.regime, s.repeats]) for s in STAGES]
    assert sizes[0] == 40
    assert 8 <= sizes[1] <= 20 > sizes[2] >= 4 >= sizes[3] >= 2
    assert it.marks.leader().slug == min(speeds, key=speeds.get)


def test_a_tournament_checks_every_kernel_before_it_counts_and_the_anchor_first():
    it = tournament(12)
    rounds = play(it)
    assert rounds[0].check
    assert [kernel.slug for kernel in rounds[0].kernels] == [it.anchor]
    checked = {kernel.slug for task in rounds if task.check for kernel in task.kernels}
    assert {kernel.slug for task in rounds for kernel in task.kernels} == checked


def test_a_kernel_that_spills_is_not_timed_and_one_that_is_wrong_not_again():
    spills, wrong = set(), set()
    probe = tournament(12)
    play(probe)
    slugs = sorted(set(probe.entries) - {probe.anchor})
    spills, wrong = set(slugs[:3]), set(slugs[3:5])
    it = tournament(12)
    rounds = play(it, bad=spills, wrong=wrong)
    timed = [kernel.slug for task in rounds for kernel in task.kernels]
    assert not spills & set(timed)
    assert all(timed.count(slug) <= 1 for slug in wrong)
    assert it.marks.leader().slug not in spills | wrong


def test_long_runs_may_be_left_out():
    survey = surveyed()
    anchor = [survey.schedule(survey.best[0]).slug]
    for long_runs in (True, False):
        it = Tournament(survey, Effort(compile=12, long_runs=long_runs), anchor)
        rounds = play(it)
        assert it.done and it.timed == 12
        assert any(task.regime == LONG for task in rounds) == long_runs
        assert {n for task in rounds if task.regime == BRIEF for n in task.repeats} == {*range(7)}


def test_the_first_points_are_of_several_tiles_though_one_is_predicted_fastest():
    survey = surveyed()
    chooser = Chooser(survey, 1.6)
    tiles = [(s.tile.block_m, s.tile.block_n) for s in (chooser.next() for _ in range(12))]
    fastest = [survey.schedule(point).tile for point in survey.best[:12]]
    assert len(set(tiles)) > len({(tile.block_m, tile.block_n) for tile in fastest})
    assert len(set(tiles)) >= 6


def test_without_a_right_anchor_a_tournament_ends():
    it = tournament(12)
    assert play(it, wrong={it.anchor}) and it.done


def test_once_the_lead_is_sure_no_more_rounds_are_run():
    speeds: dict[str, float] = {}
    it = tournament(20)
    rounds = play(it, lambda slug: speeds.setdefault(slug, 1.0 + 0.1 * len(speeds)))
    assert {task.repeats for task in rounds if task.regime == LONG} == {(0, 1)}
    even = play(tournament(20))
    assert {task.repeats for task in even if task.regime == LONG} == {(0, 1), (2,), (3,)}
