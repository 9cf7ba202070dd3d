"""attention_varlen(q, k, v, …): varlen sequences in, the attention of each with itself out.

The kernel is that which a dispatch table has for the card, dtype, head dims and mask, else the
committed one of these, or one that is derived. It is built at its first use; on CPU tensors its
schedule is emulated, and nothing is built.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.expr.canonical import Expression
from fagen.masking import Window
from fagen.runtime import autocast
from fagen.runtime.argument_types import FAILURES, explain, flag, number, refuse_other_types
from fagen.runtime.arguments import (
    E4M3,
    descale_of,
    key_of,
    refuse_blocks,
    refuse_only_fp8,
    settled,
    told,
)
from fagen.runtime.attention import prepared
from fagen.runtime.autocast import anywhere
from fagen.runtime.backward import results
from fagen.runtime.call import Choice, Door, slug_of, traced
from fagen.runtime.offsets import twice, used_queries
from fagen.variants import described

VARLEN = Door(
    "attention_varlen",
    partial(key_of, varlen=True),
    "the kernel is not ready: call fagen.prepare_varlen(…) for this problem and device first; ",
)
_PACKED = "(total, heads, head_dim), sequence after sequence"


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | Tensor = False,
    window: Window = None,
    mask: str | Expression | None = None,
    softcap: float | None = None,
    score: str | Expression | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    schedule: Choice = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_mean: Tensor | None = None,
    k_mean: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of sequences that lie one after another, each of its own length.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv) in fp16 or bf16 on one Hopper GPU, or
    on the CPU, where the schedule is emulated; H a multiple of Hk. Any strides that are multiples
    of 16 bytes will do, with the last dimension contiguous. Rows cu_seqlens_q[i] …
    cu_seqlens_q[i + 1] - 1 of q are the queries of sequence i, and such rows of k and v by
    cu_seqlens_k its keys: (B + 1) each, int32, on the device of q, rising; without cu_seqlens_k
    there are as many keys as queries. With seqused_k, (B) in int32, only so many of a sequence's
    keys are seen, the first ones, and with seqused_q, (B) in int32, only so many of its queries
    see any: rows behind them are as those that see no key. The causal mask is aligned to the bottom
    right of each sequence, to the last query and key that are used.
    `causal`, `window`, `mask`, `softcap`, `score`, `sinks` and what is `given` are as of
    attention(…), (B,) where they are of sequences, and (total_q,) where of queries.
    scale is 1/√D if left out. Under torch.autocast q, k and v in fp32, or in several dtypes, are
    cast to its dtype, as torch's own attention does.

    Or q, k and v in e4m3, as `quantize` makes them of q[None] and so on, each with its descales:
    what its numbers are to be multiplied by, in fp32, one for all (no dimensions), or one for each
    head of a sequence, (B, H) or (B, Hk), where 1 for B or H is one for all of them; of v also one
    for each column, (B, Hk, Dv). v_mean (B, Hk, Dv) and k_mean (B, Hk, D), in fp32, are what was
    taken off the columns of v and k before they were quantised. out_dtype is bf16 if left out, or
    fp16. These arguments are for e4m3 alone.

    Lengths are read on the device alone, so that a captured call can be replayed with others. No
    sequence sees anything of another, nor of rows that belong to none, whatever they hold; offsets
    that lead out of a tensor are cut off at its end. max_seqlen_q and max_seqlen_k change nothing:
    they are there for callers that have them, and tell fagen.recording of lengths.

    Returns out (total_q, H, Dv), and with return_lse also the log-sum-exp (H, total_q) in fp32,
    natural logarithm: zeros and minus infinity, or its sink, for a row that sees no key. What rows
    of no sequence hold is left open.

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else that which a
    dispatch table has for this card, dtype, head dims and mask, else that which `schedules/` has,
    else one that is derived, which an UntunedWarning says once; its first use builds it. No choice
    is by lengths or by how many sequences there are. Where a CUDA graph is captured it must have
    been readied by prepare_varlen(…), or by an earlier call of its dtype, head dims, mask and
    schedule.

    It has gradients, by a kernel of its own kind that is chosen in the same way, but that a row of
    a table may be for some mean lengths of a sequence: those of q, k and v, also through the
    log-sum-exp, and zeros in rows of no sequence and of keys that none sees.
    That of q is a sum in any order, whose last bits may differ from call to call, unless
    `deterministic` or torch.use_deterministic_algorithms(True) asks for one order. All else is the
    same in each call anyway.

    Raises ValueError for a wrong argument, also where a gradient would be needed that no kernel
    computes, or under torch.func; ScheduleError where `schedule` computes something else or cannot
    be read, or where a dispatch table is wrong; DeviceError where the GPU is no Hopper;
    ToolchainError and BuildError where the kernel cannot be built; FagenError where it is not ready
    and cannot be built now.
    """
    try:
        variant: Any = causal
        values: tuple[Any, ...] = ()
        by_sequence: tuple[str, ...] = ()
        if (given or window is not None or mask is not None or softcap is not None) or (
            (score is not None or sinks is not None) or (causal is not False and causal is not True)
        ):
            variant, values, by_sequence = told(
                *(attention_varlen, causal, window, mask, softcap, score, sinks, given), q, k, v
            )
        is_traced = is_compiling()
        if is_traced or anywhere():
            q, k, v = autocast.cast(q, k, v)
        is_flag = return_lse is False or return_lse is True
        return_lse = return_lse if is_flag else flag("return_lse", return_lse)
        q_shape, v_shape = q.shape, v.shape
        if not len(q_shape) == len(v_shape) == k.dim() == 3:
            _refuse_rank(q=q, k=k, v=v)
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        if not (
            cu_seqlens_q.dim() == cu_seqlens_k.dim() == 1
            and cu_seqlens_q.numel() > 0
            and cu_seqlens_k.numel() > 0
        ):
            _refuse_no_offsets(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        of_fp8: tuple[Tensor | None, ...] = ()
        if q.dtype == E4M3:
            q_descale = descale_of("q_descale", q_descale)
            k_descale = descale_of("k_descale", k_descale)
            refuse_blocks("q_descale", q_descale)
            refuse_blocks("k_descale", k_descale)
            of_fp8 = q_descale, k_descale, descale_of("v_descale", v_descale), v_mean, k_mean
            if schedule is None:
                out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        elif not (q_descale is k_descale is v_descale is v_mean is k_mean is out_dtype is None):
            refuse_only_fp8(q.dtype, "q", locals())
        parts = q.device, q.dtype, q_shape[2], v_shape[2], variant, schedule, out_dtype
        named = None
        if is_traced:
            choice = None if schedule is None else slug_of(schedule)
            parts = (*parts[:2], settled(parts[2]), settled(parts[3]), variant, choice, out_dtype)
            named, kernel = traced("attention_varlen", None, *parts)
        else:
            kernel = VARLEN.known.get(parts) or VARLEN.find(
                VARLEN.ready(VARLEN.key_of(*parts)), None, parts
            )
            if VARLEN.note is not None:
                VARLEN.note(parts, q_shape, v_shape, cu_seqlens_q.shape, max_seqlen_q, max_seqlen_k)
        if seqused_q is not None:
            pairs = zip(by_sequence, values, strict=True)
            more = {name: value for name, value in pairs if name}
            refuse_wrong_lengths(seqused_q, cu_seqlens_q, cu_seqlens_k, seqused_k, **more)
            at = used_queries(seqused_q, cu_seqlens_q, cu_seqlens_k, seqused_k)
            cu_seqlens_q, cu_seqlens_k, seqused_k = at
            of_fp8 = tuple(map(twice, of_fp8))
            values = tuple(
                x.repeat_interleave(2) if name else x
                for name, x in zip(by_sequence, values, strict=True)
            )
        if scale is None:
            scale = kernel.scale
        elif type(scale) is not float:
            scale = number("scale", scale)
        arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k, scale, *values, seqused_k, *of_fp8)
        return results(VARLEN.call, kernel, arguments, return_lse, deterministic, named)
    except FAILURES as error:
        if not is_compiling():  # torch says then what was raised
            explain(error, attention_varlen, locals())
        raise


def _refuse_rank(**tensors: Tensor) -> None:
    """Raise ValueError for what are no rows of sequences."""
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ValueError(
                f"attention_varlen: {name} has {tensor.dim()} dimensions; it must have 3: "
                f"{_PACKED}; fagen.attention takes sequences of one length, (batch, seqlen, heads, "
                "head_dim)"
            )


def _refuse_no_offsets(**tensors: Tensor) -> None:
    """Raise ValueError for what are no offsets of sequences."""
    for name, offsets in tensors.items():
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise ValueError(
                f"attention_varlen: {name} has shape {tuple(offsets.shape)}; it must be (batch + "
                "1): where each sequence begins, and the end of the last"
            )


def refuse_wrong_lengths(
    seqused_q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    **more: Tensor,
) -> None:
    """Raise ValueError where lengths of queries, or what is paired with them, fit no sequences."""
    batch = cu_seqlens_q.shape[0] - 1
    for name, lengths, expected in (
        ("seqused_q", seqused_q, batch),
        ("cu_seqlens_k", cu_seqlens_k, batch + 1),
        ("seqused_k", seqused_k, batch),
        *((name, numbers, batch) for name, numbers in more.items()),
    ):
        if lengths is None:
            continue
        if lengths.shape != (expected,) or lengths.dtype != torch.int32:
            extra = "" if expected == batch else " + 1"
            raise ValueError(
                f"attention_varlen: {name} has shape {tuple(lengths.shape)} in {lengths.dtype}; it "
                f"must be (batch{extra} = {expected}) in torch.int32"
            )
        if lengths.device != cu_seqlens_q.device:
            raise ValueError(
                f"attention_varlen: {name} is not on the device of cu_seqlens_q; "
                f"{name}.to(cu_seqlens_q.device) moves it there"
            )


def prepare_varlen(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: Window = None,
    mask: str | Expression | None = None,
    softcap: float | None = None,
    score: str | Expression | None = None,
    sinks: torch.dtype | str | None = None,
    schedule: Choice = None,
    device: torch.device | str | None = None,
    out_dtype: torch.dtype | str | None = None,
    gradient: bool = False,
    deterministic: bool = False,
    progress: Callable[[str], None] | None = None,
    **given: Any,
) -> str:
    """Ready the kernel that attention_varlen(…) would use for such tensors; return its slug.

    dtype is torch's or a schedule's word for it, and so is out_dtype, which is for e4m3 alone.
    `window`, `mask`, `softcap` and `score` are as of the call, and what is given by name may be
    left out; sinks is their dtype.
    head_dim_v is head_dim if left out. On `device`, by default the current GPU, the kernel is
    built, loaded and run once on a single key, after which calls can be captured; on a CPU there is
    nothing to build. With `gradient` the kernel of the backward pass is built too: with
    `deterministic` that of calls that ask for it. `progress` is called with a line before what
    takes long. Raises as attention_varlen does, and ValueError for deterministic without gradient.
    """
    if given:
        # a name that is unknown is told first
        described(prepare_varlen, False, None, mask, None, score, None, given)
    refuse_other_types(prepare_varlen, locals())
    return prepared(VARLEN, prepare_varlen, **locals())
