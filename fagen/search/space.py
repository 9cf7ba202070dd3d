"""Turn a space's TOML into points that fit, with predictions, and into reasons for the rest.

A space says for any key of a schedule a value, a list, or a range { from, to, step }; the tables
are those of a schedule.  What it leaves out has the values of DEFAULTS, or its own default.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fagen.errors import ScheduleError
from fagen.kinds.forward.formulae import REGISTER_FILE, REGISTERS, SHARED, SUMMED, sums
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.rules import DERIVED, rules
from fagen.schedule import Schedule as AnySchedule
from fagen.schedule.faults import Fault, faults, refusal
from fagen.search.cost import Size, predictor
from fagen.toml_lines import MAX_BYTES, read_toml
from fagen.vocab import OUTPUTS

# What a search tries where its space says nothing.  A key that is not here keeps its default.
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "block_m": (64, 128, 192, 256),
    "block_n": tuple(range(16, 257, 16)),
    "stages": (2, 3),
    "q_stages": (1, 2),
    "output": OUTPUTS,
    "producer": ("warp", "none"),
    "inter_warpgroup": (True, False),
    "intra_warpgroup": (True, False),
    "p": ("registers", "shared"),
    "cluster": (1, 2),
    "order": (None, "single"),  # None: left out, so that it is what suits the mask
}
ASKED = ("dtype", "head_dim", "head_dim_v", "mask")  # what is computed: not a matter of speed
TOKENS, HIDDEN = 16_384, 2_048  # of the standard shapes
SEQLENS = (512, 1_024, 2_048, 4_096, 8_192, 16_384)
TABLES, SECTIONS = Schedule.keys.tables, Schedule.keys.sections
REQUIRED, default = Schedule.keys.required, Schedule.keys.default
_LEDGERS = (SHARED, REGISTERS, REGISTER_FILE)


@dataclass(frozen=True, order=True)
class Target:
    """What is to be computed fast."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str

    def __str__(self) -> str:
        v = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        return f"{self.dtype}_d{self.head_dim}{v}_{self.mask}"

    @classmethod
    def of(cls, schedule: AnySchedule) -> "Target":
        """What a schedule computes."""
        values = schedule.values()
        return cls(*(values[key] for key in ASKED))


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
    """A problem's sizes in a space file; what is left out makes it a standard one."""

    seqlen: int = Field(ge=1, le=1 << 20)
    seqlen_k: int | None = Field(default=None, ge=1, le=1 << 20)
    batch: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0)

    def size(self, head_dim: int) -> Size:
        """Fill in what was left out: 16,384 tokens in all, a hidden size of 2048."""
        heads = self.heads or max(1, HIDDEN // head_dim)
        return Size(
            batch=self.batch or max(1, TOKENS // self.seqlen),
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen_k or self.seqlen,
            heads=heads,
            kv_heads=self.kv_heads or heads,
            weight=self.weight,
        )


class Effort(_Strict):
    """How a space is searched."""

    compile: int = Field(default=200, ge=1)  # schedules of each target, at most
    share: float = Field(default=1.0, gt=0)  # of the time, where several spaces are searched
    patience: int = Field(default=64, ge=1)  # kernels timed since one was faster than all before
    prune: float = Field(default=1.6, gt=1)  # leave out what is predicted so much slower
    anchor: str | None = None  # a slug; else the committed schedule, or the best predicted


class _File(_Strict):
    shapes: list[Shape] = Field(default=[Shape(seqlen=n) for n in SEQLENS], min_length=1)
    search: Effort = Effort()


@dataclass(frozen=True)
class Space:
    """A declared search: what is computed, at which shapes, and what is tried."""

    where: str
    text: str
    values: Mapping[str, tuple[Any, ...]]  # of the keys that are said, and of those tried
    shapes: tuple[Shape, ...]
    effort: Effort

    @property
    def name(self) -> str:
        """What to call it where the folder it lies in is nobody's concern."""
        return Path(self.where).name

    def targets(self) -> tuple[Target, ...]:
        """What is to be computed: every combination of what [attention] says."""
        v = self.values.get("head_dim_v", (None,))
        return tuple(
            Target(dtype, d, d_v or d, mask)
            for dtype, d, d_v, mask in product(
                self.values["dtype"], self.values["head_dim"], v, self.values["mask"]
            )
        )

    def sizes(self, target: Target) -> tuple[Size, ...]:
        """The shapes at which a target is timed."""
        return tuple(shape.size(target.head_dim) for shape in self.shapes)


@dataclass(frozen=True)
class Survey:
    """All points of one target: those that fit, and why the others do not."""

    target: Target
    names: tuple[str, ...]  # of the keys that are tried
    left_out: frozenset[str]  # those of them that a point may leave at their default
    sizes: tuple[Size, ...]
    total: int
    refusals: tuple[Refusal, ...]
    points: tuple[Point, ...]
    reasons: Mapping[tuple[int, int], str]  # why a whole block_m × block_n has no point
    cells: frozenset[tuple[int, int]]  # each block_m × block_n that was looked at

    def keys(self, point: Point) -> dict[str, Any]:
        """A point's keys, with what is computed."""
        asked = {key: getattr(self.target, key) for key in ASKED}
        return {**asked, **dict(zip(self.names, point.keys, strict=True))}

    def schedule(self, point: Point) -> Schedule:
        """The schedule that a point is."""
        said = {key: value for key, value in self.keys(point).items() if value is not None}
        return Schedule.make(**said)

    @cached_property
    def best(self) -> tuple[Point, ...]:
        """The points, fastest predicted first."""
        return tuple(sorted(self.points, key=self.predicted))

    def predicted(self, point: Point) -> float:
        """The weighted geometric mean of a point's predicted times, in seconds."""
        return mean(point.seconds, self.sizes)


def mean(values: Sequence[float], sizes: Sequence[Size]) -> float:
    """The geometric mean of a figure of each size, by the sizes' weights."""
    total, product = 0.0, 1.0
    for value, size in zip(values, sizes, strict=True):
        total += size.weight
        product *= value**size.weight
    return float(product ** (1 / total))


# ---- enumerating --------------------------------------------------------------------------------


def survey(space: Space, target: Target) -> Survey:
    """Look at every point of a target."""
    tried = {key: space.values[key] for key in space.values if key not in ASKED}
    names, sizes = tuple(tried), space.sizes(target)
    base, predict = _base(target), predictor(sizes)
    said = {*ASKED, *(name for name in names if None not in tried[name])}
    derived = [(key, derive) for key, derive in DERIVED.items() if key not in said]
    m_at, n_at = names.index("block_m"), names.index("block_n")

    sized_by = itemgetter(*SUMMED)
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
                examples[reason] = _example(refused, values, names)
            if cell not in cells or (cells[cell] and reason in _LEDGERS):
                cells[cell] = reason
    return Survey(
        target=target,
        names=names,
        left_out=frozenset(name for name in names if None in tried[name]),
        sizes=sizes,
        total=total,
        refusals=tuple(Refusal(r, counts[r], examples[r]) for r in sorted(counts, key=_rank)),
        points=tuple(points),
        reasons={cell: reason for cell, reason in cells.items() if reason},
        cells=frozenset(cells),
    )


def _rank(reason: str) -> tuple[bool, str]:
    return reason in _LEDGERS, reason


def _base(target: Target) -> dict[str, Any]:
    """Every key's value before the space has its say; what is derived comes later."""
    values: dict[str, Any] = {key: getattr(target, key) for key in ASKED}
    for key in SECTIONS:
        if key not in values and key not in REQUIRED and key not in DERIVED:
            values[key] = default(key, values)
    return values


def _example(refused: tuple[str, Any, Any], values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Say which point is refused, by its keys that are not at their default, and why."""
    reason, what, limit = refused
    said = f"{what:,} > {limit:,}" if reason in _LEDGERS else f"{what} {limit}"
    keys = {name: values[name] for name in names}
    told = [f"{k} = {v}" for k, v in keys.items() if k in REQUIRED or v != default(k, values)]
    return f"{', '.join(told)}: {said}"


# ---- reading ------------------------------------------------------------------------------------


def read_space(path: Path | str) -> Space:
    """Read a space's file.  Raises ScheduleError with all faults, each with file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: cannot be read: {error}") from None
    if len(text) > MAX_BYTES:
        raise ScheduleError(f"{path}: longer than {MAX_BYTES:,} bytes; this is no space")
    return parse_space(text, str(path))


def parse_space(text: str, where: str = "space") -> Space:
    """Read a space from TOML text; `where` names it in messages.  Raises ScheduleError."""
    tables, origin = read_toml(text, where)
    own = {name: tables.pop(name) for name in ("shapes", "search") if name in tables}
    found: list[Fault] = []
    try:
        file = _File.model_validate(own)
    except ValidationError as invalid:
        file = _File()
        for error in invalid.errors(include_url=False):
            path = tuple(str(part) for part in error["loc"])
            found.append((path, f"{error['msg'][0].lower()}{error['msg'][1:]}"))
    values = dict(DEFAULTS)
    for section, table in tables.items():
        if not isinstance(table, dict) or section not in TABLES:
            found += _faults({section: table})
            continue
        for key, said in table.items():
            listed = _listed(said)
            values[key] = tuple(dict.fromkeys(listed))
            if not listed:
                found.append(((section, key), "says no value"))
            for value in listed:
                found += _faults({section: {**_required(section), key: value}})
    for key in sorted({"dtype", "head_dim", "mask"} - values.keys()):
        found.append((("attention", key), "is missing: a value or a list"))
    if found:
        raise refusal(found, origin)
    return Space(where, text, values, tuple(file.shapes), file.search)


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


def _required(section: str) -> dict[str, Any]:
    """Values for a table's other keys, with which one key's can be judged."""
    any_schedule = {"head_dim": 64, "dtype": "fp16", "mask": "full", "block_m": 64, "block_n": 64}
    return {key: any_schedule[key] for key in TABLES[section].model_fields if key in any_schedule}


def _faults(tables: dict[str, Any]) -> Iterator[Fault]:
    """Judge one table as a schedule's would be."""
    fields: dict[str, Any] = {name: (TABLES[name], ...) for name in tables if name in TABLES}
    try:
        create_model("Part", __base__=_Strict, **fields).model_validate(tables)
    except ValidationError as invalid:
        yield from faults(invalid, Schedule.keys)
