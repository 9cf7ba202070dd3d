"""What follows from the keys of the backward pass: derived defaults, slugs, rules between keys."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fagen.arch import SM90
from fagen.schedule import Code, SlugForm
from fagen.vocab import DTYPES, swizzle_of

SLUG = SlugForm(
    head="bwd_{dtype}_d{head_dim}[v{head_dim_v}]_{mask}_m{block_m}n{block_n}",
    codes=(
        Code("stages", "s"),
        Code("do_stages", "dos"),
        Code("ds_stages", "dss"),
        Code("producer_registers", "pr"),
        Code("consumer_registers", "cr"),
        Code("max_spill_bytes", "spill"),
    ),
    example="bwd_fp16_d128_causal_m64n128",
)

# registers of a producer's and of a consumer's thread, by consumers: with 24 a producer of several
# boxes to a tile spills, and consumers do not miss what it has more
_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}

DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    # V is as wide as K (head_dim)
    "head_dim_v": lambda keys: keys["head_dim"],
    # Q and dO are loaded as far ahead as each other (stages)
    "do_stages": lambda keys: keys["stages"],
    # what the producer needs, and the rest of the file (block_n)
    "producer_registers": lambda keys: _REGISTERS[_consumers(keys)][0],
    "consumer_registers": lambda keys: _REGISTERS[_consumers(keys)][1],
}


def _consumers(keys: Mapping[str, Any]) -> int:
    return int(keys["block_n"]) // SM90.wgmma_m


def dq_columns(block_m: int, block_n: int, columns: int) -> int:
    """How many of dQ's (padded) columns a warpgroup computes of its 64 rows; 0 where it is no tile.

    Either each warpgroup has 64 rows of its own, or all have the same and share the columns.
    """
    consumers = block_n // SM90.wgmma_m
    if block_m == consumers * SM90.wgmma_m:
        return columns
    return columns // consumers if block_m == SM90.wgmma_m and columns % consumers == 0 else 0


def rules(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each rule between keys that is broken."""
    dtype = DTYPES[keys["dtype"]]
    columns = dtype.filled_up(keys["head_dim"])
    slab = swizzle_of(columns * dtype.bytes).bytes // dtype.bytes
    block_m, block_n = keys["block_m"], keys["block_n"]
    own = dq_columns(block_m, block_n, columns)
    if not own or (own < columns and own % slab):
        yield (
            "block_m",
            f"= {block_m} does not go with block_n = {block_n}: dQ's {block_m} x {columns} must "
            f"part into 64 rows, or slabs of {slab} columns, for each of {_consumers(keys)} "
            f"warpgroups; use block_n = {block_m}",
        )
