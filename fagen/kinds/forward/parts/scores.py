"""Scores: how they become P."""

from collections.abc import Iterator

from fagen.kinds.scores import elements, factor_log2, inverse_factor
from fagen.part import (
    ELEMENT,
    FLOAT,
    FLOAT4,
    INT64,
    UINT8,
    Argument,
    Array,
    Constant,
    Field,
    Part,
    Strided,
    Type,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, SCORES

_KEY_SCALES = Type("KeyScales", 16)
_SCALE_TENSOR, _COLUMN_TENSOR = Type("ScaleTensor"), Type("ColumnTensor")
_LOG2_NOTE = {False: "scale * log2(e)", True: "of elements of S, times log2(e)"}
_VOTES = 4  # warps of a warpgroup, a byte each

# by whether blocks of S have factors
_WAYS = {False: "scaled", True: "by_block"}
# by that too, and what shares a descale of V; nothing where it has none
# with one factor for all, and by dtype
_LARGEST: dict[tuple[str, bool], tuple[str, ...]] = {
    ("scaled", False): ("row_max/top.cuh",),
    ("scaled", True): ("row_max/top_by_bits.cuh",),
    ("by_block", True): (),
}
# half as many clocks of tensor cores in e4m3 as in 16 bits: each instruction beside them shows
_DESCRIBING = {False: "describe.cuh", True: "describe_by_layer.cuh"}
_TOPS = {
    (False, ""): "exponents/far.cuh.j2",
    (False, "column"): "exponents/far.cuh.j2",
    (True, "column"): "exponents/k_scales.cuh",
    (True, "block"): "exponents/key_scales.cuh",
}
_SUMS = {
    (False, ""): "sums/scaled.cuh.j2",
    (False, "column"): "sums/scaled.cuh.j2",
    (True, "column"): "sums/k_scales.cuh",
    (True, "block"): "sums/key_scales.cuh.j2",
}
# by what shares a descale of K, and whether elements become other numbers
_SCALES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("", False): ("scale/given.cuh",),
    ("", True): ("scale/given.cuh",),
    ("head", False): ("scale/head.cuh", "scale/of_tile.cuh", "scale/mean.cuh"),
    ("head", True): ("scale/products.cuh", "scale/of_tile.cuh"),
    ("block", False): ("scale/block.cuh.j2", "scale/of_tile.cuh", "scale/mean.cuh"),
    ("block", True): ("scale/block.cuh.j2", "scale/of_tile.cuh"),
}
# and where a tile's rows are of several heads, each with a descale of Q
_PACKED_SCALES = {
    ("head", True, False): ("scale/packed_head.cuh", "scale/of_tile.cuh", "scale/packed_mean.cuh"),
    ("head", True, True): ("scale/packed_products.cuh", "scale/of_tile.cuh"),
}


def scores(values: Values) -> Iterator[Part]:
    """How scores become P."""
    dtype, score = DTYPES[values["dtype"]], SCORES[values["score"]]
    yield Part(
        constants=(
            Constant(
                "softmax.no_score", "where row maxima start: finite, so that no exponent is NaN"
            ),
            *_ends_of_exponents(values),
        ),
        params=(Field("scale_log2", FLOAT, factor_log2(values), _LOG2_NOTE[score.acts]),),
    )
    yield from elements(values, "forward/scores/elements.cuh.j2")
    if values["maximum"] == "lazy" and not dtype.fp8:
        note = "of a lane's P; more updates the maximum"
        yield Part(constants=(Constant("softmax.max_partial_sum", note),))
    if values["finds_spread"]:
        yield _spread()
    if values["rescale_threshold"]:
        yield Part(constants=(Constant("softmax.rescale_threshold", "log2 units"),))
    if values["sum"] == "tensor":
        yield Part(
            constants=(
                Constant(
                    "tile.o_columns",
                    "V's, and eight of ones, whose products are the row sums of P",
                    name="output_columns",
                ),
            ),
            kernel=("forward/scores/ones.cuh",),
            shared=(Array("ones", ELEMENT, (amount("step_k", "v_slab"),)),),
        )
    else:
        yield Part(constants=(Constant("tile.o_columns", name="output_columns"),))
    if dtype.fp8:
        yield from _descales(values)
    reads = values["scales"] == "block" and not values["scales_before_qk"]
    yield Part(
        device=_device(values),
        softmax=_softmax(values),
        consumer=_consumer(values),
        scores=("forward/scores/scale/read.cuh",) if reads else (),
    )
    if values["begins_with_sink"]:
        yield _begun_with_sink(values)
    yield _TANHS[values["tanh"]]
    yield from _promotion(values)


def _device(values: Values) -> tuple[str, ...]:
    """What softmax is made of: functions of numbers, and Softmax itself."""
    names = "quad_max.cuh", "largest.cuh"
    sums: tuple[str, ...] = ()
    if values["sum"] == "threads":
        # one chain would wait for its own latency, but for several groups of keys
        chains = "one_chain.cuh" if values["parts_sums"] else "two_chains.cuh"
        sums = "sums/quad_sum.cuh", f"sums/{chains}", "sums/exponentiate.cuh"
    describing = _DESCRIBING[DTYPES[values["dtype"]].fp8]
    return (
        *("sm90/accumulators.cuh", "sm90/elements.cuh", "sm90/exp2.cuh"),
        *(f"forward/scores/{name}" for name in (*names, *sums, "softmax.cuh.j2")),
        *("sm90/wgmma.cuh", "sm90/descriptor.cuh", f"sm90/{describing}"),
        *("sm90/column_offset.cuh", "forward/scores/wgmma.cuh.j2"),
    )


def _softmax(values: Values) -> tuple[str, ...]:
    """What a thread keeps of its two rows, and how scores become P."""
    names = ["state.cuh.j2", *_exponents(values), *_sums(values)]
    fp8 = DTYPES[values["dtype"]].fp8
    if values["maximum"] == "lazy":
        names.append("lazy/guess.cuh.j2" if fp8 else "lazy/guess_and_prove.cuh")
    if values["finds_spread"]:
        names.append("lazy/spread_sums.cuh")
    if values["num_splits"] > 1:
        names.append("unrounded_with_offset.cuh" if fp8 else "unrounded.cuh")
    return tuple(f"forward/scores/{name}" for name in names)


def _exponents(values: Values) -> Iterator[str]:
    """Yield what makes scores exponents, with one factor for all or one for each block of keys."""
    way = _WAYS[values["scores_by_block"]]
    yield f"exponents/{way}.cuh.j2"
    yield from _LARGEST[way, DTYPES[values["dtype"]].fp8]
    yield _TOPS[values["scores_by_block"], values["v_scales"]]
    if values["rescale_threshold"]:
        yield f"row_max/keep_{way}.cuh"
    yield f"row_max/{way}.cuh.j2"


def _sums(values: Values) -> Iterator[str]:
    """Yield what makes exponents P, and adds it up."""
    if values["sum"] == "tensor":
        yield "sums/tensor.cuh"
        return
    yield _SUMS[values["scores_by_block"], values["v_scales"]]
    added = values["v_scales"] == "block" and values["maximum"] == "online"
    yield "sums/in_place_with_v.cuh" if added else "sums/in_place.cuh.j2"


def _consumer(values: Values) -> tuple[str, ...]:
    """What consumers do with Q, K and S."""
    fp8, overlap, lazy = (
        DTYPES[values["dtype"]].fp8,
        values["intra_warpgroup"],
        values["maximum"] == "lazy",
    )
    acts = SCORES[values["score"]].acts
    scales = _SCALES[values["scales"], acts]
    names = ["qk.cuh.j2", *_PACKED_SCALES.get((values["scales"], values["pack_gqa"], acts), scales)]
    if overlap:
        names.append("first.cuh.j2")
    if lazy and fp8:
        names.append("lazy/in_range.cuh")
    if lazy or not overlap:
        names.append(f"{values['maximum']}/alone.cuh.j2")
    if values["finds_spread"]:
        names.append("lazy/spread.cuh")
    elif overlap:
        names.append(f"{values['maximum']}/under_pv.cuh.j2")
    return tuple(f"forward/scores/{name}" for name in names)


def _ends_of_exponents(values: Values) -> Iterator[Constant]:
    dtype = DTYPES[values["dtype"]]
    if not dtype.fp8 and not dtype.narrow:
        yield Constant("softmax.least_reference", "of a row without a score: finite at any scale")
    by_block = values["scores_by_block"]
    if not by_block:
        yield Constant(
            "softmax.far", "exponents of 2 from here on are too coarse to be taken as they are"
        )
    if dtype.fp8 and not SCORES[values["score"]].acts:
        note = (
            "no smaller one makes exponents of 2^24 of products of e4m3"
            if by_block
            else "no smaller one leads there from products of e4m3"
        )
        yield Constant("softmax.far_scale", note)
    if values["p_offset"] and by_block:
        yield Constant(
            "softmax.below",
            "log2 units: P is kept this much larger, to use more of its range. "
            f"Less than {values['p_offset']}, so that an exponent that is too coarse for it stays "
            "what it is, and does not become lower by twice as much",
            name="p_offset",
        )
    elif values["p_offset"]:
        yield Constant(
            "softmax.p_offset", "log2 units: P is kept this much larger, to use more of its range"
        )


def _told_by_warps(name: str, note: str) -> Array:
    """A byte for each warp of the consumers, by which a warpgroup's warps agree."""
    warps = amount("consumers"), amount(_VOTES)
    return Array(name, UINT8, warps, row="barriers", note=note, aligned=False)


def _spread() -> Part:
    """Tiles whose first scores are widely spread find their next maxima before P."""
    return Part(
        constants=(
            Constant(
                "softmax.spread_blocks",
                "after a tile's first that find their maxima before P, if scores are widely spread",
            ),
            Constant(
                "softmax.spread_sum",
                "of a thread's P in its two rows: in so many threads of a warp less",
            ),
            Constant(
                "softmax.spread_keys", "with fewer in its rows a warp's small sums tell nothing"
            ),
            Constant("softmax.spread_threads"),
            Constant("softmax.spread_warps", "of a warpgroup, at least"),
            Constant("softmax.spread_seeing", "warps of it that see so many keys, at least"),
        ),
        shared=(_told_by_warps("votes", "of warps"),),
    )


# by whether a tile's rows are of several heads
_OF_TILE = {
    False: "forward/scores/sink/of_tile.cuh",
    True: "forward/scores/sink/of_packed_tile.cuh",
}


def _begun_with_sink(values: Values) -> Part:
    """A row's maximum and sum begin with its sink."""
    return Part(
        softmax=("forward/scores/sink/begin.cuh",),
        consumer=(_OF_TILE[values["pack_gqa"]],),
        constants=(
            Constant("softmax.sink_share", "of a row's sum that begins with its sink, a thread's"),
            Constant("softmax.sink_lead", "nats that its reference is lower for that"),
            Constant("softmax.largest_sink", "of elements of S"),
        ),
        params=(
            Field("sink_factor", FLOAT, inverse_factor(values), "from sinks to elements of S"),
        ),
    )


# by how softcap's tanh is worked out: by a curve, where small row maxima prove that it holds
_TANHS = {
    "mufu": Part(),
    "curve": Part(
        constants=(
            Constant("softmax.curve.terms", name="curve_terms"),
            Constant("softmax.curved_group", "of a thread's scores at a time"),
            Constant(
                "softmax.curve.max_sum",
                "of a lane's P by the curve; more may be beyond its end",
                name="max_curved_sum",
            ),
        ),
        params=(
            Field("curve", FLOAT, dims=(amount("curve_terms"),), note="of products, for exponents"),
            Field("curve_low", FLOAT, note="row maxima between which it holds"),
            Field("curve_high", FLOAT),
            Field("curve_first", FLOAT, note="and up to which a tile begins with it"),
        ),
        host=("forward/launcher/curve.cuh.j2",),
        device=("forward/scores/curve/exponentiate.cuh",),
        softmax=("forward/scores/curve/in_curve.cuh",),
        consumer=("forward/scores/curve/scores.cuh", "forward/steps/overlapped/curved_step.cuh.j2"),
        shared=(_told_by_warps("curved", "of warps, whether all rows are in the curve"),),
    ),
}


def _promotion(values: Values) -> Iterator[Part]:
    if values["promote_columns"]:
        yield Part(constants=(Constant("softmax.part_columns", "of PV at a time"),))
    elif values["promote"]:
        note = "blocks after which O moves to another accumulator"
        total = "shared_total.cuh" if values["totals"] == "shared" else "total.cuh"
        blocks = "blocks.cuh" if values["intra_warpgroup"] else "blocks_alone.cuh"
        texts = (f"forward/values/promote/{text}" for text in (total, blocks))
        yield Part(softmax=tuple(texts), constants=(Constant("softmax.promote", note),))
    if values["totals"] == "shared":
        fours = amount("head_dim_v_padded", per=8)
        dims = (amount("consumers"), fours, amount("warpgroup"))
        note = "4 elements of a thread at a time"
        yield Part(shared=(Array("totals", FLOAT4, dims, note=note),))


def _descales(values: Values) -> Iterator[Part]:
    """What Q, K and V are multiplied by, and what was taken off K and V."""
    by_block, v_by_block = values["scales"] == "block", values["v_scales"] == "block"
    varlen = values["lengths"] == "varlen"
    v_type = _SCALE_TENSOR if v_by_block else _COLUMN_TENSOR
    strides = ("head", "seq") if varlen else ("batch", "head", "seq")
    yield Part(
        head=("forward/scores/scale_tensors.cuh",),
        params=(
            Field("q_scale", _SCALE_TENSOR, Strided("q_descale")),
            Field("k_scale", _SCALE_TENSOR, Strided("k_descale")),
            Field("v_scale", v_type, Strided("v_descale")),
            Field("v_mean", _COLUMN_TENSOR, Strided("v_mean")),
            Field("k_mean", _COLUMN_TENSOR, Strided("k_mean")),
            Field("q_rows", pointer_to(ELEMENT, const=True), Argument("q")),
            *(Field(f"q_stride_{s}", INT64, Argument(f"q_stride_{s}")) for s in strides),
        ),
    )
    if not by_block:
        return
    note = "that share one in a block: kScaleRows and kBlockN are multiples of it"
    groups = (
        Constant("scales.group_keys", note),
        Constant("groups", value=amount("block_n", per="group_keys")),
    )
    of_keys = "forward/scores/key_scales.cuh" if v_by_block else "forward/scores/k_scales.cuh"
    yield Part(
        head=(of_keys,),
        constants=(
            Constant("scales.rows", "rows of Q, or keys, that share a scale", "scale_rows"),
            *groups,
        ),
        shared=(
            Array(
                "scales", _KEY_SCALES if v_by_block else FLOAT, (amount("stages"), amount("groups"))
            ),
        ),
    )
