"""What a call of decoding takes and gives, for one Plan."""

from typing import TYPE_CHECKING

from fagen.signature import Dim, Extent, Limit, Multiple, Scalar, Signature, Size, Tensor
from fagen.vocab import FP32, INT32

if TYPE_CHECKING:
    from fagen.kinds.decode.plan import Plan

MOST_SCALE = 1e8  # as of the forward pass

_BATCH = Dim(Extent("batch"), "batch")


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernels.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), seqused_k and leftpad_k (B) in int32; out
    (B, Sq, H, Dv) and lse (B, H, Sq) in fp32. With a unified maximum also reference (H) in fp32.
    """

    def tensor(
        name: str, seqlen: str, heads: str, columns: int, note: str = "", access: str = "in"
    ) -> Tensor:
        dims = (
            _BATCH,
            Dim(Extent(seqlen), "seq"),
            Dim(Extent(heads), "head"),
            Dim(Extent(number=columns)),
        )
        return Tensor(name, dims, plan.dtype, note, access=access)

    def lengths(name: str, note: str) -> Tensor:
        return Tensor(name, (Dim(Extent("batch")),), INT32, note, optional=True, aligned=False)

    reference = Tensor(
        "reference",
        (Dim(Extent("heads")),),
        FP32,
        "what scale * q kᵀ is about as large as, natural logarithm",
        aligned=False,
    )
    return Signature(
        kind=plan.kind,
        version=1,
        sizes=tuple(map(Size, ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"))),
        tensors=(
            tensor("q", "seqlen_q", "heads", plan.head_dim),
            tensor("k", "seqlen_k", "kv_heads", plan.head_dim, "what no query sees is not used"),
            tensor("v", "seqlen_k", "kv_heads", plan.head_dim_v, "likewise"),
            *((reference,) if plan.unified else ()),
            lengths("seqused_k", "where each sequence's keys end; null: at seqlen_k"),
            lengths("leftpad_k", "where each sequence's keys begin; null: at 0"),
            tensor("out", "seqlen_q", "heads", plan.head_dim_v, "zeros without a key", "out"),
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
        order=(
            "q",
            "k",
            "v",
            *(("reference",) if plan.unified else ()),
            "scale",
            "seqused_k",
            "leftpad_k",
        ),
        form="unified" if plan.unified else "",
        rules=(Multiple("heads", "kv_heads"),),
        limits=(
            Limit(
                "rows of chunks",
                (
                    Extent("seqlen_q"),
                    Extent("heads"),
                    Extent("batch"),
                    Extent(number=plan.num_splits),
                ),
            ),
            *((Limit("steps of runs"),) if plan.by_runs else ()),
        ),
        keyword_from="seqused_k",
        no_gradient="decoding has none",
        gradients_by="fagen.attention",
    )
