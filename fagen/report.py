"""Say what was planned, built or proved: a value in, text for a person or a dict for JSON out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fagen import evidence, flow
from fagen.build import Binary, CacheEntry
from fagen.errors import FagenError, OverBudget, VerificationError
from fagen.evidence import Bandwidth, Evidence, RoundingError, ShapeError, Speed
from fagen.plan import Plan, explain
from fagen.quantizer import AnySchedule, QuantizePlan, QuantizeSchedule
from fagen.toolchain import Finding

# of a quantiser's Plan, what is told beside its keys
_QUANTIZER = ("threads", "blocks", "registers", "shared_bytes", "kernels", "reads")


def plan_record(of: Plan | QuantizePlan) -> dict[str, Any]:
    """A Plan's keys and ledgers."""
    if isinstance(of, QuantizePlan):
        return {
            "schedule": of.slug,
            "keys": of.schedule.values(),
            **{name: getattr(of, name) for name in _QUANTIZER},
        }
    ledgers = {"shared": of.shared, "registers": of.registers}
    return {
        "schedule": of.slug,
        "keys": of.schedule.values(),
        "threads": of.threads,
        **{name: {**asdict(one), "total": one.total} for name, one in ledgers.items()},
    }


def explained(of: Plan | QuantizePlan) -> str:
    """A Plan's ledgers, with the formulae behind them."""
    return f"{of.ledger}\n\n{of.reasons}" if isinstance(of, QuantizePlan) else explain(of)


def built(of: Plan | QuantizePlan, binary: Binary) -> str:
    """What the compiler said of a kernel, beside what its Plan allows."""
    report, machine = binary.report, binary.report.machine
    made = ", ".join(f"{name} {version}" for name, version in binary.made_with.items())
    rows = _quantizer_rows(of, binary) if isinstance(of, QuantizePlan) else _rows(of, binary)
    lines = [
        f"{binary.slug}",
        f"  {'from the cache; it took' if binary.cached else 'took'} {binary.cpu_seconds:.1f} "
        f"CPU-seconds with {made}",
        f"  {'':<32}{'compiler':>8}{'plan':>8}",
        *(f"  {name:<32}{said:>8}{most:>8}" for name, said, most in rows if said is not None),
        *(
            [f"  the model says {of.registers.total} registers for a consumer"]
            if isinstance(of, Plan)
            else []
        ),
        *([f"  machine code {report.machine_note}"] if machine is None else []),
        f"  {binary.library}",
        *([f"  {binary.binding}"] if binary.binding else []),
    ]
    return "\n".join(lines)


def _rows(of: Plan, binary: Binary) -> list[tuple[str, int | None, int]]:
    """What is measured, the compiler's figure and the Plan's."""
    report, machine = binary.report, binary.report.machine
    consumer = (machine.consumer_registers or machine.registers) if machine else None
    return [
        ("registers per thread at launch", report.registers, of.launch_registers),
        ("  of a consumer, in use", consumer, of.consumer_registers or of.launch_registers),
        (
            "  of the producer, in use",
            machine.producer_registers if machine else None,
            of.producer_registers,
        ),
        ("spilled bytes per thread", report.spill_store_bytes, of.max_spill_bytes),
    ]


def _quantizer_rows(of: QuantizePlan, binary: Binary) -> list[tuple[str, int | None, int]]:
    """The same of a quantiser, the largest of its kernels."""
    return [
        ("registers per thread", binary.report.registers, of.registers),
        ("spilled bytes per thread", binary.report.spill_store_bytes, of.max_spill_bytes),
    ]


def proved(of: Evidence) -> str:
    """What a verification found, in a line per matter."""
    lines = [f"{of.slug}: {len(of.errors)} shapes on {of.card}, {of.date}"]
    roundings = [error for error in of.errors if isinstance(error, RoundingError)]
    errors = [error for error in of.errors if isinstance(error, ShapeError)]
    if errors:
        worst = max(errors, key=lambda error: error.error / (error.allowed or math.inf))
        lines.append(
            f"  nearest to its bound: error {worst.error:.2e} of {worst.allowed:.2e} allowed, "
            f"torch's own {worst.torch_error:.2e}"
        )
    if roundings:
        most = max(roundings, key=lambda error: error.neighbours)
        lines.append(
            f"  at most {most.neighbours:.1e} of the values round to the reference's neighbour, "
            f"{most.allowed:.0e} allowed"
        )
    for speed in of.speeds:
        if isinstance(speed, Bandwidth):
            given = "descales given" if speed.given else "descales found"
            lines.append(f"  {given}: {speed.gb_per_s:.0f} GB/s, {speed.ratio:.2f} of a copy's")
        else:
            ratio = f", {speed.ratio:.2f} of cuDNN" if speed.ratio else ""
            lines.append(f"  {speed.regime}: {speed.tflops:.0f} TFLOP/s{ratio}")
    return "\n".join(lines)


def listed(schedule: AnySchedule) -> dict[str, Any]:
    """A committed schedule and what is known of its kernel."""
    known, fast = _known(schedule)
    if isinstance(schedule, QuantizeSchedule):
        keys = schedule.quantize
        dtype, head_dim, mask, tile = f"{keys.dtype}", f"{keys.head_dim}", "", f"{keys.rows} rows"
    else:
        attention = schedule.attention
        own_v = "" if attention.head_dim_v == attention.head_dim else f"/{attention.head_dim_v}"
        dtype, head_dim = attention.dtype, f"{attention.head_dim}{own_v}"
        mask, tile = attention.mask, f"{schedule.tile.block_m}x{schedule.tile.block_n}"
    return {
        "schedule": schedule.slug,
        "dtype": dtype,
        "head_dim": head_dim,
        "mask": mask,
        "tile": tile,
        "evidence": known,
        "TFLOP/s": fast,
    }


def _known(schedule: AnySchedule) -> tuple[str, str]:
    """The state of a kernel's evidence, and its sustained speed."""
    try:
        found = evidence.read(schedule.slug)
        excuse = evidence.read_excuses().get(schedule.slug)
        stale = found and evidence.staleness(found, flow.rendered(schedule))
    except (OverBudget, VerificationError) as error:  # of one kernel; the others are listed too
        return str(error).splitlines()[0], ""
    except FagenError:  # no generated/: an installed fagen comes without it
        return "", ""
    if excuse:
        return f"unverified since {excuse.date}: {excuse.reason}", ""
    if found is None:
        return "none", ""
    speeds = [
        f"{speed.tflops:.0f}"
        for speed in found.speeds
        if isinstance(speed, Speed) and speed.regime == "sustained"
    ]
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
