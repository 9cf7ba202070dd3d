"""What a call of combining takes and gives, for one Plan."""

from typing import TYPE_CHECKING

from fagen.kinds.sinks import sinks
from fagen.signature import Dim, Extent, Limit, Signature, Size, Tensor
from fagen.vocab import FP32, INT32

if TYPE_CHECKING:
    from fagen.kinds.combine.plan import Plan

_SPLITS = Dim(Extent("splits"), "split")
_BATCH = Dim(Extent("batch"), "batch")
_SEQLEN = Dim(Extent("seqlen"), "seq")
_HEADS = Dim(Extent("heads"), "head")


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernel.

    outs (splits, B, Sq, H, Dv) and lses (splits, B, H, Sq) in fp32 become out (B, Sq, H, Dv) and
    lse (B, H, Sq) in fp32. Packed, they have no B and Sq counts the rows of all sequences;
    num_splits (B) and cu_seqlens (B + 1) in int32 say how many splits each sequence has and where
    it begins. Of sinks (H) each is one more logit of its head's rows.
    """
    batch = () if plan.varlen else (_BATCH,)
    rows = (*batch, _SEQLEN, _HEADS, Dim(Extent(number=plan.head_dim)))
    numbers = (*batch, _HEADS, Dim(Extent("seqlen")))
    return Signature(
        kind=plan.kind,
        version=1,
        sizes=tuple(map(Size, ("splits", "batch", "seqlen", "heads"))),
        tensors=(
            Tensor(
                "outs",
                (_SPLITS, *rows),
                plan.dtype,
                "partial outputs, each normalised by its own sum",
                all_strides=("split", "batch", "seq", "head"),
            ),
            Tensor(
                "lses",
                (_SPLITS, *numbers),
                FP32,
                "their log-sum-exps, natural logarithm; minus infinity: this split saw no key",
                aligned=False,
                all_strides=("split", "batch", "head"),
            ),
            *sinks(plan.sink),
            Tensor(
                "num_splits",
                (Dim(Extent("batch")),),
                INT32,
                "of each sequence; the splits after them are not read",
                present=plan.varlen,
                aligned=False,
            ),
            Tensor(
                "cu_seqlens",
                (Dim(Extent("batch", plus=1)),),
                INT32,
                "the row at which each sequence begins, and the end of the last",
                present=plan.varlen,
                aligned=False,
            ),
            Tensor(
                "out",
                rows,
                plan.out_dtype,
                "zeros in a row that no split saw a key of",
                access="out",
                all_strides=("batch", "seq", "head"),
            ),
            Tensor(
                "lse",
                numbers,
                FP32,
                "log-sum-exp, natural logarithm; minus infinity in a row of zeros",
                access="out",
                aligned=False,
                all_strides=("batch", "head"),
            ),
        ),
        scalars=(),
        limits=(
            Limit("rows", rows_of(plan)),
            *((Limit("sequences", (Extent("batch"),)),) if plan.varlen else ()),
        ),
        order=("outs", "lses", "sinks", "num_splits", "cu_seqlens"),
        form="sink" if plan.sink else "",
        no_gradient="combining has none yet",
    )


def rows_of(plan: "Plan") -> tuple[Extent, ...]:
    """How many rows of a head a call has."""
    batch = () if plan.varlen else (Extent("batch"),)
    return (*batch, Extent("seqlen"), Extent("heads"))
