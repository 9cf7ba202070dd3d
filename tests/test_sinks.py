"""Sinks, one more logit of each row of a head without a value: beside one more column by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import registry, simulator
from fagen.kinds.combine.emulate import compute as combined
from fagen.kinds.combine.oracle import combine as oracle
from fagen.kinds.decode.emulate import compute as decoded
from fagen.kinds.forward.emulate import compute
from fagen.kinds.forward.operands import operands, outputs, real
from fagen.kinds.forward.plan import Plan
from fagen.render import render
from tests.often import some
from tests.test_simulator import with_lanes_together

SINKS = (0.5, 7.0, -math.inf, 3e4, -1e30, -3.0)
HEADS, KV_HEADS = len(SINKS), 2
# windows as GPT-OSS has them; sinks of each dtype; heads that share a tile's rows; splits; sums of
# tensor cores and promoted ones; V by columns, transposed in the kernel, and scales by block
DENSE = (
    "fwd_fp16_d64_window_m128n64_sinkfp16",
    "fwd_bf16_d64_causal_m64n64_sinkfp32_packgqa",
    "fwd_fp16_d192v128_causal_m128n80_sinkbf16",
    "fwd_fp16_d64_full_m64n64_sinkfp32_tensorsum_onlinemax",
    "fwd_bf16_d64_causal_m64n64_sinkbf16_split3",
    "fwd_fp16_d64_window_m64n64_sinkfp32_nointra_pm2",
    "fwd_fp16_d64_causal_m64n64_sinkfp32_packgqa_tensorsum_onlinemax",
)
FP8 = (
    "fwd_e4m3_d64_causal_m64n64_sinkfp32",
    "fwd_e4m3_d64_window_m64n64_sinkbf16_vrows_sblock",
    "fwd_e4m3_d64_causal_m64n64_sinkfp32_split3_vrows_pm1_pc32",
)
# splits that another kernel combines, or thread blocks in registers, in shared memory, or for pairs
# of heads; a reference that a call gives; a window
DECODE = (
    "dec_fp16_d64_causal_r8n64_sinkfp16_c3",
    "dec_bf16_d64_causal_r8n64_sinkbf16_streamk",
    "dec_fp16_d64_causal_r32n64_sinkfp32_streamk",
    "dec_fp16_d64_causal_r8n64_sinkfp16_c3_fixed",
    "dec_bf16_d96_causal_r8n64_sinkbf16_h2",
    "dec_fp16_d64_window_r8n64_sinkfp16",
)
# rows that begin with their sinks: one step after the other; where nobody loads beside, with a
# maximum that is raised by much alone; where first blocks are skipped
BEGUN = (
    *DENSE[:3],
    "fwd_fp16_d16_window_m64n64_sinkfp32_nointra_pm2",
    "fwd_bf16_d16_causal_m128n64_sinkfp32_noprod_onlinemax_t8",
    "fwd_fp16_d16_window_m256n64_sinkfp32_s8_q2_nointer",
)
SIZES = ((70, 70), (100, 40), (5, 130), (66, 0))  # queries and keys: some rows see nothing


def simulated(plan: Any) -> Any:
    return simulator.build(with_lanes_together(render(plan).kernel))


def tensors(plan: Any, queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in 16 bits."""
    dtype = torch.float16 if plan.dtype.fp8 else getattr(torch, plan.dtype.torch)
    generator = torch.Generator().manual_seed(queries)
    shapes = (
        (queries, HEADS, plan.head_dim),
        (keys, KV_HEADS, plan.head_dim),
        (keys, KV_HEADS, plan.head_dim_v),
    )
    q, k, v = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    return q.to(dtype), k.to(dtype), (v + 1).to(dtype)


def sinks_of(plan: Any) -> Tensor:
    return torch.tensor(SINKS, dtype=getattr(torch, plan.sink.torch))


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """A softmax over the keys that are seen (Sq, Sk), and a column more whose value is zero."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    column = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
    every = torch.cat((scores, column), -1)
    largest = every.amax(-1, keepdim=True)
    p = (every - largest.masked_fill(largest == -math.inf, 0)).exp()
    total = p.sum(-1, keepdim=True)
    out = p[..., :-1] @ v / total.masked_fill(total == 0, 1)
    return out.transpose(1, 2), (largest + total.log()).squeeze(-1)


def seen_by(plan: Any, queries: int, keys: int, left: int) -> Tensor:
    """Which keys (columns) a causal or full row sees, or one of a window, aligned to the end."""
    row, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if plan.mask.name == "full":
        return torch.ones(queries, keys, dtype=torch.bool)
    within = key >= row - left if plan.mask.name == "window" else key >= 0
    return (key <= row) & within


def numbers_of(plan: Any, left: int = 20) -> dict[str, int]:
    return {"window_left": left, "window_right": 0} if plan.mask.given else {}


def check(plan: Any, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], seen: Tensor):
    """As near as a dtype is; rows that see nothing are zeros, and their sinks, exactly."""
    (out, lse), (exact_out, exact_lse) = found, exact
    none = ~seen.any(-1)
    assert (out[:, none] == 0).all()
    assert torch.equal(lse[..., none], exact_lse[..., none].float())
    torch.testing.assert_close(
        out.double(), exact_out, atol=0.08 if plan.dtype.fp8 else 8e-3, rtol=2e-2
    )
    torch.testing.assert_close(
        lse.double(), exact_lse, atol=2e-2 if plan.dtype.fp8 else 1e-3, rtol=1e-6
    )


@pytest.mark.parametrize("slug", DENSE)
def test_a_sink_is_a_column_without_a_value(slug: str) -> None:
    plan, sinks = registry.plan_of(slug), None
    sinks = sinks_of(plan)
    for queries, keys in SIZES:
        q, k, v = tensors(plan, queries, keys)
        seen = seen_by(plan, queries, keys, 20)
        exact = by_hand(q, k, v, seen, sinks, 0.2)
        check(plan, compute(plan, q, k, v, 0.2, sinks=sinks, **numbers_of(plan)), exact, seen)


@pytest.mark.parametrize("slug", FP8)
def test_means_count_as_much_as_keys_do_beside_a_sink(slug: str) -> None:
    plan = registry.plan_of(slug)
    sinks = sinks_of(plan)
    for queries, keys in SIZES[:3]:
        given = operands(plan, *tensors(plan, queries, keys), centered="kv")
        seen = seen_by(plan, queries, keys, 20)
        q, k, v = real(registry.plan_of(slug), rows_of_v(plan, given, keys))
        exact = by_hand(q, k, v, seen, sinks, 0.2)
        call = {"sinks": sinks, **given._asdict(), **numbers_of(plan)}
        check(plan, compute(plan, scale=0.2, **call), exact, seen)


@pytest.mark.parametrize("slug", FP8)
def test_what_keys_weigh_beside_a_sink_is_found_with_lse_and_without(
    slug: str,
) -> None:
    """Of which what was taken off K is a part."""
    plan = registry.plan_of(slug)
    library, sinks = simulated(plan), sinks_of(plan)
    q, k, v = tensors(plan, *SIZES[1], batch=1)
    given = operands(plan, q, k + 2, v, centered="kv")
    call = {"scale": 0.2, "sinks": sinks, **numbers_of(plan), **given._asdict()}
    expected = compute(plan, **call)
    for with_lse in (True, False):
        out, lse = outputs(plan, given.q)
        simulator.call(plan, library, **call, out=out, **({"lse": lse} if with_lse else {}))
        torch.testing.assert_close(out, expected[0], atol=0.03, rtol=2e-2)
        if with_lse:
            torch.testing.assert_close(lse, expected[1], atol=2e-2, rtol=1e-5)


def rows_of_v(plan: Plan, given: Any, keys: int) -> Any:
    from fagen.e4m3 import by_rows

    return given if plan.v_rows else given._replace(v=by_rows(given.v, keys))


def test_sinks_of_varlen_sequences_are_of_heads_and_rows_of_none_have_them() -> None:
    plan = registry.plan_of("fwd_fp16_d64_causal_m64n64_sinkfp32_varlen")
    lengths, gap, sinks = ((5, 9), (40, 3), (0, 4), (7, 70)), 3, sinks_of(plan)
    parts = [tensors(plan, *length, batch=1) for length in lengths]
    q, k, v = (torch.cat([x[0] for x in own]) for own in zip(*parts, strict=True))
    q = torch.cat((q, q[:gap] * math.nan))
    at_q, at_k = (
        torch.tensor([0, *(length[side] for length in lengths)]).cumsum(0).int() for side in (0, 1)
    )
    out, lse = compute(plan, q, k, v, cu_seqlens_q=at_q, cu_seqlens_k=at_k, scale=0.2, sinks=sinks)
    for number, (length, own) in enumerate(zip(lengths, parts, strict=True)):
        rows = slice(int(at_q[number]), int(at_q[number + 1]))
        seen = seen_by(plan, *length, 0)
        exact = by_hand(*own, seen, sinks, 0.2)
        check(plan, (out[None, rows], lse[None, :, rows]), exact, seen)
    assert (out[-gap:] == 0).all() and (lse[:, -gap:] == sinks.float()[:, None]).all()


@pytest.mark.parametrize("slug", some(DECODE, (*DECODE[:2], DECODE[4])))
def test_a_sink_follows_the_last_split_of_a_sequence(slug: str) -> None:
    """In the kernels' own text: sequences of several splits, of one, and of no key."""
    plan = registry.plan_of(slug)
    library = simulator.build(render(plan).kernel)
    keys, used, sinks = plan.block_n * 7, (plan.block_n * 7 - 5, 9, 0), sinks_of(plan)
    q, k, v = tensors(plan, 2, keys, batch=3)
    lengths = torch.tensor(used, dtype=torch.int32)
    more = {"reference": torch.zeros(HEADS)} if plan.fixed else {}
    call = {"q": q, "k": k, "v": v, "sinks": sinks, "scale": 0.2, "seqused_k": lengths}
    call |= more | numbers_of(plan, 100)
    out, lse = torch.full_like(q, math.nan), torch.full((3, HEADS, 2), math.nan)
    simulator.call(plan, library, **call, out=out, lse=lse)
    emulated = decoded(plan, **call)
    assert torch.equal(lse[-1], emulated[1][-1])  # of no key: the sinks
    for number, length in enumerate(used):
        rows = slice(number, number + 1)
        seen = seen_by(plan, 2, length, 100)
        exact = by_hand(q[rows], k[rows, :length], v[rows, :length], seen, sinks, 0.2)
        check(plan, (out[rows], lse[rows]), exact, seen)
        check(plan, (emulated[0][rows], emulated[1][rows]), exact, seen)


@pytest.mark.parametrize("slug", (*BEGUN, *DENSE[4:5]))
def test_sinks_of_any_size_are_right_in_the_kernels_own_text(slug: str) -> None:
    """And in the emulation; 30 and 60 above scores, and where rows begin far from these."""
    plan = registry.plan_of(slug)
    library = simulated(plan)
    sizes = (math.inf, 7.0, -math.inf, 3e38, -1e30, -3e38), (30.0, 60.0, 2e7, -2e7, -1e9, 3e9)
    for values in sizes:
        sinks = torch.tensor(values).to(sinks_of(plan))
        for queries, keys in (*SIZES[1:3], (3, 500)):
            q, k, v = tensors(plan, queries, keys, batch=1)
            out, lse = outputs(plan, q)
            call = {"q": q, "k": k, "v": v, "sinks": sinks, "scale": 0.2, **numbers_of(plan)}
            simulator.call(plan, library, **call, out=out, lse=lse)
            seen = seen_by(plan, queries, keys, 20)
            exact = expected(q, k, v, seen, sinks)
            check(plan, (out, lse), exact, seen)
            check(plan, compute(plan, **call), exact, seen)


@pytest.mark.parametrize("slug", BEGUN)
def test_a_sink_leaves_small_weights_their_bits(slug: str) -> None:
    """Of keys 15 below it: P of fp16 would have three bits beside a maximum that is the sink."""
    plan = registry.plan_of(slug)
    library = simulated(plan)
    q, k, v = tensors(plan, 66, 90, batch=1)
    sinks = torch.full((HEADS,), 15.0).to(sinks_of(plan))
    out, lse = outputs(plan, q)
    call = {"q": q, "k": k, "v": v * 2000, "sinks": sinks, "scale": 0.02, **numbers_of(plan)}
    simulator.call(plan, library, **call, out=out, lse=lse)
    exact, _ = by_hand(q, k, v * 2000, seen_by(plan, 66, 90, 20), sinks, 0.02)
    for found in (out, compute(plan, **call)[0]):
        off = 2e-3 if plan.dtype.name == "fp16" else 1.2e-2
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=off)


@pytest.mark.parametrize("slug", BEGUN[:3])
def test_a_sink_that_is_no_number_is_one_of_its_heads_rows_alone(slug: str) -> None:
    """And what V is where nobody looks: rows without keys are zeros beside it."""
    plan = registry.plan_of(slug)
    library, sinks = simulated(plan), sinks_of(plan)
    sinks[1] = math.nan
    q, k, v = tensors(plan, *SIZES[1], batch=1)
    out, lse = outputs(plan, q)
    call = {"q": q, "k": k, "v": v, "sinks": sinks, "scale": 0.2, **numbers_of(plan)}
    call["v"][:, 0] = math.inf
    simulator.call(plan, library, **call, out=out, lse=lse)
    seen = seen_by(plan, *SIZES[1], 20)
    of_some = seen.any(-1)
    assert out[:, of_some, 1].isnan().all() and lse[:, 1].isnan().all()
    others = [head for head in range(HEADS) if head != 1]
    assert (out[:, ~of_some][:, :, others] == 0).all()
    torch.testing.assert_close(lse[:, others], expected(q, k, v, seen, sinks)[1][:, others].float())


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """By hand, where an infinite sink takes all."""
    out, lse = by_hand(q, k, v, seen, sinks.double().clamp(max=1e300), 0.2)
    return out, lse.masked_fill(lse == 1e300, math.inf)


def test_each_dtype_of_sinks_is_a_kernel_of_its_own() -> None:
    slugs = [f"fwd_fp16_d64_window_m128n64_sink{dtype}" for dtype in ("fp32", "fp16", "bf16")]
    plans = [*map(registry.plan_of, slugs)]
    assert [plan.slug for plan in plans] == slugs
    for plan, dtype in zip(plans, ("fp32", "fp16", "bf16"), strict=True):
        assert plan.signature.tensor("sinks").dtype.name == dtype == plan.schedule.attention.sink
        assert plan.signature.gradients_by == "fagen.attention"
        assert [x.name for x in plan.signature.arguments][-1] == "sinks"
    assert plan.schedule.but(sink=None).slug == "fwd_fp16_d64_window_m128n64"


# ---- combining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", ("fp32", "bf16"))
def test_a_sink_follows_splits_that_are_merged_outside(sink: str) -> None:
    """As if all keys had been there at once, of rows that some splits, or none, see too."""
    plan = registry.plan_of(f"comb_fp32_d64_obf16_sink{sink}")
    whole = registry.plan_of("fwd_bf16_d64_full_m64n64")
    q, k, v = tensors(whole, 3, 40)
    sinks = torch.tensor(SINKS, dtype=getattr(torch, plan.sink.torch))
    parts = [(k[:, :0], v[:, :0]), (k[:, :9], v[:, :9]), (k[:, 9:], v[:, 9:])]
    alone = torch.tensor((-math.inf,) * HEADS)
    seen = torch.ones(3, 40, dtype=torch.bool)
    splits = [by_hand(q, *part, seen[:, : part[0].shape[1]], alone, 0.2) for part in parts]
    outs, lses = (torch.stack(x).float() for x in zip(*splits, strict=True))
    check(whole, combined(plan, outs, lses, sinks=sinks), by_hand(q, k, v, seen, sinks, 0.2), seen)
    exact = oracle(outs[:1] * math.nan, lses[:1], sinks=sinks)
    found = combined(plan, outs[:1] * math.nan, lses[:1], sinks=sinks)
    check(whole, found, exact, seen[:, :0])
