"""Compare evidence with renderings, and generated/ with what schedules want of it.

What runs on the device is compared by hash, and by its machine code where the text is another; a
launcher by its hash with those that ran, whatever kernel they launched.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from fagen import toolchain
from fagen.errors import FagenError, VerificationError
from fagen.evidence.record import Evidence, encoded, laid_out
from fagen.evidence.store import (
    LEDGER,
    LOCK,
    UNVERIFIED,
    Excuse,
    Line,
    Rendering,
    beside,
    forms,
    header_of,
    kinds_of_forms,
    read,
    read_excuses,
    read_line,
    slugs_in_ledgers,
)
from fagen.evidence.store import launchers as launchers_of
from fagen.paths import locate
from fagen.registry import ENTRIES
from fagen.render import HEADER, Hashes, header_file
from fagen.toml_lines import printable

FLAGS = " ".join(toolchain.FLAGS)
_TAKEN_OVER = ", or give its kernel's new name to `fagen verify --same-code`, which takes it over"
_RENDER = "run `fagen generate --all`"


@dataclass(frozen=True)
class Fault:
    """One thing wrong in generated/: whose, of which kind, and in words with the way out."""

    slug: str
    kind: str  # missing | drift | stale | failed | unreadable | orphan | unneeded
    message: str

    def __str__(self) -> str:
        return f"{self.slug}: {self.message}"


def renew(
    old: Evidence,
    *,
    slug: str,
    hashes: Hashes,
    cutlass: str,
    machine_code: str,
    compiler: str,
    launchers: Collection[str] = (),
) -> Evidence:
    """The same evidence for a source whose rebuild gave the same machine code: no GPU needed.

    `slug` may be another than that of `old`, whose kernel was then renamed. Its launcher, which is
    not in the machine code, is that of `old` or one of `launchers`, which ran with other kernels;
    the numbers that it reads are those of `old`. Raises VerificationError where that is not so.
    """
    ran = f"ran on {old.date}" + (f" as {old.slug}" if slug != old.slug else "")
    faults = []
    if hashes.launcher not in {old.launcher, *launchers}:
        faults.append(
            f"the launcher is not one that ran with any kernel of its kind, nor the one that {ran}"
        )
    if hashes.constants != old.constants:
        faults.append(f"the launcher reads other numbers than those with which it {ran}")
    if machine_code != old.machine_code:
        faults.append(
            f"the rebuild gave other machine code ({machine_code[:12]}, compiler {compiler}) than "
            f"{ran} ({old.machine_code[:12]}, compiler {old.compiler})"
        )
    if faults:
        raise VerificationError(
            f"{slug}: {'; '.join(faults)}: run `fagen verify {slug}` on a Hopper GPU"
        )
    return dataclasses.replace(
        old,
        slug=slug,
        **vars(hashes),
        flags=FLAGS,
        cutlass=cutlass,
        compiler=compiler,
    )


def of_source(slug: str, hashes: Callable[[], Hashes]) -> Evidence | None:
    """What was measured of exactly this source; None where nothing was, or it cannot be read.

    `hashes` is asked only where there is evidence, since for most it takes a rendering.
    """
    with suppress(FagenError):  # no ledger
        evidence = read(slug)
        if evidence and not staleness(evidence, hashes(), launchers=launchers_of(slug)):
            return evidence
    return None


def is_current(line: Line, hashes: Hashes | None = None) -> bool:
    """Whether what a ledger has of a schedule is of a source of these hashes.

    Without them: of what the schedule renders to by the ledger's own word.
    """
    evidence = line.evidence
    return evidence is not None and not staleness(
        evidence, hashes or line.rendered, launchers=launchers_of(line.slug)
    )


def staleness(
    evidence: Evidence,
    hashes: Hashes,
    *,
    launchers: Collection[str] = (),
    cutlass: str | None = None,
    machine_code: str | None = None,
    compiler: str | None = None,
) -> list[str]:
    """Why `evidence` is not of the source of these hashes, built today, in words; empty if it is.

    The launcher is that of `evidence` or one of `launchers`, which ran with others of its kind. The
    CUTLASS version and the machine code are compared where given; the machine code only if
    `compiler` is the one that the evidence names, since another may rightly choose otherwise.
    """
    reasons = []
    if hashes.device != evidence.device:
        reasons.append(
            f"the device code's tokens hash to {hashes.device[:12]}, those that ran to "
            f"{evidence.device[:12]}"
        )
    if hashes.launcher not in {evidence.launcher, *launchers}:
        reasons.append(f"the launcher, {hashes.launcher[:12]}, ran with no kernel of this kind")
    if hashes.constants != evidence.constants:
        reasons.append("the launcher reads other numbers than those with which it ran")
    if evidence.flags != FLAGS:
        odd = sorted({*evidence.flags.split()} ^ {*FLAGS.split()})
        words = textwrap.shorten(" ".join(odd), 300, placeholder=" …")
        reasons.append(f"compiler flags differ: {words or 'their order'}")
    if cutlass is not None and evidence.cutlass != cutlass:
        reasons.append(f"CUTLASS is {cutlass}, it ran with {evidence.cutlass}")
    same_compiler = compiler is None or compiler == evidence.compiler
    if machine_code is not None and same_compiler and machine_code != evidence.machine_code:
        reasons.append(
            f"the machine code is {machine_code[:12]}, that which ran {evidence.machine_code[:12]}"
        )
    return reasons


def faults(renderings: Iterable[Rendering], *, cutlass: str | None = None) -> tuple[Fault, ...]:
    """Everything in generated/ that is not as fresh renderings of every committed schedule want it.

    A kernel named in unverified.toml may lack evidence or have stale one.
    """
    in_generated: list[Fault] = []
    excuses: dict[str, Excuse] = {}
    try:
        excuses = read_excuses()
    except VerificationError as error:
        in_generated.append(Fault(UNVERIFIED, "unreadable", str(error)))
    by_slug = {rendering.slug: rendering for rendering in renderings}
    for slug, rendering in by_slug.items():
        unproven = list(_unproven(rendering, cutlass))
        in_generated += _drift(rendering)
        if slug not in excuses:
            in_generated += unproven
        elif not unproven:
            message = f"has good evidence: take it out of {UNVERIFIED}"
            in_generated.append(Fault(slug, "unneeded", message))
    return (*in_generated, *_headers(by_slug), *_orphans(by_slug, excuses))


def _drift(rendering: Rendering) -> Iterator[Fault]:
    """Compare the ledger with a rendering, and what is committed of it as text."""
    slug, hashes = rendering.slug, rendering.hashes
    with suppress(VerificationError):  # of which _unproven tells
        line = read_line(slug)
        if line is None:
            yield Fault(slug, "missing", f"the ledger has no line of it: {_RENDER}")
        elif hashes != line.rendered and not is_current(line, hashes):
            message = f"it renders to other code than its line in the ledger says: {_RENDER}"
            yield Fault(slug, "drift", message)
        if slug in forms():
            texts = {".cu": (rendering.kernel, "its schedule renders to")}
            if line and line.evidence:
                texts[".json"] = (laid_out(encoded(line.evidence)), "the ledger has of it")
            for end, (text, what) in texts.items():
                path = beside(slug, end)
                if not path.exists():
                    yield Fault(slug, "missing", f"{path.name} is not in generated/: {_RENDER}")
                elif path.read_bytes() != text.encode():
                    yield Fault(slug, "drift", f"{path.name} is not what {what} today: {_RENDER}")


def _headers(by_slug: Collection[str]) -> Iterator[Fault]:
    """Compare what lies beside kernels that are committed as text with what they include."""
    for kind in kinds_of_forms(by_slug):
        path = header_of(kind)
        if not path.exists():
            yield Fault(f"{kind}/{HEADER}", "missing", f"it is not in generated/: {_RENDER}")
        elif path.read_bytes() != header_file().encode():
            yield Fault(f"{kind}/{HEADER}", "drift", f"it is another today: {_RENDER}")


def _unproven(rendering: Rendering, cutlass: str | None) -> Iterator[Fault]:
    """Say why a kernel has no good evidence; of one that has, nothing."""
    slug = rendering.slug
    remedy = f"run `fagen verify {slug}` on a Hopper GPU"
    try:
        evidence = read(slug)
    except VerificationError as error:
        yield Fault(slug, "unreadable", str(error))
        return
    if evidence is None:
        yield Fault(slug, "missing", f"no evidence that it ever ran: {remedy}")
        return
    ran = launchers_of(slug)
    reasons = staleness(evidence, rendering.hashes, launchers=ran, cutlass=cutlass)
    if reasons:
        yield Fault(
            slug,
            "stale",
            f"evidence of {evidence.date} is stale: {'; '.join(reasons)}: {remedy}, "
            "or with --same-code if the machine code did not change",
        )
    bad = [error for error in evidence.errors if not error.ok]
    if bad or not evidence.errors:
        message = f"{len(bad)} of the {len(evidence.errors)} shapes in its evidence are wrong"
        yield Fault(slug, "failed", f"{message}: {remedy}")


def _orphans(by_slug: Mapping[str, Rendering], excuses: Mapping[str, Excuse]) -> Iterator[Fault]:
    top = locate("generated")
    belongs = {beside(slug, end) for slug in by_slug if slug in forms() for end in (".cu", ".json")}
    belongs |= {header_of(kind) for kind in kinds_of_forms(by_slug)}
    belongs |= {top / LEDGER / f"{kind}.jsonl" for kind in ENTRIES}
    belongs |= {top / UNVERIFIED, top / "README.md", top / LOCK}
    for path in sorted(top.rglob("*")):
        if path.is_file() and path not in belongs:
            name = printable(path.relative_to(top).as_posix())
            yield Fault(name, "orphan", "no schedule makes this file: delete it")
    with suppress(VerificationError):  # of which each kernel tells
        for slug, kind in slugs_in_ledgers().items():
            if slug not in by_slug:
                message = f"no schedule makes it: delete its line in {LEDGER}/{kind}.jsonl"
                yield Fault(slug, "orphan", message + _TAKEN_OVER)
    for slug in excuses:
        if slug not in by_slug:
            yield Fault(slug, "orphan", f"no schedule makes it: delete its entry in {UNVERIFIED}")
