"""Softcap and texts of scores on a Hopper GPU, into outputs of NaN, beside lambdas of ours."""

import pytest
import torch

import fagen
from fagen import registry
from fagen.kind import load_named
from fagen.kinds.forward.operands import arguments, launch, outputs
from fagen.measure.inputs import cell_of, inputs
from fagen.measure.verification import Verification
from fagen.problem import Sizes
from fagen.runtime import op
from tests.gpu.conftest import SCORED
from tests.gpu.helpers import poisoned, same
from tests.mask_helpers import call_of, check, check_varlen, varlen_call
from tests.score_helpers import TEXTS, word_of
from tests.test_curves import CALLS
from tests.test_curves import call as curved_call
from tests.test_mask_calls import tensors
from tests.test_scores import CAPPED, FORMS, VARLEN, capped, of_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]


@pytest.mark.parametrize("slug", SCORED)
def test_committed_kernels_pass_their_proof_and_their_ops_give_what_c_does(pair_of, slug):
    plan, binary = pair_of(slug)
    verification: Verification = load_named(registry.kind(plan.kind).verification)
    assert all(error.ok for error in verification.errors(plan, binary, print))
    given = arguments(plan, *inputs(cell_of(plan, Sizes(2, 4, 2, 300, 333))))
    into = outputs(plan, given[0])
    launch(plan, binary.library, given, into)()
    assert same(op.load(binary)(*given), into)


# each text in one form, and each form
SPREAD = [(list(FORMS)[place % len(FORMS)], label) for place, label in enumerate(TEXTS)]
LONGER = (5, 5), (0, 7), (140, 140), (3, 0), (1, 1_500), (700, 330), (330, 700)


def beside(plan, call, sizes):
    """What decoding takes besides."""
    if plan.kind == "decode":
        call |= {"seqused_k": None, "leftpad_k": None}
        if plan.fixed:
            call["reference"] = torch.linspace(-2, 9, sizes[1], device="cuda")
    return call


@pytest.mark.parametrize(("slug", "sizes", "given"), CAPPED, ids=[one[0] for one in CAPPED])
def test_capped_scores_are_a_dense_softmaxs(pair_of, slug, sizes, given):
    plan, binary = pair_of(slug)
    *heads, rows, keys = sizes
    for own in (sizes, (*heads, rows, 5 * keys + 3), (*heads, 3 * rows + 1, keys)):
        for softcap in (1.0, 5.0, 50.0, 1e4):
            score = dict(score=capped, of_score={"softcap": softcap})
            _, call, exact = call_of(slug, own, of_mask(given), **score, device="cuda")
            check(plan, poisoned(plan, binary, beside(plan, call, own)), exact)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("slug", [slug for slug in SCORED if slug.endswith("_curve")])
def test_scores_by_a_curve_are_a_dense_softmaxs_wherever_they_lie(pair_of, slug, name):
    plan, binary = pair_of(slug)
    _, call, exact = curved_call(slug, name, "cuda")
    check(plan, poisoned(plan, binary, call), exact)


@pytest.mark.parametrize(("slug", "given"), VARLEN, ids=[one[0] for one in VARLEN])
def test_scores_of_varlen_sequences_are_capped(pair_of, slug, given):
    plan, binary = pair_of(slug)
    for heads in ((2, 1), (6, 2), (8, 1)):
        for softcap in (2.0, 50.0):
            score = dict(score=capped, of_score={"softcap": softcap})
            more = dict(lengths=LONGER, device="cuda")
            _, call, exact = varlen_call(slug, of_mask(given), heads, **score, **more)
            check_varlen(plan, poisoned(plan, binary, call), exact)


@pytest.mark.parametrize(("form", "label"), SPREAD, ids=list(TEXTS))
def test_texts_make_of_products_what_lambdas_do(pair_of, form, label):
    plan, binary = pair_of(form.format(word_of(label)))
    sizes = FORMS[form]
    text, window = TEXTS[label], {"window_left": 70, "window_right": 0}
    *heads, rows, keys = sizes
    for own in (sizes, (*heads, rows, 5 * keys + 3)):
        score = dict(score=text.by_hand, of_score=text.given)
        given = window if plan.mask.name == "window" else {}
        _, call, exact = call_of(plan.slug, own, given, **score, device="cuda")
        check(plan, poisoned(plan, binary, beside(plan, call, own)), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_a_capped_call_is_near_fp64_whatever_its_cap_by_one_kernel(pair_of, causal):
    for lengths in ((70, 70), (33, 700), (700, 33), (1, 900)):
        q, k, v = (x.cuda() for x in tensors(*lengths))
        for softcap in (0.5, 20.0, 1e5):
            how = dict(causal=causal, softcap=softcap)
            out = fagen.attention(4 * q, k, v, **how)
            expected = fagen.attention(4 * q.cpu(), k.cpu(), v.cpu(), **how)
            torch.testing.assert_close(out.cpu(), expected, atol=4e-3, rtol=0)
