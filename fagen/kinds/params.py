"""Members of Params that kernels of several kinds declare alike: varlen sequences, and masks."""

from collections.abc import Iterator

from fagen.part import INT, INT64, Argument, Field, Type, pointer_to
from fagen.vocab import Mask

TO_INT32 = pointer_to(Type("int32_t"), const=True)

# by which a kernel finds varlen sequences; who fills in where those of Q begin, each kind says
CU_SEQLENS_Q = Field("cu_seqlens_q", TO_INT32, note="where sequences begin, and the last one ends")
VARLEN_KEYS = (
    Field("cu_seqlens_k", TO_INT32, Argument("cu_seqlens_k"), "the same of keys"),
    Field(
        "seqused_k",
        TO_INT32,
        Argument("seqused_k"),
        "of how many keys each is to see the first ones; null: of all",
    ),
    *(Field(name, INT, Argument(name)) for name in ("total_q", "total_k")),
)


def given(mask: Mask, by_sequence: bool) -> Iterator[Field]:
    """Yield what a call gives to a mask, of rows of each sequence if it is `by_sequence`."""
    for one in mask.parameters:
        yield Field(one.name, INT, Argument(one.name))
    for name in (*mask.batch_tables, *mask.row_tables):
        yield Field(name, TO_INT32, Argument(name))
    for stride in (f"{name}_stride_batch" for name in mask.row_tables * by_sequence):
        yield Field(stride, INT64, Argument(stride))
