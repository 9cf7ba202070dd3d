"""Read what is to be vendored: names, schedules and format, from a file or the command line.

A manifest's words become file names, C names and CMake's: all are checked against closed patterns.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen.errors import ScheduleError
from fagen.registry import committed_file, from_slug
from fagen.registry import read as read_schedule
from fagen.schedule import Schedule
from fagen.schedule.faults import MOST
from fagen.toml_lines import (
    Origin,
    dotted,
    nearest_or_all,
    one_of,
    printable,
    read_text,
    read_toml,
    shown,
)
from fagen.vendor import names
from fagen.vendor.place import is_inside
from fagen.vocab import VENDOR_FORMATS

MOST_KERNELS = 256
_KEYS = {"name": str, "version": str, "format": str, "with_cutlass": bool, "kernels": dict}
# What CMake and pip both take for one, and order alike.
_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})(\.(0|[1-9][0-9]{0,8})){0,3}", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """What is to be vendored: schedules, each with the name that it is pinned to, or ""."""

    name: str
    kernels: tuple[tuple[str, Schedule], ...]
    format: str = VENDOR_FORMATS[0]
    with_cutlass: bool = False
    version: str = ""  # of the folder; fagen's if left out


def asked(
    name: str,
    schedules: Sequence[Schedule],
    format: str = VENDOR_FORMATS[0],
    with_cutlass: bool = False,
) -> Manifest:
    """Return the manifest of schedules without pinned names.  Raises ScheduleError."""
    if fault := names.fault_of(name):
        raise ScheduleError(f"name = {shown(name)} {fault}")
    by_slug = {schedule.slug: schedule for schedule in schedules}  # one that is named twice is one
    if not 0 < len(by_slug) <= MOST_KERNELS:
        raise ScheduleError(f"{len(by_slug)} schedules; a folder has from 1 to {MOST_KERNELS}")
    return Manifest(name, tuple(("", own) for own in by_slug.values()), format, with_cutlass)


def read(path: Path) -> Manifest:
    """Read a manifest.  Raises ScheduleError with file and line of each fault.

    Schedules are slugs, or files beside the manifest and below.
    """
    tables, origin = read_toml(read_text(path, "manifest"), str(path))
    faults = [*_faults(tables, origin)]
    listed = tables.get("kernels")
    kernels = dict[str, Schedule]()
    if not isinstance(listed, dict) or len(listed) > MOST_KERNELS:
        listed = {}
    for name, value in listed.items():
        if fault := names.fault_of_kernel(name):
            faults.append(f"{origin.at('kernels', name)}: kernels.{dotted((name,))} {fault}")
        try:
            kernels[name] = _schedule(value, path.parent, origin, name)
        except ScheduleError as error:
            faults.append(str(error))
    faults += _alike(kernels, origin)
    if len(faults) > MOST:
        faults[MOST:] = [f"{printable(origin.where)}: and {len(faults) - MOST} more"]
    if faults:
        raise ScheduleError("\n".join(faults))
    return Manifest(
        tables["name"],
        tuple(kernels.items()),
        tables.get("format", VENDOR_FORMATS[0]),
        tables.get("with_cutlass", False),
        tables.get("version", ""),
    )


def _faults(tables: dict[str, Any], origin: Origin) -> Iterator[str]:
    """What is wrong with the keys, but for each kernel's own, a line each."""
    words = {str: "text", bool: "true or false", dict: "a table"}
    for key, value in tables.items():
        at = origin.at(key)
        if key not in _KEYS:
            yield f"{at}: {dotted((key,))} is not one{nearest_or_all(key, _KEYS, ' of ')}"
        elif type(value) is not _KEYS[key]:
            yield f"{at}: {key} = {shown(value)} is not {words[_KEYS[key]]}"
        elif fault := _fault_of_value(key, value):
            yield f"{at}: {fault}"
    if missing := [key for key in ("name", "kernels") if key not in tables]:
        yield f"{origin.at('')}: without {' and '.join(missing)}"


def _fault_of_value(key: str, value: Any) -> str:
    """What is wrong with the value of a key, which is of the key's type, or ""."""
    if key == "name" and (fault := names.fault_of(value)):
        return f"name = {shown(value)} {fault}"
    if key == "version" and not _VERSION.fullmatch(value):
        return (
            f"version = {shown(value)} is none that CMake and pip both take: from one to four "
            "numbers with points between them, as 1.2.0"
        )
    if key == "format" and value not in VENDOR_FORMATS:
        return f"format = {shown(value)} {one_of(VENDOR_FORMATS, value)}"
    if key == "kernels" and not 0 < len(value) <= MOST_KERNELS:
        return f"{len(value)} kernels; a folder has from 1 to {MOST_KERNELS}"
    return ""


def _alike(kernels: Mapping[str, Schedule], origin: Origin) -> Iterator[str]:
    """Two names of one kernel, and names that are another kernel's slug, a line each."""
    slugs: dict[str, str] = {}
    for name, schedule in kernels.items():
        other = slugs.setdefault(schedule.slug, name)
        if other != name:
            both = f"kernels.{dotted((other,))} and kernels.{dotted((name,))}"
            yield f"{origin.at('kernels', name)}: {both} are both {schedule.slug}"
    for name in kernels:
        if slugs.get(name, name) != name:
            yield f"{origin.at('kernels', name)}: kernels.{name} is the name of another kernel"


def _schedule(value: Any, beside: Path, origin: Origin, name: str) -> Schedule:
    """Return the schedule that a manifest names: by its slug, or by its file."""
    at = f"{origin.at('kernels', name)}: kernels.{dotted((name,))}"
    if isinstance(value, str) and len(value) <= 200:
        if names.NAME.fullmatch(value):
            try:
                own = committed_file(value)
                return read_schedule(own) if own.exists() else from_slug(value)
            except ScheduleError as error:
                raise ScheduleError(f"{at}: {'; '.join(str(error).splitlines())}") from None
        if is_inside(value) and value.endswith(".toml"):
            return read_schedule(beside / value)
    raise ScheduleError(
        f"{at} = {shown(value)} is neither a slug nor the path of a schedule's .toml below "
        f"{printable(str(beside))}"
    )
