"""Doors by which files come in, each with files that nobody meant: none is a traceback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fagen import registry
from fagen.dispatch import select
from fagen.dispatch.rows import MOST, OPEN_KEYS, Row
from fagen.dispatch.tables import NAME, table_at, update, written
from fagen.errors import ScheduleError
from fagen.paths import config_folder
from fagen.problem import Problem
from tests.fuzz import Door, cases, fuzzed, hold, in_words

# ---- schedules ----------------------------------------------------------------------------------


def read_schedule(path: Path) -> None:
    schedule = registry.read(path)
    assert registry.from_slug(schedule.slug) == schedule


def schedules(kind: str) -> tuple[str, ...]:
    """The shortest and the longest that are committed."""
    files = sorted((path.read_text() for path in registry.schedules(kind)), key=len)
    return files[0], files[-1]


# ---- dispatch tables ----------------------------------------------------------------------------

SLUGS = tuple(f"fwd_fp16_d64_full_m64n{block_n}" for block_n in (16, 32, 64, 96))
OTHERS = ("fwd_e4m3_d64_full_m64n64_vrows", "fwd_bf16_d192v128_causal_m128n128_reusev")
PROBLEM = Problem("fp16", 64, 64, "full", "fp16", "", 0)
CARD = "NVIDIA H200"
SIZES = (0, 1, 63, 64, 127, 1_022, 1_023, 1_024, 4_999, OPEN_KEYS, 300_000, 2**63 - 1)
OWN = [
    Row(CARD, SLUGS[0], rows_to=64),
    Row(CARD, SLUGS[0], rows_to=1_023),
    Row(CARD, SLUGS[1], 0, OPEN_KEYS),
    Row(CARD, SLUGS[2], OPEN_KEYS + 1),
]
USERS = (
    written([Row(CARD, SLUGS[3], 0, 1_023), Row(CARD, SLUGS[3], 5_000)]),
    written([Row(CARD, SLUGS[3], rows_to=127), Row("NVIDIA H100", SLUGS[0], 64, 127)]),
    written([Row("", slug, 1, 1_024) for slug in (*OTHERS, SLUGS[3])]),
)


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small table of fagen's own, and a folder for a user's."""
    own = tmp_path / "own"
    update(own / NAME, OWN)
    monkeypatch.setattr(select, "locate", lambda name: own)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "fagen").mkdir()
    yield own
    table_at.cache_clear()


def serve_by_table(path: Path) -> None:
    """Read a user's table, write it, and hold what it serves to a plain search of its rows."""
    table_at.cache_clear()
    users = table_at(path)
    again = path.with_name("again.toml")
    update(again, users)
    assert set(table_at(again)) == set(users)
    again.unlink()
    (config_folder() / NAME).write_bytes(path.read_bytes())
    served = select.select(PROBLEM, CARD)
    mine = [row for row in users if row.problem == OWN[0].problem and row.card == CARD]
    for keys in SIZES:
        fitting = [
            row
            for row in (*mine, *OWN)
            if not row.for_few_rows and row.keys_from <= keys <= row.keys_to
        ]
        assert served.slugs(2**63, keys)[-1] == fitting[0].slug
        for queries in SIZES[:7]:
            slug = served.slugs(queries, keys)[-1]
            few = [row for row in (*mine, *OWN) if row.for_few_rows and row.rows_to >= queries]
            few.sort(key=lambda row: (row in OWN, row.rows_to))
            assert slug in {row.slug for row in (fitting[0], *few[:1])}


DOORS = {kind: Door(read_schedule, schedules(kind)) for kind in registry.ENTRIES}
DOORS["every key"] = Door(read_schedule, (Path("examples/every_key.toml").read_text(),))
DOORS["dispatch"] = Door(serve_by_table, USERS)

test_no_file_is_a_traceback = fuzzed(DOORS)


# ---- and what is written ------------------------------------------------------------------------

sizes = st.integers(-1, 2**64) | st.integers(0, 1_000) | st.just(MOST)
cards = st.text(max_size=20) | st.just(CARD)


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Draw rows, of which some may be for the same calls, or for none."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        least, most, few = draw(sizes), draw(sizes), draw(sizes)
        bounds = dict(rows_to=few) if draw(st.booleans()) else dict(keys_from=least, keys_to=most)
        rows.append(Row(draw(cards), draw(st.sampled_from(SLUGS + OTHERS)), **bounds))
    return rows


def read_back_or_refused(rows: list[Row], path: Path) -> None:
    path.unlink(missing_ok=True)
    table_at.cache_clear()
    try:
        update(path, rows)
    except ScheduleError as error:
        in_words(error, str(path))
        assert not path.exists()
        return
    table_at.cache_clear()
    assert set(table_at(path)) == set(rows)
    assert all(line.isprintable() for line in path.read_text(encoding="utf-8").split("\n"))


@cases()
def test_rows_are_read_back_or_refused(cases: int, tmp_path: Path) -> None:
    hold(cases, tables(), lambda rows: read_back_or_refused(rows, tmp_path / NAME))
