"""combine(outs, lses, …): partial outputs of several splits of the keys in, one output out."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fagen.kinds.combine.keys import Schedule
from fagen.kinds.sinks import NO_SINK
from fagen.runtime.argument_types import names_types, refuse_tangents
from fagen.runtime.arguments import schedule_of, settled, word_of
from fagen.runtime.call import CallKey, Door, traced
from fagen.vocab import PARTIALS


def _key(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    out_dtype: torch.dtype,
    layout: str,
    sink: torch.dtype | None = None,
) -> CallKey:
    """The key of a call; ValueError where no kernel is what its arguments amount to."""
    schedule = schedule_of(
        Schedule,
        dtype=word_of(dtype, PARTIALS),
        out_dtype=word_of(out_dtype, PARTIALS),
        head_dim=settled(head_dim),
        layout=layout,
        sink=NO_SINK if sink is None else word_of(sink, PARTIALS),
    )
    return CallKey(device, derived=(schedule,))


COMBINE = Door(
    "combine",
    _key,
    "the kernel is not ready: call fagen.combine(…) once, with such arguments and on this device; ",
)


@names_types
def combine(
    outs: Tensor,
    lses: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    num_splits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine what attention gave for several splits of the keys to what it gives for all.

    outs: (splits, B, Sq, H, Dv) in fp32, fp16 or bf16, each split normalised by its own sum; Dv a
    multiple of 8 up to 512. lses: (splits, B, H, Sq) in fp32, their log-sum-exps in natural
    logarithm. Any strides that are multiples of 16 bytes will do for outs, any for lses, with the
    last dimension of each contiguous.

    Without B, rows of several sequences are packed one after the other: outs (splits, total, H,
    Dv), lses (splits, H, total). num_splits (B,) and cu_seqlens (B + 1,), int32, then say how many
    splits each sequence has and where it begins and ends; what lies beyond a sequence's splits is
    not read, and may hold anything. They go together; without them all rows have all splits.

    Returns (out, lse): (B, Sq, H, Dv) or (total, H, Dv) in `out_dtype`, which is outs' if left out,
    and (B, H, Sq) or (H, total) in fp32:

        lse = log sum over splits of exp(lses)
        out = sum over splits of outs · exp(lses - lse)

    combined in fp32 in the order of the splits, each operation rounded by itself (docs/call.md):
    the bits of a row depend on its own splits and their order alone. A split with an LSE of minus
    infinity saw no key: its output is not used, and may hold anything. Where no split saw any, out
    is 0 and lse minus infinity.

    sinks: (H,) in fp32, fp16 or bf16, one more logit of each row of a head, without a value: what
    makes splits leaves them out, and they join here, behind the last split, in the sum of lse.

    Raises ValueError for a wrong argument, also where a gradient would be needed; DeviceError where
    the GPU is no Hopper; ToolchainError and BuildError where the kernel cannot be built.
    """
    if outs.dim() not in (4, 5):
        raise ValueError(
            f"outs has {outs.dim()} dimensions; it must have 5: (splits, batch, seqlen, heads, "
            "head_dim), or packed 4: (splits, total, heads, head_dim)"
        )
    if (num_splits is None) != (cu_seqlens is None):
        name = "cu_seqlens" if num_splits is None else "num_splits"
        raise ValueError(f"num_splits and cu_seqlens go together; only {name} is given")
    varlen = num_splits is not None
    if varlen and outs.dim() != 4:
        raise ValueError(
            f"outs has {outs.dim()} dimensions; with num_splits and cu_seqlens rows are "
            "packed, 4: (splits, total, heads, head_dim)"
        )
    if lses.dim() != outs.dim() - 1:
        names = "(splits, heads, total)" if outs.dim() == 4 else "(splits, batch, heads, seqlen)"
        raise ValueError(f"lses has {lses.dim()} dimensions; beside such outs it must be {names}")
    layout = "varlen" if varlen else "dense"
    also = () if sinks is None else (sinks,)
    if forward_ad._current_level >= 0:
        refuse_tangents(outs, lses, *also)
    out_dtype = outs.dtype if out_dtype is None else out_dtype
    parts = outs.device, outs.dtype, outs.shape[-1], out_dtype, layout, *(x.dtype for x in also)
    if is_compiling():
        _, kernel = traced("combine", None, *parts[:2], settled(parts[2]), *parts[3:])
    else:
        kernel = COMBINE.known.get(parts) or COMBINE.find(COMBINE.ready(_key(*parts)), call=parts)
    if varlen:
        out, lse = kernel.results(outs, lses, *also, num_splits, cu_seqlens)
    elif outs.dim() == 5:
        out, lse = kernel.results(outs, lses, *also)
    else:
        out, lse = (result[0] for result in kernel.results(outs[:, None], lses[:, None], *also))
    return out, lse
