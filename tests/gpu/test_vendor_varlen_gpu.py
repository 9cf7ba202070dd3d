"""Varlen sequences by vendored folders on a Hopper GPU: by the dispatchers of C, and by torch."""

import ctypes
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import registry, vendor
from fagen.kind import Plan
from fagen.kinds.backward.oracle import gradients
from fagen.vocab import MASKS
from tests.gpu.test_vendor_gpu import built, printed_by
from tests.gpu.test_vendor_gradient_gpu import enqueue
from tests.varlen_helpers import exact, packed, packed8

pytestmark = pytest.mark.gpu

# by what chooses among them
SLUGS = {
    "varlen": ("fwd_fp16_d64_causal_m64n64_varlen", "fwd_bf16_d128_full_m128n128_varlen_packgqa"),
    "varlen_fp8": ("fwd_e4m3_d64_causal_m64n64_varlen",),
    "backward_varlen": ("bwd_fp16_d64_causal_m64n64_varlen",),
}
LENGTHS = ((333, 333), (0, 7), (128, 1000), (3, 0), (1, 130), (300, 200))


# ---- C ------------------------------------------------------------------------------------------


def on_the_gpu(tensors: Any) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def results(plan: Plan, q: Tensor) -> dict[str, Tensor]:
    """out and lse that nobody has written to."""
    dtype = getattr(torch, plan.out_dtype.torch)
    out = torch.full((*q.shape[:2], plan.head_dim_v), torch.nan, dtype=dtype, device="cuda")
    return {"out": out, "lse": torch.full((q.shape[1], q.shape[0]), torch.nan, device="cuda")}


def seen_of(lse: Tensor) -> Tensor:
    """The rows that see some key."""
    return lse.isfinite().all(0)


def test_what_the_dispatchers_of_c_compute_is_attention_of_each_sequence(
    hopper: None, tmp_path: Any
) -> None:
    schedules = [registry.from_slug(slug) for slugs in SLUGS.values() for slug in slugs]
    vendor.vendor(vendor.asked("demo", schedules, with_cutlass=True), tmp_path / "demo")
    library = ctypes.CDLL(str(built(tmp_path / "demo") / "libdemo.so"))
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"
    for slug in SLUGS["varlen"]:
        plan = registry.plan_of(slug)
        dtype, causal = getattr(torch, plan.dtype.torch), plan.mask.causal
        given = dict(zip(names, on_the_gpu(packed(LENGTHS, dtype, plan.head_dim)), strict=True))
        made = results(plan, given["q"])
        enqueue(library, "varlen", plan, **given, **made, scale=plan.head_dim**-0.5)
        expected, lse = exact(*given.values(), causal=causal)
        seen, most = seen_of(lse), {torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
        assert (made["out"].double() - expected)[seen].abs().max() <= most
        assert (made["lse"] - lse)[:, seen].abs().max() <= 1e-3
        assert not made["out"][~seen].any() and (made["lse"][:, ~seen] == -torch.inf).all()

    of = packed8(LENGTHS)
    plan = registry.plan_of(SLUGS["varlen_fp8"][0])
    given = dict(zip(names, on_the_gpu(of.tensors), strict=True))
    given |= {
        name: x.cuda().reshape(*x.shape, *[1] * (3 - x.dim())) for name, x in of.named.items()
    }
    made = results(plan, given["q"])
    enqueue(library, "varlen_fp8", plan, **given, **made, scale=plan.head_dim**-0.5)
    expected, lse = of.exact(causal=True)
    seen = seen_of(lse)
    found = made["out"].cpu().double()
    assert (found - expected)[seen].norm() <= 0.1 * expected[seen].norm()


def test_what_the_dispatcher_of_c_differentiates_is_the_gradient_of_each_sequence(
    hopper: None, tmp_path: Any
) -> None:
    forward, by = SLUGS["varlen"][0], SLUGS["backward_varlen"][0]
    schedules = [registry.from_slug(slug) for slug in (forward, by)]
    vendor.vendor(vendor.asked("demo", schedules, with_cutlass=True), tmp_path / "demo")
    library = ctypes.CDLL(str(built(tmp_path / "demo") / "libdemo.so"))
    plan = registry.plan_of(forward)
    q, k, v, at_q, at_k = on_the_gpu(packed(LENGTHS))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "scale": 0.1}
    made = results(plan, q)
    enqueue(library, "varlen", plan, **given, **made)
    dout, dlse = torch.randn_like(made["out"]), torch.randn_like(made["lse"])
    found = {f"d{name}": torch.zeros_like(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    given |= {"dout": dout, "dlse": dlse} | made
    enqueue(library, "backward_varlen", registry.plan_of(by), **given, **found)
    for (top, bottom), (first, last) in zip(
        pairwise(at_q.tolist()), pairwise(at_k.tolist()), strict=True
    ):
        rows, keys = slice(top, bottom), slice(first, last)
        if top == bottom or first == last:
            assert not any(found[f"d{x}"][rows if x == "q" else keys].any() for x in "qkv")
            continue
        of = (x[None] for x in (dout[rows], q[rows], k[keys], v[keys]))
        expected = gradients(*of, mask=MASKS["causal"], scale=0.1, dlse=dlse[None, :, rows])[2:]
        own = (found["dq"][rows], found["dk"][keys], found["dv"][keys])
        for one, fine in zip(own, expected, strict=True):
            off = (one.double() - fine[0]).abs().max().item()
            assert off <= 8 * 2.0**-11 * (1 + fine.abs().max().item()), (top, bottom)


# ---- a package for torch ------------------------------------------------------------------------

# What a program does with a package, which it has as `package`; it prints what was right.
PROGRAM = """
from itertools import pairwise

LENGTHS = [(333, 333), (0, 7), (128, 1000), (3, 0), (1, 130), (300, 200)]


def offsets(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).cuda()


def inputs(dtype, head_dim, lengths):
    at = [offsets(side) for side in zip(*lengths)]
    rows = [int(one[-1]) for one in at]
    shapes = (rows[0], 6), (rows[1], 2), (rows[1], 2)
    made = [torch.randn(*shape, head_dim, device="cuda").to(dtype) for shape in shapes]
    return made, at


def exact(q, k, v, at_q, at_k, causal):
    outs, sums = [], []
    for (top, bottom), (first, last) in zip(pairwise(at_q.tolist()), pairwise(at_k.tolist())):
        one, key, value = q[top:bottom], k[first:last], v[first:last]
        key, value = (x.repeat_interleave(3, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", one, key) * q.shape[2] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda")
        if causal:
            seen = seen.tril(scores.shape[2] - scores.shape[1])
        some = seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, -torch.inf)
        p = scores.masked_fill(~some, 0).softmax(-1) * some
        outs.append(torch.einsum("hqk,khd->qhd", p, value))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


compiled = torch.compile(package.attention_varlen, fullgraph=True)
for dtype, head_dim, causal, bound in (
    (torch.float16, 64, True, 5e-3),
    (torch.bfloat16, 128, False, 3e-2),
):
    for lengths in (LENGTHS, LENGTHS[2:], [(7, 7)] * 50):
        given, at = inputs(dtype, head_dim, lengths)
        out, lse = package.attention_varlen(*given, *at, causal=causal, return_lse=True)
        right, sums = exact(*(x.double() for x in given), *at, causal)
        assert (out.double() - right).abs().max() < bound
        seen = sums.isfinite()
        assert torch.equal(seen, lse.isfinite()) and (lse - sums)[seen].abs().max() < 1e-3
        assert torch.equal(package.attention_varlen(*given, *at, causal=causal), out)
        assert torch.equal(compiled(*given, *at, causal=causal), out)
    print("packed", dtype)

    given, at = inputs(dtype, head_dim, [(100, 100)] * 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = package.attention_varlen(*given, *at, causal=causal)
    for lengths in ([(100, 100)] * 4, [(1, 1), (250, 250), (0, 0), (149, 149)]):
        for one, new in zip(at, (offsets(side) for side in zip(*lengths))):
            one.copy_(new)
        graph.replay()
        assert torch.equal(captured, package.attention_varlen(*given, *at, causal=causal))
    print("captured", dtype)

given, at = inputs(torch.float16, 64, LENGTHS)
given = [tensor.requires_grad_() for tensor in given]
fine = [tensor.detach().double().requires_grad_() for tensor in given]
dout = torch.randn_like(given[0])
right, _ = exact(*fine, *at, True)
wanted = torch.autograd.grad(right, fine, dout.double())
for call in (package.attention_varlen, compiled):
    out = call(*given, *at, causal=True)
    for one, other in zip(torch.autograd.grad(out, given, dout), wanted):
        off = (one.double() - other).abs().max()
        assert off <= 8 * 2.0**-11 * (1 + other.abs().max()), off
print("gradients")

q8, k8, v8 = (tensor.detach().to(torch.float8_e4m3fn) for tensor in given)
scales = torch.full((len(LENGTHS), 6), 0.5, device="cuda")
out = package.attention_varlen(q8, k8, v8, *at, causal=True, q_descale=scales)
right, _ = exact(q8.double() * 0.5, k8.double(), v8.double(), *at, True)
assert (out.double() - right).norm() < 0.1 * right.norm()
print("e4m3")
"""
RIGHT = [
    *(
        f"{what} torch.{dtype}"
        for dtype in ("float16", "bfloat16")
        for what in ("packed", "captured")
    ),
    *("gradients", "e4m3"),
]


def test_a_package_for_torch_takes_packed_sequences(hopper: None, tmp_path: Any) -> None:
    slugs = [slug for slugs in SLUGS.values() for slug in slugs]
    assert printed_by(PROGRAM, "torch", slugs, tmp_path) == RIGHT
