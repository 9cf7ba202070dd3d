"""fagen.attention takes chunks, or decoding's kernels, where few queries meet many keys."""

import math

import pytest
import torch
from torch import Tensor

import fagen
from fagen import registry
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import Row
from fagen.dispatch.select import serve
from fagen.errors import ScheduleError
from fagen.kinds.backward.oracle import gradients
from fagen.kinds.forward.oracle import reference
from fagen.problem import Problem, Sizes
from fagen.runtime import call as calls
from fagen.runtime import op
from fagen.vocab import MASKS
from tests.attention_helpers import fill
from tests.tensors import normal

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

SPLIT = "fwd_fp16_d64_causal_m64n64_split3"
DECODING = "dec_fp16_d64_causal_r8n128"
PLAIN = "fwd_fp16_d64_causal_m64n32"
ROWS = [
    Row("NVIDIA H200", PLAIN),
    Row("NVIDIA H200", SPLIT, 300, 2_000, tiles_to=8),
    Row("NVIDIA H200", DECODING, 200, queries_to=3),
]


def qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    return tuple(
        normal(1, length, count, 64, seed=seed, dtype=torch.float16)
        for seed, (length, count) in enumerate(shapes)
    )


def right(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: str) -> None:
    exact, exact_lse = reference(q, k, v, mask=mask, scale=q.shape[3] ** -0.5)
    sees = exact_lse > -math.inf
    assert (out.double() - exact).abs().max() <= 4e-3 if out.numel() else True
    assert (lse[sees].double() - exact_lse[sees]).abs().max() < 1e-3 if sees.any() else True
    assert (lse[~sees] == -math.inf).all() and (out.transpose(1, 2)[~sees] == 0).all()


@pytest.fixture
def kernels(monkeypatch):
    """The slugs of all kernels that calls ready from now on."""
    results = []
    ready = op.ready

    def noted(*args, **named):
        kernel = ready(*args, **named)
        results.append(kernel.slug)
        return kernel

    monkeypatch.setattr(op, "ready", noted)
    return results


@pytest.fixture
def tables(schedules_folder, tmp_path, monkeypatch):
    """Where fagen's own table lies and where a user's does, in folders that are empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    fill(schedules_folder, PLAIN)
    users = tmp_path / "config" / "fagen"
    users.mkdir(parents=True)
    return schedules_folder / dispatch_table.NAME, users / dispatch_table.NAME


@pytest.fixture
def own_table(tables):
    """fagen's own table has ROWS and nothing else."""
    dispatch_table.update(tables[0], ROWS)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "slug"),
    [
        (1, 199, 4, PLAIN),
        (1, 200, 4, "dec_fp16_d64_causal_r8n128_c64"),
        (3, 5_000, 4, "dec_fp16_d64_causal_r8n128_c64"),
        (3, 5_000, 24, "dec_fp16_d64_causal_r64n128_c64"),
        (4, 5_000, 4, PLAIN),
        (4, 2_000, 4, SPLIT),
        (4, 2_001, 4, PLAIN),
        (4, 299, 4, PLAIN),
        (128, 300, 8, SPLIT),
        (129, 300, 4, SPLIT),
        (129, 300, 6, PLAIN),
        (4, 300, 10, PLAIN),
        (5, 0, 4, PLAIN),
    ],
)
def test_the_table_is_kept_at_its_borders(own_table, kernels, queries, keys, heads, slug):
    q, k, v = qkv(queries, keys, heads)
    out, lse = fagen.attention(q, k, v, causal=True, return_lse=True)
    assert kernels == [slug]
    right(out, lse, q, k, v, "causal")
    assert torch.equal(fagen.attention(q, k, v, causal=True), out)
    assert torch.equal(fagen.attention(q, k, v, causal=True, schedule=slug), out)
    call = dict(seqlen=queries, seqlen_k=max(1, keys), heads=heads, kv_heads=2)
    if keys:
        assert fagen.pick(dtype="fp16", head_dim=64, causal=True, **call).slug == slug


def test_bits_may_depend_on_the_batch_beyond_decodings_queries_and_nowhere_else(own_table, kernels):
    """Three times as many tiles are enough without splitting keys; a named schedule is the same."""
    for queries, slugs in ((40, [SPLIT, PLAIN]), (3, ["dec_fp16_d64_causal_r8n128_c64"])):
        kernels.clear()
        single = qkv(queries, 700)
        many = [x.expand(3, -1, -1, -1) for x in single]
        by_itself, beside = (fagen.attention(*tensors, causal=True) for tensors in (single, many))
        assert kernels == slugs
        assert torch.equal(beside[0], by_itself[0]) == (queries == 3)
        torch.testing.assert_close(beside[0], by_itself[0], rtol=2e-3, atol=2e-3)
        named = fagen.attention(*many, causal=True, schedule=slugs[0])
        assert torch.equal(named[0], by_itself[0])


def test_by_fagens_own_table_the_batch_decides_upon_128_queries_and_not_upon_16():
    call = dict(dtype="fp16", head_dim=128, causal=True, heads=32, kv_heads=8)

    def num_splits(queries, batch):
        results = fagen.pick(**call, seqlen=queries, seqlen_k=8_192, batch=batch)
        return int(registry.from_slug(results.slug).values()["num_splits"])

    assert [num_splits(128, batch) for batch in (1, 8)] == [16, 1]
    assert {num_splits(queries, batch) for queries in (1, 4, 16) for batch in (1, 8, 64)} == {16}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 16, 17, 25, 64, 127, 128, 130])
def test_it_is_right_by_fagens_own_table(kernels, queries, causal):
    picked = set()
    for keys in (1, 0, 130, 1_023, 1_024, 4_095, 4_096, 5_000):
        q, k, v = qkv(queries, keys, 2, 1)
        out, lse = fagen.attention(q, k, v, causal=causal, return_lse=True)
        right(out, lse, q, k, v, "causal" if causal else "full")
        problem = Problem("fp16", 64, 64, "causal" if causal else "full", "fp16", "", 0)
        picked.add(serve(problem, Sizes(1, 2, 1, queries, keys), "").schedule.slug)
    assert set(kernels) == picked and len(picked) > 1


@pytest.mark.parametrize(("queries", "keys"), [(2, 400), (40, 700)])
def test_gradients_flow_through_either(own_table, queries, keys):
    leaves = [x.requires_grad_() for x in qkv(queries, keys)]
    out, lse = fagen.attention(*leaves, causal=True, return_lse=True)
    dout, dlse = normal(*out.shape, seed=7, dtype=torch.float16), torch.ones_like(lse)
    results = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    tensors = (x.detach() for x in (dout, *leaves))
    expected = gradients(*tensors, mask=MASKS["causal"], scale=64**-0.5, dlse=dlse)[2:]
    for result, exact in zip(results, expected, strict=True):
        assert (result.double() - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize(("queries", "keys", "slug"), [(2, 400, DECODING), (40, 700, SPLIT)])
def test_compiled_it_is_one_graph_with_the_kernel_of_the_call(
    own_table, fresh_dynamo, queries, keys, slug
):
    tensors = qkv(queries, keys)

    def call(q, k, v):
        return fagen.attention(q * 2, k, v, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = compiled(*tensors)
    ((kernel,),) = (ready.kernels.values() for ready in calls._ready.values())
    assert slug in kernel.slug
    assert torch.equal(results, call(*tensors))


def test_sizes_that_are_left_open_are_one_graph(own_table, fresh_dynamo):
    def call(q, k, v):
        return fagen.attention(q, k, v, causal=True)

    for keys in (400, 100):
        call(*qkv(2, keys))  # both are ready
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((2, 400), (40, 700), (3, 1_000)):
        tensors = qkv(queries, keys)
        assert torch.equal(compiled(*tensors), call(*tensors)) or torch.equal(
            compiled(*tensors), fagen.attention(*tensors, causal=True, schedule=PLAIN)
        )


def test_a_users_row_goes_before_fagens_own(tables, kernels):
    dispatch_table.update(tables[0], ROWS)
    mine = "fwd_fp16_d64_causal_m64n48_split2"
    dispatch_table.update(tables[1], [Row("NVIDIA H200", mine, 500, 600, tiles_to=64)])
    for keys, slug in ((550, mine), (700, SPLIT)):
        fagen.attention(*qkv(40, keys), causal=True)
        assert kernels[-1] == slug


def test_wrong_calls_are_refused_as_ever(own_table):
    q, k, v = qkv(40, 700)
    for tensors, words in (
        ((q[:, :, :3], k, v), "heads"),
        ((q, k[0], v), "k has shape"),
        ((q, k[:, :650], v), "seqlen_k"),
    ):
        with pytest.raises(ValueError, match=words):
            fagen.attention(*tensors, causal=True)


def test_rows_by_queries_and_tiles_are_tried_in_order_and_read_back(tmp_path):
    path = tmp_path / "dispatch.toml"
    dispatch_table.update(path, ROWS)
    dispatch_table.table_at.cache_clear()
    results = dispatch_table.table_at(path)
    assert set(results) == set(ROWS) and [row.slug for row in results] == [DECODING, SPLIT, PLAIN]
    with pytest.raises(ScheduleError, match="are both for 500 keys to 2000"):
        dispatch_table.update(path, [*ROWS[1:], Row("NVIDIA H200", SPLIT, 500, tiles_to=8)])
    usual = dispatch_table.written(ROWS[1:2])
    for wrong, words in (
        (usual.replace("tiles_to = 8", "tiles_to = 0"), "1 or more tiles"),
        (usual.replace("tiles_to = 8", "queries_to = 1.5"), "whole number"),
        (usual + "rows_to = 5\n", "rows_to goes without keys_from and keys_to and"),
    ):
        path.write_text(wrong)
        dispatch_table.table_at.cache_clear()
        with pytest.raises(ScheduleError, match=words):
            dispatch_table.table_at(path)
