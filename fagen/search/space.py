"""Turn a space's TOML, or a slug, into points that fit, with predictions, and reasons for the rest.

A space says for any key of a schedule a value, a list, or a range { from, to, step }; the tables
are those of a schedule.  What it leaves out has the values that its kind tries, or its own default.
"""

import json
import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

from fagen import registry
from fagen.errors import OverBudget, ScheduleError
from fagen.problem import Problem, Sizes, solves
from fagen.schedule import Keys, Schedule, Section
from fagen.schedule.faults import Fault, faults, refusal
from fagen.search.kinds import Space, space_of
from fagen.search.ranges import listed
from fagen.search.shapes import (
    DRAWN,
    LISTED,
    PACKED,
    SEQLENS,
    PackedShape,
    Shape,
    Strict,
    missing_sizes,
    packed_faults,
)
from fagen.toml_lines import Origin, nearest_or_all, printable, read_toml, shown
from fagen.vocab import LENGTHS

MAX_POINTS = 1_000_000  # of all targets of a space; each takes some 20 µs
MAX_TIMES = 10 * MAX_POINTS  # predicted: points times shapes

Derive = Callable[[Mapping[str, Any]], Any]  # a key's value, of those that it follows from


@dataclass(frozen=True)
class Point:
    """A schedule that fits, by the keys that the space tries, and its predicted times."""

    keys: tuple[Any, ...]
    seconds: tuple[float, ...]  # predicted, of each size


@dataclass(frozen=True)
class Refusal:
    """Why some points are none, how many, and one of them."""

    reason: str
    points: int
    example: str


class Effort(Strict):
    """How a space is searched."""

    compile: int = Field(default=200, ge=1)  # schedules of each target, at most
    share: float = Field(default=1.0, ge=1e-6, le=1e6)  # of the time, beside other spaces
    patience: int = Field(default=64, ge=1)  # kernels timed since one was faster than all before
    prune: float = Field(default=1.6, gt=1)  # leave out what is predicted so much slower
    anchor: str | None = None  # a slug; else the committed schedule, or the best predicted
    long_runs: bool = True  # of the last few, which reach the power limit


class _File(Strict):
    shapes: list[Shape] = Field(default=[Shape(seqlen=n) for n in SEQLENS], min_length=1)
    search: Effort = Effort()


class _PackedFile(Strict):
    shapes: list[PackedShape] = Field(
        default=[PackedShape.model_validate(shape) for shape in PACKED], min_length=1
    )
    search: Effort = Effort()


@dataclass(frozen=True)
class Declared:
    """A declared search: what is computed, at which shapes, and what is tried."""

    where: str
    text: str
    kind: str
    values: Mapping[str, tuple[Any, ...]]  # of the keys that are said, and of those tried
    shapes: tuple[Shape | PackedShape, ...]
    effort: Effort

    @property
    def name(self) -> str:
        """What to call it where the folder it lies in is nobody's concern."""
        return printable(Path(self.where).name)

    @property
    def points(self) -> int:
        """How many there are of all targets, those that do not fit among them."""
        return math.prod(map(len, self.values.values()))

    def targets(self) -> tuple[Problem, ...]:
        """What is to be computed fast: every combination of the keys that say it."""
        names = space_of(self.kind).problem_keys
        found = []
        for combination in product(*(self.values.get(key, (None,)) for key in names)):
            keys = dict(zip(names, combination, strict=True))
            for key in names:
                if keys[key] is None:
                    keys[key] = _keys_of(self.kind).default(key, keys)
            found.append(Problem(**keys, kind=self.kind))
        return tuple(found)

    def sizes(self, target: Problem) -> tuple[Sizes, ...]:
        """The sizes at which a target is timed."""
        return tuple(shape.sizes(target.head_dim) for shape in self.shapes)


@dataclass(frozen=True)
class Survey:
    """All points of one target: those that fit, and why the others do not."""

    kind: str
    target: Problem
    names: tuple[str, ...]  # of the keys that are tried
    left_out: frozenset[str]  # those of them that a point may leave at their default
    sizes: tuple[Sizes, ...]
    weights: tuple[float, ...]  # of the sizes; they add up to 1
    total: int
    refusals: tuple[Refusal, ...]
    points: tuple[Point, ...]
    reasons: Mapping[tuple[int, int], str]  # why a whole tile has no point
    cells: frozenset[tuple[int, int]]  # each tile that was looked at

    def keys(self, point: Point) -> dict[str, Any]:
        """A point's keys, with what is computed."""
        problem = {key: getattr(self.target, key) for key in space_of(self.kind).problem_keys}
        return {**problem, **dict(zip(self.names, point.keys, strict=True))}

    def schedule(self, point: Point) -> Schedule:
        """The schedule that a point is."""
        said = {key: value for key, value in self.keys(point).items() if value is not None}
        return registry.kind(self.kind).schedule.make(**said)

    @cached_property
    def best(self) -> tuple[Point, ...]:
        """The points, fastest predicted first."""
        return tuple(sorted(self.points, key=self.predicted))

    def predicted(self, point: Point) -> float:
        """The weighted geometric mean of a point's predicted times, in seconds."""
        return mean(point.seconds, self.weights)


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights that add up to 1 and are all above 0, of any that are finite and above 0."""
    most = max(weights)
    scaled = [max(weight / most, sys.float_info.min) for weight in weights]
    total = math.fsum(scaled)
    return tuple(weight / total for weight in scaled)


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted geometric mean of a figure of each size."""
    logs = (weight * math.log(v) for v, weight in zip(values, weights, strict=True))
    return math.exp(math.fsum(logs) / math.fsum(weights))


def _keys_of(kind: str) -> Keys:
    return registry.kind(kind).schedule.keys


# ---- enumerating --------------------------------------------------------------------------------


def survey(declared: Declared, target: Problem) -> Survey:
    """Look at every point of a target."""
    space, keys = space_of(declared.kind), _keys_of(declared.kind)
    tried = {key: said for key, said in declared.values.items() if key not in space.problem_keys}
    names, sizes = tuple(tried), declared.sizes(target)
    base, predict = _base(target, space, keys), space.predictor(sizes)
    said = {*space.problem_keys, *(name for name in names if None not in tried[name])}
    base, derived = _derived_once(base, tried, keys, said)
    m_at, n_at = map(names.index, space.tile_keys)

    sized_by = itemgetter(*space.summed_keys)
    rules, sums = keys.rules, space.sums
    over: dict[tuple[Any, ...], tuple[str, int, int] | None] = {}
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    cells: dict[tuple[int, int], str | None] = {}
    points = []
    total = 0
    for combination in product(*tried.values()):
        total += 1
        values = base | dict(zip(names, combination, strict=True))
        for key, derive in derived:
            if values.get(key) is None:
                values[key] = derive(values)
        refused: tuple[str, Any, Any] | None
        if broken := next(rules(values), None):
            refused = (f"rule of {broken[0]}", *broken)
        else:
            sized = sized_by(values)
            if sized not in over:
                over[sized] = next(sums(values), None)
            refused = over[sized]
        cell = (combination[m_at], combination[n_at])
        if refused is None:
            points.append(Point(combination, predict(values)))
            cells[cell] = None
        else:
            reason = refused[0]
            counts[reason] = counts.get(reason, 0) + 1
            if reason not in examples:
                examples[reason] = _example(refused, values, names, space, keys)
            if cell not in cells or (cells[cell] and reason in space.budgets):
                cells[cell] = reason
    reasons = sorted(counts, key=lambda reason: (reason in space.budgets, reason))
    return Survey(
        kind=declared.kind,
        target=target,
        names=names,
        left_out=frozenset(name for name in names if None in tried[name]),
        sizes=sizes,
        weights=normalised([shape.weight for shape in declared.shapes]),
        total=total,
        refusals=tuple(Refusal(r, counts[r], examples[r]) for r in reasons),
        points=tuple(points),
        reasons={cell: reason for cell, reason in cells.items() if reason},
        cells=frozenset(cells),
    )


def _base(target: Problem, space: Space, keys: Keys) -> dict[str, Any]:
    """Every key's value before the space has its say; what is derived comes later."""
    values: dict[str, Any] = {key: getattr(target, key) for key in space.problem_keys}
    for key in keys.sections:
        if key not in values and key not in keys.required and key not in keys.derived:
            values[key] = keys.default(key, values)
    return values


def _derived_once(
    base: Mapping[str, Any], tried: Mapping[str, Sequence[Any]], keys: Keys, said: Container[str]
) -> tuple[dict[str, Any], list[tuple[str, Derive]]]:
    """Derive what is the same for every point; return base with it, and what is left to derive."""
    same = {key: value for key, value in base.items() if key not in tried}
    left = []
    for key, derive in keys.derived.items():
        if key not in said:
            if key not in tried:
                with suppress(KeyError):  # it follows from what points differ in
                    same[key] = derive(same)
                    continue
            left.append((key, derive))
    return {**base, **same}, left


def _example(
    refused: tuple[str, Any, Any],
    values: Mapping[str, Any],
    names: Sequence[str],
    space: Space,
    keys: Keys,
) -> str:
    """Say which point is refused, by its keys that are not at their default, and why."""
    reason, what, limit = refused
    said = f"{what:,} > {limit:,}" if reason in space.budgets else f"{what} {limit}"
    told = [
        f"{name} = {values[name]}"
        for name in names
        if name in keys.required or values[name] != keys.default(name, values)
    ]
    return f"{', '.join(told)}: {said}"


# ---- reading ------------------------------------------------------------------------------------


def space_like(slug: str) -> Declared:
    """What might beat a schedule: all that a search tries, and the rest as it is there.

    Raises ScheduleError where it is no slug, or of what is not searched.
    """
    schedule = registry.from_slug(slug)
    values = {key: (value,) for key, value in schedule.values().items()}
    if unsearched := _unsearched(values, space_of(schedule.kind), schedule.keys):
        like = schedule.but(**{key: None for (_, key), _ in unsearched})
        told = "; ".join(f"{'.'.join(path)} {said}" for path, said in unsearched)
        raise ScheduleError(f"{slug}: {told}: `fagen search {like.slug}`")
    without = {"out_dtype"} & schedule.keys.sections.keys()  # which has no part in the speed
    tried = {*space_of(schedule.kind).defaults, *without}
    tables: dict[str, list[str]] = {}
    for key, value in schedule.settings().items():
        if key not in tried:
            section = schedule.keys.sections[key]
            tables.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    anchor = schedule.but(**dict.fromkeys(without)).slug
    tables["search"] = [f'anchor = "{anchor}"']
    lines = [line for name, keys in tables.items() for line in (f"[{name}]", *keys, "")]
    for shape in space_of(schedule.kind).shapes_like(schedule.values()):
        lines += ["[[shapes]]", *(f"{key} = {size}" for key, size in shape.items()), ""]
    return parse_space("\n".join(lines), slug)


def parse_space(text: str, where: str = "space") -> Declared:
    """Read a space from TOML text; `where` names it in messages.

    Raises ScheduleError with all faults, and where there would be too many points.
    """
    return declared_by(*read_toml(text, where), text)


def declared_by(tables: dict[str, Any], origin: Origin, text: str) -> Declared:
    """Read a space from its tables, of a text that may hold more.  Raises as parse_space does."""
    kind = registry.named(tables, origin)
    space, keys = space_of(kind), _keys_of(kind)
    own = {name: tables.pop(name) for name in _File.model_fields if name in tables}
    found = list(missing_sizes(own.get("shapes"), space.shape_keys))
    if space.shapes:
        own.setdefault("shapes", [dict(shape) for shape in space.shapes])
    kind_of_file = _PackedFile if _packed(tables, space, keys) else _File
    file: _File | _PackedFile
    try:
        file = kind_of_file.model_validate(own)
        found += packed_faults([one for one in file.shapes if isinstance(one, PackedShape)])
    except ValidationError as invalid:
        file = kind_of_file()
        found += _own_faults(invalid, PackedShape if kind_of_file is _PackedFile else Shape)
    values = dict(space.defaults)
    for section, table in tables.items():
        if section not in keys.tables:
            if close := get_close_matches(section, _File.model_fields, 1):
                found.append(((section,), f"is not a table of a space; did you mean {close[0]}?"))
            else:
                found += _faults(section, table, keys)
        elif not isinstance(table, dict):
            found += _faults(section, table, keys)
        else:
            for key, said in table.items():
                values[key], wrong = _tried(section, key, said, space, keys)
                found += wrong
    found += _unsearched(values, space, keys)
    if len({*values.get("lengths", ())} & {*LENGTHS}) > 1:
        said = "names both: their shapes are others, so make two spaces of it"
        found.append(((keys.sections["lengths"], "lengths"), said))
    for key in sorted(keys.required.intersection(space.problem_keys) - values.keys()):
        found.append(((keys.sections[key], key), "is missing: a value or a list"))
    if found:
        raise refusal(found, origin)
    declared = Declared(origin.where, text, kind, values, tuple(file.shapes), file.search)
    _refuse_too_many(declared, origin)
    if found := [*_head_faults(declared), *_anchor_faults(declared)]:
        raise refusal(found, origin)
    return declared


def _tried(
    section: str, key: str, said: Any, space: Space, keys: Keys
) -> tuple[tuple[Any, ...], list[Fault]]:
    """Return the values of a key, or what is wrong with the first of them that is wrong."""
    meant, found = listed((section, key), said, MAX_POINTS)
    if found:
        return (), found
    beside = {k: v for k, v in space.example.items() if keys.sections[k] == section}

    def judged(value: Any) -> list[Fault]:
        return list(_faults(section, {**beside, key: value}, keys))

    if isinstance(meant, range) and (found := judged(meant[0]) or judged(meant[-1])):
        return (), found  # limits are at the ends: what is between is not looked at
    wrong = [faults for value in meant if (faults := judged(value))]
    if wrong:
        return (), wrong[0] if len(wrong) == 1 else [
            (path, f"{said} ({len(wrong):,} of its {len(meant):,} values are refused)")
            for path, said in wrong[0]
        ]
    return tuple(dict.fromkeys(meant)), []


def _unsearched(
    values: Mapping[str, tuple[Any, ...]], space: Space, keys: Keys
) -> list[tuple[tuple[str, str], str]]:
    """Say which keys ask for another computation than any that a search can tell from others."""
    found = []
    for field in fields(Problem):
        name, only = field.name, field.default
        if name in keys.sections and name not in space.problem_keys and only is not None:
            others = [value for value in values.get(name, ()) if value != only]
            said = f"is not searched yet, {shown(only)} is: leave it out"
            found += [((keys.sections[name], name), f"= {shown(v)} {said}") for v in others]
    return found


def _faults(section: str, table: Any, keys: Keys) -> Iterator[Fault]:
    """Judge one table as a schedule's would be."""
    try:
        _part(section, keys.tables.get(section)).model_validate({section: table})
    except ValidationError as invalid:
        yield from faults(invalid, keys)


@cache
def _part(name: str, section: type[Section] | None) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (section, ...)} if section else {}
    return create_model("Part", __base__=Strict, **fields)


def _packed(tables: Mapping[str, Any], space: Space, keys: Keys) -> bool:
    """Whether a file's shapes are those of packed sequences."""
    if "lengths" not in space.problem_keys:
        return False
    table = tables.get(keys.sections["lengths"])
    said = table.get("lengths") if isinstance(table, dict) else None
    return said in (LENGTHS[1], [LENGTHS[1]])


def _own_faults(invalid: ValidationError, shape: type[Shape | PackedShape]) -> Iterator[Fault]:
    """Yield what is wrong with the tables that a schedule has not: shapes, and how to search."""
    for error in invalid.errors(include_url=False):
        kind, (table, *steps) = error["type"], map(str, error["loc"])
        path = (table, *(step for step in steps if step not in (LISTED, DRAWN)))
        said = f"{error['msg'][0].lower()}{error['msg'][1:]}"
        if kind == "extra_forbidden":
            known: Any = (shape if table == "shapes" else Effort).model_fields
            if table == "shapes" and shape is Shape and path[-1] in PackedShape.model_fields:
                yield path, 'is of packed sequences, whose space says lengths = "varlen"'
                continue
            if len(path) > 3:  # within lengths that are drawn
                known = ("from", "to")
            yield path, f"is not a key of {table}{nearest_or_all(path[-1], known)}"
        elif kind == "missing":
            yield path, "is missing"
        else:
            yield path, f"= {shown(error['input'])}: {said}"


def _refuse_too_many(declared: Declared, origin: Origin) -> None:
    """Raise ScheduleError where there are more points than anyone would wait for."""
    several = {key: len(values) for key, values in declared.values.items() if len(values) > 1}
    points, shapes = declared.points, len(declared.shapes)
    if points <= MAX_POINTS and points * shapes <= MAX_TIMES:
        return
    product = " × ".join(f"{count:,} of {key}" for key, count in several.items())
    if points > MAX_POINTS:
        said = f"{points:,} points ({product}), {MAX_POINTS:,} at most"
    else:
        said = f"{points:,} points ({product}) at {shapes:,} shapes, {MAX_TIMES:,} times at most"
    raise ScheduleError(
        f"{printable(origin.where)}: {said}; say fewer values, or make several spaces of it"
    )


def _head_faults(declared: Declared) -> Iterator[Fault]:
    """Yield each shape whose query heads are not evenly many for each head of K and V."""
    targets = declared.targets()
    for number, shape in enumerate(declared.shapes):
        for head_dim in dict.fromkeys(target.head_dim for target in targets):
            size = shape.sizes(head_dim)
            if size.heads % size.kv_heads:
                near = max(n for n in range(1, size.kv_heads) if size.heads % n == 0)
                given = "" if shape.heads else f", which goes with head_dim = {head_dim}"
                yield (
                    ("shapes", str(number), "kv_heads"),
                    f"= {size.kv_heads} does not divide heads = {size.heads}{given}: "
                    f"the nearest that does is {near}",
                )
                break


def _anchor_faults(declared: Declared) -> Iterator[Fault]:
    """Yield why the anchor cannot be one: it is no schedule, of nothing here, or over budget."""
    if (anchor := declared.effort.anchor) is None:
        return
    path, targets = ("search", "anchor"), declared.targets()
    try:
        schedule = registry.from_slug(anchor)
        if not any(solves(schedule, target) for target in targets):
            names = ", ".join(target.name for target in targets[:4])
            more = f" and {len(targets) - 4} more" if len(targets) > 4 else ""
            yield path, f"= {shown(anchor)} computes none of what is searched: {names}{more}"
        else:
            registry.plan(schedule)
    except ScheduleError as error:
        yield path, f"= {shown(anchor)} is no schedule: {'; '.join(str(error).splitlines())}"
    except OverBudget as error:
        near = str(error).splitlines()[-1].strip()
        yield path, f"= {shown(anchor)} does not fit ({near}): `fagen check {anchor}` says why"
