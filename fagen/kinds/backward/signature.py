"""What a call of attention's backward pass takes and gives, for one Plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fagen.kinds.calls import GROUPED, SIZES, Layout, form, scalars
from fagen.kinds.sinks import sinks
from fagen.scores import Score
from fagen.signature import Extent, Limit, Signature, Size
from fagen.vocab import Mask

if TYPE_CHECKING:
    from fagen.kinds.backward.plan import Plan

NO_GRADIENT = "second derivatives are not supported"
INSTEAD = (
    "leave create_graph=True out where none is wanted; torch's "
    "scaled_dot_product_attention has them, under torch.nn.attention.sdpa_kernel("
    "torch.nn.attention.SDPBackend.MATH); an op that was called by itself, call under "
    "torch.no_grad()"
)
# of the op's arguments, offsets and seqused_k of varlen sequences
_FIRST = "dout", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out", "lse", "scale"
_LAST = "sinks", "dlse", "seqused_k"
_VARLEN_SIZES = tuple(map(Size, ("total_q", "total_k", "heads", "kv_heads", "offsets")))


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernels.

    dout and out (B, Sq, H, Dv), q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), lse and dlse
    (B, H, Sq) in fp32; dq, dk and dv are as q, k and v.

    Where sequences lie one after another, each of its own length: dout and out (total_q, H, Dv),
    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv), cu_seqlens_q and cu_seqlens_k
    (B + 1) and seqused_k (B) in int32, lse and dlse (H, total_q).
    """
    d, d_v, varlen = plan.head_dim, plan.head_dim_v, plan.varlen
    given = plan.mask, plan.score
    layout = Layout(plan.dtype, varlen)
    note = f"the gradient of {{}}{'; zeros in a row of no sequence' * varlen}"
    return Signature(
        kind=plan.kind,
        form=form("varlen" * varlen, of=given, sink=plan.sink is not None),
        version=1,
        sizes=_VARLEN_SIZES if varlen else SIZES,
        tensors=(
            layout.queries("dout", d_v, "the gradient of out"),
            layout.queries("q", d),
            layout.keys("k", d),
            layout.keys("v", d_v),
            *layout.offsets("; offsets = batch + 1", ". Gradients of the others are 0"),
            *layout.tables(plan.mask),
            layout.queries("out", d_v, "the forward pass's"),
            layout.numbers(
                "lse",
                "the forward pass's log-sum-exp, natural logarithm; minus infinity in a row that "
                "sees no key",
            ),
            *sinks(plan.sink),
            layout.numbers("dlse", "the gradient of lse; null: 0", optional=True),
            layout.queries("dq", d, note.format("q"), access="out"),
            layout.keys("dk", d, note.format("k"), access="out"),
            layout.keys("dv", d_v, note.format("v"), access="out"),
            *(
                replace(
                    own, name="dsinks", note="the gradient of sinks", access="out", if_empty=0.0
                )
                for own in sinks(plan.sink)
            ),
        ),
        scalars=scalars(plan.mask, plan.score),
        order=order_of(given),
        rules=GROUPED,
        limits=(Limit("tiles", key_blocks_of(plan)), Limit("blocks of rows", row_blocks_of(plan))),
        no_gradient=NO_GRADIENT,
        instead=INSTEAD,
    )


def order_of(given: tuple[Mask | Score, ...]) -> tuple[str, ...]:
    """Return the names of the op's arguments in order, with what a mask or a score is given.

    Some are of varlen sequences alone, and of calls with sinks.
    """
    return *_FIRST, *(name for one in given for name in one.given), *_LAST


def row_blocks_of(plan: "Plan") -> tuple[Extent, ...]:
    """How many blocks of block_m rows a call has; of varlen at most."""
    return Layout(plan.dtype, plan.varlen).tiles("q", "heads", plan.block_m)


def key_blocks_of(plan: "Plan") -> tuple[Extent, ...]:
    """The same of blocks of keys, of which a cluster has some each."""
    return Layout(plan.dtype, plan.varlen).tiles("k", "kv_heads", plan.block_n, plan.cluster)
