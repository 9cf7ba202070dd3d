"""Chunks of keys that are computed apart, and the kernel that merges them: a Plan's share of both.

A sequence of n keys has ⌈n / block_n⌉ blocks, and a chunk ⌈blocks / chunks⌉ of them: equally long
ones, but for the last, by the sequence's own length alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from fagen import fold
from fagen.launch import Grid, Launch, Product
from fagen.signature import Extent
from fagen.vocab import FP32

_ROWS = (Extent("seqlen_q"), Extent("heads"), Extent("batch"))


@dataclass(frozen=True)
class Merge:
    """What templates/common/merge.j2 prints: a row's chunks merged, as fagen.fold has it."""

    threads: ClassVar[int] = 128
    vector: ClassVar[int] = 2  # fp32 numbers of a load

    chunks: int  # of a sequence, at most
    head_dim_v: int
    window: int = 16  # chunks that are folded at a time, weighed by as many lanes

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
        return Launch("merge", grid, self.threads, overlaps=True)

    def workspace(self, beside: int = 0) -> Product:
        """Return the bytes of partial outputs of all chunks, and so many more of a row.

        Beside an output there are the score that it is relative to, and its sum.
        """
        record = FP32.bytes * (self.head_dim_v + 2)
        return Product((Extent(number=record * self.chunks + beside), *_ROWS))

    @property
    def units(self) -> Product:
        """Rows of chunks."""
        return Product((*_ROWS, Extent(number=self.chunks)))


def chunk_blocks(length: int, block_n: int, chunks: int) -> int:
    """Return how many blocks of keys a chunk of a sequence of so many keys has."""
    blocks = -(-length // block_n)
    return -(-blocks // chunks)


class Folding:
    """A Plan whose kernel folds: the numbers that templates/combine/fold.j2 prints."""

    log2_e: ClassVar[float] = fold.LOG2_E
    ln_2: ClassVar[float] = fold.LN_2
    rounder: ClassVar[float] = fold.ROUND
    least_exponent: ClassVar[float] = fold.LEAST_EXPONENT
    sqrt_half_bits: ClassVar[int] = fold.SQRT_HALF_BITS
    exp2: ClassVar[tuple[float, ...]] = fold.EXP2
    log: ClassVar[tuple[float, ...]] = fold.LOG
