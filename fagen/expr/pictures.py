"""A mask's picture from its text: for a terminal, and as an SVG for pages."""

from collections.abc import Mapping
from typing import Any

from fagen.expr.canonical import Expression
from fagen.expr.evaluate import function_of

_CELL = 14  # pixels
_SIGNS = {True: "■", False: "·"}
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<rect width="{width}" height="{height}" fill="#f3f4f6"/>
<g fill="#2563eb">
{cells}
</g>
</svg>
"""


def seen(mask: Expression, len_q: int, len_k: int, given: Mapping[str, Any]) -> list[list[bool]]:
    """Return whether a query (rows) sees a key (columns), in the first sequence and head."""
    sees = function_of(mask.tree)
    sizes = {"len_q": len_q, "len_k": len_k, "batch": 0, "head": 0, "kv_head": 0, "heads": 1}
    return [
        [bool(sees({**sizes, **given, "q_idx": q, "k_idx": k})) for k in range(len_k)]
        for q in range(len_q)
    ]


def drawn(mask: Expression, len_q: int, len_k: int, given: Mapping[str, Any]) -> str:
    """Return a line for each query, with a sign for each key."""
    rows = seen(mask, len_q, len_k, given)
    return "\n".join("".join(_SIGNS[cell] for cell in row) for row in rows)


def svg(mask: Expression, len_q: int, len_k: int, given: Mapping[str, Any]) -> str:
    """Return the picture as an SVG: a bar for each run of keys that a query sees."""
    cells = []
    for top, row in enumerate(seen(mask, len_q, len_k, given)):
        left = 0
        while left < len_k:
            right = left
            while right < len_k and row[right]:
                right += 1
            if right > left:
                size = f'width="{(right - left) * _CELL - 1}" height="{_CELL - 1}"'
                cells.append(f'<rect x="{left * _CELL}" y="{top * _CELL}" {size}/>')
            left = right + 1
    title = mask.text.replace("&", "&amp;").replace("<", "&lt;")
    width, height = len_k * _CELL, len_q * _CELL
    return _SVG.format(title=title, cells="\n".join(cells), width=width, height=height)
