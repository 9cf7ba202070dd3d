"""A call's sizes in, the kernel that fagen.attention takes for it out: which, why, and how fast.

Or the kernel of its gradients, of fagen.attention_decode or of fagen.attention_varlen. Needs
neither torch nor a GPU.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from inspect import get_annotations
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from fagen import evidence, registry
from fagen.arch import SM90
from fagen.dispatch.rows import BOUNDS, MOST, TILE, Row
from fagen.dispatch.select import serve
from fagen.errors import FagenError, ScheduleError
from fagen.evidence import Evidence
from fagen.expr.canonical import Expression
from fagen.kind import load_named
from fagen.masking import Window
from fagen.paths import config_folder
from fagen.problem import HIDDEN, Problem, Sizes, flops
from fagen.registry import committed_file, plan
from fagen.render import hashes
from fagen.schedule import Schedule
from fagen.toml_lines import printable, read_text, shown
from fagen.variants import described, names_of
from fagen.vocab import (
    DTYPES,
    FORWARD,
    LENGTHS,
    ONE_QUERY,
    OUT_DTYPES,
    PASSES,
    PLAIN_MASKS,
    SCALE_ROWS,
    V_LAYOUTS,
)

LONGEST = 1 << 24  # sequence that a time is predicted for
LARGEST = 1 << 30  # of other sizes, as a kernel takes them
_SEQLEN = 4_096  # of a call that says none
_NAMED = "window", "mask", "score"  # which `described` refuses
# what annotations of `pick` stand for, and in words; fagen.prepare takes the same
_TAKEN: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (Integral, "True or False"),
    str: (str, "a word"),
    NoneType: (NoneType, "None"),
}


@dataclass(frozen=True)
class Pick:
    """The schedule that serves a call, and what is known of it.

    `row` is the dispatch table's that names it; without one it is a committed schedule, or
    `derived`. `predicted_seconds` are of one call, by the model that orders a search; None where
    its kind has none.
    """

    problem: Problem
    sizes: Sizes
    card: str  # "": the one that tables name first
    schedule: Schedule
    row: Row | None
    derived: bool
    predicted_seconds: float | None

    @property
    def slug(self) -> str:
        """The schedule's."""
        return self.schedule.slug

    @property
    def decodes(self) -> bool:
        """Whether it is for fagen.attention_decode."""
        return bool(PASSES[self.problem.kind].computes)

    @property
    def predicted_tflops(self) -> float | None:
        """TFLOP/s at the predicted time."""
        if self.predicted_seconds is None:
            return None
        return flops(self.problem, self.sizes) / self.predicted_seconds / 1e12

    @property
    def file(self) -> Path | None:
        """Where the schedule is committed, or kept by a search; None where it is in no file."""
        own = config_folder()
        places = [committed_file(self.slug)]
        places += [own / self.schedule.kind / f"{self.slug}.toml"] if own else []
        return next((path for path in places if path.exists()), None)

    @property
    def why(self) -> str:
        """Why it is this one."""
        if self.row:
            return _why(self.row, self.sizes, self.card)
        none = "no row of a dispatch table is for this call; "
        if self.decodes:
            untuned = ", and nobody tuned it" if self.derived else ""
            return none + f"by rule it follows from heads, queries and batch{untuned}"
        if self.derived:
            return none + "no schedule was tuned for it: derived, the most promising tile that fits"
        return none + "it is the plainest committed schedule"

    @cached_property
    def evidence(self) -> Evidence | None:
        """What was measured of this very source; None where nothing was."""
        return evidence.of_source(self.slug, lambda: hashes(plan(self.schedule)))

    @property
    def found(self) -> str:
        """What a search says of it in the file that it wrote into your own folder, or ""."""
        with suppress(FagenError):
            own = config_folder()
            if own and self.file and self.file.is_relative_to(own):
                lines = read_text(self.file).splitlines()
                notes = (line[2:] for line in lines if line.startswith("# Found by"))
                return printable(next(notes, ""))
        return ""

    @property
    def toml(self) -> str:
        """A file that says its schedule, texts of masks and scores among it."""
        return registry.written(self.schedule, f"What `fagen pick` has for {self.problem}.")

    @property
    def search(self) -> str:
        """The command that would search for a better one; "" where there is none."""
        return search_command(self.slug) if registry.kind(self.schedule.kind).space else ""

    @property
    def predicted(self) -> str:
        """The predicted time and speed, in words."""
        if self.predicted_seconds is None or self.predicted_tflops is None:
            return "no model of this kind"
        return f"{self.predicted_seconds * 1e6:,.1f} µs, {self.predicted_tflops:.0f} TFLOP/s"

    def record(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        measured = self.evidence
        return {
            "slug": self.slug,
            "problem": asdict(self.problem),
            "sizes": asdict(self.sizes),
            "why": self.why,
            "row": self.row and self.row.where,
            "card": self.row.card if self.row else self.card,
            "derived": self.derived,
            "file": self.file,
            "predicted": {
                "microseconds": self.predicted_seconds and self.predicted_seconds * 1e6,
                "tflops": self.predicted_tflops,
            },
            "measured": measured
            and {
                "card": measured.card,
                "date": measured.date,
                "yardstick": measured.yardstick,
                "speeds": [asdict(speed) for speed in measured.speeds],
            },
            "found": self.found,
            "search": self.search,
        }

    def __str__(self) -> str:
        lines = {
            "for": f"{self.problem}{', decoding' * self.decodes}; {self.sizes}",
            "why": self.why,
            "schedule": printable(str(self.file)) if self.file else "in no file",
            "predicted": self.predicted,
            "measured": "; ".join(self._measured()) or self.found or "nothing of this source",
            "search": self.search or "nothing searches such schedules",
        }
        return "\n".join([self.slug, *(f"  {name:<10} {text}" for name, text in lines.items())])

    def _measured(self) -> Iterator[str]:
        if measured := self.evidence:
            yield from (f"{speed} on {measured.card}" for speed in measured.speeds_in_words())


def pick(
    *,
    dtype: Any,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: Window = None,
    mask: str | Expression | None = None,
    softcap: float | None = None,
    score: str | Expression | None = None,
    sinks: Any = None,
    batch: int = 1,
    heads: int | None = None,
    kv_heads: int | None = None,
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    v_layout: str | None = None,
    scale_rows: int | None = None,
    out_dtype: Any = None,
    card: str = "",
    kind: str = FORWARD,
    deterministic: bool = False,
    lengths: str = LENGTHS[0],
    **given: Any,
) -> Pick:
    """Return the kernel that fagen.attention takes for a call with these sizes on a card.

    Or, with "backward" for `kind`, the one that computes the gradients of such a call; with
    `deterministic` where the call or torch.use_deterministic_algorithms(True) asks for it. Or, with
    "decode", the one that fagen.attention_decode takes; and with "varlen" for `lengths` that of
    fagen.attention_varlen, or of its gradients, predicted for sequences of one length.

    `causal`, `window`, `mask`, `softcap` and `score` are as of the call, and mask may be any word
    that a schedule's may; `sinks` is their dtype. What a mask or a score is given by name may be
    left out, for one kernel serves all values.

    dtype is "fp16", "bf16", "e4m3", or torch's for it. heads are by default those of a hidden size
    of 2048, kv_heads as many as heads, seqlen 4,096 queries, seqlen_k as many keys; to decode one
    query and 4,096 keys. v_layout, scale_rows and
    out_dtype go with e4m3, and mean what they do in fagen.attention. `card` is a GPU's name;
    without one, rows for the card that the tables name first count, as for tensors on a CPU.

    Raises TypeError for an argument of another type; ScheduleError where no kernel computes it, for
    sizes that do not go together, and where a dispatch table cannot be read.
    """
    if given:
        # a name that is unknown is told first
        described(pick, False, None, mask, None, score, None, given)
    _refuse_other_types(locals())
    try:
        variant = described(pick, bool(causal), window, mask, softcap, score, sinks, given)
    except ValueError as error:
        raise ScheduleError(str(error).removeprefix("pick: ")) from None
    which, score, sink = names_of(variant)
    problem = _problem(dtype, head_dim, head_dim_v, which, v_layout, scale_rows, out_dtype)
    _refuse_head_dims(problem)
    _refuse_words(("kind", kind, tuple(PASSES)), ("lengths", lengths, LENGTHS))
    decodes = bool(PASSES[kind].computes)
    if decodes and lengths != LENGTHS[0]:
        raise ScheduleError("decoding reads each sequence's length anyway: leave lengths out")
    if deterministic and not PASSES[kind].gradients:
        raise ScheduleError(f"the {kind} pass is deterministic anyway: leave deterministic out")
    problem = replace(problem, kind=kind, deterministic=deterministic, lengths=lengths)
    problem = replace(problem, score=score, sink=sink)
    heads = max(1, HIDDEN // max(1, head_dim)) if heads is None else heads
    seqlen = (1 if decodes else _SEQLEN) if seqlen is None else seqlen
    if seqlen_k is None:
        seqlen_k = _SEQLEN if decodes else seqlen
    if decodes and seqlen == 1 and which in PLAIN_MASKS:
        problem = replace(problem, mask=ONE_QUERY)  # it sees the same keys under either
    numbers = batch, heads, heads if kv_heads is None else kv_heads, seqlen, seqlen_k
    sizes = Sizes(*map(int, numbers))
    _refuse(sizes)
    served = serve(problem, sizes, card)
    seconds = None
    if space := registry.kind(served.schedule.kind).space:
        (seconds,) = load_named(space).predictor([sizes])(served.schedule.values())
    return Pick(problem, sizes, card, *served, predicted_seconds=seconds)


def search_command(slug: str) -> str:
    """Return the command that searches for what beats a schedule, for fagen.attention to take.

    Of a mask or a score that a call has said by its text there is none: another process does not
    know it. Nor of keys in pages, whose kernels have the tiles of others.
    """
    if re.search(r"_((mask|score)[0-9a-f]{10}|paged)(_|$)", slug):
        return ""
    own = config_folder()
    place = printable(shlex.quote(str(own))) if own else '"$XDG_CONFIG_HOME/fagen"'
    return f"fagen search {slug} --minutes 10 --write {place}"


def _problem(
    dtype: Any,
    head_dim: int,
    head_dim_v: int | None,
    mask: str,
    v_layout: str | None,
    scale_rows: int | None,
    out_dtype: Any,
) -> Problem:
    word = _word(dtype)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if word not in DTYPES or not DTYPES[word].fp8:  # a wrong one is refused with what is taken
        if (v_layout, scale_rows, out_dtype) != (None, None, None):
            raise ScheduleError(f"v_layout, scale_rows and out_dtype go with e4m3; dtype is {word}")
        return Problem(word, head_dim, head_dim_v, mask, word, "", 0)
    v_layout, scale_rows = v_layout or "rows", scale_rows or 0
    out = _word(out_dtype) if out_dtype else DTYPES[word].out
    _refuse_words(
        ("v_layout", v_layout, V_LAYOUTS),
        ("scale_rows", scale_rows, (0, *SCALE_ROWS)),
        ("out_dtype", out, OUT_DTYPES),
    )
    return Problem(word, head_dim, head_dim_v, mask, out, v_layout, scale_rows)


def _refuse_words(*arguments: tuple[str, object, Collection[object]]) -> None:
    """Raise ScheduleError for the first argument that is none of the words it may be."""
    for name, value, words in arguments:
        if value not in words:
            listed = ", ".join(map(str, words))
            raise ScheduleError(f"{name} is {value!r}; it must be one of {listed}")


def _word(dtype: Any) -> str:
    """A schedule's word for a dtype, of torch's or of its name."""
    name = printable(str(dtype)).removeprefix("torch.")
    return next((row.name for row in DTYPES.values() if row.torch == name), name)


def _refuse_other_types(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for the first of pick's arguments that is not of its annotation's type."""
    for name, hint in get_annotations(pick, eval_str=True).items():
        types = [_TAKEN[kind] for kind in get_args(hint) or (hint,) if kind in _TAKEN]
        if not types or name not in arguments or name in _NAMED:  # dtypes are anybody's
            continue
        value, kind = arguments[name], type(arguments[name])
        if hint is bool and value not in (0, 1) and issubclass(kind, Integral):
            raise TypeError(f"pick: {name} is {shown(value)}; it must be True or False")
        numpys = hint is bool and kind.__name__ == "bool"
        if not numpys and not issubclass(kind, tuple(array_type for array_type, _ in types)):
            words = " or ".join(word for _, word in types)
            raise TypeError(f"pick: {name} is of type {kind.__name__}; it must be {words}")


def _refuse_head_dims(problem: Problem) -> None:
    """Raise ScheduleError for columns that no kernel has, with what to fill them up to."""
    if problem.dtype not in DTYPES:  # which is refused with what is taken
        return
    element_bytes = DTYPES[problem.dtype].bytes
    head_dims = SM90.head_dims(element_bytes)
    for name in ("head_dim", "head_dim_v"):
        columns = getattr(problem, name)
        if columns in head_dims:
            continue
        more = SM90.next_head_dim(columns, element_bytes)
        fill = f": fill it up with zeros to {more}" if more else ""
        raise ScheduleError(
            f"{name} is {shown(columns)}; in {problem.dtype} it must be a multiple of "
            f"{head_dims.step} from {head_dims[0]} to {head_dims[-1]}{fill}"
        )


def _refuse(sizes: Sizes) -> None:
    """Raise ScheduleError for sizes that no call can have, by the names of pick's arguments."""
    for key, size in asdict(sizes).items():
        name = key.removesuffix("_q")
        most = LONGEST if name.startswith("seqlen") else LARGEST
        if not 1 <= size <= most:
            raise ScheduleError(f"{name} is {shown(size)}; it must be from 1 to {most:,}")
    if sizes.heads % sizes.kv_heads:
        raise ScheduleError(
            f"kv_heads = {sizes.kv_heads} does not divide heads = {sizes.heads}: each head of k "
            "and v serves as many of q"
        )


def _why(row: Row, sizes: Sizes, card: str) -> str:
    """Say which row it is, and what of the call it is for."""
    rows = sizes.batch * sizes.heads * sizes.seqlen_q
    size_here = f", here {rows:,}" if row.for_few_rows else ""
    if row.tiles_to != MOST:
        size_here = f", here {sizes.batch * sizes.heads * -(-sizes.seqlen_q // TILE):,}"
    other = f"; {printable(card)} has no rows of its own" if card and card != row.card else ""
    return f"{row.where}, for {sizes_of(row)}{size_here} on {printable(row.card)}{other}"


def sizes_of(row: Row) -> str:
    """Say of which calls a row is, apart from problem and card."""
    bounds = ((getattr(row, bound.name), bound.words) for bound in BOUNDS if bound.words)
    at_most = [f"{most:,} {words}" for most, words in bounds if most != MOST]
    words = [f"at most {' and '.join(at_most)}"] if at_most else []
    if row.group_rows:
        words.insert(0, f"decoding of {row.group_rows} rows to a KV head")
    elif not row.for_few_rows:
        keys = f"{row.keys_from:,} to {row.keys_to:,} keys"
        if row.keys_to == MOST:
            keys = f"{row.keys_from:,} keys and more" if row.keys_from else "any number of keys"
        words.append(keys)
    if row.step_clocks:
        words.append("where its tiles take the fewest clocks")
    return ", ".join(words)
