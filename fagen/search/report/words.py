"""What several parts of the page show: names that may break, ratios, counts with examples."""

import re
from dataclasses import dataclass

Name = tuple[str, ...]  # parts of a slug or a path, between which a narrow page may break it


@dataclass(frozen=True)
class Line:
    """What befell some points or kernels, how many, and one of them as an example."""

    what: str
    count: str
    note: str
    example: Name = ()


def name(text: str) -> Name:
    """Return a name's parts, each with the sign that ends it."""
    return tuple(re.findall(r"[^_/#-]*[_/#-]|[^_/#-]+", text))


def ratio(speeds: float | None) -> str:
    """A speed ÷ another's."""
    return "–" if speeds is None else f"{speeds:.3f}"
