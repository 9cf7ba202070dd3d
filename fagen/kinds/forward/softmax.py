"""A Plan's softmax in numbers: where row maxima start, which are far, when scores are spread."""

import math
from dataclasses import dataclass
from typing import ClassVar

from fagen.arch import SM90
from fagen.kinds.forward.rules import consumers
from fagen.kinds.forward.structure import (
    begins_with_sink,
    finds_spread,
    fuses_rescaling,
    scores_by_block,
)
from fagen.kinds.scores import CURVE, CURVED_GROUP, Curve
from fagen.schedule import Values
from fagen.vocab import DTYPES, OUT_DTYPES, SCORES

_FAR, _FAR8 = 2.0**24, 2.0**16

# Of scores whose standard deviation is 8, blocks after so many keys rarely outgrow P: a sixth of
# the misses of a tile that finds no maximum first.
_SPREAD_KEYS = 512


@dataclass(frozen=True)
class Softmax:
    """How scores become P, and O its sum; a threshold is in log2 units."""

    # below which no row's reference is, so that masked scores have weight 0 beside it and never NaN
    least_reference: ClassVar[float] = -1e38
    # In a tile's first block a row has a P of 1, in one thread of four. Scores are widely spread
    # where most threads have no more than one such in two rows, and little else.
    # Rows that see few keys of the block have little either way: they agree with what others tell.
    spread_sum: ClassVar[float] = 1.25
    spread_keys: ClassVar[int] = 16  # that a warp's first row sees of the block, at least
    spread_threads: ClassVar[int] = 20  # of a warp; more
    spread_warps: ClassVar[int] = 3  # of a warpgroup, or more
    spread_seeing: ClassVar[int] = 2  # warps of it that see so many keys, or more
    # of a sum of products of e4m3, the leading one among them
    score_bits: ClassVar[int] = SM90.fp8_accumulator_bits + 1
    # the bits of an fp32 factor that are left where its products with such sums are exact
    factor_mask: ClassVar[str] = f"0x{2**32 - 2**score_bits:x}"

    # With what a row begins that has a sink: a thread's share of a sum that no P of a row's keys
    # changes where they do not count, and how much lower, in nats, its reference is for that. A
    # sink above the largest is that one, lest any scale make it infinite.
    sink_share: ClassVar[float] = 2.0**62
    sink_lead: ClassVar[float] = 64 * math.log(2)
    largest_sink: ClassVar[float] = 1e30

    any_score: bool  # products of Q and K may be as large as fp32 holds, before they are scaled
    # From which exponents of 2 on fp32 is too coarse to round a row's reference to: to whole
    # numbers, or worse. P of the largest score is 2 to the rounding's power, of which e4m3 keeps so
    # few bits that a hundredth of a whole number is too much.
    far: float
    # a power of 2 below which no scale makes products exponents that are far; 0: any may
    far_scale: float

    begins_with_sink: bool  # a row's maximum and sum do
    of_tile: bool  # what rows begin with is of their tile: they have scales, or sinks
    sum_by_tensor: bool
    lazy_max: bool  # the row max is raised only where sums get too large without
    # how large that is: what a lane's share of a row's P may add up to; 0 where what is too large
    # for P becomes its largest number, and is found there
    max_partial_sum: float
    spread_blocks: int  # after a tile's first that find their row max before P, in case
    rescale_threshold: float
    skips_rescaling: bool  # a warp votes whether any row max has changed enough
    fuses_rescaling: bool  # O is rescaled in any case, where a part of PV is added to it
    p_offset: float  # log2 units

    promote: int  # blocks after which sums move to a second accumulator; 0: never
    # or of each block so many columns of PV are added up at a time, and then to O; 0: all, in O
    part_columns: int
    curve: Curve | None  # by which tanh is, where row maxima are small
    curved_group: int  # of a thread's scores at a time: as many as registers allow
    largest_output: float  # to which O is limited, where rounding P may lead beyond V; else 0

    @property
    def no_score(self) -> float:
        """Where row maxima start; scores below it do not count.

        With any scale it makes a finite exponent but where scores may be of any size: see
        least_reference.
        """
        return -3e38 if self.any_score else -1e30

    @property
    def below(self) -> float:
        """How far a row's reference lies below its maximum where scales are by block."""
        return self.p_offset * (1 - 2.0**-24)


def softmax(values: Values) -> Softmax:
    """Work out what follows from keys."""
    dtype, out_dtype = DTYPES[values["dtype"]], OUT_DTYPES[values["out_dtype"]]
    far = _FAR8 if dtype.fp8 and not scores_by_block(values) else _FAR
    far_scale = 0.0
    if dtype.fp8 and not SCORES[values["score"]].acts:
        far_scale = 2.0 ** math.floor(math.log2(far / (SM90.e4m3_max**2 * values["head_dim"])))
    threshold, part_columns = values["rescale_threshold"], values["promote_columns"]
    fuses = fuses_rescaling(values)
    return Softmax(
        any_score=not dtype.fp8 and not dtype.narrow,
        far=far,
        far_scale=far_scale,
        begins_with_sink=begins_with_sink(values),
        of_tile=dtype.fp8 or begins_with_sink(values),
        sum_by_tensor=values["sum"] == "tensor",
        lazy_max=values["maximum"] == "lazy",
        max_partial_sum=dtype.max_partial_sum,
        spread_blocks=-(-_SPREAD_KEYS // values["block_n"]) if finds_spread(values) else 0,
        rescale_threshold=threshold,
        skips_rescaling=(values["maximum"] != "online" or dtype.fp8 or threshold > 0) and not fuses,
        fuses_rescaling=fuses,
        p_offset=values["p_offset"],
        promote=0 if part_columns else values["promote"],
        part_columns=part_columns,
        curve=CURVE if values["tanh"] == "curve" else None,
        curved_group=CURVED_GROUP if consumers(values) > 2 else values["block_n"] // 2,
        largest_output=dtype.largest if out_dtype == dtype else 0.0,
    )
