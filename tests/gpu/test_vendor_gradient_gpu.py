"""Gradients of vendored folders on a Hopper GPU: by C, and by packages for torch and `kernels`.

Those for JAX are in test_vendor_gpu.py, by tests/jax_calls.py.
"""

import ctypes
from dataclasses import fields
from typing import Any

import pytest
import torch

from fagen import problem as problems
from fagen import registry, vendor
from fagen.kind import Plan
from fagen.kinds.backward.oracle import gradients
from fagen.runtime.c_interface import arguments
from fagen.runtime.checks import checked
from fagen.vocab import DTYPES, MASKS
from tests.gpu.test_vendor_gpu import FORMS, built, printed_by

pytestmark = pytest.mark.gpu

# of attention, each before that of its gradients
DIFFERENTIATED = [
    "fwd_fp16_d128_causal_m128n128",
    "bwd_fp16_d128_causal_m64n128",
    "fwd_bf16_d64_full_m128n128",
    "bwd_bf16_d64_full_m128n128",
]
REPEATING = "bwd_fp16_d128_causal_m64n128_det"  # of the first, where the call or torch asks for it


def pairs() -> list[tuple[Plan, Plan]]:
    """Plans of attention, each with that of its gradients."""
    plans = [registry.plan_of(slug) for slug in DIFFERENTIATED]
    return list(zip(plans[::2], plans[1::2], strict=True))


# ---- C ------------------------------------------------------------------------------------------


class Problem(ctypes.Structure):
    """The C struct of that name."""

    _fields_ = tuple((field.name, ctypes.c_int32) for field in fields(problems.Problem))


def enqueue(library: ctypes.CDLL, chooses: str, plan: Plan, **given: Any) -> None:
    """Call a dispatcher as a C program would, with a workspace as large as it says."""
    schedule = plan.schedule.values()
    asked = Problem(
        1 + list(DTYPES).index(schedule["dtype"]),
        *(schedule["head_dim"], schedule["head_dim_v"]),
        1 + list(MASKS).index(schedule["mask"]),
        0,  # O as usual
        2 * plan.dtype.fp8,  # V row-major
    )
    args = arguments(plan, given, checked(plan, given))
    size = getattr(library, f"demo_{chooses}_workspace")
    size.restype = ctypes.c_int64
    needed = size(ctypes.byref(asked), ctypes.byref(args))
    assert needed >= 0
    anything = 0 if plan.launches.zeroed else 0xFF
    workspace = torch.full((needed + 1,), anything, dtype=torch.uint8, device="cuda")
    args.workspace, args.workspace_bytes = workspace.data_ptr(), needed
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call = getattr(library, f"demo_{chooses}")
    for _ in range(2):  # a second call finds the zeros that it needs
        assert call(ctypes.byref(asked), ctypes.byref(args), stream) == 0
    torch.cuda.synchronize()
    assert not (plan.launches.zeroed and workspace.any())
    asked.head_dim += 8
    assert call(ctypes.byref(asked), ctypes.byref(args), stream) == 100  # no kernel


def test_what_the_dispatchers_of_c_compute_are_the_gradients_of_each_other(hopper, tmp_path):
    schedules = [registry.from_slug(slug) for slug in DIFFERENTIATED]
    vendor.vendor(vendor.asked("demo", schedules, with_cutlass=True), tmp_path / "demo")
    library = ctypes.CDLL(str(built(tmp_path / "demo") / "libdemo.so"))
    for forward, backward in pairs():
        values = forward.schedule.values()
        dtype, mask = getattr(torch, DTYPES[values["dtype"]].torch), MASKS[values["mask"]]
        for queries, keys in ((333, 333), (128, 1000), (300, 200)):
            shapes = (2, queries, 6), (2, keys, 2), (2, keys, 2)
            q, k, v = (
                torch.randn(*shape, values["head_dim"], device="cuda").to(dtype) for shape in shapes
            )
            out, dout = torch.full_like(q, torch.nan), torch.randn_like(q)
            lse = torch.full((2, 6, queries), torch.nan, device="cuda")
            given = {"q": q, "k": k, "v": v, "scale": 0.1, "out": out, "lse": lse}
            enqueue(library, "forward", forward, **given)
            for more in ({}, {"dlse": torch.randn_like(lse)}):
                found = {f"d{name}": torch.full_like(given[name], torch.nan) for name in "qkv"}
                enqueue(library, "backward", backward, dout=dout, **given, **found, **more)
                expected = gradients(dout, q, k, v, mask=mask, scale=0.1, **more)[2:]
                for (name, one), exact in zip(found.items(), expected, strict=True):
                    off = (one.double() - exact).abs().max().item()
                    most = 4 * torch.finfo(dtype).eps * (1 + exact.abs().max().item())
                    assert off <= most, (backward.slug, name, queries, keys)


# ---- packages for torch -------------------------------------------------------------------------

# What a program does with gradients of `package`; it prints what was right.
PROGRAM = """


def leaves(*sizes):
    return [tensor.requires_grad_() for tensor in inputs(*sizes)]


def upstream(dtype, head_dim, queries):
    dout = torch.randn(2, queries, 6, head_dim, device="cuda").to(dtype)
    return dout, torch.randn(2, 6, queries, device="cuda")


def right(given, dout, dlse, causal):  # by autograd of the plain formula, in fp64
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    return torch.autograd.grad(exact(*wide, causal), wide, (dout.double(), dlse.double()))


def near(found, fine, bits):
    for name, one, other in zip("qkv", found, fine, strict=True):
        assert one.shape == other.shape and one.is_contiguous()
        off = (one.double() - other).abs().max().item()
        assert off <= 8 * 2.0**-bits * (1 + other.abs().max().item()), (name, off)


def differentiated(call, given, dout, dlse):
    return torch.autograd.grad(call(*given), given, (dout, dlse))


def attention(causal):
    return lambda q, k, v: package.attention(q, k, v, causal=causal, return_lse=True)


KINDS = {
    torch.float16: (128, True, 11, package.fwd_fp16_d128_causal_m128n128),
    torch.bfloat16: (64, False, 8, package.fwd_bf16_d64_full_m128n128),
}
for dtype, (head_dim, causal, bits, kernel) in KINDS.items():
    call = attention(causal)
    itself = lambda q, k, v: kernel(q, k, v, head_dim**-0.5)
    for queries, keys in ((333, 333), (1, 260), (128, 1000)):
        given = leaves(dtype, head_dim, queries, keys)
        dout, dlse = upstream(dtype, head_dim, queries)
        fine = right(given, dout, dlse, causal)
        near(differentiated(call, given, dout, dlse), fine, bits)
        near(differentiated(itself, given, dout, dlse), fine, bits)
        fine = right(given, dout, dlse * 0, causal)
        out = package.attention(*given, causal=causal)
        near(torch.autograd.grad(out, given, dout), fine, bits)
        (dk,) = torch.autograd.grad(call(*given)[0], given[1], dout)
        near([dk] * 3, [fine[1]] * 3, bits)
        fine = right(given, dout * 0, dlse, causal)
        near(torch.autograd.grad(call(*given)[1], given, dlse), fine, bits)
    print("gradients", dtype)

for dtype, (head_dim, causal, bits, kernel) in KINDS.items():
    call = attention(causal)
    compiled = torch.compile(call, fullgraph=True)
    for queries, keys in ((333, 333), (200, 500), (64, 900)):  # of open sizes from the second on
        given = leaves(dtype, head_dim, queries, keys)
        dout, dlse = upstream(dtype, head_dim, queries)
        plain = differentiated(call, given, dout, dlse)
        found = differentiated(compiled, given, dout, dlse)
        assert equal(plain[1:], found[1:])
        near(found, right(given, dout, dlse, causal), bits)
    print("compiled", dtype)

    def step():
        return differentiated(call, given, dout, dlse)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for tensor, new in zip(given, inputs(dtype, head_dim, queries, keys), strict=True):
                tensor.copy_(new)
        graph.replay()
        plain = step()
        assert equal(captured[1:], plain[1:])
        near(captured, right(given, dout, dlse, causal), bits)
    print("captured", dtype)


def ordered(q, k, v):
    return package.attention(q, k, v, causal=True, return_lse=True, deterministic=True)


first = leaves(torch.float16, 128, 300, 500)
dout, dlse = upstream(torch.float16, 128, 300)
one = differentiated(ordered, first, dout, dlse)
near(one, right(first, dout, dlse, True), 11)
assert all(equal(one, differentiated(ordered, first, dout, dlse)) for _ in range(5))
assert equal(one, differentiated(torch.compile(ordered, fullgraph=True), first, dout, dlse))
print("repeats")

wide = [tensor.detach().float().requires_grad_() for tensor in first]
with torch.autocast("cuda", torch.float16):
    found = differentiated(ordered, wide, dout, dlse)
assert equal([tensor.float() for tensor in one], found)
print("cast")

torch.use_deterministic_algorithms(True)
assert all(equal(one, differentiated(attention(True), first, dout, dlse)) for _ in range(5))
print("repeats for torch")

dout, dlse = upstream(dtype, head_dim, queries)
try:
    step()
except RuntimeError as refusal:
    assert "differ from call to call" in str(refusal), refusal
    print("refused")
try:
    package.attention(*given, deterministic=True)
except ValueError as refusal:
    assert "deterministic=True forbids that" in str(refusal), refusal
    print("refused in a call")
"""
RIGHT = [
    *(f"gradients torch.{dtype}" for dtype in ("float16", "bfloat16")),
    *(
        f"{what} torch.{dtype}"
        for dtype in ("float16", "bfloat16")
        for what in ("compiled", "captured")
    ),
    *("repeats", "cast", "repeats for torch", "refused", "refused in a call"),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_package_differentiates(hopper, tmp_path, form):
    slugs = (*DIFFERENTIATED, REPEATING)
    assert printed_by(PROGRAM, form, slugs, tmp_path) == RIGHT
