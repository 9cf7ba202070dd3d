"""Varlen sequences on a Hopper GPU: their numbers, what they do not see, graphs and lengths."""

import math
from functools import partial

import pytest
import torch

import fagen
from fagen import registry
from fagen.flash_attn_interface import flash_attn_varlen_func
from fagen.kinds.forward.emulate import emulate_varlen
from fagen.kinds.forward.verify.varlen import RULE
from fagen.measure.sequences import small_cases, verification_cases
from fagen.measure.verification import check
from fagen.runtime.c_interface import call
from tests.gpu.helpers import ENDS, graph_of, ints, spoil, waiting_for_nothing
from tests.varlen_helpers import E4M3, Packed8, exact, far, packed, packed8

pytestmark = pytest.mark.gpu

COMMITTED = [path.stem for path in registry.schedules("forward") if "varlen" in path.stem]
# the smallest; a padded head dim; O through V's space; sums in fp32; a head dim of V's own; then in
# e4m3 the smallest, a padded head dim and O in fp16, O through V's space, sums in fp32
SPREAD = (
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_bf16_d72_causal_m256n48_varlen_s4_q2",
    "fwd_fp16_d256v64_causal_m256n64_varlen_reusev",
    "fwd_fp16_d128_full_m128n128_varlen_reusev_pm64_smemtotals",
    "fwd_fp16_d192v128_causal_m128n96_varlen",
    "fwd_e4m3_d64_causal_m64n64_varlen",
    "fwd_e4m3_d80v48_causal_m128n96_varlen_ofp16_s3_q2",
    "fwd_e4m3_d128_causal_m128n128_varlen_reusev",
    "fwd_e4m3_d64_full_m128n64_varlen_pm16",
)
LISTS = {
    "around": [(q, k) for q in (0, 1, 63, 64, 65, 200) for k in (0, 1, 127, 128, 129, 400)],
    "tiny": [(1 + i % 7, 1 + i * 5 % 11) for i in range(1_500)],
    "long": [(4_000, 4_000), (1, 9_000), (3, 3), (2_500, 100)],
    "empty": [(0, 0)] * 40 + [(5, 5)] + [(0, 9)] * 40,
}


def on_gpu(lengths, **named):
    return [x.cuda() for x in packed(lengths, **named)]


# the smallest first, alone, so that a kernel that hangs is told by the least that makes it hang
@pytest.mark.parametrize("slug", [*COMMITTED, *SPREAD])
def test_small_cases_are_near_fp64(pair_of, slug):
    plan, binary = pair_of(slug)
    run = partial(call, plan, binary.library)
    check(plan, RULE, run, cases=small_cases(plan), progress=print)


@pytest.mark.parametrize("slug", [*COMMITTED, *SPREAD])
def test_all_cases_are_near_fp64_beside_nan(pair_of, slug):
    plan, binary = pair_of(slug)
    run = partial(call, plan, binary.library)
    check(plan, RULE, run, cases=verification_cases(plan), progress=print)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_call_is_near_fp64(pair_of, name, causal, dtype, head_dim):
    given = on_gpu(LISTS[name], dtype=dtype, head_dim=head_dim)
    out, lse = fagen.attention_varlen(*given, causal=causal, return_lse=True)
    expected, expected_lse = exact(*given, causal=causal)
    close = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)


# ---- in 16 bits and in e4m3


def on_gpu8(lengths, **named):
    of = packed8(lengths, **named)
    numbers = {name: x.cuda() for name, x in of.named.items()}
    return Packed8(tuple(x.cuda() for x in of.tensors), numbers, tuple(x.cuda() for x in of.real))


def given(fp8, lengths, **how):
    """q, k, v and offsets; and, by name, what bytes of e4m3 are multiplied by and added to."""
    if fp8:
        of = on_gpu8(lengths, head_dim=128, by_column=True, **how)
        return of.tensors, of.named
    return on_gpu(lengths, head_dim=128, **how), {}


@pytest.mark.parametrize("nan", [None, 0x7F, 0xFF], ids=["16 bits", "e4m3", "e4m3 below zero"])
@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_that_are_nan_change_no_bit(pair_of, causal, nan):
    lengths = [(300, 300), (64, 129), (17, 1), (500, 700)]
    (*qkv, at_q, at_k), numbers = given(nan is not None, lengths, gap=5)
    expected = fagen.attention_varlen(*qkv, at_q, at_k, causal=causal, **numbers)
    for one in range(len(lengths)):
        rows, keys = (slice(*at[one : one + 2].tolist()) for at in (at_q, at_k))
        poisoned = [
            torch.full_like(x, math.nan)
            if nan is None
            else torch.full(x.shape, nan, dtype=torch.uint8, device="cuda").view(E4M3)
            for x in qkv
        ]
        for x, whole, kept in zip(poisoned, qkv, (rows, keys, keys), strict=True):
            x[kept] = whole[kept]
        own = {name: torch.full_like(x, math.nan) for name, x in numbers.items()}
        for name, x in numbers.items():
            own[name][one] = x[one]
        out = fagen.attention_varlen(*poisoned, at_q, at_k, causal=causal, **own)
        assert torch.equal(out[rows], expected[rows])


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "e4m3"])
def test_a_sequence_has_the_same_bits_in_any_company(pair_of, fp8):
    lengths = [(1 + i * 97 % 700,) * 2 for i in range(60)]
    (q, k, v, at, _), numbers = given(fp8, lengths)
    out = fagen.attention_varlen(q, k, v, at, causal=True, **numbers)
    for one in (0, 7, 31, 32, 59):
        rows = slice(*at[one : one + 2].tolist())
        own = {name: x[one : one + 1] for name, x in numbers.items()}
        ends = ints(0, lengths[one][0])
        alone = fagen.attention_varlen(q[rows], k[rows], v[rows], ends, causal=True, **own)
        assert torch.equal(alone, out[rows])
    for _ in range(50):
        assert torch.equal(fagen.attention_varlen(q, k, v, at, causal=True, **numbers), out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequences_bits_are_those_that_it_has_alone_in_any_batch(pair_of, head_dim, causal):
    lengths = [(1 + i * 97 % 700, 1 + i * 211 % 900) for i in range(12)] + [(0, 5), (5, 0)]
    q, k, v, at_q, at_k = on_gpu(lengths, head_dim=head_dim)
    parts = [
        (q[at_q[i] : at_q[i + 1]], *(x[at_k[i] : at_k[i + 1]] for x in (k, v)))
        for i in range(len(lengths))
    ]

    def attend(picked):
        tensors = [torch.cat(of) for of in zip(*(parts[i] for i in picked), strict=True)]
        ends = [
            torch.tensor([0, *(lengths[i][of] for i in picked)], device="cuda").cumsum(0).int()
            for of in (0, 1)
        ]
        out = fagen.attention_varlen(*tensors, *ends, causal=causal)
        return out.split([lengths[i][0] for i in picked])

    alone = [attend([i])[0] for i in range(len(lengths))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        size = int(torch.randint(1, 60, (1,), generator=generator))
        picked = torch.randint(0, len(lengths), (size,), generator=generator).tolist()
        for i, out in zip(picked, attend(picked), strict=True):
            assert torch.equal(out, alone[i]), (size, i)


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_as_wrong_as_an_int_can_be_are_cut_off(pair_of, causal):
    q, k, v, *_ = on_gpu([(100, 100)], head_dim=128)
    wrong, cut = ints(-5, -(2**31), 2**31 - 1, 100), ints(0, 0, 100, 100)
    expected = fagen.attention_varlen(q, k, v, cut, causal=causal)
    assert torch.equal(fagen.attention_varlen(q, k, v, wrong, causal=causal), expected)


def test_a_graph_replays_with_other_lengths(pair_of):
    q, k, v, at, _ = on_gpu([(512, 512)] * 8, head_dim=128)
    call = partial(fagen.attention_varlen, q, k, v, at, causal=True, return_lse=True)
    graph, (out, lse) = graph_of(call)
    for ends in (*ENDS, [0, *[4_096] * 8]):
        at.copy_(ints(*ends))
        for _ in range(2):  # the second finds the counter as the first left it
            spoil(out, lse)
            graph.replay()
            expected, expected_lse = exact(q, k, v, at, at, causal=True)
            torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)
            torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    at.zero_()  # no sequence has a row
    out.fill_(7.0)
    graph.replay()
    assert (out == 0).all()


def test_the_host_waits_for_nothing(pair_of):
    q, k, v, at, _ = on_gpu([(100, 100)] * 9, head_dim=128)
    fagen.attention_varlen(q, k, v, at)
    with waiting_for_nothing():
        fagen.attention_varlen(q, k, v, at)


def test_it_is_near_its_emulation(pair_of):
    given = on_gpu([(70, 200), (0, 3), (300, 300)], head_dim=128)
    out = fagen.attention_varlen(*given, causal=True)
    plan, _ = pair_of("fwd_fp16_d128_causal_m128n128_varlen_packgqa")
    emulated, _ = emulate_varlen(plan, *(x.cpu() for x in given), 128**-0.5)
    torch.testing.assert_close(out.cpu(), emulated, rtol=2e-3, atol=2e-3)


def test_flash_attention_3s_call_is_the_same(pair_of):
    q, k, v, at_q, at_k = on_gpu([(70, 200), (0, 3), (300, 300)], head_dim=128)
    out = flash_attn_varlen_func(q, k, v, at_q, at_k, 300, 300, causal=True)
    assert torch.equal(out, fagen.attention_varlen(q, k, v, at_q, at_k, causal=True))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_in_e4m3_the_call_is_near_fp64(pair_of, head_dim, causal, name, by_column):
    of = on_gpu8(LISTS[name], head_dim=head_dim, by_column=by_column)
    out, lse = fagen.attention_varlen(*of.tensors, causal=causal, return_lse=True, **of.named)
    expected, expected_lse = of.exact(causal=causal)
    assert out.dtype == torch.bfloat16
    # P is rounded to three bits of mantissa, and the tensor cores add up in some 14 bits
    assert far(out, expected) < 0.05
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-2)
    alone = fagen.attention_varlen(*of.tensors, causal=causal, **of.named)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("number", [0.0, 1e30])
def test_in_e4m3_a_neighbours_descale_of_0_or_1e30_changes_no_bit(pair_of, number, name):
    lengths = [(300, 300), (64, 20), (17, 40)]
    of = on_gpu8(lengths, head_dim=128)
    expected = fagen.attention_varlen(*of.tensors, causal=True, **of.named)
    changed = of.named[name].clone()
    changed[1] = number
    out = fagen.attention_varlen(*of.tensors, causal=True, **of.named | {name: changed})
    for one in (0, 2):
        rows = slice(*of.tensors[3][one : one + 2].tolist())
        assert torch.equal(out[rows], expected[rows])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_in_e4m3_values_may_have_a_descale_of_0_or_1e30(pair_of, head_dim, causal):
    of = on_gpu8([(70, 200), (0, 3), (300, 300)], head_dim=head_dim)
    for number in (0.0, 1e30):
        named = of.named | {"v_descale": torch.full((3, 2), number, device="cuda")}
        out, lse = fagen.attention_varlen(*of.tensors, causal=causal, return_lse=True, **named)
        q, k, _ = of.real
        means = q, k, of.tensors[2].float() * number
        expected, expected_lse = exact(*means, *of.tensors[3:], causal=causal)
        assert not out.any() if number == 0 else far(out, expected) < 0.05
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-2)


@pytest.mark.parametrize("names", ["q", "k", "qk"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_in_e4m3_scores_may_have_descales_of_1e8(pair_of, head_dim, names):
    """All go to one key, the first, or as without where 1e30 meets a descale as small."""
    of = on_gpu8([(70, 200), (300, 300)], head_dim=head_dim)
    q, k, v, at_q, at_k = of.tensors
    one_key = torch.zeros_like(k, dtype=torch.float32)
    one_key[at_k[:-1].long()] = 1
    tensors = q.float().abs().to(E4M3), one_key.to(E4M3), v, at_q, at_k
    sizes = {name: 1e8 if name == names else 1.0 for name in "qk"}
    if names == "qk":
        tensors, sizes = of.tensors, {"q": 1e30, "k": 2.0**-7 / 1e30}
    named = {
        "q_descale": torch.full((2, 4), sizes["q"], device="cuda"),
        "k_descale": torch.full((2, 2), sizes["k"], device="cuda"),
        "v_descale": torch.ones(2, 2, device="cuda"),
    }
    out = fagen.attention_varlen(*tensors, causal=True, **named)
    means = (x.double() * by for x, by in zip(tensors[:3], (*sizes.values(), 1.0), strict=True))
    expected, _ = exact(*means, at_q, at_k, causal=True)
    assert far(out, expected) < (0.05 if names == "qk" else 1e-6)


def test_in_e4m3_a_graph_replays_with_other_lengths_and_descales(pair_of):
    of = on_gpu8([(512, 512)] * 8, head_dim=128)
    q, k, v, at, _ = of.tensors
    names = ("q_descale", "k_descale", "v_descale")
    numbers = {
        name: torch.ones(8, heads, device="cuda")
        for name, heads in zip(names, (4, 2, 2), strict=True)
    }
    graph, out = graph_of(partial(fagen.attention_varlen, q, k, v, at, causal=True, **numbers))
    for ends, descale in zip(ENDS, (0.05, 0.1, 0.02), strict=True):
        at.copy_(ints(*ends))
        for x in numbers.values():
            x.fill_(descale)
        for _ in range(2):  # the second finds the counter as the first left it
            spoil(out)
            graph.replay()
            expected, _ = exact(*(x.float() * descale for x in (q, k, v)), at, at, causal=True)
            assert far(out, expected) < 0.05


def test_in_e4m3_flash_attention_3s_call_is_the_same(pair_of):
    of = on_gpu8([(70, 200), (0, 3), (300, 300)], head_dim=128)
    shared = of.named | {"q_descale": of.named["q_descale"][:, ::2]}
    out = flash_attn_varlen_func(*of.tensors, 300, 300, causal=True, **shared)
    spread = of.named | {"q_descale": shared["q_descale"].repeat_interleave(2, 1)}
    assert torch.equal(out, fagen.attention_varlen(*of.tensors, causal=True, **spread))


def test_in_e4m3_it_is_near_its_emulation(pair_of):
    of = on_gpu8([(70, 200), (0, 3), (300, 300)], head_dim=128)
    out = fagen.attention_varlen(*of.tensors, causal=True, **of.named)
    given = (x.cpu() for x in of.tensors)
    numbers = {name: x.cpu() for name, x in of.named.items()}
    emulated = fagen.attention_varlen(*given, causal=True, **numbers)
    assert far(out.cpu(), emulated.double()) < 0.02


def test_many_rows_lie_far_from_the_first(pair_of):
    """Offsets of rows times their stride are beyond 2^31 elements."""
    rows = 1_200_000
    q, k, v = (torch.zeros(rows, 16, 128, dtype=torch.float16, device="cuda") for _ in range(3))
    tail = slice(rows - 333, rows)
    for x in (q, k, v):
        x[tail] = torch.randn_like(x[tail])
    at, near = ints(rows - 333, rows), ints(0, 333)
    out = fagen.attention_varlen(q, k, v, at, causal=True)
    expected = fagen.attention_varlen(q[tail], k[tail], v[tail], near, causal=True)
    assert torch.equal(out[tail], expected)
