"""What Plans of kernels that only move bytes say alike: every schedule of one fits an SM."""

from collections.abc import Iterable
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.kind import Role


class Streaming:
    """A Plan whose thread blocks share an SM, as many as registers allow."""

    max_spill_bytes: ClassVar[int] = 0  # per thread
    roles: ClassVar[tuple[Role, ...]] = ()  # no warp is specialised
    modelled_registers: ClassVar[int] = 0
    spill_remedy: ClassVar[str] = ""  # no key bears on it

    schedule: Any
    threads: int
    blocks: int
    launch_registers: int
    shared_bytes: Any
    ledger: Any
    reasons: Any

    @property
    def registers_held(self) -> tuple[str, str]:
        """A line of the ledger: the registers of a thread, and of all."""
        all_registers = self.threads * self.blocks * self.launch_registers
        held = f"{all_registers:,} of {SM90.registers_per_sm:,} in all"
        return "registers per thread", f"{self.launch_registers}, {held}"

    def explained(self) -> str:
        """Return the ledger, and why so many thread blocks share an SM."""
        return f"{self.ledger}\n\n{self.reasons}"

    def record(self) -> dict[str, Any]:
        """Return keys and ledger, for JSON."""
        return {
            "schedule": self.schedule.slug,
            "keys": self.schedule.values(),
            "threads": self.threads,
            "blocks": self.blocks,
            "registers": self.launch_registers,
            "shared_bytes": self.shared_bytes,
            **self._recorded(),
        }

    def _recorded(self) -> dict[str, Any]:
        return {}


def table(rows: Iterable[tuple[str, str]], width: int) -> str:
    """Return lines of a name and what is said of it."""
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)


def warps_that_fit(registers: int, width: int) -> tuple[int, str]:
    """Return how many warps of so many registers an SM holds, and a line that says why."""
    share = SM90.registers_per_sm // SM90.issued_warps
    warps = SM90.warps_resident(registers)
    rounded = f"{share:,} / ({registers} x {SM90.warp_threads}), rounded down"
    name, schedulers = "warps that then fit", f"x {SM90.issued_warps} schedulers"
    return warps, f"{name:<{width}}{rounded}, {schedulers} = {warps}"
