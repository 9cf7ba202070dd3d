"""The README's picture: it shows the committed figures, and can be read in both themes."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest

from benchmarks import headline
from tests.benchmark_helpers import RESULTS
from tests.colours import contrast

SVG = "{http://www.w3.org/2000/svg}"
TEXT = (RESULTS / headline.PICTURE).read_text("utf-8")
PICTURE = ElementTree.fromstring(TEXT)


def computed():
    """Speeds by regime, head dim and implementation, by the rows of the newest files alone."""
    speeds = defaultdict(list)
    newest = sorted(RESULTS.glob("*-????-??-??.json"))[-1]
    tflops = {}
    for row in json.loads(newest.read_text()):
        cell = row["regime"], row["head_dim"], row["mask"], row["seqlen_q"]
        key = cell, row["implementation"]
        if row["dtype"] == "fp16" and row["regime"] in headline.REGIMES:
            tflops[key] = max(row["tflops"], tflops.get(key, 0.0))
    for (cell, who), value in tflops.items():
        if who in ("fagen", "cudnn"):
            speeds[(*cell[:2], headline.WHO[who])].append(value)
    newest = sorted(RESULTS.glob("*-????-??-??-fa3.csv"))[-1]
    for line in newest.read_text().splitlines():
        if line[0].isdigit():
            head_dim, _, _, sustained, _, burst = line.split(",")
            for regime, value in (("sustained", sustained), ("burst", burst)):
                speeds[regime, int(head_dim), "FlashAttention-3"].append(float(value))
    return speeds


def test_the_committed_picture_is_that_of_the_committed_results():
    assert headline.picture(RESULTS) == TEXT, "run `make docs`"


def test_each_bar_is_as_long_as_its_speed_and_has_it_beside_it():
    texts = {}
    for text in PICTURE.iter(SVG + "text"):
        texts.setdefault(float(text.get("y")), []).append(text.text)
    shown, regime, head_dim, heights = {}, None, 0, set()
    for bar in list(PICTURE.iter(SVG + "rect"))[1:]:
        top = float(bar.get("y"))
        regime = texts.get(top - 8, [regime])[0]
        *dim, who, mean, ends = texts[top + 11]
        head_dim = int(dim[0]) if dim else head_dim
        assert bar.get("class") == who
        shown[regime, head_dim, who] = (float(bar.get("width")) / float(mean), mean, ends)
        heights.add(top)
    expected = computed()
    assert len(heights) == len(shown) == 18 and shown.keys() == expected.keys()
    unit = next(iter(shown.values()))[0]
    for key, values in expected.items():
        length, mean, ends = shown[key]
        assert length == pytest.approx(unit, rel=0.005)
        assert mean == f"{math.exp(sum(map(math.log, values)) / len(values)):.0f}"
        assert ends == f"{min(values):.0f} … {max(values):.0f}"


def test_texts_can_be_read_400_pixels_wide():
    sizes = [float(size) for size in re.findall(r"(?:font-size: |font: )([\d.]+)px", TEXT)]
    assert min(sizes) * 400 / float(PICTURE.get("width")) >= 11
    for text in PICTURE.iter(SVG + "text"):  # a character of such a font is 0.6 of its size at most
        width = 0.6 * 13 * len(text.text)
        assert float(text.get("x")) + width <= float(PICTURE.get("width")) + 20, text.text


def test_random_calls_are_over_the_fastest_peer_of_each(tmp_path):
    path = tmp_path / "some-card-2026-01-31-peers.json"
    rows = [
        {"kind": "forward", "us": {"cudnn": [9]}, "csv_us": {"fa3": 8}, "values": [1.4, 1.6, 1.5]},
        {"kind": "forward", "us": {"fa2": [9]}, "csv_us": {}, "values": [0.9]},
        {"kind": "backward", "us": {}, "csv_us": {}, "values": []},
        {"kind": "decode, mixed lengths", "us": {"fa2": [8]}, "csv_us": {}, "values": [4.0]},
    ]
    path.write_text(json.dumps({"about": {}, "rows": rows}))
    forward, mixed = headline.random_calls(path)
    assert forward.ratios == (1.5, 0.9)
    assert forward.peers == ("FlashAttention-3", "cuDNN", "FlashAttention-2")
    assert mixed == headline.Calls("decoding, mixed lengths", (4.0,), ("FlashAttention-2",))
    lines = list(headline.random_table(path))
    assert lines[2].startswith("| forward, fp16 and bf16 | 2 | **1.16** | 0.90 | 1 | ")


def test_texts_and_bars_stand_out_from_the_ground_in_both_themes():
    themes = TEXT.partition("@media (prefers-color-scheme: dark)")
    used = {element.get("class").split()[0] for element in PICTURE.iter() if element.get("class")}
    for theme in (themes[0], themes[2]):
        colours = dict(re.findall(r"^\.([\w-]+) \{ fill: (#\w{6}) \}", theme, re.M))
        assert used == set(colours)
        ground = colours.pop("ground")
        for name, colour in colours.items():
            assert contrast(ground, colour) >= 4.5, (name, colour)
