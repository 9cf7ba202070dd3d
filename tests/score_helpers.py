"""Texts of scores as calls have them, and what each makes of products, by lambdas of ours."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen.expr.declare import parameter
from fagen.expr.words import Word
from fagen.vocab import declare

Scored = Callable[..., Tensor]


class Text(NamedTuple):
    """A text, the numbers that it takes with such as a call gives, and the same by hand."""

    text: str
    types: Mapping[str, tuple[str, float, float]]
    given: Mapping[str, Any]
    by_hand: Scored


# by what they read: nothing, a number, places, heads, a batch; what divides, and what is no number
TEXTS = {
    "unseen": Text(  # no number where causal masks hide it
        "where(k_idx <= q_pos, score, sqrt(-1.0 - abs(score)))", {}, {}, lambda s, **at: s
    ),
    "half": Text("0.5*score", {}, {}, lambda s, **at: s / 2),
    "negated": Text("-score", {}, {}, lambda s, **at: -s),
    "warm": Text(
        "score / heat",
        {"heat": ("float32", 0.1, 9.0)},
        {"heat": 1.7},
        lambda s, heat, **at: s / heat,
    ),
    "steep": Text(
        "grow*tanh(score/grow) + 0.25*abs(score)",
        {"grow": ("float32", -1e9, 1e9)},
        {"grow": 3.5},
        lambda s, grow, **at: grow * torch.tanh(s / grow) + s.abs() / 4,
    ),
    "alibi": Text(
        "score - exp(-0.7*(head + 1)) * abs(q_pos - k_idx)",
        {},
        {},
        lambda s, h, i, j, m, n, **at: s - torch.exp(-0.7 * (h + 1)) * (i + n - m - j).abs(),
    ),
    "striped": Text(
        "where((q_pos - k_idx) // width % 3 == 1, -inf, score)",
        {"width": ("int32", 1, 1000)},
        {"width": 5},
        lambda s, width, i, j, m, n, **at: s.masked_fill(
            ((i + n - m - j) // width % 3 == 1).expand(s.shape), -torch.inf
        ),
    ),
    "rooted": Text(
        "sqrt(max(score, 0.0)) + 0.01*kv_head*k_idx/heads + 0.1*log(1.0 + q_idx)*score",
        {},
        {},
        lambda s, kv, j, i, heads, **at: (
            s.clamp(min=0).sqrt() + 0.01 * kv * j / heads + 0.1 * torch.log1p(i.double()) * s
        ),
    ),
    "worked_out": Text(  # by the launcher, but for tanh
        "min(exp(warm), 9.0) * tanh(score / (1.0 + warm*warm))",
        {"warm": ("float32", -5.0, 5.0)},
        {"warm": 0.7},
        lambda s, warm, **at: min(math.exp(warm), 9) * torch.tanh(s / (1 + warm**2)),
    ),
    "without": Text("0.01*k_idx", {}, {}, lambda s, j, **at: (0.01 * j.double()).expand(s.shape)),
    "steepest": Text("1e9*score - 1e9*abs(score)", {}, {}, lambda s, **at: 2e9 * s.clamp(max=0)),
    "by_batch": Text(
        "where(batch == 1, 1.5, 1.0) * score / (1.0 + 0.001*(len_k - len_q))",
        {},
        {},
        lambda s, b, m, n, **at: s * (1.5 if b == 1 else 1.0) / (1 + 0.001 * (n - m)),
    ),
}


@cache
def word_of(label: str) -> str:
    """The word of schedules for it, which they know from now on."""
    text = TEXTS[label]
    given = tuple(parameter(name, *said) for name, said in text.types.items())
    word = Word("score", "score", text.text, "of a test", given)
    name = f"score{word.expression.key}"
    declare(Word(name, "score", text.text, "of a test", given))
    return name
