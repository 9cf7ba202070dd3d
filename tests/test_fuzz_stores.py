"""Stores of search results that no search has written: refused in one line, and nothing written.

The same cases in every run; what fails is shrunk to the fewest changes that still do.
"""

import json
import sqlite3
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fagen import registry, search
from fagen.dispatch.tables import table_at
from fagen.errors import FagenError
from fagen.search import replay
from fagen.search.report import page
from fagen.search.store import Store
from tests.cli_helpers import fagen
from tests.fuzz import altered_json, cases, hold
from tests.recordings import CARD, HALF, SPACE, record, space, toml

TEXT = SPACE.replace('["full", "causal"]', '"full"')
PACKED = toml(
    attention={**HALF, "mask": "full", "lengths": "varlen"},
    shapes=[
        {"seqlen": 512},
        {"seqlens": {"from": 1, "to": 64}, "batch": 40},
        {"seqlens": [300, 5, 95], "seqlens_k": [300, 9, 200]},
    ],
)
NEWLINE = 'NVIDIA H200\n[attention]\nhead_dim = 8\nx = "'


class Whole(bytes):
    """A store's file, of which a failing test shows no byte."""

    def __repr__(self) -> str:
        return "whole"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    """A store that a search might have written, with something in each table."""
    return written(tmp_path_factory, TEXT)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Whole:
    """The same of varlen sequences."""
    return written(tmp_path_factory, PACKED)


def written(tmp_path_factory, text: str) -> Whole:
    path = record(tmp_path_factory.mktemp("whole") / "whole.sqlite", kernels=6, text=text)
    (target,) = space(text).targets()
    with Store(path) as store:
        row, *_ = store.compiled()
        other = registry.from_slug(row.compiled.slug).but(block_n=48).slug
        wrong = [(other, "it is\nwrong")]
        store.put_timed(target, CARD, {wrong[0][0]: "a"}, [], wrong, [])
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("INSERT INTO claim VALUES ('compile x', '0123456789abcdef')")
    return Whole(path.read_bytes())


@pytest.fixture
def altered(whole, tmp_path):
    """How to change that store: (statement, *values) → the file."""
    path = tmp_path / "altered.sqlite"
    path.write_bytes(whole)

    def alter(statement: str, *values: object) -> Path:
        with closing(sqlite3.connect(path)) as base, base:
            base.execute(statement, values)
        return path

    return alter


def judge(path: Path, folder: Path) -> str:
    """Take all that a store's readers make of it; return its refusal, or ""."""
    try:
        results = search.found(path)
        json.dumps([search.record(result) for result in results], allow_nan=False)
        lines = [line for result in results for line in search.told(result)]
        assert all(map(str.isprintable, lines)), lines
        page(path)
        with suppress(FagenError):  # nothing was timed there
            replay.recording(str(path))
        written = search.write(results, folder)
    except FagenError as error:
        message = str(error)
        assert message.isprintable(), message
        assert path.name in message
        assert not folder.exists()
        return message
    for file in written[:-1]:
        assert registry.read(file).slug == file.stem
    table_at(written[-1])
    return ""


# ---- one thing at a time -------------------------------------------------------------------------


def test_the_store_that_is_altered_below_is_one(whole, tmp_path):
    (tmp_path / "s.sqlite").write_bytes(whole)
    assert judge(tmp_path / "s.sqlite", tmp_path / "out") == ""
    assert len(list((tmp_path / "out" / "forward").iterdir())) >= 1


@pytest.mark.parametrize(
    ("statement", "values", "message"),
    [
        ("UPDATE card SET name = ?", [NEWLINE], r"table timed: card = \"NVIDIA H200"),
        ("UPDATE card SET name = ?", ["\x1b]0;x\x07"], "table timed: .*one line of printable text"),
        ("UPDATE card SET name = ?", ["x" * 501], "table timed: .*at most 500 characters"),
        ("UPDATE card SET driver = NULL", [], "table timed: driver = None: input"),
        ("UPDATE card SET name = x'ff'", [], "table timed: card = "),
        ("UPDATE card SET name = CAST(x'ff' AS TEXT)", [], "Could not decode to UTF-8"),
        ("UPDATE session SET date = '21.11.2026'", [], 'table session: date = "21.11.2026"'),
        ("UPDATE session SET date = '20261121'", [], "must be a date such as 2026-11-21"),
        ("UPDATE session SET note = ?", ["a\nb"], "table session: note = "),
        ("UPDATE anchor SET slug = ?", ["a\nb"], r'table anchor: slug = "a'),
        ("UPDATE anchor SET slug = 'fwd_bf16_d64_full_m128n128'", [], "is no schedule of"),
        ("UPDATE kernel SET slug = 'x' || id", [], 'table compiled: "x1" is no schedule of'),
        ("UPDATE kernel SET target = 'fp16_d128_causal'", [], "is no schedule of"),
        ("UPDATE compiled SET registers = 'many'", [], "table compiled: registers = "),
        ("UPDATE compiled SET outcome = NULL", [], "table compiled: outcome = None"),
        ("UPDATE timed SET seconds = 9e999", [], "table timed: seconds = inf"),
        ("UPDATE timed SET seconds = NULL", [], "table timed: seconds = None"),
        ("UPDATE timed SET seconds = -1.0", [], "table timed: seconds = -1.0"),
        ("UPDATE timed SET anchor_seconds = 0.0", [], "table timed: anchor_seconds = 0.0"),
        ("UPDATE timed SET regime = 'fast'", [], "table timed: regime = "),
        ("UPDATE size SET kv_heads = 7", [], "table timed: kv_heads = 7 does not divide"),
        ("UPDATE size SET batch = 1.5", [], "table timed: batch = 1.5"),
        ("UPDATE survey SET found = '{'", [], "table survey: it is no JSON"),
        ("UPDATE survey SET found = ?", ["[" * 90_000], "table survey: it is no JSON"),
        ("UPDATE survey SET found = x'00'", [], "table survey: it is no JSON"),
        ("UPDATE survey SET target = 'a'", [], 'table survey: .*, and called "a"'),
        ("UPDATE wrong SET said = x'00'", [], "table wrong: said = "),
        ("UPDATE survey SET found = zeroblob(2000000)", [], "too big"),
        ("CREATE TABLE more (x)", [], "its tables are not those of search results"),
        ("CREATE VIEW more AS SELECT 1", [], "its tables are not those of search results"),
        (
            "CREATE TRIGGER t AFTER INSERT ON claim BEGIN DELETE FROM timed; END",
            [],
            "its tables are not those of search results",
        ),
        ("DROP TABLE claim", [], "its tables are not those of search results"),
        ("ALTER TABLE card RENAME COLUMN driver TO y", [], "its tables are not those"),
    ],
)
def test_what_no_search_has_written_is_refused_in_a_line(
    altered, tmp_path, statement, values, message
):
    path = altered(statement, *values)
    with pytest.raises(FagenError, match=message):
        search.found(path)
    assert judge(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": float("nan")}, r"sizes.0.weight = nan: input should be a finite number"),
        ({"weight": 0.0}, r"sizes.0.weight = 0.0: input should be greater than 0"),
        ({"weight": "1"}, r"sizes.0.weight = \"1\": input should be a valid number"),
        ({"more": 1}, "sizes.0.more is not known"),
        ({"a\nb": 1}, r"sizes.0.a\\.*b is not known"),
        ({"heads": 15, "kv_heads": 4}, "kv_heads = 4 does not divide heads = 15"),
    ],
)
def test_a_survey_has_the_sizes_it_should(altered, tmp_path, change, message):
    with closing(sqlite3.connect(altered("SELECT 1"))) as base:
        (text,) = base.execute("SELECT found FROM survey").fetchone()
    survey = json.loads(text)
    survey["sizes"][0] |= change
    path = altered("UPDATE survey SET found = ?", json.dumps(survey))
    with pytest.raises(FagenError, match=message):
        search.found(path)
    assert judge(path, tmp_path / "out")


def test_a_card_that_would_write_keys_into_schedules_writes_nothing(altered, tmp_path):
    path = altered("UPDATE card SET name = ?", NEWLINE)
    result = fagen("search", "report", path, "--write", tmp_path / "out")
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not path.with_suffix(".html").exists()


def test_names_of_tables_that_are_no_text_are_refused_in_a_line(whole, tmp_path):
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(whole.replace(b"tableclaim", b"table\x80laim"))
    assert "this is no file of search results" in judge(path, tmp_path / "out")


def test_beside_a_table_that_is_none_no_schedule_is_written(altered, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dispatch.toml").write_text("[")
    result = fagen("search", "report", altered("SELECT 1"), "--write", tmp_path / "out")
    assert result.exit_code == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["dispatch.toml"]


def test_a_damaged_store_is_neither_replayed_nor_searched_on(whole, altered, tmp_path):
    path = altered("UPDATE timed SET seconds = 'x'")
    (tmp_path / "space.toml").write_text(TEXT)
    words = ["--replay", path, "--store", tmp_path / "new.sqlite"]
    result = fagen("search", tmp_path / "space.toml", *words)
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1, result.output
    again = ["--replay", tmp_path / "whole.sqlite", "--store", path]
    (tmp_path / "whole.sqlite").write_bytes(whole)
    result = fagen("search", tmp_path / "space.toml", *again)
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1, result.output


def test_a_database_of_another_program_is_left_as_it_is(tmp_path):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(FagenError, match=r"other\.sqlite: results of layout 0, not 3"):
            Store(path, read_only=read_only)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_a_claim_by_what_is_no_process_names_no_file(altered, tmp_path):
    for runner in ("../x", "", "a" * 300, 3, None, b"x"):
        with Store(altered("INSERT OR REPLACE INTO claim VALUES ('job', ?)", runner)) as store:
            assert store.claim("job")


@pytest.mark.parametrize("searched", ["whole", "packed"])
def test_a_kernel_that_is_no_schedule_any_more_is_left_out(altered, searched, request, tmp_path):
    (tmp_path / "altered.sqlite").write_bytes(request.getfixturevalue(searched))
    path = altered("UPDATE kernel SET slug = slug || '_former' WHERE id = 2 AND source_hash != ''")
    with Store(path, read_only=True) as store:
        assert 2 not in {row.number for row in store.compiled()}
        assert store.compiled()
    assert search.found(path)


# ---- anything ------------------------------------------------------------------------------------

cells = st.sampled_from(
    [
        *(None, 0, 1, -1, 3, 2**40, 2**63 - 1, 1e-300, 1e308, float("inf"), 0.5),
        *("", "x", NEWLINE, "\x1b[2J", "nan", "9" * 400, b"\xff", b"", "../x", "cudnn", "brief"),
        *("fwd_fp16_d128_full_m128n128", "fwd_bf16_d64_causal_m64n64", "quant_fp16_d128", "good"),
    ]
)
anything = cells.filter(lambda cell: not isinstance(cell, bytes)) | st.sampled_from(
    [[], {}, True, float("nan"), [[1, 2, 3]], {"a": 1}, 10**400]
)
TABLES = ("session", "space", "survey", "anchor", "kernel", "compiled", "card", "size", "wrong")
TABLES += ("timed", "claim")
one_cell = st.tuples(st.sampled_from(TABLES), st.integers(0, 9), st.integers(0, 9), cells)
in_json = st.tuples(
    st.just("json"),
    st.sampled_from(["value", "value", "gone", "more"]),
    st.lists(st.integers(0, 40), max_size=4),
    anything,
)
texts = st.tuples(st.just("text"), st.integers(0, 2000), st.sampled_from('{}[],:"\\n0\x00'))
damage = st.tuples(st.just("bytes"), st.integers(0, 1 << 20), st.integers(0, 255))
cut = st.tuples(st.just("cut"), st.integers(0, 1 << 20))
changes = st.lists(st.one_of(one_cell, one_cell, in_json, in_json, texts, damage, cut), min_size=1)


def changed(whole: bytes, path: Path, changes: list[tuple]) -> None:
    """Write a store with these changes; those that sqlite itself refuses are none."""
    path.write_bytes(whole)
    for kind, *how in changes:
        if kind in ("bytes", "cut"):
            content = bytearray(path.read_bytes())
            at = how[0] % max(1, len(content))
            content[at:] = (
                content[at + 1 :] if kind == "cut" else bytes([how[1]]) + content[at + 1 :]
            )
            path.write_bytes(content[:at] if kind == "cut" else content)
            continue
        with closing(sqlite3.connect(path)) as base, suppress(sqlite3.Error, UnicodeError), base:
            if kind in ("json", "text"):
                base.text_factory = lambda text: text.decode(errors="replace")
                (stored,) = map(str, base.execute("SELECT found FROM survey").fetchone() or ("",))
                if kind == "json":
                    text = altered_json(stored, *how)
                else:
                    at, letter = how
                    text = stored[:at] + letter + stored[at + 1 :]
                base.execute("UPDATE survey SET found = ?", (text,))
            else:
                place, row, cell = how
                columns = [name for _, name, *_ in base.execute(f"PRAGMA table_info({kind})")]
                if not columns:  # the damage before took the table
                    continue
                column = columns[place % len(columns)]
                select = f"SELECT {column} FROM {kind} LIMIT 1 OFFSET ?"
                old = base.execute(select, (row,)).fetchone()
                base.execute(
                    f"UPDATE {kind} SET {column} = ? WHERE {column} = ?", (cell, *(old or (0,)))
                )


numbers = count()


def run(whole: bytes, folder: Path, changes: list[tuple]) -> None:
    """Judge a store with these changes, as a file of its own."""
    path = folder / f"{next(numbers)}.sqlite"
    out = path.with_suffix("")
    try:
        changed(whole, path, changes)
        judge(path, out)
        with suppress(FagenError), Store(path) as store:
            store.claim("compile x")
            store.put_space("name", "text")
    finally:
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ("", "17 x 3"),
        ("3*17", '"3\\*17" does not go with the sizes beside it'),
        ("300,5/9,95/200,", "is no length"),
        ("300,5/9,95/200\n", "is no length"),
        ("300*0,5/9", "is no length"),
        ("300*99999999999999999999", "is no length"),
        ("1*16385", "is no length, or of more than 16384 sequences"),
        ("300/300,5/9,95/200", "lengths are not written so"),
        ("1048577", "does not go with the sizes beside it"),
    ],
)
def test_lengths_that_no_search_has_written_are_refused_in_a_line(packed, tmp_path, lengths, why):
    path = tmp_path / "altered.sqlite"
    path.write_bytes(packed)
    with closing(sqlite3.connect(path)) as base, base:
        changed = base.execute(
            "UPDATE size SET lengths = ? WHERE lengths = '300,5/9,95/200'", (lengths,)
        )
        assert changed.rowcount == 1
    if not lengths:  # then they are of equal lengths, at which nothing was asked for
        assert judge(path, tmp_path / "out") == ""
        return
    with pytest.raises(FagenError, match=why):
        search.found(path)
    assert judge(path, tmp_path / "out")


@cases(few=80)
@pytest.mark.parametrize("store", ["whole", "packed"])
def test_a_store_is_read_or_refused_in_a_line(store, tmp_path, cases, request):
    content = request.getfixturevalue(store)
    hold(cases, changes, lambda changes: run(content, tmp_path, changes))
