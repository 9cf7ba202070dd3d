"""Hold each committed kernel against its evidence: that this very source ran, right and how fast.

`generated/<slug>.json` goes in and out; `faults` holds the folder against a fresh rendering.
Needs neither torch nor a GPU.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen import toolchain
from fagen.errors import ScheduleError, VerificationError
from fagen.paths import locate, write_whole
from fagen.quantizer.schedule import SLUG_START
from fagen.render import Source
from fagen.toml_lines import read_toml

UNVERIFIED = "unverified.toml"


@dataclass(frozen=True)
class ShapeError:
    """The largest errors at one shape against fp64: ours, torch's, and what ours may be.

    Of an e4m3 kernel errors of the output are root mean squares, and in torch's place stands the
    emulated schedule on the same bytes, of whose error ours may be 1.15 times.

    An error that is not a number means that the kernel left or computed something that is not.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    error: float  # max |out - fp64|
    torch_error: float  # the same of torch's MATH backend in the same dtype
    allowed: float  # 2 x torch_error + one unit in the last place at max |fp64|
    lse_error: float  # max |lse - fp64|, in natural-log units
    lse_allowed: float

    @property
    def ok(self) -> bool:
        """Whether both errors are within bounds; what is not a number never is."""
        return self.error <= self.allowed and self.lse_error <= self.lse_allowed


@dataclass(frozen=True)
class Speed:
    """One regime at the standard shape: TFLOP/s of the kernel, and of cuDNN in the same run."""

    regime: str
    batch: int
    seqlen: int
    heads: int
    tflops: float
    spread: float
    sm_clock_mhz: int | None
    cudnn_tflops: float | None  # None where cuDNN cannot do these dims

    @property
    def ratio(self) -> float | None:
        """Kernel over cuDNN."""
        return self.tflops / self.cudnn_tflops if self.cudnn_tflops else None


@dataclass(frozen=True)
class RoundingError:
    """How a quantiser's output at one shape differs from its reference's, of the same input.

    The kernel adds up in another order, so a value may fall on the other side of a tie.
    """

    batch: int
    seqlen: int
    heads: int
    given: bool  # whether descales were
    neighbours: float  # the share of values that are a step of e4m3 beside the reference's
    allowed: float  # of them
    wrong: int  # values further away, or left unwritten
    descale_error: float  # the largest, relative
    descale_allowed: float

    @property
    def ok(self) -> bool:
        """Whether all is within bounds; what is not a number never is."""
        return (
            self.wrong == 0
            and self.neighbours <= self.allowed
            and self.descale_error <= self.descale_allowed
        )


@dataclass(frozen=True)
class Bandwidth:
    """How fast a quantiser reads and writes at one shape, and a copy of as many bytes."""

    batch: int
    seqlen: int
    heads: int
    given: bool  # whether descales were; else a whole tensor's or head's are found first
    gb_per_s: float  # of bytes that must be moved: a second read is not one of them
    copy_gb_per_s: float

    @property
    def ratio(self) -> float:
        """Kernel over copy."""
        return self.gb_per_s / self.copy_gb_per_s


@dataclass(frozen=True)
class Evidence:
    """That one source, compiled one way, gave these errors and speeds on one card; UTC day."""

    slug: str
    source_hash: str  # of the tokens: comments and white space do not count
    host_hash: str  # of the launcher's tokens alone
    flags: tuple[str, ...]
    cutlass: str
    machine_code: str  # hash
    compiler: str
    card: str
    driver: str
    torch: str
    date: str
    errors: tuple[ShapeError, ...] | tuple[RoundingError, ...]
    speeds: tuple[Speed, ...] | tuple[Bandwidth, ...]


@dataclass(frozen=True)
class Fault:
    """One thing wrong in generated/: whose, of which kind, and in words with the way out."""

    slug: str
    kind: str  # missing | drift | stale | failed | unreadable | orphan | unneeded
    message: str

    def __str__(self) -> str:
        return f"{self.slug}: {self.message}"


@dataclass(frozen=True)
class Excuse:
    """Why a committed kernel's evidence could not be renewed at once, and since when."""

    date: str
    reason: str


def evidence_path(slug: str, folder: Path | None = None) -> Path:
    """Where the evidence of `slug` lies."""
    return (folder or locate("generated")) / f"{slug}.json"


def read(slug: str, folder: Path | None = None) -> Evidence | None:
    """The evidence of `slug`; None if there is none, VerificationError if it cannot be read."""
    path = evidence_path(slug, folder)
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found: Evidence = _decoded(Evidence, data)
    except (ValueError, TypeError) as error:
        raise VerificationError(
            f"{path.name}: not evidence that this fagen can read: {error}; "
            f"`fagen verify` writes it anew"
        ) from error
    if found.slug != slug:
        raise VerificationError(f"{path.name}: is the evidence of {found.slug}, not of {slug}")
    return found


def write(evidence: Evidence, folder: Path | None = None) -> Path:
    """Write generated/<slug>.json in one step, so that no reader ever sees half of it."""
    path = evidence_path(evidence.slug, folder)
    write_whole(path, _text(_encoded(evidence)))
    return path


def read_excuses(folder: Path | None = None) -> dict[str, Excuse]:
    """What generated/unverified.toml says, by slug; empty where there is no such file.

    The file holds a table per kernel: `[slug]`, `date = "2026-01-31"`, `reason = "..."`. Raises
    VerificationError where an entry lacks either.
    """
    path = (folder or locate("generated")) / UNVERIFIED
    if not path.exists():
        return {}
    try:
        tables, origin = read_toml(path.read_text(encoding="utf-8"), path.name)
    except ScheduleError as error:
        raise VerificationError(str(error)) from error
    excuses = {}
    for slug, entry in tables.items():
        if not isinstance(entry, dict) or set(entry) != {"date", "reason"}:
            raise VerificationError(f"{origin.at(slug)}: [{slug}] needs a date and a reason alone")
        excuses[slug] = Excuse(str(entry["date"]), str(entry["reason"]))
    return excuses


def renew(
    old: Evidence,
    *,
    source_hash: str,
    host_hash: str,
    cutlass: str,
    machine_code: str,
    compiler: str,
) -> Evidence:
    """The same evidence for a source whose rebuild gave the same machine code: no GPU needed.

    Raises VerificationError where the machine code is another, or the launcher, which is not in it.
    """
    if host_hash != old.host_hash:
        raise VerificationError(
            f"{old.slug}: the launcher is not the one that ran on {old.date}: run "
            f"`fagen verify {old.slug}` on a Hopper GPU"
        )
    if machine_code != old.machine_code:
        raise VerificationError(
            f"{old.slug}: the rebuild gave other machine code ({machine_code[:12]}, compiler "
            f"{compiler}) than ran on {old.date} ({old.machine_code[:12]}, compiler "
            f"{old.compiler}): run `fagen verify {old.slug}` on a Hopper GPU"
        )
    return dataclasses.replace(
        old,
        source_hash=source_hash,
        flags=tuple(toolchain.FLAGS),
        cutlass=cutlass,
        compiler=compiler,
    )


def staleness(
    evidence: Evidence,
    source: Source,
    *,
    cutlass: str | None = None,
    machine_code: str | None = None,
    compiler: str | None = None,
) -> list[str]:
    """Why `evidence` is not of `source` built today, in words; empty if it is.

    The CUTLASS version and the machine code are compared where given; the machine code only if
    `compiler` is the one that the evidence names, since another may rightly choose otherwise.
    """
    reasons = []
    if evidence.source_hash != source.hash:
        reasons.append(
            f"the source's tokens hash to {source.hash[:12]}, those that ran to "
            f"{evidence.source_hash[:12]}"
        )
    if evidence.flags != tuple(toolchain.FLAGS):
        odd = sorted(set(evidence.flags) ^ set(toolchain.FLAGS))
        reasons.append(f"compiler flags differ: {' '.join(odd) or 'their order'}")
    if cutlass is not None and evidence.cutlass != cutlass:
        reasons.append(f"CUTLASS is {cutlass}, it ran with {evidence.cutlass}")
    same_compiler = compiler is None or compiler == evidence.compiler
    if machine_code is not None and same_compiler and machine_code != evidence.machine_code:
        reasons.append(
            f"the machine code is {machine_code[:12]}, that which ran {evidence.machine_code[:12]}"
        )
    return reasons


def faults(
    sources: Iterable[Source],
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
    folder = folder or locate("generated")
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


def _drift(source: Source, folder: Path) -> list[Fault]:
    path = folder / f"{source.slug}.cu"
    remedy = "run `fagen generate --all`"
    if not path.exists():
        return [Fault(source.slug, "missing", f"{path.name} is not in {folder.name}/: {remedy}")]
    if path.read_text(encoding="utf-8") != source.kernel:
        told = f"{path.name} is not what its schedule renders to today: {remedy}"
        return [Fault(source.slug, "drift", told)]
    return []


def _unproven(
    source: Source,
    folder: Path,
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
        evidence, source, cutlass=cutlass, machine_code=machine_code, compiler=compiler
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
    folder: Path, known: Mapping[str, Source], excuses: Mapping[str, Excuse]
) -> Sequence[Fault]:
    belongs = {f"{slug}{end}" for slug in known for end in (".cu", ".json")} | {UNVERIFIED}
    found = [
        Fault(path.name, "orphan", "no schedule makes this file: delete it")
        for path in sorted(folder.iterdir())
        if path.name not in belongs
    ]
    found += [
        Fault(slug, "orphan", f"no schedule makes it: delete its entry in {UNVERIFIED}")
        for slug in excuses
        if slug not in known
    ]
    return found


# attention's, and a quantiser's, whose slug says that it is one
_PARTS: dict[bool, dict[str, type]] = {
    False: {"errors": ShapeError, "speeds": Speed},
    True: {"errors": RoundingError, "speeds": Bandwidth},
}


def _encoded(evidence: Evidence) -> dict[str, Any]:
    """A dict for JSON: measured numbers to four digits, more than any of them is good for."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [short(item) for item in value]
        if isinstance(value, float) and math.isfinite(value):
            return float(f"{value:.4g}")
        return value

    found: dict[str, Any] = short(dataclasses.asdict(evidence))
    return found


def _text(data: dict[str, Any]) -> str:
    """JSON with a line for each field and each shape: short, and a diff says what moved."""

    def said(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(map(said, value))
            return f"[\n  {rows}\n ]"
        return json.dumps(value, allow_nan=False)

    fields = ",\n ".join(f"{json.dumps(key)}: {said(value)}" for key, value in data.items())
    return f"{{\n {fields}\n}}\n"


def _decoded(kind: type, data: Any) -> Any:
    """A dataclass from a dict with exactly its fields; ValueError for anything else."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(data, dict) or set(data) != names:
        odd = sorted(set(data) ^ names) if isinstance(data, dict) else [type(data).__name__]
        raise ValueError(f"{kind.__name__} has missing or unknown fields: {', '.join(odd)}")
    values = dict(data)
    parts = _PARTS[str(data.get("slug")).startswith(SLUG_START)]
    for name, value in data.items():
        if name in parts:
            values[name] = tuple(_decoded(parts[name], part) for part in value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)
