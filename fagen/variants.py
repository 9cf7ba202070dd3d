"""What a call says of the keys that are seen and of scores, as one noun: a variant of attention.

Needs no torch, for `pick` asks too; torch.compile traces it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fagen import masking, scoring
from fagen.argument_names import refuse_unknown_names
from fagen.expr.words import PLAIN
from fagen.given import refused
from fagen.vocab import PARTIALS

# A mask, a score and the dtype of sinks, by their names; where the mask is full or causal and all
# else as usual, whether it is causal.
Variant = bool | tuple[str, str, str]

_SINKS = {
    name: row.name
    for row in PARTIALS.values()
    for name in (row.name, row.torch, f"torch.{row.torch}")
}


class Said(NamedTuple):
    """The variant of a call, and what its kernel is given, as an op takes it behind the scale.

    `names` are what a call says `values` by, and `by_sequence` these again where a value has a
    number of each sequence, else "". Sinks, the last of what a kernel is given, are not among them.
    """

    variant: Variant
    values: tuple[Any, ...]
    by_sequence: tuple[str, ...]
    names: tuple[str, ...]


def said(
    function: Callable[..., Any],
    causal: Any,
    window: Any,
    mask: Any,
    softcap: Any,
    score: Any,
    sinks: Any,
    given: Mapping[str, Any],
) -> Said:
    """Return what a call says; `causal` is a truth, or a tensor of one for each sequence.

    `sinks` is their dtype, or None. Raises TypeError for a name that neither the call, its mask nor
    its score has, ValueError for an argument that is missing or wrong, and for what no kernel
    computes. Of tensors the op will say.
    """
    seen = masking.masked(function, causal, window, mask, given)
    scored = scoring.scored(function, softcap, score, given)
    _refuse_unknown(function, given, seen, scored)
    values = masking.values_of(function, seen, causal, given)
    values += scoring.values_of(function, scored, softcap, given)
    by_sequence = (*seen.by_sequence, *("" for _ in scored.order))
    variant = _variant(seen.name, scored.name, _sink(function, sinks))
    return Said(variant, tuple(values), by_sequence, (*seen.order, *scored.order))


def described(
    function: Callable[..., Any],
    causal: bool,
    window: Any,
    mask: Any,
    softcap: Any,
    score: Any,
    sinks: Any,
    given: Mapping[str, Any],
) -> Variant:
    """Return the variant of calls that give more than is known here.

    `mask` may be any word, and `sinks` is the dtype of sinks, or its name. Raises as `said` does,
    but not for what is missing.
    """
    seen = masking.described(function, causal, window, mask, given)
    scored = scoring.scored(function, softcap, score, given)
    _refuse_unknown(function, given, seen, scored)
    return _variant(seen.name, scored.name, _sink(function, sinks))


def _sink(function: Callable[..., Any], dtype: Any) -> str:
    """The name of the dtype of sinks, or "" without."""
    if dtype is None:
        return ""
    name = _SINKS.get(str(dtype), "")
    if not name:
        known = ", ".join(row.torch for row in PARTIALS.values())
        raise refused(
            function, f"sinks are {dtype}; they must be one of {known}: .float() converts"
        )
    return name


def _variant(mask: str, score: str, sink: str) -> Variant:
    if score == PLAIN and not sink and mask in ("full", "causal"):
        return mask == "causal"
    return mask, score, sink


def names_of(variant: Variant) -> tuple[str, str, str]:
    """Return the names of a variant's mask and score, and of the dtype of its sinks."""
    if isinstance(variant, tuple):
        return variant
    return "causal" if variant else "full", PLAIN, ""


def in_words(variant: Variant) -> str:
    """Return what is said of a variant behind what is not computed yet: "the mask …"."""
    mask, score, sink = names_of(variant)
    parts = [f'under the mask "{mask}"'] * (mask not in ("full", "causal"))
    parts += [f'with the score "{score}"'] * (score != PLAIN)
    parts += ["with sinks"] * bool(sink)
    return " and ".join(parts)


def _refuse_unknown(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    seen: masking.Masked,
    scored: scoring.Scored,
) -> None:
    if not given:
        return
    known = [argument[0] for argument in (*seen.own, *scored.own)]
    if unknown := [name for name in given if name not in known]:
        refuse_unknown_names(function, unknown)
