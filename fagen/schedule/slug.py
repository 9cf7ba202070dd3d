"""Turn a schedule's keys into its slug, and a slug back into keys."""

import re
from collections.abc import Mapping
from typing import Any

from fagen.errors import ScheduleError
from fagen.vocab import CODES, Code

_SLUG = re.compile(
    r"fwd_(?P<dtype>[a-z0-9]+)_d(?P<head_dim>\d{1,4})(?:v(?P<head_dim_v>\d{1,4}))?"
    r"_(?P<mask>[a-z]+)_m(?P<block_m>\d{1,4})n(?P<block_n>\d{1,4})(?P<rest>(?:_[a-z0-9]+)*)"
)


def write_slug(keys: Mapping[str, Any]) -> str:
    """Return the slug of the keys that say something (see Schedule.settings)."""
    own_v = f"v{keys['head_dim_v']}" if "head_dim_v" in keys else ""
    said = [
        f"fwd_{keys['dtype']}_d{keys['head_dim']}{own_v}_{keys['mask']}"
        f"_m{keys['block_m']}n{keys['block_n']}"
    ]
    return "_".join(said + [_written(code, keys[code.key]) for code in CODES if code.key in keys])


def read_slug(slug: str) -> dict[str, Any]:
    """Return the keys that a slug says; whether they are a schedule's is for that to judge.

    Raises ScheduleError where it is made of other words.
    """
    read = _SLUG.fullmatch(slug)
    if not read:
        raise ScheduleError(f"{slug!r} is no slug; one looks like fwd_fp16_d128_causal_m128n128")
    said = {name: _number(text) for name, text in read.groupdict().items() if text is not None}
    for word in said.pop("rest").split("_")[1:]:
        for code in CODES:
            if (value := _read(code, word)) is not None:
                said[code.key] = value
                break
        else:
            raise ScheduleError(f"{slug!r} is no slug: {word!r} in it means nothing")
    return said


def _written(code: Code, value: Any) -> str:
    if code.words:
        return code.words[value]
    return f"{code.letters}{value:g}".replace(".", "p")


def _read(code: Code, word: str) -> Any:
    """Return the value that a word of a slug gives a code's key, or None where it gives none."""
    if code.words:
        return next((value for value, said in code.words.items() if said == word), None)
    value = _number(word.removeprefix(code.letters)) if word.startswith(code.letters) else word
    return None if isinstance(value, str) else value


def _number(text: str) -> Any:
    """Return a number where `text` is one (3p5 is 3.5), else the text."""
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    if re.fullmatch(r"\d{1,6}p\d{1,6}", text):
        return float(text.replace("p", "."))
    return text
