"""Scores that are hard on a softmax in blocks: one list, for every kind's proof and for tests.

All products of Q and K, and all sums of them, are numbers that fp32 holds, in whatever order they
are added up. So all that is left is the rounding of P and of the output: UNITS of the last place of
the largest V. The log-sum-exp is large where scores are, and fp32: LSE_TOLERANCE, and
LSE_ROUNDING of its size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.measure.inputs import Attends
from fagen.measure.numerics import largest
from fagen.problem import Sizes

UNITS = 2
LSE_TOLERANCE, LSE_ROUNDING = 1e-3, 2.0**-22

Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
# of a column: Q by row, K by key and how many keys there are
Column = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]

_LARGE = 2.0**8  # of Q and of K, in the column that all scores share
_LEVELS = (1_000.0, 0.0, -500.0, 900.0, -1_000.0)


@dataclass(frozen=True)
class Family:
    """Scores by a few columns of Q and K, or whole numbers at random where there is none."""

    name: str
    scale: float
    columns: tuple[Column, ...] = ()
    units: float = UNITS  # of the last place of the largest V that an output may be off by
    wide: bool = False  # fp16 has no such numbers

    def __str__(self) -> str:
        return self.name

    def scores(self, rows: int, keys: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Q (rows, head_dim) and K (keys, head_dim) in fp32; exact in bf16 and fp16."""
        if not self.columns:
            dice = torch.Generator().manual_seed(rows + keys)
            q, k = (torch.randint(-2, 3, (n, head_dim), generator=dice) for n in (rows, keys))
            return q.float(), k.float()
        q, k = torch.zeros(rows, head_dim), torch.zeros(keys, head_dim)
        for column, (of_row, of_key) in enumerate(self.columns):
            q[:, column] = of_row(torch.arange(rows))
            k[:, column] = of_key(torch.arange(keys), keys)
        return q, k


def _all(number: float) -> Callable[..., Tensor]:
    return lambda place, *_: torch.full(place.shape, number)


def _about(
    name: str, size: float, more: Callable[[Tensor, int, float], Tensor] | None = None
) -> Family:
    """Scores that are all `size`, by a column of Q and K that they share.

    `more(key, keys, scale)` is added to those of a key, before they are scaled.
    """
    scale, shared = 1.0, (_all(0.0), _all(0.0))
    if size:
        scale, shared = abs(size) / _LARGE**2, (_all(_LARGE), _all(math.copysign(_LARGE, size)))
    own = (_all(1.0), lambda key, keys: more(key, keys, scale)) if more else None
    return Family(f"{name} {size:g}", scale, (shared, own) if own else (shared,))


def _step(scale: float) -> float:
    """A power of two that makes about one natural unit of scores, and is exact beside _LARGE²."""
    return 2.0 ** max(-6, -round(math.log2(scale)))


_equal = partial(_about, "equal scores of")
_offset = partial(_about, "scores about", more=lambda key, keys, scale: key * 7 % 5 * _step(scale))
_rising = partial(
    _about, "scores that rise about", more=lambda key, keys, scale: key * 5 // keys * _step(scale)
)


def _needle(size: float, place: float) -> Family:
    """One key has as much weight as all others."""

    def own(key: Tensor, keys: int, scale: float) -> Tensor:
        height = round(math.log(keys) / scale * 2**6) / 2**6
        return height * (key == int(place * (keys - 1)))

    return _about(f"a needle at {place:g} of scores of", size, own)


def _alternating(size: float) -> Family:
    sign = (_all(_LARGE), lambda key, _: _LARGE * (1 - 2.0 * (key % 2)))
    return Family(f"scores of {size:g} and {-size:g} by turns", size / _LARGE**2, (sign,))


def _levels(scale: float) -> Family:
    """Rows become large and small on the way; neighbours differ."""

    def of_key(key: Tensor, keys: int) -> Tensor:
        return torch.tensor(_LEVELS)[key * len(_LEVELS) // keys]

    return Family(
        f"levels of up to {2_000 * scale:g}", scale, ((lambda row: 1.0 + row % 2, of_key),)
    )


def _powers(of_q: float, of_k: float) -> Family:
    """Ordinary scores of tiny or huge Q and K, by a scale that makes up for them."""
    column = (_all(of_q), lambda key, _: (1 + key * 3 % 5) * of_k)
    name, wide = f"Q of {of_q:g}, K of {of_k:g}", abs(of_q) > 2.0**15
    return Family(name, 1.1 / abs(of_q * of_k), (column,), wide=wide)


def _hidden(size: float) -> Family:
    """Half of the keys, which come first in either order by turns, are minus infinity."""

    def of_key(key: Tensor, keys: int) -> Tensor:
        return torch.where(key * 4 // keys % 2 == 0, _LARGE, -math.inf)

    column = _all(_LARGE), of_key
    return Family(f"scores of {size:g} and of minus infinity", size / _LARGE**2, (column,))


# of each kind one, for proofs of every kernel
PROVED = (
    *(_equal(3e8), _offset(1e6), _rising(1e5), _needle(1e6, 1.0), _alternating(3e8)),
    *(_levels(2.0**15), _hidden(3e8), Family("whole numbers at a scale of 1e+05", 1e5)),
)


def alone(heavy: Sequence[int]) -> Family:
    """A key that counts and no other, by 20 … 38 natural units: the output is its V.

    Of those that are `heavy` a row may see one, or one beside the next, of which every second
    counts for twice as much.
    """

    def of_key(key: Tensor, _: int) -> Tensor:
        height = torch.zeros(len(key))
        height[list(heavy)] = 20.25
        height[list(heavy[1::2])] = 40.5
        return height

    columns = ((lambda row: 1 + row % 8 / 8, of_key),)
    return Family("a key that counts alone", 1.0, columns, units=2.0**-6)


ALONE = alone((0,))  # of masks under which all rows see the first one
FAMILIES = (
    *PROVED,
    *map(_equal, (1e4, 1e6, 3e7, 1e12, -1e6, -3e8)),
    *map(_offset, (1e4, 1e5, 3e7, 3e8, -1e6)),
    *map(_rising, (1e6, 3e8)),
    *(_needle(0.0, place) for place in (0.0, 0.5, 1.0)),
    *(_needle(1e6, place) for place in (0.0, 0.5)),
    _alternating(1e6),
    *map(_levels, (1.0, 1e6)),
    _powers(2.0**-24, 1.0),
    _powers(2.0**14, 2.0**13),
    _powers(2.0**52, 2.0**50),
    _powers(-(2.0**52), 2.0**50),
    _hidden(1.0),
    *(Family(f"whole numbers at a scale of {scale:g}", scale) for scale in (1e-3, 1.0)),
)
# Those whose scores e4m3 holds, and the 14 bits of its accumulator. Q and K times FULL_BYTES have
# powers of two as descales, by which nothing is rounded.
COARSE = (
    *map(_equal, (3e8, 1e6, 1e12, -3e8)),
    *map(_alternating, (1e6, 3e8)),
    *map(_levels, (1.0, 2.0**15, 1e6)),
    _needle(0.0, 0.5),
    *(Family(f"whole numbers at a scale of {scale:g}", scale) for scale in (1e-3, 1.0, 1e5)),
)
FULL_BYTES = SM90.e4m3_max / _LARGE
# one query over many keys, and rows of several tiles
SIZES = Sizes(1, 2, 1, 1, 3_000), Sizes(1, 4, 2, 130, 1_500)
SMALL_SIZES = (Sizes(1, 2, 1, 3, 300),)  # for the simulator


@dataclass(frozen=True)
class Errors:
    """The largest of one family at one size against fp64, and what they may be; NaN: no number."""

    family: Family
    sizes: Sizes
    error: float
    allowed: float
    lse_error: float
    lse_allowed: float

    @property
    def share(self) -> float:
        """The larger share of what is allowed; infinite of what is no number."""
        shares = self.error / self.allowed, self.lse_error / self.lse_allowed
        return max(math.inf if math.isnan(share) else share for share in shares)

    def __str__(self) -> str:
        return (
            f"{self.family}: {self.sizes}: error {self.error:.2e} of {self.allowed:.2e}, "
            f"log-sum-exp {self.lse_error:.1e} of {self.lse_allowed:.1e}"
        )


def made(
    family: Family,
    sizes: Sizes,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, float]:
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) of N(0, 1), and the scale."""
    dice = torch.Generator().manual_seed(sizes.seqlen_k)
    shape = (sizes.batch, sizes.seqlen_k, sizes.kv_heads, head_dim_v)
    v = torch.randn(shape, generator=dice).to(device, dtype)
    of_q, of_k = family.scores(sizes.seqlen_q, sizes.seqlen_k, head_dim)
    q, k = (
        x.to(device, dtype)[None, :, None].expand(sizes.batch, -1, heads, -1).contiguous()
        for x, heads in ((of_q, sizes.heads), (of_k, sizes.kv_heads))
    )
    return q, k, v, family.scale


def errors(
    plan: Attends,
    kernel: Kernel,
    exact: Kernel,
    sizes: Iterable[Sizes],
    families: Iterable[Family] = PROVED,
    device: torch.device | str = "cpu",
) -> Iterator[Errors]:
    """Run a Plan's kernel, and what is exact, on each family at each size."""
    dtype = getattr(torch, plan.dtype.torch)
    for size in sizes:
        for family in families:
            if family.wide and plan.dtype.narrow:
                continue
            q, k, v, scale = made(family, size, plan.head_dim, plan.head_dim_v, dtype, device)
            yield _errors(family, size, v, *kernel(q, k, v, scale), *exact(q, k, v, scale))


def worst(errors: Iterable[Errors]) -> list[Errors]:
    """Return of each size what came nearest to its bound."""
    by_size: dict[Sizes, Errors] = {}
    for error in errors:
        by_size[error.sizes] = max(error, by_size.get(error.sizes, error), key=lambda x: x.share)
    return list(by_size.values())


def _errors(
    family: Family,
    sizes: Sizes,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    exact: Tensor,
    log_sum: Tensor,
) -> Errors:
    none = log_sum == -math.inf
    error = largest(out.double() - exact)
    if bool(out.transpose(1, 2)[none].any() or (lse[none] != -math.inf).any()):
        error = math.nan  # where no key is seen nothing else will do
    size = log_sum.abs().masked_fill(none, 0)
    off = (lse.double() - log_sum).masked_fill(none, 0)
    share = largest(off / (LSE_TOLERANCE + LSE_ROUNDING * size))
    allowed = family.units * torch.finfo(v.dtype).eps * largest(v)
    return Errors(family, sizes, error, allowed, share * LSE_TOLERANCE, LSE_TOLERANCE)
