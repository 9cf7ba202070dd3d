"""Read the shapes of a space: sizes of calls, and how much each counts."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from fagen.problem import HIDDEN, TOKENS, Lengths, Sizes, VarlenSizes, VarlenTotals
from fagen.schedule.faults import Fault

SEQLENS = (512, 1_024, 2_048, 4_096, 8_192, 16_384)
MAX_SIZE = 1 << 20  # of a batch, of heads, of a sequence, of all sequences of a varlen shape
MAX_SEQUENCES = 16_384  # of a varlen shape
DRAWN_TOKENS = 4 * TOKENS  # of lengths that are drawn, where nothing else is said
MAX_DRAWN = 16 * MAX_SEQUENCES  # sequences whose lengths are drawn, of all shapes of a space


class Strict(BaseModel):
    """A table that has its keys and no others, of their types."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(Strict):
    """Sizes in a space file, and how much they count; what is left out makes them standard ones."""

    seqlen: int = Field(ge=1, le=MAX_SIZE)
    seqlen_k: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    batch: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    kv_heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    weight: float = Field(default=1.0, gt=0)

    def sizes(self, head_dim: int) -> Sizes:
        """Fill in what was left out: 16,384 tokens in all, a hidden size of 2048."""
        heads, kv_heads = heads_of(self, head_dim)
        return Sizes(
            batch=self.batch or max(1, TOKENS // self.seqlen),
            heads=heads,
            kv_heads=kv_heads,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen_k or self.seqlen,
        )


class Drawn(Strict):
    """Lengths as likely from 16 to 32 as from 32 to 64: the same ones each time."""

    least: int = Field(alias="from", ge=1, le=MAX_SIZE)
    most: int = Field(alias="to", ge=1, le=MAX_SIZE)


_Length = Annotated[int, Field(ge=1, le=MAX_SIZE)]
_Listed = Annotated[list[_Length], Field(min_length=1, max_length=MAX_SEQUENCES)]
LISTED, DRAWN = "listed", "drawn"  # where a fault lies pydantic says by these too
_Lengths = Annotated[
    Annotated[_Listed, Tag(LISTED)] | Annotated[Drawn, Tag(DRAWN)],
    Discriminator(
        lambda value: {list: LISTED, dict: DRAWN}.get(type(value)),
        custom_error_type="lengths",
        custom_error_message="must be a list of lengths, or { from = 16, to = 16384 }",
    ),
]


class VarlenShape(Strict):
    """Varlen sequences in a space file: `seqlen` of one length, or `seqlens` of their own.

    Or `tokens` in a `batch`, of which nothing more is known than the `longest`: as recorded.
    """

    seqlen: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    seqlen_k: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    seqlens: _Lengths | None = None
    seqlens_k: _Listed | None = None
    batch: int | None = Field(default=None, ge=1, le=MAX_SEQUENCES)
    tokens: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    tokens_k: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    longest: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    longest_k: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    kv_heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    weight: float = Field(default=1.0, gt=0)

    def sizes(self, head_dim: int) -> VarlenSizes:
        """Fill in what was left out: 16,384 tokens in all, or 65,536 of lengths that are drawn."""
        return VarlenSizes.of(self.each(), *heads_of(self, head_dim))

    @property
    def totals(self) -> bool:
        """Whether no more is known than how many sequences and tokens there are."""
        return self.seqlen is None and self.seqlens is None

    def each(self) -> Lengths:
        """The lengths of each sequence."""
        if isinstance(self.seqlens, Drawn):
            return tuple((length, length) for length in self._drawn(self.seqlens))
        if self.seqlens:
            return tuple(zip(self.seqlens, self.seqlens_k or self.seqlens, strict=True))
        if self.seqlen is None:
            assert self.batch
            queries, keys = self._totals()
            tokens, longest = zip(queries, keys, strict=True)
            return VarlenTotals(self.batch, 1, 1, *longest, *tokens).sequences
        return ((self.seqlen, self.seqlen_k or self.seqlen),) * self.sums()[0]

    def sums(self) -> tuple[int, int, int]:
        """How many sequences, queries and keys there are."""
        if self.seqlen is not None:
            batch = self.batch or max(1, TOKENS // self.seqlen)
            return batch, batch * self.seqlen, batch * (self.seqlen_k or self.seqlen)
        pairs = self.each()
        return len(pairs), sum(q for q, _ in pairs), sum(k for _, k in pairs)

    def _totals(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The tokens and the longest sequence, of queries and of keys; where none is said, even."""
        assert self.batch and self.tokens
        queries = self.tokens, self.longest or -(-self.tokens // self.batch)
        if self.tokens_k is None:
            return queries, (self.tokens, self.longest_k or queries[1])
        return queries, (self.tokens_k, self.longest_k or -(-self.tokens_k // self.batch))

    def _drawn(self, lengths: Drawn) -> list[int]:
        """So many lengths, or as many as there are tokens for: of the last what is left."""
        dice = random.Random(0)
        ends = math.log(lengths.least), math.log(lengths.most)
        left = math.inf if self.batch else self.tokens or DRAWN_TOKENS
        numbers: list[int] = []
        while left > 0 and len(numbers) < (self.batch or MAX_SEQUENCES + 1):
            numbers.append(int(min(left, round(math.exp(dice.uniform(*ends))))))
            left -= numbers[-1]
        return numbers

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what does not go together, by key."""
        drawn = isinstance(self.seqlens, Drawn)
        listed = bool(self.seqlens) and not drawn
        totals = self.totals
        if totals and None in (self.batch, self.tokens):
            yield "seqlen", "is missing, or seqlens, or tokens and batch"
            return
        if totals:
            yield from self._total_faults()
        for key in () if totals else ("tokens_k", "longest", "longest_k"):
            if getattr(self, key) is not None:
                yield key, "goes with tokens and batch, without seqlen or seqlens"
        if self.seqlen is not None and self.seqlens is not None:
            yield "seqlens", "goes without seqlen: of one length, or of lengths of their own"
            return
        for key, other in (("seqlen_k", "seqlen"), ("seqlens_k", "a list of seqlens")):
            companion = self.seqlen is not None if key == "seqlen_k" else listed
            if getattr(self, key) is not None and not companion:
                yield key, f"goes with {other}"
        if self.batch is not None and listed:
            yield "batch", "goes without a list of seqlens, which says how many there are"
        if self.tokens is not None and not totals and (not drawn or self.batch is not None):
            yield "tokens", "goes with lengths that are drawn, without batch, or with batch alone"
        if isinstance(self.seqlens, Drawn) and self.seqlens.most < self.seqlens.least:
            yield "seqlens", f"is a range from {self.seqlens.least} down to {self.seqlens.most}"
        if listed and self.seqlens_k is not None:
            assert isinstance(self.seqlens, list)
            if len(self.seqlens_k) != len(self.seqlens):
                counts = f"{len(self.seqlens_k)} lengths, and seqlens {len(self.seqlens)}"
                yield "seqlens_k", f"has {counts}: one for each sequence"

    def _total_faults(self) -> Iterator[tuple[str, str]]:
        """Yield which side has no such lengths, each of one token at least."""
        assert self.batch
        for side, (tokens, longest) in zip(("", "_k"), self._totals(), strict=True):
            least, most = -(-tokens // self.batch), tokens - self.batch + 1
            if tokens < self.batch:
                if getattr(self, f"tokens{side}"):  # else they are those of queries
                    why = f"= {tokens} leaves some of batch = {self.batch} without any"
                    yield f"tokens{side}", why
            elif getattr(self, f"longest{side}") and not least <= longest <= most:
                why = f"of {tokens} tokens in {self.batch} sequences it is {least} … {most}"
                yield f"longest{side}", f"= {longest}: {why}"


# Sequences of one length, beside which the dense kernel may be seen; mixed ones; very many tiny.
VARLEN: tuple[dict[str, Any], ...] = (
    {"seqlen": 4_096},
    {"seqlens": {"from": 16, "to": 16_384}},
    {"seqlens": {"from": 1, "to": 64}, "batch": 1_024},
)


def heads_of(shape: Shape | VarlenShape, head_dim: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values; where none are said, those of hidden size 2048."""
    heads = shape.heads or max(1, HIDDEN // head_dim)
    return heads, shape.kv_heads or heads


def varlen_faults(shapes: Sequence[VarlenShape]) -> Iterator[Fault]:
    """Yield what is wrong with varlen shapes whose keys are right one by one."""
    drawn = 0
    for number, shape in enumerate(shapes):
        place = ("shapes", str(number))
        if wrong := [*shape.faults()]:
            yield from (((*place, key), why) for key, why in wrong)
            continue
        if shape.totals:  # which have been judged, and may be of very many sequences
            continue
        if isinstance(shape.seqlens, Drawn):
            drawn += shape.batch or 0
            if drawn > MAX_DRAWN:
                yield place, f"draws more lengths: all shapes together {MAX_DRAWN:,} at most"
                return
        count, queries, keys = shape.sums()
        drawn += count if isinstance(shape.seqlens, Drawn) and not shape.batch else 0
        if count > MAX_SEQUENCES:
            yield place, f"has {count:,} sequences; {MAX_SEQUENCES:,} at most"
        for what, total in (("queries", queries), ("keys", keys)):
            if total > MAX_SIZE:
                yield place, f"has {total:,} {what} in all; {MAX_SIZE:,} at most"
                break


def missing_sizes(shapes: Any, keys: Sequence[str]) -> Iterator[Fault]:
    """Yield which of these keys the shapes of a file do not say."""
    for number, shape in enumerate(shapes if isinstance(shapes, list) else ()):
        for key in keys if isinstance(shape, dict) else ():
            if key not in shape:
                yield ("shapes", str(number), key), "is missing"
