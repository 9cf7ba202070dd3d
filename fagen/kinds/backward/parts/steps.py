"""Scores: how they become P and dS; steps: in which order GEMMs run, and who runs them."""

from collections.abc import Iterator

from fagen.kinds.backward.parts.tiles import rounds, works_out_anew
from fagen.kinds.scores import elements
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
from fagen.vocab import SCORES

_STAGES, _DS_STAGES = amount("stages"), amount("ds_stages")
_DS = amount("block_n", "block_m")
_ONE, _PER_WARP = amount(1), amount("warpgroup", per=32)


def scores(values: Values) -> Iterator[Part]:
    """Yield how scores become P, and P and dP become dS."""
    yield _multiplied(values)
    yield from elements(values, "backward/scores/exponentiate_scored.cuh.j2")
    numbers = Array("statistics", statistics(values), (_STAGES,))
    layout = _layout(values)
    parts = ("in_parts.cuh",) * (layout != "side_by_side")
    yield Part(
        head=texts("scores", f"{layout}.cuh", *parts),
        shared=(numbers,),
    )
    if not values["ones_in_shared_memory"]:
        return
    note = (
        "core matrices that serve for all rows: what -delta is multiplied by, and -LSE / scale, "
        "and zeros"
    )
    yield Part(
        entry=("backward/scores/ones.cuh",),
        shared=(Array("ones", Type("uint4", 16), (amount(24),), note=note, aligned=False),),
    )


def _multiplied(values: Values) -> Part:
    """How S, P, dP and dS are computed."""
    ones, by_keys = values["ones_in_shared_memory"], values["partition"] == "keys"
    products = "issue_scores_of_kept_k.cuh" if values["kept"] == "k" else "issue_scores.cuh.j2"
    ones_lie = f"ones_in_{'shared_memory' if ones else 'registers'}.cuh"
    exponentiates: tuple[str, ...] = ("exponentiate.cuh.j2",)
    packed = not (by_keys and (values["slopes_fit"] or not SCORES[values["score"]].acts))
    if SCORES[values["score"]].acts:
        sloped = f"sloped{'_packed' * packed}.cuh"
        products, exponentiates = "issue_products.cuh", (sloped,)
        ones_lie = ones_lie if ones else "ones_of_delta.cuh"
    return Part(
        device=(
            *(f"sm90/{name}.cuh" for name in ("accumulators", "elements", "exp2")),
            "sm90/store_matrices.cuh",
            "backward/scores/wgmma.cuh.j2",
        ),
        consumer=texts(
            "scores",
            *(ones_lie, products, "issue_dp.cuh.j2", *exponentiates, "pack_scores.cuh"),
            f"differentiate{'_packed' * packed}.cuh",
        ),
    )


def texts(folder: str, *names: str) -> tuple[str, ...]:
    """Return files of a folder of the backward kernel's templates."""
    return tuple(f"backward/{folder}/{name}" for name in names)


def statistics(values: Values) -> Type:
    """Of each row two numbers, as tensor cores multiply them: 16 of 16 bits, one step of K.

    Where the ones that they are multiplied by lie in shared memory, half as many, side by side;
    with scores as many of one, and the other as it is.
    """
    return Type("Statistics", amount(_STATISTICS[_layout(values)], "block_m"))


# bytes of a row, by how they lie
_STATISTICS = {"statistics": 32, "side_by_side": 16, "statistics_of_delta": 20}


def _layout(values: Values) -> str:
    if SCORES[values["score"]].acts:
        return "statistics_of_delta"
    return "side_by_side" if values["ones_in_shared_memory"] else "statistics"


def steps(values: Values) -> Iterator[Part]:
    """Yield in which order GEMMs run, and who runs them."""
    turned = "_transposed" if values["dq_transposed"] else ""
    yield Part(
        consumer=(
            *texts("steps", "store_ds.cuh.j2", "issue_gradients.cuh", "multiply_dq.cuh"),
            *texts("steps", f"issue_dq{turned}.cuh"),
        )
    )
    shared_by = amount("cluster", "dq_parts", "warpgroup", per=32)
    ds_full = Barrier("ds_full", (_DS_STAGES,), _PER_WARP)
    ds = Array("ds", ELEMENT, (_DS_STAGES, _DS), note="transposed: keys along the rows")
    if values["partition"] == "gradients":
        yield Part(
            named_barriers=("kKeysRead", "kValuesRead"),
            device=("sm90/barrier_arrive.cuh",),
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
            device=("backward/steps/gradients/peer.cuh",),
            shared=(
                Array("ds_peer", ELEMENT, (_DS_STAGES, _DS), note="of the other block's keys"),
                Barrier("ds_peer_full", (_DS_STAGES,), _ONE, transactions=True),
            ),
        )


def consumers(values: Values) -> Iterator[Part]:
    """Yield what steps of all kinds go by: rings, turns, and which of a tile's keys are whose."""
    turns = "turns_by_stage.cuh"
    if values["counts_steps"]:
        turns = "turns_of_tiles.cuh.j2" if values["persistent"] else "turns_counted.cuh"
    rows = f"{values['partition']}/rows.cuh"
    rings, *others = texts("steps", "rings.cuh.j2", rows, "arrive.cuh")
    yield Part(consumer=(rings, *texts("sums", turns), *others))


def runs(values: Values) -> Iterator[Part]:
    """Yield what consumers run: their steps, of what all slots before have."""
    partition = values["partition"]
    own = _by_keys(values) if partition == "keys" else _by_gradients(values)
    *members, run = texts(f"steps/{partition}", *own)
    yield Part(
        consumer=(*members, f"backward/steps/{_steps(values)}.cuh.j2", run),
        consumer_role=texts("roles", f"{_role(values)}.cuh"),
    )


def _steps(values: Values) -> str:
    way = rounds(values)
    if values["mask"].first_by_row:
        return f"{way}_between"
    varlen = way == "block_by_block" and values["lengths"] == "varlen"
    return f"{way}{'_varlen' * varlen}"


def _role(values: Values) -> str:
    if values["partition"] == "gradients":
        return "by_gradients"
    if values["last_makes_more"]:
        return "last_makes_more"
    way = "one_makes_dq" if values["dq_by"] == "one" else "by_keys"
    return f"{way}_persistent" if values["persistent"] else way


def _by_keys(values: Values) -> Iterator[str]:
    """Yield members of consumers that each have 64 keys of their own."""
    ones, by = values["ones_in_shared_memory"], f"dq_by_{values['dq_by']}.cuh.j2"
    by = "dq_by_all_last_more.cuh" if values["last_makes_more"] else by
    yield "scores_and_dp.cuh" if ones else "statistics_scores_and_dp.cuh"
    yield by
    yield f"step{'_scored' * SCORES[values['score']].acts}.cuh.j2"
    if values["passes"]:
        yield f"pass_{by}"
        yield "pass.cuh.j2"
    if values["persistent"]:
        yield "run_persistent.cuh.j2"
    else:
        yield "run_anew.cuh.j2" if works_out_anew(values) else "run.cuh.j2"


def _by_gradients(values: Values) -> Iterator[str]:
    """Yield members of consumers that each have one gradient of the same keys."""
    pair, ahead = values["cluster"] > 1, values["intra_warpgroup"]
    yield f"release{'_pair' if pair else ''}.cuh"
    yield "dq_of_pair.cuh" if pair else "dq.cuh"
    yield "p.cuh"
    yield f"make_p{'_scored' * SCORES[values['score']].acts}.cuh.j2"
    yield "step_dv_ahead.cuh" if ahead else "step_dv.cuh"
    yield "dk_and_dq.cuh.j2" if values["both_make_dq"] else "dk_alone.cuh"
    yield "step_dk.cuh.j2"
    yield "run.cuh.j2"
