"""Calls over an op of C++ go past Autograd, decoding's by place, where nobody needs a gradient."""

import pytest
import torch
from torch import Tensor

import fagen
from fagen.registry import plan_of
from fagen.runtime import op
from fagen.runtime.op import emulated
from tests.op_helpers import SLUG, loaded, qkv, refusal
from tests.tensors import ints, normal

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

DECODING, UNIFIED = "dec_fp16_d64_causal_r8n128", "dec_fp16_d64_causal_r8n128_fixed"
LENGTHS = {"seqused_k": ints(130, 0), "leftpad_k": ints(3, 0)}


def few():
    """Q, K and V of a call of decoding."""
    sizes = (1, 8), (200, 2), (200, 2)
    return tuple(
        normal(2, rows, heads, 64, seed=seed, dtype=torch.float16)
        for seed, (rows, heads) in enumerate(sizes)
    )


@pytest.fixture
def attend(stub_op, monkeypatch):
    """attention(q, k, v) by a schedule whose op is loaded, readied."""
    stub_op(SLUG)
    loaded(monkeypatch)
    fagen.prepare(dtype="bf16", head_dim=64, head_dim_v=32, causal=True, schedule=SLUG)

    def attend(q, k, v, **keys):
        return fagen.attention(q, k, v, causal=True, schedule=SLUG, scale=0.1, **keys)

    return attend


@pytest.fixture
def decode(stub_op, monkeypatch):
    """attention_decode by a schedule whose op is loaded."""
    loaded(monkeypatch)

    def decode(*tensors, schedule=DECODING, **keys):
        stub_op(schedule)
        return fagen.attention_decode(*tensors, schedule=schedule, **keys)

    return decode


def leaves_of(tensors, which):
    """The tensors of which one needs a gradient: a leaf, and what was computed of it."""
    leaf = [*tensors]
    leaf[which] = leaf[which].clone().requires_grad_()
    inner = [*tensors]
    inner[which] = leaf[which] * 1
    return leaf, inner


# ---- attention ----------------------------------------------------------------------------------


def test_it_is_what_the_op_gives(attend, stub_op):
    stub = stub_op(SLUG)
    kernel = op.kernel_of(plan_of(SLUG), "cuda")
    assert kernel.direct is not kernel.out_only is op.out_only(stub.op)
    out, lse = stub.op(*qkv(), 0.1)
    assert torch.equal(attend(*qkv()), out)
    assert all(map(torch.equal, attend(*qkv(), return_lse=True), (out, lse)))


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_is_had_all_the_same(attend, which):
    leaf, inner = leaves_of(qkv(), which)
    for tensors in (leaf, inner):
        (gradient,) = torch.autograd.grad(attend(*tensors).sum(), leaf[which])
        assert gradient.any()
        with torch.no_grad():
            assert not attend(*tensors).requires_grad


def test_a_gradient_that_a_transform_hides_is_refused(attend):
    q, k, v = qkv()

    def total(t):
        return attend(t, k, v).float().sum()

    def totals(batch):
        return torch.vmap(total)(batch).sum()

    batched = q[None].clone()
    totals(batched)
    for call in (
        lambda: torch.func.grad(total)(q),
        lambda: torch.func.grad(totals)(batched),
        lambda: totals(batched.requires_grad_()),
    ):
        assert "requires a gradient" in refusal(call)


def test_a_wrong_argument_is_named(attend):
    q, k, v = qkv()
    words = f"fagen::{SLUG}: k is not bfloat16, which this kernel takes; k.to(torch.bfloat16) conve"
    assert refusal(lambda: attend(q, k.half(), v)).startswith(words)


def test_traced_it_is_the_op_that_refuses_gradients(attend, monkeypatch):
    named = op.named
    monkeypatch.setattr(op, "named", lambda slug, place: named(slug, "cuda"))

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v)

    for strict in (False, True):
        exported = torch.export.export(Model(), qkv(), strict=strict)
        calls = [str(n.target) for n in exported.graph.nodes if "fagen" in str(n.target)]
        assert calls == [f"fagen.{SLUG}_without_lse.default"]
        q, k, v = qkv()
        with pytest.raises(ValueError, match="requires a gradient"):
            exported.module()(q.requires_grad_(), k, v)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_recorded_by_torch_jit_it_refuses_gradients_too(attend):
    traced = torch.jit.trace(attend, qkv())
    q, k, v = qkv()
    assert torch.equal(traced(q, k, v), attend(q, k, v))
    with pytest.raises(RuntimeError, match="requires a gradient"):
        traced(q.requires_grad_(), k, v)


# ---- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(), ("seqused_k",), ("leftpad_k",), tuple(LENGTHS)])
def test_what_is_given_by_place_is_what_is_given_by_name(decode, lengths):
    used = {name: LENGTHS[name] for name in lengths}
    out, lse = emulated(DECODING)(*few(), 64**-0.5, **used)
    assert torch.equal(decode(*few(), **used), out)
    assert torch.equal(decode(*few(), scale=64**-0.5, **used), out)
    assert all(map(torch.equal, decode(*few(), return_lse=True, **used), (out, lse)))


def test_so_is_a_reference(decode):
    reference = torch.linspace(-1, 1, 8)
    out, _ = emulated(UNIFIED)(*few(), reference, 64**-0.5, **LENGTHS)
    assert torch.equal(decode(*few(), reference=reference, schedule=UNIFIED, **LENGTHS), out)


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_of_decoding_is_refused_where_one_is_needed(decode, which):
    for tensors in leaves_of(few(), which):
        assert "requires a gradient" in refusal(lambda tensors=tensors: decode(*tensors))
        with torch.no_grad():
            assert not decode(*tensors).requires_grad


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"seqused_k": ints(0, 0, 0)}, "seqused_k"),
        ({"leftpad_k": torch.zeros(2)}, "leftpad_k"),
        ({"scale": -1.0}, "scale"),
    ],
)
def test_a_wrong_argument_is_named_by_cpp_too(decode, wrong, name):
    assert name in refusal(lambda: decode(*few(), **wrong))
