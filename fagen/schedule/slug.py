"""Turn a schedule's keys into its slug, and a slug back into keys."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fagen.errors import ScheduleError
from fagen.toml_lines import shown


@dataclass(frozen=True)
class Code:
    """How a slug says one key: a word per value, or letters before a number."""

    key: str
    letters: str = ""
    words: Mapping[Any, str] | None = None

    def write(self, value: Any) -> str:
        """Return the word of a slug that says this value."""
        if self.words:
            return self.words[value]
        return f"{self.letters}{value:g}".replace(".", "p")

    def read(self, word: str) -> Any:
        """Return the value that a word of a slug gives the key, or None where it gives none."""
        if self.words:
            return next((value for value, code in self.words.items() if code == word), None)
        value = number(word.removeprefix(self.letters)) if word.startswith(self.letters) else word
        return None if isinstance(value, str) else value


def own_code(key: str, kind: Any) -> Code:
    """Return the code of a key for which no other is declared: its name, without underscores."""
    name = key.replace("_", "")
    return Code(key, words={True: name, False: f"no{name}"}) if kind is bool else Code(key, name)


@dataclass(frozen=True)
class SlugForm:
    """What slugs of one kind look like: a head that is always there, then codes.

    `head` names keys in braces; what is in brackets is there only where its key says something,
    as in "fwd_{dtype}_d{head_dim}[v{head_dim_v}]". `codes` follow in this order, each only where
    its key is not at its default; then those of numbers and flags that have no other, their names.
    `former` says of a code that slugs once had, as a pattern, what became of it.
    """

    head: str
    codes: tuple[Code, ...]
    example: str
    former: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """How every slug of the kind begins."""
        return self.head.partition("{")[0]

    def with_codes_of(self, kinds: Mapping[str, Any]) -> "SlugForm":
        """Return the form with a code for each of these keys, given with their types."""
        known = {*_NAME.findall(self.head), *(code.key for code in self.codes)}
        own = (own_code(key, kind) for key, kind in kinds.items() if key not in known)
        return replace(self, codes=(*self.codes, *own))

    def write(self, keys: Mapping[str, Any]) -> str:
        """Return the slug of the keys that say something (see Schedule.settings)."""

        def optional(part: re.Match[str]) -> str:
            return part[1] if all(key in keys for key in _NAME.findall(part[1])) else ""

        head = _OPTIONAL.sub(optional, self.head).format_map(keys)
        return "_".join([head, *(c.write(keys[c.key]) for c in self.codes if c.key in keys)])

    def read(self, slug: str) -> dict[str, Any]:
        """Return the keys that a slug says; whether they are a schedule's is for that to judge.

        Raises ScheduleError where it is made of other words.
        """
        match = self._pattern.fullmatch(slug)
        if not match:
            raise ScheduleError(f"{shown(slug)} is no slug; one looks like {self.example}")
        keys = {name: number(text) for name, text in match.groupdict().items() if text is not None}
        for word in keys.pop("rest").split("_")[1:]:
            for code in self.codes:
                if (value := code.read(word)) is not None:
                    keys[code.key] = value
                    break
            else:
                raise ScheduleError(
                    f"{shown(slug)} is no slug: {shown(word)} in it {self._fate(word)}"
                )
        return keys

    def _fate(self, word: str) -> str:
        """Say what became of a word that is no code."""
        fates = (fate for code, fate in self.former.items() if re.fullmatch(code, word))
        return next(fates, "means nothing")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def group(part: re.Match[str]) -> str:
            # behind letters stands a number, d{head_dim}; behind _ a word, _{mask}
            return f"(?P<{part[2]}>{'WORD' if part[1] == '_' else 'NUMBER'})"

        text = _OPTIONAL.sub(r"(?:\1)?", self.head)
        text = re.sub(r"(?<=(.))\{(\w+)\}", group, text).replace("NUMBER", r"\d{1,4}")
        text = text.replace("WORD", "[a-z0-9]+(?:_[a-z]+)*?")
        return re.compile(text + r"(?P<rest>(?:_[a-z0-9]+)*)")


_NAME = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\]]*)\]")


def number(text: str) -> Any:
    """Return a number where `text` is one (3p5 is 3.5), else the text."""
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    if re.fullmatch(r"\d{1,6}p\d{1,6}", text):
        return float(text.replace("p", "."))
    return text
