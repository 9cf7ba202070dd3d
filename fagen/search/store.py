"""Keep what a search found, in a sqlite file: results go in at once, and never twice.

Several processes of one machine may share a file.  What each is working on it has claimed; a claim
holds as long as its process lives, which is told by a lock on a file beside the store: the system
lets go of that, however the process ends.
"""

import fcntl
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fagen.errors import FagenError
from fagen.problem import Problem
from fagen.search import rows
from fagen.search.rows import CompiledRow, Session, TimedRow, WrongRow
from fagen.search.tasks import Compiled, Time
from fagen.toml_lines import printable

Row = TypeVar("Row", bound=rows.Row)
Kernel = TypeVar("Kernel", bound=rows.KernelRow)

LAYOUT = 3
_SCHEMA = """
CREATE TABLE session (date TEXT, version TEXT, note TEXT,
  PRIMARY KEY (date, version)) WITHOUT ROWID;
CREATE TABLE size (id INTEGER PRIMARY KEY, batch INTEGER, seqlen_q INTEGER,
  seqlen_k INTEGER, heads INTEGER, kv_heads INTEGER, lengths TEXT,
  UNIQUE (batch, seqlen_q, seqlen_k, heads, kv_heads, lengths));
CREATE TABLE space (name TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID;
CREATE TABLE survey (target TEXT PRIMARY KEY, found TEXT) WITHOUT ROWID;
CREATE TABLE anchor (target TEXT, card TEXT, driver TEXT, slug TEXT,
  PRIMARY KEY (target, card, driver)) WITHOUT ROWID;
CREATE TABLE kernel (id INTEGER PRIMARY KEY, target TEXT, slug TEXT, source_hash TEXT,
  UNIQUE (slug, source_hash));
CREATE TABLE compiled (kernel INTEGER, compiler TEXT, outcome TEXT, note TEXT, registers INTEGER,
  spill_bytes INTEGER, cpu_seconds REAL, PRIMARY KEY (kernel, compiler));
CREATE TABLE card (id INTEGER PRIMARY KEY, name TEXT, driver TEXT, UNIQUE (name, driver));
CREATE TABLE wrong (kernel INTEGER, card INTEGER, said TEXT, PRIMARY KEY (kernel, card));
CREATE TABLE timed (kernel INTEGER, card INTEGER, size INTEGER, regime TEXT, round INTEGER,
  seconds REAL, anchor_seconds REAL, mhz INTEGER,
  PRIMARY KEY (kernel, card, size, regime, round));
CREATE TABLE claim (job TEXT PRIMARY KEY, runner TEXT) WITHOUT ROWID;
"""
# of which rows hold the numbers
_JOINED = {
    "compiled": ("kernel",),
    "wrong": ("kernel", "card"),
    "timed": ("kernel", "card", "size"),
}
_TOKEN = re.compile(r"[0-9a-f]{16}")  # of a process, in a file's name
_ERRORS = (sqlite3.Error, UnicodeError)  # what sqlite says of a file that is damaged
_MAX_CELL = 1 << 20  # bytes of a value


class Store:
    """An open file of results; use it as a context manager, from one thread."""

    def __init__(self, path: Path, *, read_only: bool = False, empty: bool = False) -> None:
        """Open or create; with `empty` nothing need be in what is only read.

        Raises FagenError where it is no such file, or of another layout.
        """
        self.path = path
        self._named = printable(str(path))
        self._token = secrets.token_hex(8)
        self._lock: int | None = None
        if read_only and not path.is_file():
            raise FagenError(f"{self._named}: there is no such file")
        if not read_only and not path.parent.is_dir():
            raise _no_folder(path)
        self._base = _opened(path, read_only)
        try:
            self._check_layout(empty=empty or not read_only)
            if not read_only:  # nothing is written into a file that is another program's
                _make_ready(self._base)
                self._check_layout()
        except _ERRORS as error:
            message = f"this is no file of search results: {printable(str(error))}"
            raise FagenError(f"{self._named}: {message}") from None
        if not read_only:
            self._lock = os.open(self._runner_file(self._token), os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop this process's claims; the last one out leaves one plain file, without a log."""
        if self._lock is not None:
            with self._change():
                self._base.execute("DELETE FROM claim WHERE runner = ?", (self._token,))
            with suppress(*_ERRORS):  # another process has it open
                self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._base.execute("PRAGMA journal_mode = DELETE")
            self._runner_file(self._token).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        self._base.close()

    def _check_layout(self, *, empty: bool = False) -> None:
        """Refuse a file that is not of these tables alone, or `empty` where that is not meant."""
        layout = self._base.execute("PRAGMA user_version").fetchone()[0]
        layout_rows = self._base.execute(_DECLARED).fetchall()
        if not layout and not layout_rows:
            if empty:
                return
            raise FagenError(f"{self._named}: nothing is in this file yet")
        if layout != LAYOUT:
            message = f"results of layout {layout}, not {LAYOUT}"
            raise FagenError(f"{self._named}: {message}: use a new file")
        if sorted(map(str, layout_rows)) != _declared():
            raise FagenError(f"{self._named}: its tables are not those of search results")

    @contextmanager
    def _change(self) -> Iterator[None]:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            yield
            self._base.execute("COMMIT")
        except BaseException as error:
            with suppress(*_ERRORS):  # it was ended by what went wrong
                self._base.execute("ROLLBACK")
            if isinstance(error, _ERRORS):
                raise self._failed(error) from None
            raise

    def _failed(self, error: Exception) -> FagenError:
        return FagenError(f"{self._named}: {printable(str(error))}")

    def _rows(self, row: type[Row], table: str, more: str = "", *values: Any) -> list[Row]:
        """Select and check rows.  Raises FagenError for one that no search has written."""
        joined = _JOINED.get(table, ())
        # columns are called as a row's fields are, but for these
        others = {"number": f"{table}.rowid"} | ({"card": "name"} if "card" in joined else {})
        columns = ", ".join(others.get(name, name) for name in row.model_fields)
        joins = "".join(f" JOIN {other} ON {other}.id = {table}.{other}" for other in joined)
        try:
            select = self._base.execute(f"SELECT {columns} FROM {table}{joins} {more}", values)
            return [rows.read(row, selected) for selected in select]
        except rows.Damaged as damaged:
            raise FagenError(
                f"{self._named}: no search has written all of its table {table}: {damaged}; "
                "use another file"
            ) from None
        except _ERRORS as error:
            raise self._failed(error) from None

    def _news(self, row: type[Kernel], table: str, since: int) -> list[Kernel]:
        """Rows after number `since`; those are left out whose slug is no schedule's any more."""
        more = f"WHERE {table}.rowid > ? ORDER BY {table}.rowid"
        return [own for own in self._rows(row, table, more, since) if own.stands]

    def _one(self, statement: str, *values: Any) -> Any:
        row = self._base.execute(statement, values).fetchone()
        return row[0] if row else None

    # ---- claims

    def claim(self, job: str) -> bool:
        """Take a job, unless another process that is alive has it."""
        with self._change():
            owner = self._one("SELECT runner FROM claim WHERE job = ?", job)
            if owner not in (None, self._token) and self._alive(owner):
                return False
            row = (job, self._token)
            self._base.execute("INSERT OR REPLACE INTO claim VALUES (?, ?)", row)
        return True

    def _unclaim(self, jobs: Iterable[str]) -> None:
        mine = [(job, self._token) for job in jobs]
        self._base.executemany("DELETE FROM claim WHERE job = ? AND runner = ?", mine)

    def _runner_file(self, token: str) -> Path:
        return self.path.with_name(f"{self.path.name}-runner-{token}")

    def _alive(self, token: Any) -> bool:
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            return False  # no process has ever been called so
        try:
            file = os.open(self._runner_file(token), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        self._runner_file(token).unlink(missing_ok=True)
        return False

    # ---- writing

    def _insert(self, table: str, *values: Any, verb: str = "INSERT OR IGNORE") -> None:
        places = ", ".join("?" * len(values))
        self._base.execute(f"{verb} INTO {table} VALUES ({places})", values)

    def _number(self, table: str, **columns: Any) -> int:
        """The number of the row of a table that has these columns, which is there from now on."""
        names, places = ", ".join(columns), ", ".join("?" * len(columns))
        values = tuple(columns.values())
        self._base.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({places})", values)
        return int(self._one(f"SELECT id FROM {table} WHERE ({names}) = ({places})", *values))

    def put_session(self, session: Session) -> None:
        """Keep when something was searched, and by which fagen; what is known of that day stays."""
        with self._change():
            self._insert("session", session.date, session.version, session.note)

    def put_space(self, name: str, text: str) -> None:
        """Keep what was asked for."""
        with self._change():
            self._insert("space", name, text, verb="INSERT OR REPLACE")

    def put_survey(self, target: Problem, survey: Mapping[str, Any]) -> None:
        """Keep how many points a target has, and why others are none."""
        with self._change():
            self._insert("survey", target.name, json.dumps(survey), verb="INSERT OR REPLACE")

    def put_anchor(self, target: Problem, card: tuple[str, str], slug: str) -> str:
        """Keep the anchor of a target on a card and driver, unless there is one; return which."""
        with self._change():
            self._insert("anchor", target.name, *card, slug)
        return self.anchors()[target.name, *card]

    def put_compiled(self, target: Problem, compiled: Compiled, job: str) -> None:
        """Keep a compile result, and give its job up."""
        with self._change():
            kernel = self._kernel(target.name, compiled.slug, compiled.source_hash)
            self._insert(
                *("compiled", kernel, compiled.compiler, compiled.outcome, compiled.note),
                *(compiled.registers, compiled.spill_bytes, round(compiled.cpu_seconds, 2)),
            )
            self._unclaim([job])

    def put_timed(
        self,
        target: Problem,
        card: tuple[str, str],
        hashes: Mapping[str, str],
        times: Iterable[Time],
        wrong: Iterable[tuple[str, str]],
        jobs: Iterable[str],
    ) -> None:
        """Keep a round's times and give its jobs up; `hashes` are of the sources, by slug."""
        with self._change():
            on = self._number("card", name=card[0], driver=card[1])
            for time in times:
                kernel = self._kernel(target.name, time.slug, hashes.get(time.slug, ""))
                size = self._number("size", **{"lengths": "", **rows.columns_of(time.size)})
                self._insert(
                    *("timed", kernel, on, size, time.regime, time.repeat),
                    *(_short(time.seconds), _short(time.anchor_seconds), time.sm_clock_mhz),
                )
            for slug, why in wrong:
                kernel = self._kernel(target.name, slug, hashes[slug])
                self._insert("wrong", kernel, on, why[:500])
            self._unclaim(jobs)

    def _kernel(self, target: str, slug: str, source_hash: str) -> int:
        """The number of a kernel; a peer has no source, and is another one in each target."""
        slug = slug if source_hash else f"{slug} {target}"
        return self._number("kernel", target=target, slug=slug, source_hash=source_hash)

    # ---- reading

    def sessions(self) -> tuple[Session, ...]:
        """When something was searched, the first day first."""
        return tuple(self._rows(Session, "session", "ORDER BY date, version"))

    def spaces(self) -> dict[str, str]:
        """The spaces searched: their texts by name."""
        return {row.name: row.text for row in self._rows(rows.SpaceRow, "space")}

    def surveys(self) -> dict[str, Any]:
        """What was found in each target's space, by the target's name."""
        survey_rows = self._rows(rows.SurveyRow, "survey")
        return {row.target: row.found.model_dump(mode="json") for row in survey_rows}

    def anchors(self) -> dict[tuple[str, str, str], str]:
        """The anchor of each target on each card and driver."""
        anchors = self._rows(rows.AnchorRow, "anchor")
        return {(row.target, row.card, row.driver): row.slug for row in anchors}

    def compiled(self, since: int = 0) -> list[CompiledRow]:
        """Compile results kept after number `since`."""
        return self._news(CompiledRow, "compiled", since)

    def timed(self, since: int = 0) -> list[TimedRow]:
        """Times kept after number `since`."""
        return self._news(TimedRow, "timed", since)

    def wrong(self, since: int = 0) -> list[WrongRow]:
        """Kernels found wrong after number `since`."""
        return self._news(WrongRow, "wrong", since)

    def cards(self) -> tuple[tuple[str, str], ...]:
        """Every card and driver that something was timed on."""
        cards = self._rows(rows.CardRow, "card", "ORDER BY id")
        return tuple((row.name, row.driver) for row in cards)


def side_files(path: Path) -> dict[str, Path]:
    """The files that sqlite has beside a store while it is open."""
    return {end: path.with_name(f"{path.name}-{end}") for end in ("wal", "shm", "journal")}


def check_place(path: Path) -> None:
    """Raise FagenError where a search could not keep what it finds; nothing is written."""
    if path.exists():
        Store(path, read_only=True, empty=True).close()
    elif not path.parent.is_dir():
        raise _no_folder(path)


def _no_folder(path: Path) -> FagenError:
    named = printable(str(path))
    return FagenError(f"{named}: there is no folder {printable(str(path.parent))}")


_DECLARED = "SELECT type, name, tbl_name, sql FROM sqlite_master"


def _opened(path: Path, read_only: bool) -> sqlite3.Connection:
    # a committed file may lie where nothing can be written, not even sqlite's own lock
    immutable = "" if Path(f"{path}-wal").exists() else "&immutable=1"
    how = f"?mode=ro{immutable}" if read_only else ""
    try:
        address = f"{path.absolute().as_uri()}{how}"
        base = sqlite3.connect(address, uri=True, timeout=60, isolation_level=None)
    except _ERRORS as error:
        raise FagenError(f"{printable(str(path))}: {printable(str(error))}") from None
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_CELL)
    return base


def _make_ready(base: sqlite3.Connection) -> None:
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = NORMAL")
    base.execute("BEGIN IMMEDIATE")
    if not base.execute("SELECT 1 FROM sqlite_master").fetchone():
        _create(base)
    base.execute("COMMIT")


@cache
def _declared() -> list[str]:
    base = sqlite3.connect(":memory:")
    _create(base)
    statements = sorted(map(str, base.execute(_DECLARED)))
    base.close()
    return statements


def _create(base: sqlite3.Connection) -> None:
    for statement in filter(str.strip, _SCHEMA.split(";")):
        base.execute(statement)
    base.execute(f"PRAGMA user_version = {LAYOUT}")


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")
