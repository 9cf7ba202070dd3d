"""Timing side by side, without a GPU: what is run, in which order, and beside what."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fagen.errors import DeviceError, VerificationError
from fagen.kinds.forward import operands
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.reference import reference
from fagen.measure import inputs as measure_inputs
from fagen.measure import rounds
from fagen.measure.rounds import BRIEF, CUDNN, Kernel
from fagen.measure.timing import Call
from fagen.problem import Cell, Problem, Sizes

CASE = Cell(Problem("fp16", 64, 64, "causal"), Sizes(1, 2, 2, 64, 64))
EXPECTED = rounds._expected.__wrapped__  # as it is, and not what was remembered
ANCHOR = Kernel("anchor", Path("anchor.so"))
PLAN = plan(Schedule.from_slug("fwd_fp16_d64_causal_m128n128"))


class Clock:
    def mhz(self):
        return 1_700


@pytest.fixture
def device(monkeypatch):
    """A device that does nothing but note what it is given; the anchor takes a second longer each.

    `slow` names kernels that give wrong numbers.
    """

    class Device:
        ran: list[str]
        wrong: set[str]

    made = Device()
    made.ran, made.wrong = [], set()
    calls = {}

    def bind(of, library, *, q, k, v, scale, out, lse):
        assert library == Path(f"{of.slug}.so")

        def launch():
            made.ran.append(of.slug)
            exact, exact_lse = reference(q, k, v, mask="causal", scale=scale)
            out.copy_(exact * (2 if of.slug in made.wrong else 1))
            lse.copy_(exact_lse)

        return launch

    def time_round(call, regime, each, clock):
        before = len(made.ran)
        call.run()
        calls[id(call)] = made.ran[before] if len(made.ran) > before else CUDNN
        return float(len(made.ran)), [1_700]

    monkeypatch.setattr(operands, "bind", bind)
    monkeypatch.setattr(rounds, "plan_of", lambda slug: replace(PLAN, slug=slug))
    monkeypatch.setattr(rounds, "time_round", time_round)
    monkeypatch.setattr(rounds, "estimate", lambda call: 1e-3)
    monkeypatch.setattr(rounds, "Clock", Clock)
    monkeypatch.setattr(rounds, "inputs", partial(measure_inputs.inputs, device="cpu"))

    def exact(case):
        q, k, v = rounds._inputs(case)
        scale = measure_inputs.softmax_scale(case.problem.head_dim)
        return reference(q, k, v, mask=case.problem.mask, scale=scale)[0].half()

    monkeypatch.setattr(rounds, "_expected", exact)
    monkeypatch.setattr(rounds, "_beside", lambda case: None)
    monkeypatch.setattr(rounds, "_known", {})
    rounds._inputs.cache_clear()
    yield made
    rounds._inputs.cache_clear()


def kernels(count):
    return [Kernel(f"k{i}", Path(f"k{i}.so")) for i in range(count)]


def test_every_kernel_runs_in_every_round_with_the_anchor_before_and_after_each_group(device):
    laps = rounds.side_by_side(CASE, kernels(6), ANCHOR, regime=BRIEF, repeats=(0, 1))
    assert sorted((lap.name, lap.repeat) for lap in laps) == [
        (f"k{i}", n) for i in range(6) for n in (0, 1)
    ]
    assert device.ran.count("anchor") == 2 * 3
    assert device.ran[0] == device.ran[5] == device.ran[8] == "anchor"


def test_the_order_differs_from_round_to_round_and_is_repeatable(device):
    first = rounds.side_by_side(CASE, kernels(8), ANCHOR, regime=BRIEF, repeats=(0, 1))
    again = rounds.side_by_side(CASE, kernels(8), ANCHOR, regime=BRIEF, repeats=(0, 1))
    names = [lap.name for lap in first]
    assert names == [lap.name for lap in again]
    assert names[:8] != names[8:]


def test_a_time_stands_beside_the_faster_anchor_next_to_it(device):
    laps = rounds.side_by_side(CASE, kernels(2), ANCHOR, regime=BRIEF, repeats=(0,))
    assert [lap.anchor_seconds for lap in laps] == [1.0, 1.0]  # the later one took 4
    assert [lap.sm_clock_mhz for lap in laps] == [1_700, 1_700]


def test_calls_that_are_shorter_than_the_hosts_run_many_at_a_time(device, monkeypatch):
    """Else their times would be the host's; what is said is the time of one."""
    grouped = []

    def captured(call, runs):
        grouped.append(runs)
        return call

    monkeypatch.setattr(rounds, "captured", captured)
    monkeypatch.setattr(rounds, "estimate", lambda call: 8e-6)
    laps = rounds.side_by_side(CASE, kernels(2), ANCHOR, regime=BRIEF, repeats=(0,))
    assert grouped == [rounds.RUNS] * 3  # the anchor too
    assert [lap.anchor_seconds for lap in laps] == [1 / rounds.RUNS] * 2


def test_cudnn_runs_along_where_it_can(device, monkeypatch):
    monkeypatch.setattr(rounds, "_beside", lambda case: Call(lambda: torch.zeros(1)))
    laps = rounds.side_by_side(CASE, kernels(2), ANCHOR, regime=BRIEF, repeats=(0,))
    assert {lap.name for lap in laps} == {"k0", "k1", CUDNN}


def test_a_right_kernel_passes_the_quick_check_and_a_wrong_one_does_not(device):
    right, wrong = kernels(2)
    rounds.quick_check(CASE, right)
    device.wrong.add("k1")
    with pytest.raises(VerificationError, match=r"error .* is allowed"):
        rounds.quick_check(CASE, wrong)


def test_where_no_backend_of_torch_can_the_check_in_fp64_stands_alone(device, monkeypatch):
    asked = []

    def refuse(name):
        asked.append(name)
        raise DeviceError(f"{name} has no such head dims")

    monkeypatch.setattr(rounds, "peer", refuse)
    monkeypatch.setattr(rounds, "_expected", EXPECTED)
    right, wrong = kernels(2)
    rounds.quick_check(CASE, right)
    assert asked == ["cudnn", "fa2", "efficient"]
    device.wrong.add("k1")
    with pytest.raises(VerificationError):
        rounds.quick_check(CASE, wrong)
