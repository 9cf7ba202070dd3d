"""A Plan's softmax in numbers: where row maxima start, which are far, when scores are spread."""

import math
from typing import ClassVar

from fagen.arch import SM90
from fagen.vocab import Dtype

_FAR, _FAR8 = 2.0**24, 2.0**16


class Exponents:
    """What follows for exponents and sums from a Plan's dtype and scales."""

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

    dtype: Dtype
    head_dim: int
    scale_rows: int
    p_offset: float

    @property
    def scales_by_block(self) -> bool:
        """Whether blocks of rows of Q and K have scales of their own."""
        return self.scale_rows > 0

    @property
    def no_score(self) -> float:
        """Where row maxima start; scores below it do not count.

        With any scale it makes a finite exponent but where scores may be of any size: see
        least_reference.
        """
        return -3e38 if self.any_score else -1e30

    @property
    def any_score(self) -> bool:
        """Whether products of Q and K may be as large as fp32 holds, before they are scaled."""
        return not self.dtype.fp8 and not self.dtype.narrow

    @property
    def far(self) -> float:
        """From which exponents of 2 on fp32 is too coarse to round a row's reference to.

        To whole numbers, or worse. P of the largest score is 2 to the rounding's power, of which
        e4m3 keeps so few bits that a hundredth of a whole number is too much.
        """
        return _FAR8 if self.dtype.fp8 and not self.scales_by_block else _FAR

    @property
    def far_scale(self) -> float:
        """A power of 2 below which no scale makes products exponents that are far; 0: any may."""
        if not self.dtype.fp8:
            return 0.0
        return 2.0 ** math.floor(math.log2(self.far / (SM90.e4m3_max**2 * self.head_dim)))

    @property
    def score_bits(self) -> int:
        """Of a sum of products of e4m3, the leading one among them."""
        return SM90.fp8_accumulator_bits + 1

    @property
    def factor_mask(self) -> str:
        """The bits of an fp32 factor that are left where its products with such sums are exact."""
        return f"0x{2**32 - 2**self.score_bits:x}"

    @property
    def below(self) -> float:
        """How far a row's reference lies below its maximum where scales are by block."""
        return self.p_offset * (1 - 2.0**-24)
