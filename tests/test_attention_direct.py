"""fagen.attention over an op of C++ goes past Autograd, where nobody needs a gradient."""

import pytest
import torch

import fagen
from fagen.runtime import op
from tests.op_helpers import SLUG, loaded, qkv, refusal

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


@pytest.fixture
def attend(stub_op, monkeypatch):
    """attention(q, k, v) by a schedule whose op is loaded, readied."""
    stub_op(SLUG)
    loaded(monkeypatch)
    fagen.prepare(dtype="bf16", head_dim=64, head_dim_v=32, causal=True, schedule=SLUG)

    def attend(q, k, v, **keys):
        return fagen.attention(q, k, v, causal=True, schedule=SLUG, scale=0.1, **keys)

    return attend


def test_it_is_what_the_op_gives(attend, stub_op):
    one = stub_op(SLUG)
    kernel = op.kernel_of(SLUG, "cuda")
    assert kernel.direct is not kernel.alone is op.alone(one.op)
    out, lse = one.op(*qkv(), 0.1)
    assert torch.equal(attend(*qkv()), out)
    again = attend(*qkv(), return_lse=True)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_is_had_all_the_same(attend, which):
    leaf = [*qkv()]
    leaf[which].requires_grad_()
    inner = [*qkv()]
    inner[which] = leaf[which] * 1
    for arguments in (leaf, inner):
        attend(*arguments).sum().backward()
        assert leaf[which].grad is not None and leaf[which].grad.any()
        leaf[which].grad = None
        with torch.no_grad():
            assert not attend(*arguments).requires_grad


def test_a_gradient_that_a_transform_hides_is_refused(attend):
    q, k, v = qkv()

    def total(t):
        return attend(t, k, v).float().sum()

    def totals(batch):
        return torch.vmap(total)(batch).sum()

    with pytest.raises(ValueError, match="requires a gradient"):
        torch.func.grad(total)(q)
    batched = q[None].clone()
    totals(batched)
    with pytest.raises(ValueError, match="requires a gradient"):
        torch.func.grad(totals)(batched)
    with pytest.raises(ValueError, match="requires a gradient"):
        totals(batched.requires_grad_())


def test_a_wrong_argument_is_named(attend):
    q, k, v = qkv()
    said = f"fagen::{SLUG}: k is not bfloat16, which this kernel takes; k.to(torch.bfloat16) conver"
    assert refusal(lambda: attend(q, k.half(), v)).startswith(said)


def test_traced_it_is_the_op_that_refuses_gradients(attend, monkeypatch):
    named = op.named
    monkeypatch.setattr(op, "named", lambda slug, place: named(slug, "cuda"))

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
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
