"""What follows from the keys of the backward pass: derived defaults, slugs, rules between keys."""

from collections.abc import Callable
from typing import Any

from fagen.arch import SM90
from fagen.kinds.attention import padded_head_dims
from fagen.kinds.budget import FP32_BYTES
from fagen.kinds.scores import rules_of_slopes, spilled
from fagen.kinds.sinks import SINK_WORDS
from fagen.schedule import Broken, Code, Derived, Former, Keys, SlugForm, Values
from fagen.scores import SCORES
from fagen.scores import WORDS as SCORE_WORDS
from fagen.vocab import DTYPES, MASKS, SWIZZLES, swizzle_of

BYTES = 2  # of an element of the dtypes that there are

_SLAB = SWIZZLES[0].bytes // BYTES  # columns of the widest

# head dims above which a thread has no room for both dK and dV, and a thread block for two tiles of
# dO or all of dQ
_WIDE, _VERY_WIDE = 128, 192

DQ_BY = ("all", "one")
PARTITIONS = ("keys", "gradients")
KEPT = ("none", "k")

_V_FROM_SHARED = 'is gone: V is read from shared memory; use "k", or leave it out'

# what schedules once said
_FORMER: Former = {
    ("kept", "kv"): _V_FROM_SHARED,
    "split": "is called partition now",
}

_SLUG = SlugForm(
    head="bwd_{dtype}_d{head_dim}[v{head_dim_v}]_{mask}_m{block_m}n{block_n}",
    codes=(
        Code("score", words=SCORE_WORDS),
        Code("sink", words=SINK_WORDS),
        Code("lengths", words={"equal": "equal", "varlen": "varlen"}),
        Code("deterministic", words={True: "det", False: "nodet"}),
        Code("stages", "s"),
        Code("do_stages", "dos"),
        Code("ds_stages", "dss"),
        Code("partition", words={"keys": "bykeys", "gradients": "bygrads"}),
        Code("dq_slices", "dqs"),
        Code("dq_by", words={"all": "dqall", "one": "dqone"}),
        Code("kept", words={"none": "keepnone", "k": "keepk"}),
        Code("producer_registers", "pr"),
        Code("consumer_registers", "cr"),
        Code("dq_registers", "dqr"),
        Code("intra_warpgroup", words={True: "intra", False: "nointra"}),
        Code("under_dp", words={True: "underdp", False: "nounderdp"}),
        Code("persistent", words={True: "persist", False: "nopersist"}),
        Code("postprocess", words={True: "post", False: "nopost"}),
        Code("cluster", "c"),
        Code("max_spill_bytes", "spill"),
    ),
    example="bwd_fp16_d128_causal_m64n128",
    former={"keepkv": _V_FROM_SHARED},
)

# Registers of a thread of a producer, of a consumer, of the one that computes dQ: by (dq_by,
# consumers), or by what else takes more. With 24 a producer of several boxes to a tile spills,
# which costs less than consumers that do; beside dQ of narrow slabs, which is less than 128
# columns wide, there are 32 for it, and 40 if it draws tiles.
_REGISTERS = {
    "gradients": (40, 232, 232),
    "very wide gradients": (24, 240, 240),
    "ones in shared memory": (24, 240, 240),
    ("all", 1): (40, 240, 240),
    ("all", 2): (40, 232, 232),
    ("all", 3): (32, 160, 160),
    ("one", 2): (24, 232, 248),
    ("one", 2, "narrow slabs"): (32, 232, 240),
    ("one", 2, "draws tiles"): (40, 224, 240),
    ("one", 3): (32, 152, 176),
}


def _registers(role: int) -> Callable[[Values], int]:
    def derive(keys: Values) -> int:
        if keys["partition"] == "gradients":
            very = max(keys["head_dim"], keys["head_dim_v"]) > _VERY_WIDE
            return _REGISTERS["very wide gradients" if very else "gradients"][role]
        shared: tuple[Any, ...] = (keys["dq_by"], consumers(keys))
        if shared == ("all", 2) and ones_in_shared_memory(keys):
            return _REGISTERS["ones in shared memory"][role]
        if shared == ("one", 2) and keys["persistent"]:
            shared = (*shared, "draws tiles")
        elif shared == ("one", 2) and _narrow_slabs(keys):
            shared = (*shared, "narrow slabs")
        # one consumer that computes dQ is all there are
        return _REGISTERS.get(shared, _REGISTERS["all", 1])[role]

    return derive


def _dq_by(keys: Values) -> str:
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim"])
    whole = keys["block_m"] != SM90.wgmma_m or keys["partition"] == "gradients"
    parts = whole or _shared_columns(keys["block_n"] // SM90.wgmma_m, columns)
    return "all" if parts else "one"


def _partition(keys: Values) -> str:
    wide = max(keys["head_dim"], keys["head_dim_v"]) > _WIDE
    return "gradients" if wide and keys["block_n"] == SM90.wgmma_m else "keys"


_DERIVED: Derived = {
    # V is as wide as K (head_dim)
    "head_dim_v": lambda keys: keys["head_dim"],
    # Q and dO are loaded as far ahead as each other, but where that is too much (stages, head_dim)
    "do_stages": lambda keys: min(keys["stages"], 1 if keys["head_dim_v"] > _VERY_WIDE else 4),
    # by gradients where a thread cannot hold both (head_dim, head_dim_v)
    "partition": _partition,
    # all, where dQ parts among them (block_m, block_n, head_dim)
    "dq_by": _dq_by,
    # as one, but where shared memory is short (head_dim)
    "dq_slices": lambda keys: 2 if keys["head_dim"] > _VERY_WIDE else 1,
    # what the producer needs, and the rest of the file (block_n, dq_by); consumers that are all
    # alike have as many each (consumer_registers)
    "producer_registers": _registers(0),
    "consumer_registers": _registers(1),
    "dq_registers": lambda keys: (
        _registers(2)(keys) if keys["dq_by"] == "one" else keys["consumer_registers"]
    ),
    # none, but of whatever a call says becomes of scores (score)
    "max_spill_bytes": spilled,
}


def consumers(keys: Values) -> int:
    """How many warpgroups multiply: one for each 64 keys, two by gradients."""
    of_keys = int(keys["block_n"]) // SM90.wgmma_m
    return of_keys * (2 if keys["partition"] == "gradients" else 1)


def ones_in_shared_memory(keys: Values) -> bool:
    """Whether what statistics are multiplied by lies there: registers are short, or in work."""
    by_gradients = keys["partition"] == "gradients"
    return bool(by_gradients or keys["kept"] != "none" or dq_transposed(keys))


def dq_transposed(keys: Values) -> bool:
    """Whether dQ's columns and not its rows are those of accumulators: it has no whole 64 rows."""
    return bool(keys["block_m"] % SM90.wgmma_m)


def dq_columns(keys: Values) -> tuple[int, ...]:
    """How many columns the accumulator of dQ has in each warpgroup that has any; () for no tile.

    One computes all of dQ's (padded) columns. By keys each has 64 rows of its own, or they share
    the columns of the same rows; by gradients they always share them, in whole slabs of shared
    memory. Transposed, columns are rows of dQ: each warpgroup has all, beside 64 columns of its
    own, or they share those of the same 64 columns.
    """
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim"])
    if keys["partition"] == "gradients":
        columns = whole_columns(keys)
        slab = _slab(columns)
        slabs = -(-columns // slab)
        first = -(-slabs // 2) * slab
        return tuple(part for part in (first, columns - first) if part)
    count = consumers(keys)
    if dq_transposed(keys):
        return _transposed(keys["block_m"], columns, 1 if keys["dq_by"] == "one" else count)
    if keys["dq_by"] == "one":
        return (columns,) if keys["block_m"] == SM90.wgmma_m else ()
    if keys["block_m"] == count * SM90.wgmma_m:
        return (columns,) * count
    own = _shared_columns(count, columns) if keys["block_m"] == SM90.wgmma_m else 0
    return (own,) * count if own else ()


def whole_columns(keys: Values) -> int:
    """Columns of Q and K that parts of whole slabs make up: all, or those of a pair's dQ each."""
    return DTYPES[keys["dtype"]].filled_up(keys["head_dim"]) // int(keys["cluster"])


def shares_rows(keys: Values) -> bool:
    """Whether warpgroups compute different columns of the same rows of dQ."""
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim"])
    if dq_transposed(keys):
        return columns > SM90.wgmma_m
    return dq_columns(keys)[0] < columns


def last_makes_more(keys: Values) -> bool:
    """Whether, by keys, the last consumer computes one part of dQ more than the others."""
    return keys["partition"] == "keys" and len(dq_columns(keys)) > consumers(keys)


def leaves_rest(keys: Values) -> bool:
    """Whether the last warpgroup that computes dQ has fewer of its columns than the others."""
    return len({*dq_columns(keys)}) > 1


def counts_steps(keys: Values) -> bool:
    """Whether consumers need a number for even and odd uses of dQ's buffer.

    Else the stage of dS tells. Persistent thread blocks have uses of no step: dK leaves there.
    """
    return bool(keys["persistent"] or keys["ds_stages"] != 2)


def slices_dq(keys: Values) -> bool:
    """Whether dQ is handed on in several slices."""
    return bool(keys["dq_slices"] > 1)


def defers_dq(keys: Values) -> bool:
    """Whether the last slice of dQ is handed on in the next step, under other work.

    By gradients, where its buffer is a slice: until the slice before has been read, it waits.
    Of varlen sequences one thread block alone has no registers for it.
    """
    by_gradients = keys["partition"] == "gradients"
    has_room = keys["lengths"] != "varlen" or keys["cluster"] > 1
    return by_gradients and slices_dq(keys) and has_room


def both_make_dq(keys: Values) -> bool:
    """Whether, by gradients, the second warpgroup computes a part of dQ too."""
    return keys["partition"] == "gradients" and len(dq_columns(keys)) > 1


def passes(keys: Values) -> bool:
    """Whether there are blocks of rows that see keys of some consumers alone."""
    narrow = keys["partition"] == "keys" and keys["block_m"] < keys["block_n"]
    mask = MASKS[keys["mask"]]
    return narrow and mask.last_by_row and not mask.row_tables  # which to ask takes as long


def rounds_fit(keys: Values) -> bool:
    """Whether consumers have registers for rounds of all heads: see `rounds` of parts.

    Beside 128 rows, where exponentials stand under dP, or where the tile lies in shared memory.
    """
    narrow = keys["block_m"] < 2 * SM90.wgmma_m or keys["lengths"] == "varlen"
    return bool(narrow or keys["under_dp"] or keys["persistent"])


def slopes_fit(keys: Values) -> bool:
    """Whether P times the slopes of scores stays in fp32, in the place of S.

    Beside more than 64 rows P in 16 bits and this are too many registers; by gradients it goes
    through shared memory.
    """
    few = keys["block_m"] <= SM90.wgmma_m and keys["partition"] == "keys"
    return bool(few and SCORES[keys["score"]].acts)


def keeps_descriptors(keys: Values) -> bool:
    """Whether the upper words of descriptors stay in registers, and are not moved anew.

    Only where exponentials stand under dP, of head dims up to 64 under a mask by row, a step is
    shorter for it, by 2 %: benchmarks/notes/log.md#fewer-instructions-in-an-e4m3-step.
    """
    alone = keys["under_dp"] and not keys["persistent"] and keys["lengths"] != "varlen"
    return alone and MASKS[keys["mask"]].by_row and padded_head_dims(keys) == (64, 64)


def _transposed(rows: int, columns: int, warpgroups: int) -> tuple[int, ...]:
    """The rows of dQ that each warpgroup has, where its columns lie along M; () where none part."""
    if columns % SM90.wgmma_m == 0 and warpgroups <= columns // SM90.wgmma_m <= warpgroups + 1:
        return (rows,) * (columns // SM90.wgmma_m)
    own = rows // warpgroups
    whole = own * warpgroups == rows and own * BYTES % SWIZZLES[-1].bytes == 0
    return (own,) * warpgroups if columns == SM90.wgmma_m and whole else ()


def _shared_columns(warpgroups: int, columns: int) -> int:
    """What each has of columns that part into whole slabs; 0 where they do not."""
    own = columns // warpgroups
    return own if own * warpgroups == columns and own % _slab(columns) == 0 else 0


def _narrow_slabs(keys: Values) -> bool:
    """Whether a tile of Q or dO is of more boxes than one for each 64 columns."""
    return any(_slab(columns) < _SLAB for columns in padded_head_dims(keys))


def _slab(columns: int) -> int:
    return swizzle_of(columns * BYTES).bytes // BYTES


def _cluster_rules(keys: Values) -> Broken:
    """Each loads every other slab for both."""
    d, d_v = padded_head_dims(keys)
    if d % (2 * SWIZZLES[-1].bytes // BYTES) or d_v % (2 * _slab(d_v)):
        yield "cluster", "= 2: only with an even number of slabs of Q and of dO; use 1"


def _persistent_rules(keys: Values) -> Broken:
    """dV leaves by way of dS's buffers and dK by that of dQ: they must be as large."""
    if keys["partition"] == "gradients":
        yield "persistent", '= true: only with partition = "keys"; leave it out'
        return
    if keys["lengths"] == "varlen":
        yield "persistent", '= true does not go with lengths = "varlen"; leave it out'
    mask = MASKS[keys["mask"]]
    if mask.tables:
        yield (
            "persistent",
            f'= true: so far thread blocks that stay have no mask "{mask.name}", which differs '
            "from sequence to sequence; leave it out",
        )
    if keys["dq_slices"] > 1:
        yield "persistent", "= true: dK leaves by way of all of dQ's buffer; use dq_slices = 1"
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim_v"])
    if keys["ds_stages"] * keys["block_m"] < columns:
        yield (
            "persistent",
            f"= true: the {columns} columns of dV leave by way of dS, which has "
            f"{keys['ds_stages']} x {keys['block_m']}; use ds_stages = 2 or a larger block_m",
        )
    if FP32_BYTES * keys["block_m"] < BYTES * keys["block_n"]:
        yield (
            "persistent",
            f"= true: the {keys['block_n']} rows of dK leave by way of dQ, which has room for "
            f"{keys['block_m'] * FP32_BYTES // BYTES}; use a larger block_m",
        )


def rules(keys: Values) -> Broken:
    """Yield (key, sentence) for each rule between keys that is broken."""
    columns = DTYPES[keys["dtype"]].filled_up(keys["head_dim"])
    block_m, block_n, dq_by = keys["block_m"], keys["block_n"], keys["dq_by"]
    if keys["partition"] == "gradients":
        for key in ("block_m", "block_n"):
            if keys[key] != SM90.wgmma_m:
                yield key, f'= {keys[key]}: with partition = "gradients" a tile is 64 x 64; use 64'
        if dq_by == "one":
            yield "dq_by", '= "one": with partition = "gradients" both compute dQ; leave it out'
        if keys["cluster"] > 1:
            yield from _cluster_rules(keys)
    elif keys["cluster"] > 1:
        yield "cluster", f'= {keys["cluster"]}: only with partition = "gradients"; use 1'
    elif not dq_columns(keys):
        if dq_transposed(keys):
            fault = (
                f"= {block_m}: dQ's {columns} x {block_m}, transposed since that is no multiple of "
                f"{SM90.wgmma_m} rows, must part into {SM90.wgmma_m} columns, or of "
                f"{SM90.wgmma_m} columns into 16 rows times a number, for each of "
                f"{consumers(keys) if dq_by == 'all' else 1} warpgroups; use {SM90.wgmma_m}"
            )
        elif dq_by == "one":
            fault = f'= {block_m}: with dq_by = "one" a warpgroup computes dQ, of 64 rows; use 64'
        else:
            fault = (
                f"= {block_m} does not go with block_n = {block_n}: dQ's {block_m} x {columns} "
                f"must part into 64 rows, or slabs of {_slab(columns)} columns, for each of "
                f"{consumers(keys)} warpgroups; use block_n = {block_m}"
            )
        yield "block_m", fault
    if keys["persistent"]:
        yield from _persistent_rules(keys)
    elif keys["postprocess"]:
        yield "postprocess", "= true: only with persistent = true; leave it out"
    if keys["postprocess"] and dq_transposed(keys):
        yield "postprocess", f"= true: only with whole {SM90.wgmma_m} rows a step; leave it out"
    yield from rules_of_slopes(keys)
    if keys["kept"] != "none" and SCORES[keys["score"]].acts:
        yield "kept", f'= "{keys["kept"]}" does not go with a score; leave it out'
    if keys["kept"] != "none" and keys["partition"] == "gradients":
        yield "kept", f'= "{keys["kept"]}": only with partition = "keys"; leave it out'
    if keys["intra_warpgroup"] and keys["partition"] == "keys":
        yield "intra_warpgroup", '= true: only with partition = "gradients"; leave it out'
    if keys["under_dp"] and keys["partition"] == "gradients":
        yield "under_dp", '= true: only with partition = "keys"; leave it out'
    if keys["intra_warpgroup"] and keys["stages"] < 2:
        yield "stages", "= 1: with intra_warpgroup two steps need their Q at once; use 2"
    if dq_by == "all" and keys["dq_registers"] != keys["consumer_registers"]:
        yield (
            "dq_registers",
            f'= {keys["dq_registers"]}: with dq_by = "all" that is consumer_registers = '
            f"{keys['consumer_registers']}; leave it out",
        )


KEYS = Keys(derived=_DERIVED, rules=rules, slug=_SLUG, former=_FORMER)
