"""What follows from the keys of combining: the derived default, and slugs."""

from fagen.schedule import Code, Derived, Former, Keys, SlugForm
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
    ),
    example="comb_fp32_d128_obf16",
    former={r"[tls]\d+": _ONE_WAY, "packed": "is called varlen now"},
)

_DERIVED: Derived = {
    "out_dtype": lambda keys: keys["dtype"],
}


KEYS = Keys(derived=_DERIVED, slug=_SLUG, former=_FORMER)
