"""Say what was planned, built or proved: a value in, text for a person or a dict for JSON out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fagen import evidence
from fagen.build import Binary, CacheEntry
from fagen.dispatch.tables import users_table
from fagen.doctor import Finding
from fagen.errors import FagenError, VerificationError
from fagen.evidence import Evidence
from fagen.kind import Plan
from fagen.registry import from_slug
from fagen.schedule import Schedule
from fagen.toml_lines import printable


def built(plan: Plan, binary: Binary) -> str:
    """What the compiler said of a kernel, beside what its Plan allows."""
    tools = ", ".join(f"{name} {version}" for name, version in binary.made_with.items())
    lines = [
        f"{binary.slug}",
        f"  {'from the cache; it took' if binary.cached else 'took'} {binary.cpu_seconds:.1f} "
        f"CPU-seconds with {tools}",
        f"  {'':<32}{'compiler':>8}{'plan':>8}",
        *(f"  {name:<32}{figure:>8}{most:>8}" for name, figure, most in _rows(plan, binary)),
        *(
            [f"  the model says {plan.modelled_registers} registers"]
            if plan.modelled_registers
            else []
        ),
        *(
            [f"  machine code {binary.report.machine_note}"]
            if binary.report.machine is None
            else []
        ),
        f"  {binary.library}",
        *([f"  {binary.binding}"] if binary.binding else []),
    ]
    return "\n".join(lines)


def _rows(plan: Plan, binary: Binary) -> Iterator[tuple[str, int, int]]:
    """What is measured, the compiler's figure and the Plan's; of several kernels the largest."""
    report, machine = binary.report, binary.report.machine
    yield "registers per thread at launch", report.registers, plan.launch_registers
    if machine:
        used = (machine.consumer_registers, machine.producer_registers)
        for roles, figure in zip((plan.roles[:-1], plan.roles[-1:]), used, strict=True):
            if roles and figure is not None:
                name = roles[0].name if len(roles) == 1 else "consumers"
                yield f"  of the {name}, in use", figure, max(role.registers for role in roles)
        if not plan.roles:
            yield "  in use", machine.registers, plan.launch_registers
    yield "spilled bytes per thread", report.spill_store_bytes, plan.max_spill_bytes


def proved(evidence: Evidence) -> str:
    """What a verification found, in a line per matter."""
    lines = [f"{evidence.slug}: {len(evidence.errors)} shapes on {evidence.card}, {evidence.date}"]
    if evidence.errors:
        lines.append(f"  {type(evidence.errors[0]).worst(evidence.errors)}")
    return "\n".join([*lines, *(f"  {speed}" for speed in evidence.speeds_in_words())])


def listed(schedule: Schedule) -> dict[str, Any]:
    """A committed schedule and what is known of its kernel."""
    evidence, fast, note, _ = _known(schedule)
    return {
        "schedule": schedule.slug,
        **schedule.columns(),
        "evidence": evidence,
        "TFLOP/s": fast,
        "from": "schedules/",
        "note": note,  # last, since it is long
    }


def is_verified(schedule: Schedule) -> bool:
    """Whether there is evidence of a kernel, of what its schedule renders to."""
    return _known(schedule)[-1]


def listed_of_users(
    is_meant: Callable[[Schedule], bool] = lambda schedule: True,
) -> Iterator[dict[str, Any]]:
    """Yield the schedules that a user's dispatch table names, and in which row for what."""
    from fagen.dispatch.pick import sizes_of  # costs and Plans, for which a list has no use

    for row in users_table():
        serves = f"{row.where}: {sizes_of(row)} on {printable(row.card)}"
        if is_meant(schedule := from_slug(row.slug)):
            yield {**listed(schedule), "from": serves}


def _known(schedule: Schedule) -> tuple[str, str, str, bool]:
    """The evidence of a kernel in the ledger, its speed (sustained, or else in burst), and a note.

    The note says why there is none yet. And whether it is good, and of today's source.
    """
    try:
        line = evidence.read_line(schedule.slug)
        excuse = evidence.read_excuses().get(schedule.slug)
    except VerificationError as error:  # of one kernel; the others are listed too
        return str(error).splitlines()[0], "", "", False
    except FagenError:  # no ledger
        return "", "", "", False
    if excuse:
        return f"unverified since {excuse.date}", "", excuse.reason, False
    if line is None or line.evidence is None:
        return "none", "", "", False
    recorded = line.evidence
    figures = [speed.figure for speed in recorded.speeds if speed.figure]  # of long runs first
    fast = figures[0] if figures else ""
    # what today's templates would make of it takes seconds for all: `generate --check` says that
    current = evidence.is_current(line)
    where = f"{'' if current else 'stale, '}{recorded.card}, {recorded.date}"
    return where, fast, "", current and all(error.ok for error in recorded.errors)


def cached(entry: CacheEntry) -> dict[str, Any]:
    """One folder of the cache."""
    return {
        "kernel": printable(entry.name),
        "state": entry.state,
        "MB": round(entry.bytes / 1e6, 1),
        "days unused": round(entry.age_seconds / 86_400, 1),
    }


def columns(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lay rows that have the same keys out in columns, under these keys."""
    cells = [[str(cell) for cell in row.values()] for row in rows]
    lines = [list(rows[0]), *cells] if rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()


def found(finding: Finding) -> str:
    """What `doctor` found, and how to install what is missing."""
    if finding.ok:
        return f"ok       {finding.name:<13}{finding.found}"
    return (
        f"missing  {finding.name:<13}{finding.found}\n{'':22}for {finding.needed_for}: "
        f"{finding.remedy}"
    )
