"""How partial outputs are combined: the definition, its numbers, the kernel, and it all in torch.

They are combined in the order of their splits.

A split is (o, lse): its output, normalised by its own sum, and its log-sum-exp in natural
logarithm. Beginning with m = -inf, s = 0, acc = 0, each split in turn does

    d = lse - m                       how far it lies above the largest LSE so far
    w = exp(-|d|)                     as below
    old, own = (w, 1) if d > 0 else (1, w);   (1, 0) where lse = -inf
    s = s · old + own
    acc = acc · old + o · own         o counts as 0 where own = 0: it may hold anything
    m = max(m, lse)                   the other one where one is not a number

and after the last one

    out = acc · (1 / s), rounded once more to its dtype;   0 where s = 0
    lse = m + ln(s);   -inf where s = 0

Kernels that combine splits of their own keep an LSE in two parts, since fp32 rounds that of large
scores: the score m that P is relative to, before it is scaled, and the sum of P, s. A split is
(o, m, s), o a sum of P V that is not normalised. They are combined likewise but for

    d = (its m - the largest m so far) · scale
    s = s · old + its s · own

and lse = m · scale + ln(s) at the end. Where a split saw no key m is -inf, and o a number or NaN.

A sink, one more logit of a row without a value, is a split of that LSE whose o is 0, behind all
others: s = s · old + own, acc = acc · old, m = max(m, sink), where of splits in two parts m is
m · scale before.

All of it is fp32, each operation rounded to nearest by itself: no fused multiply-add, no
approximation of the hardware, no flushed subnormals. So the bits of out and lse depend on the
splits and their order alone: not on threads, tiles or batch, not on whether a kernel reads the
partials from memory or combines them as it makes them, not on a GPU or a CPU. One of old and own is
exactly 1, so one split comes out as it went in, and s lies in 1 … the number of splits. A split
without keys, lse = -inf, changes nothing; nor does one that lies 86 below, whose weight is 0.
No +inf is made of finite numbers: where nothing was seen the LSE is -inf. An LSE that is not a
number makes the row's output and LSE so; +inf takes all weight.

exp(-a), a >= 0:

    x = a · -LOG2_E;   0 if x < LEAST_EXPONENT
    y = x + ROUND;  n = y - ROUND;  f = x - n           n is the nearest whole number
    p = EXP2[-1];  p = p · f + c for the other c of EXP2, backwards;  p = p · f + 1
    p · 2^n                                              exact: a product of normal numbers

ln(s), s >= 1:

    e = (bits(s) - SQRT_HALF_BITS) >> 23                 s · 2^-e in √½ … √2
    t = s · 2^-e - 1                                     both exact
    q = LOG[-1];  q = q · t + c for the other c of LOG, backwards
    e · LN_2 + (t + (t · t) · q)

Both are within 1.5 units in the last place.

A sequence of n keys has ⌈n / block_n⌉ blocks, and a split ⌈blocks / splits⌉ of them: equally long
ones, but for the last, by the sequence's own length alone.

On a CPU torch has the bits of a GPU, since each operation is rounded by itself. It is imported by
the functions that compute.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fagen.arch import SM90
from fagen.launch import Grid, Launch, Product
from fagen.signature import Extent
from fagen.vocab import FP32

if TYPE_CHECKING:
    from torch import Tensor


def fp32(number: float) -> float:
    """The fp32 number nearest to this one."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


LOG2_E = fp32(1.4426950408889634)
LN_2 = fp32(0.6931471805599453)
ROUND = 1.5 * 2**23  # what is added to it has no fraction
LEAST_EXPONENT = -125.0  # so that p · 2^n is no subnormal number
SQRT_HALF_BITS = 0x3F3504F3

# (2^f - 1) / f for |f| <= 1/2, and (ln(1 + t) - t) / t² for 1 + t in √½ … √2: fitted to the least
# relative error, 2e-9 and 3e-8 before they were rounded to fp32
EXP2 = tuple(
    map(
        fp32,
        (0.69314718, 0.24022648, 0.055503324, 0.0096184369, 0.0013398875, 0.0001535336),
    )
)
LOG = tuple(
    map(
        fp32,
        (
            *(-0.49999982, 0.33333933, -0.25002584, 0.19963476),
            *(-0.16551794, 0.148837, -0.14426842, 0.089794345),
        ),
    )
)

# ---- kernels ------------------------------------------------------------------------------------

_ROWS = (Extent("seqlen_q"), Extent("heads"), Extent("batch"))


@dataclass(frozen=True)
class Combination:
    """What templates/attention/combine prints: a row's splits combined, as it is defined here."""

    threads: ClassVar[int] = 128
    vector: ClassVar[int] = 2  # fp32 numbers of a load

    num_splits: int  # of a sequence, at most
    head_dim_v: int
    window: int = 16  # splits that are combined at a time
    resumes: bool = False  # thread blocks have combined some, from a row's first on
    descaled: bool = False  # scores and columns of V have factors, and means were taken off
    several: bool = False  # of a row that has one split it is the output already; a warp weighs

    @property
    def lanes(self) -> int:
        """How many share a row of partial outputs."""
        vectors = -(-self.head_dim_v // self.vector)
        return max(self.window, 1 << (vectors - 1).bit_length())

    @property
    def ragged(self) -> bool:
        """Whether some lanes are beyond a row's end."""
        return self.lanes * self.vector > self.head_dim_v

    @property
    def launch(self) -> Launch:
        """The kernel, which may begin under the end of the one before it."""
        grid = Grid(Product(_ROWS, per=self.threads // self.lanes))
        return Launch(
            "combine_partial_outputs",
            grid,
            self.threads,
            overlaps=True,
            threads_as="combine_threads",
        )

    def workspace(self, beside: int = 0) -> Product:
        """Return the bytes of partial outputs of all splits, and so many more of a row.

        Beside an output there are the score that it is relative to, and its sum.
        """
        record = FP32.bytes * (self.head_dim_v + 2)
        return Product((Extent(number=record * self.num_splits + beside), *_ROWS))

    @property
    def units(self) -> Product:
        """Rows of splits."""
        return Product((*_ROWS, Extent(number=self.num_splits)))


def split_blocks(length: int, block_n: int, num_splits: int) -> int:
    """Return how many blocks of keys a split of a sequence of so many keys has."""
    blocks = -(-length // block_n)
    return -(-blocks // num_splits)


@dataclass(frozen=True)
class Filling:
    """How many splits fill the SMs best; costs are in sixteenths of what a block of keys takes."""

    sm_count: ClassVar[int] = SM90.sm_count
    most_keys: ClassVar[int] = 131_072  # of a split, whose P V one accumulator adds up
    unit: ClassVar[int] = 16  # of the costs

    unit_cost: int  # of a tile of a split, beside its blocks
    combine_cost: int  # of its partial output

    @classmethod
    def of(cls, head_dim_v: int) -> "Filling":
        """Return what splits cost of a kernel of so many columns of V, as they were measured."""
        return cls(20 + head_dim_v // 6, head_dim_v // 4)

    def cost(self, blocks: int, units: int) -> int:
        """Return what so many units cost, tiles of splits of so many blocks."""
        of_blocks = -(-units // self.sm_count) * (self.unit * blocks + self.unit_cost)
        return of_blocks + units * self.combine_cost // self.sm_count

    def splits(self, length: int, block_n: int, ends: Sequence[int], heads: int, most: int) -> int:
        """Return how many a call has, `most` at most, as launcher/fill.cuh does.

        Of `length` keys and so many heads in all; a head's tiles see blocks up to these ends.
        """
        least = max(1, -(-length // self.most_keys))

        def of_splits(splits: int) -> int:
            blocks = max(1, split_blocks(length, block_n, splits))
            return self.cost(blocks, heads * sum(-(-end // blocks) for end in ends))

        return min(range(min(least, most), most + 1), key=of_splits)


class Combining:
    """A Plan whose kernel combines: the numbers that its weights are made with."""

    log2_e: ClassVar[float] = LOG2_E
    ln_2: ClassVar[float] = LN_2
    rounder: ClassVar[float] = ROUND
    least_exponent: ClassVar[float] = LEAST_EXPONENT
    sqrt_half_bits: ClassVar[int] = SQRT_HALF_BITS
    exp2: ClassVar[tuple[float, ...]] = EXP2
    log: ClassVar[tuple[float, ...]] = LOG


# ---- in torch -----------------------------------------------------------------------------------

_FRACTION_BITS = 23  # of fp32
_BIAS = 127


def combined(
    splits: "Iterable[tuple[Tensor, Tensor]]", like: "Tensor", sink: "Tensor | None" = None
) -> "tuple[Tensor, Tensor]":
    """Combine (output, LSE) of each split, (…, D) and (…), in fp32; `like` is an output's shape.

    Without a split, or where none saw a key, that is 0 and minus infinity. A `sink` of each row
    follows.
    """
    import torch

    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    maximum = total.new_full(like.shape[:-1], -math.inf)
    summed = torch.zeros_like(maximum)
    for out, lse in splits:
        old, own = weights(lse, maximum)
        summed = summed * old + own
        number = out.float().masked_fill((own == 0)[..., None], 0)
        total = total * old[..., None] + number * own[..., None]
        maximum = torch.fmax(maximum, lse)
    total, summed, maximum = _with_sink(total, summed, maximum, sink)
    inverse = torch.where(summed == 0, 0, 1 / summed)
    return total * inverse[..., None], maximum + log_above(summed)


def combined_partials(
    splits: "Iterable[tuple[Tensor, Tensor, Tensor]]",
    like: "Tensor",
    scale: float,
    sink: "Tensor | None" = None,
) -> "tuple[Tensor, Tensor]":
    """Combine the splits of rows: sums of P V (…, D), the scores P is relative to, sums of P (…).

    Scores are before `scale`, a `sink` is not; like `combined` otherwise.
    """
    import torch

    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    reference = total.new_full(like.shape[:-1], -math.inf)
    summed = torch.zeros_like(reference)
    for out, score, own_sum in splits:
        own_reference = torch.where(own_sum > 0, score, -math.inf).masked_fill(
            own_sum.isnan(), math.nan
        )
        rise = (own_reference - reference) * scale
        old, own = weights(
            rise.masked_fill(own_reference == -math.inf, -math.inf), torch.zeros_like(rise)
        )
        total = total * old[..., None] + out * own[..., None]
        summed = summed * old + own_sum * own
        reference = torch.fmax(reference, own_reference)
    # of no key, even beside a V that is not finite
    total = total.masked_fill((summed == 0)[..., None], 0)
    total, summed, base = _with_sink(total, summed, reference * scale, sink)
    inverse = torch.where(summed == 0, 0, 1 / summed)
    return total * inverse[..., None], base + log_above(summed)


def _with_sink(
    total: "Tensor", summed: "Tensor", base: "Tensor", sink: "Tensor | None"
) -> "tuple[Tensor, Tensor, Tensor]":
    """Return a row's sums, and the largest LSE so far, with its sink: a split without an output."""
    import torch

    if sink is None:
        return total, summed, base
    sink = sink.float().expand_as(base)
    old, own = weights(sink, base)
    return total * old[..., None], summed * old + own, torch.fmax(base, sink)


def with_sink(log_sum: "Tensor", sink: "Tensor | None") -> "tuple[Tensor, Tensor | None]":
    """Return log-sum-exps of rows with their sinks, and the share of the keys in them.

    A row without a key is all sink, and one without a sink as it is: then there is no share.
    """
    if sink is None:
        return log_sum, None
    both = log_sum.logaddexp(sink)
    keys = (log_sum - both).exp()
    none = log_sum == -float("inf")
    return both.where(~none, sink), keys.masked_fill(none, 0)


def weights(lse: "Tensor", maximum: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return what the sum so far and a split's own output are multiplied by."""
    import torch

    difference = lse - maximum
    weight = exp_below(difference)
    none, rises = lse == -math.inf, difference > 0
    old = torch.where(rises & ~none, weight, 1)
    own = torch.where(rises, 1, weight).masked_fill(none, 0)
    return old, own


def exp_below(difference: "Tensor") -> "Tensor":
    """Return exp(-|difference|), below 2^LEAST_EXPONENT 0."""
    import torch

    x = difference.abs() * -LOG2_E
    rounded = x + ROUND
    whole = rounded - ROUND
    fraction = x - whole
    p = torch.full_like(x, EXP2[-1])
    for term in (*EXP2[-2::-1], 1.0):
        p = p * fraction + term
    scale = (rounded.view(torch.int32) + _BIAS << _FRACTION_BITS).view(torch.float32)
    return torch.where(x < LEAST_EXPONENT, 0, p * scale)


def log_above(number: "Tensor") -> "Tensor":
    """Return ln(number) of numbers that are 1 at least."""
    import torch

    exponent = number.view(torch.int32) - SQRT_HALF_BITS >> _FRACTION_BITS
    scale = (_BIAS - exponent << _FRACTION_BITS).view(torch.float32)
    t = number * scale - 1
    q = torch.full_like(t, LOG[-1])
    for term in LOG[-2::-1]:
        q = q * t + term
    return exponent.float() * LN_2 + (t + t * t * q)
