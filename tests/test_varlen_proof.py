"""The proof of kernels of varlen sequences finds those that are wrong, and what is right passes."""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest

from fagen import registry
from fagen.errors import VerificationError
from fagen.expr.words import GIVEN
from fagen.kind import Plan, load_named
from fagen.measure.sequences import UNTOUCHED, Case, small_cases
from fagen.measure.verification import check
from tests.varlen_helpers import emulated

FORWARD = "fwd_fp16_d64_causal_m64n64_varlen"
E4M3 = "fwd_e4m3_d64_causal_m64n64_varlen"
BACKWARD = "bwd_fp16_d16_causal_m64n64_varlen"


def forgets_rows_before(plan: Plan, **named: Any) -> None:
    first = int(named["cu_seqlens_q"][0])
    emulated(plan)(**named)
    named[plan.signature.outputs[0].name][:first] = UNTOUCHED  # out, or dq


def forgets_rows_behind(plan: Plan, **named: Any) -> None:
    emulated(plan)(**named)
    if plan.kind == "forward":
        named["lse"][:, int(named["cu_seqlens_q"][-1]) :] = UNTOUCHED
    else:
        named["dv"][int(named["cu_seqlens_k"][-1]) :] = UNTOUCHED


def reads_a_neighbour(plan: Plan, **named: Any) -> None:
    named["cu_seqlens_k"] = named["cu_seqlens_k"].clone()
    named["cu_seqlens_k"][1:-1] += 1
    emulated(plan)(**named)


def sees_unused_keys(plan: Plan, **named: Any) -> None:
    emulated(plan)(**named | {"seqused_k": None})


def leaves_unused_keys(plan: Plan, **named: Any) -> None:
    emulated(plan)(**named)
    used = named["seqused_k"].tolist() if named["seqused_k"] is not None else ()
    for (begin, end), count in zip(pairwise(named["cu_seqlens_k"].tolist()), used, strict=False):
        named["dk"][begin + count : end] = 7.0


def forgets_rows_that_see_no_key(plan: Plan, **named: Any) -> None:
    emulated(plan)(**named)
    blind = named["lse"] == -math.inf
    named[plan.signature.outputs[0].name][blind.T if plan.kind == "forward" else blind.all(0)] = 7.0


OF_BOTH = (
    forgets_rows_before,
    forgets_rows_behind,
    reads_a_neighbour,
    sees_unused_keys,
    forgets_rows_that_see_no_key,
)


def gives_a_sequence_what_is_anothers(plan: Plan, **named: Any) -> None:
    for name in plan.mask.given:
        value = named[name]
        named[name] = value + 1 if isinstance(value, int) else value.roll(1)
    emulated(plan)(**named)


@cache
def proved(slug: str) -> tuple[Plan, Any, tuple[Case, ...]]:
    """A Plan, its rule and its small cases, which the emulation passes."""
    plan = registry.plan_of(slug)
    rule, cases = load_named(registry.kind(plan.kind).verification).rule(plan), small_cases(plan)
    errors = check(plan, rule, emulated(plan), cases=cases, device="cpu")
    assert len(errors) == len(cases) and all(error.ok for error in errors)
    return plan, rule, cases


@pytest.mark.parametrize(
    ("slug", "wrong"),
    [
        *((slug, wrong) for slug in (FORWARD, E4M3, BACKWARD) for wrong in OF_BOTH),
        (BACKWARD, leaves_unused_keys),
    ],
)
def test_the_proof_finds_a_kernel_that_is_wrong(slug: str, wrong: Callable[..., None]) -> None:
    plan, rule, cases = proved(slug)
    with pytest.raises(VerificationError, match=f"of {len(cases)} cases are wrong"):
        check(plan, rule, partial(wrong, plan), cases=cases, device="cpu")


@pytest.mark.parametrize(
    "slug",
    [f"fwd_fp16_d64_{mask}_m64n64_varlen" for mask in GIVEN if mask != "causal_by_sequence"],
)
def test_what_a_call_gives_to_a_mask_is_proved_too(slug):
    plan, rule, cases = proved(slug)
    kernel = partial(gives_a_sequence_what_is_anothers, plan)
    with pytest.raises(VerificationError):
        check(plan, rule, kernel, cases=cases, device="cpu")
