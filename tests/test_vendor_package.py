"""Calls of a vendored package for torch on a CPU: their bits, gradients, and what is refused."""

import random
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fagen
from fagen import registry, vendor
from fagen.process import run
from fagen.signature import Scalar
from fagen.vendor import gradients
from fagen.vendor.contents import Folder
from tests import vendor_gradients
from tests.attention_helpers import hold_to_one_graph, torch_asks
from tests.tensors import leaves, normal
from tests.varlen_helpers import exact, packed, packed8
from tests.vendor_gradients import (
    BFLOAT,
    BFLOAT_BY,
    BY,
    DENSE,
    EIGHT,
    EIGHT_VARLEN,
    PACKED_BY,
    VARLEN,
    VARYING,
    VARYING_BY,
    WITHOUT,
    WITHOUT_VARLEN,
    package,
)
from tests.vendor_helpers import COMBINE, asked, of_page, vendored

SCALE = 0.2
LENGTHS = ((5, 5), (0, 7), (40, 40), (3, 0), (1, 130), (70, 33))


def tensors(dtype: torch.dtype, *sizes: int, head_dims: tuple[int, int] = (64, 64)) -> list[Tensor]:
    """q of 4 heads, k and v of 2, which require gradients."""
    queries, keys = sizes
    dice = torch.Generator().manual_seed(queries)
    shapes = ((queries, 4, head_dims[0]), (keys, 2, head_dims[0]), (keys, 2, head_dims[1]))
    return leaves(*(torch.randn(2, *shape, generator=dice).to(dtype) for shape in shapes))


def halves(queries: int = 70, keys: int = 90) -> list[Tensor]:
    return tensors(torch.float16, queries, keys)


def of_one_length(dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return tensors(dtype, 20, 40)


def of_several(
    dtype: torch.dtype = torch.float16, lengths: Any = ((5, 5), (9, 20))
) -> list[Tensor]:
    """q, k and v of varlen sequences, which require gradients; and their offsets."""
    q, k, v, *at = packed(lengths, dtype)
    return [*leaves(q, k, v), *at]


def formula(qkv: list[Tensor], causal: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """The same tensors in fp64, and what attention is of them by torch's own means."""
    exact = [tensor.detach().double().requires_grad_() for tensor in qkv]
    q, k, v = (tensor.transpose(1, 2) for tensor in exact)
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    scores = q @ k.mT * SCALE
    if causal:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, -torch.inf)
    return exact, (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def near(ours: Tensor | None, exact: Tensor | None, rounding: float = 2.0**-11) -> bool:
    assert ours is not None
    exact = torch.zeros_like(ours).double() if exact is None else exact  # of what was not used
    assert ours.shape == exact.shape
    off = (ours.double() - exact).abs().max()
    return bool(off <= 6 * rounding * (1 + exact.abs().max()))


# A call of each kind of some tensors, the kernel of its gradients, and those that it may have.
Call = Callable[..., Tensor]
CALLS: dict[str, tuple[Call, str, Callable[..., list[Tensor]]]] = {
    "attention": (
        lambda demo, *x, **how: demo.attention(*x, causal=True, **how),
        BY,
        of_one_length,
    ),
    "kernel": (
        lambda demo, *x, **how: getattr(demo, DENSE)(*x, SCALE, **how)[0],
        BY,
        of_one_length,
    ),
    "attention_varlen": (
        lambda demo, *x, **how: demo.attention_varlen(*x, causal=True, **how),
        PACKED_BY,
        of_several,
    ),
    "kernel of varlen sequences": (
        lambda demo, *x, **how: getattr(demo, VARLEN)(*x, SCALE, **how)[0],
        PACKED_BY,
        of_several,
    ),
}
every_call = pytest.mark.parametrize(("call", "by", "make"), CALLS.values(), ids=CALLS)
Called = Callable[[], list[str]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The kernels of gradients that computed something, each time since it was asked."""
    monkeypatch.setattr(vendor_gradients, "computed", [])

    def since() -> list[str]:
        slugs = [slug for slug in vendor_gradients.computed if slug.startswith("bwd")]
        vendor_gradients.computed.clear()
        return slugs

    return since


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_decoded_its_bits_are_fagens_also_compiled(fresh_dynamo: None, demo: ModuleType) -> None:

    def compiled_call(*args: Any, **named: Any) -> Any:
        return demo.attention_decode(*args, **named)

    compiled = torch.compile(compiled_call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, queries, heads in ((2, 1, 4), (2, 3, 4), (3, 7, 4), (1, 9, 8)):
        q = normal(batch, queries, heads, 64, seed=1, dtype=torch.float16)
        k, v = (normal(batch, 300, 2, 64, seed=s, dtype=torch.float16) for s in (2, 3))
        used = torch.tensor([300, 170, 0][:batch], dtype=torch.int32)
        named: dict[str, Any] = {"seqused_k": used, "leftpad_k": used // 4, "scale": 0.2}
        expected = fagen.attention_decode(q, k, v, **named, return_lse=True)
        for call in (demo.attention_decode, compiled):
            for result, own in zip(call(q, k, v, **named, return_lse=True), expected, strict=True):
                assert torch.equal(result, own)
            assert torch.equal(call(q, k, v, **named), expected[0])
    leaf = q.clone().requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient, and decoding has none"):
        demo.attention_decode(leaf, k, v)
    with torch.no_grad():
        assert demo.attention_decode(leaf, k, v).shape == q.shape
    with pytest.raises(ValueError, match=r"those for .*, 64, full of one query"):
        demo.attention_decode(q, k, v, causal=False)


def test_of_varlen_sequences_its_bits_are_the_kernels_also_compiled(
    fresh_dynamo: None, demo: ModuleType
) -> None:

    def compiled_call(*args: Any, **named: Any) -> Any:
        return demo.attention_varlen(*args, **named)

    compiled = torch.compile(compiled_call, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (LENGTHS, LENGTHS[:3]):
        arguments, used = packed(lengths), torch.tensor([2] * len(lengths), dtype=torch.int32)
        named: dict[str, Any] = {"seqused_k": used, "causal": True, "scale": 0.2}
        expected = fagen.attention_varlen(*arguments, **named, schedule=VARLEN, return_lse=True)
        for call in (demo.attention_varlen, compiled):
            for mine, own in zip(call(*arguments, **named, return_lse=True), expected, strict=True):
                assert torch.equal(mine, own)
            assert torch.equal(call(*arguments, **named), expected[0])


def test_in_e4m3_its_bits_are_the_kernels_too(demo: ModuleType) -> None:
    case = packed8(by_column=True)
    out = demo.attention_varlen(*case.tensors, **case.named)
    assert torch.equal(
        out, fagen.attention_varlen(*case.tensors, **case.named, schedule=EIGHT_VARLEN)
    )
    expected, _ = case.exact()
    visible = ~expected.isnan().any(-1)
    assert (out.double() - expected)[visible].norm() < 0.1 * expected[visible].norm()


def test_what_is_chosen_does_not_depend_on_lengths(demo: ModuleType) -> None:
    dice = random.Random(3)
    whole = [(dice.randint(1, 90),) * 2 for _ in range(5)]
    q, k, v, at, _ = packed(whole)
    out = demo.attention_varlen(q, k, v, at, causal=True)
    for begin, end in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
        ends = torch.tensor([0, end - begin], dtype=torch.int32)
        sequence = (x[begin:end] for x in (q, k, v))
        assert torch.equal(demo.attention_varlen(*sequence, ends, causal=True), out[begin:end])


# ---- gradients ----------------------------------------------------------------------------------


KINDS = pytest.mark.parametrize(
    ("slug", "dtype", "head_dims", "causal"),
    [(DENSE, torch.float16, (64, 64), True), (BFLOAT, torch.bfloat16, (96, 64), False)],
    ids=["fp16", "bf16"],
)


@KINDS
@pytest.mark.parametrize("sizes", [(70, 90), (1, 1), (33, 200)], ids=str)
@pytest.mark.parametrize("picked", [True, False], ids=["attention", "kernel"])
def test_they_are_those_of_the_formula(demo, slug, dtype, head_dims, causal, sizes, picked):
    qkv = tensors(dtype, *sizes, head_dims=head_dims)
    if picked:
        out, lse = demo.attention(*qkv, causal=causal, scale=SCALE, return_lse=True)
    else:
        out, lse = getattr(demo, slug)(*qkv, SCALE)
    exact, expected, expected_lse = formula(qkv, causal)
    rounding = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    assert near(out, expected, rounding) and near(lse, expected_lse, rounding)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), (dout, dlse))
    torch.autograd.backward((expected, expected_lse), (dout.double(), dlse.double()))
    for tensor, reference in zip(qkv, exact, strict=True):
        assert near(tensor.grad, reference.grad, rounding)


@pytest.mark.parametrize("which", range(3))
def test_only_what_is_asked_for_has_one(demo, which):
    qkv = [tensor.detach() for tensor in halves()]
    qkv[which].requires_grad_()
    demo.attention(*qkv, causal=True, scale=SCALE).sum().backward()
    exact, expected, _ = formula(qkv, True)
    expected.sum().backward()
    assert near(qkv[which].grad, exact[which].grad)
    assert [tensor.grad is None for tensor in qkv] == [place != which for place in range(3)]


@pytest.mark.parametrize(
    "used",
    [
        lambda out, lse: out.sum(),  # strides of 0
        lambda out, lse: (out.transpose(1, 2).contiguous() * 1.0).sum(),
        lambda out, lse: out[..., 1:].sum() + out[..., :1].sum(),
        lambda out, lse: torch.nn.functional.pad(out, (3, 0))[..., 3:].sum(),
        # contiguous, but it begins between two multiples of 16 bytes
        lambda out, lse: (torch.cat((out.new_ones(3), out.flatten())) * 1.0).sum(),
        lambda out, lse: lse.sum(),  # alone
        lambda out, lse: (lse.permute(2, 1, 0) * torch.arange(560.0).view(70, 4, 2).cos()).sum(),
    ],
)
def test_a_gradient_of_either_result_may_lie_anyhow(demo, used: Callable[..., Tensor]):
    qkv = halves()
    used(*demo.attention(*qkv, causal=True, scale=SCALE, return_lse=True)).backward()
    exact, expected, expected_lse = formula(qkv, True)
    used(expected, expected_lse).backward()
    for tensor, reference in zip(qkv, exact, strict=True):
        assert near(tensor.grad, reference.grad)


def test_no_keys_and_no_queries_give_zeros(demo):
    for sizes in ((5, 0), (0, 5)):
        qkv = halves(*sizes)
        demo.attention(*qkv, causal=True).sum().backward()
        assert all(tensor.grad is not None and not tensor.grad.any() for tensor in qkv)


@every_call
def test_a_call_that_needs_none_calls_the_kernel_as_ever(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
    by: str,
    make: Callable[..., list[Tensor]],
) -> None:
    def asked_for(*_: Any, **__: Any) -> Any:
        raise AssertionError("no gradient is needed")

    for module in (demo, demo._attention, demo._varlen):
        monkeypatch.setattr(module, "differentiated", asked_for)
    plain = call(demo, *(x.detach() for x in make()))
    assert not plain.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for how in ({}, {"deterministic": True}):
                out = call(demo, *make(), **how)
                assert not out.requires_grad and torch.equal(out, plain)
    for how in ({}, {"deterministic": True}):
        with pytest.raises(AssertionError, match="no gradient"):
            call(demo, *make(), **how)


def test_those_of_varlen_sequences_are_those_of_the_formula(
    fresh_dynamo: None, demo: ModuleType
) -> None:
    def loss(out: Tensor, lse: Tensor) -> Tensor:
        sums: Tensor = out.double().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        return sums

    def picked(*x: Tensor) -> Tensor:
        return loss(*demo.attention_varlen(*x, causal=True, return_lse=True))

    def kernel(*x: Tensor) -> Tensor:  # without seqused_k
        return loss(*getattr(demo, VARLEN)(*x, 64**-0.5))

    compiled = torch.compile(picked, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v, *at = of_several(lengths=LENGTHS)
    doubles = leaves(*(x.detach().double() for x in (q, k, v)))
    loss(*exact(*doubles, *at, causal=True)).backward()
    for call in (picked, compiled, kernel):
        arguments = of_several(lengths=LENGTHS)
        call(*arguments).backward()
        for mine, double in zip(arguments, doubles, strict=False):
            assert mine.grad is not None and double.grad is not None
            off = (mine.grad.double() - double.grad).abs().max()
            assert off <= 8 * 2.0**-11 * (1 + double.grad.abs().max())


# ---- torch's own ways ---------------------------------------------------------------------------


def test_compiled_with_open_sizes_it_is_one_graph(demo):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = demo.attention(q, k, v, causal=True, scale=SCALE, return_lse=True)
        return out.float().sum() + (lse.transpose(1, 2) * 2).sum()

    for sizes in ((70, 90), (40, 130)):
        qkv = halves(*sizes)
        loss(*qkv).backward()
        exact, expected, expected_lse = formula(qkv, True)
        (expected.sum() + 2 * expected_lse.sum()).backward()
        for tensor, reference in zip(qkv, exact, strict=True):
            assert near(tensor.grad, reference.grad)


@pytest.mark.parametrize(
    ("slug", "by", "make", "how"),
    [
        (DENSE, BY, halves, {}),
        (
            BFLOAT,
            BFLOAT_BY,
            lambda: tensors(torch.bfloat16, 70, 90, head_dims=(96, 64)),
            {},
        ),
        (DENSE, f"{BY}_det", of_one_length, {"deterministic": True}),
        (VARLEN, f"{PACKED_BY}_det", of_several, {"deterministic": True}),
    ],
)
def test_opcheck(
    demo: ModuleType, called: Called, slug: str, by: str, make: Any, how: dict[str, bool]
) -> None:
    op = getattr(getattr(torch.ops, demo.__name__), f"{slug}_with_grad").default
    outcomes = torch.library.opcheck(op, (*make(), SCALE), how)
    assert set(outcomes.values()) == {"SUCCESS"} and set(called()) == {by}


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_activation_may_be_computed_again(
    demo: ModuleType, called: Called, deterministic: bool
) -> None:
    once, again = halves(), halves()
    how: dict[str, Any] = dict(causal=True, deterministic=deterministic)
    demo.attention(*once, **how).sum().backward()
    checkpoint(demo.attention, *again, **how, use_reentrant=False).sum().backward()
    assert called() == [f"{BY}_det" if deterministic else BY] * 2
    for a, b in zip(once, again, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_compiled_it_is_a_constant_of_one_graph(
    fresh_dynamo: None,
    demo: ModuleType,
    called: Called,
    dynamic: bool,
    deterministic: bool,
) -> None:
    def check() -> None:
        assert sorted(called()) == [f"{by}_det" if deterministic else by for by in (BY, PACKED_BY)]

    how = dict(dynamic=dynamic, deterministic=deterministic)
    hold_to_one_graph(demo.attention, demo.attention_varlen, check, **how)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_it_stands_in_the_program(
    fresh_dynamo: None, demo: ModuleType, called: Called, strict: bool
) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = demo.attention(q, k, v, causal=True, deterministic=True)
            return out

    arguments = of_one_length()
    exported = torch.export.export(Attention(), tuple(arguments), strict=strict)
    (call,) = (node for node in exported.graph.nodes if "with_grad" in str(node.target))
    assert call.kwargs == {"deterministic": True}
    exported.module()(*arguments).sum().backward()
    assert called() == [f"{BY}_det"]


# ---- deterministic ones -------------------------------------------------------------------------


@every_call
def test_a_call_asks_for_itself_and_torch_for_all_calls(
    demo: ModuleType,
    called: Called,
    call: Call,
    by: str,
    make: Callable[..., list[Tensor]],
) -> None:
    for how in ({"deterministic": deterministic} for deterministic in (False, True, False)):
        call(demo, *make(), **how).sum().backward()
    call(demo, *make()).sum().backward()
    assert called() == [by, f"{by}_det", by, by]
    x = make()  # in one backward pass each has what it asked for
    (call(demo, *x, deterministic=True).sum() + call(demo, *x).sum()).backward()
    assert sorted(called()) == [by, f"{by}_det"]
    outs = [call(demo, *make(), **how) for how in ({}, {"deterministic": False})]
    with torch_asks():
        for out in (*outs, call(demo, *make(), deterministic=True)):
            out.sum().backward()
    assert called() == [f"{by}_det"] * 3


def test_without_a_kernel_that_has_an_order_the_call_is_refused(demo: ModuleType) -> None:
    arguments, several = of_one_length(torch.bfloat16), of_several(torch.bfloat16)
    dense, of_packed = (getattr(demo, slug) for slug in VARYING)
    for call, slug, backward in (
        (lambda **how: demo.attention(*arguments, causal=True, **how), VARYING[0], VARYING_BY[0]),
        (lambda **how: dense(*arguments, SCALE, **how)[0], VARYING[0], VARYING_BY[0]),
        (
            lambda **how: demo.attention_varlen(*several, causal=True, **how),
            VARYING[1],
            VARYING_BY[1],
        ),
        (lambda **how: of_packed(*several, SCALE, **how)[0], VARYING[1], VARYING_BY[1]),
    ):
        with pytest.raises(ValueError, match="and deterministic=True forbids that") as refusal:
            call(deterministic=True)
        message = str(refusal.value)
        assert message == (
            f"{demo.__name__}::{slug}: its gradient of q is added up in any order, so that its "
            "last bits differ from call to call, and deterministic=True forbids that: add "
            f"{backward}_det to the kernels that fagen vendor writes"
        )
        out = call()
        with torch_asks(), pytest.raises(RuntimeError) as refusal:
            out.sum().backward()
        asks = "torch.use_deterministic_algorithms(True)"
        theirs = message.replace("deterministic=True", asks)
        assert str(refusal.value) == f"{theirs}; with warn_only=True this is a warning"
        with torch.no_grad():
            assert torch.equal(call(deterministic=True), out)


def test_a_warning_is_enough_for_torch_and_not_for_the_call(demo: ModuleType) -> None:
    arguments = of_one_length(torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.warns(UserWarning, match=r"use_deterministic_algorithms\(True\) forbids"):
            demo.attention(*arguments, causal=True).sum().backward()
        with pytest.raises(ValueError, match="deterministic=True forbids"):
            demo.attention(*arguments, causal=True, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        demo.attention(*arguments, causal=True).sum().backward()


def test_an_op_itself_is_refused_by_its_backward_pass(demo: ModuleType) -> None:
    op = getattr(getattr(torch.ops, demo.__name__), f"{VARYING[0]}_with_grad")
    out, _ = op(*of_one_length(torch.bfloat16), SCALE, deterministic=True)
    with pytest.raises(ValueError, match="deterministic=True forbids that"):
        out.sum().backward()


def test_one_kernel_that_has_an_order_serves_all_calls(tmp_path: Any) -> None:
    with package(tmp_path, DENSE, WITHOUT, f"{BY}_det") as demo:
        for deterministic in (False, True):
            arguments = of_one_length()
            demo.attention(*arguments, causal=True, deterministic=deterministic).sum().backward()
            assert all(x.grad is not None for x in arguments)
        with pytest.raises(ValueError, match="add bwd_fp16_d64_full_m128n128_det to"):
            demo.attention(*arguments, deterministic=True)


def test_a_folder_without_gradients_knows_no_order() -> None:
    texts = vendor.FORMATS["torch"](vendor.folder_of(asked("demo", "torch", DENSE, VARLEN)))
    python = {path: text for path, text in texts.items() if path.startswith("python/")}
    assert len(python) == 8 and not [path for path in python if "determin" in python[path]]
    assert "determin" not in texts["README.md"]


# ---- refusals -----------------------------------------------------------------------------------


def test_where_no_kernel_computes_them_the_refusal_names_one(demo: ModuleType) -> None:
    q, packed_q = of_one_length()[0], of_several(torch.bfloat16)
    by, by_packed = WITHOUT.replace("fwd", "bwd"), "bwd_bf16_d64_full_m128n128_varlen_underdp"
    for call, slug in (
        (lambda: demo.attention(q, q, q), by),
        (lambda: demo.attention(q, q, q, deterministic=True), f"{by}_det"),
        (lambda: getattr(demo, WITHOUT)(q, q, q, SCALE), by),
        (lambda: demo.attention_varlen(*packed_q), by_packed),
        (lambda: getattr(demo, WITHOUT_VARLEN)(*packed_q, SCALE), by_packed),
    ):
        lacking = f"requires a gradient, and no kernel here computes it: add {slug} to the kern"
        with pytest.raises(ValueError, match=lacking):
            call()
    with torch.no_grad():
        assert not demo.attention(q, q, q).requires_grad
        assert not getattr(demo, WITHOUT)(q, q, q, SCALE)[0].requires_grad
        assert not demo.attention_varlen(*packed_q).requires_grad
    with pytest.raises(TypeError, match="deterministic"):
        getattr(demo, WITHOUT)(q, q, q, SCALE, deterministic=True)


def test_what_fagen_has_no_gradients_of_is_refused_as_ever(demo: ModuleType) -> None:
    fp8 = torch.float8_e4m3fn
    q, v = torch.randn(1, 8, 2, 64).to(fp8).requires_grad_(), torch.zeros(1, 2, 64, 16).to(fp8)
    *packed_q, at, _ = (x.detach() for x in of_several(torch.bfloat16))
    packed_q = [x.to(fp8) for x in packed_q]
    packed_q[0].requires_grad_()
    for call in (
        lambda: demo.attention(q, q, v, v_layout="columns"),
        lambda: getattr(demo, EIGHT)(q, q, v, SCALE),
        lambda: demo.attention_varlen(*packed_q, at, at),
    ):
        with pytest.raises(ValueError, match="requires a gradient, and this op has no backward"):
            call()


def test_gradients_of_gradients_are_refused(demo):
    q, k, v = halves()
    with pytest.raises(
        ValueError, match="requires a gradient, and second derivatives are not supp"
    ):
        torch.autograd.grad(demo.attention(q, k, v, causal=True).sum(), q, create_graph=True)


def test_torch_func_and_torch_jit_are_refused(demo):
    q, k, v = (tensor.detach() for tensor in halves())

    def loss(q: Tensor) -> Tensor:
        return getattr(demo, DENSE)(q, k, v, SCALE)[0].float().sum()

    refused = pytest.raises(ValueError, match="requires a gradient, and this op has no backward")
    with refused:
        torch.func.grad(lambda q: demo.attention(q, k, v, causal=True).float().sum())(q)
    with refused:
        torch.func.grad(loss)(q)
    with pytest.warns(DeprecationWarning), refused:
        torch.jit.trace(loss, (q.requires_grad_(),))


# ---- which kernel, and what it takes ------------------------------------------------------------


def test_a_kernel_serves_its_dtype_head_dims_and_mask_alone():
    forward = registry.from_slug("fwd_fp16_d64_causal_m128n128")
    assert gradients.differentiates(registry.from_slug("bwd_fp16_d64_causal_m64n64"), forward)
    for other in ("bwd_bf16_d64_causal_m64n64", "bwd_fp16_d64_full_m64n64"):
        assert not gradients.differentiates(registry.from_slug(other), forward)
    for other in ("bwd_fp16_d64v32_causal_m64n64", "bwd_fp16_d72_causal_m64n64"):
        assert not gradients.differentiates(registry.from_slug(other), forward)
    for kernel, other in ((forward, forward), (registry.from_slug(COMBINE), forward)):
        assert not gradients.differentiates(kernel, other)
        assert not gradients.differentiates(other, kernel)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (96, 96), (192, 128), (104, 16)])
def test_a_kernel_is_wanted_wherever_attention_has_gradients(head_dims):
    head_dim, head_dim_v = head_dims
    keys = {"head_dim": head_dim, "head_dim_v": head_dim_v, "block_m": 128, "block_n": 64}
    forward = registry.kind("forward").schedule.make(dtype="bf16", mask="causal", **keys)
    backward = gradients.gradients_slug(forward)
    assert not backward or gradients.differentiates(registry.from_slug(backward), forward)
    how = dict(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, causal=True, device="cpu")
    with nullcontext() if backward else pytest.raises(ValueError, match="no kernel computes those"):
        fagen.prepare(**how, schedule=forward, gradient=True)


def folder(*slugs: str) -> Folder:
    return vendor.folder_of(asked("demo", "torch", *slugs))


def test_of_several_the_first_in_the_folder_is_taken():
    two = folder(DENSE, "bwd_fp16_d64_causal_m128n128", BY)
    (gradient,) = two.differentiable
    assert gradient.backward is two.kernels[1] and not two.lacking and gradient.repeating is None
    both = folder(DENSE, BY, f"{BY}_det")
    (gradient,) = both.differentiable
    assert (gradient.backward, gradient.repeating) == both.kernels[1:]
    (gradient,) = folder(DENSE, f"{BY}_det").differentiable
    assert gradient.backward is gradient.repeating
    assert [gradient.forward.slug for gradient in folder(DENSE, EIGHT, COMBINE).lacking] == [DENSE]


def test_what_a_kernel_takes_is_told_by_its_signature():
    (gradient,) = folder(DENSE, BY).differentiable
    assert gradient.passed == ("dout", "q", "k", "v", "out", "lse", "scale", "dlse")
    assert gradient.differentiated == ("q", "k", "v") and gradient.optional == ("dlse",)
    by, forward = (kernel.signature for kernel in (gradient.backward, gradient.forward))
    more = Scalar("deterministic", "int", "the same bits from call to call", default=0)
    other = replace(by, scalars=(*by.scalars, more), order=(*by.order, more.name))
    assert gradients.passed(other, forward) == gradient.passed
    needed = replace(other, scalars=(*by.scalars, replace(more, default=None)))
    with pytest.raises(AssertionError, match="deterministic is of no call"):
        gradients.passed(needed, forward)


# ---- the page -----------------------------------------------------------------------------------


def test_what_the_page_shows_differentiates(tmp_path, monkeypatch):
    manifest = of_page("Gradients", "toml")
    others = manifest.partition("# or ")[2].partition("\n")[0]
    for form in ("torch", *re.findall(r'"([\w-]+)"', others)):
        (tmp_path / "vendor.toml").write_text(manifest.replace('"torch"', f'"{form}"'))
        folder = vendor.folder_of(vendor.read(tmp_path / "vendor.toml"))
        assert folder.format == form and len(folder.differentiable) == 1 and not folder.lacking
    slugs = [kernel.slug for kernel in folder.kernels]
    vendored("my_attention", "source", tmp_path / "c", *slugs)
    body = of_page("Gradients", "cpp")
    head = "#include <my_attention.h>\nint64_t called(void* stream) {"
    text = f"{head} struct FagenBackwardArgs args = {{}};\n{body}return bytes + status; }}\n"
    (tmp_path / "use.cpp").write_text(text)
    words = ["g++", "-Wall", "-Werror", "-fsyntax-only", "-I", str(tmp_path / "c/include")]
    answer = run([*words, str(tmp_path / "use.cpp")])
    assert answer.returncode == 0, answer.stderr
    q = torch.randn(1, 20, 4, 128).half().requires_grad_()
    k, v = (torch.randn(1, 20, 2, 128).half().requires_grad_() for _ in range(2))
    with package(tmp_path / "made", *slugs) as demo:
        monkeypatch.setitem(sys.modules, "my_attention", demo)
        exec(of_page("Gradients", "py"), {"q": q, "k": k, "v": v})
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in (q, k, v))


def test_what_the_page_shows_of_varlen_sequences_compiles(tmp_path: Path) -> None:
    body = of_page("Varlen", "cpp")
    vendored("my_attention", "source", tmp_path / "c", VARLEN, PACKED_BY)
    head = "#include <my_attention.h>\nint64_t called(void* stream) {\n"
    head += "struct MyAttentionProblem problem = {};\nstruct FagenForwardVarlenArgs args = {};\n"
    head += "struct FagenBackwardVarlenArgs gradients = {};\n"
    (tmp_path / "use.cpp").write_text(f"{head}{body}return bytes + status; }}\n")
    words = ["g++", "-Wall", "-Werror", "-fsyntax-only", "-I", str(tmp_path / "c/include")]
    answer = run([*words, str(tmp_path / "use.cpp")])
    assert answer.returncode == 0, answer.stderr
