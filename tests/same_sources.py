"""Compare what every committed schedule renders to with the kernels of another revision.

    python tests/same_sources.py REVISION

A pure move of code leaves every source's tokens as they were: exit code 0. Otherwise each kernel
whose tokens differ is named, with those that only one side has, and the exit code is 1. Kernels are
matched by slug, wherever they lie.
"""

import sys
from pathlib import Path

from fagen import flow
from fagen.process import run
from fagen.render import token_hash

ROOT = Path(__file__).resolve().parent.parent


def at(revision: str) -> dict[str, str]:
    """Return the token hash of each kernel in generated/ at a revision, its own hash left out."""
    listed = run(["git", "ls-tree", "-r", "--name-only", revision, "generated"], cwd=ROOT).stdout
    paths = [Path(line) for line in listed.splitlines() if line.endswith(".cu")]
    return {path.stem: _hash_at(revision, path) for path in paths}


def _hash_at(revision: str, path: Path) -> str:
    text = run(["git", "show", f"{revision}:{path}"], cwd=ROOT).stdout
    return _without_own_hash(text)


def _without_own_hash(text: str) -> str:
    """Return the hash of tokens with the kernel's own hash, 64 digits in quotes, left out."""
    start = text.rindex('"', 0, text.rindex('"')) + 1
    return token_hash(text[:start] + text[start + 64 :])


def main(revision: str) -> int:
    """Compare, and say what differs; the exit code."""
    before = at(revision)
    now = {s.slug: _without_own_hash(s.kernel) for s in map(flow.rendered, flow.all_committed())}
    for slug in sorted(before.keys() ^ now.keys()):
        print(f"{slug}: only {'before' if slug in before else 'now'}")
    differ = [slug for slug in sorted(before.keys() & now.keys()) if before[slug] != now[slug]]
    for slug in differ:
        print(f"{slug}: other tokens")
    print(f"{len(before.keys() & now.keys()) - len(differ)} of {len(before)} kernels are the same")
    return int(bool(differ) or before.keys() != now.keys())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
