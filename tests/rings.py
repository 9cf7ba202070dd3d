"""Which tests run when: the rings of `make quick`, `make test` and `make test-long`, in one place.

`make quick` runs the files of QUICK: the house, schedules and plans, ledgers, a rendering of each
form, the command line. `make test` runs all but what is marked `long` or `gpu`, and so the quick
ones too; `make test-long` runs what is marked `long`.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
APART = ("gpu", "long")  # marks of tests that run where `-m` names them

QUICK = (
    *("test_house", "test_committed", "test_generated", "test_templates", "test_parts"),
    *("test_schedule", "test_schedule_refusals", "test_toml_lines", "test_plan"),
    *("test_decode_defaults", "test_cli"),
)

# begun first: at the end of a run one worker would wait for another that has one of these left
LONGEST = ("test_release", "test_growth", "test_vendor_build", "test_vendor_torch_build")


def named(config: pytest.Config, mark: str) -> bool:
    """Whether `-m` names a mark."""
    return mark in config.getoption("markexpr")


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Whether no test of a file, or of a folder, would run: it need not be imported then."""
    if path.is_relative_to(HERE / "gpu"):
        return not named(config, "gpu")
    if not named(config, "quick") or path == HERE or not path.is_relative_to(HERE):
        return False
    return path.is_dir() or (path.suffix == ".py" and path.stem not in QUICK)


def mark(items: list[pytest.Item]) -> None:
    """Mark tests of the quick ring, for `-m quick`: those of its files that compile nothing."""
    for item in items:
        if item.path.stem in QUICK and "built" not in getattr(item, "fixturenames", ()):
            item.add_marker("quick")


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put tests that walk over every schedule first, for which one process then makes that walk."""

    def place(item: pytest.Item) -> int:
        if "committed" in getattr(item, "fixturenames", ()):
            return 0
        return 1 if item.path.stem in LONGEST else 2

    return sorted(items, key=place)
