"""Turn what pydantic found wrong with a schedule into sentences, each with the key's path."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from fagen.errors import ScheduleError
from fagen.schedule.section import Keys
from fagen.toml_lines import Origin, dotted, near_word, printable, shown


class BrokenRules(ValueError):  # noqa: N818 - it never leaves this package
    """Rules that hold between keys, broken: (key path, sentence) each."""

    def __init__(self, faults: list[tuple[tuple[str, str], str]]) -> None:
        super().__init__()
        self.faults = faults


MOST = 20  # faults that are judged and shown; of more it is said how many there are

Fault = tuple[tuple[str, ...], str]  # a key's path, a sentence; of one that is only counted, ""


def refusal(faults: Iterable[Fault], origin: Origin) -> ScheduleError:
    """Return the error that says the first faults, by line, and how many more there are."""
    listed = list(dict.fromkeys(faults))
    ordered = sorted(listed[:MOST], key=lambda fault: origin.line(fault[0]))
    lines = [f"{origin.at(*path)}: {dotted(path)} {message}" for path, message in ordered]
    if more := len(listed) - len(ordered):
        lines.append(f"{printable(origin.where)}: and {more:,} more")
    return ScheduleError("\n".join(lines))


def judged_first(
    errors: Sequence[Any], judge: Callable[[Sequence[Any]], Iterable[Fault]]
) -> Iterator[Fault]:
    """Yield the faults that are judged of the first errors of pydantic, and the others' places."""
    yield from judge(errors[:MOST])
    for error in errors[MOST:]:
        yield tuple(map(str, error["loc"])), ""


def faults(invalid: ValidationError, keys: Keys) -> Iterator[Fault]:
    """Yield (key path, sentence) of what pydantic found in a schedule of these keys.

    Of very many the first are judged, and the others are places without a sentence.
    """
    errors = invalid.errors(include_url=False)
    return judged_first(errors, lambda first: _judged(first, keys))


def _judged(errors: Sequence[Any], keys: Keys) -> Iterator[Fault]:
    for error in errors:
        broken = error.get("ctx", {}).get("error")
        if isinstance(broken, BrokenRules):
            yield from broken.faults
            continue
        path = tuple(str(step) for step in error["loc"])
        kind, value = error["type"], error["input"]
        if kind == "extra_forbidden":
            yield path, unknown(path, keys)
        elif len(path) == 1:
            needed = [key for key in keys.tables[path[0]].model_fields if key in keys.required]
            sentence = f"is missing: a table with {', '.join(needed)}"
            yield path, sentence if kind == "missing" else "is no table"
        elif kind == "missing":
            yield path, f"is missing: {_expected(path, keys)}"
        else:
            yield path, f"= {shown(value)}{_refused(path, value, keys)}"


def unknown(path: tuple[str, ...], keys: Keys) -> str:
    """Say of a table or a key that it is none of these, and which is near."""
    name, sections = path[-1], keys.sections
    if name in keys.former:
        return keys.former[name]
    allowed = list(keys.tables if len(path) == 1 else keys.tables[path[0]].model_fields)
    if name in sections:
        return f"belongs under [{sections[name]}]"
    table = "a table of this kind of schedule" if len(path) == 1 else f"a key of [{path[0]}]"
    close = get_close_matches(name, allowed, 1) or get_close_matches(name, sections, 1)
    if close:
        place = f" under [{sections[close[0]]}]" if close[0] not in allowed else ""
        return f"is not {table}; did you mean {close[0]}{place}?"
    return f"is not {table}: {', '.join(allowed)}"


def _property(path: tuple[str, ...], keys: Keys) -> dict[str, Any]:
    section, key = path[:2]
    rule: dict[str, Any] = keys.tables[section].model_json_schema()["properties"][key]
    return rule


def _expected(path: tuple[str, ...], keys: Keys) -> str:
    rule = _property(path, keys)
    if words := rule.get("enum"):
        return " or ".join(map(json.dumps, words))
    if rule["type"] == "boolean":
        return "true or false"
    kind = "a whole number" if rule["type"] == "integer" else "a number"
    least, most, step = rule["minimum"], rule["maximum"], rule.get("multipleOf", 1)
    if least == most:
        return f"{least}"
    steps = f" in steps of {step}" if step != 1 else ""
    return f"{kind} from {least} to {most}{steps}"


def _refused(path: tuple[str, ...], value: Any, keys: Keys) -> str:
    """Say why a value is refused, and which one is near."""
    rule = _property(path, keys)
    near = ""
    if isinstance(value, str | int) and (path[-1], value) in keys.former:
        near = f"; {shown(value)} {keys.former[path[-1], value]}"
    elif (word := near_word(value, rule.get("enum", ()))) is not None:
        near = f"; did you mean {json.dumps(word)}?"
    elif isinstance(value, int | float) and not isinstance(value, bool) and "minimum" in rule:
        step = rule.get("multipleOf", 1)
        if rule["minimum"] <= value <= rule["maximum"]:  # false for nan
            near = f"; the nearest is {round(value / step) * step:g}"
    return f" must be {_expected(path, keys)}{near}"
