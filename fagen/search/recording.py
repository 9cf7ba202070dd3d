"""A run of a model goes in, the space of all its calls comes out, as a file.

Those are the calls of fagen.attention, fagen.attention_varlen and fagen.attention_decode.

Each problem that was called is a space of its own, with the sizes as its shapes and how often they
were called as weights; what a space leaves out is tried as widely as a search does.
"""

import fcntl
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from fagen import outputs, registry
from fagen.errors import FagenError, ScheduleError
from fagen.paths import path_of
from fagen.problem import Cell, Problem, Sizes, VarlenTotals, in_order
from fagen.search.declared import Declared, keys_of
from fagen.search.files import ARRAY, MAX_BYTES, parse_spaces
from fagen.search.files import WHAT as SPACE
from fagen.search.kinds import space_of
from fagen.search.shapes import MAX_SEQUENCES, MAX_SIZE
from fagen.toml_lines import printable, read_text
from fagen.vocab import DECODE, DTYPES, FORWARD

MOST_SIZES = 128  # of a problem: each of its kernels is timed at all of them
ALL_SIZES = 512  # of all problems together
MOST_PROBLEMS = 16
GRAINS = (64, 32, 16, 8, 4, 2, 1, 0.5, 0.25)  # lengths that count as one: so many to an octave

WHAT = "a recording of calls"
Weights = dict[Problem, dict[Sizes, float]]  # how often each was called


@contextmanager
def recording(path: str | PathLike[str]) -> Iterator[Path]:
    """Record all calls meanwhile, and at the end write them as a search space.

    Those are the calls of fagen.attention; of fagen.attention_varlen, of whose lengths the host
    knows the sum, how many there are, and the longest where max_seqlen_q and max_seqlen_k say it;
    and of fagen.attention_decode, where all keys that a cache has room for count.

    `path` is a TOML file, which `fagen search run` then takes. Calls are added to those of an
    earlier recording there. The file is written in one step, also where the body raises. Counted is
    what Python calls, of any thread of this process; a UserWarning says what could not be: symbolic
    sizes, and what torch.compile has traced, which runs without Python. Of more than 128 sizes of
    one problem, or 512 in all, those of nearly the same length count as one.

    Yields the path. Raises ScheduleError where the file that is there is no recording or has
    comments of somebody's own, FagenError where it is a symbolic link, where there is no folder for
    it, or while another recording goes on, TypeError where `path` is no path.
    """
    path = path_of(path, "recording").absolute()
    if not path.parent.is_dir():
        raise FagenError(
            f"{printable(str(path))}: there is no folder {printable(str(path.parent))}"
        )
    # what it would refuse at the end it refuses now
    outputs.refuse_loss(path, outputs.anything, WHAT)
    if path.exists() and not path.is_file():
        raise FagenError(f"{printable(str(path))} is no file")
    read_recording(path)
    from fagen.runtime.calls import counting  # torch, which takes seconds

    counted = None
    try:
        with counting() as counted:
            yield path
    finally:
        if counted:
            with _alone(path.parent):
                dropped = _add(path, counted.calls, counted.left_out)
            for why in dropped:
                warnings.warn(f"{path.name}: {why}", stacklevel=3)


def read_recording(path: Path) -> Weights:
    """Read what was recorded; nothing where there is no file yet.

    Raises ScheduleError where there is a file that no recording has written.
    """
    if not path.exists():
        return {}
    text = read_text(path, SPACE, MAX_BYTES)
    spaces = parse_spaces(text, str(path)) if text.strip() else ()
    outputs.refuse_comments(path, text, _COMMENTS, "take them out, or name another file")
    weights: Weights = {}
    for space in spaces:
        targets = space.targets()
        sizes: dict[Sizes, float] = {}
        more = len(targets) > 1 or space.kind not in (FORWARD, DECODE)
        for shape in space.shapes:
            at = shape.sizes(targets[0].head_dim)
            if at.varlen:
                lengths, at = at.sequences, VarlenTotals.of(at)
                more |= lengths != at.sequences  # which no call's host knows
            sizes[at] = _sum(sizes.get(at, 0.0), shape.weight)
        weights[_problem(space)] = sizes
        if more or not _says_the_same(space, text_of({_problem(space): sizes})):
            raise ScheduleError(
                f"{printable(str(path))}: the space of {targets[0].name} says more than "
                "a recording does, whose calls cannot be added to it: name another file, or leave "
                "out all but the problem and shapes"
            )
    return weights


def _says_the_same(space: Declared, text: str) -> bool:
    (again,) = parse_spaces(text, space.where)
    return (again.kind, again.values, again.effort) == (space.kind, space.values, space.effort)


def _problem(space: Declared) -> Problem:
    """What a space is for; in e4m3 that has to do with layout and scales too."""
    (target, *_) = space.targets()
    layout, rows = "", 0
    if DTYPES[target.dtype].fp8:
        layout = space.values.get("v_layout", ("",))[0]
        rows = space.values.get("scale_rows", (0,))[0]
    keys = target.dtype, target.head_dim, target.head_dim_v, target.mask
    more = {"lengths": target.lengths, **target.variant}
    return Problem(*keys, None, layout, rows, space.kind, **more)


# ---- writing ------------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: processes of one run, a GPU each, may record into the same file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _add(
    path: Path, calls: Mapping[Problem, Mapping[Sizes, int]], left_out: Mapping[str, int]
) -> list[str]:
    """Add calls to the file; return in words what is left out."""
    recorded = read_recording(path)
    dropped = Counter(left_out)
    for problem, sizes in calls.items():
        counts = recorded.setdefault(problem, {})
        for size, count in sizes.items():
            if max(vars(size).values()) > MAX_SIZE:
                dropped[f"with sizes above {MAX_SIZE:,}, the largest that is searched"] += count
            elif size.varlen and size.batch > MAX_SEQUENCES:
                dropped[f"of more than {MAX_SEQUENCES:,} sequences, the most searched"] += count
            else:
                counts[size] = _sum(counts.get(size, 0.0), count)
    kept: Weights = {}
    for problem in sorted(
        (problem for problem in recorded if recorded[problem]),
        key=lambda problem: -_sum(*recorded[problem].values()),
    ):
        # one search has one space for problems of one name
        if len(kept) == MOST_PROBLEMS or problem.name in {other.name for other in kept}:
            dropped[f"of {problem}, beside what was called more often"] += int(
                _sum(*recorded[problem].values())
            )
        else:
            kept[problem] = recorded[problem]
    if calls and kept:
        most = min(MOST_SIZES, ALL_SIZES // len(kept))
        text = text_of({problem: _fewer(weights, most) for problem, weights in kept.items()})
        parse_spaces(text, str(path))  # no file is left that cannot be read back
        outputs.write(path, text, outputs.anything, WHAT)
    messages = [f"not recorded: {count:,} calls {why}" for why, count in dropped.items()]
    if not calls:
        messages += ["no call of fagen.attention or its like was recorded; nothing is written"]
    return messages


def _fewer(weights: dict[Sizes, float], most: int) -> dict[Sizes, float]:
    """At most so many of the sizes: those nearly alike count as the one most called of them."""
    for grain in GRAINS:
        if len(weights) <= most:
            break
        alike: dict[tuple[int, ...], list[Sizes]] = {}
        for size in weights:
            lengths = (length for name, length in vars(size).items() if "heads" not in name)
            place = (round(math.log2(length) * grain) for length in lengths)
            alike.setdefault((size.heads, size.kv_heads, *place), []).append(size)
        weights = {
            max(sizes, key=lambda size: (weights[size], size)): _sum(
                *map(weights.__getitem__, sizes)
            )
            for sizes in alike.values()
        }
    kept = sorted(weights, key=lambda size: (-weights[size], size))[:most]
    return {size: weights[size] for size in kept}


def _sum(*weights: float) -> float:
    """The sum of finite numbers, which is finite too."""
    return min(sum(weights), sys.float_info.max)


_COMMENTS = (
    "# Recorded calls of fagen; weight says how often each size was called.",
    "# `fagen search run` on this file finds the fastest kernels for them.",
)


def text_of(weights: Weights) -> str:
    """Return a file of spaces that has these sizes as shapes, with these weights."""
    lines = list(_COMMENTS)
    several = len(weights) > 1
    for problem in sorted(weights, key=lambda problem: problem.name):
        lines += ["", f"[[{ARRAY}]]"] if several else []
        lines += _space(problem, weights[problem], f"{ARRAY}." if several else "")
    return "\n".join(lines) + "\n"


def _space(problem: Problem, weights: Mapping[Sizes, float], prefix: str) -> Iterator[str]:
    own_v, blocks = problem.head_dim_v != problem.head_dim, bool(problem.scale_rows)
    keys: dict[str, Any] = {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v if own_v else None,
        "mask": problem.mask,
        "lengths": problem.lengths if problem.varlen else None,
        "v_layout": problem.v_layout or None,
        "scales": "block" if blocks else None,
        "scale_rows": problem.scale_rows or None,
        **problem.variant,
    }
    settings = {key: value for key, value in keys.items() if value is not None}
    yield from registry.in_tables(settings, keys_of(problem.kind), prefix)
    always = space_of(problem.kind).shape_keys
    for cell in in_order(Cell(problem, sizes) for sizes in sorted(weights)):
        sizes = cell.sizes
        yield from ("", f"[[{prefix}shapes]]")
        yield from _packed(sizes) if isinstance(sizes, VarlenTotals) else _dense(sizes, always)
        yield f"heads = {sizes.heads}"
        if sizes.kv_heads != sizes.heads or "kv_heads" in always:
            yield f"kv_heads = {sizes.kv_heads}"
        weight = weights[sizes]
        yield f"weight = {weight:.0f}" if weight.is_integer() else f"weight = {weight!r}"


def _dense(sizes: Sizes, always: Sequence[str]) -> Iterator[str]:
    yield f"seqlen = {sizes.seqlen_q}"
    if not sizes.square or "seqlen_k" in always:
        yield f"seqlen_k = {sizes.seqlen_k}"
    yield f"batch = {sizes.batch}"


def _packed(sizes: VarlenTotals) -> Iterator[str]:
    sides = ("", sizes.tokens_q, sizes.seqlen_q), ("_k", sizes.tokens_k, sizes.seqlen_k)
    for side, tokens, longest in sides[: 2 - sizes.square]:
        yield f"tokens{side} = {tokens}"
        if longest > -(-tokens // sizes.batch):  # than it is where they are even
            yield f"longest{side} = {longest}"
    yield f"batch = {sizes.batch}"
