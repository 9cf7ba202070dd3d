"""Draw every committed page anew from its data: results, and the pages about searches.

    python benchmarks/pages.py            writes them all
    python benchmarks/pages.py --check    writes none; exits with 1 where one is not as it would be

No GPU is needed. What a page is drawn by follows from how its data is called.
"""

import argparse
import contextlib
import importlib
import io
import json
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fagen import search

HERE = Path(__file__).resolve().parent
RESULTS, SEARCHES = HERE / "results", HERE / "search"
EXAMPLE = HERE.parent / "examples" / "train.py"
NAMED = (  # scripts whose files end as they are called
    *("decode_ablation", "decode_micro", "ablation", "backward_shapes", "shapes", "head_dims"),
    *("data", "against", "fp8_accuracy", "fp8_end_to_end", "fp8_families"),
)
# by the end of a file's name, the first that fits: the script that draws its page
SCRIPTS = (
    *((name.replace("_", "-"), name) for name in NAMED),
    (r"varlen(-\w+)*", "varlen"),
    (r"peers(-seed\d+)?", "peers"),
    (r"\d(-backward(-\w+)*)?", "run"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pages, or compare them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        drawn = dict(draw(Path(folder)))
        others = [place for path, place in drawn.items() if not alike(path, place)]
        for place in others:
            print(f"{place}: {'not as its data says' if options.check else 'drawn anew'}")
        if options.check:
            return int(bool(others))
        for path, place in drawn.items():
            shutil.copyfile(path, place)
    return 0


def draw(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Draw all pages into a folder; yield each file there, and its place."""
    for page in pages():
        yield from drawn(page, folder)
    for path in sorted(RESULTS.glob("*-train.json")):
        losses = json.loads(path.read_text("utf-8"))["losses"]
        curves = folder / f"{path.stem}.svg"
        runpy.run_path(str(EXAMPLE))["draw"](losses, str(curves))
        yield curves, RESULTS / curves.name
    for store in sorted(SEARCHES.glob("*.sqlite")):
        path = folder / f"{store.stem}.html"
        search.write_report(store, path)
        yield path, SEARCHES / path.name


def pages() -> list[Path]:
    """The pages of results that are drawn from data; those of scripts that are gone stay."""
    return [page for page in sorted(RESULTS.glob("*.md")) if script_of(page.stem)]


def drawn(page: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Draw one page of results, and its plots, into a folder."""
    data = page.with_suffix(".json")
    for path in (data, page.with_suffix(".run.json")):
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    script = importlib.import_module(script_of(page.stem))
    before = {*folder.iterdir()}
    with contextlib.redirect_stdout(io.StringIO()):
        assert not script.main(["--redraw", str(folder / data.name)]), page
    for path in sorted({*folder.iterdir()} - before):
        yield path, RESULTS / path.name


def script_of(stem: str) -> str:
    """The script that draws the page of this name; '' where none does any more."""
    return next((name for end, name in SCRIPTS if re.search(f"{end}$", stem)), "")


def alike(path: Path, place: Path) -> bool:
    """Whether a page is as it is drawn; a plot too, where the same matplotlib drew it."""
    if not place.exists():
        return False
    drawn, kept = path.read_bytes(), place.read_bytes()
    if path.suffix == ".svg" and _drawer(drawn) != _drawer(kept):
        return True
    return drawn == kept


def _drawer(svg: bytes) -> bytes:
    version = re.search(rb"Matplotlib v[\d.]+", svg)
    return version[0] if version else b""


if __name__ == "__main__":
    sys.exit(main())
