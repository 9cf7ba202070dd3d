"""Gradients of fagen.attention: what they are, who asks for them, and what is refused."""

from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fagen
from fagen.dispatch.select import buildable
from fagen.flash_attn_interface import flash_attn_func
from fagen.kinds.backward.reference import gradients
from fagen.problem import Problem
from fagen.registry import plan_of
from fagen.runtime import backward, call
from fagen.vocab import MASKS
from tests.attention_helpers import picked
from tests.fresh import forget
from tests.training import Layer, losses, process_group

SCALE = 0.125


def qkv(seqlen_q: int = 70, seqlen_k: int = 90, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seqlen_q)
    shapes = ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))
    made = (torch.randn(2, s, h, 64, generator=dice).half() for s, h in shapes)
    return [x.requires_grad_() for x in made]


def exact(
    tensors: list[Tensor], dout: Tensor, causal: bool, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    mask = MASKS["causal" if causal else "full"]
    given = (x.detach() for x in tensors)
    return gradients(dout, *given, mask=mask, scale=SCALE, dlse=dlse)[2:]


def near(found: Tensor | None, fine: Tensor) -> bool:
    assert found is not None and found.is_contiguous()
    return bool((found.double() - fine).abs().max() <= 3e-3 * (1 + fine.abs().max()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(70, 90), (90, 70), (1, 1), (200, 33)], ids=str)
def test_they_are_those_of_attention(sizes: tuple[int, int], causal: bool) -> None:
    tensors = qkv(*sizes)
    out, lse = fagen.attention(*tensors, causal=causal, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    if causal and sizes[0] > sizes[1]:  # rows that see no key
        dlse[..., : sizes[0] - sizes[1]] = 0
    kept = lse.masked_fill(lse == -torch.inf, 0)
    torch.autograd.backward((out, kept), (dout, dlse))
    for tensor, fine in zip(tensors, exact(tensors, dout, causal, dlse), strict=True):
        assert near(tensor.grad, fine)


@pytest.mark.parametrize("which", range(3))
def test_only_what_is_asked_for_has_one(which: int) -> None:
    tensors = [x.detach() for x in qkv()]
    tensors[which].requires_grad_()
    out = fagen.attention(*tensors, causal=True)
    out.backward(torch.ones_like(out))
    assert near(tensors[which].grad, exact(tensors, torch.ones_like(out), True)[which])
    assert [x.grad is None for x in tensors] == [i != which for i in range(3)]


@pytest.mark.parametrize(
    "used",
    [
        lambda out: out.sum(),  # a gradient whose strides are all 0
        lambda out: (out.transpose(1, 2).contiguous() * 1.0).sum(),
        lambda out: out[..., 1:].sum() + out[..., :1].sum(),
        lambda out: torch.nn.functional.pad(out, (3, 0))[..., 3:].sum(),
    ],
)
def test_a_gradient_of_the_output_may_lie_anyhow(used: Callable[[Tensor], Tensor]) -> None:
    tensors = qkv()
    out = fagen.attention(*tensors)
    used(out).backward()
    for tensor, fine in zip(tensors, exact(tensors, torch.ones_like(out), False), strict=True):
        assert near(tensor.grad, fine)


def test_what_kernels_cannot_read_in_whole_pieces_is_copied() -> None:
    storage = torch.zeros(2 * 3 * 4 * 16 + 8, dtype=torch.bfloat16)
    for offset, step, taken in ((0, 1, True), (8, 1, True), (1, 1, False), (0, 2, False)):
        laid = storage[offset:].as_strided((2, 3, 4, 16 // step), (192, 64, 16, step), offset)
        found = backward._laid_out(laid)
        assert (found is laid) == taken and torch.equal(found, laid)
        assert found.storage_offset() % 8 == 0 and found.stride(-1) == 1


def test_the_log_sum_exp_alone_has_some() -> None:
    tensors = qkv()
    out, lse = fagen.attention(*tensors, return_lse=True)
    lse.sum().backward()
    zeros, ones = torch.zeros_like(out).detach(), torch.ones_like(lse).detach()
    for tensor, fine in zip(tensors, exact(tensors, zeros, False, ones), strict=True):
        assert near(tensor.grad, fine)


def test_no_keys_and_no_queries_give_zeros() -> None:
    for sizes in ((5, 0), (0, 5)):
        tensors = qkv(*sizes)
        fagen.attention(*tensors).sum().backward()
        assert all(x.grad is not None and not x.grad.any() for x in tensors)


def test_the_interface_of_flash_attention_has_them_too() -> None:
    tensors = qkv()
    out = flash_attn_func(*tensors, causal=True)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    for tensor, fine in zip(tensors, exact(tensors, torch.ones_like(out), True), strict=True):
        assert near(tensor.grad, fine)


def test_a_call_that_needs_none_never_asks_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("no gradient is needed")

    forget(monkeypatch)
    monkeypatch.setattr(backward, "kernel_of_gradients", asked)
    tensors = qkv()
    with torch.no_grad():
        assert not fagen.attention(*tensors).requires_grad
    assert not fagen.attention(*(x.detach() for x in tensors)).requires_grad
    with pytest.raises(AssertionError, match="no gradient"):
        fagen.attention(*tensors)


# ---- torch's own ways ---------------------------------------------------------------------------


def test_compiled_with_open_sizes_it_is_one_graph() -> None:
    fagen.prepare(dtype="fp16", head_dim=64, causal=True, device="cpu", gradient=True)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fagen.attention(q, k, v, causal=True).float().sum()

    for sizes in ((70, 90), (40, 130)):
        tensors = qkv(*sizes)
        loss(*tensors).backward()
        ones = torch.ones(2, sizes[0], 4, 64).half()
        for tensor, fine in zip(tensors, exact(tensors, ones, True), strict=True):
            assert near(tensor.grad, fine)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_trains_as_its_module_does(fresh_dynamo: None, strict: bool) -> None:
    fagen.prepare(dtype="bf16", head_dim=64, causal=True, device="cpu", gradient=True)
    layer, x = Layer(64).bfloat16(), torch.randn(2, 70, 128).bfloat16()
    eager, before = deepcopy(layer), layer.qkv.weight.detach().clone()
    exported = torch.export.export(layer, (x,), strict=strict)
    file = BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    programs = exported.module(), torch.export.load(file).module()
    found = []
    for module in (eager, *programs):
        (weight,) = module.parameters()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        assert weight.grad is not None and not torch.equal(weight, before)
        found.append((weight.grad, weight.detach()))
    for gradient, weight in found[1:]:
        assert torch.equal(gradient, found[0][0]) and torch.equal(weight, found[0][1])


def test_an_activation_may_be_computed_again() -> None:
    once, again = qkv(), qkv()
    fagen.attention(*once).sum().backward()
    checkpoint(fagen.attention, *again, use_reentrant=False).sum().backward()
    for a, b in zip(once, again, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_tensor_that_was_changed_meanwhile_is_noticed() -> None:
    q, k, v = qkv()
    keys = k * 1
    out = fagen.attention(q, keys, v)
    keys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_layer_trains_under_ddp_and_autocast(tmp_path: Path) -> None:
    with process_group("gloo", tmp_path):
        found = losses(torch.nn.parallel.DistributedDataParallel, 64, "cpu")
    assert found[-1] < 0.85 * found[0]


def test_opcheck() -> None:
    tensors = qkv()
    fagen.attention(*tensors)
    slug = picked(dtype="fp16", head_dim=64, seqlen=90, rows=560, device="cpu").slug
    checked = torch.library.opcheck(
        getattr(torch.ops.fagen, f"{slug}_with_grad").default, (*tensors, SCALE)
    )
    assert set(checked.values()) == {"SUCCESS"}


# ---- refusals -----------------------------------------------------------------------------------


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = qkv()
    said = (
        "a gradient, and second derivatives are not supported; leave create_graph=True out .*MATH"
    )
    with pytest.raises(ValueError, match=said):
        torch.autograd.grad(fagen.attention(q, k, v).sum(), q, create_graph=True)
    with sdpa_kernel(SDPBackend.MATH):  # which is said to have them
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)
    (found,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.autograd.grad(found.float().square().sum(), q)[0].isfinite().all()


def test_head_dims_that_no_kernel_has_are_refused_with_what_to_do() -> None:
    q, v = (torch.randn(1, 8, 1, d).half().requires_grad_() for d in (256, 192))
    said = r"no kernel computes those of float16, head_dim 256 and 192 \(V\), full, backward pass"
    with pytest.raises(ValueError, match=said), pytest.warns(fagen.UntunedWarning):
        fagen.attention(q, q, v)
    with torch.no_grad():
        fagen.attention(q, q, v)


HAS_THEM = (
    r"fagen\.attention, or .*, has gradients by autograd \(backward\(\), .* and not by .*func"
)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda loss, q: torch.func.grad(loss)(q),
        lambda loss, q: torch.func.vjp(loss, q),
        lambda loss, q: torch.func.jacrev(loss)(q),
        lambda loss, q: torch.vmap(loss)(torch.stack((q, q)).requires_grad_()),
    ],
)
def test_torch_func_is_refused_in_favour_of_autograd(
    transformed: Callable[[Callable[[Tensor], Tensor], Tensor], Any],
) -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=f"a gradient, and this op has no backward: {HAS_THEM}"):
        transformed(lambda t: fagen.attention(t, k, v).float().sum(), q)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_a_kernel_of_decoding_that_serves_few_queries_refuses_it_so_too() -> None:
    q, k, v = (x.detach() for x in qkv(1, 4_096))
    with pytest.raises(ValueError, match=f"a gradient, and decoding has none: {HAS_THEM}"):
        torch.func.grad(lambda t: fagen.attention(t, k, v).float().sum())(q)


def test_what_has_no_gradients_at_all_names_nobody() -> None:
    of_e4m3 = plan_of("fwd_e4m3_d128_full_m128n128_sblock").signature
    assert of_e4m3.gradient_refused.endswith(
        "this op has no backward; call it under torch.no_grad()"
    )


def test_gradients_are_deterministic_where_torch_or_a_call_asks_for_that() -> None:
    """By a kernel of its own, told when the backward pass runs; on a CPU there is one order."""
    key_of = call.DOORS["gradients"].key_of
    slug, gpu = "fwd_fp16_d64_full_m128n128", torch.device("cuda:0")
    any_order = key_of(slug, gpu, False)
    torch.use_deterministic_algorithms(True)
    try:
        in_order = key_of(slug, gpu, False)
        on_a_cpu = key_of(slug, torch.device("cpu"), True)
    finally:
        torch.use_deterministic_algorithms(False)
    keys = any_order, in_order, on_a_cpu
    assert [key.problem.deterministic for key in keys] == [False, True, False]
    assert key_of(slug, gpu, True) == in_order

    def usual(key: Any) -> str:
        return buildable(key.problem).schedules[0].slug

    assert usual(any_order) == "bwd_fp16_d64_full_m128n128"
    assert usual(in_order) == "bwd_fp16_d64_full_m128n128_det"


def test_the_usual_tile_comes_first() -> None:
    def slugs(head_dim: int) -> list[str]:
        problem = Problem("bf16", head_dim, head_dim, "causal", "bf16", "", 0, "backward")
        return [schedule.slug for schedule in buildable(problem).schedules]

    assert slugs(64) == ["bwd_bf16_d64_causal_m128n128"]
    assert slugs(128) == ["bwd_bf16_d128_causal_m64n128"]
    assert slugs(40)[0] == "bwd_bf16_d40_causal_m128n128" and len(slugs(40)) > 1
