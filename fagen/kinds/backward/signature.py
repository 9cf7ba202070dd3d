"""What a call of attention's backward pass takes and gives, for one Plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fagen.signature import Dim, Extent, Limit, Multiple, Scalar, Signature, Size, Tensor
from fagen.vocab import FP32, INT32

if TYPE_CHECKING:
    from fagen.kinds.backward.plan import Plan

MOST_SCALE = 1e8  # as of the forward pass
NO_GRADIENT = "second derivatives are not supported"
INSTEAD = (
    "leave create_graph=True out where none is wanted; torch's "
    "scaled_dot_product_attention has them, under torch.nn.attention.sdpa_kernel("
    "torch.nn.attention.SDPBackend.MATH); an op that was called by itself, call under "
    "torch.no_grad()"
)

_BATCH = Dim(Extent("batch"), "batch")


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernels.

    dout and out (B, Sq, H, Dv), q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), lse and dlse
    (B, H, Sq) in fp32; dq, dk and dv are as q, k and v. Where sequences have lengths of their own
    it is that of `varlen`.
    """
    if plan.varlen:
        return varlen(plan)

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
        limits=(Limit("tiles", key_blocks_of(plan)), Limit("blocks of rows", row_blocks_of(plan))),
        no_gradient=NO_GRADIENT,
        instead=INSTEAD,
    )


def row_blocks_of(plan: "Plan") -> tuple[Extent, ...]:
    """How many blocks of block_m rows a call has; of varlen at most.

    There each offset may begin one, since the rows around all sequences are some too.
    """
    if plan.varlen:
        return Extent("total_q", per=plan.block_m, more="offsets"), Extent("heads")
    return Extent("seqlen_q", per=plan.block_m), Extent("heads"), Extent("batch")


def key_blocks_of(plan: "Plan") -> tuple[Extent, ...]:
    """The same of blocks of keys, of which a cluster has some each."""
    if plan.varlen:
        return Extent("total_k", per=plan.block_n, more="offsets"), Extent("kv_heads")
    keys = Extent("seqlen_k", per=plan.block_n * plan.cluster, times=plan.cluster)
    return keys, Extent("kv_heads"), Extent("batch")


# as of the forward pass: a tensor map goes back by 2^30 rows, in strides below 2^34 elements
_MOST_PACKED_STRIDE = 1 << 32


def varlen(plan: "Plan") -> Signature:
    """Return the signature of kernels whose sequences lie one after another, each of its length.

    dout and out (total_q, H, Dv), q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv),
    cu_seqlens_q and cu_seqlens_k (B + 1) and seqused_k (B) in int32, lse and dlse (H, total_q) in
    fp32; dq, dk and dv are as q, k and v.
    """

    def tensor(name: str, total: str, heads: str, columns: int, note: str = "") -> Tensor:
        dims = (
            Dim(Extent(total), "seq"),
            Dim(Extent(heads), "head"),
            Dim(Extent(number=columns)),
        )
        return Tensor(name, dims, plan.dtype, note, max_stride=_MOST_PACKED_STRIDE)

    def gradient(of: str, total: str, heads: str, columns: int) -> Tensor:
        said = f"the gradient of {of}; zeros in a row of no sequence"
        return replace(tensor(f"d{of}", total, heads, columns, said), access="out")

    def lengths(name: str, extent: Extent, note: str, *, optional: bool = False) -> Tensor:
        return Tensor(name, (Dim(extent),), INT32, note, optional=optional, aligned=False)

    def numbers(name: str, note: str, *, optional: bool = False) -> Tensor:
        dims = (Dim(Extent("heads"), "head"), Dim(Extent("total_q")))
        return Tensor(name, dims, FP32, note, optional=optional, aligned=False)

    d, d_v = plan.head_dim, plan.head_dim_v
    begins = (
        "the row of {} at which each sequence begins, and the end of the last; offsets = batch + 1"
    )
    order = ("dout", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out", "lse", "scale")
    return Signature(
        kind=plan.kind,
        form="varlen",
        version=1,
        sizes=tuple(map(Size, ("total_q", "total_k", "heads", "kv_heads", "offsets"))),
        tensors=(
            tensor("dout", "total_q", "heads", d_v, "the gradient of out"),
            tensor("q", "total_q", "heads", d),
            tensor("k", "total_k", "kv_heads", d),
            tensor("v", "total_k", "kv_heads", d_v),
            lengths(
                "cu_seqlens_q", Extent("offsets"), begins.format("q") + "; offsets = batch + 1"
            ),
            lengths("cu_seqlens_k", Extent("offsets"), begins.format("k and v")),
            lengths(
                "seqused_k",
                Extent("offsets", plus=-1),
                "how many of its keys each sequence sees, the first ones; null: all. Gradients of "
                "the others are 0",
                optional=True,
            ),
            tensor("out", "total_q", "heads", d_v, "the forward pass's"),
            numbers(
                "lse",
                "the forward pass's log-sum-exp, natural logarithm; minus infinity in a row that "
                "sees no key",
            ),
            numbers("dlse", "the gradient of lse; null: 0", optional=True),
            gradient("q", "total_q", "heads", d),
            gradient("k", "total_k", "kv_heads", d),
            gradient("v", "total_k", "kv_heads", d_v),
        ),
        scalars=(
            Scalar("scale", "float", "of q kᵀ before the softmax", positive=True, most=MOST_SCALE),
        ),
        order=(*order, "dlse", "seqused_k"),
        rules=(Multiple("heads", "kv_heads"),),
        limits=(Limit("tiles", key_blocks_of(plan)), Limit("blocks of rows", row_blocks_of(plan))),
        no_gradient=NO_GRADIENT,
        instead=INSTEAD,
    )
