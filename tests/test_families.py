"""Hard scores: emulations, calls and kernels' own text are as exact there as anywhere.

Kernels on a Hopper GPU: tests/gpu/test_hostile.py, and every kind's proof.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import registry, simulator
from fagen.kind import load_named
from fagen.kinds.decode.emulate import compute
from fagen.kinds.forward.emulate import emulate, emulate_fp8
from fagen.kinds.forward.operands import Operands, outputs
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.verify.fp8 import hard_errors
from fagen.measure.families import FAMILIES, PROVED, Attends, Family, alone, errors, made
from fagen.measure.inputs import heavy_keys, usual
from fagen.problem import Sizes
from fagen.render import render
from fagen.vocab import MASKS

Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

# row maxima of each kind; chunks, of one block and of several
FORWARD = (
    "fwd_fp16_d16_full_m64n64",
    "fwd_bf16_d16_causal_m64n128",
    "fwd_fp16_d16_causal_m64n64_onlinemax",
    "fwd_bf16_d64_causal_m128n64_split4",
    "fwd_fp16_d64_full_m64n64_split64_onlinemax",
)
# by turns, by runs (the same bits), a unified maximum in either dtype
DECODING = (
    "dec_fp16_d128_causal_r8n64",
    "dec_bf16_d64_full_r16n128_c3",
    "dec_fp16_d64_causal_r8n64_c3_fixed",
    "dec_bf16_d64_causal_r8n64_fixed",
)
SIZES = Sizes(1, 2, 1, 1, 3_000), Sizes(1, 2, 1, 7, 1_500), Sizes(1, 2, 1, 70, 50)


def exact(plan: Attends) -> Kernel:
    """Attention in fp64 under a Plan's mask."""

    def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return reference(q, k, v, mask=plan.mask.name, scale=scale)

    return attended


def wrong(plan: Attends, kernel: Kernel, exact: Kernel, *args: Any) -> list[str]:
    return [str(error) for error in errors(plan, kernel, exact, *args) if not error.share <= 1]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_scores_are_numbers_of_fp32_in_whatever_order_they_are_added(family: Family) -> None:
    for dtype in (torch.float16, torch.bfloat16)[family.wide :]:
        q, k, _, scale = made(family, Sizes(1, 1, 1, 5, 333), 64, 8, dtype)
        wide = [x[0, :, 0] for x in (q, k)]
        assert all(
            torch.equal(x.float(), y) for x, y in zip(wide, family.scores(5, 333, 64), strict=True)
        )
        product = wide[0].double() @ wide[1].double().mT
        for order in (torch.arange(64), torch.arange(64).flip(0)):
            scores = wide[0].float()[:, order] @ wide[1].float()[:, order].mT
            assert torch.equal(scores.double(), product) and not product.isnan().any()
        assert 0 < scale <= 1e8


@pytest.mark.parametrize("slug", FORWARD)
def test_an_emulated_tile_is_as_exact(slug: str) -> None:
    plan = registry.plan_of(slug)

    assert not wrong(plan, partial(emulate, plan), exact(plan), SIZES, FAMILIES)


@pytest.mark.parametrize("slug", DECODING)
def test_emulated_decoding_is_as_exact(slug: str) -> None:
    plan = registry.plan_of(slug)

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        more = {"reference": torch.tensor([0.0, 1e6])} if plan.fixed else {}
        return compute(plan, q, k, v, scale, **more)

    assert not wrong(plan, kernel, exact(plan), SIZES, FAMILIES)


@pytest.mark.parametrize(("dtype", "causal"), [("fp16", False), ("bf16", True)])
def test_a_call_is_as_exact_whichever_kernel_serves_it(dtype: str, causal: bool) -> None:
    """A query, a few, and a tile of them over many keys: decoding's kernels, and chunks."""
    plan = registry.plan_of(f"fwd_{dtype}_d128_{'causal' if causal else 'full'}_m128n128")

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return fagen.attention(q, k, v, causal=causal, scale=scale, return_lse=True)

    sizes = Sizes(1, 1, 1, 1, 3_000), Sizes(1, 1, 1, 7, 1_500), Sizes(1, 1, 1, 128, 8_192)
    assert not wrong(plan, kernel, exact(plan), sizes)


def test_what_is_no_number_or_no_zero_is_no_small_error() -> None:
    plan = registry.plan_of(FORWARD[1])

    def share(change: Callable[[Tensor, Tensor], Any]) -> float:
        def kernel(*args: Any) -> tuple[Tensor, Tensor]:
            out, lse = emulate(plan, *args)
            change(out, lse)
            return out, lse

        (error,) = errors(plan, kernel, exact(plan), [Sizes(1, 1, 1, 9, 5)], PROVED[:1])
        return error.share

    assert share(lambda out, lse: None) < 1
    assert share(lambda out, lse: out[:, 0].fill_(1e-3)) == math.inf  # it sees no key
    assert share(lambda out, lse: lse[..., 0].fill_(0)) == math.inf
    assert share(lambda out, lse: out[:, 8].fill_(math.nan)) == math.inf
    assert share(lambda out, lse: lse[..., 8].fill_(math.inf)) == math.inf
    assert share(lambda out, lse: out[:, 8].add_(0.1)) > 1


@pytest.mark.parametrize("slug", [FORWARD[3], *DECODING[:3]])
def test_a_row_without_a_key_is_zeros_beside_values_that_are_no_numbers(slug: str) -> None:
    """And so is its part of chunks that it sees nothing of."""
    plan: Any = registry.plan_of(slug)
    dtype = getattr(torch, plan.dtype.torch)
    q, k, v = (torch.ones(1, rows, 1, plan.head_dim).to(dtype) for rows in (70, 50, 50))
    v[:, 0], v[:, 1] = math.inf, math.nan
    more = {"reference": torch.zeros(1)} if slug.endswith("fixed") else {}
    run: Any = compute if slug.startswith("dec") else emulate
    out, lse = run(plan, q, k, v, 1.0, **more)
    unseen = 20 if plan.mask.last_by_row else 0
    assert not out[:, :unseen].any() and bool((lse[..., :unseen] == -math.inf).all())
    assert bool(lse[..., unseen:].isfinite().all() and out[:, unseen + 1 :].isnan().all())


# ---- in e4m3 ------------------------------------------------------------------------------------

# a scale for a head, whose row maxima are subtracted first where they are far; scales by block
BYTES = (
    "fwd_e4m3_d64_full_m256n64_s3_vrows",
    "fwd_e4m3_d64_causal_m256n64_s3_nointer_vrows_sblock",
)


@pytest.mark.parametrize("slug", BYTES)
def test_an_emulated_tile_of_bytes_is_within_twice_a_textbooks_error(slug: str) -> None:
    plan = registry.plan_of(slug)

    def kernel(operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
        return emulate_fp8(plan, *operands[:3], scale, *operands[3:])

    for error in hard_errors(plan, kernel, [Sizes(1, 2, 1, 7, 300)], "cpu"):
        assert error.ok, error


@pytest.mark.long
@pytest.mark.parametrize(
    ("slug", "correct", "left"),
    [
        (BYTES[0], "65536.0f;  // exponents of 2", "16777216.0f;  // exponents of 2"),
        (BYTES[1], "return factor < kFarScale", "return true"),
    ],
)
def test_the_largest_p_is_where_e4m3_is_exact_however_large_scores_are(
    slug: str, correct: str, left: str
) -> None:
    """Kernels' own text; with a reference that is rounded it shows."""
    plan = registry.plan_of(slug)
    text = render(plan).kernel
    assert text.count(correct) == 1
    outcomes = []
    for source in (text, text.replace(correct, left)):
        library = simulator.build(source)

        def kernel(operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
            out, lse = outputs(plan, operands.q)
            named = {**operands._asdict(), "scale": scale, "out": out, "lse": lse}
            simulator.call(plan, library, seed=0, **named)  # noqa: B023
            return out, lse

        outcomes += [
            error.ok for error in hard_errors(plan, kernel, [Sizes(1, 1, 1, 2, 150)], "cpu")
        ]
    assert outcomes == [True, False]


@pytest.mark.parametrize("name", MASKS)
def test_of_heavy_keys_each_row_that_sees_any_sees_one_and_perhaps_the_next(name: str) -> None:
    mask = MASKS[name]
    for rows, keys in ((1, 3_000), (130, 1_500), (200, 200), (70, 50), (5, 0)):
        heavy = heavy_keys(mask, rows, keys)
        row, key = torch.arange(rows)[:, None], torch.arange(keys)
        sees = mask.sees(row, key, rows, keys).expand(rows, keys)
        of_heavy = sees[:, list(heavy)].int()
        assert torch.equal(of_heavy.any(1), sees.any(1))
        assert (of_heavy.sum(1) <= 2).all()
        assert not (of_heavy[:, :-2] & of_heavy[:, 2:]).any()
        if not mask.first_by_row and keys:
            assert heavy == (0,)


@pytest.mark.parametrize("slug", ["fwd_fp16_d16_window_m64n64", "fwd_bf16_d16_document_m64n64"])
def test_of_the_key_that_counts_alone_a_masks_own_is_seen(slug: str) -> None:
    """Where a kernel gave the mean of what a row sees, the proof would find it."""
    plan = registry.plan_of(slug)
    size = Sizes(1, 4, 2, 130, 1_500)
    family = alone(heavy_keys(plan.mask, size.seqlen_q, size.seqlen_k))

    def emulated(*call: Any) -> tuple[Tensor, Tensor]:
        given = usual(plan.mask, 1, size.seqlen_q, size.seqlen_k, "cpu")
        named = dict(zip(("q", "k", "v", "scale"), call, strict=True))
        out, lse = load_named(registry.kind(plan.kind).emulate)(plan, **named, **given)
        return out, lse

    def flat(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return emulated(q, torch.zeros_like(k), v, scale)

    assert not wrong(plan, emulated, exact(plan), [size], [family])
    assert wrong(plan, flat, exact(plan), [size], [family])
