"""Recordings that nobody meant: refused in words, or calls are added to what they hold."""

from pathlib import Path

import pytest

from fagen.problem import Problem, Sizes
from fagen.search.recording import _add, read_recording, text_of
from tests.fuzz import Door, fuzzed

HALF = Problem("fp16", 64, 64, "causal", None, "", 0)
WIDE = Problem("bf16", 192, 128, "full", None, "", 0)
FP8 = Problem("e4m3", 128, 128, "full", None, "columns", 64)
CALL = Sizes(2, 8, 2, 77, 1_024)
FILES = (
    text_of({HALF: {CALL: 3.0}}),
    text_of({HALF: {CALL: 1.0, Sizes(1, 8, 8, 64, 64): 2.5}, WIDE: {Sizes(1, 1, 1, 1, 5): 1e300}}),
    text_of({FP8: {CALL: 7.0}, HALF: {CALL: 0.1}}),
)


def add_a_call(path: Path) -> None:
    """Read a recording, add a call, and hold what is written to what was read."""
    before = read_recording(path)
    assert _add(path, {}, {}) == ["no call of fagen.attention was recorded; nothing is written"]
    dropped = _add(path, {HALF: {CALL: 2}}, {})
    after = read_recording(path)
    wanted = {problem: dict(sizes) for problem, sizes in before.items()}
    counts = wanted.setdefault(HALF, {})
    counts[CALL] = counts.get(CALL, 0.0) + 2
    if not dropped:
        assert after == {problem: pytest.approx(sizes) for problem, sizes in wanted.items()}
    assert all(line.isprintable() for line in path.read_text().split("\n"))


test_no_recording_is_a_traceback, test_nor_is_one_of_very_many = fuzzed(
    {"recording": Door(add_a_call, FILES)}
)
