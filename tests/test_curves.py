"""tanh by a curve: how near it is, and that what is beyond its end is found out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import registry
from fagen.errors import ScheduleError
from fagen.kinds.scores import CURVE
from fagen.render import render
from tests.mask_helpers import call_of, check, simulated
from tests.often import some

X = torch.linspace(1e-3, math.atanh(CURVE.end), 10_001, dtype=torch.float64)


def curve(x: Tensor) -> Tensor:
    """What the curve makes of numbers."""
    total: Any = 0.0
    for coefficient in reversed(CURVE.coefficients):
        total = total * x**2 + coefficient
    return x * total


def test_the_curve_is_as_near_as_the_instruction_and_rises_for_ever() -> None:
    assert ((curve(X) / torch.tanh(X)) - 1).abs().max() < 1.13e-5  # that of tanh.approx.f32
    far = torch.linspace(0, 100, 100_001, dtype=torch.float64)
    assert (curve(far).diff() > 0).all()


# what a call's Q is multiplied by, and what K's numbers are made of; softcap
CALLS = {
    "small": (0.3, lambda k: k, 50.0),
    "larger": (1.4, lambda k: k, 50.0),
    "beyond the curve": (6.0, lambda k: k, 50.0),
    "all positive": (0.7, torch.abs, 50.0),
    "all negative": (0.7, lambda k: -k.abs(), 50.0),
    "far below": (9.0, lambda k: -k.abs(), 50.0),
    "few large keys": (
        0.3,
        lambda k: k * torch.where(torch.arange(300) % 97 == 5, 8, 1)[:, None, None],
        50.0,
    ),
    "rising": (0.5, lambda k: k * torch.linspace(4, 0, 300)[:, None, None], 50.0),
    "a small cap": (0.3, lambda k: k, 3.0),
    "a large cap": (1.0, lambda k: k, 1e5),
}
SLUGS = (
    "fwd_fp16_d64_causal_m64n64_softcap_curve",
    "fwd_bf16_d64_full_m128n64_softcap_curve",
    "fwd_fp16_d64_window_m64n64_softcap_curve",
)
OFTEN = (
    *(f"{SLUGS[0]}, {name}" for name in ("small", "beyond the curve", "few large keys", "rising")),
    f"{SLUGS[1]}, all positive",
    f"{SLUGS[2]}, larger",
)


def capped(s: Tensor, *, softcap: float, **at: Any) -> Tensor:
    """What a cap makes of scaled products."""
    return softcap * torch.tanh(s / softcap)


def call(slug: str, name: str, device: str = "cpu") -> Any:
    """A Plan, a call of it with such numbers, and what is right."""
    factor, keys, softcap = CALLS[name]
    given = {"window_left": 90, "window_right": 3} if "window" in slug else {}

    def changed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = q if name in ("small", "larger", "beyond the curve", "few large keys") else q.abs()
        return q * factor, keys(k.abs() if name == "rising" else k)

    sizes, of_score = (1, 2, 1, 150, 300), {"softcap": softcap}
    return call_of(slug, sizes, given, 0, capped, of_score, device, changed)


@pytest.mark.parametrize("case", some([f"{s}, {n}" for s in SLUGS for n in CALLS], OFTEN))
def test_scores_by_a_curve_are_those_of_a_dense_softmax(case: str) -> None:
    plan, arguments, exact = call(*case.split(", "))
    check(plan, simulated(plan, arguments), exact)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_what_is_no_number_stays_in_the_rows_that_see_it(number: float) -> None:
    plan, arguments, _ = call(SLUGS[0], "small")
    clean = simulated(plan, arguments)
    arguments["k"][:, 250:, :, 3] = number  # of keys that later queries see alone
    for was, found in zip(clean, simulated(plan, arguments), strict=True):
        rows = found.movedim(1, -1)[..., :100] if found.ndim == 4 else found[..., :100]
        before = was.movedim(1, -1)[..., :100] if was.ndim == 4 else was[..., :100]
        assert torch.equal(rows, before)
    if math.isnan(number):
        assert found[..., -1].isnan().all()


FAULTS = (
    ("small", "{0.99999, ", "{0.97999, "),
    ("beyond the curve", "curve_holds ? float(curve_end - 9 / curve_outer) : -INFINITY", "1e9f"),
    ("far below", "curve_holds ? float(24 / curve_outer - curve_end) : INFINITY", "-INFINITY"),
    ("rising", "part[0] <= kMaxCurvedSum && part[1] <= kMaxCurvedSum", "true"),
    ("rising", "    if (!curved) {\n      score_block(s, tile, block);\n    }\n", ""),
)


@pytest.mark.parametrize("place", range(len(FAULTS)))
def test_what_would_be_wrong_shows(place: int) -> None:
    name, right, wrong = FAULTS[place]
    plan, arguments, exact = call(SLUGS[0], name)
    kernel = render(plan).kernel
    assert kernel.count(right) == 1
    with pytest.raises(AssertionError):
        check(plan, simulated(plan, arguments, kernel.replace(right, wrong)), exact)


@pytest.mark.parametrize(
    ("slug", "said"),
    [
        ("fwd_fp16_d64_causal_m64n64_curve", "scores that are a tanh"),
        ("fwd_fp16_d64_causal_m64n64_softcap_nointra_curve", "intra_warpgroup"),
        ("fwd_fp16_d64_causal_m64n64_softcap_noprod_curve", "producer"),
        ("fwd_fp16_d64_causal_m64n64_softcap_onlinemax_curve", "maximum"),
        ("fwd_fp16_d64_causal_m64n48_softcap_curve", "multiple of 32"),
        ("fwd_e4m3_d64_causal_m64n64_softcap_lazymax_curve", "e4m3"),
    ],
)
def test_where_nothing_proves_a_curve_it_is_refused(slug: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        registry.plan_of(slug)
