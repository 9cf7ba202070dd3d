"""What follows from the keys of attention: derived defaults, slugs, and the rules between keys."""

import math
from typing import Any

from fagen.arch import SM90
from fagen.kinds.forward.rules_of_tiles import rules_of_packs, rules_of_parts
from fagen.kinds.scores import rules_of_scores, spilled
from fagen.kinds.sinks import SINK_WORDS
from fagen.schedule import Broken, Code, Derived, Former, Keys, SlugForm, Values
from fagen.scores import WORDS as SCORE_WORDS
from fagen.vocab import (
    DTYPES,
    KERNEL_SCALES,
    MASKS,
    ORDERS,
    OUT_DTYPES,
    OUTPUTS,
    SCALE_ROWS_DEFAULT,
    TOTALS,
    TRANSPOSITIONS,
    V_LAYOUTS,
    V_SCALES,
    swizzle_of,
)

# in the order in which a slug says them, each only where the value is not the default
_CODES = (
    Code("score", words=SCORE_WORDS),
    Code("sink", words=SINK_WORDS),
    Code("lengths", words={"equal": "equal", "varlen": "varlen"}),
    Code("out_dtype", words={name: f"o{name}" for name in OUT_DTYPES}),
    Code("pack_gqa", words={True: "packgqa", False: "nopackgqa"}),
    Code("num_splits", "split"),
    Code("fill", words={True: "fill", False: "nofill"}),
    Code("stages", "s"),
    Code("v_row_stages", "vr"),
    Code("q_stages", "q"),
    Code("output", words={"own": "own", "half": "half", "reuse_v": "reusev"}),
    Code("producer", words={"warp": "prodwarp", "none": "noprod"}),
    Code("producer_registers", "pr"),
    Code("consumer_registers", "cr"),
    Code("inter_warpgroup", words={True: "inter", False: "nointer"}),
    Code("intra_warpgroup", words={True: "intra", False: "nointra"}),
    Code("sum", words={"threads": "threadsum", "tensor": "tensorsum"}),
    Code("maximum", words={"lazy": "lazymax", "online": "onlinemax"}),
    Code("rescale_threshold", "t"),
    Code("tanh", words={"mufu": "mufu", "curve": "curve"}),
    Code("v_layout", words={"rows": "vrows", "columns": "vcols"}),
    Code("transposes", words={"producer": "prodtrans", "kernel": "pretrans"}),
    Code("scales", words={"head": "shead", "block": "sblock"}),
    Code("scale_rows", "sr"),
    Code("v_scales", words={"column": "vscol", "block": "vsblock"}),
    Code("p_offset", "po"),
    Code("promote", "pm"),
    Code("promote_columns", "pc"),
    Code("totals", words={"registers": "regtotals", "shared": "smemtotals"}),
    Code("order", words={name: name for name in ORDERS}),
    Code("cluster", "c"),
    Code("max_spill_bytes", "spill"),
)

_FROM_REGISTERS = "is gone: P reaches the PV GEMM from registers; leave it out"
_ROWS_DECIDE = "is gone: a consumer warpgroup takes 64 rows of block_m; leave it out"
_RESIDENT = "is gone: thread blocks stay and take many tiles; leave order out, or use another"
_OF_HEADS = 'is gone: that of a tensor is passed for each head; use "head", or leave it out'

# what schedules and slugs once said
_FORMER: Former = {
    "p": _FROM_REGISTERS,
    "consumers": _ROWS_DECIDE,
    ("order", "single"): _RESIDENT,
    ("scales", "tensor"): _OF_HEADS,
    ("maximum", "late"): 'is called "lazy" now',
    ("maximum", "each"): 'is called "online" now',
    ("output", "halves"): 'is called "half" now',
    ("output", "v_space"): 'is called "reuse_v" now',
    "chunks": "is called num_splits now",
}

_SLUG = SlugForm(
    head="fwd_{dtype}_d{head_dim}[v{head_dim_v}]_{mask}_m{block_m}n{block_n}",
    codes=_CODES,
    example="fwd_fp16_d128_causal_m128n128",
    former={
        "pshared|pregs": _FROM_REGISTERS,
        r"w\d+": _ROWS_DECIDE,
        "single": _RESIDENT,
        "stensor": _OF_HEADS,
        "halves": "is called half now",
        "vspace": "is called reusev now",
        "eachmax": "is called onlinemax now",
    },
)

_FP8_KEYS = (
    *("v_layout", "transposes", "v_row_stages"),
    *("scales", "scale_rows", "v_scales", "p_offset"),
)

# Keys whose default follows from others, in an order that works.  Each is a structural rule over
# keys that stand before it here or follow from none: all of these are in the slug, so one that
# leaves a default out still reads back.  None is a measurement, and none changes once released:
# what was measured stands in schedules and in the dispatch table.
_DERIVED: Derived = {
    # V is as wide as K (head_dim)
    "head_dim_v": lambda keys: keys["head_dim"],
    # wherever two warpgroups can take turns at the tensor cores (block_m, producer)
    "inter_warpgroup": lambda keys: consumers(keys) > 1 and keys["producer"] == "warp",
    # longest tiles first where they differ in length, to whoever comes free (lengths, num_splits,
    # mask, producer, cluster)
    "order": lambda keys: _order(keys),
    # that of Q, K and V where O can have it (dtype)
    "out_dtype": lambda keys: DTYPES[keys["dtype"]].out,
    # a constant in e4m3, rows of varlen sequences; nothing without scales (dtype, lengths)
    "v_layout": lambda keys: _v_layout(keys) if _fp8(keys) else "",
    "scales": lambda keys: KERNEL_SCALES[0] if _fp8(keys) else "",
    # a constant where V comes row-major (dtype, v_layout)
    "transposes": lambda keys: _transposes(keys) if _fp8(keys) else "",
    # those of V where the producer transposes it (transposes, stages)
    "v_row_stages": lambda keys: keys["stages"] if keys["transposes"] == "producer" else 0,
    # a constant where a block of rows shares a scale (scales)
    "scale_rows": lambda keys: SCALE_ROWS_DEFAULT if keys["scales"] == "block" else 0,
    "v_scales": lambda keys: V_SCALES[0] if _fp8(keys) else "",
    # a stale maximum costs P bits that e4m3 has not got (dtype)
    "maximum": lambda keys: "online" if _fp8(keys) else "lazy",
    # the largest that leaves P in range (dtype, rescale_threshold)
    "p_offset": lambda keys: _p_offset(keys["rescale_threshold"]) if _fp8(keys) else 0.0,
    # a constant where sums are promoted (promote)
    "totals": lambda keys: TOTALS[0] if keys["promote"] else "",
    # three consumers or four use up the register file; a producer beside fewer has what it needs
    # (producer, block_m, transposes, scales, lengths)
    "producer_registers": lambda keys: _registers_of(keys)[0],
    "consumer_registers": lambda keys: _registers_of(keys)[1],
    # none, but of whatever a call says becomes of scores (score)
    "max_spill_bytes": spilled,
}


def consumers(keys: Values) -> int:
    """How many warpgroups multiply: each takes the rows of one wgmma."""
    return int(keys["block_m"]) // SM90.wgmma_m


def _order(keys: Values) -> str:
    """The grid order that suits the mask; only a producer of a block by itself can draw tiles."""
    if keys["lengths"] == "varlen":
        return "dynamic"  # how many tiles there are the host does not know
    if keys["num_splits"] > 1:
        return "persistent"  # they are equally long, nearly all of them
    order = ORDERS[MASKS[keys["mask"]].order]
    draws = keys["producer"] == "warp" and keys["cluster"] == 1
    return order.name if draws else order.static or order.name


def _fp8(keys: Values) -> bool:
    return DTYPES[keys["dtype"]].fp8


def _v_layout(keys: Values) -> str:
    return "rows" if keys["lengths"] == "varlen" else V_LAYOUTS[0]


def _transposes(keys: Values) -> str:
    return TRANSPOSITIONS[0] if keys["v_layout"] == "rows" else ""


def _registers_of(keys: Values) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread, where a schedule does not say."""
    if keys["producer"] != "warp":
        return 0, 0
    # with 24 the producer spills
    producer, consumer = {3: (32, 160), 4: (32, 112)}.get(consumers(keys), (40, 232))
    both = keys["scales"] == "block" or keys["lengths"] == "varlen"
    if keys["transposes"] == "producer" and both:  # which also writes scales, or draws tiles
        return producer + 8 * max(2, consumers(keys)), consumer - 8
    return producer, consumer


def _p_offset(threshold: float) -> float:
    """The offset of P in e4m3 where a schedule does not say.

    A whole number: e4m3 then holds the largest P of a row exactly.
    """
    return float(max(0, math.floor(math.log2(SM90.e4m3_max) - threshold)))


def _one_slab(columns: int, dtype: str) -> bool:
    """Whether so many columns, padded, are one swizzle wide: ones must be one step from them."""
    width = DTYPES[dtype].filled_up(columns) * DTYPES[dtype].bytes
    return width == swizzle_of(width).bytes


def output_slabs(columns: int, dtype: str, out_dtype: str) -> int:
    """Return in how many slabs, each as wide as its swizzle, so many columns of O are stored."""
    width = DTYPES[dtype].filled_up(columns) * OUT_DTYPES[out_dtype].bytes
    return width // swizzle_of(width).bytes


def possible_outputs(columns: int, dtype: str, out_dtype: str = "") -> tuple[str, ...]:
    """Return how so many columns of O may be stored, by falling shared memory.

    O is of the type that goes with Q's where none is named.
    """
    halves = output_slabs(columns, dtype, out_dtype or DTYPES[dtype].out) % 2 == 0
    return tuple(output for output in OUTPUTS if output != "half" or halves)


# ---- rules --------------------------------------------------------------------------------------


def rules(keys: Values) -> Broken:
    """Yield (key, sentence) for each rule between keys that is broken."""
    if keys["inter_warpgroup"] and consumers(keys) < 2:
        yield (
            "inter_warpgroup",
            "true needs two warpgroups that take turns; use block_m = 128, or leave it out",
        )
    mask = MASKS[keys["mask"]]
    if mask.tables and keys["lengths"] == "equal":
        if ORDERS[keys["order"]].dynamic:
            yield (
                "order",
                f'"{keys["order"]}": which tiles see no key of mask "{mask.name}" the GPU alone '
                f'knows; use order = "lpt"',
            )
        if keys["num_splits"] > 1:
            yield "num_splits", f'so far splits have no mask "{mask.name}"; use 1'
    if keys["cluster"] > 1:
        if not mask.steady:
            yield (
                "cluster",
                f'2: of mask "{mask.name}" one tile of a pair may see far more keys than the '
                "other; use cluster = 1",
            )
        for key, required in (("producer", "warp"), ("order", _order(keys))):
            if keys[key] != required:
                yield "cluster", f'2 needs {key} = "{required}"; use cluster = 1'
        if mask.by_row and not keys["intra_warpgroup"]:
            fault = f"2 with a {mask.name} mask needs intra_warpgroup = true; use cluster = 1"
            yield "cluster", fault
        skipped = -(-keys["block_m"] // keys["block_n"])
        if mask.by_row and skipped > keys["stages"]:
            # the shorter tile of a pair passes them while the longer one still holds every buffer
            yield (
                "cluster",
                f"2 with a {mask.name} mask needs a stage for each of the {skipped} blocks that "
                f"the longer tile of a pair sees beyond the shorter one, and there are "
                f"{keys['stages']}; use stages = {skipped}, or cluster = 1",
            )
    if (
        keys["output"] == "half"
        and (slabs := output_slabs(keys["head_dim_v"], keys["dtype"], keys["out_dtype"])) % 2
    ):
        yield (
            "output",
            f'"half" needs O in an even number of slabs of shared memory, as with head_dim_v = '
            f'128 or 256; it has {slabs} here: use output = "own" or "reuse_v"',
        )
    if keys["sum"] == "tensor" and not _one_slab(keys["head_dim_v"], keys["dtype"]):
        yield (
            "sum",
            f'"tensor" needs V in one slab of shared memory, as with head_dim_v = 64; it is '
            f'{keys["head_dim_v"]} here: use sum = "threads"',
        )
    if keys["sum"] == "tensor" and keys["dtype"] == "bf16":
        yield (
            "sum",
            '"tensor" adds P up after it is rounded, which in bf16 puts the log-sum-exp of a row '
            'that sees two or three keys off by 1.3e-3, and 1e-3 is promised: use sum = "threads"',
        )
    if keys["maximum"] == "lazy":
        for key, only in (("rescale_threshold", 0.0), ("sum", "threads")):
            if keys[key] != only:
                yield (
                    key,
                    f'= {_toml(keys[key])} does not go with maximum = "lazy", by which a row max '
                    "is raised where P, or what threads add up of it, grows too large; use "
                    f'maximum = "online", or leave {key} out',
                )
    if ORDERS[keys["order"]].dynamic and keys["producer"] != "warp":
        static = ORDERS[keys["order"]].static
        fault = f'"{keys["order"]}" needs producer = "warp", which draws the tiles; use "{static}"'
        yield "order", fault
    if keys["lengths"] == "varlen":
        for key, only in (("producer", "warp"), ("order", "dynamic"), ("cluster", 1)):
            if keys[key] != only:
                yield (
                    key,
                    f'must be {_toml(only)} with lengths = "varlen": a producer warp draws the '
                    "tiles, whose number only the GPU knows; leave it out",
                )
        if keys["v_layout"] == "columns":
            yield (
                "v_layout",
                'must be "rows" with lengths = "varlen": V lies packed like K, a row for each key, '
                "and the kernel transposes it; leave it out",
            )
        if keys["scales"] == "block":
            yield (
                "scales",
                '= "block" is for sequences of one length so far; with lengths = "varlen" there '
                'is scales = "head", of V also one for each column',
            )
    if keys["num_splits"] > 1:
        yield from _rules_of_splits(keys)
    elif keys["fill"]:
        yield "fill", "has no meaning but with num_splits > 1; leave it out"
    if ORDERS[keys["order"]].parts:
        yield from rules_of_parts(keys)
    if keys["pack_gqa"]:
        yield from rules_of_packs(keys)
    if keys["totals"] and not keys["promote"]:
        yield "totals", "has no meaning but with promote; leave it out"
    if keys["promote_columns"]:
        yield from _rules_of_columns(keys)
    if keys["promote"] and keys["sum"] == "tensor":
        yield (
            "promote",
            f'= {keys["promote"]} does not go with sum = "tensor", whose row sums are columns of O '
            'that nothing promotes; use sum = "threads", or leave promote out',
        )
    if keys["producer"] == "none":
        for key in ("producer_registers", "consumer_registers"):
            if keys[key]:
                yield (
                    key,
                    'has no meaning with producer = "none": no warp releases registers; '
                    "leave it out",
                )
    yield from _rules_of_fp8(keys) if _fp8(keys) else _rules_of_16_bits(keys)
    yield from rules_of_scores(keys)


def _rules_of_columns(keys: Values) -> Broken:
    columns, all_columns = (
        keys["promote_columns"],
        DTYPES[keys["dtype"]].filled_up(keys["head_dim_v"]),
    )
    if keys["promote"] != 1 or keys["totals"] != "registers":
        yield (
            "promote_columns",
            f'= {columns} needs promote = 1 and totals = "registers", since each block is '
            "added to O; leave it out, or use these",
        )
    if all_columns % columns:
        yield (
            "promote_columns",
            f"= {columns} does not divide the {all_columns} columns of O into parts; leave it out",
        )


def _rules_of_splits(keys: Values) -> Broken:
    if keys["scales"] == "block":
        fault = '= "block" is not for splits so far; use scales = "head", or num_splits = 1'
        yield "scales", fault
    for key, only, why in (
        ("lengths", "equal", "fagen.attention_decode splits sequences of their own lengths"),
        ("producer", "warp", "which loads a split's first keys under the end of the one before"),
        ("output", "own", "O goes from registers to the workspace, through no shared memory"),
        ("cluster", 1, "thread blocks that share keys find them in the L2 cache"),
        ("sum", "threads", "row sums leave a thread's registers with its columns of O"),
    ):
        if keys[key] != only:
            yield (
                key,
                f"must be {_toml(only)} with num_splits > 1: {why}; leave it out, or num_splits",
            )
    if ORDERS[keys["order"]].longest_first:
        yield (
            "order",
            f'"{keys["order"]}" does not go with num_splits > 1, which are equally long but for a '
            'few; use "persistent", or leave it out',
        )


def _rules_of_16_bits(keys: Values) -> Broken:
    dtype = keys["dtype"]
    if keys["out_dtype"] != dtype:
        yield (
            "out_dtype",
            f'"{keys["out_dtype"]}" does not go with dtype = "{dtype}": O is of the type of Q, K '
            'and V where that has 16 bits; leave it out, or use dtype = "e4m3"',
        )
    for key in (*_FP8_KEYS, "promote_columns"):
        if keys[key]:
            yield key, f'has no meaning with dtype = "{dtype}"; leave it out, or use dtype = "e4m3"'


def _rules_of_fp8(keys: Values) -> Broken:
    for key in (
        ("head_dim", "head_dim_v") if keys["head_dim_v"] != keys["head_dim"] else ("head_dim",)
    ):
        if keys[key] % SM90.tma_alignment:
            yield (
                key,
                f"{keys[key]} must be a multiple of {SM90.tma_alignment} in e4m3: a row is copied "
                f"in pieces of {SM90.tma_alignment} bytes",
            )
    step = DTYPES[keys["dtype"]].wgmma_k
    if keys["block_n"] % step:
        yield (
            "block_n",
            f"{keys['block_n']} must be a multiple of {step} in e4m3: a wgmma multiplies {step} "
            "of its columns at once",
        )
    for key, only in (("sum", "threads"), ("producer", "warp"), ("cluster", 1)):
        if keys[key] != only:
            yield key, f"must be {_toml(only)} in e4m3; {_toml(keys[key])} is for 16-bit kernels"
    if keys["transposes"]:
        yield from _rules_of_transpositions(keys)
    if keys["v_row_stages"]:
        yield from _rules_of_v_rows(keys)
    if keys["scale_rows"] and keys["scales"] != "block":
        yield "scale_rows", 'has no meaning but with scales = "block"; leave it out'
    if keys["v_scales"] == "block" and keys["scales"] != "block":
        yield (
            "v_scales",
            '"block" needs scales = "block": a block of scale_rows keys shares a scale of K and '
            'one of V; leave it out for V by column, or use scales = "block"',
        )
    yield from _range_of_p(keys["p_offset"], keys["rescale_threshold"])


def _rules_of_transpositions(keys: Values) -> Broken:
    if keys["v_layout"] != "rows":
        yield "transposes", 'has no meaning but with v_layout = "rows"; leave it out'
    elif keys["transposes"] == "kernel":
        for key, only, why in (
            ("lengths", "equal", "only the GPU knows where sequences of their own lengths end"),
            ("num_splits", 1, "partial outputs have the workspace"),
        ):
            if keys[key] != only:
                yield key, f'must be {_toml(only)} with transposes = "kernel": {why}; leave it out'


def _rules_of_v_rows(keys: Values) -> Broken:
    count, stages = keys["v_row_stages"], keys["stages"]
    if keys["transposes"] != "producer":
        fault = 'has no meaning but with v_layout = "rows", which the producer transposes'
        yield "v_row_stages", f"{fault}; leave it out"
    elif count not in (1, stages):
        yield "v_row_stages", f"= {count} is neither 1 nor stages, {stages}; use one of these"
    elif count == 1 and keys["intra_warpgroup"]:
        yield (
            "v_row_stages",
            "= 1 needs intra_warpgroup = false: steps that overlap, or are skipped, want rows of V "
            "ahead of K; use that, or leave it out",
        )
    elif count == 1 and stages % 2:
        yield (
            "v_row_stages",
            f"= 1 needs an even number of stages, which tell its phase, and there are {stages}; "
            "use stages = 2, or leave it out",
        )


def _range_of_p(offset: float, threshold: float) -> Broken:
    """P is at most 2 to the sum of both, and what e4m3 cannot hold it would cut off."""
    most = math.log2(SM90.e4m3_max)
    if offset + threshold <= most:
        return
    key, fits = ("p_offset", most - threshold) if offset else ("rescale_threshold", most)
    near = (
        f"use p_offset = {math.floor(fits)}, or leave it out"
        if offset and fits >= 0
        else f"use rescale_threshold = {math.floor(most):g} at most"
    )
    yield (
        key,
        f"lets P grow to 2 to the power of {offset:g} + {threshold:g} = {offset + threshold:g} > "
        f"{most:.3f}, the log2 of {SM90.e4m3_max:g}, beyond which e4m3 cuts it off (p_offset + "
        f"rescale_threshold); {near}",
    )


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


KEYS = Keys(derived=_DERIVED, rules=rules, slug=_SLUG, former=_FORMER)
