"""What kinds of attention write alike: keys of schedules, columns of lists, refusals, records."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import Field

from fagen.arch import SM90
from fagen.errors import OverBudget
from fagen.ledger import Ledger
from fagen.schedule import Schedule, Section, derived

# one wgmma takes all columns of V; rows of 8 columns keep the 16-byte steps that TMA needs
HEAD_DIM: dict[str, Any] = {"ge": 16, "le": SM90.wgmma_n_max, "multiple_of": 8}


class Build(Section):
    """What the compiler may do."""

    max_spill_bytes: int = Field(
        default=0, ge=0, le=4096, description="bytes per thread that may spill to local memory"
    )


def registers(description: str) -> Any:
    """Declare a key of registers per thread, as setmaxnreg takes them."""
    return derived(
        description,
        ge=SM90.setmaxnreg_min,
        le=SM90.setmaxnreg_max,
        multiple_of=SM90.register_quantum,
    )


def columns(problem: Any, rows: int, block_n: int) -> dict[str, str]:
    """Return what a list of schedules shows of one, from the table of its problem and its tile."""
    own_v = "" if problem.head_dim_v == problem.head_dim else f"/{problem.head_dim_v}"
    return {
        "dtype": problem.dtype,
        "head_dim": f"{problem.head_dim}{own_v}",
        "mask": problem.mask,
        "tile": f"{rows}x{block_n}",
    }


def over_budget(
    schedule: Schedule, key: str, over: Iterable[Ledger], nearest: Iterable[Mapping[str, Any]]
) -> OverBudget:
    """Return the error that says every ledger that is exceeded, and which schedules near it fit.

    `key` of [tile] is what a reader would change first; of a change None leaves a key out.
    """
    lines = [
        f"{schedule.origin.at('tile', key)}: tile.{key} = {schedule.values()[key]}: "
        f"{schedule.slug} does not fit an SM of {SM90.name}"
    ]
    for ledger in over:
        lines += ["  " + line for line in str(ledger).splitlines()]
    fits = [
        " and ".join(
            f"{key} left out" if value is None else f"{key} = {json.dumps(value)}"
            for key, value in changes.items()
        )
        for changes in nearest
    ]
    lines.append("  fits with " + ", or with ".join(fits) if fits else "  nothing near it fits")
    return OverBudget("\n".join(lines))


def record(schedule: Schedule, threads: int, ledgers: Mapping[str, Ledger]) -> dict[str, Any]:
    """Return keys and ledgers, for JSON."""
    return {
        "schedule": schedule.slug,
        "keys": schedule.values(),
        "threads": threads,
        **{name: {**asdict(one), "total": one.total} for name, one in ledgers.items()},
    }
