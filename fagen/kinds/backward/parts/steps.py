"""Scores: how they become P and dS; steps: in which order GEMMs run, and who runs them."""

from collections.abc import Iterator

from fagen.part import (
    ELEMENT,
    UINT32,
    Array,
    Barrier,
    Part,
    Type,
    amount,
)
from fagen.schedule import Values

_STAGES, _DS_STAGES = amount("stages"), amount("ds_stages")
_DS = amount("block_n", "block_m")
_ONE, _PER_WARP = amount(1), amount("warpgroup", per=32)


def scores(values: Values) -> Iterator[Part]:
    """Yield how scores become P, and P and dP become dS."""
    numbers = Array("statistics", statistics(values), (_STAGES,))
    if not values["ones_in_shared_memory"]:
        yield Part(head=("backward/scores/statistics.cuh",), shared=(numbers,))
        return
    note = (
        "core matrices that serve for all rows: what -delta is multiplied by, and -LSE / scale, "
        "and zeros"
    )
    yield Part(
        head=("backward/scores/side_by_side.cuh",),
        kernel=("backward/scores/ones.cuh",),
        shared=(
            numbers,
            Array("ones", Type("uint4", 16), (amount(24),), note=note, aligned=False),
        ),
    )


def statistics(values: Values) -> Type:
    """Of each row two numbers, as tensor cores multiply them: 16 of 16 bits, one step of K.

    Where the ones that they are multiplied by lie in shared memory, half as many, side by side.
    """
    return Type("Statistics", amount(16 if values["ones_in_shared_memory"] else 32, "block_m"))


def steps(values: Values) -> Iterator[Part]:
    """Yield in which order GEMMs run, and who runs them."""
    shared_by = amount("cluster", "dq_parts", "warpgroup", per=32)
    ds_full = Barrier("ds_full", (_DS_STAGES,), _PER_WARP)
    ds = Array("ds", ELEMENT, (_DS_STAGES, _DS), note="transposed: keys along the rows")
    if values["partition"] == "gradients":
        yield Part(
            named_barriers=("kKeysRead", "kValuesRead"),
            device=("backward/steps/barrier_arrive.cuh",),
            shared=(
                ds,
                Array(
                    "p",
                    UINT32,
                    (_DS_STAGES, amount("block_n", "block_m", per=2)),
                    note="P, in the order of the threads' registers",
                ),
                Barrier("p_full", (_DS_STAGES,), _PER_WARP),
                Barrier("p_empty", (_DS_STAGES,), _PER_WARP),
                ds_full,
                Barrier("ds_empty", (_DS_STAGES,), shared_by),
            ),
        )
    else:
        yield Part(named_barriers=("kAllConsumers",), shared=(ds,))
    if values["dq_by"] == "one":
        yield Part(
            shared=(
                Barrier("ds_full", (_DS_STAGES,), amount("consumers", "warpgroup", per=32)),
                Barrier("ds_empty", (_DS_STAGES,), _PER_WARP),
            )
        )
    if values["cluster"] > 1:
        yield Part(
            named_barriers=("kKeyConsumer",),
            shared=(
                Array("ds_peer", ELEMENT, (_DS_STAGES, _DS), note="of the other block's keys"),
                Barrier("ds_peer_full", (_DS_STAGES,), _ONE, transactions=True),
            ),
        )
