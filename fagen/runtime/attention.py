"""attention(q, k, v, …): tensors in, attention out, by the kernel that `schedules/` has for them.

Which one that is, its dispatch table says for each card and size, or a user's own table.
A kernel is built at its first use, or ahead of time by prepare(…). On CPU tensors its schedule is
emulated, and nothing is built.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fagen.argument_names import refuse_unknown_names
from fagen.dispatch.choice import (
    Choice,
    Narrow,
    Served,
    candidates,
    choose,
    for_few,
    for_keys,
    for_narrow,
    meant,
    serving,
    slugs_for,
)
from fagen.dispatch.rows import MOST
from fagen.errors import UntunedWarning
from fagen.picking import search_command
from fagen.problem import Problem, Sizes
from fagen.runtime import autocast, op
from fagen.runtime.argument_types import (
    UNCLEAR,
    flag,
    number,
    refuse_negative,
    refuse_order_alone,
    refuse_other_types,
    refuse_tangents,
    refuse_unreadable,
)
from fagen.runtime.arguments import (
    E4M3,
    USUAL_SCALES,
    descale_of,
    dtype_of,
    known,
    refuse_dtype,
    refuse_head_dims,
    refuse_only_fp8,
    refuse_other_layout,
    refuse_word,
    settled,
    surely,
    told_scale_rows,
    word_of,
)
from fagen.runtime.autocast import anywhere
from fagen.runtime.backward import with_gradient, with_gradient_by_name
from fagen.runtime.once import Once, untraced
from fagen.runtime.ready import first_ready, placed, run_once, slug_of
from fagen.schedule import Schedule
from fagen.vocab import OUT_DTYPES, SCALE_ROWS, V_LAYOUTS

# What tells one kind of call from another, as small as a lookup in each call wants it: the device,
# dtype, both head dims and `causal`, and in e4m3 the type of O, V's layout and scale_rows.
Kind = (
    tuple[torch.device, torch.dtype, int, int, bool]
    | tuple[torch.device, torch.dtype, int, int, bool, torch.dtype | None, str, int | None]
)
Kernel = tuple[op.Op, op.Op, op.Op, str]  # with the log-sum-exp, alone, direct; its slug
Kernels = Once[Choice, Kernel]

NOT_READY = "the kernel is not ready: call fagen.prepare(…) for this problem and device first; "

# By the slug of a table's row, rows of a KV head, KV heads and batch: the slug that it means.
_suited: dict[tuple[torch.device, str, int, int, int], str] = {}
_MOST_SUITED = 10_000

# What counts calls while they are recorded: kind, shapes of q and v, number of keys.
note: Callable[[Kind, torch.Size, torch.Size, int], None] | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
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
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v, with a causal mask aligned to the bottom right if asked.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in fp16 or bf16 on one Hopper GPU, or on
    the CPU, where the schedule is emulated; H a multiple of Hk. Any strides that are multiples of
    16 bytes will do, with the last dimension contiguous. scale is 1/√D if left out. Under
    torch.autocast q, k and v in fp32, or in several dtypes, are cast to its dtype, as torch's own
    attention does.

    Or q, k and v in e4m3, as `quantize` makes them, each with its descales: what its numbers are to
    be multiplied by, in fp32, one for all (no dimensions), one for each head (B, H), or one for
    each block of a head's rows (B, H, blocks) of q and k and for each column (B, Hk, Dv) of v; 1
    for a dimension along which all share theirs. How many rows make a block is told from the
    numbers of blocks, or by `scale_rows`, with 0 for none. v_mean (B, Hk, Dv) and k_mean
    (B, Hk, D), in fp32, are what was taken off the columns of v and k before they were quantised.
    v_layout is "rows", which is meant if it is left out, for v as above, or "columns" for v (B, Hk,
    Dv, Sk to 16). out_dtype is bf16 if left out, or fp16. These arguments are for e4m3 alone.

    Returns out (B, Sq, H, Dv), and with return_lse also the log-sum-exp (B, H, Sq) in fp32, natural
    logarithm: zeros and minus infinity for a row that sees no key.

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else the one that a
    dispatch table has for this card, dtype, head dims, mask and numbers of query rows and of keys,
    else the one that `schedules/` has, else one that is derived, which an UntunedWarning says
    once, with the command that searches for a better one; its first use builds it, under
    torch.compile while it traces. Where a CUDA graph is captured it must have been readied, by
    prepare() or another call. Traced with sizes left open, a call counts as one of many query rows
    and of 131,072 keys.

    In 16 bits it has gradients, by a kernel of its own kind that is chosen in the same way, and
    built at the first call that needs it: those of q, k and v, also through the log-sum-exp. That
    of q is a sum in any order, whose last bits may differ from call to call, unless `deterministic`
    or torch.use_deterministic_algorithms(True) asks for one order. All else is the same in each
    call anyway.

    Raises ValueError for a wrong argument, also where a gradient would be needed that no kernel
    computes, or under torch.func, a dtype or a head dim that no kernel takes; ScheduleError where
    `schedule` computes something else, or where it or a dispatch table cannot be read; DeviceError
    where the GPU is no Hopper; ToolchainError and BuildError where the kernel cannot be built;
    FagenError where it is not ready and cannot be built now.
    """
    try:
        if unknown:
            refuse_unknown_names(attention, unknown)
        traced = is_compiling()
        if traced or anywhere():
            q, k, v = autocast.cast(q, k, v)
        causal = causal if causal is False or causal is True else flag("causal", causal)
        is_flag = return_lse is False or return_lse is True
        return_lse = return_lse if is_flag else flag("return_lse", return_lse)
        # Python's share of a call: asking a tensor costs more than all else here, so each once
        dtype, q_shape, v_shape = q.dtype, q.shape, v.shape
        if len(q_shape) != 4 or len(v_shape) != 4:
            raise ValueError(
                f"q has {len(q_shape)} dimensions and v has {len(v_shape)}; both must have 4: "
                "(batch, seqlen, heads, head_dim)"
            )
        head_dim, keys = q_shape[3], v_shape[1]
        of_fp8: tuple[Tensor | None, ...] = ()
        kind: Kind
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
            width = v_shape[3]
            if v_layout == "columns":
                width, keys = v_shape[2], k.shape[1]
            kind = (q.device, dtype, head_dim, width, causal, out_dtype, v_layout, scale_rows)
        elif (
            (q_descale is None and k_descale is None and v_descale is None)
            and (v_mean is None and k_mean is None)
            and (v_layout is None and scale_rows is None and out_dtype is None)
        ):  # fmt: skip
            kind = (q.device, dtype, head_dim, v_shape[3], causal)
        else:
            refuse_only_fp8(dtype, "q", locals())
        kernels: Any = None
        if traced:
            kind = (*kind[:2], settled(kind[2]), settled(kind[3]), *kind[4:])
        if schedule is None:
            if traced:
                served = _told(kind)
            else:
                served, kernels = _served.get(kind) or _served.made(kind)
            choice, few, by_keys, long, narrow, few_queries, few_rows = served
            if by_keys:
                most, choice = by_keys[0]
                if (keys <= most) is not True:  # a comparison of a traced size is neither
                    choice = for_keys(by_keys, keys, surely)
                if few and choice not in long:
                    choice = for_few(few, q.numel(), surely) or choice
                queries = q_shape[1]
                if (queries <= few_queries) is True or (queries * q_shape[2] <= few_rows) is True:
                    choice = _for_narrow(kind, kernels, narrow, q_shape, k.shape, keys) or choice
        elif traced:
            choice = slug_of(schedule)
        else:
            kernels, choice = _ready.get(kind) or _ready.made(kind), schedule
        if traced:
            found = _named(kind, choice)
            with_lse, alone = op.by_name(found)
        else:
            with_lse, alone, direct, _ = kernels.get(choice) or kernels.made(choice)
        if note is not None:
            note(kind, q_shape, v_shape, keys)
        if deterministic is not False:
            deterministic = flag("deterministic", deterministic)
        if scale is None:
            scale = head_dim**-0.5 if traced else USUAL_SCALES[head_dim]
        elif type(scale) is not float:
            scale = number("scale", scale)
        if forward_ad._current_level >= 0:
            refuse_tangents(q, k, v)
        if (
            is_grad_enabled()
            and not of_fp8
            and (q.requires_grad or k.requires_grad or v.requires_grad)
            and (traced or not (_is_tracing() or peek_interpreter_stack()))
        ):
            if traced:
                made = with_gradient_by_name(found, q, k, deterministic=deterministic)
            else:
                of = kind, choice, deterministic
                made = _differentiable.get(of) or _differentiable.made(of, keys, q.numel())
            out_and_lse: tuple[Tensor, Tensor] = made(q, k, v, scale)
            return out_and_lse if return_lse else out_and_lse[0]
        if return_lse:
            return with_lse(q, k, v, scale, *of_fp8)
        if not (traced or _is_tracing() or peek_interpreter_stack()):
            out: Tensor = direct(q, k, v, scale, *of_fp8) if of_fp8 else direct(q, k, v, scale)
            if not out.requires_grad:
                return out
        return alone(q, k, v, scale, *of_fp8)  # refuses where a gradient would be needed
    except UNCLEAR:
        refuse_other_types(attention, locals())
        raise
    except ValueError:
        refuse_unreadable(attention, locals())
        raise


def prepare(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
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
    **unknown: Never,
) -> str:
    """Ready the kernel that attention(…) would use for such tensors; return its slug.

    It is the one for `seqlen` keys and `rows` query rows in all: batch · heads · seqlen_q. Where
    the dispatch table has several kernels by a size that is left out, all of them are readied, also
    those for few rows, and the slug is that for the most. A call that torch.compile or torch.export
    traces with sizes left open counts as one of many rows and of 131,072 keys.

    dtype is torch's or a schedule's word for it. On `device`, by default the current GPU, the
    kernel is built, loaded and run once on a single key, after which calls can be captured; on a
    CPU, the default where there is no GPU, there is nothing to build. In e4m3, v_layout and
    out_dtype are as of attention(…), and scale_rows is 0 if left out. With `gradient` the kernels
    of the backward pass are readied too: with `deterministic` those of calls that ask for it.
    `progress` is called with a line before what takes long. Raises as attention does, and
    ValueError for deterministic without gradient.
    """
    refuse_other_types(prepare, locals())
    refuse_order_alone(deterministic, gradient)
    refuse_negative(seqlen=seqlen, rows=rows)
    fp8 = out_dtype, v_layout, scale_rows
    kind = _kind(dtype, head_dim, head_dim_v, causal, device, fp8, schedule is not None)
    choices: list[Choice] = [schedule]
    if schedule is None:
        choices = [*_slugs(kind, seqlen, rows)]
    kernels = _ready.get(kind) or _ready.made(kind)
    for choice in dict.fromkeys(choices):
        kernel, *_, slug = kernels.made(choice, progress)
        if gradient:
            elements = None if rows is None else rows * head_dim
            _make_differentiable((kind, choice, bool(deterministic)), seqlen, elements)
        if kind[0].type == "cuda":
            run_once(kernel, slug, kind[0])
    return kernels[choices[-1]][-1]


def picked(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    seqlen: int,
    rows: int | None = None,
    device: torch.device | str | None = None,
    v_layout: str | None = None,
    scale_rows: int | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> Schedule:
    """Return the schedule that attention(…) would take for such tensors and `seqlen` keys.

    Arguments as of prepare(…), and `rows` are many if left out; nothing is built: of derived
    schedules it is the first.  Raises ValueError for a dtype or head dims that no kernel takes.
    """
    refuse_other_types(picked, locals())
    refuse_negative(seqlen=seqlen, rows=rows)
    fp8 = out_dtype, v_layout, scale_rows
    kind = _kind(dtype, head_dim, head_dim_v, causal, device, fp8)
    return choose(problem_of(kind), _slugs(kind, seqlen, rows)[-1])


def _kind(
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None,
    causal: bool,
    device: torch.device | str | None,
    fp8: tuple[torch.dtype | str | None, str | None, int | None],
    chosen: bool = False,
) -> Kind:
    """The kind of call that prepare(…) means by these arguments; a chosen schedule says more."""
    place = placed(device)
    found, (out, v_layout, scale_rows) = dtype_of(dtype), fp8
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if found != E4M3:
        refuse_only_fp8(found, "dtype", locals() | {"out_dtype": out})
        return place, found, head_dim, head_dim_v, causal
    v_layout = "rows" if v_layout is None else v_layout
    refuse_word("v_layout", v_layout, V_LAYOUTS)
    out_dtype = None if out is None else dtype_of(out, "out_dtype")
    if not chosen:
        out_dtype, scale_rows = out_dtype or torch.bfloat16, scale_rows or 0
    return place, found, head_dim, head_dim_v, causal, out_dtype, v_layout, scale_rows


def problem_of(kind: Kind) -> Problem:
    """What is computed in such a call, in words.  Raises ValueError for a dtype of no kernel."""
    _, dtype, head_dim, head_dim_v, causal = kind[:5]
    refuse_dtype(dtype)
    word, mask = word_of(dtype), "causal" if causal else "full"
    if len(kind) == 5:
        return Problem(word, head_dim, head_dim_v, mask, word, "", 0)
    out_dtype, v_layout, scale_rows = kind[5:]
    out = word_of(out_dtype) if out_dtype else None
    return Problem(word, head_dim, head_dim_v, mask, out, v_layout, scale_rows)


def _slugs(kind: Kind, keys: int | None, rows: int | None) -> list[str | None]:
    """The slugs for so many keys and query rows, where None is any number; the last for the most.

    Raises ScheduleError where a dispatch table is wrong.
    """
    elements = None if rows is None else rows * kind[2]
    served, _ = _served.get(kind) or _served.made(kind)
    return slugs_for(Served(*served), keys, elements)


def _for_narrow(
    kind: Kind,
    kernels: Kernels | None,
    narrow: tuple[Narrow, ...],
    q_shape: torch.Size,
    k_shape: torch.Size,
    keys: int,
) -> str | None:
    """The slug for a call of few queries, traced without `kernels`; None: the others serve it.

    So they do where this one is not ready, and cannot be readied now.
    """
    if len(k_shape) != 4:
        return None
    batch, queries, heads, _ = q_shape
    kv_heads = k_shape[2]
    if kv_heads == 0 or not all((size <= MOST) is True for size in (batch, heads, kv_heads)):
        return None  # wrong, or traced open
    row = for_narrow(narrow, batch * heads, queries, keys, surely)
    if row is None or heads % kv_heads:
        return None
    if kernels is None:
        open_ = known(queries) is None
        return None if open_ else _suited_to(kind[0], row, batch, heads, kv_heads, queries)
    call = kind[0], row, queries * heads // kv_heads, kv_heads, batch
    slug = _suited.get(call)
    if slug is None or slug not in kernels:
        if kind[0].type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        slug = _suited_to(kind[0], row, batch, heads, kv_heads, queries)
        if len(_suited) < _MOST_SUITED:
            _suited[call] = slug
    return slug


@untraced
def _suited_to(
    device: torch.device, row: str, batch: int, heads: int, kv_heads: int, queries: int
) -> str:
    """The slug that a table's row means for a call: keys have no say."""
    return meant(row, Sizes(batch, heads, kv_heads, queries, 1), _card(device)).slug


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


# ---- what is ready ------------------------------------------------------------------------------


def _kernels(kind: Kind) -> Kernels:
    return Once(partial(_make_ready, kind))


def _make_ready(
    kind: Kind, choice: Choice, progress: Callable[[str], None] | None = None
) -> Kernel:
    """The long way to a kernel: choose, build, load.  Raises as attention does."""
    problem = problem_of(kind)
    schedules, derived = candidates(problem, choice)
    chosen, kernel = first_ready(schedules, kind[0], not_ready=NOT_READY, progress=progress)
    if derived:
        warnings.warn(
            f"no schedule was tuned for {problem}: {chosen.slug} is derived. To search for a "
            f"faster one, which fagen.attention then takes: {search_command(chosen.slug)}",
            UntunedWarning,
            stacklevel=4,
        )
    return kernel, op.alone(kernel), op.direct(kernel), chosen.slug


def _look_up(kind: Kind) -> tuple[Any, Kernels]:
    """Look a kind of call up in the dispatch tables.  Raises ScheduleError where one is wrong."""
    device, dtype, head_dim, head_dim_v = kind[:4]
    problem = problem_of(kind)
    refuse_head_dims(head_dim, head_dim_v, fp8=dtype == E4M3)
    if len(kind) > 5:
        out_dtype, _, scale_rows = kind[5:]
        refuse_word("scale_rows", scale_rows, (0, *SCALE_ROWS))
        refuse_word("out_dtype", out_dtype, map(dtype_of, OUT_DTYPES))
    # as a tuple and nothing more, which is unpacked in half the time
    return tuple(serving(problem, _card(device))), _ready.get(kind) or _ready.made(kind)


def _make_differentiable(
    of: tuple[Kind, Choice, bool], keys: int | None, elements: int | None
) -> op.Op:
    """The long way to a kernel's op that has gradients, for such sizes at least.

    Raises as attention does.
    """
    kind, choice, deterministic = of
    kernel, *_, slug = _ready[kind][choice]
    return with_gradient(
        slug, kernel, kind[0], deterministic=deterministic, keys=keys, elements=elements
    )


# What has been readied in this process. A call finds its kernel here or takes the long way once.
_ready: Once[Kind, Kernels] = Once(_kernels)
# The same beside what dispatch tables say of a kind of call, once that was looked up.
_served: Once[Kind, tuple[Any, Kernels]] = Once(_look_up)  # of a Served its fields
# Kernels with gradients, and whether these are to be deterministic.
_differentiable: Once[tuple[Kind, Choice, bool], op.Op] = Once(_make_differentiable)


@untraced
def _told(kind: Kind) -> Any:
    """What dispatch tables say of a kind of call."""
    return _served.made(kind)[0]


@untraced
def _named(kind: Kind, choice: Choice) -> op.Named:
    """Ready a kernel, and tell of it by name."""
    *_, slug = _ready.made(kind).made(choice)
    return op.named(slug, kind[0].type)
