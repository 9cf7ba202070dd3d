"""fagen.attention_decode on CPU tensors: what it takes, gives and refuses; that torch traces it."""

import math
import warnings

import pytest
import torch

import fagen
from fagen.dispatch import tables
from fagen.dispatch.rows import Row
from fagen.dispatch.select import sized
from fagen.errors import ScheduleError, UntunedWarning
from fagen.kinds.decode.oracle import attend
from fagen.problem import Sizes
from fagen.runtime import call, decode, op
from fagen.runtime.op import emulated
from fagen.vocab import CACHES, MASKS
from tests.fresh import forget
from tests.tensors import ints, normal

HALF = torch.float16


@pytest.fixture(autouse=True)
def nothing_ready(monkeypatch):
    forget(monkeypatch)


def tensors(batch=2, queries=1, heads=8, kv_heads=8, keys=70, head_dim=64, head_dim_v=64):
    q = normal(batch, queries, heads, head_dim, dtype=HALF)
    k = normal(batch, keys, kv_heads, head_dim, seed=1, dtype=HALF)
    v = normal(batch, keys, kv_heads, head_dim_v, seed=2, dtype=HALF)
    return q, k, v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "head_dim", "head_dim_v"),
    [(1, 32, 8, 64, 64), (3, 16, 8, 128, 128), (2, 7, 1, 192, 128), (1, 40, 1, 96, 96)],
)
@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_it_is_attention_over_each_sequences_own_keys(
    queries, heads, kv_heads, head_dim, head_dim_v, causal
):
    q, k, v = tensors(2, queries, heads, kv_heads, 70, head_dim, head_dim_v)
    lengths = dict(seqused_k=ints(70, 33), leftpad_k=ints(2, 0))
    out, lse = fagen.attention_decode(q, k, v, **lengths, causal=causal, return_lse=True)
    mask = MASKS["causal" if causal else "full"]
    expected, expected_lse = attend(q, k, v, mask=mask, scale=head_dim**-0.5, **lengths)
    assert out.dtype == q.dtype and (out.double() - expected).abs().max() < 2e-3
    assert torch.allclose(lse.double(), expected_lse, atol=1e-3)


def test_without_lengths_all_keys_count_and_without_the_lse_there_is_one_result():
    q, k, v = tensors()
    out_alone = fagen.attention_decode(q, k, v)
    out, _ = fagen.attention_decode(q, k, v, seqused_k=ints(70, 70), return_lse=True)
    assert torch.equal(out_alone, out)
    assert torch.equal(out_alone, fagen.attention_decode(q, k, v, causal=False))
    assert torch.equal(out_alone, fagen.attention_decode(q, k, v, scale=64**-0.5))


def test_strides_are_free():
    q, k, v = tensors()
    caches = torch.stack((k, v), 2)  # as many engines keep them
    permuted = caches[:, :, 0].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(
        fagen.attention_decode(q, caches[:, :, 0], caches[:, :, 1]),
        fagen.attention_decode(q, permuted, v),
    )


@pytest.mark.parametrize("shape", [(0, 1, 8, 8, 70), (2, 0, 8, 8, 70), (2, 1, 8, 8, 0)])
def test_of_nothing_there_is_nothing_or_zeros(shape):
    batch, queries, heads, kv_heads, keys = shape
    out, lse = fagen.attention_decode(
        *tensors(batch, queries, heads, kv_heads, keys), return_lse=True
    )
    assert torch.equal(out, torch.zeros(batch, queries, heads, 64, dtype=HALF))
    assert torch.equal(lse, torch.full((batch, heads, queries), -math.inf))


def test_which_kernel_it_is_depends_on_rows_and_kv_heads_and_on_whether_a_cache_has_few_keys():
    def slugs(**sizes):
        call.reset()
        fagen.attention_decode(*tensors(**sizes))
        (key,) = call._ready
        values = key.derived[0].values()
        return tuple(values[name] for name in ("mask", "rows", "num_splits", "by"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        assert slugs() == ("causal", 8, 16, "round_robin")
        assert (
            slugs(batch=1, keys=7) == slugs(batch=5, keys=200) == ("causal", 8, 16, "round_robin")
        )
        assert slugs(batch=30, keys=641) == ("causal", 8, 16, "round_robin")
        assert slugs(batch=31, keys=641) == ("causal", 8, 16, "stream_k")
        assert slugs(batch=31, keys=640) == ("causal", 8, 16, "round_robin")
        assert slugs(queries=2, heads=40) == ("causal", 16, 16, "round_robin")
        assert slugs(queries=4, heads=64) == ("causal", 32, 16, "round_robin")
        assert slugs(queries=16, heads=64) == ("causal", 32, 16, "round_robin")
        assert slugs(queries=16, heads=64, keys=700) == ("causal", 64, 16, "round_robin")
        assert slugs(heads=8, kv_heads=4) == ("causal", 8, 32, "round_robin")
        assert slugs(heads=8, kv_heads=1) == ("causal", 8, 64, "round_robin")


def test_a_schedule_that_nobody_measured_is_said_once():
    q, k, v = tensors(heads=4, kv_heads=4)
    with pytest.warns(UntunedWarning, match="decoding of .*: dec_fp16_d64_causal_r8n128_c32 is"):
        fagen.attention_decode(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fagen.attention_decode(q, k, v)
        fagen.attention_decode(*tensors())  # this one is committed


def test_a_reference_for_each_head_takes_the_place_of_maxima():
    q, k, v = tensors(keys=200)
    usual, lse = fagen.attention_decode(q, k, v, return_lse=True)
    with pytest.warns(UntunedWarning, match="_fixed is"):
        out = fagen.attention_decode(q, k, v, reference=fagen.reference_for(lse, 200))
    assert (out - usual).abs().max() < 2e-3


def test_references_are_logarithms_of_means_the_largest_of_each_head():
    scores = torch.randn(3, 2, 4, 50)  # batch, heads, queries, keys
    lse = scores.logsumexp(-1)
    lse[1] = -math.inf  # which has seen nothing
    expected = scores[[0, 2]].exp().mean(-1).log().amax((0, 2))
    assert torch.allclose(fagen.reference_for(lse, 50), expected, atol=1e-5)
    assert torch.equal(fagen.reference_for(lse, ints(50, 0, 50)), fagen.reference_for(lse, 50))
    assert fagen.reference_for(lse[1:2], 50).tolist() == [-math.inf] * 2
    with pytest.raises(ValueError, match=r"lse has shape \(2, 4\)"):
        fagen.reference_for(lse[0], 50)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("prepare", [fagen.prepare_decode, fagen.prepare])
def test_a_gpu_that_is_not_there_is_not_prepared_for(prepare):
    more = {"heads": 8} if prepare is fagen.prepare_decode else {}
    with pytest.raises(fagen.DeviceError, match='device is "cuda", and torch sees no GPU'):
        prepare(dtype="fp16", head_dim=64, device="cuda", **more)


def test_a_caller_may_choose_the_schedule():
    q, k, v = tensors()
    usual = fagen.attention_decode(q, k, v)
    chosen = fagen.attention_decode(q, k, v, schedule="dec_fp16_d64_full_r24n64_c5")
    assert (chosen - usual).abs().max() < 2e-3


SIZES = [
    dict(batch=3, heads=16, kv_heads=4),
    dict(queries=4, heads=6, kv_heads=1, head_dim=128, head_dim_v=64),
    dict(batch=40, heads=64, kv_heads=8, head_dim=128, head_dim_v=128),  # many tiles: in runs
]


@pytest.mark.parametrize(("causal", "unified"), [(True, False), (False, True)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_prepared_a_call_finds_its_kernel_and_is_traced(
    sizes, causal, unified, monkeypatch, fresh_dynamo
):
    q, k, v = tensors(**sizes, keys=20)
    width = {name: sizes.pop(name, 64) for name in ("head_dim", "head_dim_v")}
    problem = dict(dtype="fp16", device="cpu", causal=causal, unified=unified, **sizes, **width)
    slug = fagen.prepare_decode(**problem)
    assert slug.startswith(f"dec_fp16_d{width['head_dim']}") and unified == ("fixed" in slug)
    assert fagen.prepare_decode(**problem) == slug
    monkeypatch.setattr(op, "ready", None)  # nothing is readied any more
    how = dict(reference=torch.zeros(q.shape[2]) if unified else None, causal=causal)
    results = torch.compile(fagen.attention_decode, fullgraph=True, backend="eager")(q, k, v, **how)
    assert torch.equal(results, fagen.attention_decode(q, k, v, **how))


@pytest.mark.parametrize(("card", "by"), [("NVIDIA H200", "round_robin"), ("", "stream_k")])
def test_what_a_call_without_lengths_takes_depends_on_the_card(card, by, monkeypatch):
    monkeypatch.setattr(decode, "card_of", lambda device: card)
    sizes = dict(q_shape=(100, 1, 4, 128), kv_heads=1, width=128, keys=9_999)
    how = dict(variant=True, lazy=True, alike=True, schedule=None, cache=CACHES[0])
    key = decode.of_call(torch.device("cuda", 0), HALF, **sizes, **how)
    assert [part.by for part in key if isinstance(part, decode.Tile)] == [by]


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_without_lengths_tiles_stay_whole_by_a_kernel_that_is_prepared_too(monkeypatch):
    sizes = dict(batch=33, heads=8, kv_heads=8)
    slug = fagen.prepare_decode(dtype="fp16", head_dim=64, device="cpu", **sizes)
    slugs = {
        key.derived[0].values()["by"]: ready.kernels[None].slug
        for key, ready in call._ready.items()
    }
    assert slugs == {"round_robin": slug, "stream_k": f"{slug}_streamk"}
    monkeypatch.setattr(op, "ready", None)
    q, k, v = tensors(**sizes, keys=20)
    with_lengths = fagen.attention_decode(q, k, v, seqused_k=ints(*[20] * 33))
    assert torch.equal(fagen.attention_decode(q, k, v), with_lengths)
    assert {at_hand[7] for at_hand in decode.DECODING.known} == {False, True}


@pytest.mark.parametrize("lengths", [{}, {"seqused_k": ints(70, 12), "leftpad_k": ints(0, 3)}])
def test_the_op_is_what_torch_asks_of_one(lengths):
    torch.library.opcheck(
        emulated("dec_fp16_d64_causal_r8n128"),
        (*tensors(), 0.125),
        lengths,
        test_utils=("test_schema", "test_faketensor"),
    )


# ---- dispatch tables ----------------------------------------------------------------------------

WIDE = "dec_fp16_d64_causal_r16n128_streamk_s4_b1"


@pytest.fixture
def users_table(tmp_path, monkeypatch):
    """A user's table, where calls of decoding look for their kernels."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tables.table_at.cache_clear()
    yield tmp_path / "fagen" / "dispatch.toml"
    tables.table_at.cache_clear()


def chosen(**sizes) -> str | None:
    """The slug that a table has for a call; None where the rule decides."""
    call.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        fagen.attention_decode(*tensors(**sizes))
    ((slug,),) = (ready.kernels for ready in call._ready.values())
    return slug


def test_a_table_has_kernels_by_rows_of_a_group_and_in_all(users_table):
    few, many = "dec_fp16_d64_causal_r8n128_s4", "dec_fp16_d64_causal_r8n128_streamk_b1"
    tables.update(
        users_table,
        [
            Row("NVIDIA H200", few, group_rows=8, rows_to=32),
            Row("NVIDIA H200", many, group_rows=8),
            Row("NVIDIA H200", WIDE, group_rows=16),
        ],
    )
    of_eight = dict(heads=16, kv_heads=8)
    assert chosen(batch=2, **of_eight) == few
    assert chosen(batch=3, **of_eight) == many
    assert chosen(batch=1, queries=8, **of_eight) == WIDE
    assert chosen(batch=1, queries=9, **of_eight) is None, "of 18 rows nothing was written"
    # one KV head's keys are cut into 64 chunks, and these kernels' into 16
    assert chosen(heads=2, kv_heads=1) is None
    assert chosen(head_dim=128, head_dim_v=128) is None


def test_what_a_table_changes_is_not_seen_in_the_bits_and_is_still_traced(
    users_table, fresh_dynamo
):
    q, k, v = tensors(queries=2, heads=16, keys=500)
    by_rule = fagen.attention_decode(q, k, v)
    tables.update(users_table, [Row("NVIDIA H200", WIDE, group_rows=8)])
    call.reset()
    assert torch.equal(fagen.attention_decode(q, k, v), by_rule)
    assert [[*ready.kernels] for ready in call._ready.values()] == [[WIDE]]
    compiled = torch.compile(fagen.attention_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), by_rule)


def test_a_kernel_that_needs_more_than_a_call_gives_is_no_choice(users_table):
    unified = "dec_fp16_d64_causal_r8n128_fixed"
    tables.update(users_table, [Row("NVIDIA H200", unified, group_rows=8)])
    assert chosen() is None


def test_attention_takes_the_same_kernels_for_few_queries(users_table):
    usual, sizes = "dec_fp16_d64_causal_r8n128", Sizes(1, 8, 8, 1, 5_000)
    assert sized(usual, sizes, "NVIDIA H200").slug == usual
    results = "dec_fp16_d64_causal_r8n128_s4"
    tables.update(users_table, [Row("NVIDIA H200", results, group_rows=8)])
    assert sized(usual, sizes, "NVIDIA H200").slug == results
    assert sized(usual, Sizes(1, 8, 1, 1, 5_000), "NVIDIA H200").slug == f"{usual}_c64"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("group_rows = 8", "group_rows = 8\nkeys_from = 5"), "group_rows goes without keys_from"),
        (("group_rows = 8", "group_rows = 0"), "group_rows is 0; it must be 1 or more rows"),
        (("dec_fp16_d64_causal_r8n128", "fwd_fp16_d64_causal_m64n64"), "group_rows is for kernels"),
    ],
)
def test_a_wrong_row_is_refused(users_table, change, message):
    row = Row("NVIDIA H200", "dec_fp16_d64_causal_r8n128", group_rows=8)
    tables.update(users_table, [row])
    assert tables.table_at(users_table) == (row,) and row.problem.kind == "decode"
    users_table.write_text(users_table.read_text().replace(*change))
    tables.table_at.cache_clear()
    with pytest.raises(ScheduleError, match=message):
        tables.table_at(users_table)


def test_two_rows_for_the_same_calls_are_refused_and_of_other_kv_heads_are_not(users_table):
    of_many = Row("NVIDIA H200", "dec_fp16_d64_causal_r8n128", group_rows=8)
    of_one = Row("NVIDIA H200", "dec_fp16_d64_causal_r8n128_c64", group_rows=8)
    tables.update(users_table, [of_many, of_one])
    other = Row("NVIDIA H200", "dec_fp16_d64_causal_r8n128_s4", group_rows=8)
    with pytest.raises(ScheduleError, match="are both for"):
        tables.update(users_table, [of_one, of_many, other])
    tables.update(users_table, [other])
    assert set(tables.table_at(users_table)) == {other, of_one}
