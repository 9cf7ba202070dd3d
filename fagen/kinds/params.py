"""Members of Params that kernels of varlen sequences of several kinds declare alike."""

from fagen.part import INT, Argument, Field, Type, pointer_to

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
