"""The heat map: each tile's fastest kernel beside the fastest of all, in brief runs."""

import math
from collections import Counter
from dataclasses import dataclass

from fagen.registry import from_slug
from fagen.search.kinds import space_of
from fagen.search.marks import BRIEF
from fagen.search.results import Result
from fagen.search.tasks import GOOD

SLOWEST = 0.6  # of the fastest one's speed: as cold as a heat map shows

Tile = tuple[int, int]  # block_m, block_n


@dataclass(frozen=True)
class Cell:
    """A tile: `heat` from 0 to 1 is its colour, None where there is no time."""

    text: str
    title: str
    kind: str  # timed | leader | refused | untimed | unfit | untried
    heat: float | None = None


@dataclass(frozen=True)
class HeatRow:
    """The tiles of one block_n, by block_m."""

    block_n: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeatMap:
    """All tiles of a target."""

    block_ms: tuple[int, ...]
    rows: tuple[HeatRow, ...]


def heat_map(result: Result) -> HeatMap:
    """Each tile's fastest kernel beside the fastest of all."""
    height, width = space_of(result.kind).tile_keys
    best: dict[Tile, tuple[float, str]] = {}  # the log of a time, and whose it is
    tried: dict[Tile, Counter[str]] = {}
    leader = None
    for compiled in result.compiled:
        values = from_slug(compiled.slug).values()
        at = (values[height], values[width])
        tried.setdefault(at, Counter())[compiled.outcome] += 1
        mark = result.marks.mark(compiled.slug, BRIEF)
        if mark is not None:
            best[at] = min(best.get(at, (math.inf, "")), (mark, compiled.slug))
        if result.lead and compiled.slug == result.lead.slug:
            leader = at
    first = min(best.values(), default=(0.0, ""))[0]
    refused = {(m, n): why for m, n, why in result.survey["tiles"]}

    def cell(at: Tile) -> Cell:
        place, counts = f"{at[0]} × {at[1]}", tried.get(at, Counter())
        if at in best:
            mark, slug = best[at]
            speed = math.exp(first - mark)
            return Cell(
                text=f"{100 * speed:.0f}",
                title=f"{place}: {slug}, {speed:.1%} of the fastest; {counts.total()} compiled",
                kind="leader" if at == leader else "timed",
                heat=round(max(0.0, (speed - SLOWEST) / (1 - SLOWEST)), 3),
            )
        if why := refused.get(at):
            short = "smem" if "memory" in why else "regs" if "regist" in why else "rule"
            return Cell(short, f"{place} never fits: {why}", "refused")
        if good := counts[GOOD]:
            return Cell("○", f"{place}: {good} compiled well, none timed at every shape", "untimed")
        for outcome, _ in counts.most_common(1):
            mostly = f"{counts.total()} compiled, mostly {outcome}"
            return Cell("×", f"{place}: {mostly}", "unfit")
        return Cell("·", f"{place}: fits, not tried", "untried")

    every = {*refused, *tried, *((m, n) for m, n in result.survey["cells"])}
    block_ms = tuple(sorted({m for m, _ in every}))
    block_ns = sorted({n for _, n in every})
    rows = (HeatRow(n, tuple(cell((m, n)) for m in block_ms)) for n in block_ns)
    return HeatMap(block_ms, tuple(rows))
