"""attention_decode(q, k, v, …): a few queries and long caches of keys and values in, out comes out.

Which kernel that is depends on dtype, head dims, mask, the rows of queries that share a KV head,
the number of KV heads and the batch, on whether there are lengths, and on what dispatch tables have
for these: never on the lengths themselves, so that a call can be captured and replayed.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fagen import registry
from fagen.argument_names import refuse_unknown_names
from fagen.dispatch.choice import Grouped, decoding, for_group
from fagen.errors import ScheduleError, UntunedWarning
from fagen.kinds.decode import chunks_for, deal_for, derived, rows_for
from fagen.kinds.decode.keys import Schedule
from fagen.picking import search_command
from fagen.problem import Problem
from fagen.runtime import autocast
from fagen.runtime.argument_types import (
    UNCLEAR,
    flag,
    number,
    refuse_other_types,
    refuse_tangents,
    refuse_unreadable,
)
from fagen.runtime.arguments import (
    dtype_of,
    name_of,
    refuse_dtype,
    refuse_head_dims,
    refuse_rank,
    settled,
    word_of,
)
from fagen.runtime.autocast import anywhere
from fagen.runtime.once import Once, untraced
from fagen.runtime.op import Named, Op, alone, by_name, direct, named
from fagen.runtime.ready import first_ready, placed, run_once, slug_of
from fagen.vocab import DECODE, ONE_QUERY

Choice = str | Path | Schedule | None
Of = tuple[torch.device, torch.dtype, int, int, str]  # device, dtype, head dims and mask
# the same, rows of a tile, chunks of a sequence and how they are dealt, what
# maxima are, a caller's own schedule
Key = tuple[torch.device, torch.dtype, int, int, str, int, int, str, str, Choice]

NOT_READY = (
    "the kernel is not ready: call fagen.prepare_decode(…) first, for such sizes and this device; "
)

# with the log-sum-exp, alone, direct; the scale if left out, its slug
Kernel = tuple[Op, Op, Op, float, str]

# What has been readied in this process, by what a call has at hand: working out its Key costs more
# than all else in Python.
_called: dict[tuple[Any, ...], Kernel] = {}
_MOST_CALLED = 10_000

# What counts calls while they are recorded: what a call has at hand, shapes of q and k.
note: Callable[[tuple[Any, ...], torch.Size, torch.Size], None] | None = None


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    reference: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: Choice = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v for a few queries of each sequence over a cache of its keys.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in fp16 or bf16 on one Hopper GPU, or on
    the CPU, where the schedule is emulated; H a multiple of Hk. Any strides that are multiples of
    16 bytes will do, with the last dimension contiguous. scale is 1/√D if left out. It is made for
    up to 64 rows of Sq queries times H / Hk heads; more are right too, but read keys again. Under
    torch.autocast q, k and v in fp32, or in several dtypes, are cast to its dtype; a cache in fp32
    is copied by each call then.

    A sequence's keys are those from leftpad_k to seqused_k of its cache, both (B,) in int32: 0 and
    Sk where they are left out, and what lies outside of the cache is cut off. What k and v hold
    elsewhere is not used, and may be no number. With `causal` query i of a sequence sees its keys
    up to seqused_k - Sq + i: the last one sees all.

    With `reference`, (H,) in fp32, what is summed up is relative to these numbers, about as large
    as scale · q kᵀ, natural logarithm, and no maximum is looked for but where a row turns out to
    lie too far from them: slower there, and as exact, also of one that is no number.
    `reference_for` finds them.

    Returns out (B, Sq, H, Dv), and with return_lse also the log-sum-exp (B, H, Sq) in fp32, natural
    logarithm: zeros and minus infinity for a row that sees no key.

    Lengths are read on the device alone: a CUDA graph may be replayed with others. The bits of a
    row depend on its own queries and its sequence's own keys and their number, not on its
    neighbours or on where in the cache they lie (docs/decode.md).

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else one by dtype, head
    dims, mask, rows, Hk and B, of a dispatch table or by rule; its first use builds it. An
    UntunedWarning says once where it is none of these, nor in `schedules/`. Where a CUDA graph is
    captured prepare_decode(…) or such a call must have readied it.

    Raises ValueError for a wrong argument, a dtype or a head dim that no kernel takes, and where a
    gradient would be needed; ScheduleError where `schedule` computes something else or cannot be
    read; DeviceError where the GPU is no Hopper; ToolchainError and BuildError where the kernel
    cannot be built; FagenError where it is not ready and cannot be built now.
    """
    try:
        if unknown:
            refuse_unknown_names(attention_decode, unknown)
        compiling = is_compiling()
        if compiling or anywhere():
            q, k, v = autocast.cast(q, k, v)
        causal = causal if causal is True or causal is False else flag("causal", causal)
        is_flag = return_lse is False or return_lse is True
        return_lse = return_lse if is_flag else flag("return_lse", return_lse)
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        lazy = reference is None
        traced = compiling or _is_tracing() or peek_interpreter_stack()
        # sizes that are open would be guarded by how well tiles share out
        alike = not traced and seqused_k is None and leftpad_k is None
        call: tuple[Any, ...] = ()
        batch: Any = q_shape[0]
        if not traced and type(batch) is int:  # sizes that are open are no keys of a dict
            call = q.device, q.dtype, q_shape, k_shape[2], v_shape[3], causal, lazy, alike, schedule
        if compiling:
            _refuse_ranks(q, k, v)
            with_lse, without, usual_scale = _traced(q, k, v, causal, schedule, lazy=lazy)
        else:
            kernel = _called.get(call)
            if kernel is None:  # of one that is known, the op says what is wrong
                _refuse_ranks(q, k, v)
                maximum = "lazy" if lazy else "unified"
                of = q.device, q.dtype, q_shape, k_shape[2], v_shape[3], causal
                key = _key(*of, maximum, schedule, alike=alike)
                kernel = _ready.get(key) or _ready.made(key, q_shape[1])
                if call and len(_called) < _MOST_CALLED:
                    _called[call] = kernel
            with_lse, without, sooner, usual_scale, _ = kernel
        if note is not None:
            note(call, q_shape, k_shape)
        if scale is None:
            scale = usual_scale
        elif type(scale) is not float:
            scale = number("scale", scale)
        if forward_ad._current_level >= 0:
            refuse_tangents(q, k, v)
        if not (traced or return_lse):
            out: Tensor = (
                sooner(q, k, v, scale, seqused_k, leftpad_k)
                if lazy
                else sooner(q, k, v, reference, scale, seqused_k, leftpad_k)
            )
            if not out.requires_grad:
                return out
        given = (q, k, v, scale) if lazy else (q, k, v, reference, scale)
        if return_lse:
            out_and_lse: tuple[Tensor, Tensor] = with_lse(
                *given, seqused_k=seqused_k, leftpad_k=leftpad_k
            )
            return out_and_lse
        refusing: Tensor = without(*given, seqused_k=seqused_k, leftpad_k=leftpad_k)
        return refusing  # where no gradient would be needed
    except UNCLEAR:
        refuse_other_types(attention_decode, locals())
        _refuse_ranks(q, k, v)
        raise
    except ValueError:
        refuse_unreadable(attention_decode, locals())
        raise


def _refuse_ranks(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for a tensor of other than four dimensions."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refuse_rank(name, tensor)


def reference_for(lse: Tensor, keys: Tensor | int, **unknown: Never) -> Tensor:
    """Return a reference for each head, (H,) in fp32, from log-sum-exps that calls have returned.

    lse (B, H, Sq), over so many keys each, int or (B,): of each head the largest logarithm of the
    mean of exp(scale · q kᵀ). In fp16 scores may be 9.7 above it, and the mean over a chunk of keys
    may be 8.3 below; in bf16 41 either way. What calls see later may differ: it costs time alone.
    Without a call's log-sum-exp any bound of the scores will do in bf16 that is not 41 too high.
    Rows without keys, and those whose log-sum-exp is no number, have no say: minus infinity, which
    is found for heads of no others, is a reference as any.

    Raises ValueError where lse or keys have another shape, TypeError for what is none of these.
    """
    refuse_other_types(reference_for, locals())
    lengths = keys.shape if isinstance(keys, Tensor) else ()
    of_batch = tuple(lengths) in ((), tuple(lse.shape[:1]))
    if lse.dim() != 3 or not of_batch or not lse.is_floating_point():
        raise ValueError(
            f"lse has shape {tuple(lse.shape)} in {lse.dtype} and keys {tuple(lengths)}; they must "
            "be (batch, heads, queries) in float32, and one number or one of each batch"
        )
    each = torch.as_tensor(keys, dtype=torch.float32, device=lse.device).log().reshape(-1, 1, 1)
    means = lse - each
    means = means.masked_fill(~(lse.isfinite() & means.isfinite()), -torch.inf)
    # one more, so that there is a largest where there is nothing
    return torch.nn.functional.pad(means.transpose(0, 1).flatten(1), (1, 0), value=-torch.inf).amax(
        1
    )


def prepare_decode(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    heads: int,
    kv_heads: int | None = None,
    batch: int = 1,
    queries: int = 1,
    causal: bool = True,
    unified: bool = False,
    schedule: Choice = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
    **unknown: Never,
) -> str:
    """Ready the kernel that attention_decode(…) would use for such tensors; return its slug.

    Where calls without lengths have another one, it is readied too. q is (batch, queries, heads,
    head_dim) and k (batch, any, kv_heads, head_dim): how many keys there are does not choose. dtype
    is torch's or a schedule's word for it; head_dim_v is head_dim if left out, and kv_heads heads.
    With `unified` it is the kernel of calls with a reference. On `device`, by default the current
    GPU, the kernel is built, loaded and run once, after which calls can be captured; on a CPU there
    is nothing to build. `progress` is called with a line before what takes long. Raises as
    attention_decode does.
    """
    refuse_other_types(prepare_decode, locals())
    place, kind = placed(device), dtype_of(dtype)
    for name, size in (("heads", heads), ("batch", batch), ("queries", queries)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be a whole number from 1 on")
    shape = batch, queries, heads, head_dim
    maximum = "unified" if unified else "lazy"
    kv_heads = heads if kv_heads is None else kv_heads
    of = place, kind, shape, kv_heads, head_dim if head_dim_v is None else head_dim_v, causal
    for alike in (True, False):
        key = _key(*of, maximum, schedule, alike=alike)
        is_new = key not in _ready
        with_lse, *_, slug = _ready.made(key, queries, progress)
        if is_new and place.type == "cuda":
            run_once(with_lse, slug, place)
    return slug


def _key(
    device: torch.device,
    dtype: torch.dtype,
    q_shape: Sequence[int],
    kv_heads: int,
    head_dim_v: int,
    causal: bool,
    maximum: str,
    schedule: Choice,
    *,
    alike: bool,
) -> Key:
    """What tells the kernel of a call.  Raises ValueError where heads form no groups."""
    batch, queries, heads, head_dim = q_shape
    if heads % kv_heads if kv_heads > 0 else heads or kv_heads:
        raise ValueError(
            f"q has {heads} heads, which must be a multiple of k's {kv_heads}; tensors are (batch, "
            "seqlen, heads, head_dim)"
        )
    mask = _mask(queries, causal=causal)
    kv_heads = max(1, kv_heads)  # of no heads nothing is computed
    of_group = queries * (heads // kv_heads)
    by = deal_for(head_dim, of_group, kv_heads, batch, alike=alike)
    tile = rows_for(of_group), chunks_for(kv_heads), by
    of = device, dtype, head_dim, head_dim_v, mask
    if schedule is None and maximum == "lazy":
        rows = _told(of)
        if rows:
            schedule = for_group(rows, tile[0], batch * heads * queries, tile[1])
    return *of, *tile, maximum, schedule


def _mask(queries: int, *, causal: bool) -> str:
    return ONE_QUERY if queries == 1 else "causal" if causal else "full"


def problem_of(call: tuple[Any, ...]) -> Problem:
    """What is computed in a call, in words, by what it has at hand."""
    _, dtype, (_, queries, _, head_dim), _, head_dim_v, causal, *_ = call
    return _problem(dtype, head_dim, head_dim_v, _mask(queries, causal=causal))


def _problem(dtype: torch.dtype, head_dim: int, head_dim_v: int, mask: str) -> Problem:
    of = word_of(dtype), head_dim, head_dim_v, mask
    return Problem(*of, v_layout="", scale_rows=0, kind=DECODE)


def _table(of: Of) -> tuple[Grouped, ...]:
    """What dispatch tables have for such calls.  Raises as attention_decode does."""
    device, dtype, head_dim, head_dim_v, mask = of
    refuse_dtype(dtype, fp8=False)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return decoding(_problem(dtype, head_dim, head_dim_v, mask), card)


def _make_ready(key: Key, queries: int, progress: Callable[[str], None] | None = None) -> Kernel:
    """The long way to a kernel: choose, build, load.  Raises as attention_decode does."""
    schedules = _schedules(key, queries)
    chosen, kernel = first_ready(schedules, key[0], not_ready=NOT_READY, progress=progress)
    if key[-1] is None and chosen.slug not in _committed():
        warnings.warn(
            f"no schedule was measured for {key[5]} rows of {name_of(key[1])}, head dims "
            f"{key[2]} and {key[3]}, {key[4]}, {key[6]} chunks by {key[7]}: {chosen.slug} is "
            "derived. To search for a faster one, which such calls then take: "
            f"{search_command(chosen.slug)}",
            UntunedWarning,
            stacklevel=4,
        )
    return kernel, alone(kernel), direct(kernel), key[2] ** -0.5, chosen.slug


# What dispatch tables have.
_tables: Once[Of, tuple[Grouped, ...]] = Once(_table)
# What has been readied in this process. A call finds its kernel here or takes the long way once.
_ready: Once[Key, Kernel] = Once(_make_ready)


@untraced
def _told(of: Of) -> tuple[Grouped, ...]:
    """What dispatch tables have for calls."""
    found = _tables.get(of)
    return _tables.made(of) if found is None else found


def _traced(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, schedule: Choice, *, lazy: bool
) -> tuple[Op, Op, float]:
    """What a call that torch.compile traces takes of its kernel.

    Lengths are not looked at: sizes that are open would be guarded by how well tiles share out.
    """
    batch, queries, heads, head_dim = q.shape
    head_dim, head_dim_v = settled(head_dim), settled(v.shape[3])
    choice = None if schedule is None else slug_of(schedule)
    of = q.device, q.dtype, (batch, queries, heads, head_dim), k.shape[2], head_dim_v, causal
    key = _key(*of, "lazy" if lazy else "unified", choice, alike=False)
    with_lse, without = by_name(_named(key, 1 if key[4] == ONE_QUERY else 2))
    return with_lse, without, head_dim**-0.5


@untraced
def _named(key: Key, queries: int) -> Named:
    """Ready a kernel, and tell of it by name."""
    *_, slug = _ready.made(key, queries)
    return named(slug, key[0].type)


def _committed() -> set[str]:
    return {path.stem for path in registry.schedules(Schedule.kind)}


def _schedules(key: Key, queries: int) -> tuple[Schedule, ...]:
    """What may be built for a call, the best first."""
    _, dtype, head_dim, head_dim_v, mask, rows, chunks, by, maximum, choice = key
    refuse_dtype(dtype, fp8=False)
    word = word_of(dtype)
    refuse_head_dims(head_dim, head_dim_v, fp8=False)
    wanted: dict[str, Any] = {
        "dtype": word,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "mask": mask,
        "maximum": maximum,
    }
    if choice is None:
        return derived(**wanted, rows=rows, chunks=chunks, by=by)
    schedule: Any = registry.given(choice)
    said = {name: schedule.values().get(name) for name in wanted}
    if schedule.kind != Schedule.kind or said != wanted | (
        {"mask": said["mask"]} if queries == 1 else {}
    ):
        raise ScheduleError(
            f"{schedule.slug} is not what the call asks for: decoding in {word}, head dims "
            f"{head_dim} and {head_dim_v}, {mask}, a {maximum} maximum"
        )
    return (schedule,)
