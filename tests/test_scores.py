"""Scores of kernels: softcap and texts, emulated and on the simulated GPU, by lambdas of ours."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.mask_helpers import Scored, call_of, check, emulated, simulated
from tests.often import some

BY_HAND: Mapping[str, Scored] = {
    "softcap": lambda s, *, softcap, **where: softcap * torch.tanh(s / softcap),
}


def call(slug: str, sizes: tuple[int, ...], of_mask: Mapping[str, Any], softcap: float) -> Any:
    """A Plan, a call of it whose scores are capped, and what is right."""
    found = call_of(slug, sizes, of_mask, score=BY_HAND["softcap"], of_score={"softcap": softcap})
    plan, arguments, exact = found
    if plan.kind == "decode":
        arguments |= {"seqused_k": None, "leftpad_k": None}
        if plan.fixed:
            arguments["reference"] = torch.linspace(-2, 9, sizes[1])
    return plan, arguments, exact


# dense: under PV and alone, without a producer, packed heads, splits, a cluster; decoding: in turn
# and in runs, in pairs of heads, relative to numbers of the caller's
CAPPED = (
    ("fwd_fp16_d128_causal_m128n128_softcap", (2, 2, 1, 200, 300), {}),
    ("fwd_bf16_d64_full_m128n128_softcap_q2", (1, 2, 2, 130, 300), {}),
    ("fwd_fp16_d64_causal_m64n64_softcap_nointra", (1, 2, 1, 130, 300), {}),
    ("fwd_fp16_d64_causal_m128n64_softcap_noprod", (1, 2, 1, 130, 300), {}),
    ("fwd_fp16_d64_causal_m64n64_softcap_packgqa", (1, 4, 1, 30, 300), {}),
    ("fwd_fp16_d64_causal_m128n64_softcap_split3", (1, 2, 1, 130, 300), {}),
    ("fwd_fp16_d64_full_m64n64_softcap_c2", (1, 2, 1, 130, 200), {}),
    (
        "fwd_bf16_d64_window_m64n64_softcap",
        *((1, 2, 1, 130, 300), {"window_left": 70, "window_right": 3}),
    ),
    ("fwd_fp16_d64_prefix_m64n64_softcap", (2, 2, 1, 130, 200), {"prefix": (5, 150)}),
    ("dec_fp16_d64_causal_r16n64_softcap", (2, 4, 2, 3, 700), {}),
    ("dec_bf16_d64_full_r16n64_softcap_streamk", (2, 4, 2, 3, 700), {}),
    ("dec_fp16_d64_causal_r8n64_softcap_fixed", (2, 4, 2, 3, 700), {}),
    ("dec_fp16_d96_causal_r16n64_softcap_h2", (1, 8, 4, 1, 400), {}),
)
OFTEN = 0, 4, 7, 9


def of_mask(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a mask is given, tables as tensors."""
    return {
        name: torch.tensor(x, dtype=torch.int32) if isinstance(x, tuple) else x
        for name, x in given.items()
    }


@pytest.mark.parametrize(("slug", "sizes", "given"), CAPPED, ids=lambda x: str(x)[:44])
def test_capped_scores_are_emulated_as_a_dense_softmax_has_them(slug, sizes, given) -> None:
    for softcap in (1.0, 5.0, 50.0, 1e4):
        plan, arguments, exact = call(slug, sizes, of_mask(given), softcap)
        check(plan, emulated(plan, arguments), exact)


@pytest.mark.parametrize(
    "place", some(range(len(CAPPED)), OFTEN), ids=lambda place: CAPPED[place][0]
)
def test_a_kernels_own_text_caps_scores(place) -> None:
    slug, sizes, given = CAPPED[place]
    plan, arguments, exact = call(slug, sizes, of_mask(given), 5.0)
    check(plan, simulated(plan, arguments), exact)
