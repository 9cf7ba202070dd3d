"""Masks at random as texts, and what Python itself makes of a text: it is Python's syntax."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from fagen.expr.declare import Scope, scope_of
from fagen.expr.tree import Name, Table

PARAMETERS: Mapping[str, Any] = {
    "w": {"dtype": "int32", "min": 0, "max": 1 << 20},
    "c": {"dtype": "int32", "min": 1, "max": 100},
    "n": {"dtype": "int32", "min": -(1 << 20), "max": 1 << 20},
}
TABLES: Mapping[str, Any] = {
    "per_batch": {"dtype": "int32", "over": ["batch"]},
    "rises": {"dtype": "int32", "over": ["len_q"], "rising": True},
    "any_row": {"dtype": "int32", "over": ["len_q"]},
}
EVERYTHING = scope_of(PARAMETERS, TABLES)


def used(text: str, scope: Scope = EVERYTHING) -> dict[str, Name | Table]:
    """What of a scope a text uses: what is declared for nothing is refused."""
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
    return {name: given for name, given in scope.items() if name in words}  # type: ignore[misc]


def by_python(text: str, given: Mapping[str, Any]) -> Any:
    """What a text of whole numbers means to Python: nothing of fagen reads it."""
    position = given["q_idx"] + given["len_k"] - given["len_q"]
    return eval(
        text,
        {"__builtins__": {}},
        {
            "min": min,
            "max": max,
            "abs": abs,
            "clamp": lambda x, least, most: min(max(x, least), most),
            "where": lambda condition, yes, no: yes if condition else no,
            "q_pos": position,
            **given,
        },
    )


def drawn(dice: random.Random, len_q: int, len_k: int) -> dict[str, Any]:
    """What a call gives, at random, of these lengths."""
    rows = range(len_q)
    return {
        "len_q": len_q,
        "len_k": len_k,
        "w": dice.choice([0, 1, 2, 3, 7, 100]),
        "c": dice.choice([1, 2, 3, 5, 8, 100]),
        "n": dice.randint(-9, 9),
        "per_batch": [dice.randint(-3, 12)],
        "rises": sorted(dice.randint(-3, len_k + 3) for _ in rows),
        "any_row": [dice.randint(-3, len_k + 3) for _ in rows],
        "batch": 0,
        "head": dice.randint(0, 3),
        "kv_head": 0,
        "heads": 4,
    }


class Writer:
    """Writes masks at random."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def number(self, depth: int, keys: bool = False) -> str:
        """A whole number; with `keys` k_idx may stand in it."""
        pick = self.dice.choice
        if depth == 0 or self.dice.random() < 0.3:
            if keys and self.dice.random() < 0.6:
                return "k_idx"
            row = ("q_idx", "q_pos", "q_pos", "len_k", "w", "c", "n", "per_batch[batch]")
            tables = ("rises[q_idx]", "any_row[q_idx]", "head")
            return pick([*row, *tables, str(self.dice.randint(-4, 9))])
        a, b = self.number(depth - 1, keys), self.number(depth - 1)
        form = pick(["{a} + {b}", "{a} - {b}", "-({a})", "3*({a})", "({a}) // c", "({a}) // 3"])
        form = pick([form, form, "min({a}, {b})", "max({b}, {a})", "abs({a})", "({b}) % 4"])
        form = pick([form] * 5 + ["where({test}, {a}, {b})", "c * (({b}) // c)", "({a} - {b})"])
        test = f"{self.number(0)} {pick(['<', '==', '>='])} {self.number(0)}" * ("test" in form)
        return form.format(a=a, b=b, test=test)

    def mask(self, depth: int) -> str:
        """A truth about a query and a key."""
        pick = self.dice.choice
        if depth == 0 or self.dice.random() < 0.25:
            sign = pick(["<=", "<", ">=", ">", "==", "<="])
            a, b = self.number(self.dice.randint(0, 2), True), self.number(self.dice.randint(0, 2))
            return f"{a} {sign} {b}" if self.dice.random() < 0.7 else f"{b} {sign} {a}"
        a, b = self.mask(depth - 1), self.mask(depth - 1)
        form = pick(["({a}) and ({b})"] * 3 + ["({a}) or ({b})"] * 2 + ["not ({a})", "{b}"])
        if self.dice.random() < 0.1:
            form = f"where({self.number(0)} == {self.number(0)}, {{a}}, {{b}})"
        return form.format(a=a, b=b)


def masks(seed: int, count: int) -> Iterator[tuple[str, random.Random]]:
    """Texts of masks, each with dice of its own."""
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        yield Writer(dice).mask(dice.randint(0, 3)), dice
