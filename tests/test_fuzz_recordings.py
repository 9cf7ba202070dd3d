"""Recordings that nobody meant: refused in words, or calls are added to what they hold."""

from pathlib import Path

import pytest

from fagen.problem import Problem, Sizes, VarlenTotals
from fagen.search.recording import _add, read_recording, text_of
from tests.fuzz import Door, fuzzed

HALF = Problem("fp16", 64, 64, "causal", None, "", 0)
WIDE = Problem("bf16", 192, 128, "full", None, "", 0)
FP8 = Problem("e4m3", 128, 128, "full", None, "columns", 64)
PACKED = Problem("fp16", 64, 64, "causal", None, "", 0, lengths="varlen")
DECODED = Problem("bf16", 64, 64, "full", None, "", 0, "decode")
CALL = Sizes(2, 8, 2, 77, 1_024)
PACKED_CALL = VarlenTotals(3, 8, 2, 40, 400, 77, 1_024)
FILES = (
    text_of({HALF: {CALL: 3.0}}),
    text_of({HALF: {CALL: 1.0, Sizes(1, 8, 8, 64, 64): 2.5}, WIDE: {Sizes(1, 1, 1, 1, 5): 1e300}}),
    text_of({FP8: {CALL: 7.0}, HALF: {CALL: 0.1}}),
    text_of({PACKED: {PACKED_CALL: 2.0, VarlenTotals(4, 8, 8, 15, 15, 60, 60): 1.0}}),
    text_of({PACKED: {VarlenTotals(3, 8, 2, 40, 40, 77, 77): 3.0}, HALF: {CALL: 1.0}}),
    text_of({DECODED: {Sizes(2, 8, 8, 4, 4): 3.0, Sizes(2, 8, 2, 1, 99): 1.0}}),
)


def add_a_call(path: Path) -> None:
    """Read a recording, add a call, and hold what is written to what was read."""
    before = read_recording(path)
    assert _add(path, {}, {}) == [
        "no call of fagen.attention or its like was recorded; nothing is written"
    ]
    calls: dict[Problem, dict[Sizes, int]] = {HALF: {CALL: 2}, PACKED: {PACKED_CALL: 3}}
    dropped = _add(path, calls, {})
    after = read_recording(path)
    expected = {problem: dict(sizes) for problem, sizes in before.items()}
    for problem, sizes in calls.items():
        counts = expected.setdefault(problem, {})
        for size, count in sizes.items():
            counts[size] = counts.get(size, 0.0) + count
    if not dropped:
        assert after == {problem: pytest.approx(sizes) for problem, sizes in expected.items()}
    assert all(line.isprintable() for line in path.read_text().split("\n"))


test_no_recording_is_a_traceback = fuzzed({"recording": Door(add_a_call, FILES)})
