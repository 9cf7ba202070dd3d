"""Check generated/ against fresh renderings: every kernel is as rendered today, with evidence."""

import dataclasses
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fagen import toolchain
from fagen.errors import FagenError, VerificationError
from fagen.evidence.store import UNVERIFIED, Evidence, Excuse, home, read, read_excuses
from fagen.paths import locate
from fagen.toml_lines import printable

if TYPE_CHECKING:  # templates take a moment
    from fagen.render import Source

_TAKEN_OVER = ", or give its kernel's new name to `fagen verify --same-code`, which takes it over"


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
    source_hash: str,
    host_hash: str,
    cutlass: str,
    machine_code: str,
    compiler: str,
    launchers: Collection[str] = (),
) -> Evidence:
    """The same evidence for a source whose rebuild gave the same machine code: no GPU needed.

    `slug` may be another than that of `old`, whose kernel was then renamed. The launcher, which is
    not in the machine code, is that of `old` or one of `launchers`, which ran with other kernels:
    its text is proved once, whatever kernel it launches.
    Raises VerificationError where the machine code is another, or the launcher never ran.
    """
    ran = f"ran on {old.date}" + (f" as {old.slug}" if slug != old.slug else "")
    if host_hash != old.host_hash and host_hash not in launchers:
        raise VerificationError(
            f"{slug}: the launcher is not one that ran with any kernel, nor the one that {ran}: "
            f"run `fagen verify {slug}` on a Hopper GPU"
        )
    if machine_code != old.machine_code:
        raise VerificationError(
            f"{slug}: the rebuild gave other machine code ({machine_code[:12]}, compiler "
            f"{compiler}) than {ran} ({old.machine_code[:12]}, compiler {old.compiler}): run "
            f"`fagen verify {slug}` on a Hopper GPU"
        )
    return dataclasses.replace(
        old,
        slug=slug,
        source_hash=source_hash,
        host_hash=host_hash,
        flags=tuple(toolchain.FLAGS),
        cutlass=cutlass,
        compiler=compiler,
    )


def of_source(slug: str, source_hash: Callable[[], str]) -> Evidence | None:
    """What was measured of exactly this source; None where nothing was, or it cannot be read.

    `source_hash` is asked only where there is evidence, since for most it takes a rendering.
    """
    with suppress(FagenError):  # no generated/, as in a wheel
        found = read(slug)
        if found and not staleness(found, source_hash()):
            return found
    return None


def staleness(
    evidence: Evidence,
    source_hash: str,
    *,
    cutlass: str | None = None,
    machine_code: str | None = None,
    compiler: str | None = None,
) -> list[str]:
    """Why `evidence` is not of the source of this hash, built today, in words; empty if it is.

    The CUTLASS version and the machine code are compared where given; the machine code only if
    `compiler` is the one that the evidence names, since another may rightly choose otherwise.
    """
    reasons = []
    if evidence.source_hash != source_hash:
        reasons.append(
            f"the source's tokens hash to {source_hash[:12]}, those that ran to "
            f"{evidence.source_hash[:12]}"
        )
    if evidence.flags != tuple(toolchain.FLAGS):
        odd = sorted(set(evidence.flags) ^ set(toolchain.FLAGS))
        said = textwrap.shorten(" ".join(odd), 300, placeholder=" …")
        reasons.append(f"compiler flags differ: {said or 'their order'}")
    if cutlass is not None and evidence.cutlass != cutlass:
        reasons.append(f"CUTLASS is {cutlass}, it ran with {evidence.cutlass}")
    same_compiler = compiler is None or compiler == evidence.compiler
    if machine_code is not None and same_compiler and machine_code != evidence.machine_code:
        reasons.append(
            f"the machine code is {machine_code[:12]}, that which ran {evidence.machine_code[:12]}"
        )
    return reasons


def faults(
    sources: "Iterable[Source]",
    folder: Path | None = None,
    *,
    cutlass: str | None = None,
    machine_codes: Mapping[str, str] | None = None,
    compiler: str | None = None,
) -> tuple[Fault, ...]:
    """Everything in generated/ that is not as a fresh rendering of `sources` wants it.

    `sources` is every committed schedule rendered; `machine_codes`, by slug, are hashes of
    rebuilds by `compiler`. A kernel named in unverified.toml may lack evidence or have stale one.
    """
    found: list[Fault] = []
    excuses: dict[str, Excuse] = {}
    try:
        excuses = read_excuses(folder)
    except VerificationError as error:
        found.append(Fault(UNVERIFIED, "unreadable", str(error)))
    known = {source.slug: source for source in sources}
    for slug, source in known.items():
        found += _drift(source, folder)
        wrong = _unproven(
            source,
            folder,
            cutlass=cutlass,
            machine_code=(machine_codes or {}).get(slug),
            compiler=compiler,
        )
        if slug not in excuses:
            found += wrong
        elif not wrong:
            told = f"has good evidence: take it out of {UNVERIFIED}"
            found.append(Fault(slug, "unneeded", told))
    return (*found, *_orphans(folder, known, excuses))


def _drift(source: "Source", folder: Path | None) -> list[Fault]:
    path = home(source.slug, folder) / f"{source.slug}.cu"
    remedy = "run `fagen generate --all`"
    if not path.exists():
        return [
            Fault(source.slug, "missing", f"{path.name} is not in {path.parent.name}/: {remedy}")
        ]
    if path.read_text(encoding="utf-8", errors="replace") != source.kernel:
        told = f"{path.name} is not what its schedule renders to today: {remedy}"
        return [Fault(source.slug, "drift", told)]
    return []


def _unproven(
    source: "Source",
    folder: Path | None,
    *,
    cutlass: str | None,
    machine_code: str | None,
    compiler: str | None,
) -> list[Fault]:
    slug = source.slug
    remedy = f"run `fagen verify {slug}` on a Hopper GPU"
    try:
        evidence = read(slug, folder)
    except VerificationError as error:
        return [Fault(slug, "unreadable", str(error))]
    if evidence is None:
        return [Fault(slug, "missing", f"no evidence that it ever ran: {remedy}")]
    found = []
    stale = staleness(
        evidence, source.hash, cutlass=cutlass, machine_code=machine_code, compiler=compiler
    )
    if stale:
        told = (
            f"evidence of {evidence.date} is stale: {'; '.join(stale)}: {remedy}, "
            "or with --same-code if the machine code did not change"
        )
        found.append(Fault(slug, "stale", told))
    bad = [error for error in evidence.errors if not error.ok]
    if bad or not evidence.errors:
        told = (
            f"{len(bad)} of the {len(evidence.errors)} shapes in its evidence are wrong: {remedy}"
        )
        found.append(Fault(slug, "failed", told))
    return found


def _orphans(
    folder: Path | None, known: "Mapping[str, Source]", excuses: Mapping[str, Excuse]
) -> Sequence[Fault]:
    root = folder or locate("generated")
    belongs = {home(slug, folder) / f"{slug}{end}" for slug in known for end in (".cu", ".json")}
    belongs.add(root / UNVERIFIED)
    found = [
        Fault(
            printable(path.relative_to(root).as_posix()),
            "orphan",
            "no schedule makes this file: delete it"
            + (_TAKEN_OVER if path.suffix == ".json" else ""),
        )
        for path in sorted(root.rglob("*"))
        if path.is_file() and path not in belongs
    ]
    found += [
        Fault(slug, "orphan", f"no schedule makes it: delete its entry in {UNVERIFIED}")
        for slug in excuses
        if slug not in known
    ]
    return found
