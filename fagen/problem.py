"""What is computed and how large, in words of vocab: one Problem, one Sizes, FLOPs and bytes."""

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from fagen.errors import ScheduleError
from fagen.expr.words import PLAIN
from fagen.schedule import Schedule
from fagen.toml_lines import shown
from fagen.vocab import CACHES, DTYPES, FORWARD, LENGTHS, MASKS, PASSES, PEERS, Peer, yardstick

TOKENS, HIDDEN = 16_384, 2_048  # of the standard sizes: batch · seqlen, heads · head_dim


@dataclass(frozen=True, order=True)
class Problem:
    """What attention is computed, apart from sizes that any kernel takes.

    dtypes, mask and layout are words of vocab. Where something does not apply it is "" or 0; what
    is None is left open: any kernel of the others will do.
    """

    dtype: str  # of Q, K and V
    head_dim: int
    head_dim_v: int
    mask: str
    out_dtype: str | None = None
    v_layout: str | None = None  # in memory, where the dtype has several
    scale_rows: int | None = None  # that share a scale; 0 where a head or the tensor has one
    kind: str = FORWARD  # of the kernels: a word of vocab's PASSES
    deterministic: bool = False  # asked for where a kernel's sums may come in any order
    lengths: str = LENGTHS[0]  # "varlen": sequences have lengths of their own
    score: str = PLAIN  # what becomes of the scaled product
    sink: str = ""  # the dtype of sinks, where a call gives them
    cache: str = CACHES[0]  # "paged": keys and values lie in pages

    @classmethod
    def of(cls, schedule: Schedule) -> "Problem":
        """What a schedule computes.  Raises ScheduleError where that is no attention."""
        values = schedule.values()
        if missing := [name for name in _REQUIRED if name not in values]:
            raise ScheduleError(f"{schedule.slug} computes no attention: it has no {missing[0]}")
        # where a kind has no such key it does not apply
        none = {"v_layout": "", "scale_rows": 0, "deterministic": False, "lengths": LENGTHS[0]}
        none |= {"score": PLAIN, "sink": "", "cache": CACHES[0]}
        without = {"out_dtype": values["dtype"], **none}
        optional = {name: values.get(name, other) for name, other in without.items()}
        # who is no pass of its own computes attention itself
        pass_ = PASSES.get(schedule.kind)
        computed = pass_.computes or pass_.name if pass_ else FORWARD
        return cls(**{name: values[name] for name in _REQUIRED}, **optional, kind=computed)

    @classmethod
    def searched(cls, schedule: Schedule) -> "Problem":
        """What a schedule computes, to a search: which knows whose kernels are meant.

        Raises as `of` does.
        """
        return replace(cls.of(schedule), kind=schedule.kind)

    def opened(self) -> "Problem":
        """Return it with all left open in which kernels of one benchmark cell may differ."""
        return replace(self, out_dtype=None, v_layout=None, scale_rows=None, deterministic=False)

    def answered_by(self, other: "Problem") -> bool:
        """Whether a kernel of the `other` computes this; what is left open here it may say."""
        left = {key: value for key, value in vars(other).items() if getattr(self, key) is None}
        return replace(self, **left) == other

    @property
    def variant(self) -> dict[str, Any]:
        """What schedules say of its scores and cache, by keys; nothing where they are as usual."""
        said = {"score": self.score, "sink": self.sink, "cache": self.cache}
        return {key: value for key, value in said.items() if value not in (PLAIN, "", CACHES[0])}

    @property
    def variant_words(self) -> tuple[str, ...]:
        """The same, as slugs say it."""
        return tuple(f"{'sink' * (key == 'sink')}{word}" for key, word in self.variant.items())

    @property
    def head_dims(self) -> str:
        """'128', or '192/128' where V has its own."""
        d, d_v = self.head_dim, self.head_dim_v
        return f"{d}" if d == d_v else f"{d}/{d_v}"

    @property
    def name(self) -> str:
        """As slugs say it: dtype, head dims and mask; of gradients, how their slugs begin too.

        Where it has to be deterministic that stands at its end.
        """
        v = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        words = [PASSES[self.kind].prefix, self.dtype, f"d{self.head_dim}{v}", self.mask]
        words += self.variant_words
        words += [self.lengths] * self.varlen
        return "_".join(filter(None, words)) + (DETERMINISTIC if self.deterministic else "")

    @property
    def peer(self) -> Peer:
        """Beside whom a search times its kernels."""
        peer = PEERS[self.lengths]
        return replace(peer, title=yardstick(peer.title, self.dtype))

    @property
    def varlen(self) -> bool:
        """Whether sequences have lengths of their own, and lie one after another."""
        return self.lengths != LENGTHS[0]

    def __str__(self) -> str:
        columns = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            columns += f" and {self.head_dim_v} (V)"
        words = [_torchs(self.dtype), f"head_dim {columns}", self.mask]
        if self.score != PLAIN:
            words.append(f"score {self.score}")
        if self.sink:
            words.append(f"sinks in {_torchs(self.sink)}")
        if self.cache != CACHES[0]:
            words.append("keys in pages")
        if self.v_layout:
            words.append("V row-major" if self.v_layout == "rows" else "V transposed")
        if self.scale_rows is not None and self.dtype in DTYPES and DTYPES[self.dtype].fp8:
            blocks = f"block of {self.scale_rows} rows" if self.scale_rows else "head or tensor"
            words.append(f"scales by {blocks}")
        if self.out_dtype and self.out_dtype != self.dtype:
            words.append(f"out in {_torchs(self.out_dtype)}")
        if PASSES[self.kind].gradients:
            words.append(f"{self.kind} pass")
        if self.deterministic:
            words.append("deterministic")
        words += [self.lengths] * self.varlen
        return ", ".join(words)


DETERMINISTIC = "_det"  # at the end of a problem's name
_REQUIRED = ("dtype", "head_dim", "head_dim_v", "mask")


def _torchs(dtype: str) -> str:
    """torch's word for a dtype; one that fagen has none for is torch's already."""
    return DTYPES[dtype].torch if dtype in DTYPES else dtype


def solves(schedule: Schedule, problem: Problem) -> bool:
    """Whether a schedule computes that; what the problem leaves open may be anything.

    A problem of a kind that computes a pass in its own way is for this kind's schedules alone.
    """
    own = schedule.kind == problem.kind
    return problem.answered_by((Problem.searched if own else Problem.of)(schedule))


# ---- how large ----------------------------------------------------------------------------------


Lengths = tuple[tuple[int, int], ...]  # of sequences: queries and keys of each


@dataclass(frozen=True, order=True)
class Sizes:
    """The sizes that a kernel takes at run time; `heads` is a multiple of `kv_heads`."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int

    varlen = False  # whether sequences lie one after another, each of its own length

    @property
    def sequences(self) -> Lengths:
        """The queries and the keys of each sequence."""
        return ((self.seqlen_q, self.seqlen_k),) * self.batch

    @property
    def total_q(self) -> int:
        """The queries of all sequences."""
        return self.batch * self.seqlen_q

    @property
    def total_k(self) -> int:
        """The keys of all sequences."""
        return self.batch * self.seqlen_k

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys."""
        return self.seqlen_q == self.seqlen_k

    @property
    def all_heads(self) -> str:
        """'16', or '32/8' where K and V have fewer."""
        return f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"

    @property
    def lengths(self) -> str:
        """'4096', or '100/300' of queries and keys where they differ."""
        return f"{self.seqlen_q}" if self.square else f"{self.seqlen_q}/{self.seqlen_k}"

    def __str__(self) -> str:
        return f"B={self.batch} H={self.all_heads} Sq={self.seqlen_q} Sk={self.seqlen_k}"


@dataclass(frozen=True, order=True)
class VarlenSizes(Sizes):
    """Sizes of varlen sequences, whose lengths are `each`; the others are the most of these."""

    each: Lengths

    varlen = True

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], heads: int, kv_heads: int) -> "VarlenSizes":
        """The sizes of these sequences, in their order."""
        queries, keys = zip(*pairs, strict=True)
        return cls(len(pairs), heads, kv_heads, max(queries), max(keys), tuple(pairs))

    @property
    def sequences(self) -> Lengths:
        """The queries and the keys of each sequence."""
        return self.each

    @property
    def total_q(self) -> int:
        """The queries of all sequences."""
        return sum(queries for queries, _ in self.each)

    @property
    def total_k(self) -> int:
        """The keys of all sequences."""
        return sum(keys for _, keys in self.each)

    @property
    def square(self) -> bool:
        """Whether each sequence has as many queries as keys."""
        return all(queries == keys for queries, keys in self.each)

    @property
    def lengths(self) -> str:
        """'4 x 4096', or '38 of 16 … 14905' where they differ; of queries and keys likewise."""
        sides = ([*map(itemgetter(side), self.each)] for side in range(2 - self.square))
        lengths = "/".join(map(_spread, sides))
        return f"{self.batch} {'x' if len({*self.each}) == 1 else 'of'} {lengths}"

    def __str__(self) -> str:
        listed = lengths_in_words(self.each)
        if len(listed) > _FEW_LETTERS:  # what tells it from all others of the same extent
            listed = f"{self.total_k} keys, {zlib.crc32(listed.encode()):08x}"
        return f"H={self.all_heads} {self.lengths}: {listed}"


@dataclass(frozen=True, order=True)
class VarlenTotals(Sizes):
    """What a call's host knows of varlen sequences: its seqlens are those of the longest ones.

    The lengths it does not know, and takes them to be as `spread` says.
    """

    tokens_q: int
    tokens_k: int

    varlen = True

    @classmethod
    def of(cls, sizes: Sizes) -> "VarlenTotals":
        """What would be known of these."""
        longest = sizes.seqlen_q, sizes.seqlen_k
        heads = sizes.heads, sizes.kv_heads
        return cls(sizes.batch, *heads, *longest, sizes.total_q, sizes.total_k)

    @property
    def sequences(self) -> Lengths:
        """The queries and the keys of each sequence, as they are taken to be: the longest first."""
        queries = spread(self.tokens_q, self.batch, self.seqlen_q)
        keys = queries if self.square else spread(self.tokens_k, self.batch, self.seqlen_k)
        return tuple(zip(queries, keys, strict=True))

    @property
    def total_q(self) -> int:
        """The queries of all sequences."""
        return self.tokens_q

    @property
    def total_k(self) -> int:
        """The keys of all sequences."""
        return self.tokens_k

    @property
    def square(self) -> bool:
        """Whether each sequence has as many queries as keys."""
        return (self.tokens_q, self.seqlen_q) == (self.tokens_k, self.seqlen_k)


def spread(tokens: int, batch: int, longest: int) -> list[int]:
    """Return so many lengths, of so many tokens in all: each is shorter by one ratio than the last.

    None is shorter than 1. There are such where the longest is at least the mean, and leaves the
    others a token each.
    """
    low, high = 0.0, math.log(longest) or 1.0  # the ratio's logarithm: by `high` at most so many
    for _ in range(60):
        fall = (low + high) / 2
        falling = min(batch, 1 + int(math.log(longest) / fall))  # the others have one token
        of_these = longest * math.expm1(-falling * fall) / math.expm1(-fall)
        low, high = (fall, high) if of_these + batch - falling > tokens else (low, fall)
    lengths = [
        max(1, longest + math.floor(longest * math.expm1(-high * place))) for place in range(batch)
    ]
    for place in range(1, tokens - sum(lengths) + 1):  # what was cut off
        lengths[place] += 1
    return lengths


_FEW_LETTERS = 40
_LENGTH = re.compile(r"(\d{1,10})(?:/(\d{1,10}))?(?:\*(\d{1,7}))?", re.ASCII)


def _spread(lengths: Sequence[int]) -> str:
    least, most = min(lengths), max(lengths)
    return f"{least}" if least == most else f"{least} … {most}"


def lengths_in_words(pairs: Lengths) -> str:
    """Return '4096*4,17/300': in their order, equal ones that follow each other once."""
    runs = ((length, len([*same])) for length, same in groupby(pairs))
    return ",".join(
        (f"{q}" if q == k else f"{q}/{k}") + (f"*{count}" if count > 1 else "")
        for (q, k), count in runs
    )


def lengths_from(words: str, most: int) -> Lengths:
    """Read such words back, of so many sequences at most.  Raises ValueError for any others."""
    pairs: list[tuple[int, int]] = []
    for word in words.split(","):
        matched = _LENGTH.fullmatch(word)
        count = int(matched[3] or 1) if matched else 0
        if not matched or not 0 < count <= most - len(pairs):
            raise ValueError(f"{shown(word)} is no length, or of more than {most} sequences")
        queries = int(matched[1])
        pairs += [(queries, int(matched[2]) if matched[2] else queries)] * count
    if lengths_in_words(tuple(pairs)) != words:
        raise ValueError("lengths are not written so")
    return tuple(pairs)


def standard_sizes(head_dim: int, seqlen: int = 4_096) -> Sizes:
    """Benchmark sizes: 16,384 tokens in all and hidden size 2048, in whole batches and heads."""
    heads = max(1, HIDDEN // head_dim)
    return Sizes(max(1, TOKENS // seqlen), heads, heads, seqlen, seqlen)


@dataclass(frozen=True, order=True)
class Cell:
    """One attention to compute and to time: a problem at sizes."""

    problem: Problem
    sizes: Sizes

    @property
    def flops(self) -> float:
        """What is multiplied and added; see `flops`."""
        return flops(self.problem, self.sizes)

    def __str__(self) -> str:
        problem = self.problem
        pass_name = f" {problem.kind}" if PASSES[problem.kind].prefix else ""
        return f"{problem.dtype} hd{problem.head_dims} {problem.mask}{pass_name} {self.sizes}"


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells as tables list them: by problem, masks as in vocab, then by rising lengths."""
    masks, passes = list(MASKS), list(PASSES)

    def place(cell: Cell) -> tuple[object, ...]:
        problem, sizes = cell.problem, cell.sizes
        mask = masks.index(problem.mask) if problem.mask in masks else len(masks)
        lengths = sizes.seqlen_q, sizes.seqlen_k, sizes.batch, sizes.heads, sizes.kv_heads
        fields = passes.index(problem.kind), problem.dtype, problem.head_dim, problem.head_dim_v
        return *fields, mask, problem.mask, lengths

    return sorted(cells, key=place)


# ---- what it costs ------------------------------------------------------------------------------


def flops(problem: Problem, sizes: Sizes) -> float:
    """Multiplications and additions of all GEMMs over the keys that a row may see.

    A causal triangle counts as exactly half its square, as everybody counts it; of varlen sequences
    each by itself. The gradients take
    five products for the two of the forward pass: where V is as wide as K, 2.5 times as many.
    """
    pass_, pairs = PASSES[problem.kind], MASKS[problem.mask].pairs
    columns = pass_.over_qk * problem.head_dim + pass_.over_v * problem.head_dim_v
    if sizes.varlen:
        return 2.0 * sizes.heads * columns * sum(pairs(*sequence) for sequence in sizes.sequences)
    return 2.0 * sizes.batch * sizes.heads * columns * pairs(sizes.seqlen_q, sizes.seqlen_k)


def sequences(
    cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, total_q: int, total_k: int
) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each varlen sequence, and those of its keys that count.

    Tensors say where sequences begin, and how many keys count: None, all. Lengths that lead out of
    so many rows are cut off.
    """
    queries = intervals(cu_seqlens_q.tolist(), total_q)
    keys = intervals(cu_seqlens_k.tolist(), total_k)
    used = [total_k] * len(keys) if seqused_k is None else seqused_k.tolist()
    for own, (first, last), count in zip(queries, keys, used, strict=True):
        yield slice(*own), slice(first, min(last, first + max(0, count)))


def intervals(offsets: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Where varlen sequences begin and end, within so many rows; backwards is empty."""
    within = [(max(0, begin), min(end, total)) for begin, end in pairwise(offsets)]
    return [(begin, max(begin, end)) for begin, end in within]
