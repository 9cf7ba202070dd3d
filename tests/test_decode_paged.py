"""fagen.attention_decode over keys in pages, on CPU tensors: bits of dense caches, and refusals."""

import math

import pytest
import torch

import fagen
from fagen import registry, simulator
from fagen.kinds.decode.pages import gathered, in_pages
from fagen.render import render
from fagen.runtime.op import emulated
from fagen.search.files import parse_spaces
from fagen.vendor import vendor
from fagen.vendor.manifest import asked
from tests.fresh import forget
from tests.tensors import ints, normal

HALF = torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")


@pytest.fixture(autouse=True)
def nothing_ready(monkeypatch):
    forget(monkeypatch)


def tensors(batch=3, queries=1, heads=8, kv_heads=2, keys=160, head_dim=64, head_dim_v=64):
    q = normal(batch, queries, heads, head_dim, dtype=HALF)
    k = normal(batch, keys, kv_heads, head_dim, seed=1, dtype=HALF)
    v = normal(batch, keys, kv_heads, head_dim_v, seed=2, dtype=HALF)
    return q, k, v


def paged(k, v, page_size, used):
    generator = torch.Generator().manual_seed(7)
    return in_pages(k, v, page_size, used, generator) | {"seqused_k": used}


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 64, 256, 528])
@pytest.mark.parametrize(
    "more",
    [{}, {"window": (40, 0)}, {"softcap": 20.0, "causal": False}, {"leftpad_k": ints(5, 0, 17)}],
)
def test_pages_give_the_bits_of_a_dense_cache(page_size, more):
    q, k, v = tensors(queries=2)
    used = ints(160, 0, 70)
    expected = fagen.attention_decode(q, k, v, seqused_k=used, return_lse=True, **more)
    result = fagen.attention_decode(q, **paged(k, v, page_size, used), return_lse=True, **more)
    assert all(map(torch.equal, result, expected))


def test_what_is_given_beside_goes_along():
    q, k, v = tensors()
    used = ints(150, 100, 70)
    for more in (
        {"reference": torch.zeros(8)},
        {"sinks": normal(8, dtype=torch.bfloat16)},
        {"score": "score + slope * k_idx", "slope": 0.01},
    ):
        dense = fagen.attention_decode(q, k, v, seqused_k=used, **more)
        assert torch.equal(fagen.attention_decode(q, **paged(k, v, 16, used), **more), dense)


def test_pages_may_be_shared_and_lie_in_one_tensor_with_their_values():
    q, _, _ = tensors(batch=2)
    pool = normal(5, 2, 16, 2, 64, seed=3, dtype=HALF)  # pages, K and V, rows, heads, columns
    table, used = ints(3, 1, 3, 4).view(2, 2), ints(32, 20)
    k, v = pool[:, 0], pool[:, 1]
    rows = [gathered(x, table, used) for x in (k, v)]
    result = fagen.attention_decode(q, k, v, block_table=table, seqused_k=used)
    assert torch.equal(result, fagen.attention_decode(q, *rows, seqused_k=used))


def test_pages_that_there_are_not_hold_zeros():
    q, k, v = tensors(batch=1, keys=32)
    k, v = (x.view(2, 16, *x.shape[2:]) for x in (k, v))
    used = ints(32)
    for number in (-1, 2, 2**31 - 1, -(2**31)):
        table = ints(1, number).view(1, 2)
        rows = [torch.cat((x[1:], 0 * x[1:]), 1) for x in (k, v)]
        result = fagen.attention_decode(q, k, v, block_table=table, seqused_k=used)
        assert torch.equal(result, fagen.attention_decode(q, *rows, seqused_k=used))


@pytest.mark.parametrize(("pages", "entries", "page_size"), [(0, 2, 16), (3, 0, 16), (3, 2, 0)])
def test_without_pages_there_are_no_keys(pages, entries, page_size):
    q, k, v = tensors(batch=2)
    k, v = (x.new_zeros(pages, page_size, 2, 64) for x in (k, v))
    table, used = torch.zeros(2, entries, dtype=torch.int32), ints(0, 0)
    out, lse = fagen.attention_decode(q, k, v, block_table=table, seqused_k=used, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


def refused(message, **changed):
    q, k, v = tensors()
    call = {"q": q} | paged(k, v, 16, ints(160, 0, 70)) | changed
    with pytest.raises(ValueError, match=message):
        fagen.attention_decode(**call)


def test_what_is_wrong_is_said():
    refused("seqused_k is missing; with block_table", seqused_k=None)
    refused("block_table has 1 dimensions; it must have 2", block_table=ints(1, 2))
    refused("k has 3 dimensions; with block_table it must have 4", k=normal(3, 16, 64).half())
    refused("block_table is not int32", block_table=torch.zeros(3, 10, dtype=torch.int64))
    refused("block_table has shape", block_table=torch.zeros(2, 10, dtype=torch.int32))
    refused("seqused_k has shape", seqused_k=ints(3))
    refused("v has shape", v=normal(3, 16, 2, 64).half())


@pytest.mark.parametrize(
    ("slug", "page_size", "more"),
    [
        ("dec_fp16_d64_causal_r8n128_paged_c3", 16, {}),
        ("dec_fp16_d64_causal_r8n128_paged_c3", 1, {"leftpad_k": ints(3, 0, 40)}),
        ("dec_fp16_d64_causal_r8n128_paged_c3_streamk", 48, {"leftpad_k": ints(17, 0, 0)}),
    ],
)
def test_the_kernels_own_text_gives_the_bits_of_a_dense_cache(slug, page_size, more):
    """Behind the last key is NaN, and behind the last page any number: neither is looked at."""
    q, k, v = tensors(keys=700)
    used, scale = ints(700, 0, 333), 0.125

    def ran(slug, **caches):
        plan = registry.plan_of(slug)
        out, lse = torch.full_like(q, math.nan), torch.full((3, 8, 1), math.nan)
        named = dict(q=q, scale=scale, **caches, **more, out=out, lse=lse)
        simulator.call(plan, simulator.build(render(plan).kernel), seed=3, **named)
        return out, lse

    dense = ran(slug.replace("_paged", ""), k=k, v=v, seqused_k=used)
    assert all(map(torch.equal, ran(slug, **paged(k, v, page_size, used)), dense))


def test_the_kernels_own_text_reads_no_page_that_there_is_not():
    """A pool of some pages between NaN, and numbers of pages around it: their keys are zeros."""
    q, _, _ = tensors(batch=1)
    pool = torch.full((9, 16, 2, 64), math.nan, dtype=HALF)
    pool[3:6] = normal(3, 16, 2, 64, seed=4, dtype=HALF)
    table, used = ints(2, -1, 3, 0, 5, 1, -3, 2**31 - 1, -(2**31)).view(1, 9), ints(140)
    plan = registry.plan_of("dec_fp16_d64_causal_r8n128_paged_c3")
    out = torch.full_like(q, math.nan)
    call = dict(q=q, k=pool[3:6], v=pool[3:6], scale=0.125, block_table=table, seqused_k=used)
    simulator.call(plan, simulator.build(render(plan).kernel), **call, out=out)
    rows = gathered(pool[3:6], table, used)
    assert not rows[0, 16:48].any() and rows[0, :16].any()
    expected = fagen.attention_decode(q, rows, rows, seqused_k=used)
    assert (out - expected).abs().max() < 2e-3


def test_the_op_is_what_torch_asks_of_one():
    q, k, v = tensors()
    call = paged(k, v, 16, ints(160, 0, 70))
    torch.library.opcheck(
        emulated("dec_fp16_d64_causal_r8n128_paged"),
        (q, call["k"], call["v"], 0.125, call["block_table"], call["seqused_k"]),
        {"leftpad_k": ints(0, 0, 3)},
        test_utils=("test_schema", "test_faketensor"),
    )


def test_torch_traces_it():
    q, k, v = tensors()
    call = paged(k, v, 16, ints(160, 0, 70))
    compiled = torch.compile(fagen.attention_decode, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, **call), fagen.attention_decode(q, **call))


def test_a_schedule_is_for_pages_or_for_dense_caches():
    q, k, v = tensors()
    call = paged(k, v, 16, ints(160, 0, 70))
    usual = fagen.attention_decode(q, **call)
    slug = "dec_fp16_d64_causal_r8n128_paged_c32"
    assert torch.equal(fagen.attention_decode(q, **call, schedule=slug), usual)
    with pytest.raises(fagen.FagenError, match="is not what the call asks for"):
        fagen.attention_decode(q, **call, schedule="dec_fp16_d64_causal_r8n128")
    with pytest.raises(fagen.FagenError, match="is not what the call asks for"):
        fagen.attention_decode(q, k, v, schedule=slug)


def test_a_kernel_is_prepared():
    how = dict(dtype="bf16", head_dim=128, heads=32, kv_heads=8, batch=4, device="cpu")
    assert fagen.prepare_decode(**how, paged=True) == "dec_bf16_d128_causal_r8n64_paged"


@pytest.mark.filterwarnings("ignore:calls.toml")
def test_folders_searches_and_recordings_say_what_they_have_not_of_pages(tmp_path):
    slug = "dec_fp16_d64_causal_r8n128_paged"
    with pytest.raises(fagen.FagenError, match=f"{slug}: so far no folder has kernels of keys in"):
        vendor(asked("mine", [registry.from_slug(slug)]), tmp_path)
    with pytest.raises(fagen.FagenError, match="kernels of keys in pages have the tiles"):
        parse_spaces(
            '[decode]\ndtype = "fp16"\nhead_dim = 64\nmask = "causal"\ncache = "paged"\n', ""
        )
    q, k, v = tensors()
    with (
        pytest.warns(UserWarning, match="not recorded: 1 calls over keys in pages"),
        fagen.recording(tmp_path / "calls.toml"),
    ):
        fagen.attention_decode(q, **paged(k, v, 16, ints(160, 0, 70)))
