"""attention_varlen(q, k, v, …): sequences of any lengths, one after another, in; attention out.

The lengths are read on the GPU alone, so a captured call may be replayed with others.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from fagen.dispatch.choice import Choice, Served, candidates, for_few, for_keys, serving
from fagen.errors import UntunedWarning
from fagen.problem import Problem
from fagen.runtime import op
from fagen.runtime.arguments import E4M3, refuse_dtype, refuse_head_dims, surely, word_of
from fagen.runtime.checks import shape_of
from fagen.runtime.ready import first_ready, refuse_tracing

NOT_READY = (
    "the kernel is not ready: call fagen.attention_varlen(…) once, with such arguments and on this "
    "device; "
)


class Kind(NamedTuple):
    """What tells one kind of call from another."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def problem(self) -> Problem:
        """What is computed in such a call."""
        word, mask = word_of(self.dtype), "causal" if self.causal else "full"
        dims = self.head_dim, self.head_dim_v
        return Problem(word, *dims, mask, word, "", 0, lengths="varlen")


Kernel = tuple[op.Op, op.Op, op.Op]  # with the log-sum-exp, alone, direct

# What has been readied in this process. A call finds its kernel here or takes the long way once.
_ready: dict[tuple[Kind, Choice], Kernel] = {}
_served: dict[Kind, Served] = {}


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: Choice = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v of each of B sequences whose rows lie one after another.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv) in fp16 or bf16 on one Hopper GPU, or
    on the CPU, where the schedule is emulated; H a multiple of Hk. Any strides that are multiples
    of 16 bytes will do, with the last dimension contiguous.

    cu_seqlens_q and cu_seqlens_k, (B + 1,) in int32 on the same device, say at which row each
    sequence begins, and where the last one ends; left out, cu_seqlens_k is cu_seqlens_q. With
    seqused_k, (B,) in int32, a sequence sees so many of its keys, the first ones. A sequence may
    have no query or no key. The causal mask is aligned to the bottom right of each sequence: its
    last query sees its last key. Nothing of another sequence is seen, whatever it holds, nor what
    lies between sequences.

    Lengths are read on the GPU alone: the call waits for nothing, and in a CUDA graph they may be
    others at each replay. max_seqlen_q and max_seqlen_k say how long sequences are at most, where
    that is known: the choice of a kernel may go by the keys. The result never does: too large or
    too small is harmless. scale is 1/√D if left out.

    Returns out (total_q, H, Dv), and with return_lse also the log-sum-exp (H, total_q) in fp32,
    natural logarithm: zeros and minus infinity for a row that sees no key. A row that is of no
    sequence is not written, and may hold anything.

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else as of attention(…).
    Under torch.compile and CUDA graph capture an earlier call with such tensors must have readied
    it. There are no gradients yet.

    Raises ValueError for a wrong argument, also where a gradient would be needed; ScheduleError
    where `schedule` computes something else, or where it or a dispatch table cannot be read;
    DeviceError where the GPU is no Hopper; ToolchainError and BuildError where the kernel cannot be
    built; FagenError where it is not ready and cannot be built now.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions; it must have 3: (total, heads, head_dim), "
                "the rows of all sequences one after another; fagen.attention takes 4"
            )
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"cu_seqlens_k is missing: q has {q.shape[0]} rows and k has {k.shape[0]}, so that "
                "cu_seqlens_q cannot be meant for both"
            )
        cu_seqlens_k = cu_seqlens_q
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(
                f"{name} has shape {shape_of(offsets)}; it must be (B + 1,): where each sequence "
                "begins, and where the last one ends"
            )
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(most, int) and most < 0:
            raise ValueError(f"{name} is {most}; it must be 0 or more, or None where it is unknown")
    kind = Kind(q.device, q.dtype, q.shape[2], v.shape[2], causal)
    if schedule is None:
        schedule = _chosen(kind, q, k.shape[0] if max_seqlen_k is None else max_seqlen_k)
    with_lse, alone, direct = _ready.get((kind, schedule)) or _make_ready(kind, schedule)
    if scale is None:
        scale = kind.head_dim**-0.5
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, scale, seqused_k
    if return_lse:
        out_and_lse: tuple[Tensor, Tensor] = with_lse(*given)
        return out_and_lse
    if not (is_compiling() or _is_tracing() or peek_interpreter_stack()):
        out: Tensor = direct(*given)
        if not out.requires_grad:
            return out
    return alone(*given)  # refuses where a gradient is needed


def _chosen(kind: Kind, q: Tensor, keys: int) -> str | None:
    """The slug that tables have for such a call; None where they have none."""
    served = _served.get(kind) or _look_up(kind)
    if not served.by_keys:
        return served.always
    slug = for_keys(served.by_keys, keys, surely)
    if served.few and slug not in served.long:
        slug = for_few(served.few, q.numel(), surely) or slug
    return slug


def _look_up(kind: Kind) -> Served:
    """Look a kind of call up in the dispatch tables.  Raises ScheduleError where one is wrong."""
    refuse_tracing(NOT_READY)
    _refuse(kind)
    card = torch.cuda.get_device_name(kind.device) if kind.device.type == "cuda" else ""
    _served[kind] = serving(kind.problem, card)
    return _served[kind]


def _make_ready(kind: Kind, choice: Choice) -> Kernel:
    """The long way to a kernel: choose, build, load.  Raises as attention_varlen does."""
    refuse_tracing(NOT_READY)
    _refuse(kind)
    schedules, derived = candidates(kind.problem, choice)
    chosen, kernel = first_ready(schedules, kind.device, not_ready=NOT_READY)
    if derived:
        warnings.warn(
            f"no schedule was tuned for {kind.problem}: {chosen.slug} is derived. Others can be "
            "tried by fagen.attention_varlen(…, schedule=…)",
            UntunedWarning,
            stacklevel=3,
        )
    _ready[kind, choice] = kernel, op.alone(kernel), op.direct(kernel)
    return _ready[kind, choice]


def _refuse(kind: Kind) -> None:
    """Raise ValueError for what no kernel takes."""
    refuse_dtype(kind.dtype)
    if kind.dtype == E4M3:
        raise ValueError(
            "q is float8_e4m3fn, and sequences of any lengths are computed in fp16 and bf16 so "
            "far; fagen.attention takes one sequence at a time in e4m3"
        )
    refuse_head_dims(kind.head_dim, kind.head_dim_v, fp8=False)
