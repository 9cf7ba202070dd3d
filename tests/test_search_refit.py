"""The constants of the prediction, refitted, beside what a search of many head dims measured."""

import json
import math
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from fagen.kinds.forward.defaults import derived_schedules
from fagen.paths import locate
from fagen.problem import Problem
from fagen.vocab import PLAIN_MASKS

FOLDER = locate("cli.py").parent / "benchmarks/search"
LEAST = 0.6
HARD = {"d160": 0.5, "d176": 0.5}  # with the full mask all within 7 %: little to rank
DERIVED = ("d24", "d56", "d88", "d104", "d136", "d144", "d176", "d208")  # without tuned kernels


def _refit():
    spec = spec_from_file_location("benchmarks_refit", FOLDER / "refit.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


refit = _refit()
MANY = refit.many()
RECORD = json.loads((FOLDER / "refit.json").read_text())


def test_the_constants_are_those_that_were_fitted():
    assert refit.constants() == RECORD["fitted"]


def test_predictions_correlate_with_head_dims_that_the_fit_had_not_seen():
    data = [*MANY, *refit.stores()]
    assert {row.head_dims for row in data} == RECORD["left_out"].keys()
    for dims, left_out in RECORD["left_out"].items():
        with refit.using(left_out["constants"]):
            rank = refit.correlation([row for row in data if row.head_dims == dims])
        assert rank == pytest.approx(left_out["correlation"], abs=2e-3), dims
        assert rank >= HARD.get(dims, LEAST), dims


def test_a_fit_finds_constants_that_made_the_times():
    some = [row for row in MANY if row.head_dims in ("d48", "d80", "d96", "d112", "d120", "d144")]
    truth = {"REQUEST": 2.0, "EPILOGUE": 5_000.0}
    with refit.using(refit.constants() | truth):
        rows = [
            replace(row, microseconds=dict(zip(row.microseconds, times, strict=True)))
            for row in some
            for times in [
                [
                    [m * math.exp(r) for m, r in zip(measured, rest, strict=True)]
                    for measured, rest in zip(
                        row.microseconds.values(), row.residuals(), strict=True
                    )
                ]
            ]
        ]
    constants = refit.fit(rows, rounds=8)
    assert {name: constants[name] for name in truth} == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("mask", PLAIN_MASKS)
@pytest.mark.parametrize("dims", DERIVED)
def test_what_is_derived_is_within_five_per_cent_of_what_a_search_found(dims, mask):
    rows = [row for row in MANY if row.problem == f"fp16_{dims}_{mask}"]
    if not rows or rows[0].padded:
        pytest.skip("not measured as it is laid out today")
    seconds = {
        slug: math.prod(times) ** (1 / len(times)) for slug, times in rows[0].microseconds.items()
    }
    head_dim = int(dims[1:])
    derived = derived_schedules(Problem("fp16", head_dim, head_dim, mask))
    first = next((s.slug for s in derived if s.slug in seconds), None)
    if first is None:
        pytest.skip("what is derived spilled when it was measured")
    assert seconds[first] <= 1.05 * min(seconds.values()), first
