"""Where evidence lies: lines of schedules in generated/ledger/, files in a user's own folder.

A wheel has the same ledgers in shipped/, in the place of generated/.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fagen import decoding, outputs
from fagen.build.locks import locked
from fagen.errors import FagenError, ScheduleError, VerificationError
from fagen.evidence.record import (
    MOST_BYTES,
    Evidence,
    decoded,
    encoded,
    in_columns,
    in_rows,
    laid_out,
    unreadable,
)
from fagen.paths import locate, make_folder, write_whole
from fagen.registry import ENTRIES, committed_file, from_slug, kind_of_slug
from fagen.render import HEADER, Hashes, header_file
from fagen.toml_lines import dotted, read_text, read_toml

UNVERIFIED = "unverified.toml"
LEDGER = "ledger"  # the folder
LOCK = ".lock"  # held while a ledger is read and written
FORMS = "forms.toml"  # of schedules/
_LEDGER_BYTES = 16 << 20  # of one ledger, at most
_LINE = re.compile(r'\{"slug": "([a-z0-9_]+)"[,}]')


@dataclass(frozen=True)
class Line:
    """What a ledger says of a schedule: what ran, and what the schedule renders to by now."""

    slug: str
    rendered: Hashes
    evidence: Evidence | None = None

    def __str__(self) -> str:
        ran = self.evidence and self.evidence.hashes
        fields: dict[str, Any] = {"slug": self.slug}
        if self.rendered != ran:
            fields["rendered"] = vars(self.rendered)
        if self.evidence:
            fields |= in_columns(encoded(self.evidence))
        return json.dumps(fields, allow_nan=False)


@dataclass(frozen=True)
class Rendering:
    """What is committed of what a schedule renders to: hashes, and of some kernels their text."""

    slug: str
    hashes: Hashes
    kernel: str = ""


@dataclass(frozen=True)
class Excuse:
    """Why a committed kernel's evidence could not be renewed at once, and since when."""

    date: str
    reason: str


@cache
def forms() -> Mapping[str, str]:
    """The schedules whose kernels are committed as text, one of each form, and what each shows."""
    path = locate("schedules") / FORMS
    words, _ = read_toml(read_text(path, "list of forms"), path.name)
    return words


# ---- ledgers -------------------------------------------------------------------------------------


def root() -> Path:
    """Where ledgers lie: generated/, or what a wheel has in its place."""
    with suppress(FagenError):
        return locate("generated")
    return locate("shipped")


def beside(slug: str, end: str) -> Path:
    """Where in generated/ a kernel lies that is committed as text, or its evidence."""
    return locate("generated") / kind_of_slug(slug).name / f"{slug}{end}"


def kinds_of_forms(slugs: Iterable[str]) -> tuple[str, ...]:
    """The kinds of those of these kernels that are committed as text."""
    return tuple(dict.fromkeys(kind_of_slug(slug).name for slug in slugs if slug in forms()))


def header_of(kind: str) -> Path:
    """Where in generated/ the header lies that these kernels include."""
    return locate("generated") / kind / HEADER


def read_line(slug: str) -> Line | None:
    """What the ledger says of a schedule; None where it has no line of it.

    Raises VerificationError where it cannot be read.
    """
    path = _ledger(kind_of_slug(slug).name)
    text = _texts(path).get(slug)
    return None if text is None else _line(slug, text, f"{path.name}: {slug}")


def slugs_in_ledgers() -> dict[str, str]:
    """Each slug that has a line, and the kind of kernels whose ledger that is."""
    return {slug: kind for kind in ENTRIES for slug in _texts(_ledger(kind))}


@contextmanager
def editing(kind: str) -> Iterator[dict[str, str]]:
    """Give the lines of a ledger by slug, to be changed; then write them in one step.

    Several processes may do so at once: each waits for the others, and reads what they wrote.
    Raises VerificationError where what is there cannot be read, FagenError where a link leads
    elsewhere, OSError where it cannot be written.
    """
    path = locate("generated") / LEDGER / f"{kind}.jsonl"
    outputs.refuse_way(locate("generated"), f"{LEDGER}/{path.name}")
    make_folder(path.parent)
    with locked(locate("generated") / LOCK, waiting=lambda: None):
        before = _texts_now(path)
        texts = dict(before)
        yield texts
        if texts != before:
            write_whole(path, "".join(f"{texts[slug]}\n" for slug in sorted(texts)))


def _ledger(kind: str) -> Path:
    return root() / LEDGER / f"{kind}.jsonl"


def _texts(path: Path) -> Mapping[str, str]:
    """Each line of a ledger by its slug; empty where there is no such ledger yet."""
    return _texts_once(path, _version(path))


@lru_cache(maxsize=16)
def _texts_once(path: Path, version: object) -> Mapping[str, str]:
    return _texts_now(path)


def _version(path: Path) -> object:
    """What changes when a file is written."""
    with suppress(FileNotFoundError):
        now = path.stat()
        return now.st_ino, now.st_size, now.st_mtime_ns
    return None


def _texts_now(path: Path) -> Mapping[str, str]:
    if not path.exists():
        return {}
    texts: dict[str, str] = {}
    for number, text in enumerate(_text_of(path, "ledger", _LEDGER_BYTES).split("\n"), 1):
        slug = _LINE.match(text)
        if slug and slug[1] not in texts:
            texts[slug[1]] = text
        elif text:
            raise VerificationError(
                f"{path.name}:{number}: is no line of a ledger as fagen writes it, or the second "
                "of its slug: take it out, or the file from another checkout or wheel"
            )
    return texts


def _line(slug: str, text: str, where: str) -> Line:
    try:
        fields = json.loads(text)
        rendered = fields.pop("rendered", None)
        if rendered is not None:
            rendered = decoding.decoded(Hashes, rendered)
        if rendered and fields.keys() == {"slug"}:
            return Line(slug, rendered)
        for part in {"errors", "speeds"} & fields.keys():
            fields[part] = in_rows(fields[part])
    except (ValueError, RecursionError) as error:
        raise unreadable(where, error) from error
    evidence = decoded(slug, fields, where)
    return Line(slug, rendered or evidence.hashes, evidence)


# ---- evidence of one kernel ----------------------------------------------------------------------


def read(slug: str, folder: Path | None = None) -> Evidence | None:
    """The evidence of `slug` in the ledger, or in a user's folder; None if there is none.

    Raises VerificationError if it cannot be read.
    """
    if folder is None:
        line = read_line(slug)
        return line.evidence if line else None
    path = folder / f"{slug}.json"
    return _read_file(path) if path.exists() else None


def write(evidence: Evidence, folder: Path | None = None) -> Path:
    """Write evidence in one step, so that no reader ever sees half of it; return the path.

    Into the ledger, and beside the kernel where it is committed as text; or to <slug>.json in a
    user's folder. Raises FagenError where something is there that is no evidence of this kernel.
    """
    slug = evidence.slug
    if folder is None:
        kind = kind_of_slug(slug).name
        with editing(kind) as texts:
            texts[slug] = str(Line(slug, evidence.hashes, evidence))
        lay_out(slug)
        return _ledger(kind)
    make_folder(folder)
    path = folder / f"{slug}.json"
    outputs.write(path, laid_out(encoded(evidence)), _own(slug), f"the evidence of {slug}")
    return path


def lay_out(slug: str) -> Path | None:
    """Write what the ledger has of a kernel that is committed as text beside it, for people.

    Return the path, None where there is nothing to write.
    """
    evidence = read(slug) if slug in forms() else None
    return _put(beside(slug, ".json"), laid_out(encoded(evidence))) if evidence else None


def _put(path: Path, text: str) -> Path | None:
    """Write a file of generated/; return its path if that changed it."""
    _refuse_way(path)
    if path.exists() and path.read_bytes() == text.encode():
        return None
    make_folder(path.parent)
    outputs.write(path, text, outputs.anything, path.name)
    return path


def _refuse_way(path: Path) -> None:
    """Refuse a path in generated/ on which something leads elsewhere; see outputs.refuse_way."""
    top = locate("generated")
    outputs.refuse_way(top, path.relative_to(top).as_posix())


def drop(slug: str, folder: Path | None = None) -> None:
    """Remove the evidence of a kernel, which is another's by now."""
    if folder is None:
        with editing(kind_of_slug(slug).name) as texts:
            texts.pop(slug, None)
        beside(slug, ".json").unlink(missing_ok=True)
    else:
        (folder / f"{slug}.json").unlink()


def need_room(slug: str, folder: Path | None = None) -> None:
    """Raise FagenError where evidence could not be written: something else is in its place."""
    if folder is None:
        with editing(kind_of_slug(slug).name):  # nothing is changed
            pass
        _refuse_way(beside(slug, ".json"))
        return
    make_folder(folder)
    outputs.refuse_loss(folder / f"{slug}.json", _own(slug), f"the evidence of {slug}")


def _own(slug: str) -> outputs.Own:
    """How evidence of `slug` in a user's folder is known: by its name there."""

    def own(content: bytes) -> bool:
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            return bool(json.loads(content.decode("utf-8-sig"))["slug"] == slug)
        return content.startswith(laid_out({"slug": slug}).rstrip("}\n").encode())

    return own


def _read_file(path: Path) -> Evidence:
    return decoded(path.stem, _text_of(path, "evidence", MOST_BYTES), path.name)


# ---- of several kernels --------------------------------------------------------------------------


def outlived(folder: Path | None, like: str) -> Iterator[Evidence]:
    """Yield the evidence that lies where that of the slug `like` would and has lost its schedule.

    In a ledger such a slug is no committed schedule's; in a user's folder it is no schedule's at
    all, as after a change of defaults. What cannot be read is left out.
    """
    kind = kind_of_slug(like).name
    slugs = _texts(_ledger(kind)) if folder is None else [p.stem for p in folder.glob("*.json")]
    for slug in sorted(slugs):
        with suppress(FagenError):
            if not _is_of_a_schedule(slug, committed=folder is None):
                evidence = read(slug, folder)
                if evidence:
                    yield evidence


def launchers(slug: str, folder: Path | None = None) -> frozenset[str]:
    """The launchers that ran on a GPU with kernels of the kind of `slug`, as hashes.

    By the ledger, and by what lies in a user's folder. What cannot be read is left out.
    """
    ran = set()
    for other in [path.stem for path in folder.glob("*.json")] if folder else []:
        with suppress(FagenError):
            evidence = read(other, folder)
            if evidence and kind_of_slug(other) == kind_of_slug(slug):
                ran.add(evidence.launcher)
    with suppress(FagenError):  # no ledger
        path = _ledger(kind_of_slug(slug).name)
        ran |= _launchers_once(path, _version(path))
    return frozenset(ran)


@lru_cache(maxsize=16)
def _launchers_once(path: Path, version: object) -> frozenset[str]:
    ran = set()
    for slug, text in _texts(path).items():
        with suppress(FagenError):
            evidence = _line(slug, text, path.name).evidence
            if evidence:
                ran.add(evidence.launcher)
    return frozenset(ran)


def note(renderings: Iterable[Rendering]) -> list[Path]:
    """Bring generated/ up to date; return the files that were written.

    Kernels that are committed as text are written, and the ledgers say what all render to. A
    launcher that ran with another kernel of the kind by now is entered as this one's, where nothing
    else differs; so is all evidence of a slug that has no schedule any more: only the name is
    another. Else what ran stays as it is, and beside it what is rendered.
    """
    of_kinds: dict[str, list[Rendering]] = {}
    for rendering in renderings:
        of_kinds.setdefault(kind_of_slug(rendering.slug).name, []).append(rendering)
    written: list[Path | None] = []
    for kind, of_kind in of_kinds.items():
        ran = launchers(of_kind[0].slug)
        with editing(kind) as texts:
            before = dict(texts)
            lost = {evidence.device: evidence for evidence in outlived(None, of_kind[0].slug)}
            for entry in of_kind:
                old = read(entry.slug) or lost.get(entry.hashes.device)
                new = _renamed(old, entry, ran) if old else None
                if old and new and old.slug != entry.slug:
                    del texts[old.slug]
                kept = old if old and old.slug == entry.slug else None
                texts[entry.slug] = str(Line(entry.slug, entry.hashes, new or kept))
        written.append(_ledger(kind) if texts != before else None)
        for entry in of_kind:
            written.append(_put(beside(entry.slug, ".cu"), entry.kernel) if entry.kernel else None)
            written.append(lay_out(entry.slug))
        if kinds_of_forms(entry.slug for entry in of_kind):
            written.append(_put(header_of(kind), header_file()))
    return [path for path in written if path]


def _renamed(old: Evidence, rendering: Rendering, ran: Collection[str]) -> Evidence | None:
    """Evidence as that of a rendering from which it differs by name, or launcher; else None."""
    hashes = rendering.hashes
    new = dataclasses.replace(old, slug=rendering.slug, launcher=hashes.launcher)
    return new if new.hashes == hashes and hashes.launcher in {old.launcher, *ran} else None


def _is_of_a_schedule(slug: str, *, committed: bool) -> bool:
    """Whether there is a schedule with this slug: a committed one, or any."""
    if committed:
        return committed_file(slug).exists()
    try:
        return bool(from_slug(slug))
    except ScheduleError:
        return False


# ---- excuses -------------------------------------------------------------------------------------


def read_excuses() -> dict[str, Excuse]:
    """What generated/unverified.toml says, by slug; empty where there is no such file.

    The file holds a table per kernel: `[slug]`, `date = "2026-01-31"`, `reason = "..."`. Raises
    VerificationError where an entry lacks either, or where one is no line of text.
    """
    path = root() / UNVERIFIED
    if not path.exists():
        return {}
    return dict(_excuses(_text_of(path, "list of excuses", MOST_BYTES), path.name))


@lru_cache(maxsize=1)  # a list of all kernels asks for each of them
def _excuses(text: str, name: str) -> Mapping[str, Excuse]:
    try:
        tables, origin = read_toml(text, name)
    except ScheduleError as error:
        raise VerificationError(str(error)) from error
    excuses = {}
    for slug, entry in tables.items():
        where = f"{origin.at(slug)}: [{dotted((slug,))}]"
        if not isinstance(entry, dict) or set(entry) != {"date", "reason"}:
            raise VerificationError(f"{where} needs a date and a reason alone")
        date = entry["date"]
        excuse = Excuse(str(date) if isinstance(date, datetime.date) else date, entry["reason"])
        if not all(map(decoding.is_line, (slug, excuse.date, excuse.reason))):
            raise VerificationError(
                f"{where} needs a line of text each as its name, date and reason, of at most 500 "
                "characters"
            )
        excuses[slug] = excuse
    return excuses


def _text_of(path: Path, what: str, most: int) -> str:
    """The text of a file here.  Raises VerificationError where it can be none of `what`."""
    try:
        return read_text(path, what, most)
    except ScheduleError as error:
        raise VerificationError(str(error)) from None
