"""Kernels of another revision of this repository, rendered by that revision's own code."""

import json
import sys
import tarfile
import tempfile
from pathlib import Path

from fagen.errors import FagenError
from fagen.process import run

ROOT = Path(__file__).resolve().parent.parent
TREE = ("cli.py", "fagen", "generated", "schedules", "templates")
RENDER = """
import json, sys
from fagen import flow, registry
from fagen.render import kernel_text
plans = map(registry.plan, flow.all_committed())
json.dump({plan.slug: kernel_text(plan) for plan in plans}, sys.stdout)
"""


def git(*words: str) -> str:
    """What git says.  Raises FagenError where it fails."""
    result = run(["git", *words], cwd=ROOT)
    if result.returncode:
        raise FagenError(f"git {' '.join(words)}: {result.stderr.strip()}")
    return result.stdout


def rendered(tree: Path) -> dict[str, str]:
    """The kernel of each committed schedule of a tree by its slug, not laid out.

    Raises FagenError where that tree's own code cannot render them.
    """
    result = run([sys.executable, "-c", RENDER], cwd=tree, env={"PYTHONPATH": str(tree)})
    if result.returncode:
        raise FagenError(f"its kernels cannot be rendered: {result.stderr.strip()}")
    kernels: dict[str, str] = json.loads(result.stdout)
    return kernels


def rendered_at(revision: str) -> dict[str, str]:
    """The same of a revision.  Raises FagenError where there is none of this name."""
    with tempfile.TemporaryDirectory() as folder:
        archive, tree = Path(folder, "tree.tar"), Path(folder, "tree")
        git("archive", "-o", str(archive), revision, *TREE)
        with tarfile.open(archive) as tar:
            tar.extractall(tree, filter="data")
        if not (tree / "fagen" / "registry.py").exists():  # then all kernels were committed
            committed = (tree / "generated").glob("*.cu")
            return {path.stem: path.read_text("utf-8") for path in committed}
        return rendered(tree)
