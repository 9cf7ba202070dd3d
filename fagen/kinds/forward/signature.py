"""What a call of attention takes and gives, for one Plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fagen.signature import MAX_SIZE, Dim, Extent, Limit, Multiple, Scalar, Signature, Size, Tensor
from fagen.vocab import FP32, INT32, KEY_ORDER

if TYPE_CHECKING:
    from fagen.kinds.forward.plan import Plan

# With it, and log2 e, the number at which row maxima start still has a product that is finite.
MOST_SCALE = 1e8

_BATCH = Dim(Extent("batch"), "batch")
_KEYS = len(KEY_ORDER)  # transposed V is padded to whole groups of them
_COLUMN_STRIDES = ("batch", "column", "head")  # of numbers by column, in the order of the C struct


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernel.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), or transposed (B, Hk, Dv, Sk to 16), out
    (B, Sq, H, Dv), lse (B, H, Sq) in fp32. Where Q, K and V have scales, descales in fp32 (B, H or
    Hk, blocks), of V (B, Hk, Dv) unless they are by block, and what was taken off K and V before
    they were quantised, k_mean (B, Hk, D) and v_mean (B, Hk, Dv). Where sequences have lengths of
    their own it is that of `varlen`.
    """
    if plan.varlen:
        return varlen(plan)
    conversion = "fagen.quantize({name}) makes it so, with its descale" if plan.fp8 else ""

    def given(name: str, seqlen: str, heads: str, columns: int, note: str) -> Tensor:
        dims = _rows(seqlen, heads, columns)
        return Tensor(name, dims, plan.dtype, note, conversion=conversion)

    v = given("v", "seqlen_k", "kv_heads", plan.head_dim_v, "")
    if plan.fp8 and not plan.v_rows:
        # of each 16 keys, place i of a row holds key KEY_ORDER[i]; places past seqlen_k hold 0
        order = " ".join(map(str, KEY_ORDER))
        v = Tensor(
            "v",
            (
                _BATCH,
                Dim(Extent("kv_heads"), "head"),
                Dim(Extent(number=plan.head_dim_v), "seq"),
                Dim(Extent("seqlen_k", per=_KEYS, times=_KEYS)),
            ),
            plan.dtype,
            f"transposed: each 16 keys in the order {order}, zeros past seqlen_k",
            conversion=conversion,
        )
    rows = plan.scale_rows
    return Signature(
        kind=plan.kind,
        version=3,
        sizes=tuple(map(Size, ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"))),
        tensors=(
            given("q", "seqlen_q", "heads", plan.head_dim, ""),
            given("k", "seqlen_k", "kv_heads", plan.head_dim, ""),
            v,
            _descale("q", "seqlen_q", "heads", plan.fp8, rows),
            _descale("k", "seqlen_k", "kv_heads", plan.fp8, rows),
            _descale("v", "seqlen_k", "kv_heads", plan.fp8, rows)
            if plan.v_scales_by_block
            else _v_descale(plan),
            *_means(plan),
            Tensor(
                "out",
                _rows("seqlen_q", "heads", plan.head_dim_v),
                plan.out_dtype,
                "zeros in a row that sees no key",
                access="out",
            ),
            Tensor(
                "lse",
                (_BATCH, Dim(Extent("heads"), "head"), Dim(Extent("seqlen_q"))),
                FP32,
                "log-sum-exp, natural logarithm; minus infinity in a row that sees no key",
                access="out",
                aligned=False,
                omittable=True,
            ),
        ),
        scalars=(
            Scalar("scale", "float", "of q kᵀ before the softmax", positive=True, most=MOST_SCALE),
        ),
        order=("q", "k", "v", "scale", "q_descale", "k_descale", "v_descale", "v_mean", "k_mean"),
        rules=(Multiple("heads", "kv_heads"),),
        limits=(_limit(plan),),
        no_gradient="this op has no backward",
        gradients_by="" if plan.fp8 else "fagen.attention",
    )


# A tensor map goes back by 2^30 rows, in strides below 2^34 elements.
_MOST_PACKED_STRIDE = 1 << 32


def varlen(plan: "Plan") -> Signature:
    """Return the signature of a kernel whose sequences lie one after another, each of its length.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv), cu_seqlens_q and cu_seqlens_k
    (B + 1) and seqused_k (B) in int32, out (total_q, H, Dv), lse (H, total_q) in fp32. Where Q, K
    and V have scales the struct is another one, with descales and means as of `signature`, B that
    of the sequences.
    """
    conversion = "fagen.quantize({name}[None]) makes it so, with its descale" if plan.fp8 else ""

    def rows(name: str, total: str, heads: str, columns: int, note: str = "") -> Tensor:
        dims = _rows(total, heads, columns)[1:]
        most = _MOST_PACKED_STRIDE
        return Tensor(name, dims, plan.dtype, note, conversion=conversion, max_stride=most)

    def lengths(name: str, extent: Extent, note: str, *, optional: bool = False) -> Tensor:
        dims = (Dim(extent),)
        return Tensor(name, dims, INT32, note, optional=optional, aligned=False)

    said = (
        "the row of {} at which each sequence begins, and the end of the last; offsets = batch + 1"
    )
    return Signature(
        kind=plan.kind,
        form="varlen fp8" if plan.fp8 else "varlen",
        version=1,
        sizes=tuple(map(Size, ("total_q", "total_k", "offsets", "heads", "kv_heads"))),
        tensors=(
            rows("q", "total_q", "heads", plan.head_dim),
            rows("k", "total_k", "kv_heads", plan.head_dim),
            rows("v", "total_k", "kv_heads", plan.head_dim_v),
            lengths("cu_seqlens_q", Extent("offsets"), said.format("q")),
            lengths("cu_seqlens_k", Extent("offsets"), said.format("k and v")),
            lengths(
                "seqused_k",
                Extent("offsets", plus=-1),
                "how many of its keys each sequence sees, the first ones; null: all",
                optional=True,
            ),
            *_of_sequences(plan),
            replace(
                rows("out", "total_q", "heads", plan.head_dim_v),
                dtype=plan.out_dtype,
                conversion="",
                note="zeros in a row that sees no key, or is of no sequence",
                access="out",
            ),
            Tensor(
                "lse",
                (Dim(Extent("heads"), "head"), Dim(Extent("total_q"))),
                FP32,
                "log-sum-exp, natural logarithm; minus infinity in a row that sees no key",
                access="out",
                aligned=False,
                omittable=True,
            ),
        ),
        scalars=(
            Scalar("scale", "float", "of q kᵀ before the softmax", positive=True, most=MOST_SCALE),
        ),
        order=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale", "seqused_k"),
        rules=(Multiple("heads", "kv_heads"),),
        limits=(_limit(plan),),
        no_gradient="this op has no backward",
        gradients_by="" if plan.fp8 else "fagen.attention_varlen",
    )


def _of_sequences(plan: "Plan") -> tuple[Tensor, ...]:
    """Descales and means of sequences that lie packed: the batch is that of the offsets."""
    if not plan.descales:
        return ()
    batch = Dim(Extent("offsets", plus=-1), "batch", broadcast=True)
    dense = (
        _descale("q", "total_q", "heads", True, 0),
        _descale("k", "total_k", "kv_heads", True, 0),
        _v_descale(plan),
        *_means(plan),
    )
    return tuple(replace(tensor, dims=(batch, *tensor.dims[1:])) for tensor in dense)


def tiles_of(plan: "Plan") -> tuple[Extent, ...]:
    """How many tiles of block_m rows a call has; of varlen at most.

    There each offset may begin one, since the rows around all sequences are some too.
    """
    if plan.varlen:
        return Extent("total_q", per=plan.block_m, more="offsets"), Extent("heads")
    rows = Extent("seqlen_q", per=plan.block_m * plan.cluster, times=plan.cluster)
    return rows, Extent("heads"), Extent("batch")


def _limit(plan: "Plan") -> Limit:
    if not plan.splits:
        return Limit("tiles", tiles_of(plan))
    rows = Extent("seqlen_q"), Extent("heads"), Extent("batch")
    return Limit("rows of chunks", (*rows, Extent(number=plan.num_splits)))


def _rows(seqlen: str, heads: str, columns: int) -> tuple[Dim, ...]:
    return (
        _BATCH,
        Dim(Extent(seqlen), "seq"),
        Dim(Extent(heads), "head"),
        Dim(Extent(number=columns)),
    )


def _descale(of: str, seqlen: str, heads: str, present: bool, scale_rows: int) -> Tensor:
    """What the numbers of a tensor are to be multiplied by: one for each block of rows, or one."""
    blocks = Extent(seqlen, per=scale_rows) if scale_rows else Extent(number=1)
    return Tensor(
        f"{of}_descale",
        (
            Dim(Extent("batch"), "batch", broadcast=True),
            Dim(Extent(heads), "head", broadcast=True),
            Dim(blocks),
        ),
        FP32,
        f"what {of} is to be multiplied by, finite and above 0{'' if scale_rows else '; null: 1'}",
        present=present,
        optional=not scale_rows,
        missing=f"this kernel has scales by block of {scale_rows} rows" if scale_rows else "",
        aligned=False,
        max_stride=MAX_SIZE,
        all_strides=_COLUMN_STRIDES if of == "v" else (),
    )


def _v_descale(plan: "Plan") -> Tensor:
    return _by_column(
        "v_descale",
        plan.head_dim_v,
        plan.fp8,
        "what columns of v are to be multiplied by, finite and above 0; null: 1",
    )


def _means(plan: "Plan") -> tuple[Tensor, Tensor]:
    note = "what was taken off columns of {} before they were quantised; null: nothing"
    return (
        _by_column("v_mean", plan.head_dim_v, plan.fp8, note.format("v")),
        _by_column("k_mean", plan.head_dim, plan.fp8, note.format("k")),
    )


def _by_column(name: str, columns: int, present: bool, note: str) -> Tensor:
    """Numbers of the columns of K's or V's heads; a dimension of 1 serves for all."""
    return Tensor(
        name,
        (
            Dim(Extent("batch"), "batch", broadcast=True),
            Dim(Extent("kv_heads"), "head", broadcast=True),
            Dim(Extent(number=columns), "column", broadcast=True),
        ),
        FP32,
        note,
        present=present,
        optional=True,
        aligned=False,
        max_stride=MAX_SIZE,
    )
