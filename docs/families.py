"""Which families of models are served: docs/families.toml in, rows of a table out."""

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fagen.dispatch.pick import pick
from fagen.errors import ScheduleError

# What a pass is, as fagen.pick names its kernels.
PASSES = {"train": "backward", "prefill": "forward", "decode": "decode"}

# What a layer asks for beside its head dims, and what that is called where no kernel has it.
ASKED = {"window": "windows", "mask": "{}", "softcap": "softcap", "sinks": "sinks"}


def families() -> list[dict[str, Any]]:
    """Return the families as they are written down."""
    path = Path(__file__).with_name("families.toml")
    found: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["family"]
    return found


def served(family: dict[str, Any], name: str) -> list[str] | None:
    """Return what no kernel has of a family in a pass: nothing where it is served.

    None where it has no such pass.
    """
    layers = family["decode"] if name == "decode" and "decode" in family else family["layers"]
    if not layers:
        return None
    lacks = "lacks" in family and name in family.get("lacks_in", PASSES)
    missing = [family["lacks"]] if lacks else []
    for layer in layers:
        if name == "train":
            missing += _missing(layer, "forward")
        missing += _missing(layer, PASSES[name])
    return list(dict.fromkeys(missing))


def _missing(layer: dict[str, Any], kind: str) -> list[str]:
    """What of a layer no kernel has: what it asks for alone, else its head dims."""
    if _is_served(layer, kind):
        return []
    plain = {key: value for key, value in layer.items() if key not in ASKED}
    if not _is_served(plain, kind):
        dims = [layer[key] for key in ("head_dim", "head_dim_v") if key in layer]
        return [f"head dim {'/'.join(map(str, dims))}"]
    of = "gradients of " if kind == "backward" else ""
    asked = {key: value for key, value in layer.items() if key in ASKED}
    alone = [key for key, value in asked.items() if not _is_served(plain | {key: value}, kind)]
    return [of + ASKED[key].format(_called(asked[key])) for key in alone or asked]


def _called(mask: Any) -> str:
    """What a mask is called that a layer asks for."""
    return {"chunked": "chunks", "document": "tables of spans"}.get(mask, "masks by text")


def _is_served(layer: dict[str, Any], kind: str) -> bool:
    return _picked(kind, tuple(layer.items()))


@cache
def _picked(kind: str, layer: tuple[tuple[str, Any], ...]) -> bool:
    """Whether there is a kernel, tuned or derived."""
    try:
        pick(dtype="bf16", kind=kind, **dict(layer))
    except ScheduleError as error:
        if not str(error).startswith(("no kernel computes", "head_dim")):
            raise
        return False
    return True


def table() -> Iterator[str]:
    """The rows of docs/model.md's table, one for all families of which the same is so."""
    counts = dict.fromkeys(PASSES, 0)
    rows: dict[str, list[str]] = {}
    for family in families():
        lacks = {name: served(family, name) for name in PASSES}
        cells = {
            name: "–" if missing is None else "yes" if not missing else "no"
            for name, missing in lacks.items()
        }
        for name, cell in cells.items():
            counts[name] += cell == "yes"
        why = dict.fromkeys(word for missing in lacks.values() for word in missing or ())
        rows.setdefault(f"{' | '.join(cells.values())} | {', '.join(why)}", []).append(
            family["name"]
        )
    yield f"| of {len(families())} families | train | prefill | decode | what no kernel has |"
    yield "|---|---|---|---|---|"
    yield from (f"| {' · '.join(names)} | {row} |" for row, names in rows.items())
    yield "| served | " + " | ".join(map(str, counts.values())) + " | |"
