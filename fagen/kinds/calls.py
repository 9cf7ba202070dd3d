"""What calls of attention have in common: how tensors lie, log-sum-exps, lengths, the scale."""

from dataclasses import dataclass, replace
from typing import Any

from fagen.expr.tree import Table
from fagen.kinds.scores import scalars as of_score
from fagen.scores import Score
from fagen.signature import Dim, Extent, Multiple, Scalar, Size, Tensor
from fagen.vocab import FP32, INT32, Dtype, Mask

# With it, and log2 e, the number at which row maxima start still has a product that is finite.
MOST_SCALE = 1e8
# A tensor map goes back by 2^30 rows, in strides below 2^34 elements.
MOST_PACKED_STRIDE = 1 << 32

BATCH = Dim(Extent("batch"), "batch")
SCALE = Scalar("scale", "float", "of q kᵀ before the softmax", positive=True, most=MOST_SCALE)
GROUPED = (Multiple("heads", "kv_heads"),)
SIZES = tuple(map(Size, ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")))
PAGED_SIZES = *SIZES[:-1], *map(Size, ("pages", "page_size", "entries"))


def scalars(mask: Mask, score: Score) -> tuple[Scalar, ...]:
    """Return the numbers of a call: the scale, and those that mask and score are given."""
    given = (
        Scalar(
            one.name, "int", f"of the mask {mask.name}", least=int(one.least), most=int(one.most)
        )
        for one in mask.parameters
    )
    return SCALE, *given, *of_score(score)


def form(*words: str, of: tuple[Mask | Score, ...], sink: bool = False) -> str:
    """Return what a struct is called after: what mask or score are given, and sinks."""
    named = (word for one in of if one.given for word in one.name.split("_"))
    return " ".join(filter(None, (*words, *named, "sink" * sink)))


@dataclass(frozen=True)
class Layout:
    """How tensors of so many bits lie: (B, S, H, D), or, of varlen sequences, (total, H, D)."""

    dtype: Dtype
    varlen: bool = False

    def queries(self, name: str, columns: int, note: str = "", **more: Any) -> Tensor:
        """Return a tensor of a row for each query and head."""
        return self._tensor(name, "q", "heads", columns, note, more)

    def keys(self, name: str, columns: int, note: str = "", **more: Any) -> Tensor:
        """Return a tensor of a row for each key and KV head."""
        return self._tensor(name, "k", "kv_heads", columns, note, more)

    def _tensor(
        self, name: str, side: str, heads: str, columns: int, note: str, more: dict[str, Any]
    ) -> Tensor:
        rows = Dim(Extent(self._rows(side)), "seq")
        dims = (*self._batch, rows, Dim(Extent(heads), "head"), Dim(Extent(number=columns)))
        most = MOST_PACKED_STRIDE if self.varlen else 0
        return replace(Tensor(name, dims, self.dtype, note, max_stride=most), **more)

    def pages(self, name: str, columns: int, note: str = "") -> Tensor:
        """Return a tensor of pages, with a row for each of its keys and KV heads."""
        keys = self.keys(name, columns, note)
        first = Dim(Extent("pages"), "page"), Dim(Extent("page_size"), "seq")
        return replace(keys, dims=(*first, *keys.dims[2:]))

    def numbers(self, name: str, note: str, **more: Any) -> Tensor:
        """Return a tensor of an fp32 number for each head and query."""
        dims = (*self._batch, Dim(Extent("heads"), "head"), Dim(Extent(self._rows("q"))))
        return Tensor(name, dims, FP32, note, aligned=False, **more)

    def lse(self) -> Tensor:
        """Return the log-sum-exps that a call finds."""
        note = "log-sum-exp, natural logarithm; minus infinity in a row that sees no key"
        return self.numbers("lse", note, access="out", omittable=True)

    def tables(self, mask: Mask) -> tuple[Tensor, ...]:
        """Return the tensors that a mask is given: a number of each sequence, or of each query."""
        return tuple(self._table(table, mask.name) for table in mask.tables)

    def _table(self, table: Table, mask: str) -> Tensor:
        note = f"of the mask {mask}: {table.name} of each {{}}"
        if table.over == ("batch",):
            batch = Extent("offsets", plus=-1) if self.varlen else Extent("batch")
            return lengths(table.name, batch, note.format("sequence"))
        dims = (*self._batch, Dim(Extent(self._rows("q"))))
        return Tensor(table.name, dims, INT32, note.format("query"), aligned=False)

    def offsets(self, more_of_q: str = "", more_of_used: str = "") -> tuple[Tensor, ...]:
        """Return where varlen sequences begin, and how many keys count; () of equal lengths.

        What is given is said of them too.
        """
        if not self.varlen:
            return ()
        begins = (
            "the row of {} at which each sequence begins, and the end of the last; "
            "offsets = batch + 1"
        )
        used = "how many of its keys each sequence sees, the first ones; null: all"
        return (
            lengths("cu_seqlens_q", Extent("offsets"), begins.format("q") + more_of_q),
            lengths("cu_seqlens_k", Extent("offsets"), begins.format("k and v")),
            lengths("seqused_k", Extent("offsets", plus=-1), used + more_of_used, optional=True),
        )

    def tiles(self, side: str, heads: str, rows: int, cluster: int = 1) -> tuple[Extent, ...]:
        """Return how many tiles of so many rows of queries or keys a call has; of varlen at most.

        There each offset may begin one, since the rows around all sequences are some too.
        """
        if self.varlen:
            blocks = Extent(self._rows(side), per=rows * cluster, more="offsets")
            return blocks, Extent(heads), *((Extent(number=cluster),) if cluster > 1 else ())
        blocks = Extent(self._rows(side), per=rows * cluster, times=cluster)
        return blocks, Extent(heads), Extent("batch")

    def _rows(self, side: str) -> str:
        return f"{'total' if self.varlen else 'seqlen'}_{side}"

    @property
    def _batch(self) -> tuple[Dim, ...]:
        return () if self.varlen else (BATCH,)


def lengths(name: str, extent: Extent, note: str, *, optional: bool = False) -> Tensor:
    """Return a tensor of lengths or offsets."""
    return Tensor(name, (Dim(extent),), INT32, note, optional=optional, aligned=False)
