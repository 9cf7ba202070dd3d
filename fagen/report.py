"""Say what was planned, built or proved: a value in, text for a person or a dict for JSON out."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fagen import evidence
from fagen.build import Binary, CacheEntry
from fagen.errors import FagenError, OverBudget, VerificationError
from fagen.evidence import Evidence
from fagen.plan import Plan, plan
from fagen.render import render
from fagen.schedule import Schedule
from fagen.toolchain import Finding


def plan_record(of: Plan) -> dict[str, Any]:
    """A Plan's keys and ledgers."""
    ledgers = {"shared": of.shared, "registers": of.registers}
    return {
        "schedule": of.slug,
        "keys": of.schedule.values(),
        "threads": of.threads,
        **{name: {**asdict(one), "total": one.total} for name, one in ledgers.items()},
    }


def built(of: Plan, binary: Binary) -> str:
    """What the compiler said of a kernel, beside what its Plan allows."""
    report, machine = binary.report, binary.report.machine
    made = ", ".join(f"{name} {version}" for name, version in binary.made_with.items())
    consumer = (machine.consumer_registers or machine.registers) if machine else None
    rows = [
        ("registers per thread at launch", report.registers, of.launch_registers),
        ("  of a consumer, in use", consumer, of.consumer_registers or of.launch_registers),
        (
            "  of the producer, in use",
            machine and machine.producer_registers,
            of.producer_registers,
        ),
        ("spilled bytes per thread", report.spill_store_bytes, of.max_spill_bytes),
    ]
    lines = [
        f"{binary.slug}",
        f"  {'from the cache; it took' if binary.cached else 'took'} {binary.cpu_seconds:.1f} "
        f"CPU-seconds with {made}",
        f"  {'':<32}{'compiler':>8}{'plan':>8}",
        *(f"  {name:<32}{said:>8}{most:>8}" for name, said, most in rows if said is not None),
        f"  the model says {of.registers.total} registers for a consumer",
        *([f"  machine code {report.machine_note}"] if machine is None else []),
        f"  {binary.library}",
        *([f"  {binary.binding}"] if binary.binding else []),
    ]
    return "\n".join(lines)


def proved(of: Evidence) -> str:
    """What a verification found, in a line per matter."""
    worst = max(of.errors, key=lambda error: error.error / error.allowed, default=None)
    lines = [f"{of.slug}: {len(of.errors)} shapes on {of.card}, {of.date}"]
    if worst:
        lines.append(
            f"  nearest to its bound: error {worst.error:.2e} of {worst.allowed:.2e} allowed, "
            f"torch's own {worst.torch_error:.2e}"
        )
    for speed in of.speeds:
        ratio = f", {speed.ratio:.2f} of cuDNN" if speed.ratio else ""
        lines.append(f"  {speed.regime}: {speed.tflops:.0f} TFLOP/s{ratio}")
    return "\n".join(lines)


def listed(schedule: Schedule) -> dict[str, Any]:
    """A committed schedule and what is known of its kernel."""
    attention, tile = schedule.attention, schedule.tile
    own_v = "" if attention.head_dim_v == attention.head_dim else f"/{attention.head_dim_v}"
    known, fast = _known(schedule)
    return {
        "schedule": schedule.slug,
        "dtype": attention.dtype,
        "head_dim": f"{attention.head_dim}{own_v}",
        "mask": attention.mask,
        "tile": f"{tile.block_m}x{tile.block_n}",
        "evidence": known,
        "TFLOP/s": fast,
    }


def _known(schedule: Schedule) -> tuple[str, str]:
    """The state of a kernel's evidence, and its sustained speed."""
    try:
        found = evidence.read(schedule.slug)
        excuse = evidence.read_excuses().get(schedule.slug)
        stale = found and evidence.staleness(found, render(plan(schedule)))
    except (OverBudget, VerificationError) as error:  # of one kernel; the others are listed too
        return str(error).splitlines()[0], ""
    except FagenError:  # no generated/: an installed fagen comes without it
        return "", ""
    if excuse:
        return f"unverified since {excuse.date}: {excuse.reason}", ""
    if found is None:
        return "none", ""
    speeds = [f"{speed.tflops:.0f}" for speed in found.speeds if speed.regime == "sustained"]
    return f"{'stale, ' if stale else ''}{found.card}, {found.date}", "".join(speeds)


def cached(entry: CacheEntry) -> dict[str, Any]:
    """One folder of the cache."""
    return {
        "kernel": entry.name,
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
    """What `doctor` found, and what mends it."""
    if finding.ok:
        return f"ok       {finding.name:<13}{finding.found}"
    return (
        f"missing  {finding.name:<13}{finding.found}\n{'':22}for {finding.needed_for}: "
        f"{finding.remedy}"
    )
