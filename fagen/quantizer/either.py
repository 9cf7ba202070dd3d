"""Read a schedule of either kind, attention's or a quantiser's: whatever its first words say."""

from pathlib import Path

from fagen.errors import ScheduleError
from fagen.quantizer.schedule import SLUG_START, TABLE, QuantizeSchedule, parse_quantizer
from fagen.schedule import Schedule, parse_schedule
from fagen.toml_lines import read_text, read_toml

AnySchedule = Schedule | QuantizeSchedule


def read_any(path: Path | str) -> AnySchedule:
    """Read a file.  Raises ScheduleError with all faults, each with file and line."""
    return parse_any(read_text(path), str(path))


def parse_any(text: str, where: str = "schedule") -> AnySchedule:
    """Read TOML text; `where` names it in messages.  Raises ScheduleError."""
    return parse_quantizer(text, where) if _quantizes(text) else parse_schedule(text, where)


def from_any_slug(slug: str) -> AnySchedule:
    """Read a slug back.  Raises ScheduleError where it is not exactly some schedule's slug."""
    kind = QuantizeSchedule if slug.startswith(SLUG_START) else Schedule
    return kind.from_slug(slug)


def _quantizes(text: str) -> bool:
    try:
        return TABLE in read_toml(text, "")[0]
    except ScheduleError:
        return False
