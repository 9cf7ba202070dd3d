"""Scores of kernels: softcap and texts, emulated and on the simulated GPU, by lambdas of ours."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.render import render
from tests.mask_helpers import (
    call_of,
    check,
    check_varlen,
    emulated,
    simulated,
    varlen_call,
)
from tests.often import some
from tests.score_helpers import TEXTS, Scored, word_of


def capped(s: Tensor, *, softcap: float, **at: Any) -> Tensor:
    """What a cap makes of scaled products."""
    return softcap * torch.tanh(s / softcap)


def call(
    slug: str,
    sizes: tuple[int, ...],
    of_mask: Mapping[str, Any],
    of_score: Mapping[str, Any],
    score: Scored = capped,
) -> Any:
    """A Plan, a call of it with a score, and what is right."""
    plan, arguments, exact = call_of(slug, sizes, of_mask, score=score, of_score=of_score)
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
    ("fwd_e4m3_d64_causal_m64n64_softcap_vrows_pm1_pc32", (2, 2, 1, 90, 300), {}),
    ("fwd_e4m3_d64_full_m64n64_softcap_nointra_sblock_pm1_pc64", (1, 2, 1, 90, 300), {}),
    ("fwd_e4m3_d64_causal_m64n64_softcap_split3_vrows_pm1_pc32", (1, 2, 1, 90, 300), {}),
    ("fwd_e4m3_d64_full_m64n64_softcap_lazymax_pm1_pc32", (1, 2, 1, 90, 300), {}),
    ("dec_fp16_d64_causal_r16n64_softcap", (2, 4, 2, 3, 700), {}),
    ("dec_bf16_d64_full_r16n64_softcap_streamk", (2, 4, 2, 3, 700), {}),
    ("dec_fp16_d64_causal_r8n64_softcap_fixed", (2, 4, 2, 3, 700), {}),
    ("dec_fp16_d96_causal_r16n64_softcap_h2", (1, 8, 4, 1, 400), {}),
)
OFTEN = 0, 4, 7, 9, 10, 13


def of_mask(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a mask is given, tables as tensors."""
    return {
        name: torch.tensor(x, dtype=torch.int32) if isinstance(x, tuple) else x
        for name, x in given.items()
    }


@pytest.mark.parametrize(("slug", "sizes", "given"), CAPPED, ids=lambda x: str(x)[:44])
def test_capped_scores_are_emulated_as_a_dense_softmax_has_them(slug, sizes, given) -> None:
    for softcap in (1.0, 5.0, 50.0, 1e4):
        plan, arguments, exact = call(slug, sizes, of_mask(given), {"softcap": softcap})
        check(plan, emulated(plan, arguments), exact)


@pytest.mark.parametrize(
    "place", some(range(len(CAPPED)), OFTEN), ids=lambda place: CAPPED[place][0]
)
def test_a_kernels_own_text_caps_scores(place) -> None:
    slug, sizes, given = CAPPED[place]
    plan, arguments, exact = call(slug, sizes, of_mask(given), {"softcap": 5.0})
    check(plan, simulated(plan, arguments), exact)


VARLEN = (
    ("fwd_fp16_d64_causal_m64n64_softcap_varlen", {}),
    ("fwd_bf16_d64_full_m128n64_softcap_varlen_packgqa", {}),
    ("fwd_fp16_d64_window_m64n64_softcap_varlen", {"window_left": 40, "window_right": 2}),
    ("fwd_e4m3_d64_causal_m64n64_softcap_varlen_pm1_pc32", {}),
)


@pytest.mark.parametrize("place", some(range(len(VARLEN)), [0]), ids=lambda at: VARLEN[at][0])
def test_scores_of_varlen_sequences_are_capped(place) -> None:
    slug, given = VARLEN[place]
    plan, arguments, exact = varlen_call(slug, given, score=capped, of_score={"softcap": 5.0})
    check_varlen(plan, emulated(plan, arguments), exact)
    check_varlen(plan, simulated(plan, arguments), exact)


# ---- texts ---------------------------------------------------------------------------------------

FORMS = {
    "fwd_fp16_d64_causal_m64n64_{}": (2, 4, 2, 90, 150),
    "fwd_bf16_d64_causal_m64n64_{}_packgqa": (2, 4, 2, 20, 150),
    "fwd_fp16_d64_causal_m64n64_{}_split2": (2, 4, 2, 90, 150),
    "fwd_e4m3_d64_causal_m64n64_{}_vrows_pm1_pc32": (2, 4, 2, 90, 150),
    "dec_fp16_d64_causal_r16n64_{}": (2, 4, 2, 3, 500),
    "dec_fp16_d64_window_r8n64_{}_streamk": (2, 4, 2, 2, 500),
    "dec_fp16_d96_causal_r16n64_{}_h2": (2, 8, 4, 1, 300),
}
OF_TEXTS = [(form, label) for form in FORMS for label in TEXTS]
OFTEN_TEXTS = [
    ("fwd_fp16_d64_causal_m64n64_{}", "unseen"),
    ("fwd_fp16_d64_causal_m64n64_{}", "worked_out"),
    ("fwd_bf16_d64_causal_m64n64_{}_packgqa", "alibi"),
    ("fwd_fp16_d64_causal_m64n64_{}_split2", "steepest"),
    ("fwd_e4m3_d64_causal_m64n64_{}_vrows_pm1_pc32", "striped"),
    ("dec_fp16_d64_causal_r16n64_{}", "rooted"),
    ("dec_fp16_d64_window_r8n64_{}_streamk", "without"),
]


@pytest.mark.parametrize("label", TEXTS)
def test_texts_are_emulated_as_lambdas_have_them(label: str) -> None:
    for form, sizes in FORMS.items():
        plan, arguments, exact = of_text(form, sizes, label)
        check(plan, emulated(plan, arguments), exact)


@pytest.mark.parametrize("form_and_label", some(OF_TEXTS, OFTEN_TEXTS), ids=" ".join)
def test_a_kernels_own_text_makes_scores_of_a_text(form_and_label: tuple[str, str]) -> None:
    form, label = form_and_label
    plan, arguments, exact = of_text(form, FORMS[form], label)
    check(plan, simulated(plan, arguments), exact)


def of_text(form: str, sizes: tuple[int, ...], label: str) -> Any:
    """A Plan, a call of it with a text, and what is right."""
    window = {"window_left": 70, "window_right": 0} if "window" in form else {}
    text = TEXTS[label]
    return call(form.format(word_of(label)), sizes, window, text.given, text.by_hand)


@pytest.mark.parametrize("label", ["alibi", "by_batch"])
def test_of_varlen_texts_know_places_lengths_and_numbers(label: str) -> None:
    text = TEXTS[label]
    slug = f"fwd_fp16_d64_causal_m64n64_{word_of(label)}_varlen"
    plan, arguments, exact = varlen_call(slug, {}, score=text.by_hand, of_score=text.given)
    check_varlen(plan, emulated(plan, arguments), exact)
    check_varlen(plan, simulated(plan, arguments), exact)


def test_beside_a_mask_by_sequence_texts_know_its_number() -> None:
    text, prefix = TEXTS["by_batch"], {"prefix": torch.tensor([5, 90], dtype=torch.int32)}
    slug = f"fwd_fp16_d64_prefix_m64n64_{word_of('by_batch')}"
    plan, arguments, exact = call(slug, (2, 2, 1, 90, 150), prefix, {}, text.by_hand)
    check(plan, emulated(plan, arguments), exact)
    check(plan, simulated(plan, arguments), exact)


# what kernels say of scores, and what would be wrong
ACT, HIDE = (f"{name}_block(s, tile, tile.blocks.last - 1);\n" for name in ("score", "mask"))
FAULTS = (
    ("softcap", "s[i] * params.product_scale", "s[i]"),
    ("softcap", "params.scale_log2 = a.softcap", "params.scale_log2 = a.scale"),
    ("softcap", f"{ACT}    {HIDE}", f"{HIDE}    {ACT}"),
    ("alibi", "float(tile.head + 1)", "float(tile.kv_head + 1)"),
    ("alibi", "query[row_of(i)]", "query[0]"),
    ("alibi", "+ column_of(i))", "+ i)"),
    ("alibi", " + params.seqlen_k - params.seqlen_q", ""),
)


@pytest.mark.parametrize("place", range(len(FAULTS)))
def test_what_would_be_wrong_shows(place: int) -> None:
    label, right, wrong = FAULTS[place]
    own = {"softcap": 5.0} if label == "softcap" else {}
    word, by_hand = (label, capped) if own else (word_of(label), TEXTS[label].by_hand)
    slug = f"fwd_fp16_d64_causal_m64n64_{word}"
    plan, arguments, exact = call(slug, (1, 4, 2, 90, 150), {}, own, by_hand)
    kernel = render(plan).kernel
    assert kernel.count(right) == 1
    with pytest.raises(AssertionError):
        check(plan, simulated(plan, arguments, kernel.replace(right, wrong)), exact)
