"""Gradients of a vendored package for torch: what they are, who has some, and what is refused."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import registry, vendor
from fagen.process import run
from fagen.signature import Scalar
from fagen.vendor import gradients
from fagen.vendor.contents import Folder
from tests.cli_helpers import ROOT
from tests.vendor_gradients import package
from tests.vendor_helpers import COMBINE, KERNELS, asked, vendored

HALF, BFLOAT = "fwd_fp16_d64_causal_m128n128", "fwd_bf16_d96v64_full_m128n96"
HALF_BY, BFLOAT_BY = "bwd_fp16_d64_causal_m128n128", "bwd_bf16_d96v64_full_m64n64"
WITHOUT = "fwd_fp16_d64_full_m128n128"
SCALE = 0.2


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    place = tmp_path_factory.mktemp("demo")
    slugs = (HALF, BFLOAT, WITHOUT, BFLOAT_BY, f"{BFLOAT_BY}_det", HALF_BY, KERNELS[1], COMBINE)
    with package(place, *slugs) as found:
        yield found


def tensors(dtype: torch.dtype, *sizes: int, head_dims: tuple[int, int] = (64, 64)) -> list[Tensor]:
    """q of 4 heads, k and v of 2, which require gradients."""
    queries, keys = sizes
    dice = torch.Generator().manual_seed(queries)
    shapes = ((queries, 4, head_dims[0]), (keys, 2, head_dims[0]), (keys, 2, head_dims[1]))
    made = (torch.randn(2, *shape, generator=dice).to(dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in made]


def halves(queries: int = 70, keys: int = 90) -> list[Tensor]:
    return tensors(torch.float16, queries, keys)


def formula(given: list[Tensor], causal: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """The same tensors in fp64, and what attention is of them by torch's own means."""
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    q, k, v = (tensor.transpose(1, 2) for tensor in exact)
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    scores = q @ k.mT * SCALE
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return exact, (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def near(found: Tensor | None, right: Tensor | None, rounding: float = 2.0**-11) -> bool:
    assert found is not None
    right = torch.zeros_like(found).double() if right is None else right  # of what was not used
    assert found.shape == right.shape
    off = (found.double() - right).abs().max()
    return bool(off <= 6 * rounding * (1 + right.abs().max()))


KINDS = pytest.mark.parametrize(
    ("slug", "dtype", "head_dims", "causal"),
    [(HALF, torch.float16, (64, 64), True), (BFLOAT, torch.bfloat16, (96, 64), False)],
    ids=["fp16", "bf16"],
)


@KINDS
@pytest.mark.parametrize("sizes", [(70, 90), (1, 1), (33, 200)], ids=str)
@pytest.mark.parametrize("picked", [True, False], ids=["attention", "kernel"])
def test_they_are_those_of_the_formula(demo, slug, dtype, head_dims, causal, sizes, picked):
    given = tensors(dtype, *sizes, head_dims=head_dims)
    if picked:
        out, lse = demo.attention(*given, causal=causal, scale=SCALE, return_lse=True)
    else:
        out, lse = getattr(demo, slug)(*given, SCALE)
    exact, right, right_lse = formula(given, causal)
    rounding = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    assert near(out, right, rounding) and near(lse, right_lse, rounding)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), (dout, dlse))
    torch.autograd.backward((right, right_lse), (dout.double(), dlse.double()))
    for tensor, fine in zip(given, exact, strict=True):
        assert near(tensor.grad, fine.grad, rounding)


@pytest.mark.parametrize("which", range(3))
def test_only_what_is_asked_for_has_one(demo, which):
    given = [tensor.detach() for tensor in halves()]
    given[which].requires_grad_()
    demo.attention(*given, causal=True, scale=SCALE).sum().backward()
    exact, right, _ = formula(given, True)
    right.sum().backward()
    assert near(given[which].grad, exact[which].grad)
    assert [tensor.grad is None for tensor in given] == [place != which for place in range(3)]


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
    given = halves()
    used(*demo.attention(*given, causal=True, scale=SCALE, return_lse=True)).backward()
    exact, right, right_lse = formula(given, True)
    used(right, right_lse).backward()
    for tensor, fine in zip(given, exact, strict=True):
        assert near(tensor.grad, fine.grad)


def test_no_keys_and_no_queries_give_zeros(demo):
    for sizes in ((5, 0), (0, 5)):
        given = halves(*sizes)
        demo.attention(*given, causal=True).sum().backward()
        assert all(tensor.grad is not None and not tensor.grad.any() for tensor in given)


def test_a_call_that_needs_none_calls_the_kernel_as_ever(demo, monkeypatch):
    def asked_for(*_: Any, **__: Any) -> Any:
        raise AssertionError("no gradient is needed")

    for module in (demo, demo._attention):
        monkeypatch.setattr(module, "differentiated", asked_for)
    given = halves()
    plain = [tensor.detach() for tensor in given]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not demo.attention(*given, causal=True).requires_grad
            assert not getattr(demo, HALF)(*given, SCALE)[0].requires_grad
    assert not demo.attention(*plain, causal=True).requires_grad
    assert not getattr(demo, HALF)(*plain, SCALE)[0].requires_grad
    for call in (
        lambda: demo.attention(*given, causal=True),
        lambda: getattr(demo, HALF)(*given, 1),
    ):
        with pytest.raises(AssertionError, match="no gradient"):
            call()


# ---- torch's own ways ---------------------------------------------------------------------------


def test_compiled_with_open_sizes_it_is_one_graph(demo):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = demo.attention(q, k, v, causal=True, scale=SCALE, return_lse=True)
        return out.float().sum() + (lse.transpose(1, 2) * 2).sum()

    for sizes in ((70, 90), (40, 130)):
        given = halves(*sizes)
        loss(*given).backward()
        exact, right, right_lse = formula(given, True)
        (right.sum() + 2 * right_lse.sum()).backward()
        for tensor, fine in zip(given, exact, strict=True):
            assert near(tensor.grad, fine.grad)


def test_opcheck(demo):
    for slug, dtype, dims in ((HALF, torch.float16, (64, 64)), (BFLOAT, torch.bfloat16, (96, 64))):
        op = getattr(getattr(torch.ops, demo.__name__), f"{slug}_with_grad").default
        given = tensors(dtype, 70, 90, head_dims=dims)
        assert set(torch.library.opcheck(op, (*given, SCALE)).values()) == {"SUCCESS"}


def test_an_activation_may_be_computed_again(demo):
    once, again = halves(), halves()
    demo.attention(*once, causal=True).sum().backward()
    call = lambda *given: demo.attention(*given, causal=True)  # noqa: E731
    torch.utils.checkpoint.checkpoint(call, *again, use_reentrant=False).sum().backward()
    for a, b in zip(once, again, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


# ---- refusals -----------------------------------------------------------------------------------


def test_where_no_kernel_computes_them_the_refusal_names_one(demo):
    q = halves()[0]
    for call in (lambda: demo.attention(q, q, q), lambda: getattr(demo, WITHOUT)(q, q, q, SCALE)):
        with pytest.raises(ValueError, match="requires a gradient, and no kernel here") as why:
            call()
        assert f"add {HALF_BY.replace('causal', 'full')} to the kernels" in str(why.value)
        with torch.no_grad():
            call()


def test_what_fagen_has_no_gradients_of_is_refused_as_ever(demo):
    q = torch.randn(1, 8, 2, 64).to(torch.float8_e4m3fn).requires_grad_()
    v = torch.zeros(1, 2, 64, 16).to(torch.float8_e4m3fn)
    kernel = getattr(demo, KERNELS[1])
    calls = (lambda: demo.attention(q, q, v, v_layout="columns"), lambda: kernel(q, q, v, SCALE))
    for call in calls:
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
        return getattr(demo, HALF)(q, k, v, SCALE)[0].float().sum()

    refused = pytest.raises(ValueError, match="requires a gradient, and this op has no backward")
    with refused:
        torch.func.grad(lambda q: demo.attention(q, k, v, causal=True).float().sum())(q)
    with refused:
        torch.func.grad(loss)(q)
    with pytest.warns(DeprecationWarning), refused:
        torch.jit.trace(loss, (q.requires_grad_(),))


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_not_deterministic_is_refused_where_torch_asks_for_that(demo):
    def gradient() -> None:
        demo.attention(*halves(), causal=True).sum().backward()

    with deterministic(), pytest.raises(RuntimeError, match="differ from call to call") as refusal:
        gradient()
    assert f"add {HALF_BY}_det to the kernels" in str(refusal.value)
    with deterministic(warn_only=True), pytest.warns(UserWarning, match="differ from call to call"):
        gradient()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient()


def test_a_deterministic_kernel_is_called_where_torch_asks_for_one(demo, monkeypatch):
    given = tensors(torch.bfloat16, 70, 90, head_dims=(96, 64))
    out = demo.attention(*given)
    called = []
    ops = demo._gradients.ops
    for slug in (BFLOAT_BY, f"{BFLOAT_BY}_det"):
        of = getattr(ops, slug).default
        spied = SimpleNamespace(
            default=lambda s=slug, f=of, **named: called.append(s) or f(**named)
        )
        monkeypatch.setattr(ops, slug, spied)
    plain = torch.autograd.grad(out.sum(), given, retain_graph=True)
    with deterministic():
        found = torch.autograd.grad(out.sum(), given)
    assert called == [BFLOAT_BY, f"{BFLOAT_BY}_det"]
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


# ---- which kernel, and what it takes ------------------------------------------------------------


def test_a_kernel_serves_its_dtype_head_dims_and_mask_alone():
    forward = registry.from_slug("fwd_fp16_d64_causal_m128n128")
    assert gradients.differentiates(registry.from_slug("bwd_fp16_d64_causal_m64n64"), forward)
    for other in ("bwd_bf16_d64_causal_m64n64", "bwd_fp16_d64_full_m64n64"):
        assert not gradients.differentiates(registry.from_slug(other), forward)
    for other in ("bwd_fp16_d64v32_causal_m64n64", "bwd_fp16_d72_causal_m64n64"):
        assert not gradients.differentiates(registry.from_slug(other), forward)
    for one, other in ((forward, forward), (registry.from_slug(COMBINE), forward)):
        assert not gradients.differentiates(one, other)
        assert not gradients.differentiates(other, one)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (96, 96), (192, 128), (104, 16)])
def test_a_kernel_is_wanted_wherever_attention_has_gradients(head_dims):
    head_dim, head_dim_v = head_dims
    keys = {"head_dim": head_dim, "head_dim_v": head_dim_v, "block_m": 128, "block_n": 64}
    forward = registry.kind("forward").schedule.make(dtype="bf16", mask="causal", **keys)
    wanted = gradients.wanted(forward)
    assert not wanted or gradients.differentiates(registry.from_slug(wanted), forward)
    of = dict(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, causal=True, device="cpu")
    with nullcontext() if wanted else pytest.raises(ValueError, match="no kernel computes those"):
        fagen.prepare(**of, schedule=forward, gradient=True)


def folder(*slugs: str) -> Folder:
    return vendor.folder_of(asked("demo", "torch", *slugs))


def test_of_several_the_first_in_the_folder_is_taken():
    two = folder(HALF, "bwd_fp16_d64_causal_m64n64", HALF_BY)
    (gradient,) = two.differentiable
    assert gradient.by is two.kernels[1] and not two.lacking and gradient.repeating is None
    both = folder(HALF, HALF_BY, f"{HALF_BY}_det")
    (gradient,) = both.differentiable
    assert (gradient.by, gradient.repeating) == both.kernels[1:]
    (gradient,) = folder(HALF, f"{HALF_BY}_det").differentiable
    assert gradient.by is gradient.repeating
    assert [one.of.slug for one in folder(HALF, KERNELS[1], COMBINE).lacking] == [HALF]


def test_what_a_kernel_takes_is_told_by_its_signature():
    (gradient,) = folder(HALF, HALF_BY).differentiable
    assert gradient.passed == ("dout", "q", "k", "v", "out", "lse", "scale", "dlse")
    assert gradient.given == ("q", "k", "v") and gradient.optional == ("dlse",)
    by, of = (kernel.signature for kernel in (gradient.by, gradient.of))
    more = Scalar("deterministic", "int", "the same bits from call to call", default=0)
    other = replace(by, scalars=(*by.scalars, more), order=(*by.order, more.name))
    assert gradients.passed(other, of) == gradient.passed
    needed = replace(other, scalars=(*by.scalars, replace(more, default=None)))
    with pytest.raises(AssertionError, match="deterministic is of no call"):
        gradients.passed(needed, of)


def test_what_the_page_shows_differentiates(tmp_path, monkeypatch):
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    section = page.partition("\n## Gradients\n")[2].partition("\n## ")[0]
    manifest = section.partition("```toml\n")[2].partition("```")[0]
    others = manifest.partition("# or ")[2].partition("\n")[0]
    for form in ("torch", *re.findall(r'"([\w-]+)"', others)):
        (tmp_path / "vendor.toml").write_text(manifest.replace('"torch"', f'"{form}"'))
        found = vendor.folder_of(vendor.read(tmp_path / "vendor.toml"))
        assert found.format == form and len(found.differentiable) == 1 and not found.lacking
    slugs = [kernel.slug for kernel in found.kernels]
    vendored("my_attention", "source", tmp_path / "c", *slugs)
    body = section.partition("```cpp\n")[2].partition("```")[0]
    head = "#include <my_attention.h>\nint64_t called(void* stream) {"
    text = f"{head} struct FagenBackwardArgs args = {{}};\n{body}return bytes + status; }}\n"
    (tmp_path / "use.cpp").write_text(text)
    words = ["g++", "-Wall", "-Werror", "-fsyntax-only", "-I", str(tmp_path / "c/include")]
    answer = run([*words, str(tmp_path / "use.cpp")])
    assert answer.returncode == 0, answer.stderr
    q = torch.randn(1, 20, 4, 128).half().requires_grad_()
    k, v = (torch.randn(1, 20, 2, 128).half().requires_grad_() for _ in range(2))
    with package(tmp_path / "made", *slugs) as made:
        monkeypatch.setitem(sys.modules, "my_attention", made)
        program = section.partition("```py\n")[2].partition("```")[0]
        exec(program, {"q": q, "k": k, "v": v})
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in (q, k, v))


def test_packed_sequences_have_some_beside_those_of_one_length(tmp_path: Any) -> None:
    packed, by = "fwd_fp16_d64_causal_m64n64_varlen", "bwd_fp16_d64_causal_m128n128_varlen"
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    with package(tmp_path, packed, by, HALF, HALF_BY) as made:
        given = [tensor[0].detach().requires_grad_() for tensor in halves(70, 70)]
        plain = [tensor.detach() for tensor in given]
        out, lse = getattr(made, packed)(*plain, offsets, offsets, SCALE)  # without seqused_k
        assert not (out.requires_grad or lse.requires_grad)
        out, lse = getattr(made, packed)(*given, offsets, offsets, SCALE)
        (out.sum() + lse.sum()).backward()
        for begin, end in ((0, 30), (30, 70)):
            exact, right, sums = formula([x[None, begin:end] for x in given], True)
            (right.sum() + sums.sum()).backward()
            assert near(out[None, begin:end], right)
            for tensor, fine in zip(given, exact, strict=True):
                assert tensor.grad is not None and fine.grad is not None
                assert near(tensor.grad[begin:end], fine.grad[0])
        test_only_what_is_asked_for_has_one(made, 1)  # of one length
