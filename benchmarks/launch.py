"""A kernel in, what a call of it costs beside its arithmetic out: host time, launches, memory.

    python benchmarks/launch.py     what training calls take of the host: half a GPU minute

These are fagen.attention's and, in the same process, those of torch's FlashAttention-2: forward and
backward by torch.autograd.grad, each pass alone, and both in one thread, without autograd's. All
take turns; a time is the median of five runs' medians.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from fagen.build import Binary
from fagen.errors import DeviceError
from fagen.kind import Plan
from fagen.measure.card import hopper
from fagen.measure.inputs import cell_of, inputs
from fagen.measure.peers import is_causal, ours, peer, tried
from fagen.measure.timing import Call
from fagen.measure.verification import contender_of
from fagen.problem import Cell, Problem, Sizes
from fagen.runtime import op
from fagen.runtime.arguments import dtype_of
from fagen.runtime.attention import attention
from fagen.runtime.decode import attention_decode
from fagen.runtime.varlen import attention_varlen
from fagen.vocab import PASSES

SMALL = Sizes(1, 1, 1, 64, 64)  # one tile: the GPU is done before the host asks again
SMALL_DECODING = Sizes(1, 32, 8, 1, 256)  # a token after so few keys: as soon
BATCH = 100  # calls; a stream takes some thousand before the host has to wait for the GPU
BATCHES = 50
TURNS, RUNS = 25, 5  # calls before the next one's turn; runs of BATCHES turns
PROFILED = 10  # calls


@dataclass(frozen=True)
class LaunchCost:
    """Of one call: the host's time, what it has the GPU do, and the blocks of memory it takes."""

    host_microseconds: float
    kernels: float
    memsets: float
    copies: float
    allocations: float


def launch_costs(plan: Plan, binary: Binary) -> dict[str, LaunchCost]:
    """The costs of the kernel's two torch ops, of fagen.attention, and of cuDNN where it can.

    Of gradients those of the one op, and of cuDNN's backward pass without autograd's share; of
    decoding those of fagen.attention_decode and of torch's attention as well. All compute the same
    small problem.  Raises DeviceError without a Hopper GPU, or where torch's profiler sees nothing
    of it.
    """
    hopper()
    pass_ = PASSES[Problem.searched(plan.schedule).kind]
    cell = cell_of(plan, SMALL_DECODING if pass_.computes else SMALL)
    q, k, v = inputs(cell)
    make = _backward if pass_.gradients else _decoding if pass_.computes else _forward
    calls = make(plan, binary, cell, q, k, v)
    # the profiler comes last: what it leaves behind slows launches down
    times = {name: host_microseconds(call) for name, call in calls.items()}
    return {
        name: LaunchCost(round(times[name], 2), **launches(call), allocations=allocations(call))
        for name, call in calls.items()
    }


def _backward(
    plan: Plan, binary: Binary, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Call]:
    calls = {"torch op": ours(binary).bind(cell, q, k, v)}
    with suppress(DeviceError):
        calls["cuDNN"] = peer("cudnn").bind(cell, q, k, v)
    return calls


def _forward(
    plan: Plan, binary: Binary, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Call]:
    out_only = op.out_only(op.load(binary))
    kernel = getattr(torch.ops.fagen, plan.slug)
    arguments = contender_of(plan).arguments(plan, q, k, v)
    problem, causal = Problem.of(plan.schedule), is_causal(cell)
    calls = {
        "torch op": Call(lambda: kernel(*arguments)[0]),
        "torch op without lse": Call(lambda: out_only(*arguments)),
    }
    tensors, keys = as_called(plan, problem, arguments)
    if problem.varlen:
        packed = Call(lambda: attention_varlen(*tensors, causal=causal, **keys))
        calls["fagen.attention_varlen"] = packed
    else:
        calls["fagen.attention"] = Call(lambda: attention(*tensors, causal=causal, **keys))
    return calls | _cudnn(_sdpa(q, k, v, is_causal=causal))


def _decoding(
    plan: Plan, binary: Binary, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Call]:
    """Calls with lengths: a launch that merges follows the first."""
    used = torch.full((len(q),), k.shape[1], dtype=torch.int32, device=q.device)
    out_only = op.out_only(op.load(binary))
    kernel = getattr(torch.ops.fagen, plan.slug)
    arguments = contender_of(plan).arguments(plan, q, k, v)
    torchs = _sdpa(q, k, v, enable_gqa=True)
    calls = {
        "torch op": Call(lambda: kernel(*arguments, seqused_k=used)[0]),
        "torch op without lse": Call(lambda: out_only(*arguments, seqused_k=used)),
        "fagen.attention_decode": Call(lambda: attention_decode(q, k, v, seqused_k=used)),
        "torch's attention": Call(torchs),
    }
    return calls | _cudnn(torchs)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **how: bool) -> Callable[[], Tensor]:
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return lambda: functional.scaled_dot_product_attention(query, key, value, **how)


def _cudnn(attend: Callable[[], Tensor]) -> dict[str, Call]:
    """Torch's attention by cuDNN alone, where that can."""
    with suppress(DeviceError):
        bare = Call(attend, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        return {"cuDNN": tried(bare, "cuDNN")}
    return {}


def as_called(
    plan: Plan, problem: Problem, arguments: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the op takes as the call over it does: tensors by place, the rest by name."""
    by_place = 5 if problem.varlen else 3
    rest = zip(plan.signature.arguments[by_place:], arguments[by_place:], strict=True)
    keys = {argument.name: value for argument, value in rest if argument.name != "scale"}
    if problem.v_layout:  # e4m3
        keys["out_dtype"] = dtype_of(problem.out_dtype or "")
        if not problem.varlen:
            keys |= {"v_layout": problem.v_layout, "scale_rows": problem.scale_rows}
    return arguments[:by_place], keys


def host_microseconds(call: Call) -> float:
    """The time until a call returns, not waiting for the GPU: a median over batches of calls."""
    with call.within():
        _batch(call.run)
        return statistics.median(_batch(call.run) for _ in range(BATCHES))


def _batch(run: Callable[[], Any], calls: int = BATCH) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - began) / calls / 1e3


def launches(call: Call) -> dict[str, float]:
    """Kernels, memsets and copies of one call, on average over a few under torch's profiler."""
    with call.within(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            call.run()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
    if not names:
        raise DeviceError("torch's profiler sees nothing of what the GPU does")
    kinds = {"Memset": "memsets", "Memcpy": "copies"}
    counts = Counter(kinds.get(name.split(" ")[0], "kernels") for name in names)
    return {kind: counts[kind] / PROFILED for kind in ("kernels", *kinds.values())}


def allocations(call: Call) -> float:
    """Blocks of device memory that one call takes from torch's allocator."""
    with call.within():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(PROFILED):
            call.run()
        return float(torch.cuda.memory_stats()["allocation.all.allocated"] - before) / PROFILED


# ---- training calls ------------------------------------------------------------------------------


def _training_calls(
    attend: Callable[..., Tensor], shape: tuple[int, ...]
) -> dict[str, Callable[[], Any]]:
    leaves = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(3)]
    dout = torch.randn_like(leaves[0])
    for leaf in leaves:
        leaf.requires_grad_()
    out = attend(*leaves)

    def both() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    def both_in_one_thread() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    return {
        "forward + backward": both,
        "in one thread": both_in_one_thread,
        "forward": lambda: attend(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def training_microseconds() -> dict[str, tuple[float, float]]:
    """The host's time of training calls: of fagen.attention, and of FlashAttention-2."""
    hopper()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torchs = _training_calls(functional.scaled_dot_product_attention, (1, 1, 64, 128))
        fagens = _training_calls(attention, (1, 64, 1, 128))
        calls = [call for name in fagens for call in (fagens[name], torchs[name])]
        medians = []
        for _ in range(RUNS):
            turns = [[_batch(call, TURNS) for call in calls] for _ in range(BATCHES)]
            medians.append([statistics.median(times) for times in zip(*turns, strict=True)])
    times = [statistics.median(runs) for runs in zip(*medians, strict=True)]
    return {name: (times[2 * i], times[2 * i + 1]) for i, name in enumerate(fagens)}


if __name__ == "__main__":
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; µs of the host, and the ratio"
    )
    for name, (fagens, torchs) in training_microseconds().items():
        print(f"{name:20} fagen {fagens:6.1f}  FA2 {torchs:6.1f}  {fagens / torchs:.2f}")
