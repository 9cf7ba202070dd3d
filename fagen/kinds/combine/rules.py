"""What follows from the keys of combining: the derived default, and slugs."""

from fagen.arch import SM90
from fagen.kinds.sinks import SINK_WORDS
from fagen.schedule import Code, Derived, Former, Keys, SlugForm, Values
from fagen.vocab import LAYOUTS, PARTIALS

_ONE_WAY = "is gone: every combining kernel takes rows in one way; leave it out"

# what schedules once said
_FORMER: Former = {
    **dict.fromkeys(("threads", "loads", "stages"), _ONE_WAY),
    ("layout", "packed"): 'is called "varlen" now',
}

_SLUG = SlugForm(
    head="comb_{dtype}_d{head_dim}",
    codes=(
        Code("out_dtype", words={name: f"o{name}" for name in PARTIALS}),
        Code("layout", words={name: name for name in LAYOUTS}),
        Code("sink", words=SINK_WORDS),
    ),
    example="comb_fp32_d128_obf16",
    former={r"[tls]\d+": _ONE_WAY, "packed": "is called varlen now"},
)

LOAD_BYTES = 16
_LOADS = 2  # that a lane makes of a row, at most


def lanes(values: Values) -> int:
    """How many lanes share a row, each with its loads: a power of two, or whole warps.

    What is left over of them is idle.
    """
    needed = -(-row_loads(values) // _LOADS)
    if needed > SM90.warp_threads:
        return -(-needed // SM90.warp_threads) * SM90.warp_threads
    return 1 << (needed - 1).bit_length()


def row_loads(values: Values) -> int:
    """How many loads a row takes."""
    return int(values["head_dim"] * PARTIALS[values["dtype"]].bytes // LOAD_BYTES)


def is_ragged(values: Values) -> bool:
    """Whether some loads of a row are beyond its end."""
    loads = row_loads(values)
    return bool(loads % lanes(values))


_DERIVED: Derived = {
    "out_dtype": lambda keys: keys["dtype"],
}


KEYS = Keys(derived=_DERIVED, slug=_SLUG, former=_FORMER)
