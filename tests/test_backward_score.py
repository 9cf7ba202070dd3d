"""Room for a score in the backward kernels: what one more part says is computed."""

import math
from dataclasses import replace

import pytest
import torch
from jinja2 import ChoiceLoader, DictLoader
from torch import Tensor

from fagen import ledger, render, simulator
from fagen.kinds.backward import formulae
from fagen.kinds.backward.formulae import BUDGET
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.verify import inputs
from fagen.part import Part, Parts
from fagen.problem import Sizes
from tests.backward_helpers import planned

# A bias of an eighth for each key of four, of which the gradient is to be half: S + b, and dS by
# keys of two halved. No score that anybody wants, but one that tells values, places and derivative.
AFTER_S = """
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      s[i] += (tile.first_key + first_row() + thread_row() + row_of(i) * 8) % 4 * 0.125f / 0.25f;
    }
"""
AFTER_DS = """
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      dp[i] *= (thread_row() + row_of(i) * 8) % 2 ? 0.5f : 1.f;
    }
"""
SCALE = 0.25
SIZES = Sizes(1, 2, 1, 70, 150)


def with_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render with one more part, whose texts are of the seats for a score."""
    usual, own_parts = render.environment(), Plan.parts.func
    assert usual.loader and own_parts
    texts = {"own/after_s.cuh": AFTER_S, "own/after_ds.cuh": AFTER_DS}
    score = Part(scores=("own/after_s.cuh",), derivatives=("own/after_ds.cuh",))

    def parts(plan: Plan) -> Parts:
        own = own_parts(plan)
        return replace(own, parts=(*own.parts, score))

    changed = usual.overlay(loader=ChoiceLoader([DictLoader(texts), usual.loader]))
    monkeypatch.setattr(render, "environment", lambda: changed)
    monkeypatch.setattr(Plan, "parts", property(parts))


def reference(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    """(out, lse, dq, dk, dv) in fp64; one KV head."""
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    keys = torch.arange(k.shape[1])
    score = SCALE * torch.einsum("bshd,btd->bhst", q, k[:, :, 0]) + keys % 4 * 0.125
    if causal:
        rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        score = score.masked_fill(keys > rows, -math.inf)
    lse = score.logsumexp(-1)
    p = (score - lse[..., None]).exp()
    out = torch.einsum("bhst,btd->bshd", p, v[:, :, 0])
    delta = torch.einsum("bshd,bshd->bhs", out, dout)
    dp = torch.einsum("bshd,btd->bhst", dout, v[:, :, 0])
    ds = p * (dp - delta[..., None]) * torch.where(keys % 2 == 1, 0.5, 1.0)
    return [
        out,
        lse,
        SCALE * torch.einsum("bhst,btd->bshd", ds, k[:, :, 0]),
        SCALE * torch.einsum("bhst,bshd->btd", ds, q)[:, :, None],
        torch.einsum("bhst,bshd->btd", p, dout)[:, :, None],
    ]


@pytest.mark.parametrize("slug", ["bwd_bf16_d64_causal_m64n64", "bwd_bf16_d192_full_m64n64_intra"])
def test_a_score_and_its_derivative_have_a_place_after_s_and_after_ds(slug, monkeypatch):
    plan = planned(slug)
    with_score(monkeypatch)
    library = simulator.build(render.kernel_text(plan))
    dout, q, k, v = inputs(plan, SIZES, device="cpu")
    out, lse, *exact = reference(dout, q, k, v, plan.mask.last_by_row)
    named = dict(dout=dout, q=q, k=k, v=v, out=out.to(q.dtype), lse=lse.float(), scale=SCALE)
    results = {f"d{name}": torch.full_like(named[name], math.nan) for name in "qkv"}
    simulator.call(plan, library, **named, **results)
    for name, expected in zip(("dq", "dk", "dv"), exact, strict=True):
        error = (results[name].double() - expected).norm() / expected.norm()
        assert error < 0.01, (name, error)


def test_what_a_score_keeps_is_a_row_of_the_registers_ledger(monkeypatch):
    schedule = Schedule.from_slug("bwd_bf16_d192_full_m64n64_intra")
    sums = [ledger.total for ledger in BUDGET.of(schedule).by_role]
    assert len(sums) == 2  # of dV's consumer, and of dK's
    for forget in (formulae.register_formulae, ledger._evaluator):
        forget.cache_clear()
    monkeypatch.setattr(formulae, "SCORE_REGISTERS", 8)
    ledgers = BUDGET.of(schedule).by_role
    monkeypatch.undo()
    for forget in (formulae.register_formulae, ledger._evaluator):
        forget.cache_clear()
    assert [ledger.total for ledger in ledgers] == [before + 8 for before in sums]
