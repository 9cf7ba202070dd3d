"""The emulated schedule against fp64, and against what a schedule may and may not change."""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan, plan
from fagen.kinds.forward.verify.dense import shape_error
from fagen.measure.inputs import cell_of, inputs
from fagen.problem import Sizes
from fagen.registry import plan_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One problem; `layout` says where the heads lie in memory."""

    dtype: str = "fp16"
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    block_n: int = 32
    maximum: str | None = None  # "each" where the threshold or the sum asks for it, else "lazy"
    threshold: float = 0.0
    row_sum: str = "threads"
    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    kv_heads: int = 1
    group: int = 1
    layout: str = "bshd"
    scale: float = 0.125
    spread: float = 1.0  # standard deviation of q and k
    seed: int = 0

    @property
    def plan(self) -> Plan:
        online = self.threshold or self.row_sum == "tensor"
        return plan(
            Schedule.make(
                dtype=self.dtype,
                head_dim=self.head_dim,
                head_dim_v=self.head_dim_v,
                mask="causal" if self.causal else "full",
                block_m=64,
                block_n=self.block_n,
                rescale_threshold=self.threshold,
                sum=self.row_sum,
                maximum=self.maximum or ("online" if online else "lazy"),
            )
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(seqlen: int, heads: int, columns: int, spread: float) -> Tensor:
            shape = (self.batch, seqlen, heads, columns)
            if self.layout == "bhsd":
                shape = (self.batch, heads, seqlen, columns)
            values = torch.randn(shape, generator=generator).mul(spread).to(DTYPES[self.dtype])
            if self.layout == "bhsd":
                return values.transpose(1, 2)
            if self.layout == "wide":  # a slice of something wider
                return torch.cat([values, torch.full_like(values, math.nan)], -1)[..., :columns]
            return values

        return (
            normal(self.seqlen_q, self.kv_heads * self.group, self.head_dim, self.spread),
            normal(self.seqlen_k, self.kv_heads, self.head_dim, self.spread),
            normal(self.seqlen_k, self.kv_heads, self.head_dim_v, 1.0),
        )


SMALL = Case(head_dim=16, head_dim_v=16, block_n=16)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    around_a_tile = st.sampled_from([0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129])
    lengths = around_a_tile | st.integers(0, 200)
    head_dim_v = draw(st.sampled_from([16, 40, 64]))
    dtype = draw(st.sampled_from(list(DTYPES)))
    lazy = draw(st.booleans())
    by_tensor = dtype == "fp16" and head_dim_v != 40 and not lazy
    return Case(
        dtype=dtype,
        head_dim=draw(st.sampled_from([16, 24, 64, 80])),
        head_dim_v=head_dim_v,
        row_sum=draw(st.sampled_from(["threads", "tensor"])) if by_tensor else "threads",
        causal=draw(st.booleans()),
        block_n=draw(st.sampled_from([16, 32, 48, 128])),
        maximum="lazy" if lazy else "online",
        threshold=0.0 if lazy else draw(st.sampled_from([0.0, 0.5, 8.0])),
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from(["bshd", "bhsd", "wide"])),
        scale=draw(st.sampled_from([0.02, 0.125, 1.0, 30.0])),
        spread=draw(st.sampled_from([0.01, 1.0, 4.0])),
        seed=draw(st.integers(0, 1000)),
    )


def textbook(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute out, lse and the weighted |v|, in fp64 and all at once, as a definition would."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(case.group, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * case.scale
    if case.causal:
        visible = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        scores[..., ~visible.tril(case.seqlen_k - case.seqlen_q)] = -math.inf
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1), (weights @ v.abs()).transpose(1, 2)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_its_error_is_that_of_the_roundings_it_makes(case: Case) -> None:
    q, k, v = case.tensors()
    held_against_fp64(case, q, k, v)


def held_against_fp64(case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = emulate(case.plan, q, k, v, case.scale)
    exact, exact_lse, magnitude = textbook(case, q, k, v)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.shape == exact.shape and lse.shape == exact_lse.shape

    # the scores are sums in fp32, which moves every weight by as much as the largest of them
    largest = (q.double().norm(dim=-1).amax() if q.numel() else 0.0) * (
        k.double().norm(dim=-1).amax() if k.numel() else 0.0
    )
    moved = 4 * 2.0**-24 * float(largest) * case.scale * math.sqrt(case.head_dim) + 2.0**-18
    unit = torch.finfo(q.dtype).eps / 2
    # P is rounded, with the smallest of it subnormal in fp16, then the sum; both by half a unit
    subnormal = 2.0**-25 * case.seqlen_k
    summed = case.row_sum == "tensor"  # then the rows' sums are those of P as it was rounded
    lost = (1 + summed) * subnormal * float(v.double().abs().amax()) if v.numel() else 0.0
    bound = (unit + 2 * moved) * magnitude + unit * exact.abs() * (1 + unit + summed) + lost + 1e-30
    assert ((out.double() - exact).abs() <= bound).all()

    finite = exact_lse.isfinite()
    assert torch.equal(lse == -math.inf, ~finite)
    assert not out.transpose(1, 2)[~finite].any()
    moved += summed * (unit * (1 + unit) + subnormal)
    assert ((lse - exact_lse).abs()[finite] <= moved + 2.0**-22 * exact_lse.abs()[finite]).all()


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_reference_is_the_textbook(case: Case) -> None:
    q, k, v = case.tensors()
    out, lse = reference(q, k, v, mask="causal" if case.causal else "full", scale=case.scale)
    exact, exact_lse, _ = textbook(case, q, k, v)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)


def test_the_reference_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(causal=True, batch=2, kv_heads=2, group=2, seqlen_q=70, seqlen_k=90)
    whole = reference(*case.tensors(), mask="causal", scale=0.125)
    monkeypatch.setattr("fagen.kinds.forward.oracle._REFERENCE_SCORES", 8 * 90 * 3)
    for piecewise, at_once in zip(
        reference(*case.tensors(), mask="causal", scale=0.125), whole, strict=True
    ):
        torch.testing.assert_close(piecewise, at_once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    "form",
    [
        *(f"fwd_{dtype}_d{head_dim}_MASK_m64n64" for dtype in DTYPES for head_dim in (64, 128)),
        "fwd_fp16_d64_MASK_m64n64_tensorsum_onlinemax",
    ],
)
def test_it_is_as_accurate_as_torch_in_the_same_dtype(form: str, mask: str) -> None:
    """The rule for the kernel itself on a GPU."""
    plan = plan_of(form.replace("MASK", mask))
    cell = cell_of(plan, Sizes(2, 4, 2, 200, 300))
    error = shape_error(cell, partial(emulate, plan), *inputs(cell, seed=0, device="cpu"))
    assert error.ok, error


def column(rows: int, value: float = 0.0) -> Tensor:
    """Vectors of one head that are a value in their first column and 0 beyond."""
    x = torch.zeros(1, rows, 1, 16, dtype=torch.float16)
    x[..., 0] = value
    return x


# ---- what the schedule decides ------------------------------------------------------------------


def test_the_last_keys_come_first() -> None:
    """A block that is met after a row's maximum has few digits left in fp16: here the first one."""
    q, k, v = column(1, 1), column(32), column(32)
    k[:, 16:, :, 0] = 15
    v[:, :16] = 1024
    out = emulate(SMALL.plan, q, k, v, 1.0)[0][0, 0, 0, 0].item()
    exact = 1024 / (1 + math.exp(15))
    subnormal = 1024 * torch.tensor(math.exp(-15)).half().item() / (1 + math.exp(-15))
    assert out == torch.tensor(subnormal).half().item()
    assert out < 0.98 * exact


@pytest.mark.parametrize("row_sum", ["threads", "tensor"])
def test_p_is_rounded_for_the_pv_gemm_and_for_a_sum_that_is_part_of_it_only(row_sum: str) -> None:
    """With equal scores but one, p is a single number: threads add it up before it is rounded."""
    q = column(1, 1)
    k = torch.full((1, 16, 1, 16), 0.3, dtype=torch.float16)
    k[:, 0] = 1
    v = torch.ones(1, 16, 1, 16, dtype=torch.float16)
    v[:, 0] = 0
    case = replace(SMALL, row_sum=row_sum)
    out, lse = emulate(case.plan, q, k, v, 1.0)
    p = math.exp(k[0, 1, 0, 0].item() - 1)
    rounded = torch.tensor(p).half().item()
    assert rounded != p
    total = 1 + 15 * (rounded if row_sum == "tensor" else p)
    assert out[0, 0, 0, 0].item() == torch.tensor(15 * rounded / total).half().item()
    assert lse.item() == pytest.approx(1 + math.log(total), rel=1e-6)


def test_who_adds_the_rows_up_matters_by_the_rounding_of_p_and_no_more() -> None:
    case = Case(dtype="fp16", maximum="online", seqlen_q=130, seqlen_k=200)
    other = replace(case, row_sum="tensor")
    q, k, v = case.tensors()
    (out, lse), (others, others_lse) = (emulate(c.plan, q, k, v, c.scale) for c in (case, other))
    unit = torch.finfo(q.dtype).eps / 2
    assert 0 < (lse - others_lse).abs().amax() <= unit * (1 + unit)
    step = 3 * unit * out.abs().amax()  # the sum's rounding, and that of either output
    assert 0 < (out.double() - others.double()).abs().amax() <= step
    # where every p is 1 there is nothing to round
    (out, lse), (others, others_lse) = (
        emulate(c.plan, torch.zeros_like(q), k, v, c.scale) for c in (case, other)
    )
    assert torch.equal(out, others) and torch.equal(lse, others_lse)


def test_within_the_threshold_a_row_keeps_its_maximum_and_p_grows_past_one() -> None:
    """p of the second block is 2 to the rise: the same sum, but rounded elsewhere."""
    q, k = column(2, 1), column(32)
    k[:, :16, :, 0] = torch.linspace(0, 3.0, 16).view(1, 16, 1)  # met second, up to 3 above
    v = torch.randn(1, 32, 1, 16, generator=torch.Generator().manual_seed(0)).half()
    eager = replace(SMALL, maximum="online")
    lazy = replace(SMALL, threshold=8.0)
    a, b = (emulate(case.plan, q, k, v, 1.0) for case in (eager, lazy))
    torch.testing.assert_close(a[0], b[0], rtol=2e-3, atol=2e-3)
    assert not torch.equal(a[0], b[0])

    # past the threshold the maximum moves, and both are the same again
    a, b = (emulate(case.plan, q, k * 4, v, 1.0) for case in (eager, lazy))
    assert torch.equal(a[0], b[0])


def test_the_threshold_is_held_row_by_row() -> None:
    """One row's rise does not move its neighbour's maximum."""
    lazy = replace(SMALL, threshold=4.0)
    eager = replace(SMALL, maximum="online")
    q, k, v = replace(SMALL, seqlen_q=2, seqlen_k=32).tensors()
    k[:, :16] = 1.5 * k[:, 16:]  # every row's maximum rises by half in its second block
    calm = emulate(lazy.plan, q, k, v, 0.25)
    q[:, 1] *= 20
    lively = emulate(lazy.plan, q, k, v, 0.25)
    moved = emulate(eager.plan, q, k, v, 0.25)
    assert torch.equal(lively[0][:, 0], calm[0][:, 0])
    assert not torch.equal(lively[0][:, 0], moved[0][:, 0]), "the first row rises by less than 4"
    assert torch.equal(lively[0][:, 1], moved[0][:, 1]), "the second by more"


# ---- the lazy row max ---------------------------------------------------------------------------


SLOPES = (1.0, -1.0, 0.0, 2.0**-4, 2.0**-8)  # of rows, in turn: so a warp has some of each


def steep(case: Case, *levels: float) -> tuple[Tensor, Tensor, Tensor]:
    """Noise upon scores that have a level, in log2 units, in each block: by a row's slope."""
    q, k, v = replace(case, spread=0.1).tensors()
    unit = case.scale * math.log2(math.e)
    of_key = torch.tensor(levels).repeat_interleave(case.block_n)[: case.seqlen_k]
    q[..., 0] = torch.tensor(SLOPES)[torch.arange(case.seqlen_q) % len(SLOPES)][:, None]
    k[..., 0] = (of_key / unit).to(k.dtype)[:, None]
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(150, 150), (200, 140), (1, 97)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "levels",
    [(900, 400, -300, 600, 100), (-800, -500, 600, -400, 300), (14, 11, 0, 5, -3)],
    ids=str,
)
def test_a_lazy_row_max_follows_scores_that_rise_and_fall_by_hundreds(
    levels: tuple[float, ...], causal: bool, sizes: tuple[int, int], dtype: str
) -> None:
    """By more than exp2 holds: a block's guess is infinite in some rows, and zero in others."""
    rows, keys = sizes
    for kv_heads, group in ((1, 1), (2, 3)):
        case = Case(
            *(dtype, 64, 40),
            causal=causal,
            seqlen_q=rows,
            seqlen_k=keys,
            kv_heads=kv_heads,
            group=group,
        )
        assert case.plan.softmax.lazy_max
        held_against_fp64(case, *steep(case, *levels))


def test_what_does_not_outgrow_its_maximum_keeps_it_as_within_a_threshold() -> None:
    lazy = Case(batch=2, seqlen_q=130, seqlen_k=200, kv_heads=2, group=2)
    q, k, v = lazy.tensors()
    result, kept, moved = (
        emulate(case.plan, q, k, v, lazy.scale)
        for case in (lazy, replace(lazy, threshold=10.0), replace(lazy, maximum="online"))
    )
    assert torch.equal(result[0], kept[0]) and torch.equal(result[1], kept[1])
    assert not torch.equal(result[0], moved[0])


def test_keys_in_blocks_that_no_row_sees_are_not_read() -> None:
    case = Case(causal=True, seqlen_q=128, seqlen_k=128, block_n=32)
    q, k, v = case.tensors()
    clean = emulate(case.plan, q, k, v, case.scale)[0]
    k[:, 64:], v[:, 64:] = math.nan, math.nan
    assert torch.equal(emulate(case.plan, q, k, v, case.scale)[0][:, :64], clean[:, :64])


def test_a_nan_stays_in_its_row() -> None:
    """A lazy row max is raised by it in a whole warp; P is rounded as if each block did that."""
    lazy = Case(seqlen_q=70, seqlen_k=50)
    online = replace(lazy, maximum="online")
    q, k, v = lazy.tensors()
    clean, moved = (emulate(case.plan, q, k, v, lazy.scale)[0] for case in (lazy, online))
    q[0, 3, 0, 5] = math.nan
    for case, others in ((lazy, clean), (online, moved)):
        out, lse = emulate(case.plan, q, k, v, case.scale)
        assert out[0, 3].isnan().all() and lse[0, 0, 3].isnan()
        assert torch.equal(out[0, :3], moved[0, :3]) and torch.equal(out[0, 4:16], moved[0, 4:16])
        assert torch.equal(out[0, 16:], others[0, 16:])
