"""Scores in the backward kernels: P of them, and dS by their slope; sinks and their gradients."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from fagen import render, simulator
from fagen.errors import ScheduleError
from fagen.kinds.backward.emulate import compute
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.oracle import gradients
from fagen.kinds.backward.plan import Plan, plan
from fagen.kinds.backward.verify import RULE, VARLEN_RULE, inputs
from fagen.problem import Sizes
from fagen.scoring import scored
from fagen.vocab import SCORES

SCALE = 0.5
SIZES = Sizes(1, 2, 1, 70, 150)
KEY, ROW = torch.arange(150), torch.arange(70)[:, None]

# of a text, what it is given, and the same by hand: a cap, which P and its slope share; a choice
# whose other branch is no number; keys and rows, in which a slope has neither; powers
WRITTEN: dict[str, tuple[dict[str, float], Callable[[Tensor], Tensor]]] = {
    "softcap": ({"softcap": 1.5}, lambda s: 1.5 * torch.tanh(s / 1.5)),
    "where(0.25 < score, 1.0 + log(score), score)": (
        {},
        lambda s: torch.where(s > 0.25, 1 + s.clamp(min=0.25).log(), s),
    ),
    "score + 0.125 * (k_idx % 4) - 0.25 * (q_idx % 3)": (
        {},
        lambda s: s + 0.125 * (KEY % 4) - 0.25 * (ROW % 3),
    ),
    "0.5 * abs(score) + 0.01 * score * score": ({}, lambda s: 0.5 * s.abs() + 0.01 * s.square()),
    "sqrt(abs(score))": ({}, lambda s: s.abs().sqrt()),
}


def named(text: str) -> str:
    """What schedules call a score."""
    if text in SCORES:
        return text
    name: str = scored(named, None, text, {})[0]
    return name


def planned(text: str, **keys: object) -> Plan:
    usual: dict[str, object] = dict(dtype="bf16", head_dim=64, mask="causal")
    usual |= dict(block_m=64, block_n=64, score=named(text))
    return plan(Schedule.make(**usual | keys))


def by_hand(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Callable[[Tensor], Tensor], causal: bool
) -> list[Tensor]:
    """(out, lse, dq, dk, dv) in fp64, by autograd; one KV head."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    score = f(SCALE * torch.einsum("bshd,btd->bhst", q, k[:, :, 0]))
    if causal:
        score = score.masked_fill(KEY > ROW + 80, -math.inf)
    out = torch.einsum("bhst,btd->bshd", score.softmax(-1), v[:, :, 0])
    own = torch.autograd.grad(out, (q, k, v), dout.double())
    return [x.detach() for x in (out, score.logsumexp(-1), *own)]


# how ones and LSEs lie, who makes dS, whether tiles follow each other
SIMULATED = [
    ("softcap", {"head_dim": 128, "block_n": 128, "persistent": True, "dtype": "fp16"}),
    ("softcap", {"block_m": 80}),
    ("where(0.25 < score, 1.0 + log(score), score)", {}),
    ("sqrt(abs(score))", {"head_dim": 192, "mask": "full", "ds_stages": 1}),
]


@pytest.mark.parametrize(("text", "way"), [*((text, {}) for text in WRITTEN), *SIMULATED])
def test_kernels_differentiate_what_a_score_says(text, way):
    built, (given, f) = planned(text, **way), WRITTEN[text]
    dout, q, k, v = inputs(built, SIZES, device="cpu")
    out, lse, *exact = by_hand(dout, q, k, v, f, built.mask.last_by_row)
    call = dict(dout=dout, q=q, k=k, v=v, out=out.to(q.dtype), lse=lse.float(), scale=SCALE)
    found = [compute(built, **call, **given)]
    if (text, way) in SIMULATED:
        results = {f"d{name}": torch.full_like(call[name], math.nan) for name in "qkv"}
        library = simulator.build(render.kernel_text(built))
        simulator.call(built, library, **call, **given, **results)
        found.append(tuple(results.values()))
    for gradients_of_inputs in found:
        for got, wanted in zip(gradients_of_inputs, exact, strict=True):
            error = (got.double() - wanted).norm() / wanted.norm()
            assert error < (0.002 if built.dtype.name == "fp16" else 0.01), error


@pytest.mark.parametrize("text", WRITTEN)
def test_the_reference_is_what_autograd_makes_of_the_same_by_hand(text):
    given, f = WRITTEN[text]
    dout, q, k, v = (torch.randn(1, n, h, 8) for n, h in ((70, 2), (70, 2), (150, 1), (150, 1)))
    score = SCORES[named(text)].bound(given)
    found = gradients(dout, q, k, v, mask=planned(text).mask, score=score, scale=SCALE)
    for got, wanted in zip(found, by_hand(dout, q, k, v, f, causal=True), strict=True):
        assert torch.allclose(got, wanted, atol=1e-12, rtol=1e-10)


def test_what_a_step_does_not_know_is_refused_by_name():
    with pytest.raises(ScheduleError, match="reads head, of which so far there are no gradients"):
        planned("score - 0.5 * head")
    planned("score + q_idx % 2 * 0.5")
    with pytest.raises(ScheduleError, match="reads q_idx, of which so far there are no gradients"):
        planned("score + q_idx % 2 * 0.5", head_dim=192)
    with pytest.raises(ScheduleError, match='kept = "k" does not go with a score'):
        planned("softcap", kept="k")


@pytest.mark.parametrize(
    "keys", [{"sink": "bf16"}, {"sink": "fp32", "lengths": "varlen", "score": "softcap"}]
)
def test_sinks_get_what_their_rows_have_of_them(keys):
    """Rows that see no key too, with an LSE's gradient."""
    built = planned("plain", **keys)
    run = partial(simulator.call, built, simulator.build(render.kernel_text(built)))
    if built.varlen:
        rule, case = VARLEN_RULE, next(iter(VARLEN_RULE.small(built)))
    else:
        rule, case = RULE, Sizes(2, 2, 1, 73, 40)
    error = rule.error(built, run, case, 1, "cpu")
    assert error.ok, error


def test_gradients_of_sinks_are_what_autograd_makes_of_one_more_logit():
    dout, q, k, v = (torch.randn(1, n, 2, 8).double() for n in (70, 70, 40, 40))
    dlse = torch.randn(1, 2, 70).double()
    sinks = torch.tensor([0.5, -1.0]).double()
    mask = planned("plain").mask
    found = gradients(dout, q, k, v, mask=mask, sinks=sinks, scale=SCALE, dlse=dlse)
    exact = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    score = SCALE * torch.einsum("bshd,bthd->bhst", *exact[:2])
    score = score.masked_fill(torch.arange(40) > ROW - 30, -math.inf)
    score = torch.cat([score, exact[3][None, :, None, None].expand(1, 2, 70, 1)], -1)
    out = torch.einsum("bhst,bthd->bshd", score.softmax(-1)[..., :-1], exact[2])
    lse = score.logsumexp(-1)
    wanted = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), exact)
    for got, own in zip(found, (out, lse, *wanted), strict=True):
        assert torch.allclose(got, own, atol=1e-12, rtol=1e-10)
