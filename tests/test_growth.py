"""The house as a measure: what a change touches, and that no more is needed for it to work."""

import re
import sys
from pathlib import Path

import pytest

from fagen.process import run
from tests import growth

SCRIPT = Path(growth.__file__)


def tried(*options: str) -> dict[str, tuple[int, int]]:
    """Run the samples; return how many files each touches, and how many it may."""
    result = run([sys.executable, SCRIPT, *options], cwd=growth.ROOT)
    assert result.returncode == 0, result.stderr
    row = r"^\| ([^|]+) \| (\d+) \| (\d+) \| \d+ \| [+-]\d+ \| `"
    rows = re.findall(row, result.stdout, re.M)
    return {name: (int(files), int(most)) for name, files, most in rows}


def test_each_change_works_and_touches_few_files():
    """As docs/house.md says it; tests, examples, pages and what a command writes aside."""
    assert tried() == {
        "a tile, a head dim": (1, 1),
        "a key of a schedule": (2, 2),
        "a mask whose numbers a call gives": (2, 2),
        "a type of the output": (2, 2),
        "an argument of a call": (3, 3),
        "a kind": (1, 1),
        "a limit of the hardware": (1, 1),
        "a paged loader for varlen": (7, 8),
    }


@pytest.mark.long  # a dozen kernels, some minutes
def test_what_was_added_compiles_within_its_plan_and_computes_it_by_its_own_text():
    assert len(tried("--build", "--simulate")) == len(growth.SAMPLES)
