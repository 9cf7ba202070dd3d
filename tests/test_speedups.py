"""The README's picture: it shows the committed figures, and can be read in both themes."""

import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest

from benchmarks import speedups
from tests.benchmark_helpers import RESULTS

SVG = "{http://www.w3.org/2000/svg}"
TEXT = (RESULTS / speedups.PICTURE).read_text("utf-8")
PICTURE = ElementTree.fromstring(TEXT)


def computed():
    """Ratios by head dim, peer and dtype, by the rows of the newest files alone."""
    found = defaultdict(list)
    newest = sorted(RESULTS.glob("*-????-??-??.json"))[-1]
    tflops = {}
    for row in json.loads(newest.read_text()):
        if row["regime"] == "burst" and row["dtype"] != "e4m3":
            cell = row["head_dim"], row["dtype"], row["mask"], row["seqlen_q"]
            key = cell, row["implementation"]
            tflops[key] = max(row["tflops"], tflops.get(key, 0.0))
    for cell, who in tflops:
        if who == "cudnn":
            found[cell[0], "cuDNN", cell[1]].append(tflops[cell, "fagen"] / tflops[cell, "cudnn"])
    newest = sorted(RESULTS.glob("*-????-??-??-shapes.json"))[-1]
    for row in json.loads(newest.read_text())["rows"]:
        if row["values"]:
            key = row["head_dim"], "FlashAttention-3", row["dtype"]
            found[key].append(statistics.median(row["values"]))
    return found


def test_the_committed_picture_is_that_of_the_committed_results():
    assert speedups.picture(RESULTS) == TEXT, "run `make docs`"


def test_each_bar_is_as_long_as_its_ratio_and_has_it_beside_it():
    texts = {}
    for one in PICTURE.iter(SVG + "text"):
        texts.setdefault(float(one.get("y")), []).append(one.text)
    (one,) = (at for at in PICTURE.iter(SVG + "text") if at.text.startswith("1:"))
    bars = list(PICTURE.iter(SVG + "rect"))[1:]
    unit = float(one.get("x")) - float(bars[0].get("x"))
    shown, head_dim = {}, 0
    for bar in bars:
        *dim, peer, mean, ends = texts[float(bar.get("y")) + 11]
        head_dim = int(dim[0].removeprefix("head dim ")) if dim else head_dim
        who, dtype = peer.removeprefix("÷ ").split(", ")
        assert bar.get("class") == who
        shown[head_dim, who, dtype] = (float(bar.get("width")) / unit, mean, ends)
    expected = computed()
    assert list(shown) == sorted(expected, key=lambda k: (k[0], k[1] == "cuDNN", k[2] == "bf16"))
    for key, values in expected.items():
        length, mean, ends = shown[key]
        exact = math.exp(sum(map(math.log, values)) / len(values))
        assert length == pytest.approx(exact, abs=0.002)
        assert mean == f"{exact:.2f}"
        assert ends == f"{min(values):.2f} … {max(values):.2f}"


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    found = 0.0
    for at, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        part = int(colour[at : at + 2], 16) / 255
        found += weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    return found


def test_texts_and_bars_stand_out_from_the_ground_in_both_themes():
    themes = TEXT.partition("@media (prefers-color-scheme: dark)")
    used = {one.get("class").split()[0] for one in PICTURE.iter() if one.get("class")}
    for theme in (themes[0], themes[2]):
        colours = dict(re.findall(r"^\.([\w-]+) \{ fill: (#\w{6}) \}", theme, re.M))
        assert used == set(colours)
        ground = luminance(colours.pop("ground"))
        for name, colour in colours.items():
            low, high = sorted((ground, luminance(colour)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, colour)
