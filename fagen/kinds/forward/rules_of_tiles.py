"""Rules of tiles whose rows are of several heads, or which are cut into parts of their keys."""

from fagen.schedule import Broken, Values
from fagen.toml_lines import shown
from fagen.vocab import DTYPES, MASKS, SCORES


def rules_of_parts(keys: Values) -> Broken:
    """Of those that are cut: their parts are added up by who ends last."""
    if MASKS[keys["mask"]].by_row or keys["transposes"] != "kernel":
        why = (
            'is for a full mask and transposes = "kernel" so far; use "persistent", or leave it out'
        )
        yield "order", f'"{keys["order"]}" {why}'
    for key, only in (("cluster", 1), ("num_splits", 1), ("sum", "threads"), ("lengths", "equal")):
        if keys[key] != only:
            yield key, f'must be {shown(only)} with order = "{keys["order"]}"; leave it out'
    if keys["promote"] and not keys["promote_columns"]:
        fault = f'needs promote_columns with order = "{keys["order"]}", since parts are of O alone'
        yield "promote", f"{fault}; use that, or leave it out"


def rules_of_packs(keys: Values) -> Broken:
    """Of those whose rows are of several heads."""
    if DTYPES[keys["dtype"]].fp8:
        yield from _of_packs_in_fp8(keys)
    for key, only, why in (
        ("producer", "warp", "which copies several heads in a box"),
        ("num_splits", 1, "splits are of a head each"),
        ("cluster", 1, "of so few tiles none are neighbours"),
    ):
        if keys[key] != only:
            yield key, f"must be {shown(only)} with pack_gqa = true: {why}; leave it out"


def _of_packs_in_fp8(keys: Values) -> Broken:
    for key, only, why in (
        ("lengths", "equal", "heads of varlen sequences share tiles in 16 bits so far"),
        ("scales", "head", "a block's rows are of one head"),
        ("maximum", "online", "a lazy one is raised for rows of one head"),
    ):
        if keys[key] != only:
            yield key, f"must be {shown(only)} with pack_gqa = true in e4m3: {why}; leave it out"
    if SCORES[keys["score"]].acts and keys["sink"]:
        yield (
            "sink",
            "does not go with such a score and pack_gqa = true in e4m3 so far; leave it out",
        )
