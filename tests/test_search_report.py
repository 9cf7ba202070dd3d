"""The page about a search: what it says, that it needs nothing but itself, and how it looks."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fagen import search
from fagen.paths import find_program
from fagen.process import run
from fagen.search.report import _round_numbers, page, view
from tests.recordings import CARD, SPACE, record

VOID = {"meta", "br", "link", "img", "input", "hr"}
LIGHT, DARK = (251, 251, 249), (21, 24, 27)  # the page's own colours


class Tree(HTMLParser):
    """Holds a page's tags to be closed in order, and collects its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes what is not open"

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A recorded search."""
    return record(tmp_path_factory.mktemp("recorded") / "recorded.sqlite", kernels=120)


@pytest.fixture(scope="module")
def tree(store):
    """Its page."""
    return Tree(page(store))


def test_the_page_is_whole(tree):
    assert tree.open == []
    assert tree.tags[0][0] == "html"


def test_the_page_needs_nothing_but_itself(store, tree):
    names = {tag for tag, _ in tree.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    for _, attributes in tree.tags:
        for name in ("src", "href", "srcset"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?:|url\(|@import", page(store))


def test_the_page_tells_the_whole_story(store, tree):
    for result in search.found(store):
        lead = result.lead
        assert lead.slug in tree.text
        assert f"{lead.lead:.1%} ± {lead.error:.1%}" in tree.text
        assert f"rank correlation {result.correlation:.2f}" in tree.text
        assert result.anchor in tree.text
        for reason, points, example in result.survey["refused"]:
            assert reason in tree.text and f"{points:,}" in tree.text and example in tree.text
        assert "spills" in tree.text
    assert f"{CARD[0]}, driver {CARD[1]}" in tree.text
    assert "1700–1700 MHz" in tree.text
    assert "cuDNN" in tree.text


def test_the_heat_map_has_every_tile_and_one_best(store):
    for target in view(search.found(store)).targets:
        assert [row.block_m for row in target.heat] == [64, 128, 192, 256]
        assert target.block_ns == tuple(range(16, 257, 16))
        cells = [cell for row in target.heat for cell in row.cells]
        assert len(cells) == 4 * 16
        best = [cell for cell in cells if cell.kind == "best"]
        assert [cell.text for cell in best] == ["100"]
        assert all(0 <= cell.heat <= 1 for cell in cells if cell.heat is not None)
        assert {cell.text for cell in cells if cell.kind == "refused"} >= {"smem"}


def test_every_dot_and_bar_lies_inside(store):
    for target in view(search.found(store)).targets:
        plot = target.plot
        assert sum(dot.kind == "leader" for dot in plot.dots) == 1
        for dot in plot.dots:
            assert 0 < dot.x < plot.size and 0 < dot.y < plot.size
        for ticks in (plot.x_ticks, plot.y_ticks):
            assert 3 <= len(ticks) <= 9 and all(0 <= tick.at <= plot.size for tick in ticks)
        for size in target.sizes:
            assert {bar.kind for bar in size.bars} == {"leader", "anchor", "cudnn"}
            assert all(0 < bar.width <= 100 for bar in size.bars)


def test_a_store_in_which_nothing_was_timed_has_a_page_too(tmp_path):
    space = tmp_path / "space.toml"
    space.write_text(SPACE)
    from fagen.search.run import summary
    from fagen.search.space import read_space, survey
    from fagen.search.store import Store

    declared = read_space(space)
    with Store(tmp_path / "new.sqlite") as new:
        for target in declared.targets():
            new.put_survey(target, summary(survey(declared, target), declared))
    assert "Nothing was timed" in Tree(page(tmp_path / "new.sqlite")).text


def test_what_a_compiler_says_cannot_break_the_page(store, tmp_path):
    from fagen.problem import Problem
    from fagen.search.store import Store
    from fagen.search.tasks import Compiled

    slug, target = "fwd_fp16_d128_full_m64n32", Problem("fp16", 128, 128, "full")
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(store.read_bytes())
    with Store(broken) as kept:
        said = "<script>alert('x')</script>"
        kept.put_compiled(target, Compiled(slug, "x", "nvcc", "failed", said), "")
    assert "<script" not in page(broken)
    assert "<script>alert" in Tree(page(broken)).text


# ---- in a browser --------------------------------------------------------------------------------


def chromium() -> Path:
    """A browser, or a skip that says how to get one; its structure is tested anyway."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := find_program(name):
            return path
    pytest.skip("no browser to look at the page with: apt-get install chromium")


@pytest.mark.parametrize(("scheme", "expected"), [("light", LIGHT), ("dark", DARK)])
def test_in_a_browser_the_page_is_drawn_in_light_and_in_dark(scheme, expected, store, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with matplotlib")
    browser = chromium()
    path = tmp_path / "page.html"
    search.write_report(store, path)
    shot = tmp_path / "page.png"
    answer = run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *(["--force-dark-mode"] if scheme == "dark" else []),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,1800",
            f"--screenshot={shot}",
            path.as_uri(),
        ],
        timeout=120,
    )
    assert shot.exists(), answer.stderr
    with image.open(shot) as drawn:
        drawn = drawn.convert("RGB")
        assert drawn.size == (1200, 1800)
        assert drawn.getpixel((5, 5)) == expected
        colours = {colour: count for count, colour in drawn.getcolors(1 << 22)}
    # the leader's bars, which are the largest areas of colour, and many shades of the heat map
    leader = (27, 106, 201) if scheme == "light" else (94, 166, 245)
    assert colours.get(leader, 0) > 5_000
    assert len(colours) > 100


@pytest.mark.parametrize(("low", "high"), [(1e-4, 1e-2), (67e-5, 131e-5), (500e-6, 510e-6)])
def test_axes_are_marked_at_round_numbers(low, high):
    marks = _round_numbers(math.log(low), math.log(high / low))
    assert 3 <= len(marks) <= 9
    assert all(low <= mark / 1e6 <= high and float(f"{mark:.3g}") == mark for mark in marks)


@given(st.floats(-5, -1), st.floats(0.1, math.log(300)))
def test_no_axis_is_marked_too_little_or_too_much(power, extent):
    assert 3 <= len(_round_numbers(power * math.log(10), extent)) <= 9


def test_a_narrow_screen_scrolls_the_tables_and_not_the_page(store, tmp_path):
    browser = chromium()
    path = tmp_path / "page.html"
    probe = (
        "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth"
        "</script></body>"
    )
    path.write_text(page(store).replace("</body>", probe))
    answer = run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900", "--dump-dom"),
            path.as_uri(),
        ],
        timeout=120,
    )
    wide, screen = map(int, re.search(r"<title>(\d+) of (\d+)", answer.stdout).groups())
    assert wide <= screen
