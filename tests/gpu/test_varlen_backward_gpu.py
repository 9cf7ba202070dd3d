"""Gradients of varlen sequences on a Hopper GPU: their numbers, what they do not see, graphs."""

import math
from functools import partial

import pytest
import torch

import fagen
from fagen import registry
from fagen.flash_attn_interface import flash_attn_varlen_func
from fagen.kinds.backward.verify import VARLEN_RULE
from fagen.measure.sequences import Case, small_cases, verification_cases
from fagen.measure.verification import check
from fagen.runtime.c_interface import call
from tests.attention_helpers import torch_asks
from tests.gpu.helpers import (
    ENDS,
    graph_of_passes,
    ints,
    same,
    waiting_for_nothing,
)
from tests.tensors import leaves
from tests.varlen_helpers import exact_passes, extreme_cases, packed

pytestmark = pytest.mark.gpu

COMMITTED = [path.stem for path in registry.schedules("backward") if "varlen" in path.stem]
# the smallest; a padded head dim; by gradients with S ahead; a head dim of V's own;
# additions in order; head dims that are not whole slabs
SPREAD = (
    "bwd_fp16_d64_causal_m64n64_varlen",
    "bwd_bf16_d96_causal_m64n64_varlen",
    "bwd_bf16_d160_full_m64n64_varlen_intra",
    "bwd_fp16_d64v192_causal_m64n64_varlen_dss1",
    "bwd_fp16_d128_causal_m64n128_varlen_det",
    "bwd_bf16_d256_full_m64n64_varlen_det",
    "bwd_fp16_d72_causal_m64n128_varlen",
    "bwd_bf16_d80_full_m64n128_varlen",
)
LISTS = {
    "around": [(q, k) for q in (0, 1, 63, 64, 65, 200) for k in (0, 1, 127, 128, 129, 400)],
    "tiny": [(1 + i % 7, 1 + i * 5 % 11) for i in range(300)],
    "long": [(3_000, 3_000), (1, 5_000), (3, 3), (2_500, 100)],
    "empty": [(0, 0)] * 40 + [(5, 5)] + [(0, 9)] * 40,
}


def on_gpu(lengths, **named):
    return [x.cuda() for x in packed(lengths, **named)]


def near_fp64(tensors, ends, dout, *, causal):
    """Demand that the gradients that are at q, k and v are those of the formula."""
    with torch.device("cuda"):
        expected = exact_passes(tensors, ends, dout, causal=causal)[2:]
    close = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dout.dtype]
    for tensor, exact in zip(tensors, expected, strict=True):
        allowed = close * (1 + float(exact.abs().max()))
        torch.testing.assert_close(tensor.grad.double(), exact, rtol=0, atol=allowed)


# the smallest first, alone, so that a kernel that hangs is told by the least that makes it hang
@pytest.mark.parametrize("slug", [*COMMITTED, *SPREAD])
def test_small_cases_are_near_fp64(pair_of, slug):
    plan, binary = pair_of(slug)
    run = partial(call, plan, binary.library)
    check(plan, VARLEN_RULE, run, cases=small_cases(plan), progress=print)


@pytest.mark.parametrize("slug", [*COMMITTED, *SPREAD])
def test_all_cases_are_near_fp64_beside_nan(pair_of, slug):
    plan, binary = pair_of(slug)
    run = partial(call, plan, binary.library)
    check(plan, VARLEN_RULE, run, cases=verification_cases(plan), progress=print)


@pytest.mark.parametrize("slug", [*COMMITTED, *SPREAD])
def test_gradients_of_large_groups_and_any_rows_to_keys_are_near_fp64(pair_of, slug):
    plan, binary = pair_of(slug)
    run = partial(call, plan, binary.library)
    check(plan, VARLEN_RULE, run, cases=extreme_cases(plan), progress=print)


def test_gradients_of_65552_heads_are_near_fp64(pair_of):
    plan, binary = pair_of(SPREAD[0])
    run = partial(call, plan, binary.library)
    lengths = (3, 5), (2, 2), (0, 1)
    cases = [Case(lengths, 65_552, kv_heads, gap=2) for kv_heads in (4_097, 65_552)]
    check(plan, VARLEN_RULE, run, cases=cases, progress=print)


def test_a_projection_behind_attention_has_finite_gradients_whatever_memory_held(pair_of):
    q, k, v, at_q, at_k = on_gpu([(300, 300), (64, 129)], head_dim=128, gap=70)
    tensors = [x.nan_to_num().requires_grad_() for x in (q, k, v)]
    weight = torch.randn(128, 16, device="cuda").half().requires_grad_()
    for _ in range(3):
        del_me = [torch.full_like(x, math.nan) for x in (*tensors, *tensors)]
        del del_me  # what is allocated next holds NaN
        out, lse = fagen.attention_varlen(*tensors, at_q, at_k, return_lse=True)
        seen = lse.masked_fill(lse == -math.inf, 0)
        loss = (out @ weight).float().square().mean() + seen.mean()
        found = torch.autograd.grad(loss, [*tensors, weight])
        assert all(x.isfinite().all() for x in (out, *found))
        around = torch.ones(len(q), dtype=torch.bool, device="cuda")
        around[at_q[0] : at_q[-1]] = False
        assert not out[around].any() and (lse[:, around] == -math.inf).all()
        assert not found[0][around].any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_of_the_output_may_have_strides_of_0(pair_of, causal):
    *qkv, at_q, at_k = on_gpu(LISTS["around"], head_dim=128)
    tensors = leaves(*qkv)
    out = fagen.attention_varlen(*tensors, at_q, at_k, causal=causal)
    dout = torch.randn(128, device="cuda").half().expand_as(out)
    out.backward(dout)
    near_fp64(tensors, (at_q, at_k), dout, causal=causal)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_autograds_are_near_fp64(pair_of, name, causal, dtype, head_dim):
    *qkv, at_q, at_k = on_gpu(LISTS[name], dtype=dtype, head_dim=head_dim, gap=3)
    tensors = leaves(*qkv)
    out = fagen.attention_varlen(*tensors, at_q, at_k, causal=causal)
    dout = torch.randn_like(out)
    out.backward(dout)
    near_fp64(tensors, (at_q, at_k), dout, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_that_are_nan_change_no_bit_of_dk_and_dv(pair_of, causal):
    lengths = [(300, 300), (64, 129), (17, 1), (500, 700)]
    *qkv, at_q, at_k = on_gpu(lengths, head_dim=128, gap=5)
    expected = leaves(*qkv)
    fagen.attention_varlen(*expected, at_q, at_k, causal=causal).sum().backward()
    for one in range(len(lengths)):
        places = [slice(at[one].item(), at[one + 1].item()) for at in (at_q, at_k, at_k)]
        poisoned = [torch.full_like(x, math.nan) for x in qkv]
        for x, of, place in zip(poisoned, qkv, places, strict=True):
            x[place] = of[place]
            x.requires_grad_()
        out = fagen.attention_varlen(*poisoned, at_q, at_k, causal=causal)
        out.backward(torch.ones_like(out))
        for x, of, place in zip(poisoned[1:], expected[1:], places[1:], strict=True):
            assert torch.equal(x.grad[place], of.grad[place])
        dq, exact = poisoned[0].grad[places[0]].float(), expected[0].grad[places[0]].float()
        torch.testing.assert_close(dq, exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_in_order_bits_are_the_same_in_any_company_but_for_shared_groups(pair_of, is_grouped):
    """Whether a sequence's heads of a group are shared out, and dK and dV summed, depends on it."""
    lengths = [(1 + i * 97 % 700,) * 2 for i in range(60)]
    q, k, v, at, _ = on_gpu(lengths, head_dim=128)
    qkv = [q, *((k, v) if is_grouped else (x.repeat_interleave(2, 1) for x in (k, v)))]
    with torch_asks():
        results = []
        for _ in range(20):
            tensors = leaves(*qkv)
            fagen.attention_varlen(*tensors, at, causal=True).sum().backward()
            results.append([x.grad for x in tensors])
        for one in (0, 7, 31, 59):
            rows = slice(*at[one : one + 2].tolist())
            alone = leaves(*(x[rows] for x in qkv))
            ends = ints(0, lengths[one][0])
            fagen.attention_varlen(*alone, ends, causal=True).sum().backward()
            own, in_company = [x.grad for x in alone], [x[rows] for x in results[0]]
            many = 1 if is_grouped else 3
            assert same(own[:many], in_company[:many])
            for x, y in zip(own, in_company, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)
    assert all(same(again, results[0]) for again in results[1:])


def test_a_graph_of_both_passes_replays_with_other_lengths(pair_of):
    *qkv, at, _ = on_gpu([(512, 512)] * 8, head_dim=128)
    tensors = leaves(*qkv)
    dout = torch.randn_like(qkv[0])

    def step():
        fagen.attention_varlen(*tensors, at, causal=True).backward(dout)

    graph = graph_of_passes(step, tensors)
    for ends in (*ENDS, [7, 7, 99, 300, 300, 1_000, 1_001, 2_000, 4_000]):
        at.copy_(ints(*ends))  # of another call's rows nothing may be left
        graph.replay()
        near_fp64(tensors, (at, at), dout, causal=True)


def test_the_host_waits_for_nothing(pair_of):
    *qkv, at, _ = on_gpu([(100, 100)] * 9, head_dim=128)
    fagen.attention_varlen(*leaves(*qkv), at).sum().backward()
    tensors = leaves(*qkv)
    with waiting_for_nothing():
        fagen.attention_varlen(*tensors, at).sum().backward()


def test_flash_attention_3s_call_has_the_same(pair_of):
    *qkv, at_q, at_k = on_gpu([(70, 200), (0, 3), (300, 300)], head_dim=128)
    ours, theirs = leaves(*qkv), leaves(*qkv)
    fagen.attention_varlen(*ours, at_q, at_k, causal=True).sum().backward()
    flash_attn_varlen_func(*theirs, at_q, at_k, 300, 300, causal=True).sum().backward()
    for a, b in zip(ours[1:], theirs[1:], strict=True):  # dq is a sum in any order
        assert torch.equal(a.grad, b.grad)


def test_opcheck(pair_of):
    *qkv, at_q, at_k = on_gpu([(70, 200), (0, 3), (300, 300)], head_dim=128)
    tensors = leaves(*qkv)
    fagen.attention_varlen(*tensors, at_q, at_k, causal=True)
    op = torch.ops.fagen.fwd_fp16_d128_causal_m128n128_varlen_packgqa_with_grad.default
    checked = torch.library.opcheck(op, (*tensors, at_q, at_k, 128**-0.5))
    assert set(checked.values()) == {"SUCCESS"}
