"""What callers of attention(…) give, in; what it means, or a refusal in words, out.

Nothing here looks at data, so a call can be traced.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.scores import rules_of_slopes
from fagen.problem import Problem
from fagen.runtime import autocast
from fagen.runtime.argument_types import flag
from fagen.runtime.call import MOST_KNOWN, CallKey, Choice, untraced
from fagen.schedule import Schedule
from fagen.toml_lines import near_word, shown
from fagen.variants import Variant, in_words, names_of, said
from fagen.vocab import (
    DTYPES,
    LENGTHS,
    OUT_DTYPES,
    SCALE_ROWS,
    SCALE_ROWS_DEFAULT,
    SCALES,
    SIXTEEN_BITS,
    V_LAYOUTS,
    Dtype,
)

Made = TypeVar("Made", bound=Schedule)

E4M3 = torch.float8_e4m3fn
# a size as a number that an `untraced` function takes, also one that is traced open
settled = index
_OF_FP8 = (
    *("q_descale", "k_descale", "v_descale", "v_mean", "k_mean"),
    *("v_layout", "scale_rows", "out_dtype"),
)
_ONLY_FP8 = (
    "descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors, which "
    "fagen.quantize makes (and fagen.attention_fp8 for one call)"
)

# ---- to be told ---------------------------------------------------------------------------------


def descale_of(name: str, descale: Tensor | None) -> Tensor:
    """A tensor's descales as a kernel takes them: batch, heads, blocks, of V columns."""
    if descale is None:
        raise ValueError(
            f"{name} is missing: a number of an e4m3 tensor is its value times its descale. "
            "fagen.quantize makes both; torch.ones((), device=q.device) says that values are meant "
            "as they are"
        )
    sizes = descale.dim()
    if sizes == 3:
        return descale
    if sizes == 2:
        return descale[:, :, None]
    if sizes == 0:
        return descale[None, None, None]
    last = "head_dim" if name == "v_descale" else "blocks"
    raise ValueError(
        f"{name} has shape {tuple(descale.shape)}; it must be one number (), (batch, heads) or "
        f"(batch, heads, {last})"
    )


def told_scale_rows(q: Tensor, k: Tensor, q_descale: Tensor, k_descale: Tensor) -> int:
    """How many rows share a scale, told from how many blocks there are; 0: all of a head."""
    blocks = q_descale.shape[2], k_descale.shape[2]
    if blocks[0] == 1 and blocks[1] == 1:
        return 0
    lengths = q.shape[1], k.shape[1]
    for rows in SCALE_ROWS:
        needed = [(length + rows - 1) // rows for length in lengths]
        if needed[0] == blocks[0] and needed[1] == blocks[1]:
            return rows
    listed = ", ".join(map(str, SCALE_ROWS))
    raise ValueError(
        f"q_descale and k_descale have {blocks[0]} and {blocks[1]} blocks for {lengths[0]} queries "
        f"and {lengths[1]} keys; both must have one, or one for each block of {listed} rows, as "
        f"many in both; fagen.quantize(…, scale_rows={SCALE_ROWS_DEFAULT}) makes them"
    )


def dtype_of(dtype: torch.dtype | str, name: str = "dtype") -> torch.dtype:
    """Return torch's dtype, of torch's name for it or ours; `name` is that of the argument."""
    if isinstance(dtype, torch.dtype):
        return dtype
    words = {word: row.torch for row in DTYPES.values() for word in (row.name, row.torch)}
    if dtype not in words:
        near = near_word(dtype, DTYPES)
        mean = f"; did you mean {near}?" if near else ""
        raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(words)}{mean}")
    return getattr(torch, words[dtype])


def name_of(dtype: torch.dtype) -> str:
    """Return torch's word for a dtype."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else shown(dtype)


def word_of(dtype: torch.dtype, rows: Mapping[str, Dtype] = DTYPES) -> str:
    """Return a schedule's word for a dtype, of a table of vocab; where there is none, torch's."""
    name = name_of(dtype)
    return next((row.name for row in rows.values() if row.torch == name), name)


def key_of(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    variant: Variant,
    schedule: Choice = None,
    out_dtype: torch.dtype | None = None,
    v_layout: str | None = None,
    scale_rows: int | None = None,
    *,
    varlen: bool = False,
) -> CallKey:
    """The key of a call.

    Raises ValueError for a dtype, head dims or words of no kernel.
    """
    refuse_dtype(dtype)
    word, fp8, is_open = word_of(dtype), dtype == E4M3, schedule is None
    head_dim, head_dim_v = settled(head_dim), settled(head_dim_v)
    if is_open or varlen:
        refuse_head_dims(head_dim, head_dim_v, fp8=fp8)
    out: str | None = word
    if not fp8:
        v_layout, scale_rows = "", 0
    else:
        if varlen:
            v_layout, scale_rows = "rows", 0
        elif is_open:
            refuse_word("scale_rows", scale_rows, (0, *SCALE_ROWS))
        if is_open or varlen:
            refuse_word("out_dtype", out_dtype, (*map(dtype_of, OUT_DTYPES), *[None] * varlen))
        out = word_of(out_dtype) if out_dtype else None  # left open where a schedule says it
    mask, score, sink = names_of(variant)
    parts = word, head_dim, head_dim_v, mask, out, v_layout, scale_rows
    problem = Problem(*parts, lengths=LENGTHS[varlen], score=score, sink=sink)
    return CallKey(device, problem, schedule)


def schedule_of(schedules: type[Made], **keys: Any) -> Made:
    """Return the schedule that a call's arguments amount to, for a kind that has one call.

    Raises ValueError, in words that begin with the call, where there is none.
    """
    kind = schedules.kind
    try:
        return schedules.make(**keys)
    except ScheduleError as error:
        faults = [line.rpartition(f"{kind}.")[2] for line in str(error).splitlines()]
        raise ValueError(f"fagen.{kind}: {'; '.join(faults)}") from None


def told(
    function: Callable[..., Any],
    causal: Any,
    window: Any,
    mask: Any,
    softcap: Any,
    score: Any,
    sinks: Tensor | None,
    given: Mapping[str, Any],
    *tensors: Tensor,
) -> tuple[Variant, tuple[Any, ...], tuple[str, ...]]:
    """Return the variant of a call, what its kernel is given, and which of it is by sequence.

    `tensors` are q, k and v.  Raises ValueError where they need a gradient that no kernel has.
    """
    # of every call with a mask or a score: asked are identities, before types are
    is_flag = causal is True or causal is False
    if not is_flag and not isinstance(causal, Tensor):
        causal, is_flag = flag("causal", causal), True
    dtype = None if sinks is None else sinks.dtype
    if is_compiling() or type(window) not in _WINDOWS or type(softcap) not in _NUMBERS:
        how = causal, window, mask, softcap, score, dtype, given
        variant, values, by_sequence, _ = said(function, *how)
    else:
        of_causal = causal if is_flag else causal.dtype
        call: tuple[Any, ...] = of_causal, window, mask, softcap, score, dtype
        for name, x in given.items():  # of tensors their type alone
            kind = type(x)
            call += (name, kind, x) if kind is int or kind is float else (name, kind)
        known = _told.get(call)
        if known is None:
            how = causal, window, mask, softcap, score, dtype, given
            variant, values, by_sequence, names = said(function, *how)
            if len(_told) < MOST_KNOWN:
                at = [place for place, x in enumerate(values) if isinstance(x, Tensor)]
                kept = tuple([None if isinstance(x, Tensor) else x for x in values])
                _told[call] = variant, kept, by_sequence, tuple([(n, names[n]) for n in at])
        else:
            variant, values, by_sequence, missing = known
            if missing:
                there = given if is_flag else {"causal_of": causal, **given}
                filled = [*values]
                for place, name in missing:
                    filled[place] = there[name]
                values = (*filled,)
    if isinstance(variant, bool):
        return variant, values, by_sequence
    if sinks is not None:
        tensors, values, by_sequence = (*tensors, sinks), (*values, sinks), (*by_sequence, "")
    if torch.is_grad_enabled() and needs_gradient(*tensors):
        refuse_no_gradient(function.__name__, variant, tensors)
    return variant, values, by_sequence


def refuse_no_gradient(called: str, variant: Variant, tensors: tuple[Tensor, ...] = ()) -> None:
    """Refuse a gradient of what has none, by its name."""
    fault = f"there is no backward {in_words(variant)} yet"
    score = names_of(variant)[1]
    if called in _WITH_SLOPES:
        fault = _no_slope(score)
    if fault:
        which = "q, k or v" if len(tensors) < 4 else "q, k, v or sinks"
        raise ValueError(
            f"{called}: {which} requires a gradient, and {fault}; call it under torch.no_grad()"
        )


@untraced
def _no_slope(score: str) -> str:
    """Why there are no gradients through a score, "" where there are."""
    faults = rules_of_slopes({"score": score, "partition": "keys"})
    return next((f"score {sentence}" for _, sentence in faults), "")


_WITH_SLOPES = "attention", "attention_varlen"  # whose calls have gradients through scores


# Of calls, by what they say: as Said, but for tensors, which are None, and the places and names of
# these for `names`.
_told: dict[
    tuple[Any, ...],
    tuple[Variant, tuple[Any, ...], tuple[str, ...], tuple[tuple[int, str], ...]],
] = {}
_WINDOWS = frozenset((int, tuple, type(None)))
_NUMBERS = frozenset((float, int, type(None)))


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether any of them does, wherever torch is asked for gradients."""
    return True in [tensor.requires_grad for tensor in tensors]


# ---- to be refused ------------------------------------------------------------------------------


def refuse_other_layout(k: Tensor, v: Tensor, v_layout: str) -> None:
    """Refuse V in the other layout by its name, before its sizes are taken for something else."""
    refuse_word("v_layout", v_layout, V_LAYOUTS)
    refuse_rank(k=k)
    _, keys, heads, _ = k.shape
    if v_layout == "rows" and v.shape[1] != keys and v.shape[1] == heads and v.shape[3] >= keys:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, which is transposed V of {heads} heads: pass "
            'v_layout="columns"'
        )
    if v_layout == "columns" and v.shape[1] != heads and (v.shape[1], v.shape[2]) == (keys, heads):
        raise ValueError(
            f"v has shape {tuple(v.shape)}, which is row-major V of {keys} keys: pass "
            'v_layout="rows"'
            ', or make it by fagen.quantize(v, layout="columns")'
        )


def refuse_only_fp8(dtype: torch.dtype, leader: str, options: Mapping[str, object]) -> None:
    """Refuse the first argument given of those that go with e4m3; `leader` has the dtype."""
    for name in _OF_FP8:
        if options.get(name) is not None:
            raise ValueError(f"{name} is given: {_ONLY_FP8}; {leader} is {name_of(dtype)}")


def refuse_blocks(name: str, descale: Tensor) -> None:
    """Refuse descales by block of rows where sequences lie packed: there a head has one."""
    if descale.shape[2] > 1:
        raise ValueError(
            f"{name} has {descale.shape[2]} blocks of rows for a head; of varlen sequences a head "
            "has one number, () or (batch, heads), and of v also one for each column: "
            'fagen.quantize(x[None], scales="head") makes one for all sequences'
        )


def refuse_unquantisable(q: Tensor, k: Tensor, v: Tensor, scales: str, v_layout: str) -> None:
    """Refuse what attention_fp8 cannot quantise, in words of the caller's own arguments."""
    refuse_word("scales", scales, SCALES)
    refuse_word("v_layout", v_layout, V_LAYOUTS)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refuse_rank(**{name: tensor})
        if tensor.dtype == E4M3:
            raise ValueError(
                f"{name} is in e4m3 already: fagen.attention takes it with its descale; "
                "attention_fp8 takes float16 or bfloat16"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} is {name_of(tensor.dtype)}; attention_fp8 takes float16 or bfloat16: "
                f"{name}.bfloat16() converts it"
                f"{autocast.ALSO if tensor.dtype == torch.float32 else ''}"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(
                f"{name} is {name_of(tensor.dtype)}, but q is {name_of(q.dtype)}; "
                f"{name}.to(q.dtype) converts it"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"{name} is not on the device of q; {name}.to(q.device) moves it there"
            )
    refuse_head_dims(q.shape[3], v.shape[3])
    if torch.is_grad_enabled() and needs_gradient(q, k, v):
        raise ValueError(
            "attention_fp8: q, k or v requires a gradient, and there is no backward yet; call it "
            "under torch.no_grad()"
        )


def refuse_rank(**tensors: Tensor) -> None:
    """Refuse the first that is not one of q, k and v by its dimensions alone."""
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions; it must have 4: "
                "(batch, seqlen, heads, head_dim)"
            )


def refuse_dtype(dtype: torch.dtype, *, fp8: bool = True) -> None:
    """Refuse tensors of a dtype that no kernel of attention takes, with how to convert them."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype of torch")
    if word_of(dtype) not in (DTYPES if fp8 else SIXTEEN_BITS):
        raise ValueError(
            f"q is {name_of(dtype)}; use fp16 or bf16: q.to(torch.bfloat16), and k and v likewise, "
            f"convert it{autocast.ALSO if dtype == torch.float32 else ''}"
        )


def refuse_head_dims(head_dim: int, head_dim_v: int, *, fp8: bool = True) -> None:
    """Refuse what no kernel takes, with what to fill it up to."""
    element_bytes = 1 if fp8 else 2
    widths = SM90.head_dims(element_bytes)
    step, least, most = widths.step, widths[0], widths[-1]
    bounds = f"up to {most}" if step == least else f"from {least} to {most}"
    for names, columns, after in (
        ("q and k", head_dim, f"pass scale = {head_dim} ** -0.5"),
        ("v", head_dim_v, "drop as many columns of out"),
    ):
        # `columns in taken` cannot be traced where sizes are open
        if least <= columns <= most and columns % step == 0:
            continue
        message = (
            f"{names} have head_dim {columns}" if "and" in names else f"v has head_dim {columns}"
        )
        message += "; in e4m3 it" if fp8 else "; it"
        message += f" must be a multiple of {step} {bounds}"
        if more := SM90.next_head_dim(columns, element_bytes):
            when = "before quantising fill" if fp8 else "fill"
            message += f": {when} it up with zeros to {more}, and {after}"
        raise ValueError(message)


def refuse_word(key: str, word: object, words: Iterable[object]) -> None:
    """Refuse a word that is none of these."""
    words = tuple(words)
    if word not in words:
        listed = ", ".join(map(repr, words))
        spelled = repr(word) if isinstance(word, str) else shown(word)
        raise ValueError(f"{key} is {spelled}; it must be one of {listed}")
