"""The CUTLASS headers that sources need, with all that these include, and their licence.

Read from the text, whatever the conditions around an include: that is what a compiler would find,
or a little more, and needs none.
"""

import re
from collections.abc import Iterable

from fagen.errors import ToolchainError
from fagen.toolchain import find_cutlass
from fagen.vendor.place import is_inside

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_LICENSE = re.compile(r"/\*+\n(.*?)\*+/", re.DOTALL)  # at the top of each header


def needed(sources: Iterable[str]) -> list[str]:
    """Return the headers of CUTLASS that sources include themselves."""
    named = (name for text in sources for name in _INCLUDE.findall(text))
    return [name for name in named if name.startswith(("cute/", "cutlass/"))]


def headers(sources: Iterable[str]) -> dict[str, str]:
    """Return the headers that sources need, by their paths in CUTLASS's include folder.

    Raises ToolchainError where there is no CUTLASS.
    """
    include, _ = find_cutlass()
    texts: dict[str, str] = {}
    ahead = [(name, "") for name in needed(sources)]
    while ahead:
        name, folder = ahead.pop()
        for path in (f"{folder}{name}", name):
            if is_inside(path) and (include / path).is_file():
                if path not in texts:
                    texts[path] = (include / path).read_text(encoding="utf-8")
                    own = path.rpartition("/")[0] + "/"
                    ahead += [(other, own) for other in _INCLUDE.findall(texts[path])]
                break
    return dict(sorted(texts.items()))


def license_of(headers: dict[str, str]) -> str:
    """Return CUTLASS's licence as its headers carry it.  Raises ToolchainError where none does."""
    for text in headers.values():
        comment = _LICENSE.match(text.lstrip())
        if comment and "Redistribution" in comment[1]:
            lines = (line.strip().removeprefix("*").strip() for line in comment[1].splitlines())
            return "\n".join(lines).strip() + "\n"
    raise ToolchainError("none of CUTLASS's headers begins with its licence; copy them yourself")
