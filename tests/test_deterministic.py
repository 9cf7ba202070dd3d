"""Gradients that a call wants deterministic: who asks, which kernel computes them, what is refused.

On a CPU every kernel sums in one order, so tests have it count as a GPU, and look at which kernel
is called.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fagen
from fagen.errors import UntunedWarning
from fagen.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from fagen.runtime import backward, op
from fagen.runtime import call as calls
from fagen.runtime.attention import ATTENTION
from tests.attention_helpers import hold_to_one_graph, qkv, torch_asks
from tests.fresh import orders_of_gradients
from tests.tensors import leaves
from tests.varlen_helpers import packed

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

PREPARED: dict[str, Any] = dict(dtype="fp16", head_dim=64, causal=True, device="cpu", gradient=True)


@pytest.fixture
def flags(monkeypatch):
    """Of each backward pass so far, whether its kernel is deterministic."""
    monkeypatch.setattr(backward, "_has_an_order", lambda device: False)
    results = []
    ready = op.ready

    def noted(*args, **named):
        kernel = ready(*args, **named)

        def noting(backward):
            def call(*tensors):
                results.append("_det" in kernel.slug)
                return backward(*tensors)

            return call

        if not kernel.slug.startswith("bwd_"):
            return kernel
        return replace(kernel, op=noting(kernel.op), below=noting(kernel.below))

    monkeypatch.setattr(op, "ready", noted)
    return results


def dense(call: Callable[..., Any], **how: Any) -> Tensor:
    out: Tensor = call(*leaves(*qkv(queries=20, keys=40)), causal=True, **how)
    return out


def of_sequences(call: Callable[..., Any], *more: int, **how: Any) -> Tensor:
    q, k, v, *at = packed(((5, 5), (9, 20)))
    out: Tensor = call(*leaves(q, k, v), *at, *more, causal=True, **how)
    return out


CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": lambda **how: dense(fagen.attention, **how),
    "flash_attn_func": lambda **how: dense(flash_attn_func, **how),
    "attention_varlen": lambda **how: of_sequences(fagen.attention_varlen, **how),
    "flash_attn_varlen_func": lambda **how: of_sequences(flash_attn_varlen_func, 9, 20, **how),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


# ---- who asks -----------------------------------------------------------------------------------


@every_call
def test_a_call_asks_for_itself(call, flags):
    for expected in (False, True, False):
        call(deterministic=expected).sum().backward()
    call().sum().backward()
    assert flags == [False, True, False, False]


@every_call
def test_torch_asks_for_all_calls(call, flags):
    before = call()
    with torch_asks():
        for out in (before, call(), call(deterministic=True)):
            out.sum().backward()
    assert flags == [True, True, True]


def test_calls_of_one_backward_pass_have_each_what_it_asked_for(flags):
    (dense(fagen.attention, deterministic=True).sum() + dense(fagen.attention).sum()).backward()
    assert sorted(flags) == [False, True]


def test_both_kernels_have_the_same_bits_on_a_cpu(flags):
    for call, arguments in (
        (fagen.attention, qkv(queries=20, keys=40)),
        (fagen.attention_varlen, packed()),
    ):
        results = []
        for expected in (False, True):
            tensors = leaves(*arguments[:3])
            out = call(*tensors, *arguments[3:], deterministic=expected)
            results.append(torch.autograd.grad(out.sum(), tensors))
        assert all(map(torch.equal, *results))
    assert flags == [False, True] * 2


def test_an_activation_that_is_computed_again_asks_again(flags):
    tensors = leaves(*qkv(queries=20, keys=40))
    out = checkpoint(fagen.attention, *tensors, deterministic=True, use_reentrant=False)
    out.sum().backward()
    assert flags == [True]


def test_a_layer_of_transformers_may_ask(flags):
    pytest.importorskip("transformers")
    from fagen.huggingface import attend

    tensors = [x.transpose(1, 2) for x in leaves(*qkv(queries=20, keys=40))]
    for more in ({}, {"deterministic": None}, {"deterministic": True}):
        attend(torch.nn.Identity(), *tensors, None, is_causal=False, **more)[0].sum().backward()
    assert flags == [False, False, True]


@every_call
def test_a_call_that_needs_no_gradient_asks_nobody(call, monkeypatch):
    def never(*_, **__):
        raise AssertionError("no gradient is needed")

    monkeypatch.setattr(backward, "kernel_of_gradients", never)
    with torch.no_grad():
        assert torch.equal(call(deterministic=True), call())
    with pytest.raises(AssertionError, match="no gradient"):
        call(deterministic=True)


# ---- which kernel -------------------------------------------------------------------------------


def test_its_kernel_is_ready_before_the_backward_pass(flags):
    dense(fagen.attention, deterministic=True)
    assert orders_of_gradients() == {True} and not flags


def test_of_packed_sequences_it_is_derived_and_said_to_be(flags):
    message = r"deterministic, varlen: bwd_fp16_d64_causal_.*_varlen_det is derived"
    with pytest.warns(UntunedWarning, match=message):
        of_sequences(fagen.attention_varlen, deterministic=True)


def test_prepared_it_need_not_be_readied(flags):
    fagen.prepare(**PREPARED, deterministic=True)
    assert orders_of_gradients() == {True}
    calls.reset()
    fagen.prepare_varlen(**PREPARED, deterministic=True)
    assert orders_of_gradients() == {True}


# ---- torch's own ways ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dynamic", "expected"), [(False, False), (False, True), (True, True)])
def test_compiled_it_is_a_constant_of_one_graph(fresh_dynamo, flags, dynamic, expected):
    fagen.prepare(**PREPARED, deterministic=expected)
    fagen.prepare_varlen(**PREPARED, deterministic=expected)

    def check():
        assert flags and set(flags) == {expected}

    how = dict(dynamic=dynamic, deterministic=expected)
    hold_to_one_graph(flash_attn_func, fagen.attention_varlen, check, **how)


def test_compiled_as_a_first_call_it_is_deterministic_too(fresh_dynamo, flags):
    q, k, v, *at = packed(((5, 5), (9, 20)))

    def dense(q, k, v):
        return fagen.attention(q, k, v, causal=True, deterministic=True)

    def apart(q, k, v):
        return fagen.attention_varlen(q, k, v, *at, causal=True, deterministic=True)

    for call, args in ((dense, qkv(queries=20, keys=40)), (apart, (q, k, v))):
        torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves(*args)).sum().backward()
        assert True in flags
        flags.clear()


class Attention(torch.nn.Module):
    """Attention that wants its gradients in one order."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = fagen.attention(q, k, v, causal=True, deterministic=True)
        return out


@pytest.mark.parametrize("strict", [False, True])
def test_exported_it_stands_in_the_program(fresh_dynamo, flags, strict):
    fagen.prepare(**PREPARED, deterministic=True)
    tensors = leaves(*qkv(queries=20, keys=40))
    exported = torch.export.export(Attention(), tuple(tensors), strict=strict)
    (call,) = (node for node in exported.graph.nodes if "with_grad" in str(node.target))
    assert call.kwargs == {"deterministic": True}
    exported.module()(*tensors).sum().backward()
    assert flags == [True]


def test_opcheck(flags):
    tensors = leaves(*qkv(queries=20, keys=40))
    fagen.attention(*tensors, deterministic=True)
    (kernel,) = ATTENTION.known.values()
    op = getattr(torch.ops.fagen, f"{kernel.slug}_with_grad").default
    results = torch.library.opcheck(op, (*tensors, 0.125), {"deterministic": True})
    assert set(results.values()) == {"SUCCESS"} and set(flags) == {True}
