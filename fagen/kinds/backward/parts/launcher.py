"""The launcher: which kernels a call launches, with how many thread blocks, and what they go by."""

from collections.abc import Iterator

from fagen.part import Part
from fagen.schedule import Values
from fagen.vocab import SCORES


def launcher(values: Values) -> Iterator[Part]:
    """Yield what the host works out of tiles and their order, and what it launches."""
    if values["lengths"] == "varlen":
        launched = "launch_prepare_varlen", "launch_varlen", "launch_round_varlen"
        yield Part(
            workspace=("backward/launcher/list.cuh.j2",),
            host=(*_scale(values), *_texts("varlen")),
            launches=_texts(*launched),
        )
        return
    meanwhile, rising = values["postprocess"], values["mask"].last_by_row
    round_dq = "backward/launcher/launch_round_rest.cuh.j2"
    yield Part(
        workspace=tuple(
            f"backward/outputs/{text}.cuh.j2"
            for text in ("deal", f"deals_{'rising' if rising else 'same'}", "shares")
        ),
        host=(*_scale(values), *_texts(*_order(values))),
        launches=(
            *_texts("launch_prepare", "launch", "launch_sum_shares"),
            *((round_dq,) if meanwhile else _texts("launch_round")),
        ),
    )


def _scale(values: Values) -> tuple[str, ...]:
    acts = SCORES[values["score"]].acts  # nothing is divided by it
    return () if acts else ("backward/launcher/scale.cuh.j2",)


def _order(values: Values) -> Iterator[str]:
    yield from ("pair" if values["cluster"] > 1 else "block", "equal", "l2_share")
    yield "share_in_order" if values["deterministic"] else "share"
    yield "last_section" if values["mask"].last_by_row else "last_head"
    yield from ("sections", "cut")
    yield "persistent" if values["persistent"] else "grid"
    if values["postprocess"]:
        yield "early_blocks"


def _texts(*names: str) -> tuple[str, ...]:
    return tuple(f"backward/launcher/{name}.cuh" for name in names)
