"""The kinds of kernels, and a plain schedule of attention, as keys and as the text of its file."""

from typing import Any

import pytest

from fagen import registry
from fagen.errors import ScheduleError
from fagen.ledger import Ledger
from fagen.registry import ENTRIES, from_slug

KINDS = tuple(ENTRIES)
PLAIN = dict(head_dim=128, dtype="fp16", mask="causal", block_m=128, block_n=128)
PLAIN_FORWARD = "fwd_fp16_d128_causal_m128n128"
E4M3 = "fwd_e4m3_d128_full_m128n128"
QUANTIZER = "quant_fp16_d128"
ONLINE = {"maximum": "online"}
TEXT = """\
[attention]
head_dim = 128
dtype = "fp16"
mask = "causal"
[tile]
block_m = 128
block_n = 128
"""


def amounts(ledger: Ledger) -> dict[str, int]:
    """What each row of a ledger takes."""
    return {row.name: row.amount for row in ledger.rows}


def but(slug: str, changes: dict[str, Any]) -> Any:
    """The schedule of a slug with other keys, of which None is a value as well."""
    schedule = from_slug(slug)
    return type(schedule).make(**schedule.settings() | changes)


def refusal(text: str) -> list[str]:
    """The lines by which a schedule's text is refused."""
    with pytest.raises(ScheduleError) as error:
        registry.parse(text, "x.toml")
    return str(error.value).splitlines()
