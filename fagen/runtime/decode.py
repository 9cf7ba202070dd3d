"""attention_decode(q, k, v, …): a few queries and long caches of keys and values in, out comes out.

Which kernel that is depends on dtype, head dims, mask, the rows of queries that share a KV head,
the number of KV heads and the batch, on whether there are lengths, on whether the cache has few
keys, on the card, and on what dispatch tables have for these: never on the lengths themselves, so
that a call can be captured and replayed.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Never

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.dispatch.select import first_slug
from fagen.errors import ScheduleError
from fagen.expr.canonical import Expression
from fagen.kinds.decode import MANY_KEYS, Tile, counted_keys, derived, tile_for
from fagen.kinds.decode.keys import Schedule
from fagen.masking import Window
from fagen.problem import Problem
from fagen.registry import given as schedule_given
from fagen.runtime import autocast
from fagen.runtime.argument_types import (
    FAILURES,
    explain,
    flag,
    number,
    refuse_other_types,
)
from fagen.runtime.arguments import (
    dtype_of,
    refuse_dtype,
    refuse_head_dims,
    refuse_rank,
    settled,
    told,
    word_of,
)
from fagen.runtime.autocast import anywhere
from fagen.runtime.backward import results
from fagen.runtime.call import CallKey, Choice, Door, card_of, placed, slug_of, traced
from fagen.variants import Variant, described, names_of
from fagen.vocab import CACHES, DECODE, ONE_QUERY, PLAIN_MASKS


def _key(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    names: tuple[str, str, str],
    one_query: bool,
    tile: Tile,
    lazy: bool,
    schedule: Choice = None,
    cache: str = CACHES[0],
) -> CallKey:
    """The key of a call; `names` are as of _names, `tile` as of _tile.

    Raises as attention_decode does.
    """
    refuse_dtype(dtype, fp8=False)
    refuse_head_dims(head_dim, head_dim_v, fp8=False)
    word, maximum = word_of(dtype), "lazy" if lazy else "fixed"
    mask, score, sink = names
    what = word, head_dim, head_dim_v, mask, None, "", 0, DECODE
    problem = Problem(*what, score=score, sink=sink, cache=cache)
    fields: dict[str, Any] = dict(
        dtype=word, head_dim=head_dim, head_dim_v=head_dim_v, mask=mask, maximum=maximum
    )
    fields |= problem.variant
    if schedule is None:
        serving = derived(**fields, **tile._asdict())
        # tables have no kernels with a reference, nor of pages
        return CallKey(device, problem, None, serving, tabled=lazy and cache == CACHES[0])
    chosen = schedule_given(schedule)
    has = {name: chosen.values().get(name) for name in fields}
    any_mask = {"mask": has["mask"]} if one_query else {}  # it sees the same keys
    is_decoding = chosen.kind == Schedule.kind and has == fields | any_mask
    if not is_decoding or Problem.of(chosen).variant != problem.variant:
        raise ScheduleError(
            f"{chosen.slug} is not what the call asks for: decoding of {problem}, a {maximum} "
            "maximum"
        )
    return CallKey(device, problem, chosen.slug, (chosen,))


DECODING = Door(
    "attention_decode",
    _key,
    "the kernel is not ready: call fagen.prepare_decode(…) first, for such sizes and this device; ",
    "decoding of {}",
)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    reference: Tensor | None = None,
    causal: bool | Tensor | None = None,
    window: Window = None,
    mask: str | Expression | None = None,
    softcap: float | None = None,
    score: str | Expression | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: Choice = None,
    **given: Any,
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
    elsewhere is not used, and may be no number. With `causal`, which is so where neither it nor a
    mask is given, query i of a sequence sees its keys up to seqused_k - Sq + i: the last one sees
    all. `window`, `mask`, `softcap`, `score`, `sinks` and what is `given` are as of attention(…),
    and what no query sees is not read; masks with numbers of each query there are none here.

    With `block_table`, (B, entries) in int32, keys and values lie in pages: k (pages, page_size,
    Hk, D) and v (pages, page_size, Hk, Dv), and entry i of a sequence says which page has its keys
    from i · page_size on. seqused_k is given then, and cut off at entries · page_size. Pages may
    have any size from 1 on, be those of several sequences, and lie anywhere, K's and V's each with
    strides of their own. Entries behind the last page in use are not read. Those in use are to name
    pages that there are: of others the keys and values are zeros, and nothing outside of k and v is
    read. Bits are those of the same keys without pages.

    With `reference`, (H,) in fp32, what is summed up is relative to these numbers, about as large
    as scale · q kᵀ, natural logarithm, and no maximum is looked for but where a row turns out to
    lie too far from them: slower there, and as exact, also of one that is no number.
    `reference_for` finds them.

    Returns out (B, Sq, H, Dv), and with return_lse also the log-sum-exp (B, H, Sq) in fp32, natural
    logarithm: zeros and minus infinity, or its sink, for a row that sees no key.

    Lengths are read on the device alone: a CUDA graph may be replayed with others. The bits of a
    row depend on its own queries and its sequence's own keys and their number, not on its
    neighbours or on where in the cache they lie (docs/decode.md).

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else one by dtype, head
    dims, mask, rows, Hk and B, and whether Sk is small, of a dispatch table or by rule; its first
    use builds it. An
    UntunedWarning says once where it is none of these, nor in `schedules/`. Where a CUDA graph is
    captured prepare_decode(…) or such a call must have readied it.

    Raises ValueError for a wrong argument, a dtype or a head dim that no kernel takes, and where a
    gradient would be needed; ScheduleError where `schedule` computes something else or cannot be
    read; DeviceError where the GPU is no Hopper; ToolchainError and BuildError where the kernel
    cannot be built; FagenError where it is not ready and cannot be built now.
    """
    try:
        if causal is None:
            causal = mask is None
        variant: Any = causal
        values: tuple[Any, ...] = ()
        if (given or window is not None or mask is not None or softcap is not None) or (
            (score is not None or sinks is not None) or (causal is not True and causal is not False)
        ):
            variant, values, _ = told(
                *(attention_decode, causal, window, mask, softcap, score, sinks, given), q, k, v
            )
        compiling = is_compiling()
        if compiling or anywhere():
            q, k, v = autocast.cast(q, k, v)
        is_flag = return_lse is False or return_lse is True
        return_lse = return_lse if is_flag else flag("return_lse", return_lse)
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        cache, keys = CACHES[0], k_shape[1]
        if block_table is not None:
            cache, keys = CACHES[1], _room(q, k, v, block_table, seqused_k)
        lazy, alike = reference is None, seqused_k is None and leftpad_k is None
        named = None
        kernel: Any
        if compiling:
            refuse_rank(q=q, k=k, v=v)
            # sizes that are open would be guarded by how well tiles share out
            tile = _tile(q_shape, k_shape[2], MANY_KEYS, alike=False)
            choice = None if schedule is None else slug_of(schedule)
            parts = q.device, q.dtype, settled(q_shape[3]), settled(v_shape[3])
            how = *_names(q_shape[1], variant), tile, lazy, choice, cache
            named, kernel = traced("attention_decode", _sizes(q_shape, k_shape), *parts, *how)
        else:
            # as far as it matters: a cache that grows has another kernel at most once
            few = type(keys) is int and keys < MANY_KEYS
            keys = counted_keys(keys) if few else MANY_KEYS
            what = q.device, q.dtype, q_shape, k_shape[2], v_shape[3]
            call = *what, variant, lazy, alike, keys, schedule, cache
            try:
                kernel = DECODING.known.get(call)
            except TypeError:  # sizes that are left open are no keys
                kernel = None
            if kernel is None:  # of one that is known, the op says what is wrong
                if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
                    refuse_rank(q=q, k=k, v=v)
                sizes, of_key = _sizes(q_shape, k_shape), of_call(*call)
                ready = DECODING.alike.get(of_key) or DECODING.ready(_key(*of_key), of_key)
                kernel = DECODING.find(ready, sizes, call)
            if DECODING.note is not None:
                DECODING.note(call, q_shape, k_shape)
        if scale is None:
            scale = kernel.scale
        elif type(scale) is not float:
            scale = number("scale", scale)
        where = (
            (seqused_k, leftpad_k) if block_table is None else (block_table, seqused_k, leftpad_k)
        )
        arguments: tuple[Any, ...] = (q, k, v, scale, *values, *where)
        if not lazy:
            arguments = (q, k, v, reference, scale, *values, *where)
        return results("", kernel, arguments, return_lse, False, named)
    except FAILURES as error:
        if not is_compiling():  # torch says then what was raised
            explain(error, attention_decode, locals())
        if not isinstance(error, ValueError):
            refuse_rank(q=q, k=k, v=v)
        raise


def of_call(
    device: torch.device,
    dtype: torch.dtype,
    q_shape: torch.Size,
    kv_heads: int,
    width: int,
    variant: Variant,
    lazy: bool,
    alike: bool,
    keys: int,
    schedule: Choice,
    cache: str,
) -> tuple[Any, ...]:
    """What the key of a call is made of, by what it has at hand."""
    q = [settled(size) for size in q_shape]
    card = card_of(device) if alike and schedule is None and device.type == "cuda" else ""
    tile = _tile(q, settled(kv_heads), keys, alike=alike, card=card)
    names = _names(q[1], variant)
    return device, dtype, q[3], settled(width), *names, tile, lazy, schedule, cache


def _room(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seqused_k: Tensor | None) -> Any:
    """How many keys a sequence may have in pages.  Raises ValueError where that is not told."""
    if seqused_k is None:
        raise ValueError(
            "seqused_k is missing; with block_table it must be given: how many keys each sequence "
            "has in its pages, (batch,) in int32"
        )
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table has {block_table.dim()} dimensions; it must have 2: (batch, entries), "
            "the pages of each sequence"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions; with block_table it must have 4: (pages, "
                "page_size, kv_heads, head_dim)"
            )
    return block_table.shape[1] * k.shape[1]


def _sizes(q: Sequence[Any], k: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    return q[0], q[2], k[2], q[1], k[1]


def _names(queries: int, variant: Variant) -> tuple[tuple[str, str, str], bool]:
    """The names of a call's variant, and whether any mask does that lengths say all of.

    A single query sees the same keys then. Constants, of sizes that are open too.
    """
    mask, score, sink = names_of(variant)
    if queries == 1 and mask in PLAIN_MASKS:
        return (ONE_QUERY, score, sink), True
    return (mask, score, sink), False


def _tile(q: Sequence[int], kv_heads: int, keys: int, *, alike: bool, card: str = "") -> Tile:
    """Rows of a tile, splits of a sequence and how these are dealt, where no table has a kernel.

    The card matters where sequences are `alike`, for want of lengths. Raises ValueError where heads
    form no groups.
    """
    batch, queries, heads, head_dim = q
    if heads % kv_heads if kv_heads > 0 else heads or kv_heads:
        raise ValueError(
            f"q has {heads} heads, which must be a multiple of k's {kv_heads}; tensors are (batch, "
            "seqlen, heads, head_dim)"
        )
    kv_heads = max(1, kv_heads)  # of no heads nothing is computed
    rows = queries * (heads // kv_heads)
    return tile_for(head_dim, rows, kv_heads, batch, alike=alike, keys=keys, card=card)


def reference_for(lse: Tensor, keys: Tensor | int, **unknown: Never) -> Tensor:
    """Return a reference for each head, (H,) in fp32, from log-sum-exps that calls have returned.

    lse (B, H, Sq), over so many keys each, int or (B,): of each head the largest logarithm of the
    mean of exp(scale · q kᵀ). In fp16 scores may be 9.7 above it, and the mean over a split of keys
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
    logs = torch.as_tensor(keys, dtype=torch.float32, device=lse.device).log().reshape(-1, 1, 1)
    means = lse - logs
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
    causal: bool | None = None,
    window: Window = None,
    mask: str | Expression | None = None,
    softcap: float | None = None,
    score: str | Expression | None = None,
    sinks: torch.dtype | str | None = None,
    unified: bool = False,
    paged: bool = False,
    schedule: Choice = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
    **given: Any,
) -> str:
    """Ready the kernel that attention_decode(…) would use for such tensors; return its slug.

    Where calls without lengths, or over a cache of few keys, have another one, it is readied too. q
    is (batch, queries, heads, head_dim) and k (batch, any, kv_heads, head_dim). dtype
    is torch's or a schedule's word for it; head_dim_v is head_dim if left out, and kv_heads heads.
    `window`, `mask`, `softcap` and `score` are as of the call, and what is given by name may be
    left out; sinks is their dtype.
    With `unified` it is the kernel of calls with a reference, with `paged` that of calls with a
    block_table. On `device`, by default the current
    GPU, the kernel is built, loaded and run once, after which calls can be captured; on a CPU there
    is nothing to build. `progress` is called with a line before what takes long. Raises as
    attention_decode does.
    """
    if given:
        # a name that is unknown is told first
        described(prepare_decode, False, None, mask, None, score, None, given)
    refuse_other_types(prepare_decode, locals())
    for name, size in (("heads", heads), ("batch", batch), ("queries", queries)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be a whole number from 1 on")
    parts = (
        placed(device),
        dtype_of(dtype),
        head_dim,
        head_dim if head_dim_v is None else head_dim_v,
    )
    kv_heads = heads if kv_heads is None else kv_heads
    is_causal = mask is None if causal is None else bool(causal)
    how = window, mask, softcap, score, sinks, given
    names = _names(queries, described(prepare_decode, is_causal, *how))
    for alike, keys in product((True, False)[paged:], (1, MANY_KEYS - 1, MANY_KEYS)):
        sizes = batch, queries, heads, head_dim
        tile = _tile(sizes, kv_heads, keys, alike=alike, card=card_of(parts[0]))
        key = _key(*parts, *names, tile, not unified, schedule, CACHES[bool(paged)])
        rows = DECODING.rows(key)
        slug = key.schedule
        if rows:
            slug = first_slug(rows, batch, heads, kv_heads, queries, 1)
        kernel = DECODING.prepare(key, slug, progress)
    return kernel.slug
