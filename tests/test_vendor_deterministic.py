"""Gradients that calls of a vendored package for torch want deterministic: kernels, refusals."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fagen import vendor
from tests import vendor_gradients
from tests.attention_helpers import qkv
from tests.test_deterministic import leaves, torch_asks
from tests.varlen_helpers import packed
from tests.vendor_gradients import package
from tests.vendor_helpers import asked

DENSE, BY = "fwd_fp16_d64_causal_m64n64", "bwd_fp16_d64_causal_m64n64"
VARLEN, PACKED_BY = f"{DENSE}_varlen", f"{BY}_varlen"
# whose gradients have no order here; whose gradients none computes
VARYING = "fwd_bf16_d64_causal_m64n64", "fwd_bf16_d64_causal_m64n64_varlen"
VARYING_BY = "bwd_bf16_d64_causal_m64n64", "bwd_bf16_d64_causal_m64n64_varlen"
WITHOUT, WITHOUT_BY = "fwd_fp16_d64_full_m128n128", "bwd_fp16_d64_full_m128n128"
KERNELS = (BY, f"{BY}_det", PACKED_BY, f"{PACKED_BY}_det", *VARYING_BY)

SCALE = 0.125

Call = Callable[..., Tensor]
Called = Callable[[], list[str]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A package whose kernels compute on the CPU as they would on a GPU."""
    with package(
        tmp_path_factory.mktemp("demo"), DENSE, VARLEN, *VARYING, WITHOUT, *KERNELS
    ) as found:
        yield found


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The kernels of gradients that computed something, each time since it was asked."""
    monkeypatch.setattr(vendor_gradients, "computed", [])

    def since() -> list[str]:
        found = [slug for slug in vendor_gradients.computed if slug.startswith("bwd")]
        vendor_gradients.computed.clear()
        return found

    return since


def of_one_length(dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return leaves(*(x.to(dtype) for x in qkv(queries=20, keys=40)))


def of_several(dtype: torch.dtype = torch.float16) -> list[Tensor]:
    q, k, v, *at = packed(((5, 5), (9, 20)), dtype)
    return [*leaves(q, k, v), *at]


# A call of each kind, with the usual kernel of its gradients.
CALLS: dict[str, tuple[Call, str]] = {
    "attention": (lambda of, **how: of.attention(*of_one_length(), causal=True, **how), BY),
    "kernel": (lambda of, **how: getattr(of, DENSE)(*of_one_length(), SCALE, **how)[0], BY),
    "attention_varlen": (
        lambda of, **how: of.attention_varlen(*of_several(), causal=True, **how),
        PACKED_BY,
    ),
    "kernel of varlen sequences": (
        lambda of, **how: getattr(of, VARLEN)(*of_several(), SCALE, **how)[0],
        PACKED_BY,
    ),
}
every_call = pytest.mark.parametrize(("call", "by"), CALLS.values(), ids=CALLS)


# ---- who asks -----------------------------------------------------------------------------------


@every_call
def test_a_call_asks_for_itself(demo: ModuleType, called: Called, call: Call, by: str) -> None:
    for wanted in (False, True, False):
        call(demo, deterministic=wanted).sum().backward()
    call(demo).sum().backward()
    assert called() == [by, f"{by}_det", by, by]


@every_call
def test_torch_asks_for_all_calls(demo: ModuleType, called: Called, call: Call, by: str) -> None:
    before = call(demo)
    with torch_asks():
        for out in (before, call(demo, deterministic=False), call(demo, deterministic=True)):
            out.sum().backward()
    assert called() == [f"{by}_det"] * 3


def test_calls_of_one_backward_pass_have_each_what_it_asked_for(
    demo: ModuleType, called: Called
) -> None:
    for call, by in CALLS.values():
        (call(demo, deterministic=True).sum() + call(demo).sum()).backward()
        assert sorted(called()) == [by, f"{by}_det"]


def test_an_activation_that_is_computed_again_asks_again(demo: ModuleType, called: Called) -> None:
    given = of_one_length()
    how: dict[str, Any] = dict(causal=True, deterministic=True, use_reentrant=False)
    checkpoint(demo.attention, *given, **how).sum().backward()
    assert called() == [f"{BY}_det"] and all(x.grad is not None for x in given)


@every_call
def test_a_call_that_needs_no_gradient_asks_nobody(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, call: Call, by: str
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("no gradient is needed")

    monkeypatch.setattr(demo._gradients, "_gradients_of", never)
    with torch.no_grad():
        assert torch.equal(call(demo, deterministic=True), call(demo))
    with pytest.raises(AssertionError, match="no gradient"):
        call(demo, deterministic=True)


# ---- what is refused ----------------------------------------------------------------------------


def test_without_a_kernel_that_has_an_order_the_call_is_refused(demo: ModuleType) -> None:
    given, several = of_one_length(torch.bfloat16), of_several(torch.bfloat16)
    dense, of_packed = (getattr(demo, slug) for slug in VARYING)
    for call, slug, wanted in (
        (lambda **how: demo.attention(*given, causal=True, **how), VARYING[0], VARYING_BY[0]),
        (lambda **how: dense(*given, SCALE, **how)[0], VARYING[0], VARYING_BY[0]),
        (
            lambda **how: demo.attention_varlen(*several, causal=True, **how),
            VARYING[1],
            VARYING_BY[1],
        ),
        (lambda **how: of_packed(*several, SCALE, **how)[0], VARYING[1], VARYING_BY[1]),
    ):
        with pytest.raises(ValueError, match="and deterministic=True forbids that") as refusal:
            call(deterministic=True)
        said = str(refusal.value)
        assert said == (
            f"{demo.__name__}::{slug}: its gradient of q is added up in any order, so that its "
            "last bits differ from call to call, and deterministic=True forbids that: add "
            f"{wanted}_det to the kernels that fagen vendor writes"
        )
        out = call()
        with torch_asks(), pytest.raises(RuntimeError) as refusal:
            out.sum().backward()
        asks = "torch.use_deterministic_algorithms(True)"
        theirs = said.replace("deterministic=True", asks)
        assert str(refusal.value) == f"{theirs}; with warn_only=True this is a warning"
        with torch.no_grad():
            assert torch.equal(call(deterministic=True), out)


def test_a_warning_is_enough_for_torch_and_not_for_the_call(demo: ModuleType) -> None:
    given = of_one_length(torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.warns(UserWarning, match=r"use_deterministic_algorithms\(True\) forbids"):
            demo.attention(*given, causal=True).sum().backward()
        with pytest.raises(ValueError, match="deterministic=True forbids"):
            demo.attention(*given, causal=True, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_where_no_kernel_computes_them_the_one_with_an_order_is_named(demo: ModuleType) -> None:
    given = of_one_length()
    kernel = getattr(demo, WITHOUT)
    for wanted, by in ((False, WITHOUT_BY), (True, f"{WITHOUT_BY}_det")):
        with pytest.raises(ValueError, match=f"no kernel here computes it: add {by} to"):
            demo.attention(*given, deterministic=wanted)
    with pytest.raises(TypeError, match="deterministic"):
        kernel(*given, SCALE, deterministic=True)


def test_a_folder_without_gradients_knows_no_order() -> None:
    texts = vendor.FORMATS["torch"](vendor.folder_of(asked("demo", "torch", DENSE, VARLEN)))
    python = {path: text for path, text in texts.items() if path.startswith("python/")}
    assert len(python) == 8 and not [path for path in python if "determin" in python[path]]
    assert "determin" not in texts["README.md"]


def test_one_kernel_that_has_an_order_serves_all_calls(tmp_path: Any) -> None:
    with package(tmp_path, DENSE, WITHOUT, f"{BY}_det") as made:
        for wanted in (False, True):
            given = of_one_length()
            made.attention(*given, causal=True, deterministic=wanted).sum().backward()
            assert all(x.grad is not None for x in given)
        with pytest.raises(ValueError, match=f"add {WITHOUT_BY}_det to"):
            made.attention(*given, deterministic=True)


# ---- torch's own ways ---------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_compiled_it_is_a_constant_of_one_graph(
    fresh_dynamo: None,
    demo: ModuleType,
    called: Called,
    dynamic: bool,
    wanted: bool,
) -> None:
    def loss(*given: Tensor) -> Tensor:
        q, k, v, *at = given
        dense = demo.attention(q, k, v, causal=True, deterministic=wanted)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        apart = demo.attention_varlen(*flat, *at, causal=True, deterministic=wanted)
        total: Tensor = dense.float().sum() + apart.float().sum()
        return total

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for queries in (20, 30):
        q, k, v = qkv(queries=queries, keys=40)
        at = [torch.tensor([0, 7, 2 * length], dtype=torch.int32) for length in (queries, 40)]
        ours, theirs = leaves(q, k, v), leaves(q, k, v)
        compiled(*ours, *at).backward()
        assert sorted(called()) == [f"{by}_det" if wanted else by for by in (BY, PACKED_BY)]
        loss(*theirs, *at).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))  # type: ignore[arg-type]
        called()


@pytest.mark.parametrize("strict", [False, True])
def test_exported_it_stands_in_the_program(
    fresh_dynamo: None, demo: ModuleType, called: Called, strict: bool
) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = demo.attention(q, k, v, causal=True, deterministic=True)
            return out

    given = of_one_length()
    exported = torch.export.export(Attention(), tuple(given), strict=strict)
    (call,) = (node for node in exported.graph.nodes if "with_grad" in str(node.target))
    assert call.kwargs == {"deterministic": True}
    exported.module()(*given).sum().backward()
    assert called() == [f"{BY}_det"]


def test_opcheck(demo: ModuleType, called: Called) -> None:
    ops = getattr(torch.ops, demo.__name__)
    for slug, by, given in (
        (DENSE, BY, of_one_length()),
        (VARLEN, PACKED_BY, of_several()),
    ):
        op = getattr(ops, f"{slug}_with_grad").default
        called()
        found = torch.library.opcheck(op, (*given, SCALE), {"deterministic": True})
        assert set(found.values()) == {"SUCCESS"} and set(called()) == {f"{by}_det"}


def test_an_op_itself_is_refused_by_its_backward_pass(demo: ModuleType) -> None:
    op = getattr(getattr(torch.ops, demo.__name__), f"{VARYING[0]}_with_grad")
    out, _ = op(*of_one_length(torch.bfloat16), SCALE, deterministic=True)
    with pytest.raises(ValueError, match="deterministic=True forbids that"):
        out.sum().backward()
