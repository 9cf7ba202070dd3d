"""What follows from the keys of the backward pass: derived defaults, slugs, rules between keys."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fagen.arch import SM90
from fagen.schedule import Code, SlugForm
from fagen.vocab import DTYPES, swizzle_of

_BYTES = 2  # of an element of the dtypes that there are

DQ_BY = ("all", "one")

SLUG = SlugForm(
    head="bwd_{dtype}_d{head_dim}[v{head_dim_v}]_{mask}_m{block_m}n{block_n}",
    codes=(
        Code("stages", "s"),
        Code("do_stages", "dos"),
        Code("ds_stages", "dss"),
        Code("dq_by", words={"all": "dqall", "one": "dqone"}),
        Code("producer_registers", "pr"),
        Code("consumer_registers", "cr"),
        Code("dq_registers", "dqr"),
        Code("intra_warpgroup", words={True: "intra", False: "nointra"}),
        Code("max_spill_bytes", "spill"),
    ),
    example="bwd_fp16_d128_causal_m64n128",
)

# Registers of a thread of a producer, of a consumer, of the one that computes dQ, by (dq_by,
# consumers). With 24 a producer of several boxes to a tile spills.
_REGISTERS = {
    ("all", 1): (40, 240, 240),
    ("all", 2): (40, 232, 232),
    ("all", 3): (32, 160, 160),
    ("one", 2): (32, 216, 256),
    ("one", 3): (32, 152, 176),
}


def _registers(role: int) -> Callable[[Mapping[str, Any]], int]:
    def derive(keys: Mapping[str, Any]) -> int:
        # one consumer that computes dQ is all there are
        return _REGISTERS.get((keys["dq_by"], _consumers(keys)), _REGISTERS["all", 1])[role]

    return derive


def _dq_by(keys: Mapping[str, Any]) -> str:
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim"])
    parts = _parts(keys["block_m"], keys["block_n"], columns)
    return "all" if parts or keys["block_m"] != SM90.wgmma_m else "one"


DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    # V is as wide as K (head_dim)
    "head_dim_v": lambda keys: keys["head_dim"],
    # Q and dO are loaded as far ahead as each other (stages)
    "do_stages": lambda keys: keys["stages"],
    # all, where dQ parts among them (block_m, block_n, head_dim)
    "dq_by": _dq_by,
    # what the producer needs, and the rest of the file (block_n, dq_by); consumers that are all
    # alike have as many each (consumer_registers)
    "producer_registers": _registers(0),
    "consumer_registers": _registers(1),
    "dq_registers": lambda keys: (
        _registers(2)(keys) if keys["dq_by"] == "one" else keys["consumer_registers"]
    ),
}


def _consumers(keys: Mapping[str, Any]) -> int:
    return int(keys["block_n"]) // SM90.wgmma_m


def dq_columns(block_m: int, block_n: int, columns: int, dq_by: str) -> int:
    """How many of dQ's (padded) columns a warpgroup computes of its 64 rows; 0 where it is no tile.

    One computes all of them. Of all, each has 64 rows of its own, or they share the columns of the
    same rows.
    """
    if dq_by == "one":
        return columns if block_m == SM90.wgmma_m else 0
    return _parts(block_m, block_n, columns)


def _parts(block_m: int, block_n: int, columns: int) -> int:
    consumers = block_n // SM90.wgmma_m
    if block_m == consumers * SM90.wgmma_m:
        return columns
    own = columns // consumers
    slab = swizzle_of(columns * _BYTES).bytes // _BYTES
    whole = block_m == SM90.wgmma_m and own * consumers == columns and own % slab == 0
    return own if whole else 0


def rules(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each rule between keys that is broken."""
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim"])
    block_m, block_n, dq_by = keys["block_m"], keys["block_n"], keys["dq_by"]
    if not dq_columns(block_m, block_n, columns, dq_by):
        if dq_by == "one":
            said = f'= {block_m}: with dq_by = "one" a warpgroup computes dQ, of 64 rows; use 64'
        else:
            slab = swizzle_of(columns * _BYTES).bytes // _BYTES
            said = (
                f"= {block_m} does not go with block_n = {block_n}: dQ's {block_m} x {columns} "
                f"must part into 64 rows, or slabs of {slab} columns, for each of "
                f"{_consumers(keys)} warpgroups; use block_n = {block_m}"
            )
        yield "block_m", said
    if keys["intra_warpgroup"] and keys["stages"] < 2:
        yield "stages", "= 1: with intra_warpgroup two steps need their Q at once; use 2"
    if dq_by == "all" and keys["dq_registers"] != keys["consumer_registers"]:
        yield (
            "dq_registers",
            f'= {keys["dq_registers"]}: with dq_by = "all" that is consumer_registers = '
            f"{keys['consumer_registers']}; leave it out",
        )
