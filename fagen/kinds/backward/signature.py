"""What a call of attention's backward pass takes and gives, for one Plan."""

from typing import TYPE_CHECKING

from fagen.signature import Dim, Extent, Multiple, Scalar, Signature, Size, Tensor
from fagen.vocab import FP32

if TYPE_CHECKING:
    from fagen.kinds.backward.plan import Plan

MOST_SCALE = 1e8  # as of the forward pass

_BATCH = Dim(Extent("batch"), "batch")


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernels.

    dout and out (B, Sq, H, Dv), q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), lse and dlse
    (B, H, Sq) in fp32; dq, dk and dv are as q, k and v.
    """

    def tensor(name: str, seqlen: str, heads: str, columns: int, note: str, access: str) -> Tensor:
        dims = (
            _BATCH,
            Dim(Extent(seqlen), "seq"),
            Dim(Extent(heads), "head"),
            Dim(Extent(number=columns)),
        )
        return Tensor(name, dims, plan.dtype, note, access=access)

    d, d_v = plan.head_dim, plan.head_dim_v
    rows = (_BATCH, Dim(Extent("heads"), "head"), Dim(Extent("seqlen_q")))
    return Signature(
        kind=plan.kind,
        version=1,
        sizes=tuple(map(Size, ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"))),
        tensors=(
            tensor("dout", "seqlen_q", "heads", d_v, "the gradient of out", "in"),
            tensor("q", "seqlen_q", "heads", d, "", "in"),
            tensor("k", "seqlen_k", "kv_heads", d, "", "in"),
            tensor("v", "seqlen_k", "kv_heads", d_v, "", "in"),
            tensor("out", "seqlen_q", "heads", d_v, "the forward pass's", "in"),
            Tensor(
                "lse",
                rows,
                FP32,
                "the forward pass's log-sum-exp, natural logarithm; minus infinity in a row that "
                "sees no key",
                aligned=False,
            ),
            Tensor(
                "dlse",
                rows,
                FP32,
                "the gradient of lse; null: 0",
                optional=True,
                aligned=False,
            ),
            tensor("dq", "seqlen_q", "heads", d, "the gradient of q", "out"),
            tensor("dk", "seqlen_k", "kv_heads", d, "the gradient of k", "out"),
            tensor("dv", "seqlen_k", "kv_heads", d_v, "the gradient of v", "out"),
        ),
        scalars=(
            Scalar("scale", "float", "of q kᵀ before the softmax", positive=True, most=MOST_SCALE),
        ),
        order=("dout", "q", "k", "v", "out", "lse", "scale", "dlse"),
        rules=(Multiple("heads", "kv_heads"),),
        no_gradient="the backward pass has none yet",
    )
