"""What a call of a quantiser takes and gives, for one Plan."""

from typing import TYPE_CHECKING

from fagen.signature import MAX_SIZE, Dim, Extent, Limit, Scalar, Signature, Size, Tensor
from fagen.vocab import DTYPES, FP32, KEY_ORDER

if TYPE_CHECKING:
    from fagen.kinds.quantize.plan import Plan

SIGN_WORDS = 8  # of 32 signs each: enough for 256 columns

_BATCH = Dim(Extent("batch"), "batch")
_SEQLEN = Dim(Extent("seqlen"), "seq")
_HEADS = Dim(Extent("heads"), "head")
_KEYS = len(KEY_ORDER)  # transposed V is padded to whole groups of them


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernel.

    x (B, S, H, D), cos and sin (B, S, D / 2) in x's dtype where there is a rotary embedding,
    values in e4m3 (B, S, H, D) or transposed (B, H, D, S to 16), descale in fp32: (B, H, blocks)
    of blocks of rows, (B, H) of heads, (B, H, D) of columns, or one number; mean (B, H, D) in fp32
    where means are taken off.
    """
    columns = Dim(Extent(number=plan.head_dim))
    values = (_BATCH, _SEQLEN, _HEADS, columns)
    if plan.columns:
        keys = Dim(Extent("seqlen", per=_KEYS, times=_KEYS))
        values = (_BATCH, _HEADS, Dim(columns.extent, "seq"), keys)

    def angles(name: str) -> Tensor:
        dims = (_BATCH, _SEQLEN, Dim(Extent(number=plan.angles)))
        pairs = "neighbouring columns" if plan.pairs else "columns half a row apart"
        note = f"{'cosines' if name == 'cos' else 'sines'} of the rotary embedding of {pairs}"
        return Tensor(name, dims, plan.dtype, note, present=plan.rotary)

    # what is found in one reading of x is given together
    group = "statistics" if plan.center and not plan.by_block else ""
    return Signature(
        kind=plan.kind,
        version=3,
        sizes=(Size("batch"), Size("heads"), Size("seqlen")),
        tensors=(
            Tensor("x", (_BATCH, _SEQLEN, _HEADS, columns), plan.dtype, ""),
            angles("cos"),
            angles("sin"),
            Tensor(
                "values",
                values,
                DTYPES["e4m3"],
                f"x is values * descale{' plus mean' * plan.center}"
                + "; transposed, keys in the order of P" * plan.columns,
                access="out",
            ),
            Tensor(
                "descale",
                _descales(plan),
                FP32,
                "what values are to be multiplied by",
                access="made",
                refused="descales of blocks are found, they cannot be given"
                if plan.by_block
                else "",
                group=group,
                aligned=plan.by_column,
                max_stride=MAX_SIZE,
                all_strides=("batch", "head"),
                if_empty=None if plan.by_block else plan.least / plan.largest,
            ),
            Tensor(
                "mean",
                (_BATCH, _HEADS, columns),
                FP32,
                "what is taken off columns, their means over all rows",
                access="made",
                present=plan.center,
                group=group,
                max_stride=MAX_SIZE,
                if_empty=0.0,
            ),
        ),
        scalars=(
            Scalar(
                "seed",
                "int",
                "of the signs by which columns are negated before rows are rotated"
                if plan.rotate
                else "not read: nothing is rotated",
                default=0,
                field="signs",
                words=SIGN_WORDS,
            ),
        ),
        limits=tuple(
            Limit("tiles", (Extent("seqlen", per=rows), Extent("heads"), Extent("batch")))
            for rows in (plan.rows, *((plan.column_rows,) if plan.reads_columns else ()))
        ),
        order=("x", "seed", "descale", "mean", "cos", "sin"),
        keyword_from="cos",
        no_gradient="rounding to e4m3 has none",
    )


def _descales(plan: "Plan") -> tuple[Dim, ...]:
    if plan.by_tensor:
        return ()
    if plan.by_column:
        return (_BATCH, _HEADS, Dim(Extent(number=plan.head_dim)))
    if not plan.by_block:
        return (_BATCH, _HEADS)
    return (_BATCH, _HEADS, Dim(Extent("seqlen", per=plan.scale_rows)))
