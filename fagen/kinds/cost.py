"""What models of time add up alike: what is busy at once, and the tiles of varlen sequences."""

from collections import Counter
from collections.abc import Callable, Iterable

from fagen.problem import Sizes


def norm(parts: Iterable[float], sharpness: float) -> float:
    """Return what is busy at once, of which nothing hides wholly behind the busiest.

    With a sharpness of 1 it is their sum, and their maximum with an infinite one.
    """
    return float(sum([part**sharpness for part in parts]) ** (1 / sharpness))


def varlen_tiles(
    sizes: Sizes, steps_of: Callable[[Sizes], list[int]], heads: int = 1
) -> tuple[int, int, int]:
    """Return the tiles of all sequences, their steps, and the most that one has.

    `steps_of` gives the steps of each tile of one sequence, of so many heads to a KV head.
    """
    tiles = steps = longest = 0
    for (queries, keys), count in Counter(sizes.sequences).items():
        own = steps_of(Sizes(1, heads, 1, queries, keys))
        tiles, steps = tiles + count * len(own), steps + count * sum(own)
        longest = max(longest, *own, 0)
    return tiles, steps, longest
