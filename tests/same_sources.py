"""Show what a change does to kernels: those of another revision are rendered beside this tree's.

    python tests/same_sources.py REVISION

Names the schedules whose device code, launcher or numbers moved, and prints one diff for each form
of change: kernels whose texts change alike, numbers aside, are shown by the first of them. What
only one side has is named too. The exit code is 1 where any hash moved, else 0.
"""

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from fagen.render import formatted, hashes_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from revision import rendered, rendered_at  # noqa: E402 - which is no package


def alike(slug: str, before: str, after: str) -> tuple[str, ...]:
    """What changes of a kernel, with numbers and its name left out: its form of change."""
    lines = (re.sub(r"\d+", "0", text.replace(slug, "")).splitlines() for text in (before, after))
    return tuple(line for line in difflib.unified_diff(*lines, n=0) if line[0] in "+-")


def compared(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], bool]:
    """Compare texts by slug: lines that say what differs, and whether any hash does."""
    lines = [f"{slug}: only before" for slug in sorted(before.keys() - after.keys())]
    lines += [f"{slug}: only now" for slug in sorted(after.keys() - before.keys())]
    both = sorted(before.keys() & after.keys())
    moved: dict[str, list[str]] = {"device": [], "launcher": [], "constants": []}
    forms: dict[tuple[str, ...], list[str]] = {}
    for slug in both:
        if before[slug] == after[slug]:
            continue
        old, new = (vars(hashes_of(texts[slug], slug)) for texts in (before, after))
        for part, slugs in moved.items():
            slugs += [slug] if old[part] != new[part] else []
        forms.setdefault(alike(slug, before[slug], after[slug]), []).append(slug)
    for slugs in forms.values():
        first = slugs[0]
        old_text, new_text = (formatted(texts[first]).splitlines() for texts in (before, after))
        lines += ["", f"{len(slugs)} change like {first}"]
        lines += difflib.unified_diff(old_text, new_text, "before", "now", lineterm="")
    lines.append("")
    for part, slugs in moved.items():
        lines.append(f"{part}: {len(slugs)} of {len(both)} moved")
        lines += [f"  {slug}" for slug in slugs]
    return lines, any(moved.values()) or before.keys() != after.keys()


def main(revision: str) -> int:
    """Compare with a revision, and say what differs; the exit code."""
    lines, differs = compared(rendered_at(revision), rendered(ROOT))
    print("\n".join(lines))
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
