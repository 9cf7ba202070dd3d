"""Autograd's node in C++ gives what that in Python does, over emulated kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import fagen
from fagen.build.autograd import build_autograd
from fagen.dispatch import tables
from fagen.dispatch.rows import Row
from fagen.runtime import backward
from fagen.runtime import call as calls
from tests.attention_helpers import qkv, torch_asks
from tests.fresh import forget
from tests.varlen_helpers import packed


@pytest.fixture(scope="module")
def library(kernel_cache: Any) -> None:
    if not backward._node:
        backward._load_node(build_autograd())


@pytest.fixture
def node(library: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Calls on CPU tensors go by the node, as on a GPU; what it is asked for."""
    forget(monkeypatch)
    calls: list[int] = []

    def number(forward: str, gradients: str, device: torch.device) -> None:
        names = (f"fagen::{slug}_emulated" for slug in (forward, gradients, gradients))
        backward._numbers[forward, gradients] = torch.ops.fagen.number_kernels(*names, forward)

    def asking(way: Any) -> Any:
        return lambda *args: calls.append(args[0]) or way(*args)

    monkeypatch.setattr(backward, "_number", number)
    monkeypatch.setattr(backward, "_numbers", {})
    monkeypatch.setattr(backward, "_node", [asking(way) for way in backward._node])
    yield calls
    assert calls, "no call went by the node"


@contextmanager
def by_python() -> Iterator[None]:
    """Calls go by Python meanwhile."""
    numbers = dict(backward._numbers)
    backward._numbers.clear()
    for door in calls.DOORS.values():
        for kernel in door.known.values():
            kernel.numbers = {}
    yield
    backward._numbers.update(numbers)


Used = Callable[[Tensor, Tensor], Tensor]
USES: dict[str, Used] = {
    "out": lambda out, lse: out.float().square().sum(),
    "the log-sum-exp alone": lambda out, lse: lse.sum(),
    "both": lambda out, lse: out.float().sum() + lse.square().sum(),
    "a gradient whose strides are 0": lambda out, lse: out.sum(),
    "one that kernels cannot read": lambda out, lse: torch.nn.functional.pad(out, (3, 0)).sum(),
}


def gradients(call: Callable[..., Any], tensors: tuple[Tensor, ...], use: Used, needed: Any) -> Any:
    leaves = [x.detach().clone() for x in tensors]
    for which in needed:
        leaves[which].requires_grad_()
    use(*call(*leaves)).backward()
    assert [i for i, leaf in enumerate(leaves) if leaf.grad is not None] == list(needed)
    return [leaves[which].grad for which in needed]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return fagen.attention(q, k, v, causal=True, return_lse=True)


def varlen(q: Tensor, k: Tensor, v: Tensor, used: Tensor | None = None) -> Any:
    *_, at_q, at_k = packed()
    at = dict(cu_seqlens_q=at_q, cu_seqlens_k=at_k, seqused_k=used)
    out, lse = fagen.attention_varlen(q, k, v, **at, return_lse=True)  # type: ignore[arg-type]
    return out, lse.masked_fill(lse == -torch.inf, 0)


def varlen_in_part(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return varlen(q, k, v, packed()[-1].diff() // 2)


@pytest.mark.parametrize("needed", [(0, 1, 2), (1,)], ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("call", [dense, varlen, varlen_in_part])
def test_it_is_the_same(node: list[int], call: Any, use: str, needed: Any) -> None:
    tensors = qkv() if call is dense else packed()[:3]
    results = gradients(call, tensors, USES[use], needed)
    count = len(node)
    with by_python():
        expected = gradients(call, tensors, USES[use], needed)
    assert len(node) == count == 1 and all(map(torch.equal, results, expected))


def test_torch_has_its_own_ways_with_what_it_keeps(node: list[int]) -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    once = torch.autograd.grad(dense(*leaves)[0].sum(), leaves)
    again = torch.autograd.grad(checkpoint(dense, *leaves, use_reentrant=False)[0].sum(), leaves)
    assert all(map(torch.equal, once, again))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        out, _ = dense(*leaves)
    assert len(kept) == 5 and all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), once))
    keys = leaves[1] * 1
    out, _ = dense(leaves[0], keys, leaves[2])
    keys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("call", [dense, varlen_in_part])
def test_compiled_autograd_traces_it_as_one_call(node: list[int], call: Any) -> None:
    leaves = [x.requires_grad_() for x in (qkv() if call is dense else packed()[:3])]
    out, lse = call(*leaves)
    usual = torch.autograd.grad(out.sum() + lse.sum(), leaves[:2], retain_graph=True)
    with compiled_autograd._enable(lambda graph: graph):
        torch.autograd.backward(out.sum() + lse.sum(), inputs=leaves[:2])
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, usual, strict=False))  # type: ignore[arg-type]


def test_python_is_asked_where_torch_wants_another_order_by_then(
    node: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "_has_an_order", lambda device: False)
    leaves = [x.requires_grad_() for x in qkv()]
    usual = torch.autograd.grad(dense(*leaves)[0].sum(), leaves)
    out, _ = dense(*leaves)
    with torch_asks(), torch.profiler.profile() as profile:
        in_order = torch.autograd.grad(out.sum(), leaves)
    assert all(map(torch.equal, usual, in_order))
    (called,) = {event.name for event in profile.events() if event.name.startswith("fagen::bwd")}
    assert "_det" in called


def test_a_wrong_argument_is_named(node: list[int]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    dense(q, k, v)
    with pytest.raises(ValueError, match=r"k has shape .*; it must be \(batch = 2"):
        dense(q, k[:1], v)


def test_what_is_out_of_the_ordinary_is_left_to_python(library: None) -> None:
    q, k, v = qkv()  # on no GPU
    sooner = backward.SOONER
    if sooner.attend is None or sooner.key_of is None:
        pytest.skip("Python's headers are missing here")
    other = torch.Tensor._make_subclass(type("Other", (Tensor,), {}), q)
    for odd in (q, other, [q], None):
        assert sooner.attend(odd, k, v, True, None, False, False) is None
        assert sooner.key_of(odd, k, v, True) is None
    assert sooner.attend(q, k, v, 1, None, False, False) is None


def test_without_a_compiler_gradients_go_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_node", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def missing() -> None:
        raise fagen.ToolchainError("there is no g++")

    monkeypatch.setattr(backward, "build_autograd", missing)
    with backward._with_node(torch.device("cuda")):
        pass
    assert backward._node == [None]
    backward._number("forward", "gradients", torch.device("cuda"))
    assert ("forward", "gradients") not in backward._numbers


def test_of_varlen_sequences_each_call_asks_which_kernel_computes_its_gradients(
    node: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their mean length may choose it, and one forward kernel is for all lengths."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    slug = "bwd_fp16_d64_causal_m64n{}_varlen"
    few = Row("NVIDIA H200", slug.format(64), keys_to=20)
    tables.table_at.cache_clear()
    tables.update(
        tmp_path / "fagen" / tables.NAME,
        [few, Row("NVIDIA H200", slug.format(128), keys_from=21)],
    )
    for length in (20, 21, 20, 21):
        q, *rest = packed([(length, length)] * 3)
        fagen.attention_varlen(q.requires_grad_(), *rest, causal=True).sum().backward()
    assert node[:2] == node[2:] and node[0] != node[1]
    tables.table_at.cache_clear()
