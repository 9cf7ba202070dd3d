"""The launcher: which kernels a call launches, with how many thread blocks, and what they go by."""

from collections.abc import Iterator

from fagen.part import Part
from fagen.schedule import Values
from fagen.vocab import SCORES, Mask


def launcher(values: Values) -> Iterator[Part]:
    """Yield what the host works out of tiles and their order, and what it launches."""
    of_sinks = ("launch_sum_sinks",) * bool(values["sink"])
    if values["lengths"] == "varlen":
        launched = "launch_prepare_varlen", "launch_varlen", "launch_round_varlen"
        yield Part(
            workspace=("backward/launcher/list.cuh.j2",),
            host=(*_scale(values), *_texts("varlen")),
            launches=_texts(*launched, *of_sinks),
        )
        return
    meanwhile = values["postprocess"]
    deals = "deals_whole"
    if cuts_rows(values["mask"]):
        deals = f"deals_{'rising' if values['mask'].last_by_row else 'same'}"
    round_dq = "backward/launcher/launch_round_rest.cuh.j2"
    yield Part(
        workspace=tuple(f"backward/outputs/{text}.cuh.j2" for text in ("deal", deals, "shares")),
        host=(*_scale(values), *_texts(*_order(values))),
        launches=(
            *_texts("launch_prepare", "launch", "launch_sum_shares"),
            *((round_dq,) if meanwhile else _texts("launch_round")),
            *_texts(*of_sinks),
        ),
    )


def _scale(values: Values) -> tuple[str, ...]:
    acts = SCORES[values["score"]].acts  # nothing is divided by it
    return () if acts else ("backward/launcher/scale.cuh.j2",)


def cuts_rows(mask: Mask) -> bool:
    """Whether rows may be cut in two: where their number alone tells who sees a tile's keys."""
    return not (mask.given or mask.first_by_row)


def has_tails(values: Values) -> bool:
    """Whether the tiles of a head's last keys, which begin with the same rows, come late."""
    mask = values["mask"]
    return mask.first_by_row and mask.first_steady and not mask.tables


def _order(values: Values) -> Iterator[str]:
    yield from ("pair" if values["cluster"] > 1 else "block", "deal")
    yield from ("cut_blocks" if cuts_rows(values["mask"]) else "no_cut_blocks", "equal", "l2_share")
    yield "share_in_order" if values["deterministic"] else "share"
    rising = cuts_rows(values["mask"]) and values["mask"].last_by_row
    yield "last_section" if rising else "last_head"
    yield "sections"
    if cuts_rows(values["mask"]):
        yield "cut"
    else:
        yield from ("whole", "tails" if has_tails(values) else "no_tails")
    yield "persistent" if values["persistent"] else "grid"
    if values["postprocess"]:
        yield "early_blocks"


def _texts(*names: str) -> tuple[str, ...]:
    return tuple(f"backward/launcher/{name}.cuh" for name in names)
