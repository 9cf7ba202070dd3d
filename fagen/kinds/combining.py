"""The part of kernels that give partial outputs of splits: where they go, and who combines them."""

from fagen.part import (
    DIVISOR,
    ELEMENT,
    FLOAT,
    INT64,
    OUT_ELEMENT,
    Argument,
    Constant,
    Divisor,
    Field,
    Part,
    Type,
    pointer_to,
)

# where a row's splits begin: with the first, or with the first that it sees keys of
EVERY_SPLIT, SEEN_SPLITS = (f"attention/combine/{way}.cuh.j2" for way in ("every", "seen"))


_WEIGHTS = ("attention/combine/weights.cuh.j2",)
# how far references of scores lie apart: by one scale of all rows, or by that of a row
_RISE = {False: "attention/combine/rise.cuh", True: "attention/combine/rise_of_row.cuh"}


# what joins a row's sums, and what becomes of them, by whether it is descaled and has a sink
_SUMS: dict[tuple[bool, bool], tuple[str, ...]] = {
    (False, False): (),
    (True, False): (),
    (False, True): ("attention/combine/sink.cuh",),
    (True, True): ("attention/combine/sink_of_row.cuh",),
}
_AHEAD: dict[bool, tuple[str, ...]] = {
    False: (),
    True: ("attention/combine/sink_ahead.cuh",),
}
_COMBINED = {
    (False, False): ("write.cuh", "log_sum.cuh"),
    (True, False): ("columns.cuh", "write_descaled.cuh", "log_sum_of_row.cuh"),
    (False, True): ("write.cuh", "log_sum_with_sink.cuh"),
    (True, True): ("columns_beside_sink.cuh", "write_descaled.cuh", "log_sum_with_sink.cuh"),
}
_COMBINES_SINK = "attention/sinks/combine.cuh"


def combining(
    start: str,
    output: str = "average",
    *,
    in_registers: bool = False,
    descaled: bool = False,
    sink: bool = False,
    descales: str = "descales.cuh.j2",
) -> Part:
    """Return the part by which splits of the keys give partial outputs that a kernel combines.

    `start` says where a row's splits begin, `output` how it is made of its sums. Thread blocks may
    combine splits that they have one after the other, `in_registers`. Where Q, K and V come with
    descales and means, a row is `descaled`, by a text of `descales`. A `sink` follows the last
    split.
    """
    weights = (*_WEIGHTS, *((_COMBINES_SINK,) if sink else ()))
    return Part(
        head=("attention/combine/share.cuh",),
        methods=("attention/combine/partial.cuh", _RISE[descaled]),
        device=("sm90/dependent_launch.cuh", *(weights if in_registers else ())),
        kernels=(
            *(() if in_registers else weights),
            f"attention/combine/{output}.cuh",
            "attention/combine/kernel.cuh.j2",
        ),
        combine=(*_AHEAD[sink], start, *((f"attention/combine/{descales}",) if descaled else ())),
        sums=_SUMS[descaled, sink],
        combined=tuple(f"attention/combine/{text}" for text in _COMBINED[descaled, sink]),
        host=("attention/combine/launch.cuh",),
        params=(
            Field(
                "partials",
                pointer_to(FLOAT),
                Argument("workspace"),
                "(batch, splits, seqlen_q, heads, columns of V): sums of P V",
            ),
            Field("shares", pointer_to(Type("Share")), note="(batch, splits, seqlen_q, heads)"),
            Field("out", pointer_to(OUT_ELEMENT if descaled else ELEMENT), Argument("out")),
            Field("lse", pointer_to(FLOAT), Argument("lse"), "may be null"),
            *(Field(name, INT64, Argument(name)) for name in _STRIDES),
            Field("heads_divisor", DIVISOR, Divisor(Argument("heads"))),
            Field("seqlen_q_divisor", DIVISOR, Divisor(Argument("seqlen_q"))),
        ),
        constants=(Constant("num_splits", "that a sequence's keys are cut into, at most"),),
    )


_STRIDES = (
    *("out_stride_batch", "out_stride_seq", "out_stride_head"),
    *("lse_stride_batch", "lse_stride_head"),
)
