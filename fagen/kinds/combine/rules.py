"""What follows from the keys of combining: derived defaults, slugs, and the rules between keys."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fagen.arch import SM90
from fagen.schedule import Code, SlugForm
from fagen.vocab import LAYOUTS, PARTIALS

LOAD_BYTES = 16

SLUG = SlugForm(
    head="comb_{dtype}_d{head_dim}",
    codes=(
        Code("out_dtype", words={name: f"o{name}" for name in PARTIALS}),
        Code("layout", words={name: name for name in LAYOUTS}),
        Code("threads", "t"),
        Code("loads", "l"),
        Code("stages", "s"),
    ),
    example="comb_fp32_d128_obf16",
)

DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "out_dtype": lambda keys: keys["dtype"],
}


def lanes(dtype: str, head_dim: int, loads: int) -> int:
    """How many lanes share a row, each with `loads` times 16 bytes: a power of two, or whole warps.

    What is left over of them is idle.
    """
    needed = -(-row_loads(dtype, head_dim) // loads)
    if needed > SM90.warp_threads:
        return -(-needed // SM90.warp_threads) * SM90.warp_threads
    return 1 << (needed - 1).bit_length()


def row_loads(dtype: str, head_dim: int) -> int:
    """How many loads a row takes."""
    return head_dim * PARTIALS[dtype].bytes // LOAD_BYTES


def rules(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each rule between keys that is broken."""
    dtype, head_dim, loads = keys["dtype"], keys["head_dim"], keys["loads"]
    needed = lanes(dtype, head_dim, loads)
    if keys["threads"] < needed:
        yield (
            "threads",
            f'= {keys["threads"]} must hold a whole row: {head_dim} columns in "{dtype}" are '
            f"{needed} lanes with loads = {loads}; use threads = 128",
        )
