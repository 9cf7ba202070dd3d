"""What follows from a quantiser's keys: derived defaults, slugs, and the rules between keys."""

from fagen.schedule import Broken, Code, Derived, Former, Keys, SlugForm, Values
from fagen.vocab import SCALE_ROWS_DEFAULT

WARP_ROWS = 16  # of one mma instruction, and of V's groups of keys
CHUNK_COLUMNS = 32  # four lanes share a row, with 16 bytes each

_WIDE = 128  # columns of a row, of which a warp holds 16 rows in registers
HALVES_STEP = 64  # columns: two of the chunks of 32 that lanes share

_OWN_ROWS = "is gone: a thread block has as many as suit the other keys; leave it out"

# what schedules once said
_FORMER: Former = {"rows": _OWN_ROWS}

_SLUG = SlugForm(
    head="quant_{dtype}_d{head_dim}",
    codes=(
        Code("rotary", words={"none": "norotary", "halves": "halves", "pairs": "pairs"}),
        Code("rotate", words={True: "rot", False: "norot"}),
        Code("center", words={True: "center", False: "nocenter"}),
        Code(
            "scales",
            words={"tensor": "stensor", "head": "shead", "block": "sblock", "column": "scol"},
        ),
        Code("scale_rows", "sr"),
        Code("layout", words={"columns": "vcols", "rows": "vrows"}),
    ),
    example="quant_fp16_d128_rot",
    former={r"r\d+": _OWN_ROWS},
)

# keys whose default is a structural rule over others, which the slug says
_DERIVED: Derived = {
    # a constant where a block of rows shares a scale (scales)
    "scale_rows": lambda keys: SCALE_ROWS_DEFAULT if keys["scales"] == "block" else 0,
}


def block_rows(keys: Values) -> int:
    """The rows of a thread block: so many that several of them share an SM.

    Of one of 128 rows that share a scale, all of these.
    """
    return max(int(keys["scale_rows"]), 64 if _crowded(keys) else 128)


def _crowded(keys: Values) -> bool:
    """Whether what is known of columns takes registers that wide rows need."""
    of_columns: bool = keys["center"] or keys["scales"] == "column"
    return of_columns and keys["head_dim"] > _WIDE


_TALL = 4  # chunks of two rows that a lane has registers for; of wider rows it holds one at a time,
_SMALL = 64  # unless so few rows make a thread block that three still fit beside each other


def is_wide(keys: Values) -> bool:
    """Whether a lane has no registers for two rows of it."""
    return bool(keys["head_dim"] > _TALL * CHUNK_COLUMNS)


def passes(keys: Values) -> int:
    """In how many a warp goes through its rows."""
    small = keys["scales"] == "block" and block_rows(keys) <= _SMALL
    return 2 if is_wide(keys) and not small else 1


def has_ragged_chunk(keys: Values) -> bool:
    """Whether the last chunk of a row is half empty."""
    return bool(keys["head_dim"] % CHUNK_COLUMNS)


def rules(keys: Values) -> Broken:
    """Yield (key, sentence) for each rule between keys that is broken."""
    by_block = keys["scales"] == "block"
    if keys["scale_rows"] and not by_block:
        yield (
            "scale_rows",
            f'has no meaning with scales = "{keys["scales"]}"; leave it out, or use '
            'scales = "block"',
        )
    if keys["scales"] == "column" and keys["rotate"]:
        yield (
            "scales",
            '= "column" does not go with rotate = true, which mixes the columns of a row; use '
            'rotate = false, or scales = "block"',
        )
    if keys["rotary"] != "none" and (keys["center"] or keys["scales"] == "column"):
        key, value = ("center", "true") if keys["center"] else ("scales", '"column"')
        yield (
            key,
            f'= {value} does not go with rotary = "{keys["rotary"]}": columns are read before rows '
            'are embedded; apply the rotary embedding first, and use rotary = "none"',
        )
    if keys["rotary"] == "halves" and keys["head_dim"] % HALVES_STEP:
        yield (
            "rotary",
            f'= "halves" needs a head_dim of {HALVES_STEP}, {2 * HALVES_STEP}, … where one '
            f"thread has both columns of a pair, not {keys['head_dim']}; "
            'rotary = "pairs" takes any',
        )


KEYS = Keys(derived=_DERIVED, rules=rules, slug=_SLUG, former=_FORMER)
