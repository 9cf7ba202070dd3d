"""What follows from the keys of decoding: derived defaults, slugs, rules between keys."""

from fagen import combining
from fagen.arch import SM90
from fagen.kinds.scores import spilled
from fagen.kinds.sinks import SINK_WORDS
from fagen.schedule import Broken, Code, Derived, Former, Keys, SlugForm, Values
from fagen.scores import WORDS as SCORE_WORDS
from fagen.vocab import CACHES, DTYPES, FP32, MASKS, SWIZZLES

SWIZZLE = SWIZZLES[0]  # of every tile: slabs as wide as there are

# with more of them a second buffer of queries takes what the ring needs, speculation and a second
# thread block what the accumulators need
_WIDE_ROWS = 32
_COMBINED_ROWS = 24  # nor a second thread block of more, where what is combined takes as many again
_NARROW = 128  # columns, up to which such a second thread block has place for it in shared memory
_MOST_COMBINED = 16  # rows whose splits are combined in registers beside a second thread block
_LEAST_STAGES = 4  # K and V of a step, and of the one after it; of pairs one less
_MOST_STAGES = 12
_BESIDE = 4 * SM90.smem_tile_alignment  # bytes for statistics and barriers, or more than they take

MOST_BLOCKS = 5  # of keys, up to which a sequence is one split
HEADS_OF_BLOCK = 3  # a split has a block of keys for so many heads of a KV head at least,
LONGEST_LEAST = 4  # and so many blocks are enough

# how splits are dealt to thread blocks, in a slug
DEALT = {"round_robin": "roundrobin", "stream_k": "streamk"}

# what schedules once said
_FORMER: Former = {
    "chunks": "is called num_splits now",
    ("by", "turn"): 'is called "round_robin" now',
    ("by", "run"): 'is called "stream_k" now',
    ("maximum", "unified"): 'is called "fixed" now',
}

_SLUG = SlugForm(
    head="dec_{dtype}_d{head_dim}[v{head_dim_v}]_{mask}_r{rows}n{block_n}",
    codes=(
        Code("score", words=SCORE_WORDS),
        Code("sink", words=SINK_WORDS),
        Code("cache", words={cache: cache for cache in CACHES}),
        Code("kv_heads", "h"),
        Code("num_splits", "c"),
        Code("by", words=DEALT),
        Code("stages", "s"),
        Code("q_stages", "q"),
        Code("maximum", words={"lazy": "lazy", "fixed": "fixed"}),
        Code("speculate", words={True: "spec", False: "nospec"}),
        Code("blocks", "b"),
        Code("max_spill_bytes", "spill"),
    ),
    example="dec_fp16_d128_causal_r8n64",
    former={
        "runs": "is called streamk now",
        "turns": "is called roundrobin now",
        "unified": "is called fixed now",
    },
)


def least_blocks(group: int) -> int:
    """Return how many blocks of keys a split has at least, by how many heads share a KV head.

    Those of many heads have larger partial outputs beside the same keys.
    """
    return max(1, min(group // HEADS_OF_BLOCK, LONGEST_LEAST))


def split_blocks(length: int, block_n: int, num_splits: int, group: int) -> int:
    """Return how many blocks of keys a split of a sequence of so many keys has."""
    blocks = -(-length // block_n)
    if blocks <= MOST_BLOCKS:
        return blocks
    return max(combining.split_blocks(length, block_n, num_splits), least_blocks(group))


def padded(head_dim: int, dtype: str) -> int:
    """Return how many columns of shared memory a head takes: whole slabs, which M is made of."""
    slab = SWIZZLE.bytes // DTYPES[dtype].bytes
    return -(-head_dim // slab) * slab


def k_is_wider(values: Values) -> bool:
    """Whether a buffer of the ring is as wide as K, else as V."""
    d, d_v = (padded(values[key], values["dtype"]) for key in ("head_dim", "head_dim_v"))
    return d >= d_v


def combines_in_shared(values: Values) -> bool:
    """Whether what is combined lies in shared memory: of many rows registers have no place."""
    many = _MOST_COMBINED < all_rows(values) <= _WIDE_ROWS
    narrow = padded(values["head_dim_v"], values["dtype"]) <= _NARROW
    return values["by"] == "stream_k" and many and narrow


def prefetches(values: Values) -> bool:
    """Whether first keys are asked for while the launch before ends: not beside spills."""
    return not values["max_spill_bytes"]


def is_paged(values: Values) -> bool:
    """Whether keys and values lie in pages."""
    return bool(values["cache"] == "paged")


def all_rows(values: Values) -> int:
    """Return how many rows of queries a tile has, those of all its KV heads."""
    return int(values["rows"] * values["kv_heads"])


def reads_pairs(values: Values) -> bool:
    """Whether a thread block has more than one KV head."""
    return bool(values["kv_heads"] > 1)


def shares_lines(values: Values) -> bool:
    """Whether heads of two thread blocks share some lines of L2."""
    return not reads_pairs(values) and straddles(
        values["dtype"], values["head_dim"], values["head_dim_v"]
    )


def straddles(dtype: str, *head_dims: int) -> bool:
    """Whether some row of K or V begins within a line of L2, which two heads share then."""
    return any(d * DTYPES[dtype].bytes % SM90.l2_line_bytes for d in head_dims)


def share(blocks: int) -> int:
    """Return the bytes of shared memory that each of so many thread blocks may take."""
    align = SM90.smem_tile_alignment
    bytes_of_block = (SM90.smem_per_sm // blocks - SM90.smem_reserved) // align * align
    return min(bytes_of_block, SM90.smem_per_block)


def _stages(keys: Values, blocks: int) -> int:
    """How many buffers fit beside the rest, but no more than are of use."""
    element = DTYPES[keys["dtype"]].bytes
    d, d_v = (padded(keys[key], keys["dtype"]) for key in ("head_dim", "head_dim_v"))
    buffer = keys["block_n"] * max(d, d_v) * element * keys["kv_heads"]
    rest = all_rows(keys) * (keys["q_stages"] * d + 2 * keys["block_n"]) * element + _BESIDE
    rest += all_rows(keys) * (d_v + 64) * FP32.bytes if combines_in_shared(keys) else 0
    return min(_MOST_STAGES, int((share(blocks) - rest) // buffer))


def _uneven(stages: int, blocks: int) -> int:
    """So many buffers, or one less: of two thread blocks an odd number of them reads faster.

    Else K comes into the same ones again and again, and V into the others, which memory takes worse
    (benchmarks/notes/log.md). With three of them too little is under way.
    """
    return stages - 1 if blocks == 2 and stages % 2 == 0 and stages > _LEAST_STAGES else stages


_DERIVED: Derived = {
    # V is as wide as K (head_dim)
    "head_dim_v": lambda keys: keys["head_dim"],
    # the next unit's queries are there before this one ends, where they are few (rows)
    "q_stages": lambda keys: 1 if all_rows(keys) > _WIDE_ROWS or combines_in_shared(keys) else 2,
    # where registers are left for it (rows)
    "speculate": lambda keys: all_rows(keys) <= _WIDE_ROWS,
    # two, so that one loads where the other begins or ends, if there are registers and buffers for
    # them (head dims, rows, by, block_n, q_stages)
    "blocks": lambda keys: (
        2
        if all_rows(keys)
        <= (
            _COMBINED_ROWS
            if keys["by"] == "stream_k" and not combines_in_shared(keys)
            else _WIDE_ROWS
        )
        and _stages(keys, 2) >= _LEAST_STAGES - reads_pairs(keys)
        else 1
    ),
    # the same keys, and blocks
    "stages": lambda keys: max(3, _uneven(_stages(keys, keys["blocks"]), keys["blocks"])),
    # none, but of whatever a call says becomes of scores (score)
    "max_spill_bytes": spilled,
}


def rules(keys: Values) -> Broken:
    """Yield (key, sentence) for each rule between keys that is broken."""
    if MASKS[keys["mask"]].row_tables:
        yield "mask", f'= "{keys["mask"]}": so far decoding has no mask with numbers of each query'
    if keys["maximum"] == "fixed":
        if keys["by"] == "stream_k":
            yield (
                "maximum",
                'needs by = "round_robin": a split that is combined cannot be computed again',
            )
        if not keys["speculate"]:
            yield "maximum", "needs speculate = true: P is computed before anything is asked"
        if reads_pairs(keys):
            yield "maximum", "needs kv_heads = 1: a row that is computed again is one head's"
    half = SWIZZLE.bytes // DTYPES[keys["dtype"]].bytes // 2
    if (
        reads_pairs(keys)
        and not keys["head_dim"] % (2 * half) == keys["head_dim_v"] % (2 * half) == half
    ):
        yield "kv_heads", f"needs head dims that are odd multiples of {half}, whose lines two share"
    if reads_pairs(keys) and keys["head_dim"] != keys["head_dim_v"]:
        yield "head_dim_v", "must be head_dim with kv_heads = 2"
    if reads_pairs(keys) and is_paged(keys):
        yield "kv_heads", 'needs cache = "dense": so far pages are read one KV head at a time'
    if all_rows(keys) > SM90.wgmma_m:
        yield "rows", f"may be {SM90.wgmma_m} of all kv_heads at most"


KEYS = Keys(derived=_DERIVED, rules=rules, slug=_SLUG, former=_FORMER)
