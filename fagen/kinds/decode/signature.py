"""What a call of decoding takes and gives, for one Plan."""

from typing import TYPE_CHECKING

from fagen.kinds.calls import (
    BATCH,
    GROUPED,
    PAGED_SIZES,
    SIZES,
    Layout,
    form,
    lengths,
    scalars,
)
from fagen.kinds.sinks import sinks
from fagen.signature import Dim, Extent, Limit, Signature, Tensor
from fagen.vocab import FP32, INT32

if TYPE_CHECKING:
    from fagen.kinds.decode.plan import Plan


_BLOCK_TABLE = Tensor(
    "block_table",
    (BATCH, Dim(Extent("entries"))),
    INT32,
    "the pages of each sequence's keys; behind the last one in use anything",
    aligned=False,
)


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernels.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), seqused_k and leftpad_k (B) in int32; out
    (B, Sq, H, Dv) and lse (B, H, Sq) in fp32. With a fixed maximum also reference (H) in fp32. In
    pages k (pages, page_size, Hk, D), v (pages, page_size, Hk, Dv), with block_table (B, entries)
    in int32.
    """
    layout, batch = Layout(plan.dtype), Extent("batch")
    reference = Tensor(
        "reference",
        (Dim(Extent("heads")),),
        FP32,
        "what scale * q kᵀ is about as large as, natural logarithm",
        aligned=False,
    )
    ends, begins = (
        f"where each sequence's keys {do}" + f"; null: at {usual}" * bool(usual)
        for do, usual in (("end", "" if plan.paged else "seqlen_k"), ("begin", "0"))
    )
    caches = layout.pages if plan.paged else layout.keys
    rows_of_splits = Extent("seqlen_q"), Extent("heads"), batch, Extent(number=plan.num_splits)
    return Signature(
        kind=plan.kind,
        version=1,
        sizes=PAGED_SIZES if plan.paged else SIZES,
        tensors=(
            layout.queries("q", plan.head_dim),
            caches("k", plan.head_dim, "what no query sees is not used"),
            caches("v", plan.head_dim_v, "likewise"),
            *((reference,) if plan.fixed else ()),
            *layout.tables(plan.mask),
            *sinks(plan.sink),
            *((_BLOCK_TABLE,) if plan.paged else ()),
            lengths("seqused_k", batch, ends, optional=not plan.paged),
            lengths("leftpad_k", batch, begins, optional=True),
            layout.queries("out", plan.head_dim_v, "zeros without a key", access="out"),
            layout.lse(),
        ),
        scalars=scalars(plan.mask, plan.score),
        order=(
            *("q", "k", "v", "reference", "scale", *plan.mask.given, *plan.score.given),
            *("sinks", "block_table", "seqused_k", "leftpad_k"),
        ),
        form=form(
            *("unified" * plan.fixed, "paged" * plan.paged),
            of=(plan.mask, plan.score),
            sink=plan.sink is not None,
        ),
        rules=GROUPED,
        limits=(
            Limit("rows of splits", rows_of_splits),
            *((Limit("steps of runs"),) if plan.stream_k else ()),
        ),
        keyword_from="leftpad_k" if plan.paged else "seqused_k",
        no_gradient="decoding has none",
        gradients_by="" if plan.sink else "fagen.attention",
    )
