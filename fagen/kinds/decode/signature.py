"""What a call of decoding takes and gives, for one Plan."""

from typing import TYPE_CHECKING

from fagen.kinds.calls import GROUPED, SIZES, Layout, form, lengths, scalars
from fagen.kinds.sinks import sinks
from fagen.signature import Dim, Extent, Limit, Signature, Tensor
from fagen.vocab import FP32

if TYPE_CHECKING:
    from fagen.kinds.decode.plan import Plan


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernels.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), seqused_k and leftpad_k (B) in int32; out
    (B, Sq, H, Dv) and lse (B, H, Sq) in fp32. With a fixed maximum also reference (H) in fp32.
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
        f"where each sequence's keys {do}; null: at {usual}"
        for do, usual in (("end", "seqlen_k"), ("begin", "0"))
    )
    rows_of_splits = Extent("seqlen_q"), Extent("heads"), batch, Extent(number=plan.num_splits)
    return Signature(
        kind=plan.kind,
        version=1,
        sizes=SIZES,
        tensors=(
            layout.queries("q", plan.head_dim),
            layout.keys("k", plan.head_dim, "what no query sees is not used"),
            layout.keys("v", plan.head_dim_v, "likewise"),
            *((reference,) if plan.fixed else ()),
            *layout.tables(plan.mask),
            *sinks(plan.sink),
            lengths("seqused_k", batch, ends, optional=True),
            lengths("leftpad_k", batch, begins, optional=True),
            layout.queries("out", plan.head_dim_v, "zeros without a key", access="out"),
            layout.lse(),
        ),
        scalars=scalars(plan.mask, plan.score),
        order=(
            *("q", "k", "v", "reference", "scale", *plan.mask.given, *plan.score.given),
            *("sinks", "seqused_k", "leftpad_k"),
        ),
        form=form("unified" * plan.fixed, of=(plan.mask, plan.score), sink=plan.sink is not None),
        rules=GROUPED,
        limits=(
            Limit("rows of splits", rows_of_splits),
            *((Limit("steps of runs"),) if plan.stream_k else ()),
        ),
        keyword_from="seqused_k",
        no_gradient="decoding has none",
        gradients_by="" if plan.sink else "fagen.attention",
    )
