"""What a call of attention takes and gives, for one Plan."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fagen.kinds.calls import BATCH, GROUPED, SIZES, Layout, form, scalars
from fagen.kinds.sinks import sinks
from fagen.signature import MAX_SIZE, Dim, Extent, Limit, Signature, Size, Tensor
from fagen.vocab import FP32, KEY_ORDER

if TYPE_CHECKING:
    from fagen.kinds.forward.plan import Plan

_KEYS = len(KEY_ORDER)  # transposed V is padded to whole groups of them
_COLUMN_STRIDES = ("batch", "column", "head")  # of numbers by column, in the order of the C struct
_VARLEN_SIZES = tuple(map(Size, ("total_q", "total_k", "offsets", "heads", "kv_heads")))


def signature(plan: "Plan") -> Signature:
    """Return the signature of the Plan's kernel.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), or transposed (B, Hk, Dv, Sk to 16), out
    (B, Sq, H, Dv), lse (B, H, Sq) in fp32. Where Q, K and V have scales, descales in fp32 (B, H or
    Hk, blocks), of V (B, Hk, Dv) unless they are by block, and what was taken off K and V before
    they were quantised, k_mean (B, Hk, D) and v_mean (B, Hk, Dv).

    Where sequences lie one after another, each of its own length: q (total_q, H, D), k (total_k,
    Hk, D), v (total_k, Hk, Dv), cu_seqlens_q and cu_seqlens_k (B + 1) and seqused_k (B) in int32,
    out (total_q, H, Dv), lse (H, total_q) in fp32. With scales the struct is another one.
    """
    varlen, given = plan.varlen, (plan.mask, plan.score)
    layout = Layout(plan.dtype, varlen)
    made_from = "{name}[None]" if varlen else "{name}"
    conversion = f"fagen.quantize({made_from}) makes it so, with its descale"
    how: dict[str, Any] = {"conversion": conversion if plan.descales else ""}
    v = layout.keys("v", plan.head_dim_v, **how)
    if plan.descales and not plan.v_rows:
        # of each 16 keys, place i of a row holds key KEY_ORDER[i]; places past seqlen_k hold 0
        order = " ".join(map(str, KEY_ORDER))
        v = Tensor(
            "v",
            (
                BATCH,
                Dim(Extent("kv_heads"), "head"),
                Dim(Extent(number=plan.head_dim_v), "seq"),
                Dim(Extent("seqlen_k", per=_KEYS, times=_KEYS)),
            ),
            plan.dtype,
            f"transposed: each 16 keys in the order {order}, zeros past seqlen_k",
            **how,
        )
    return Signature(
        kind=plan.kind,
        form=form(
            "varlen" * varlen,
            "fp8" * (varlen and plan.descales),
            of=given,
            sink=plan.sink is not None,
        ),
        version=1 if varlen else 3,
        sizes=_VARLEN_SIZES if varlen else SIZES,
        tensors=(
            layout.queries("q", plan.head_dim, **how),
            layout.keys("k", plan.head_dim, **how),
            v,
            *layout.offsets(),
            *layout.tables(plan.mask),
            *sinks(plan.sink),
            *(_numbers(plan) if plan.descales or not varlen else ()),
            layout.queries(
                "out",
                plan.head_dim_v,
                f"zeros in a row that sees no key{', or is of no sequence' * varlen}",
                dtype=plan.out_dtype,
                access="out",
            ),
            layout.lse(),
        ),
        scalars=scalars(plan.mask, plan.score),
        order=(
            *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale"),
            *(*plan.mask.given, *plan.score.given),
            *("sinks", "seqused_k"),
            *("q_descale", "k_descale", "v_descale", "v_mean", "k_mean"),
        ),
        rules=GROUPED,
        limits=(_limit(plan),),
        no_gradient="this op has no backward",
        gradients_by="" if plan.descales else f"fagen.attention{'_varlen' * varlen}",
    )


def tiles_of(plan: "Plan") -> tuple[Extent, ...]:
    """How many tiles of block_m rows a call has; of varlen at most."""
    return Layout(plan.dtype, plan.varlen).tiles("q", "heads", plan.block_m, plan.order.cluster)


def _limit(plan: "Plan") -> Limit:
    if plan.num_splits == 1:
        return Limit("tiles", tiles_of(plan))
    rows = Extent("seqlen_q"), Extent("heads"), Extent("batch")
    return Limit("rows of splits", (*rows, Extent(number=plan.num_splits)))


def _numbers(plan: "Plan") -> tuple[Tensor, ...]:
    """Descales and means; of varlen sequences the batch is that of the offsets."""
    batch = Extent("offsets", plus=-1) if plan.varlen else Extent("batch")
    rows = plan.scales.rows

    def given(name: str, heads: str, last: Dim, note: str, strides: tuple[str, ...]) -> Tensor:
        by_block = bool(rows) and last.extent.name != ""
        return Tensor(
            name,
            (Dim(batch, "batch", broadcast=True), Dim(Extent(heads), "head", broadcast=True), last),
            FP32,
            note,
            present=plan.descales,
            optional=not by_block,
            missing=f"this kernel has scales by block of {rows} rows" if by_block else "",
            aligned=False,
            max_stride=MAX_SIZE,
            all_strides=strides,
        )

    def descale(name: str, seqlen: str, heads: str) -> Tensor:
        """What the numbers of a tensor are to be multiplied by: one for each block, or one."""
        blocks = Dim(Extent(seqlen, per=rows) if rows else Extent(number=1))
        note = (
            f"what {name} is to be multiplied by, finite and above 0{'' if rows else '; null: 1'}"
        )
        strides = _COLUMN_STRIDES if name == "v" else ()
        return given(f"{name}_descale", heads, blocks, note, strides)

    def by_column(name: str, columns: int, note: str) -> Tensor:
        """Numbers of the columns of K's or V's heads; a dimension of 1 serves for all."""
        column = Dim(Extent(number=columns), "column", broadcast=True)
        return given(name, "kv_heads", column, note, ())

    column_note = "what columns of v are to be multiplied by, finite and above 0; null: 1"
    taken_off = "what was taken off columns of {} before they were quantised; null: nothing"
    return (
        descale("q", "seqlen_q", "heads"),
        descale("k", "seqlen_k", "kv_heads"),
        descale("v", "seqlen_k", "kv_heads")
        if plan.scales.v_by_block
        else by_column("v_descale", plan.head_dim_v, column_note),
        by_column("v_mean", plan.head_dim_v, taken_off.format("v")),
        replace(
            by_column("k_mean", plan.head_dim, taken_off.format("k")),
            refused=f"the score {plan.score.name} of keys less their mean is another"
            if plan.score.acts
            else "",
        ),
    )
