"""Split-KV of forward tiles on a Hopper GPU: numbers, bits alone, graphs, streams, speed."""

import math
from functools import partial

import pytest
import torch

import fagen
from fagen import registry
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.shapes import LONG_KEYS
from fagen.kinds.forward.verify.dense import RULE
from fagen.measure.rotating import rotated
from fagen.measure.verification import check
from fagen.problem import Sizes
from fagen.runtime.c_interface import bind, call
from tests.gpu.helpers import by_turns, graph_of, spoil

pytestmark = pytest.mark.gpu

COMMITTED = [path.stem for path in registry.schedules("forward") if "split" in path.stem]
OTHERS = (
    "fwd_bf16_d72v104_causal_m64n48_split3",
    "fwd_fp16_d128_full_m128n64_split5_pm2_smemtotals",
    "fwd_bf16_d96_causal_m192n80_split7_onlinemax",
    "fwd_fp16_d64_full_m64n64_split4",
)
FIRST = "fwd_fp16_d128_causal_m128n128_split4"


@pytest.mark.parametrize("slug", (*COMMITTED, *OTHERS))
def test_it_is_near_fp64(pair_of, slug):
    plan, binary = pair_of(slug)
    check(plan, RULE, partial(call, plan, binary.library), progress=print)


def qkv(batch=2, queries=128, keys=9_000, heads=8, kv_heads=2):
    normal = partial(torch.randn, device="cuda", dtype=torch.float16)
    q = normal(batch, queries, heads, 128)
    return q, *(normal(batch, keys, kv_heads, 128) for _ in range(2))


def attend(*tensors, **more):
    return fagen.attention(*tensors, causal=True, schedule=FIRST, **more)


def test_a_sequence_has_the_bits_that_it_has_alone(pair_of):
    q, k, v = qkv(batch=5)
    out, lse = attend(q, k, v, return_lse=True)
    for one in range(5):
        alone = attend(*(x[one : one + 1] for x in (q, k, v)), return_lse=True)
        assert torch.equal(alone[0][0], out[one]) and torch.equal(alone[1][0], lse[one])


def test_a_graph_is_replayed_beside_others_and_what_was_written_before_is_seen(pair_of):
    """Both kernels begin early: neither may read before, nor write over, what others do."""
    q, k, v = qkv()
    expected = attend(q, k, v)
    late = [torch.full_like(x, math.nan) for x in (q, k, v)]

    def run():
        for into, x in zip(late, (q, k, v), strict=True):
            into.copy_(x)
        found = [attend(*late) for _ in range(3)]
        spoil(*late)
        return found

    assert all(torch.equal(found, expected) for found in run())
    graph, captured = graph_of(run)
    for _ in range(50):
        spoil(*captured)
        graph.replay()
        assert all(torch.equal(out, expected) for out in captured)


def test_two_streams_do_not_disturb_each_other(pair_of):
    made = [qkv(keys=keys) for keys in (9_000, 5_000)]
    expected = [attend(*tensors) for tensors in made]
    found = by_turns([partial(attend, *tensors) for tensors in made], 100)
    assert all(torch.equal(out, expected[i]) for i in range(2) for out in found[i])


def test_the_workspace_may_hold_anything_and_nothing_beyond_it_is_written(pair_of):
    plan, binary = pair_of(FIRST)
    q, k, v = qkv(queries=130)
    out = torch.full_like(q, math.nan)
    for _ in range(2):  # of NaN, as bind makes it; then of what the call before left
        launch = bind(plan, binary.library, q=q, k=k, v=v, scale=0.1, out=out)
        launch()
        first = out.clone()
        out.fill_(math.nan)
        launch()
        assert torch.equal(out, first)
    exact, _ = reference(q, k, v, mask="causal", scale=0.1)
    assert (out.double() - exact).abs().max() < 2e-3


@pytest.mark.parametrize("queries", [1, 16, 25, 128, 130])
@pytest.mark.parametrize("keys", [100, 1_024, 5_000, 70_000])
def test_attention_by_itself_is_right(pair_of, queries, keys):
    q, k, v = qkv(1, queries, keys, 16, 4)
    out, lse = fagen.attention(q, k, v, causal=True, return_lse=True)
    exact, exact_lse = reference(q, k, v, mask="causal", scale=128**-0.5)
    seen = exact_lse > -math.inf
    assert (out.double() - exact).abs().max() < 2e-3
    assert (lse[seen].double() - exact_lse[seen]).abs().max() < 1e-3
    assert (lse[~seen] == -math.inf).all()


@pytest.mark.parametrize("num_splits", [16, 64])
def test_a_million_keys_are_as_near_to_fp64_as_the_rule_asks(pair_of, num_splits):
    sizes = [Sizes(1, 4, 1, 128, keys) for keys in (8_192, 2**20, 2**20 + 17)]
    slug = f"fwd_fp16_d128_causal_m128n128_split{num_splits}"
    plan, binary = pair_of(slug)
    run = partial(call, plan, binary.library)
    check(plan, RULE, run, cases=sizes, progress=print)


def test_attention_by_itself_is_as_near_over_a_million_keys_as_over_8k(pair_of):
    far = []
    for keys in (8_192, 2**20):
        q, k, v = qkv(1, 128, keys, 4, 1)
        exact, _ = reference(q, k, v, mask="causal", scale=128**-0.5)
        out = fagen.attention(q, k, v, causal=True)
        far.append(float((out.double() - exact).norm() / exact.norm()))
    print(far)
    assert far[1] < 3 * far[0] < 1e-2


def test_many_keys_of_few_queries_take_less_than_fa2s_split(pair_of):
    """The goal is 1.2 times its speed; no less than 1 here, whatever the GPU's clocks."""
    plan, binary = pair_of(FIRST)
    found = rotated({FIRST: (plan, binary.library)}, LONG_KEYS).microseconds
    print({name: f"{one:.0f} us" for name, one in found.items()})
    assert found[FIRST] < found["fa2"]
