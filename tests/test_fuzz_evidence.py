"""Evidence that nobody meant: it is refused in words, or can be judged, listed and written again.

The same cases in every run; what fails is shrunk to the fewest changes that still do.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fagen.commandline import report
from fagen.errors import VerificationError
from fagen.evidence import (
    UNVERIFIED,
    Evidence,
    Line,
    Rendering,
    faults,
    launchers,
    read,
    read_excuses,
    write,
)
from fagen.evidence.record import encoded as encoded_evidence
from fagen.evidence.record import laid_out
from fagen.registry import ENTRIES, from_slug, kind_of_slug, schedules
from fagen.render import Hashes
from tests.evidence_helpers import stand_in
from tests.fuzz import (
    ENCODINGS,
    LONGEST,
    SNIPPETS,
    altered_json,
    cases,
    contents,
    encoded,
    hold,
)


def shortest(kind: str) -> Iterator[Evidence]:
    """Evidence of a committed kernel of a kind at one shape; of a new kind there is none."""
    of_kind = (read(path.stem) for path in schedules(kind))
    for evidence in islice(filter(None, of_kind), 1):
        yield replace(evidence, errors=evidence.errors[:1], speeds=evidence.speeds[:1])


WHOLE = {record.slug: record for kind in ENTRIES for record in shortest(kind)}
HASHES = Hashes("a" * 64, "b" * 64, "c" * 64)
EXCUSES = (
    '[fwd_fp16_d64_full_m64n64]\ndate = "2026-11-21"\nreason = "no GPU at hand"\n',
    "[a]\ndate = 2026-11-21\nreason = \"x\"\n['b c']\nreason = 'é'\ndate = 2026-11-21\n",
)

anything = st.sampled_from(
    [
        *(None, True, 0, -1, 3, 0.0, 0.5, -0.0, 5e-324, 1e308, 2**63, 10**400, float("nan")),
        *(float("inf"), "", "x", "a\nb", "\x1b[2J", "\x9b", "\u202e", "\ud800", "é" * 600, [], {}),
        *([[]], [1], ["x" * 140_000], {"a": 1}, ["-O3"] * 900, [{}], "fwd_fp16_d64_full_m64n64"),
    ]
)
in_json = st.tuples(
    st.sampled_from(["value", "value", "value", "gone", "more", "twice"]),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    anything,
)
in_text = st.tuples(st.just("text"), st.integers(0, 4000), st.sampled_from([*SNIPPETS, "[" * 9000]))
changes = st.lists(st.one_of(in_json, in_json, in_json, in_text), max_size=4)


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bool, bytes]:
    """Draw a slug, whether its evidence is in a ledger, and what the file holds."""
    slug, in_ledger = draw(st.sampled_from(sorted(WHOLE))), draw(st.booleans())
    rendered = draw(st.sampled_from([HASHES, WHOLE[slug].hashes]))
    line = str(Line(slug, rendered, WHOLE[slug]))
    text = line if in_ledger else laid_out(encoded_evidence(WHOLE[slug]))
    for kind, where, what in draw(changes):
        if kind == "text":
            text = text[:where] + what + text[where:]
        else:
            text = altered_json(text, kind, where, what)
    return slug, in_ledger, encoded(text, draw(st.sampled_from(ENCODINGS)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is taken for generated/."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "mine").mkdir()
    return stand_in(tmp_path, monkeypatch)


def fault_lines(*slugs: str) -> Counter[str]:
    """Take all that is wrong there; return how often each kind of it is."""
    wrong = faults([Rendering(slug, HASHES, "int x;\n") for slug in slugs], cutlass="4.2.0")
    in_lines([str(fault) for fault in wrong])
    return Counter(fault.kind for fault in wrong)


def in_lines(lines: Iterable[str]) -> None:
    """Judge what is printed: no line of it obeys, or fills a screen."""
    for line in lines:
        assert line.isprintable() and len(line) <= 2 * LONGEST, line


def judge(folder: Path, slug: str, in_ledger: bool, content: bytes) -> None:
    """Make all that is made of a file of evidence."""
    kind = kind_of_slug(slug).name
    ledgers = [folder / "ledger" / f"{name}.jsonl" for name in ENTRIES]
    for path in (*ledgers, *(folder / "mine").iterdir()):
        path.unlink(missing_ok=True)
    place = None if in_ledger else folder / "mine"
    path = place / f"{slug}.json" if place else folder / "ledger" / f"{kind}.jsonl"
    path.write_bytes(content)
    kinds = fault_lines(slug) if in_ledger else Counter()
    in_lines(map(str, report.listed(from_slug(slug)).values()))
    in_lines(launchers(slug, place))
    try:
        evidence = read(slug, place)
    except VerificationError as error:
        in_lines([str(error)])
        assert path.name in str(error) and kinds["unreadable"] == in_ledger
        return
    assert not kinds["unreadable"]
    if not evidence:  # a line of another, or of a schedule that never ran
        assert in_ledger and kinds["missing"]
        return
    in_lines(report.proved(evidence).split("\n"))
    for speed in evidence.speeds:
        assert speed.ratio is None or speed.ratio >= 0 or math.isnan(speed.ratio)
        in_lines([speed.figure])
    kept = write(evidence, place).read_bytes()
    assert write(read(slug, place), place).read_bytes() == kept


def judge_excuses(folder: Path, content: bytes) -> None:
    """Make all that is made of a list of kernels without evidence."""
    path = folder / UNVERIFIED
    path.write_bytes(content)
    kinds = fault_lines()
    in_lines(map(str, report.listed(from_slug(next(iter(WHOLE)))).values()))
    try:
        excuses = read_excuses()
    except VerificationError as error:
        in_lines([str(error)])
        assert UNVERIFIED in str(error) and kinds == {"unreadable": 1}
        return
    assert kinds["orphan"] == len(excuses)
    in_lines(text for slug, excuse in excuses.items() for text in (slug, *vars(excuse).values()))


@cases()
def test_evidence_is_read_or_refused_in_words(cases: int, folder: Path) -> None:
    hold(cases, files(), lambda drawn: judge(folder, *drawn))


@cases()
def test_so_are_excuses(cases: int, folder: Path) -> None:
    hold(cases, contents(EXCUSES), lambda content: judge_excuses(folder, content))
