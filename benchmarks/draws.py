"""Problems in, cells that nobody picked out: at random, the same for the same seed."""

import math
import random
from collections.abc import Sequence

from fagen.problem import Cell, Problem, Sizes
from fagen.vocab import MASKS

LENGTHS, BATCHES = (64, 16_384), (1, 32)


def log_uniform(dice: random.Random, least: int, most: int) -> int:
    """A number between two, as often of each order of magnitude."""
    return round(math.exp(dice.uniform(math.log(least), math.log(most))))


def length(dice: random.Random, least: int, most: int) -> int:
    """The same of tokens: three of four are odd."""
    some = log_uniform(dice, least, most)
    return some | 1 if dice.random() < 0.75 else some


def drawn(
    number: int, seed: int, problems: Sequence[Problem], flops: tuple[float, float]
) -> list[Cell]:
    """So many different cells of these problems, each of so many FLOPs.

    Lengths and batches are log-uniform, most lengths odd; heads are few, and grouped in half of
    the cells; a quarter of those without a mask have queries and keys of different numbers.
    """
    dice = random.Random(seed)
    cells: dict[Cell, None] = {}
    while len(cells) < number:
        problem = dice.choice(list(problems))
        kv_heads = dice.choice((1, 2, 3, 4, 8))
        heads = kv_heads * dice.choice((1, 1, 1, 2, 4, 8))
        keys = length(dice, *LENGTHS)
        uneven = not MASKS[problem.mask].by_row and dice.random() < 0.25
        sizes = Sizes(
            *(log_uniform(dice, *BATCHES), heads, kv_heads),
            *(length(dice, *LENGTHS) if uneven else keys, keys),
        )
        cell = Cell(problem, sizes)
        if flops[0] <= cell.flops <= flops[1]:
            cells[cell] = None
    return list(cells)
