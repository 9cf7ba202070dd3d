"""fagen.attention_varlen on CPU tensors, of 16 bits and of e4m3: what it takes and gives."""

import math
import re
import warnings

import pytest
import torch

import fagen
from benchmarks.launch import as_called
from fagen import registry
from fagen.dispatch import tables
from fagen.dispatch.rows import Row
from fagen.dispatch.select import buildable
from fagen.errors import ScheduleError, UntunedWarning
from fagen.kinds.forward import operands
from fagen.kinds.forward.emulate import emulate, emulate_fp8
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.problem import Problem
from fagen.runtime import op
from tests.fresh import asked_for
from tests.tensors import ints, normal
from tests.varlen_helpers import E4M3, LENGTHS, Packed8, exact_passes, far, offsets, packed, packed8

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROUNDING = 0.04  # of P in e4m3, whose mantissa has three bits; all else is exact, or nearly so
ONES = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(()))
USED = [5, 3, 20, 0, 0, 32]  # keys of LENGTHS


def packed16(*args, by_column=False, **how):
    """Varlen sequences of 16 bits as those of e4m3 are made."""
    tensors = packed(*args, **how)
    return Packed8(tensors, {}, tensors[:3])


both = pytest.mark.parametrize("make", [packed16, packed8])


def called(case, **more):
    """Out and the log-sum-exp of a call."""
    return fagen.attention_varlen(*case.tensors, return_lse=True, **case.named | more)


def out_of(case, **more):
    return fagen.attention_varlen(*case.tensors, **case.named | more)


def same(results, expected):
    return all(map(torch.equal, results, expected))


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_sequence_attends_to_itself(dtype, causal):
    case = packed16(dtype=dtype)
    out, lse = called(case, causal=causal)
    assert (out.dtype, out.shape) == (dtype, (119, 4, 64))
    assert (lse.dtype, lse.shape) == (torch.float32, (4, 119))
    expected, wanted_lse = case.exact(causal=causal)
    torch.testing.assert_close(out.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    assert torch.equal(out, out_of(case, causal=causal))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_sequence_has_descales_of_its_own(head_dim, causal, by_column):
    case = packed8(head_dim=head_dim, by_column=by_column)
    out, lse = called(case, causal=causal)
    assert (out.dtype, out.shape) == (torch.bfloat16, (119, 4, head_dim))
    assert (lse.dtype, lse.shape) == (torch.float32, (4, 119))
    expected, expected_lse = case.exact(causal=causal)
    assert far(out, expected) < ROUNDING
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    assert torch.equal(out, out_of(case, causal=causal))


def usual_fp8(head_dim, mask):
    """The Plan that a call in e4m3 has."""
    problem = Problem("e4m3", head_dim, head_dim, mask, "bf16", "rows", 0, lengths="varlen")
    return plan(buildable(problem).schedules[0])


@both
def test_it_is_what_the_committed_schedule_computes_of_each_sequence_alone(make):
    case = make(((70, 200), (300, 300)), head_dim=128, by_column=True)
    out, lse = called(case, causal=True)
    q, k, v = case.tensors[:3]
    for i, (rows, keys) in enumerate(
        ((slice(0, 70), slice(0, 200)), (slice(70, 370), slice(200, 500)))
    ):
        sequence = q[None, rows], k[None, keys], v[None, keys], 128**-0.5
        if make is packed16:
            by = plan(Schedule.from_slug("fwd_fp16_d128_causal_m128n128_varlen_packgqa"))
            expected, expected_lse = emulate(by, *sequence)
        else:
            own = {name: x[i : i + 1] for name, x in case.named.items()}
            descales = own["q_descale"][..., None], own["k_descale"][..., None], own["v_descale"]
            numbers = *descales, own["v_mean"], own["k_mean"]
            expected, expected_lse = emulate_fp8(usual_fp8(128, "causal"), *sequence, *numbers)
        assert torch.equal(out[rows], expected[0]) and torch.equal(lse[:, rows], expected_lse[0])


def test_without_offsets_of_keys_there_are_as_many_as_queries():
    q, k, v, at_q, _ = packed([(length, length) for length in (9, 0, 33)])
    expected = fagen.attention_varlen(q, k, v, at_q, at_q, causal=True)
    assert torch.equal(fagen.attention_varlen(q, k, v, at_q, causal=True), expected)


def test_scale_is_that_of_the_scores():
    q, *rest = packed()
    out = fagen.attention_varlen(q, *rest, scale=0.25)
    assert torch.equal(out, fagen.attention_varlen(q * 2, *rest))


@both
@pytest.mark.parametrize("causal", [False, True])
def test_of_seqused_k_keys_alone_are_seen(make, causal):
    case = make()
    q, k, v, at_q, at_k = case.tensors
    kept = []
    for begin, count in zip(at_k.tolist()[:-1], USED, strict=True):
        kept += range(begin, begin + count)
    cut = case._replace(tensors=(q, k[kept], v[kept], at_q, offsets(USED)))
    unused = torch.ones(len(k), dtype=torch.bool)
    unused[kept] = False
    hidden = case._replace(tensors=(q, k.clone(), v.clone(), at_q, at_k))
    for x in hidden.tensors[1:3]:
        x.view(torch.uint8)[unused] = 0xFF  # NaN
    assert same(called(hidden, seqused_k=ints(*USED), causal=causal), called(cut, causal=causal))
    more = torch.full((6,), 1_000, dtype=torch.int32)  # than there are
    assert same(called(case, seqused_k=more, causal=causal), called(case, causal=causal))


@pytest.mark.parametrize(("make", "nan"), [(packed16, 0xFF), (packed8, 0x7F), (packed8, 0xFF)])
def test_nothing_is_seen_of_neighbours_nor_of_what_lies_around(make, nan):
    case = make(gap=6, by_column=True)
    exact, exact_lse = called(case, causal=True)
    q, k, v, at_q, at_k = case.tensors
    rows, keys = slice(int(at_q[5]), int(at_q[6])), slice(int(at_k[5]), int(at_k[6]))
    for x, mine in ((q, rows), (k, keys), (v, keys)):
        kept = x[mine].clone()
        x.view(torch.uint8).fill_(nan)
        x[mine] = kept
    for numbers in case.named.values():
        numbers[:5] = torch.nan
    out, lse = called(case, causal=True)
    assert torch.equal(out[rows], exact[rows]) and torch.equal(lse[:, rows], exact_lse[:, rows])
    assert out[rows].isfinite().all()


def test_rows_that_see_no_key_are_zeros():
    out, lse = called(packed16(((3, 0), (7, 4))), causal=True)
    assert not out[:6].any() and (lse[:, :6] == -math.inf).all()
    assert out[6:].any() and lse[:, 6:].isfinite().all()


@both
@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 5)], [(4, 0)], [(0, 0), (0, 0)]])
def test_there_may_be_nothing_to_do(make, lengths):
    case = make(lengths, by_column=True)
    out, lse = called(case)
    assert out.shape == case.tensors[0].shape and not out.any()
    assert lse.shape == (4, len(out)) and (lse == -math.inf).all()


def test_there_may_be_no_sequence():
    q, k, v, *_ = packed([(0, 0)])
    assert fagen.attention_varlen(q, k, v, offsets([])).shape == (0, 4, 64)


def test_many_sequences_are_one_as_well_as_another():
    lengths = [(1 + i * 37 % 5, 1 + i * 11 % 7) for i in range(1_100)]
    case = packed16(lengths, head_dim=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        out = out_of(case, causal=True)
    torch.testing.assert_close(out.double(), case.exact(causal=True)[0], rtol=2e-3, atol=2e-3)


def test_offsets_that_lead_out_of_the_tensors_are_cut_off():
    case = packed16(((9, 20), (11, 30)))
    expected = called(case)
    *_, at_q, at_k = case.tensors
    at_q[2] = 2_000
    for first, last in ((-5, 1 << 30), (-(2**31), 2**31 - 1)):
        at_k[0], at_k[2] = first, last
        assert same(called(case), expected)


def test_layouts_are_free_and_hints_of_the_longest_change_nothing():
    q, k, v, *at = packed()
    expected = fagen.attention_varlen(q, k, v, *at)
    kv = torch.cat((k, v), 1)  # slices of one buffer, heads before rows
    kv = kv.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(fagen.attention_varlen(q, kv[:, :2], kv[:, 2:], *at), expected)
    hints = dict(max_seqlen_q=1, max_seqlen_k=1)
    assert torch.equal(fagen.attention_varlen(q, k, v, *at, **hints), expected)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [None, (7, 0, 40, 3)])
def test_rows_behind_the_used_queries_are_nobodys(causal, keys):
    at = ints(0, 9, 20, 20, 60), ints(0, 12, 50, 90, 95)
    used = (5, 0, 3, 99)  # of 9, 11, 0 and 40
    shapes = (60, 4, 32), (95, 2, 32), (95, 2, 32)
    leaves = [
        normal(*shape, seed=i, dtype=torch.float16).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    how = dict(seqused_q=ints(*used), seqused_k=None if keys is None else ints(*keys))
    out, lse = fagen.attention_varlen(*leaves, *at, causal=causal, return_lse=True, **how)
    dout, dlse = normal(60, 4, 32, seed=3, dtype=torch.float16), (lse > -math.inf).float()
    results = out, lse, *torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    expected = exact_passes(leaves, at, dout, dlse, causal=causal, used_q=used, used_k=keys)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=4e-3, atol=4e-3)
    assert not out[(expected[0] == 0).all(2).all(1)].any()


# ---- in e4m3 ------------------------------------------------------------------------------------


def test_used_queries_have_descales_of_their_sequences():
    at, used = ints(0, 20, 50), ints(11, 30)
    tensors = [normal(50, 2, 32, seed=i).to(E4M3) for i in range(3)]
    descales = dict.fromkeys(ONES, torch.tensor(((0.5, 2.0), (4.0, 0.25))))
    whole = fagen.attention_varlen(*tensors, at, **descales)
    part = fagen.attention_varlen(*tensors, at, seqused_q=used, **descales)
    assert torch.equal(part[:11], whole[:11]) and torch.equal(part[20:], whole[20:])
    assert not part[11:20].any()


def test_one_descale_serves_for_all_in_any_of_its_shapes():
    case = packed8()
    shapes = [
        lambda x, heads: torch.tensor(x),
        lambda x, heads: torch.full((1, 1), x),
        lambda x, heads: torch.full((1, heads), x),
        lambda x, heads: torch.full((6, 1), x),
        lambda x, heads: torch.tensor(x).expand(6, heads),  # strides of 0
        lambda x, heads: torch.full((6, heads, 1), x),
    ]
    numbers = zip(ONES, (0.5, 0.25, 2.0), (4, 2, 2), strict=True)
    numbers = [*numbers]
    outs = [
        out_of(case, causal=True, **{name: shape(x, heads) for name, x, heads in numbers})
        for shape in shapes
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    plain = out_of(case, causal=True, scale=0.125 * 64**-0.5, **ONES)
    assert torch.equal(outs[0], plain * 2)


def test_what_quantize_makes_of_all_sequences_at_once_is_taken():
    q, k, v, *at = packed(dtype=torch.bfloat16)
    (q8, q_descale), (k8, k_descale) = (fagen.quantize(x[None], scales="head") for x in (q, k))
    v8, v_descale, v_mean = fagen.quantize(v[None], scales="column", center=True)
    numbers = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, v_mean=v_mean)
    out = fagen.attention_varlen(q8[0], k8[0], v8[0], *at, **numbers)
    assert far(out, fagen.attention_varlen(q, k, v, *at).double()) < 0.1


def test_out_is_bf16_or_what_out_dtype_or_a_schedule_says():
    case = packed8()
    wide, half = out_of(case), out_of(case, out_dtype=torch.float16)
    assert (wide.dtype, half.dtype) == (torch.bfloat16, torch.float16)
    torch.testing.assert_close(half.bfloat16(), wide, rtol=2**-7, atol=0)
    slug = "fwd_e4m3_d64_full_m64n64_varlen_ofp16"
    out = out_of(case, schedule=slug)
    assert out.dtype == torch.float16 and far(out, case.exact()[0]) < ROUNDING
    with pytest.raises(ScheduleError, match="the call asks for"):
        called(case, schedule=slug, out_dtype=torch.bfloat16)


def test_what_is_timed_is_what_the_call_computes():
    plan = usual_fp8(64, "causal")
    q, k, v = (normal(2, 70, heads, 64, seed=heads).half() for heads in (4, 2, 2))
    arguments = operands.arguments(plan, q, k, v)
    out = op.kernel_of(plan, "cpu").out_only(*arguments)
    real = operands.real(plan, operands.operands(plan, q, k, v))
    expected, _ = reference(*real, mask="causal", scale=64**-0.5)
    assert far(out.unflatten(0, (2, 70)), expected) < ROUNDING
    tensors, keys = as_called(plan, Problem.of(plan.schedule), arguments)
    assert torch.equal(fagen.attention_varlen(*tensors, causal=True, **keys), out)


# ---- which kernel -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "widths", "words"),
    [
        (packed16, (72, 40), r"head_dim 72 and 40 \(V\), full, varlen: fwd_fp16_"),
        (packed8, (96, 48), "V row-major.*varlen: fwd_e4m3_d96v48_full_m128n128_"),
    ],
)
def test_a_problem_that_nobody_tuned_has_a_derived_kernel_which_is_said_once(make, widths, words):
    case = make(LENGTHS, head_dim=widths[0], head_dim_v=widths[1])
    with pytest.warns(UntunedWarning, match=words):
        out = out_of(case)
    assert far(out, case.exact()[0]) < (2e-3 if make is packed16 else ROUNDING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(case)
        called(make())  # there is a file for it


OTHER = "fwd_fp16_d64_causal_m128n64_varlen"
OTHER_BY = "bwd_fp16_d64_causal_m64n64_varlen"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A user's table with kernels of varlen sequences, which are of no file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tables.table_at.cache_clear()
    listed = [OTHER, OTHER_BY, f"{OTHER_BY}_det", "fwd_e4m3_d64_full_m64n64_varlen"]
    rows = [Row("NVIDIA H200", slug) for slug in listed]
    tables.update(tmp_path / "fagen" / tables.NAME, rows)
    yield
    tables.table_at.cache_clear()


def test_a_row_of_a_table_says_which_kernel_serves(table):
    case = packed16()
    assert torch.equal(out_of(case, causal=True), out_of(case, causal=True, schedule=OTHER))
    problem = {"dtype": "fp16", "head_dim": 64}
    assert fagen.prepare_varlen(**problem, causal=True, device="cpu") == OTHER
    usual = "fwd_fp16_d64_full_m192n128_varlen_packgqa_q2"
    assert fagen.prepare_varlen(**problem, device="cpu") == usual
    for out_dtype in ("bf16", "fp16"):  # one row is for both types of O
        slug = fagen.prepare_varlen(dtype="e4m3", head_dim=64, out_dtype=out_dtype, device="cpu")
        assert slug.startswith("fwd_e4m3_d64_full_m64n64_varlen")
        assert slug.endswith("_ofp16") == (out_dtype == "fp16")
    results = fagen.pick(**problem, causal=True, lengths="varlen")
    assert results.slug == OTHER and results.why.endswith("for any number of keys on NVIDIA H200")


def test_a_row_of_a_table_says_which_kernel_computes_gradients(table):
    q, *rest = packed()
    fagen.attention_varlen(q.requires_grad_(), *rest, causal=True).sum().backward()
    assert asked_for("backward") == {OTHER_BY} and q.grad is not None
    problem = dict(dtype="fp16", head_dim=64, lengths="varlen", kind="backward", causal=True)
    for deterministic, slug in ((False, OTHER_BY), (True, f"{OTHER_BY}_det")):
        assert fagen.pick(**problem, deterministic=deterministic).slug == slug


@pytest.fixture
def by_mean(table, tmp_path):
    """Kernels of gradients for sequences of at most 20 keys in the mean, and for more."""
    slugs = OTHER_BY, OTHER_BY.replace("m64n64", "m64n128")
    bounds = {"keys_to": 20}, {"keys_from": 21}
    rows = [Row("NVIDIA H200", slug, **keys) for slug, keys in zip(slugs, bounds, strict=True)]
    tables.update(tmp_path / "fagen" / tables.NAME, rows)
    return slugs


@pytest.mark.parametrize("compiles", [False, True])
def test_the_mean_length_of_sequences_chooses_the_kernel_of_gradients(
    compiles, by_mean, fresh_dynamo
):
    """By what all have together and their number, whatever each has."""
    compiled = torch.compile(fagen.attention_varlen, fullgraph=True, backend="aot_eager")
    call = compiled if compiles else fagen.attention_varlen
    few, many = by_mean
    for lengths, expected in ([3, 37], {few}), ([20, 20], {few}), ([4, 38], {few, many}):
        q, *rest = packed([(length, length) for length in lengths])
        call(q.requires_grad_(), *rest, causal=True).sum().backward()
        assert asked_for("backward") == expected
    problem = dict(dtype="fp16", head_dim=64, lengths="varlen", kind="backward", causal=True)
    assert [fagen.pick(**problem, seqlen=n, batch=9).slug for n in (20, 21)] == [few, many]
    keys = dict(dtype="fp16", head_dim=64, causal=True, device="cpu", gradient=True)
    fagen.prepare_varlen(**keys)
    assert asked_for("backward") == {few, many}


@pytest.mark.parametrize("gradient", [False, True])
def test_prepared_a_call_finds_its_kernels(gradient, fresh_dynamo, monkeypatch):
    q, *rest = packed()
    problem = dict(dtype=q.dtype, head_dim=64, causal=True, device="cpu")
    slug = fagen.prepare_varlen(**problem, gradient=gradient)
    assert "_varlen" in slug and slug == fagen.prepare_varlen(**problem)
    monkeypatch.setattr(op, "ready", None)  # nothing is readied any more
    compiled = torch.compile(fagen.attention_varlen, fullgraph=True, backend="aot_eager")
    out = compiled(q.requires_grad_(gradient), *rest, causal=True)
    assert out.requires_grad == gradient


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"v_layout": "columns"}, 'must be "rows" with lengths = "varlen"'),
        ({"scales": "block"}, 'with lengths = "varlen" there is scales = "head"'),
    ],
)
def test_what_a_schedule_cannot_have_is_said(keys, words):
    usual = dict(head_dim=64, dtype="e4m3", mask="full", block_m=128, block_n=64, lengths="varlen")
    with pytest.raises(ScheduleError, match=re.escape(words)):
        Schedule.make(**usual | keys)


def test_the_committed_ones_in_e4m3_are_of_three_head_dims_and_both_masks():
    slugs = [path.stem for path in registry.schedules("forward") if "_varlen" in path.stem]
    results = [registry.from_slug(slug) for slug in slugs if "e4m3" in slug]
    problems = {(schedule.attention.head_dim, schedule.attention.mask) for schedule in results}
    assert len(results) == len(problems) == 6
    assert {schedule.fp8.v_layout for schedule in results} == {"rows"}
