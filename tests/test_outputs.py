"""Nothing that is read, and nothing that fagen did not write, is written over, by any command."""

import json
import os
import re
from pathlib import Path

import pytest

import fagen as package
from fagen import evidence, flow, outputs, search
from fagen.errors import FagenError
from fagen.registry import from_slug
from tests.cli_helpers import SLUG, fagen
from tests.recordings import record

MINE = "mine\n"
SPACE = '[attention]\ndtype = "fp16"\nhead_dim = 128\nmask = "full"\n[[shapes]]\nseqlen = 512\n'


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("store") / "s.sqlite", kernels=12)


@pytest.fixture
def place(recorded, tmp_path, monkeypatch) -> Path:
    """A folder with a store under several names, a space, and a file of somebody's own."""
    monkeypatch.chdir(tmp_path)
    for name in ("s.sqlite", "store.html", "r.sqlite"):
        Path(name).write_bytes(recorded.read_bytes())
    Path("link.html").symlink_to("s.sqlite")
    os.link("s.sqlite", "hard.html")
    Path("space.toml").write_text(SPACE)
    Path("mine.html").write_text(MINE)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


TO = "s.sqlite ./s.sqlite S.SQLITE link.html hard.html s.sqlite-wal S.sqlite-journal r.sqlite"
RUN = "search run space.toml --replay"
NEW = f"{RUN} r.sqlite --store new.sqlite"
REPORTS = [
    "search report store.html",
    *(f"search report s.sqlite -o {page}" for page in (*TO.split(), "mine.html", "space.toml")),
    "search report s.sqlite -o new/dispatch.toml --write new",
    f"{RUN} r.sqlite --report r.sqlite",
    f"{RUN} r.sqlite --report r.sqlite-shm",
    f"{RUN} r.sqlite --store r.sqlite",
    f"{RUN} s.sqlite --store hard.html",
    *(f"{NEW} --report {page}" for page in ("new.sqlite", "NEW.sqlite", "new.sqlite-wal")),
    *(f"{NEW} --report {page}" for page in ("space.toml", "mine.html", "nowhere/page.html")),
    f"{NEW} --write .",
    f"{RUN} r.sqlite --store space.toml",
    f"{RUN} r.sqlite --store new/dispatch.toml --write new",
    f"{RUN} r.sqlite --store nowhere/new.sqlite",
]


REFUSED = "named twice|as fagen wrote it|symbolic link|no file of search|comments|no folder"


@pytest.mark.parametrize("words", REPORTS)
def test_no_search_writes_over_what_it_reads_or_what_is_somebody_elses(words, place):
    Path("new").mkdir()
    Path("dispatch.toml").write_text("# mine\n")
    before = contents(place)
    answer = fagen(*words.split(), "--json")
    assert answer.exit_code == 1, answer.output
    assert re.search(REFUSED, answer.stdout)
    assert contents(place) == before


def test_a_page_is_written_over_itself_until_somebody_edits_it(place):
    words = ("search", "report", "s.sqlite", "-o")
    assert fagen(*words, "page.html").exit_code == 0
    written = Path("page.html").read_bytes()
    assert outputs.is_stamped(written)
    assert fagen(*words, "page.html").exit_code == 0
    Path("page.html").write_bytes(written.replace(b"fagen search", b"my search"))
    assert fagen(*words, "page.html").exit_code == 1
    Path("page.html").write_bytes(b"")  # nothing is lost
    assert fagen(*words, "page.html").exit_code == 0
    assert Path("page.html").read_bytes() == written
    with pytest.raises(FagenError, match="is not a page about a search as fagen wrote it"):
        search.write_report(Path("s.sqlite"), Path("mine.html"))


# ---- kernels and their evidence -----------------------------------------------------------------

NAMES = (f"{SLUG}.cu", f"{SLUG}_torch.cpp")


def test_a_kernel_is_written_over_itself_and_over_nothing_else(tmp_path):
    words = ("generate", SLUG, "--binding", "-o", tmp_path)
    for _ in range(2):
        assert fagen(*words).exit_code == 0
    written = contents(tmp_path)
    for name in NAMES:
        path = tmp_path / name
        for text in (MINE, f"{written[name].decode()}// mine\n"):
            path.write_text(text)
            answer = fagen(*words)
            assert answer.exit_code == 1 and "as fagen wrote it" in answer.stderr
            assert path.read_text() == text
        path.write_bytes(written[name])


@pytest.mark.parametrize("to", ["theirs", "nowhere"])
def test_no_kernel_follows_a_link_out_of_its_folder(to, tmp_path):
    (tmp_path / "theirs").write_text("")
    (tmp_path / "in").mkdir()
    for name in NAMES:
        (tmp_path / "in" / name).symlink_to(tmp_path / to)
        answer = fagen("generate", SLUG, "--binding", "-o", tmp_path / "in")
        assert answer.exit_code == 1 and "is a symbolic link" in answer.stderr
        assert [path.name for path in (tmp_path / "in").iterdir()] == [name]
        assert (tmp_path / "theirs").read_text() == "" and not (tmp_path / "nowhere").exists()
        (tmp_path / "in" / name).unlink()


def test_evidence_is_written_over_itself_and_over_nothing_else(tmp_path):
    recorded = evidence.read(SLUG)
    assert recorded
    path = evidence.write(recorded, tmp_path)
    written = path.read_text()
    path.write_text(written.replace('"date"', '"dato"'))  # of another fagen, say
    assert evidence.write(recorded, tmp_path).read_text() == written
    for text in (MINE, '{"slug": "another"}', "{"):
        path.write_text(text)
        for refused in (
            lambda: evidence.write(recorded, tmp_path),
            lambda: evidence.need_room(SLUG, tmp_path),
        ):
            with pytest.raises(FagenError, match="is not the evidence of"):
                refused()
        assert path.read_text() == text
    path.unlink()
    path.symlink_to(tmp_path / "theirs")
    with pytest.raises(FagenError, match="is a symbolic link"):
        evidence.write(recorded, tmp_path)
    assert not (tmp_path / "theirs").exists()


# ---- tables and recordings ----------------------------------------------------------------------


def test_a_table_keeps_the_rows_that_are_there_and_loses_no_comment(place):
    results = search.found(Path("s.sqlite"))
    search.write(results, Path("out"))
    table = Path("out/dispatch.toml")
    written = table.read_text()
    table.write_text(f"{written}\n# tried on a Tuesday\n")
    before = contents(place)
    with pytest.raises(FagenError, match='its comments would be lost, such as "# tried on'):
        search.write(results, Path("out"))
    assert contents(place) == before
    table.write_text(written)
    search.write(results, Path("out"))
    assert table.read_text() == written


@pytest.mark.parametrize("link", ["dispatch.toml", "forward"])
def test_no_table_and_no_schedule_follows_a_link_out_of_its_folder(link, place):
    results = search.found(Path("s.sqlite"))
    Path("out").mkdir()
    Path("theirs").mkdir()
    Path("out", link).symlink_to(place / "theirs" / "x" if "." in link else place / "theirs")
    before = contents(place)
    with pytest.raises(FagenError, match="is a symbolic link"):
        search.write(results, Path("out"))
    assert contents(place) == before


def test_a_recording_follows_no_link_and_loses_no_comment(tmp_path):
    link, path = tmp_path / "link.toml", tmp_path / "calls.toml"
    link.symlink_to(path)
    path.write_text(f"# of last week\n{SPACE}heads = 1\nbatch = 1\n")
    for where, why in ((link, "symbolic link"), (path, "its comments would be lost")):
        before = contents(tmp_path)
        with pytest.raises(FagenError, match=why), package.recording(where):
            raise AssertionError("the run has begun")
        assert contents(tmp_path) == before
    with pytest.raises(FagenError, match="no file is called so"), package.recording("a\0"):
        raise AssertionError("the run has begun")


# ---- what all go by -----------------------------------------------------------------------------


def test_two_files_are_one_by_any_name(tmp_path):
    path = tmp_path / "one"
    path.write_text("")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.link(path, tmp_path / "hard")
    for name in ("one", "ONE", "./one", "folder/one", "link", "hard"):
        with pytest.raises(FagenError, match="as the first and as the second"):
            outputs.refuse_alike({"the first": path, "the second": tmp_path / name})
    for new in ("folder/new", "NEW", "Ne\N{LATIN SMALL LETTER W}"):
        with pytest.raises(FagenError, match="named twice"):
            outputs.refuse_alike({"a": tmp_path / "new", "b": tmp_path / new})
    outputs.refuse_alike({"a": path, "b": tmp_path / "two", "c": tmp_path / "loop"})


def test_a_terminal_a_pipe_and_an_empty_file_lose_nothing(tmp_path):
    outputs.write(Path("/dev/null"), "text", outputs.nothing, "a text")
    (tmp_path / "empty").write_text("")
    outputs.write(tmp_path / "empty", "text", outputs.nothing, "a text")
    assert (tmp_path / "empty").read_text() == "text"
    with pytest.raises(FagenError, match="is a folder"):
        outputs.write(tmp_path, "text", outputs.anything, "a text")
    assert json.loads(fagen("generate", SLUG, "--json").stdout)[0]["hash"]


def test_a_bound_of_what_is_looked_at_is_kept(tmp_path, monkeypatch):
    """A file of many gigabytes is none of fagen's, and is not read."""
    path = tmp_path / "large"
    path.write_bytes(b"")
    os.truncate(path, outputs.MAX_BYTES + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("it was read"))
    with pytest.raises(FagenError, match="is not a text"):
        outputs.refuse_loss(path, outputs.anything, "a text")


def test_what_is_rendered_is_known_again():
    source = flow.rendered(from_slug(SLUG))
    for text in (source.kernel, source.binding, outputs.stamped("text\n", "# {}")):
        assert outputs.is_stamped(text.encode())
        assert outputs.is_stamped(text.replace("\n", "\r\n").encode())
        for edited in (f" {text}", f"{text}x", text[:-9], text.replace("sha256", "SHA256")):
            assert not outputs.is_stamped(edited.encode())
    assert not outputs.is_stamped(b"") and not outputs.is_stamped(b"\xff" * 99)
