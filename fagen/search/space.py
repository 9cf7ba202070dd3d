"""Turn a space's TOML, or a slug, into points that fit, with predictions, and reasons for the rest.

A space says for any key of a schedule a value, a list, or a range { from, to, step }; the tables
are those of a schedule.  What it leaves out has the values that its kind tries, or its own default.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fagen import registry
from fagen.errors import ScheduleError
from fagen.kind import load_named
from fagen.problem import HIDDEN, TOKENS, Problem, Sizes
from fagen.schedule import Keys, Schedule
from fagen.schedule.faults import Fault, faults, refusal
from fagen.toml_lines import MAX_BYTES, read_toml

SEQLENS = (512, 1_024, 2_048, 4_096, 8_192, 16_384)


class Space(Protocol):
    """What a kind says for a search of its schedules; its `space` names such a thing."""

    @property
    def defaults(self) -> Mapping[str, tuple[Any, ...]]:
        """What is tried of keys that a file leaves out; None leaves the key at its own default."""

    @property
    def problem_keys(self) -> tuple[str, ...]:
        """The keys that say what is computed, fields of a Problem: no matter of speed."""

    @property
    def tile_keys(self) -> tuple[str, str]:
        """The keys of a tile's height and width."""

    @property
    def example(self) -> Mapping[str, Any]:
        """Values of the required keys, beside which one key can be judged."""

    @property
    def summed_keys(self) -> tuple[str, ...]:
        """The keys that the sums depend on."""

    @property
    def budgets(self) -> tuple[str, ...]:
        """The names of the sums."""

    def sums(self, values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each that does not fit, of a schedule's values."""

    def predictor(self, sizes: Sequence[Sizes]) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
        """Return a function from a schedule's values to its predicted seconds at each size."""


@cache
def space_of(kind: str) -> Space:
    """What a kind says for a search.  Raises ScheduleError where it is not searched."""
    if not (name := registry.kind(kind).space):
        raise ScheduleError(f"schedules of the kind {kind} are not searched")
    found: Space = load_named(name)
    return found


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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(_Strict):
    """Sizes in a space file, and how much they count; what is left out makes them standard ones."""

    seqlen: int = Field(ge=1, le=1 << 20)
    seqlen_k: int | None = Field(default=None, ge=1, le=1 << 20)
    batch: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0)

    def sizes(self, head_dim: int) -> Sizes:
        """Fill in what was left out: 16,384 tokens in all, a hidden size of 2048."""
        heads = self.heads or max(1, HIDDEN // head_dim)
        return Sizes(
            batch=self.batch or max(1, TOKENS // self.seqlen),
            heads=heads,
            kv_heads=self.kv_heads or heads,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen_k or self.seqlen,
        )


class Effort(_Strict):
    """How a space is searched."""

    compile: int = Field(default=200, ge=1)  # schedules of each target, at most
    share: float = Field(default=1.0, gt=0)  # of the time, where several spaces are searched
    patience: int = Field(default=64, ge=1)  # kernels timed since one was faster than all before
    prune: float = Field(default=1.6, gt=1)  # leave out what is predicted so much slower
    anchor: str | None = None  # a slug; else the committed schedule, or the best predicted
    long_runs: bool = True  # of the last few, which reach the power limit


class _File(_Strict):
    shapes: list[Shape] = Field(default=[Shape(seqlen=n) for n in SEQLENS], min_length=1)
    search: Effort = Effort()


@dataclass(frozen=True)
class Declared:
    """A declared search: what is computed, at which shapes, and what is tried."""

    where: str
    text: str
    kind: str
    values: Mapping[str, tuple[Any, ...]]  # of the keys that are said, and of those tried
    shapes: tuple[Shape, ...]
    effort: Effort

    @property
    def name(self) -> str:
        """What to call it where the folder it lies in is nobody's concern."""
        return Path(self.where).name

    def targets(self) -> tuple[Problem, ...]:
        """What is to be computed fast: every combination of the keys that say it."""
        names, derived = space_of(self.kind).problem_keys, _keys_of(self.kind).derived
        found = []
        for combination in product(*(self.values.get(key, (None,)) for key in names)):
            keys = dict(zip(names, combination, strict=True))
            for key in names:
                if keys[key] is None and key in derived:
                    keys[key] = derived[key](keys)
            found.append(Problem(**keys))
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
    weights: tuple[float, ...]  # of the sizes
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


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted geometric mean of a figure of each size."""
    total, product = 0.0, 1.0
    for value, weight in zip(values, weights, strict=True):
        total += weight
        product *= value**weight
    return float(product ** (1 / total))


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
    derived = [(key, derive) for key, derive in keys.derived.items() if key not in said]
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
        weights=tuple(shape.weight for shape in declared.shapes),
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


def read_space(path: Path | str) -> Declared:
    """Read a space's file, or that of a slug.

    Raises ScheduleError with all faults, each with file and line.
    """
    if Path(path).suffix != ".toml" and not Path(path).exists():
        return space_like(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: cannot be read: {error}") from None
    if len(text) > MAX_BYTES:
        raise ScheduleError(f"{path}: longer than {MAX_BYTES:,} bytes; this is no space")
    return parse_space(text, str(path))


def space_like(slug: str) -> Declared:
    """What might beat a schedule: all that a search tries, and the rest as it is there.

    Raises ScheduleError where it is no slug, or of a kind that is not searched.
    """
    schedule = registry.from_slug(slug)
    tried = {*space_of(schedule.kind).defaults, "out_dtype"}  # which has no part in the speed
    tables: dict[str, list[str]] = {}
    for key, value in schedule.settings().items():
        if key not in tried:
            section = schedule.keys.sections[key]
            tables.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    tables["search"] = [f'anchor = "{schedule.but(out_dtype=None).slug}"']
    lines = [line for name, keys in tables.items() for line in (f"[{name}]", *keys, "")]
    return parse_space("\n".join(lines), slug)


def parse_space(text: str, where: str = "space") -> Declared:
    """Read a space from TOML text; `where` names it in messages.  Raises ScheduleError."""
    tables, origin = read_toml(text, where)
    kind = registry.named(tables, origin)
    space, keys = space_of(kind), _keys_of(kind)
    own = {name: tables.pop(name) for name in ("shapes", "search") if name in tables}
    found: list[Fault] = []
    try:
        file = _File.model_validate(own)
    except ValidationError as invalid:
        file = _File()
        for error in invalid.errors(include_url=False):
            path = tuple(str(part) for part in error["loc"])
            found.append((path, f"{error['msg'][0].lower()}{error['msg'][1:]}"))
    values = dict(space.defaults)
    for section, table in tables.items():
        if not isinstance(table, dict) or section not in keys.tables:
            found += _faults({section: table}, keys)
            continue
        for key, said in table.items():
            listed = _listed(said)
            values[key] = tuple(dict.fromkeys(listed))
            if not listed:
                found.append(((section, key), "says no value"))
            for value in listed:
                beside = {k: v for k, v in space.example.items() if keys.sections[k] == section}
                found += _faults({section: {**beside, key: value}}, keys)
    for key in sorted(keys.required.intersection(space.problem_keys) - values.keys()):
        found.append(((keys.sections[key], key), "is missing: a value or a list"))
    if found:
        raise refusal(found, origin)
    return Declared(where, text, kind, values, tuple(file.shapes), file.search)


def _listed(said: Any) -> list[Any]:
    """The values that a list, a range or a single value stands for."""
    if isinstance(said, list):
        return said
    if (
        isinstance(said, dict)
        and {"from", "to"} <= said.keys() <= {"from", "to", "step"}
        and all(isinstance(part, int) for part in said.values())
        and said.get("step", 1) > 0
    ):
        return list(range(said["from"], said["to"] + 1, said.get("step", 1)))
    return [said]


def _faults(tables: dict[str, Any], keys: Keys) -> Iterator[Fault]:
    """Judge one table as a schedule's would be."""
    fields: dict[str, Any] = {
        name: (keys.tables[name], ...) for name in tables if name in keys.tables
    }
    try:
        create_model("Part", __base__=_Strict, **fields).model_validate(tables)
    except ValidationError as invalid:
        yield from faults(invalid, keys)
