"""attention(q, k, v, …): tensors in, attention out, by the kernel that `schedules/` has for them.

Which one that is, its dispatch table says for each card and size, or a user's own table.
A kernel is built at its first use, or ahead of time by prepare(…). On CPU tensors its schedule is
emulated, and nothing is built.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.expr.canonical import Expression
from fagen.masking import Window
from fagen.runtime import autocast
from fagen.runtime.argument_types import (
    FAILURES,
    explain,
    flag,
    number,
    refuse_negative,
    refuse_order_alone,
    refuse_other_types,
)
from fagen.runtime.arguments import (
    E4M3,
    descale_of,
    dtype_of,
    key_of,
    refuse_only_fp8,
    refuse_other_layout,
    refuse_word,
    settled,
    told,
    told_scale_rows,
)
from fagen.runtime.autocast import anywhere
from fagen.runtime.backward import SOONER, prepare_gradients, results
from fagen.runtime.call import Choice, Door, Sizes, placed, slug_of, traced
from fagen.variants import described
from fagen.vocab import V_LAYOUTS

ATTENTION = Door(
    "attention",
    key_of,
    "the kernel is not ready: call fagen.prepare(…) for this problem and device first; ",
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    v_layout: str | None = None,
    scale_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v, with a causal mask aligned to the bottom right if asked.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in fp16 or bf16 on one Hopper GPU, or on
    the CPU, where the schedule is emulated; H a multiple of Hk. Any strides that are multiples of
    16 bytes will do, with the last dimension contiguous. scale is 1/√D if left out. Under
    torch.autocast q, k and v in fp32, or in several dtypes, are cast to its dtype, as torch's own
    attention does.

    `causal`, `window` and `mask` are and-ed, and each says which keys a query at q_pos sees, whose
    keys count from its sequence's first one: the last query is at the last key. causal may be int32
    (B,): 1 causal, 0 full. window is W, the query's own key and W - 1 before, and without causal
    as many behind; or (left, right), both included, where None or -1 is open. mask is a word
    (causal, full, chunked, prefix, document), a text, or what `fagen.mask` makes of a function;
    what it takes is `given` by name: chunk an int, prefix int32 (B,), first and last int32 (B, Sq).
    Before masks hide keys scores are capped by softcap, where that is above 0, or become what
    `score` says of them: a word, a text, or what `fagen.score` makes of a function. sinks (H,), in
    fp32, fp16 or bf16, are one more logit of each row of a head, without a value. One kernel is for
    all windows, caps and sinks, and for all that is given to a mask or a score. See docs/call.md.

    Or q, k and v in e4m3, as `quantize` makes them, each with its descales: what its numbers are to
    be multiplied by, in fp32, one for all (no dimensions), one for each head (B, H), or one for
    each block of a head's rows (B, H, blocks) of q and k and for each column (B, Hk, Dv) of v; 1
    for a dimension along which all share theirs. How many rows make a block is told from the
    numbers of blocks, or by `scale_rows`, with 0 for none. v_mean (B, Hk, Dv) and k_mean
    (B, Hk, D), in fp32, are what was taken off the columns of v and k before they were quantised.
    v_layout is "rows", which is meant if it is left out, for v as above, or "columns" for v (B, Hk,
    Dv, Sk to 16). out_dtype is bf16 if left out, or fp16. These arguments are for e4m3 alone.

    Returns out (B, Sq, H, Dv), and with return_lse also the log-sum-exp (B, H, Sq) in fp32, natural
    logarithm: zeros and minus infinity, or its sink, for a row that sees no key.

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else the one that a
    dispatch table has for this card, dtype, head dims, mask and numbers of query rows and of keys,
    else the one that `schedules/` has, else one that is derived, which an UntunedWarning says
    once, with the command that searches for a better one; its first use builds it, under
    torch.compile while it traces. Where a CUDA graph is captured it must have been readied, by
    prepare() or another call. Traced with sizes left open, a call counts as one of many query rows
    and of 131,072 keys.

    In 16 bits it has gradients, without sinks so far, by a kernel of its own kind that is chosen in
    the same way, and built at the first call that needs it: those of q, k and v, also through the
    log-sum-exp. That of q is a sum in any order, whose last bits may differ from call to call,
    unless `deterministic` or torch.use_deterministic_algorithms(True) asks for one order. All else
    is the same in each call anyway.

    Raises ValueError for a wrong argument, also where a gradient would be needed that no kernel
    computes, or under torch.func, a dtype or a head dim that no kernel takes; ScheduleError where
    `schedule` computes something else, or where it or a dispatch table cannot be read; DeviceError
    where the GPU is no Hopper; ToolchainError and BuildError where the kernel cannot be built;
    FagenError where it is not ready and cannot be built now.
    """
    try:
        is_traced = is_compiling()
        variant: Any = causal
        is_plain = causal is False or causal is True
        values: tuple[Any, ...] = ()
        if (
            not is_plain
            or given
            or (window is not None or mask is not None)
            or (softcap is not None or score is not None or sinks is not None)
        ):
            is_plain = False
            variant, values, _ = told(
                attention, causal, window, mask, softcap, score, sinks, given, q, k, v
            )
        elif (
            (SOONER.attend and not is_traced and ATTENTION.note is None)
            and (schedule is None and q_descale is None and k_descale is None and v_descale is None)
            and (v_mean is None and k_mean is None and v_layout is None)
            and (scale_rows is None and out_dtype is None)
        ):
            sooner = SOONER.attend(q, k, v, causal, scale, return_lse, deterministic)
            if sooner is not None:
                return sooner
        if is_traced or anywhere():
            q, k, v = autocast.cast(q, k, v)
        is_flag = return_lse is False or return_lse is True
        return_lse = return_lse if is_flag else flag("return_lse", return_lse)
        # Python's share of a call: asking a tensor costs more than all else here, so each once
        dtype, q_shape, k_shape, v_shape = q.dtype, q.shape, k.shape, v.shape
        if len(q_shape) != 4 or len(v_shape) != 4:
            raise ValueError(
                f"q has {len(q_shape)} dimensions and v has {len(v_shape)}; both must have 4: "
                "(batch, seqlen, heads, head_dim)"
            )
        width, named = v_shape[3], None
        of_fp8: tuple[Any, ...] = ()
        more: tuple[Any, ...] = ()
        kernel: Any
        if dtype == E4M3:
            q_descale = descale_of("q_descale", q_descale)
            k_descale = descale_of("k_descale", k_descale)
            of_fp8 = q_descale, k_descale, descale_of("v_descale", v_descale), v_mean, k_mean
            v_layout = "rows" if v_layout is None else v_layout
            refuse_other_layout(k, v, v_layout)
            if schedule is None:
                out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
                if scale_rows is None:
                    scale_rows = told_scale_rows(q, k, q_descale, k_descale)
            more = out_dtype, v_layout, scale_rows
            width = v_shape[2] if v_layout == "columns" else width
        elif not (
            (q_descale is None and k_descale is None and v_descale is None)
            and (v_mean is None and k_mean is None)
            and (v_layout is None and scale_rows is None and out_dtype is None)
        ):
            refuse_only_fp8(dtype, "q", locals())
        device = q.device
        if is_traced:
            choice = None if schedule is None else slug_of(schedule)
            parts = device, dtype, settled(q_shape[3]), settled(width), variant, choice, *more
            named, kernel = traced("attention", _sizes(q_shape, k_shape), *parts)
        else:
            call = device, dtype, q_shape, k_shape, v_shape, variant, schedule, more
            try:
                kernel = ATTENTION.known.get(call)
            except TypeError:  # sizes that are left open are no keys
                kernel = None
            if kernel is None:
                sizes, columns = _sizes(q_shape, k_shape), (settled(q_shape[3]), settled(width))
                parts = device, dtype, *columns, variant, schedule, *more
                ready = ATTENTION.alike.get(parts) or ATTENTION.ready(key_of(*parts), parts)
                kernel = ATTENTION.find(ready, sizes, call)
            if ATTENTION.note is not None:
                ATTENTION.note(call)
        if scale is None:
            scale = kernel.scale
        elif type(scale) is not float:
            scale = number("scale", scale)
        if SOONER.attend and not is_traced and schedule is None and is_plain:
            SOONER.remember(kernel, q, k, v, causal)
        arguments = (q, k, v, scale, *values, *of_fp8) if of_fp8 or values else (q, k, v, scale)
        return results(ATTENTION.call, kernel, arguments, return_lse, deterministic, named)
    except FAILURES as error:
        if not is_compiling():  # torch says then what was raised
            explain(error, attention, locals())
        raise


def _sizes(q: torch.Size, k: torch.Size) -> Sizes | None:
    """What chooses a kernel; None where the op will refuse k."""
    return (q[0], q[2], k[2], q[1], k[1]) if len(k) == 4 else None


def prepare(
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
    seqlen: int | None = None,
    rows: int | None = None,
    schedule: Choice = None,
    device: torch.device | str | None = None,
    v_layout: str | None = None,
    scale_rows: int | None = None,
    out_dtype: torch.dtype | str | None = None,
    gradient: bool = False,
    deterministic: bool = False,
    progress: Callable[[str], None] | None = None,
    **given: Any,
) -> str:
    """Ready the kernel that attention(…) would use for such tensors; return its slug.

    It is the one for `seqlen` keys and `rows` query rows in all: batch · heads · seqlen_q. Where
    the dispatch table has several kernels by a size that is left out, or by what their tiles cost,
    all of them are readied, also those for few rows, and the slug is that for the most. A call that
    torch.compile or torch.export traces with sizes left open counts as one of many rows and of
    131,072 keys. `fagen.pick` names the kernel of one call.

    dtype is torch's or a schedule's word for it. `window`, `mask`, `softcap` and `score` are as of
    the call, and what is given by name may be left out; sinks is their dtype. On `device`, by
    default the current GPU, the kernel is built, loaded and run once on a single key, after which
    calls can be captured; on a CPU, the default where there is no GPU, there is nothing to build.
    In e4m3, v_layout and out_dtype are as of attention(…), and scale_rows is 0 if left out. With
    `gradient` the kernels of the backward pass are readied too: with `deterministic` those of calls
    that ask for it. `progress` is called with a line before what takes long. Raises as attention
    does, and ValueError for deterministic without gradient.
    """
    if given:
        # a name that is unknown is told first
        described(prepare, False, None, mask, None, score, None, given)
    refuse_other_types(prepare, locals())
    return prepared(ATTENTION, prepare, **locals())


def prepared(
    door: Door,
    function: Callable[..., Any],
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None,
    causal: bool,
    window: Window,
    mask: str | Expression | None,
    softcap: float | None,
    score: str | Expression | None,
    sinks: torch.dtype | str | None,
    given: dict[str, Any],
    schedule: Choice,
    device: torch.device | str | None,
    gradient: bool,
    deterministic: bool,
    progress: Callable[[str], None] | None,
    out_dtype: torch.dtype | str | None,
    rows: int | None = None,
    seqlen: int | None = None,
    **e4m3: Any,
) -> str:
    """Ready what calls of a door would use that are described so, as prepare(…) says."""
    refuse_order_alone(deterministic, gradient)
    refuse_negative(seqlen=seqlen, rows=rows)
    place, torchs = placed(device), dtype_of(dtype)
    more: tuple[Any, ...] = ()
    if torchs != E4M3:
        refuse_only_fp8(torchs, "dtype", e4m3 | {"out_dtype": out_dtype})
    else:
        v_layout, scale_rows = e4m3.get("v_layout"), e4m3.get("scale_rows")
        v_layout = "rows" if v_layout is None else v_layout
        refuse_word("v_layout", v_layout, V_LAYOUTS)
        out = None if out_dtype is None else dtype_of(out_dtype, "out_dtype")
        if schedule is None:
            out, scale_rows = out or torch.bfloat16, scale_rows or 0
        more = out, v_layout, scale_rows
    width = head_dim if head_dim_v is None else head_dim_v
    variant = described(function, bool(causal), window, mask, softcap, score, sinks, given)
    key = door.key_of(place, torchs, head_dim, width, variant, schedule, *more)
    table = door.rows(key)
    *others, most = table.slugs(rows, seqlen) if table else (schedule,)
    for slug in (*(other for other in dict.fromkeys(others) if other != most), most):
        kernel = door.prepare(key, slug, progress)
        if gradient:
            prepare_gradients(kernel, place, deterministic, rows, seqlen)
    return kernel.slug
