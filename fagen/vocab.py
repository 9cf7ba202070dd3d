"""Translate a schedule's words: into bytes, C++ names, torch names, and codes of a slug.

The tables here are all that a new word needs outside a template.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from fagen.errors import ExpressionError
from fagen.expr import words
from fagen.expr.bounds import Change, steady
from fagen.expr.cpp import KERNEL, Names, helpers, printed
from fagen.expr.tree import Name, Table
from fagen.expr.words import Word
from fagen.scores import SCORES as SCORES
from fagen.scores import declare_score

# How many times as many columns of shared memory wider slabs may take. On an H200, in slabs of 32
# bytes, 104, 176 and 208 took a third longer than 128, 192 and 224 for as many heads, 136 a sixth
# longer than 160; 112 and 144, whose rows are aligned, took no longer than 128 and 160.
MORE_COLUMNS = 1.1
MORE_UNALIGNED = 1.15


@dataclass(frozen=True)
class Dtype:
    """An element type of Q, K and V, or of O, under each name that it goes by."""

    name: str
    bytes: int
    cpp: str
    cpp2: str  # two of them in one register
    header: str  # that declares both
    ptx: str
    tma: str
    pack: str  # two floats into one register, lower half first
    unpack: str  # and back
    torch: str
    stable: str  # torch's stable ABI ScalarType
    xla: str  # XLA's FFI DataType
    wgmma_k: int  # columns that one wgmma instruction multiplies
    pad: int  # head dims grow to a multiple of this in shared memory
    out: str  # O's, where a schedule does not say
    largest: float = 0.0  # finite number, where fp32 goes far beyond it
    # What a lane's share of a row's P in a block may add up to under a stale row max, in 16 bits.
    # Of a key that outweighs all others P is rounded then, and not in the sum that O is divided by:
    # O of such a row is that key's V to the last bit only where the maximum is fresh. bf16, whose
    # range would bear 2^60, rounds eight times as coarsely as fp16.
    max_partial_sum: float = 0.0

    @property
    def narrow(self) -> bool:
        """Whether 16 bits have so few powers of two that widely spread scores outgrow P."""
        return 0 < self.max_partial_sum < 2.0**32

    @property
    def fp8(self) -> bool:
        """Whether an element is a byte, with a scale beside the tensor."""
        return self.bytes == 1

    def filled_up(self, columns: int) -> int:
        """Return how many columns of shared memory so many take.

        TMA takes as long for a row of a slab of 32 bytes as for one of 64. Where a few columns more
        make the slabs wider, they cost less than that; more of them where a head's rows begin
        inside a sector of L2, which makes narrow slabs dearer yet.
        """
        least, wide = (-(-columns // step) * step for step in (self.pad, 2 * self.pad))
        few = MORE_UNALIGNED if columns % self.pad else MORE_COLUMNS
        return wide if not self.fp8 and wide <= few * least else least


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see: an interval, whose ends never fall from row to row.

    `first` and `last` (exclusive) are its ends as C++ in `row`, `seqlen_q` and `seqlen_k` and in
    what a call gives, not yet cut off at 0 and seqlen_k; empty where every row sees the first key,
    or the last one. `keys` says the same in Python, of ints and of tensors. What a call gives goes
    by its name in all of them; where `keys` is not told, it is as usual. `last` that is `steady`
    rises by at most a key from row to row, and then only a row whose interval lies outside 0 …
    seqlen_k may see no key.
    """

    name: str
    order: str  # the grid order that suits it, where a schedule names none
    keys: Callable[..., tuple[Any, Any]]
    pairs: Callable[[int, int], float]  # of a query and a key, as FLOPs are counted
    first: str = ""
    last: str = ""
    parameters: tuple[Name, ...] = ()  # whole numbers that a call gives
    tables: tuple[Table, ...] = ()  # tensors of whole numbers that it gives
    steady: bool = True
    first_steady: bool = True  # `first` rises by at most a key from row to row
    helpers: str = ""  # functions that this C++ calls
    usual: Callable[[int, int], Mapping[str, Any]] = lambda seqlen_q, seqlen_k: {}

    @classmethod
    def of(cls, word: Word, order: str) -> "Mask":
        """Return the mask that a named text is.

        Raises ExpressionError for one of which a tile's first and last row do not tell the keys.
        """
        found, expression = word.ranges, word.expression
        if Change.FALLS in found.changes or Change.BY_ROW in found.changes:
            raise ExpressionError(
                f"{word.name}: its keys do not move on from row to row: so far kernels have "
                "masks whose first and last keys never fall"
            )
        own = {one.name: one.name for one in expression.given}
        names, ends = Names(KERNEL | own, look_up=_number_of), (found.first, found.last)
        first, last = (printed(end, names) if end else "" for end in ends)

        by_row = any(table.over != ("batch",) for table in expression.tables)

        def keys(row: Any, seqlen_q: int, seqlen_k: int, **given: Any) -> tuple[Any, Any]:
            if by_row:  # a tile's rows past the end see what the last one does
                row = (
                    row.clamp(max=seqlen_q - 1) if hasattr(row, "clamp") else min(row, seqlen_q - 1)
                )
            sizes = {"q_idx": row, "len_q": seqlen_q, "len_k": seqlen_k}
            return found.keys({**word.usual(seqlen_q, seqlen_k), **given, **sizes})

        return cls(
            word.name,
            order,
            keys,
            lambda q, k: word.visible(q, k, word.usual(q, k)),
            first,
            last,
            expression.parameters,
            expression.tables,
            found.last is None or steady(found.last),
            found.first is None or steady(found.first),
            helpers(*filter(None, ends)),
            word.usual,
        )

    @property
    def given(self) -> tuple[str, ...]:
        """The names of what a call gives."""
        return (*(one.name for one in self.parameters), *(one.name for one in self.tables))

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of what is one number of a sequence."""
        return (*(one.name for one in self.parameters), *self.batch_tables)

    @property
    def of_sequence(self) -> tuple[str, ...]:
        """What units of decoding know of a sequence, beside where it lies."""
        return ("skipped", *self.batch_tables) if self.given else ()

    @property
    def batch_tables(self) -> tuple[str, ...]:
        """The names of tensors that have a number for each sequence."""
        return tuple(table.name for table in self.tables if table.over == ("batch",))

    @property
    def row_tables(self) -> tuple[str, ...]:
        """The names of tensors that have a number for each query."""
        return tuple(table.name for table in self.tables if table.over != ("batch",))

    def taken(self, call: dict[str, Any]) -> dict[str, Any]:
        """Take what is given out of the arguments of a call, as `bound` wants it.

        Numbers for each row, or each sequence, become tensors of 64 bits, by which one may index.
        """
        given = {name: call.pop(name) for name in self.given}
        return {name: x.long() if hasattr(x, "long") else x for name, x in given.items()}

    def bound(self, given: Mapping[str, Any], sequence: int = 0) -> "Mask":
        """Return it with what a call gives: the mask of one of its sequences, or of all."""
        if not self.given:
            return self
        keys = partial(self.keys, **given, batch=sequence)
        pairs = partial(_counted, keys)
        return replace(self, keys=keys, pairs=pairs, parameters=(), tables=())

    @property
    def first_by_row(self) -> bool:
        """Whether the first key depends on the row."""
        return bool(self.first)

    @property
    def last_by_row(self) -> bool:
        """Whether the last key depends on the row."""
        return bool(self.last)

    @property
    def first_seen(self) -> str:
        """The first key that a row sees, as C++."""
        return f"max(0, {self.first})" if self.first else "0"

    @property
    def last_seen(self) -> str:
        """The key behind the last one that a row sees, as C++."""
        return f"min(seqlen_k, {self.last})" if self.last else "seqlen_k"

    @property
    def by_row(self) -> bool:
        """Whether rows differ in what they see."""
        return self.first_by_row or self.last_by_row

    def sees(self, row: Any, key: Any, seqlen_q: int, seqlen_k: int) -> Any:
        """Whether rows see keys: tensors that spread to each other, or numbers."""
        first, last = self.keys(row, seqlen_q, seqlen_k)
        return (key >= first) & (key < last)

    @property
    def causal(self) -> bool:
        """Whether this is the mask that public calls know as causal."""
        return self.name == "causal"


def _number_of(table: Table, indices: list[str]) -> str:
    """Return a number of a table as C++: one of a sequence, or of a row of it."""
    return table.name if table.over == ("batch",) else f"{table.name}[min(row, seqlen_q - 1)]"


def _counted(keys: Callable[..., tuple[Any, Any]], seqlen_q: int, seqlen_k: int) -> float:
    """Return how many keys all rows together see."""
    ends = (keys(row, seqlen_q, seqlen_k) for row in range(seqlen_q))
    return float(sum(max(0, min(seqlen_k, last) - max(0, first)) for first, last in ends))


@dataclass(frozen=True)
class Pass:
    """Attention, or its gradients: what one kind of kernels computes, and is called like."""

    name: str
    over_qk: int  # products that go over, or give, the columns of Q and K
    over_v: int  # the same of those of V
    gradients: bool = False
    prefix: str = ""  # before the name of a problem, as its slugs begin; the first has nothing
    computes: str = ""  # another pass, where it is that in another way: calls ask for the other


@dataclass(frozen=True)
class Peer:
    """An implementation of others, beside whose time a search's are said."""

    name: str
    title: str


@dataclass(frozen=True)
class Swizzle:
    """How rows of a shared-memory slab are permuted to keep banks apart."""

    bytes: int  # width of a slab
    xor_bits: int
    cute: str  # cute::SM90::GMMA::LayoutType
    tma: str


@dataclass(frozen=True)
class Order:
    """How thread blocks, of which an SM has one, take tiles."""

    name: str
    longest_first: bool
    dynamic: bool = False  # a block takes the next tile when it comes free, by a counter
    static: str = ""  # the order without a counter, for what cannot draw tiles
    parts: bool = False  # the last round's tiles, which leave SMs idle, are cut into parts


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=_Named)


def _table(*rows: Row) -> Mapping[str, Row]:
    return {row.name: row for row in rows}


DTYPES = _table(
    Dtype(
        "fp16",
        bytes=2,
        cpp="__half",
        cpp2="__half2",
        header="cuda_fp16.h",
        ptx="f16",
        tma="CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
        pack="__floats2half2_rn",
        unpack="__half22float2",
        torch="float16",
        stable="Half",
        xla="F16",
        wgmma_k=16,
        pad=16,
        out="fp16",
        largest=65504.0,
        max_partial_sum=2.0**15,
    ),
    Dtype(
        "bf16",
        bytes=2,
        cpp="__nv_bfloat16",
        cpp2="__nv_bfloat162",
        header="cuda_bf16.h",
        ptx="bf16",
        tma="CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        pack="__floats2bfloat162_rn",
        unpack="__bfloat1622float2",
        torch="bfloat16",
        stable="BFloat16",
        xla="BF16",
        wgmma_k=16,
        pad=16,
        out="bf16",
        max_partial_sum=2.0**12,
    ),
    Dtype(
        "e4m3",
        bytes=1,
        cpp="__nv_fp8_e4m3",
        cpp2="__nv_fp8x2_e4m3",
        header="cuda_fp8.h",
        ptx="e4m3",
        tma="CU_TENSOR_MAP_DATA_TYPE_UINT8",
        pack="",  # four to a register: a template's own
        unpack="",
        torch="float8_e4m3fn",
        stable="Float8_e4m3fn",
        xla="F8E4M3FN",
        wgmma_k=32,
        pad=32,
        out="bf16",
    ),
)

# of numbers beside the tensors of attention: log-sum-exps, descales, partial sums
FP32 = Dtype(
    "fp32",
    bytes=4,
    cpp="float",
    cpp2="float2",
    header="cuda_runtime.h",
    ptx="f32",
    tma="CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    pack="make_float2",
    unpack="",
    torch="float32",
    stable="Float",
    xla="F32",
    wgmma_k=0,
    pad=0,
    out="fp32",
)

# of lengths and offsets beside them
INT32 = Dtype(
    "int32",
    bytes=4,
    cpp="int32_t",
    cpp2="int2",
    header="cstdint",
    ptx="s32",
    tma="CU_TENSOR_MAP_DATA_TYPE_INT32",
    pack="",
    unpack="",
    torch="int32",
    stable="Int",
    xla="S32",
    wgmma_k=0,
    pad=0,
    out="int32",
)

# of partial outputs, and of what they are combined to
PARTIALS = _table(FP32, DTYPES["fp16"], DTYPES["bf16"])

SIXTEEN_BITS = _table(*(row for row in DTYPES.values() if not row.fp8))

# of attention's O
OUT_DTYPES = _table(*SIXTEEN_BITS.values())

# The order of 16 keys in which the PV GEMM reads V in e4m3: what a thread has of S after QKᵀ is
# what it needs of P, if V's keys are taken in this order.
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)

# What the maximum of numbers that share a scale in e4m3 is taken for at least, so that rows of
# zeros have a scale too: small, since V's scales enter the exponents of a softmax, yet well inside
# fp32.
LEAST_MAXIMUM = 2.0**-40


MASKS = _table(
    Mask.of(words.MASKS["full"], order="persistent"),
    Mask.of(words.MASKS["causal"], order="dynamic"),
    *(Mask.of(words.MASKS[name], order="lpt") for name in words.GIVEN),
)


def declare(word: Word) -> None:
    """Have MASKS, or SCORES, know a mask or a score that a call says by its text.

    Raises ExpressionError for one that kernels do not have.
    """
    if word.kind == "score":
        declare_score(word)
        return
    cast(dict[str, Mask], MASKS).setdefault(word.name, Mask.of(word, order="lpt"))


# those of which lengths say all
PLAIN_MASKS = {name: mask for name, mask in MASKS.items() if not mask.given}
# A single query sees the same keys under all of them; decoding has kernels of this one for it.
ONE_QUERY = "causal"

# QKᵀ and PV; S again, dQ and dK, and dP and dV; QKᵀ and PV of few queries, of which a search looks
# for the fastest kernels by themselves
PASSES = _table(
    Pass("forward", over_qk=1, over_v=1),
    Pass("backward", over_qk=3, over_v=2, gradients=True, prefix="bwd"),
    Pass("decode", over_qk=1, over_v=1, prefix="dec", computes="forward"),
)
FORWARD, BACKWARD, DECODE = PASSES
CALLED = tuple(name for name, row in PASSES.items() if not row.computes)

ORDERS = _table(
    Order("persistent", longest_first=False),
    Order("parts", longest_first=False, parts=True),
    Order("lpt", longest_first=True),
    Order("dynamic", longest_first=True, dynamic=True, static="lpt"),
)

MOST_PARTS = 8  # of a tile's keys, where the last round's tiles are cut

OUTPUTS = ("own", "half", "reuse_v")
PRODUCERS = ("warp", "none")
SUMS = ("threads", "tensor")
MAXIMA = ("lazy", "online")
TANHS = ("mufu", "curve")
V_LAYOUTS = ("columns", "rows")
TRANSPOSITIONS = ("producer", "kernel")  # of row-major V: in each tile, or before all of them
SCALES = ("head", "tensor", "block")  # of Q and K
KERNEL_SCALES = ("head", "block")  # that of a tensor is that of each of its heads
V_SCALES = ("column", "block")
QUANTIZED_SCALES = (*SCALES, "column")
SCALE_ROWS = (32, 64, 128)
SCALE_ROWS_DEFAULT = 64  # of a schedule and of a call
ROTARIES = ("none", "halves", "pairs")
TOTALS = ("registers", "shared")
LAYOUTS = ("dense", "varlen")
LENGTHS = ("equal", "varlen")  # of the sequences of a call
CACHES = ("dense", "paged")  # in which keys and values lie that are decoded
COPY = "a copy"
PEERS_DTYPE = "fp16"  # of others' kernels, where ours are of e4m3
# by lengths: torch calls cuDNN for sequences of one length alone
PEERS = {"equal": Peer("cudnn", "cuDNN"), "varlen": Peer("fa2", "FlashAttention-2")}


def yardstick(title: str, *dtypes: str) -> str:
    """Return what to call others' kernels beside ours of these dtypes: of e4m3 theirs are in fp16.

    They are timed on the same numbers before these are quantised. A copy has no dtype.
    """
    fp8 = {dtype in DTYPES and DTYPES[dtype].fp8 for dtype in dtypes}
    if title == COPY or True not in fp8:
        return title
    return f"{title} (of e4m3 in {PEERS_DTYPE})" if False in fp8 else f"{title} {PEERS_DTYPE}"


# of a folder; the first where none is named
VENDOR_FORMATS = ("source", "torch", "hf-kernel", "jax")

# widest first: a wider one spreads rows over more banks and needs fewer TMA boxes
SWIZZLES = (
    Swizzle(128, xor_bits=3, cute="B128", tma="CU_TENSOR_MAP_SWIZZLE_128B"),
    Swizzle(64, xor_bits=2, cute="B64", tma="CU_TENSOR_MAP_SWIZZLE_64B"),
    Swizzle(32, xor_bits=1, cute="B32", tma="CU_TENSOR_MAP_SWIZZLE_32B"),
)


def swizzle_of(row_bytes: int) -> Swizzle:
    """Return the widest swizzle whose slabs make up rows of so many bytes, a multiple of 32."""
    return next(swizzle for swizzle in SWIZZLES if row_bytes % swizzle.bytes == 0)
