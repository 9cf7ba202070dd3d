"""What follows from the keys of combining: derived defaults, slugs, and the rules between keys."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fagen.arch import SM90
from fagen.schedule import Code, SlugForm
from fagen.vocab import LAYOUTS, PARTIALS

LOAD_BYTES = 16  # that a lane takes of a row

SLUG = SlugForm(
    head="comb_{dtype}_d{head_dim}",
    codes=(
        Code("out_dtype", words={name: f"o{name}" for name in PARTIALS}),
        Code("layout", words={name: name for name in LAYOUTS}),
        Code("threads", "t"),
        Code("unroll", "u"),
    ),
    example="comb_fp32_d128_obf16",
)

DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "out_dtype": lambda keys: keys["dtype"],
}


def lanes(dtype: str, head_dim: int) -> int:
    """How many lanes share a row, 16 bytes each: a power of two, or whole warps.

    What is left over of them is idle.
    """
    loads = head_dim * PARTIALS[dtype].bytes // LOAD_BYTES
    if loads > SM90.warp_threads:
        return -(-loads // SM90.warp_threads) * SM90.warp_threads
    return 1 << (loads - 1).bit_length()


def rules(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each rule between keys that is broken."""
    needed = lanes(keys["dtype"], keys["head_dim"])
    if keys["threads"] < needed:
        yield (
            "threads",
            f"= {keys['threads']} must hold a whole row: {keys['head_dim']} columns in "
            f'"{keys["dtype"]}" take {needed} lanes; use threads = 128',
        )
