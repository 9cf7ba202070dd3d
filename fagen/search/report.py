"""x."""

from pathlib import Path


def write_report(store: Path, path: Path) -> None:
    """Write."""
