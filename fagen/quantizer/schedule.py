"""Turn what a user writes of a quantiser (TOML, keys, a slug) into a schedule, or into its faults.

[quantize]
dtype = "fp16"        # of what comes in: fp16 | bf16
head_dim = 128        # a multiple of 16
rotary = "none"       # rotary embedding before all else: "halves" | "pairs" of columns
rotate = true         # by random signs and a Hadamard matrix: outliers are spread out
scales = "block"      # one for a "tensor", a "head", or a "block" of scale_rows rows
scale_rows = 128
layout = "rows"       # as they came | "columns": transposed, as the second GEMM wants V
rows = 128            # per thread block
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from fagen.errors import ScheduleError
from fagen.schedule.faults import BrokenRules, Fault, refusal
from fagen.schedule.keys import Section
from fagen.toml_lines import Origin, read_text, read_toml

TABLE = "quantize"
SLUG_START = "quant_"
HALVES_STEP = 64  # columns: two of the chunks of 32 that lanes share

_SLUG = re.compile(
    r"quant_(?P<dtype>[a-z0-9]+)_d(?P<head_dim>\d{1,4})"
    r"(?:_(?P<rotary>halves|pairs))?(?P<rotate>_rot)?"
    r"_(?P<scales>tensor|head|block(?P<scale_rows>\d{1,4}))"
    r"(?P<columns>_vcols)?(?:_r(?P<rows>\d{1,4}))?"
)


class Quantize(Section):
    """What is quantised and how a thread block takes it."""

    dtype: Literal["fp16", "bf16"] = Field(description="of what comes in")
    head_dim: int = Field(ge=16, le=256, multiple_of=16, description="columns")
    rotary: Literal["none", "halves", "pairs"] = Field(
        default="none",
        description="rotary embedding before all else, of columns half a row apart or of "
        "neighbours",
    )
    rotate: bool = Field(
        default=False,
        description="random signs and a Hadamard matrix, block-diagonal where head_dim is no "
        "power of two",
    )
    scales: Literal["tensor", "head", "block"] = Field(
        default="head", description="how much shares a scale; a block is scale_rows rows of a head"
    )
    scale_rows: Literal[32, 64, 128] | None = Field(
        default=None, description='rows that share a scale; with scales = "block" alone, then 128'
    )
    layout: Literal["rows", "columns"] = Field(
        default="rows",
        description='"rows": as they came; "columns": transposed and in P\'s order, for V',
    )
    rows: Literal[32, 64, 128] = Field(default=128, description="per thread block")


class QuantizeSchedule(Section):
    """What a quantiser does; every key has its value.  Equal are those that say the same."""

    quantize: Quantize

    _origin: Origin = PrivateAttr(default=Origin("schedule"))

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Give scale_rows its value, then hold the rules between keys."""
        keys = self.quantize
        by_block = keys.scales == "block"
        broken = []
        if by_block and keys.scale_rows is None:
            keys = keys.model_copy(update={"scale_rows": 128})
            self.__dict__["quantize"] = keys
        elif not by_block and keys.scale_rows is not None:
            broken.append(
                (
                    (TABLE, "scale_rows"),
                    f'has no meaning with scales = "{keys.scales}"; leave it out, or use '
                    'scales = "block"',
                )
            )
        if by_block and keys.scale_rows and keys.rows % keys.scale_rows:
            broken.append(
                (
                    (TABLE, "rows"),
                    f"= {keys.rows} must be a multiple of scale_rows = {keys.scale_rows}: a thread "
                    f"block finds the maxima of its own rows; use rows = {keys.scale_rows}",
                )
            )
        if keys.rotary == "halves" and keys.head_dim % HALVES_STEP:
            broken.append(
                (
                    (TABLE, "rotary"),
                    f'= "halves" needs a head_dim of {HALVES_STEP}, {2 * HALVES_STEP}, … where one '
                    f"thread has both columns of a pair, not {keys.head_dim}; "
                    'rotary = "pairs" takes any',
                )
            )
        if broken:
            raise BrokenRules(broken)
        return self

    @classmethod
    def make(cls, **keys: Any) -> "QuantizeSchedule":
        """Make a schedule from keys.  Raises ScheduleError with all faults."""
        return _validated({TABLE: keys}, Origin("schedule"))

    @classmethod
    def from_slug(cls, slug: str) -> "QuantizeSchedule":
        """Read a slug back.  Raises ScheduleError where it is not exactly some schedule's slug."""
        read = _SLUG.fullmatch(slug)
        if not read:
            raise ScheduleError(
                f"{slug!r} is no quantiser's slug; one looks like quant_fp16_d128_rot_block64"
            )
        keys: dict[str, Any] = {
            "dtype": read["dtype"],
            "head_dim": int(read["head_dim"]),
            "rotary": read["rotary"] or "none",
            "rotate": bool(read["rotate"]),
            "scales": read["scales"].rstrip("0123456789"),
            "layout": "columns" if read["columns"] else "rows",
        }
        keys.update({key: int(read[key]) for key in ("scale_rows", "rows") if read[key]})
        schedule = cls.make(**keys)
        if schedule.slug != slug:
            raise ScheduleError(f"{slug!r} is no slug; that schedule's is {schedule.slug}")
        return schedule

    @property
    def origin(self) -> Origin:
        """Where it was written, for messages."""
        return self._origin

    def values(self) -> dict[str, Any]:
        """Return every key with its value."""
        return dict(self.quantize.__dict__)

    @property
    def slug(self) -> str:
        """The name of this schedule, its file, kernel, C function, cache entry and op."""
        keys = self.quantize
        words = [
            f"{SLUG_START}{keys.dtype}_d{keys.head_dim}",
            *([keys.rotary] if keys.rotary != "none" else []),
            *(["rot"] if keys.rotate else []),
            f"{keys.scales}{keys.scale_rows or ''}",
            *(["vcols"] if keys.layout == "columns" else []),
            *([f"r{keys.rows}"] if keys.rows != Quantize.model_fields["rows"].default else []),
        ]
        return "_".join(words)


# ---- reading ------------------------------------------------------------------------------------


def read_quantizer(path: Path | str) -> QuantizeSchedule:
    """Read a quantiser's file.  Raises ScheduleError with all faults, each with file and line."""
    return parse_quantizer(read_text(path), str(path))


def parse_quantizer(text: str, where: str = "schedule") -> QuantizeSchedule:
    """Read a quantiser from TOML text; `where` names it in messages.  Raises ScheduleError."""
    return _validated(*read_toml(text, where))


def _validated(tables: dict[str, Any], origin: Origin) -> QuantizeSchedule:
    try:
        schedule = QuantizeSchedule.model_validate(tables)
    except ValidationError as invalid:
        raise refusal(_faults(invalid), origin) from None
    schedule._origin = origin
    return schedule


def _faults(invalid: ValidationError) -> Iterator[Fault]:
    """Yield (key path, sentence) of everything that pydantic found."""
    keys = Quantize.model_fields
    for error in invalid.errors(include_url=False):
        broken = error.get("ctx", {}).get("error")
        if isinstance(broken, BrokenRules):
            yield from broken.faults
            continue
        path = tuple(str(step) for step in error["loc"])[:2]
        if error["type"] == "extra_forbidden":
            known = f"a key of [{TABLE}]: {', '.join(keys)}" if path[0] == TABLE else "its table"
            yield path, f"is not {known}"
        elif len(path) == 1:
            needed = ", ".join(key for key, field in keys.items() if field.is_required())
            yield path, f"is missing: a table with {needed}"
        elif error["type"] == "missing":
            yield path, f"is missing: {_expected(path[1])}"
        else:
            shown = json.dumps(error["input"], default=str)
            yield path, f"= {shown[:60]} must be {_expected(path[1])}"


def _expected(key: str) -> str:
    rule = Quantize.model_json_schema()["properties"][key]
    if words := rule.get("enum") or rule.get("anyOf", [{}])[0].get("enum"):
        return " or ".join(json.dumps(word) for word in words)
    if rule["type"] == "boolean":
        return "true or false"
    return (
        f"a whole number from {rule['minimum']} to {rule['maximum']} "
        f"in steps of {rule['multipleOf']}"
    )
