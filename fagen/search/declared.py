"""Turn a space's TOML, or a slug, into what it declares, or all faults out.

A space says for any key of a schedule a value, a list, or a range { from, to, step }; the tables
are those of a schedule.  What it leaves out has the values that its kind tries, or its own default.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

from fagen import registry
from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.space import Space
from fagen.problem import Problem, Sizes, solves
from fagen.schedule import Keys, Section
from fagen.schedule.faults import MOST, Fault, faults, judged_first, refusal, unknown
from fagen.search.kinds import space_of
from fagen.search.shapes import (
    DRAWN,
    LISTED,
    SEQLENS,
    VARLEN,
    Shape,
    Strict,
    VarlenShape,
    heads_of,
    missing_sizes,
    varlen_faults,
)
from fagen.toml_lines import Origin, nearest_or_all, printable, read_toml, shown
from fagen.vocab import CACHES, LENGTHS

MAX_POINTS = 1_000_000  # of all targets of a space; each takes some 20 µs
MAX_TIMES = 10 * MAX_POINTS  # predicted: points times shapes
_RANGE = "{ from = 64, to = 256, step = 16 }"
_ENDS = ("from", "to")
_PARTS = (*_ENDS, "step")


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
    shapes: list[VarlenShape] = Field(
        default=[VarlenShape.model_validate(shape) for shape in VARLEN], min_length=1
    )
    search: Effort = Effort()


@dataclass(frozen=True)
class Declared:
    """A declared search: what is computed, at which shapes, and what is tried."""

    where: str
    text: str
    kind: str
    values: Mapping[str, tuple[Any, ...]]  # of the keys that are said, and of those tried
    shapes: tuple[Shape | VarlenShape, ...]
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
        problems = []
        for combination in product(*(self.values.get(key, (None,)) for key in names)):
            keys = dict(zip(names, combination, strict=True))
            for key in names:
                if keys[key] is None:
                    keys[key] = keys_of(self.kind).default(key, keys)
            problems.append(Problem(**keys, kind=self.kind))
        return tuple(problems)

    def sizes(self, target: Problem) -> tuple[Sizes, ...]:
        """The sizes at which a target is timed."""
        return tuple(shape.sizes(target.head_dim) for shape in self.shapes)


def keys_of(kind: str) -> Keys:
    """The keys of a kind's schedules."""
    return registry.kind(kind).schedule.keys


# ---- reading -------------------------------------------------------------------------------------


def space_like(slug: str) -> Declared:
    """What might beat a schedule: all that a search tries, and the rest as it is there.

    Raises ScheduleError where it is no slug, or of what is not searched.
    """
    schedule = registry.from_slug(slug)
    values = {key: (value,) for key, value in schedule.values().items()}
    if unsearched := _unsearched(values, space_of(schedule.kind), schedule.keys):
        like = schedule.but(**{key: None for (_, key), _ in unsearched})
        reasons = "; ".join(f"{'.'.join(path)} {fault}" for path, fault in unsearched)
        raise ScheduleError(f"{slug}: {reasons}: `fagen search {like.slug}`")
    without = {"out_dtype"} & schedule.keys.sections.keys()  # which has no part in the speed
    tried = {*space_of(schedule.kind).defaults, *without}
    settings = {key: value for key, value in schedule.settings().items() if key not in tried}
    anchor = schedule.but(**dict.fromkeys(without)).slug
    lines = [*registry.in_tables(settings, schedule.keys), "[search]", f'anchor = "{anchor}"']
    for shape in space_of(schedule.kind).shapes_like(schedule.values()):
        lines += ["[[shapes]]", *(f"{key} = {size}" for key, size in shape.items())]
    return parse_space("\n".join(lines), slug)


def parse_space(text: str, where: str = "space") -> Declared:
    """Read a space from TOML text; `where` names it in messages.

    Raises ScheduleError with all faults, and where there would be too many points.
    """
    return declared_by(*read_toml(text, where), text)


def declared_by(tables: dict[str, Any], origin: Origin, text: str) -> Declared:
    """Read a space from its tables, of a text that may hold more.  Raises as parse_space does."""
    kind = registry.named(tables, origin)
    space, keys = space_of(kind), keys_of(kind)
    own = {name: tables.pop(name) for name in _File.model_fields if name in tables}
    broken = list(missing_sizes(own.get("shapes"), space.shape_keys))
    if space.shapes:
        own.setdefault("shapes", [dict(shape) for shape in space.shapes])
    kind_of_file = _PackedFile if _packed(tables, space, keys) else _File
    file: _File | _PackedFile
    try:
        file = kind_of_file.model_validate(own)
        broken += varlen_faults([shape for shape in file.shapes if isinstance(shape, VarlenShape)])
    except ValidationError as invalid:
        file = kind_of_file()
        broken += _own_faults(invalid, VarlenShape if kind_of_file is _PackedFile else Shape)
    values = dict(space.defaults)
    for section, table in tables.items():
        if section not in keys.tables:
            broken.append(((section,), _unknown_table(section, keys) if len(broken) < MOST else ""))
        elif not isinstance(table, dict):
            broken += _faults(section, table, keys)
        else:
            for key, value in table.items():
                if key not in keys.tables[section].model_fields and len(broken) >= MOST:
                    broken.append(((section, key), ""))
                    continue
                values[key], wrong = _tried(section, key, value, space, keys)
                broken += wrong
    broken += _unsearched(values, space, keys)
    if len({*values.get("lengths", ())} & {*LENGTHS}) > 1:
        why = "names both: their shapes are others, so make two spaces of it"
        broken.append(((keys.sections["lengths"], "lengths"), why))
    if {*values.get("cache", ())} - {CACHES[0]}:
        why = f'is to be "{CACHES[0]}": kernels of keys in pages have the tiles of the others'
        broken.append(((keys.sections["cache"], "cache"), why))
    for key in sorted(keys.required.intersection(space.problem_keys) - values.keys()):
        broken.append(((keys.sections[key], key), "is missing: a value or a list"))
    if broken:
        raise refusal(broken, origin)
    declared = Declared(origin.where, text, kind, values, tuple(file.shapes), file.search)
    _refuse_too_many(declared, origin)
    if broken := [*_head_faults(declared), *_anchor_faults(declared)]:
        raise refusal(broken, origin)
    return declared


def _unknown_table(section: str, keys: Keys) -> str:
    if close := get_close_matches(section, _File.model_fields, 1):
        return f"is not a table of a space; did you mean {close[0]}?"
    return unknown((section,), keys)


def _tried(
    section: str, key: str, entry: Any, space: Space, keys: Keys
) -> tuple[tuple[Any, ...], list[Fault]]:
    """Return the values of a key, or what is wrong with the first of them that is wrong."""
    values, broken = _listed((section, key), entry)
    if broken:
        return (), broken
    beside = {k: v for k, v in space.example.items() if keys.sections[k] == section}

    def judged(value: Any) -> list[Fault]:
        return list(_faults(section, {**beside, key: value}, keys))

    if isinstance(values, range) and (broken := judged(values[0]) or judged(values[-1])):
        return (), broken  # limits are at the ends: what is between is not looked at
    wrong: list[list[Fault]] = []
    for value in _distinct(values):
        if faults := judged(value):
            wrong.append(faults)
        if len(wrong) > MOST:
            break
    if wrong:
        many = f"{len(wrong)}" if len(wrong) <= MOST else f"more than {MOST}"
        return (), wrong[0] if len(wrong) == 1 else [
            (path, f"{why} ({many} of its {len(values):,} values are refused)")
            for path, why in wrong[0]
        ]
    return tuple(dict.fromkeys(values)), []


def _listed(path: tuple[str, ...], value: Any) -> tuple[Sequence[Any], list[Fault]]:
    """Return the values that are meant, or what is wrong with how they are said.

    Of a range no value is made: it may stand for any number of them, and for MAX_POINTS at most.
    """
    if isinstance(value, list):
        return value, [] if value else [(path, "says no value")]
    if not isinstance(value, dict):
        return [value], []
    faults: list[Fault] = []
    for name, part in value.items():
        if name not in _PARTS:
            faults.append(((*path, name), f"is no part of a range{nearest_or_all(name, _PARTS)}"))
        elif type(part) is not int:  # true is no number
            faults.append(((*path, name), f"= {shown(part)} must be a whole number"))
        elif name == "step" and part < 1:
            faults.append(((*path, name), f"= {shown(part)} must be 1 or more"))
    if left := [name for name in _ENDS if name not in value]:
        faults.append((path, f"is a range without {' and '.join(left)}; one looks like {_RANGE}"))
    if faults:
        return (), faults
    first, last, step = value["from"], value["to"], value.get("step", 1)
    if last < first:
        return (), [(path, f"is a range from {shown(first)} down to {shown(last)}: no value")]
    if (count := (last - first) // step + 1) > MAX_POINTS:
        count_shown = f"{count:,}" if count.bit_length() <= 64 else shown(count)
        return (), [
            (path, f"stands for {count_shown} values; a space has {MAX_POINTS:,} points at most")
        ]
    return range(first, last + 1, step), []


def _distinct(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each value once; 1, 1.0 and true are three."""
    earlier: set[Any] = set()
    for value in values:
        typed = (type(value), value) if isinstance(value, str | int | float) else None
        if typed is None or typed not in earlier:
            earlier.add(typed)
            yield value


def _unsearched(
    values: Mapping[str, tuple[Any, ...]], space: Space, keys: Keys
) -> list[tuple[tuple[str, str], str]]:
    """Say which keys ask for another computation than any that a search can tell from others."""
    broken = []
    for field in fields(Problem):
        name, only = field.name, field.default
        if name in keys.sections and name not in space.problem_keys and only is not None:
            others = [value for value in values.get(name, ()) if value != only]
            why = f"is not searched yet, {shown(only)} is: leave it out"
            broken += [((keys.sections[name], name), f"= {shown(v)} {why}") for v in others]
    return broken


def _faults(section: str, table: Any, keys: Keys) -> Iterator[Fault]:
    """Judge one table as a schedule's would be."""
    try:
        _part(section, keys.tables[section]).model_validate({section: table})
    except ValidationError as invalid:
        yield from faults(invalid, keys)


@cache
def _part(name: str, section: type[Section]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (section, ...)}
    return create_model("Part", __base__=Strict, **fields)


def _packed(tables: Mapping[str, Any], space: Space, keys: Keys) -> bool:
    """Whether a file's shapes are those of varlen sequences."""
    if "lengths" not in space.problem_keys:
        return False
    table = tables.get(keys.sections["lengths"])
    lengths = table.get("lengths") if isinstance(table, dict) else None
    return lengths in (LENGTHS[1], [LENGTHS[1]])


def _own_faults(invalid: ValidationError, shape: type[Shape | VarlenShape]) -> Iterator[Fault]:
    """Yield what is wrong with the tables that a schedule has not: shapes, and how to search."""
    errors = invalid.errors(include_url=False)
    return judged_first(errors, lambda first: _judged(first, shape))


def _judged(errors: Sequence[Any], shape: type[Shape | VarlenShape]) -> Iterator[Fault]:
    for error in errors:
        kind, (table, *steps) = error["type"], map(str, error["loc"])
        path = (table, *(step for step in steps if step not in (LISTED, DRAWN)))
        message = f"{error['msg'][0].lower()}{error['msg'][1:]}"
        if kind == "extra_forbidden":
            keys: Any = (shape if table == "shapes" else Effort).model_fields
            if table == "shapes" and shape is Shape and path[-1] in VarlenShape.model_fields:
                yield path, 'is of varlen sequences, whose space says lengths = "varlen"'
                continue
            if len(path) > 3:  # within lengths that are drawn
                keys = ("from", "to")
            yield path, f"is not a key of {table}{nearest_or_all(path[-1], keys)}"
        elif kind == "missing":
            yield path, "is missing"
        else:
            yield path, f"= {shown(error['input'])}: {message}"


def _refuse_too_many(declared: Declared, origin: Origin) -> None:
    """Raise ScheduleError where there are more points than anyone would wait for."""
    several = {key: len(values) for key, values in declared.values.items() if len(values) > 1}
    points, shapes = declared.points, len(declared.shapes)
    if points <= MAX_POINTS and points * shapes <= MAX_TIMES:
        return
    product = " × ".join(f"{count:,} of {key}" for key, count in several.items())
    if points > MAX_POINTS:
        message = f"{points:,} points ({product}), {MAX_POINTS:,} at most"
    else:
        message = f"{points:,} points ({product}) at {shapes:,} shapes, {MAX_TIMES:,} times at most"
    raise ScheduleError(
        f"{printable(origin.where)}: {message}; say fewer values, or make several spaces of it"
    )


def _head_faults(declared: Declared) -> Iterator[Fault]:
    """Yield each shape whose query heads are not evenly many for each head of K and V."""
    head_dims = dict.fromkeys(target.head_dim for target in declared.targets())
    for number, shape in enumerate(declared.shapes):
        for head_dim in head_dims:
            heads, kv_heads = heads_of(shape, head_dim)
            if heads % kv_heads:
                near = _divisor(heads, kv_heads)
                source = "" if shape.heads else f", which goes with head_dim = {head_dim}"
                yield (
                    ("shapes", str(number), "kv_heads"),
                    f"= {kv_heads} does not divide heads = {heads}{source}: "
                    f"the nearest that does is {near}",
                )
                break


def _divisor(number: int, below: int) -> int:
    """The largest divisor of a number that is less than another."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return max(n for divisor in small for n in (divisor, number // divisor) if n < below)


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
