"""fagen.attention under torch.compile and torch.export: one graph, of the kernels it calls."""

import pytest
import torch
from torch import Tensor
from torch.utils._sympy.numbers import int_oo

import fagen
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST, OPEN_KEYS, Row
from tests.attention_helpers import FEW, LONG, MANY, QUERY_ROWS, computed, picked, qkv, quantised

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


# ---- 16 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("choice", [None, "fwd_fp16_d64_causal_m64n48"])
def test_prepared_it_compiles_into_one_graph(fresh_dynamo, dynamic, choice):
    def twice(q, k, v, schedule=choice):
        out, lse = fagen.attention(q * 2, k, v, causal=True, return_lse=True, schedule=schedule)
        return out + lse.transpose(1, 2)[..., None]

    fagen.prepare(dtype="fp16", head_dim=64, causal=True, schedule=choice)
    compiled = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    slug = choice
    if dynamic and not choice:  # with sizes left open, rows count as many
        slug = picked(dtype="fp16", head_dim=64, causal=True, seqlen=OPEN_KEYS).slug
    q, k, v = qkv()
    for tensors in ((q, k, v), (q[:1, :30], k[:1], v[:1])):
        assert torch.equal(compiled(*tensors), twice(*tensors, schedule=slug))


class Attention(torch.nn.Module):
    """fagen.attention, as torch.export wants it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fagen.attention(q, k, v)


@pytest.fixture
def one_range(schedules_folder):
    """A table for calls with the rows of qkv(), and one kernel for all the others; both ready."""
    rows = [Row("NVIDIA H200", FEW, rows_to=QUERY_ROWS), Row("NVIDIA H200", MANY)]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)
    fagen.prepare(dtype="fp16", head_dim=64)


def test_compiled_for_fixed_sizes_few_rows_have_their_own_kernel(fresh_dynamo, one_range):
    compiled = torch.compile(fagen.attention, fullgraph=True, dynamic=False, backend="aot_eager")
    q, k, v = qkv()
    assert torch.equal(compiled(q, k, v), computed(FEW, q, k, v))
    q = torch.cat([q, q], 1)
    assert torch.equal(compiled(q, k, v), computed(MANY, q, k, v))


def test_compiled_for_open_sizes_rows_are_many_and_none_leads_to_another_graph(
    fresh_dynamo, one_range
):
    compiled = torch.compile(fagen.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = qkv()
    assert torch.equal(compiled(q, k, v), computed(MANY, q, k, v))
    many = q.repeat(2, 5, 2, 1), k.repeat(2, 1, 2, 1), v.repeat(2, 1, 2, 1)
    few = q[:, :3].contiguous(), k, v
    with torch.compiler.set_stance("fail_on_recompile"):
        for tensors in (many, few):
            assert torch.equal(compiled(*tensors), computed(MANY, *tensors))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("most", "slug"),
    [pytest.param(None, MANY, id="any batch"), pytest.param(2, FEW, id="a batch of two at most")],
)
def test_exported_rows_are_few_where_no_batch_makes_them_many(
    fresh_dynamo, one_range, strict, most, slug
):
    batch = torch.export.Dim("batch", max=most)
    q, k, v = qkv()
    exported = torch.export.export(
        Attention(), (q, k, v), dynamic_shapes=({0: batch},) * 3, strict=strict
    ).module()
    for tensors in ((q, k, v), (q[:1], k[:1], v[:1])):
        assert torch.equal(exported(*tensors), computed(slug, *tensors))
    if most is None:
        many = q.repeat(4, 1, 1, 1), k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1)
        assert torch.equal(exported(*many), computed(MANY, *many))


@pytest.mark.parametrize("dim", [1, 2], ids=["queries", "heads"])
def test_exported_with_queries_or_heads_left_open_rows_are_many(fresh_dynamo, one_range, dim):
    q, k, v = qkv()
    k, v = k[:, :, :1], v[:, :, :1]
    exported = torch.export.export(
        Attention(), (q, k, v), dynamic_shapes=({dim: torch.export.Dim("any")}, None, None)
    ).module()
    for queries in (q, q.repeat_interleave(3, dim)):
        assert torch.equal(exported(queries, k, v), computed(MANY, queries, k, v))


@pytest.fixture
def by_keys(schedules_folder):
    """A table by keys, also for more than those as which open ones count; its kernels are ready."""
    ends = (89, FEW), (OPEN_KEYS, MANY), (MOST, LONG)
    starts = 0, 90, OPEN_KEYS + 1
    rows = [
        Row("NVIDIA H200", slug, least, most)
        for least, (most, slug) in zip(starts, ends, strict=True)
    ]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)
    fagen.prepare(dtype="fp16", head_dim=64)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("least", "most", "slug"),
    [
        pytest.param(None, None, MANY, id="any number of keys"),
        pytest.param(None, 89, FEW, id="few at most"),
        pytest.param(OPEN_KEYS + 1, None, LONG, id="very many at least"),
        pytest.param(80, OPEN_KEYS + 9, MANY, id="a range that ends beyond a bound"),
    ],
)
def test_exported_keys_left_open_stay_open(fresh_dynamo, by_keys, strict, least, most, slug):
    keys = torch.export.Dim("keys", min=least, max=most)
    q, k, v = qkv(keys=least or 80)
    exported = torch.export.export(
        Attention(), (q, k, v), dynamic_shapes=(None, {1: keys}, {1: keys}), strict=strict
    )
    (results,) = exported.range_constraints.values()
    assert (results.lower, results.upper) == (least or 0, int_oo if most is None else most)
    calls = [str(n.target) for n in exported.graph.nodes if "fagen" in str(n.target)]
    assert calls == [f"fagen.{slug}_emulated.default"]
    if slug is not LONG:
        for many in (80, 89) if most == 89 else (80, 300):
            q, k, v = qkv(keys=many)
            assert torch.equal(exported.module()(q, k, v), computed(slug, q, k, v))


def test_compiled_for_open_keys_no_number_of_them_leads_to_another_graph(fresh_dynamo, by_keys):
    compiled = torch.compile(fagen.attention, fullgraph=True, backend="aot_eager")
    q, k, v = qkv()
    for x in (k, v):
        torch._dynamo.mark_dynamic(x, 1)  # raises where a guard would bound it
    assert torch.equal(compiled(q, k, v), computed(MANY, q, k, v))
    with torch.compiler.set_stance("fail_on_recompile"):
        few = q, k[:, :60].contiguous(), v[:, :60].contiguous()
        assert torch.equal(compiled(*few), computed(MANY, *few))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_recorded_by_torch_jit_a_call_is_one_of_the_sizes_that_it_has(one_range):
    q, k, v = qkv()
    for tensors, slug in (((q, k, v), FEW), ((torch.cat([q, q], 1), k, v), MANY)):
        assert torch.equal(
            torch.jit.trace(fagen.attention, tensors)(*tensors), computed(slug, *tensors)
        )


# ---- e4m3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_rows", [0, 64])
def test_prepared_it_compiles_into_one_graph_of_open_sizes_in_e4m3_too(fresh_dynamo, scale_rows):
    def attend(q, k, v, how):
        out, lse = fagen.attention(q, k, v, return_lse=True, **how)
        return out + lse.transpose(1, 2)[..., None]

    problem = dict(dtype="e4m3", head_dim=64, v_layout="columns", scale_rows=scale_rows)
    fagen.prepare(**problem)
    slug = picked(**problem, seqlen=OPEN_KEYS).slug
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((90, 300), (150, 500)):
        tensors, how = quantised(scale_rows, "columns", queries=queries, keys=keys)
        assert torch.equal(compiled(*tensors, how), attend(*tensors, how | {"schedule": slug}))
