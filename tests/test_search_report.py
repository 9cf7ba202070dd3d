"""The page about a search: what it says, that it needs nothing but itself, and how it looks."""

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fagen import search
from fagen.dispatch.tables import table_at
from fagen.paths import find_program, locate
from fagen.process import run
from fagen.registry import plan_of
from fagen.render import source_hash
from fagen.search.marks import BRIEF, LONG
from fagen.search.report import TEMPLATE, page, rendered, view
from fagen.search.report.prediction import round_numbers
from fagen.search.store import Store
from fagen.search.tasks import GOOD, Time
from tests.colours import channels, contrast
from tests.recordings import CARD, DATABASES, SPACE, STORES, record

ROOT = locate("cli.py").parent
VOID = {"meta", "br", "link", "img", "input", "hr", "wbr"}


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


class Shown:
    """A store, and what is made of it, once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with Store(path, read_only=True) as kept:
            self.sessions = kept.sessions()
        self.found = search.found(path)
        self.report = view(self.found, self.sessions, path.name)
        self.text = rendered(self.report)
        self.tree = Tree(self.text)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A search that was made up."""
    return Shown(record(tmp_path_factory.mktemp("recorded") / "recorded.sqlite", kernels=120))


@pytest.fixture(scope="module", params=STORES, ids=lambda path: path.stem)
def committed(request):
    """Each search that is committed."""
    return Shown(request.param)


def test_the_page_is_whole(recorded):
    assert recorded.tree.open == []
    assert recorded.tree.tags[0][0] == "html"


def test_the_page_needs_nothing_but_itself(recorded):
    names = {tag for tag, _ in recorded.tree.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    for _, attributes in recorded.tree.tags:
        for name in ("src", "href", "srcset"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?:|url\(|@import", recorded.text)


def test_the_page_tells_the_whole_story(recorded):
    tree = recorded.tree
    for result in recorded.found:
        lead = result.lead
        assert lead.slug in tree.text
        assert f"In brief runs {result.over_anchor:.3f} × the anchor's speed" in tree.text
        assert f"{lead.lead:.1%} ± {lead.error:.1%}" in tree.text
        assert f"rank correlation {result.correlation:.2f}" in tree.text
        assert result.anchor in tree.text
        for reason, points, example in result.survey["refused"]:
            assert reason in tree.text and f"{points:,}" in tree.text and example in tree.text
        assert "spills" in tree.text
    assert f"{CARD[0]}, driver {CARD[1]}" in tree.text
    assert "1700–1700 MHz" in tree.text
    assert "cuDNN" in tree.text


def test_the_heat_map_has_every_tile_and_one_best(recorded):
    for target in recorded.report.targets:
        assert target.heat.block_ms == (64, 128, 192, 256)
        assert [row.block_n for row in target.heat.rows] == [*range(16, 257, 16)]
        cells = [cell for row in target.heat.rows for cell in row.cells]
        assert len(cells) == 4 * 16
        leader = [cell for cell in cells if cell.kind == "leader"]
        assert [cell.text for cell in leader] == ["100"]
        assert all(0 <= cell.heat <= 1 for cell in cells if cell.heat is not None)
        assert {cell.text for cell in cells if cell.kind == "refused"} >= {"smem"}


def test_a_tile_of_which_a_kernel_is_good_is_not_said_to_have_none(committed):
    for result, target in zip(committed.found, committed.report.targets, strict=True):
        good = {
            compiled.slug.split("_")[4] for compiled in result.compiled if compiled.outcome == GOOD
        }
        kinds = {
            f"m{m}n{row.block_n}": cell.kind
            for row in target.heat.rows
            for m, cell in zip(target.heat.block_ms, row.cells, strict=True)
        }
        assert good == {tile for tile, k in kinds.items() if k in ("timed", "leader", "untimed")}
        assert result.lead is not None or "untimed" in kinds.values()


def test_every_dot_and_bar_lies_inside(recorded):
    for target in recorded.report.targets:
        plot = target.plot
        assert sum(dot.kind == "leader" for dot in plot.dots) == 1
        for dot in plot.dots:
            assert 0 < dot.x < plot.size and 0 < dot.y < plot.size
        for ticks in (plot.x_ticks, plot.y_ticks):
            assert 3 <= len(ticks) <= 9 and all(0 <= tick.at <= plot.size for tick in ticks)
        for size in target.sizes:
            assert {bar.kind for bar in size.bars} == {"leader", "anchor", "peer"}
            assert all(0 < bar.width <= 100 for bar in size.bars)


def test_a_store_in_which_nothing_was_timed_has_a_page_too(tmp_path):
    space = tmp_path / "space.toml"
    space.write_text(SPACE)
    from fagen.search.files import read_spaces
    from fagen.search.run import summary
    from fagen.search.space import survey

    declared = read_spaces(space)[0]
    with Store(tmp_path / "new.sqlite") as new:
        for target in declared.targets():
            new.put_survey(target, summary(survey(declared, target), declared))
    text = Tree(page(tmp_path / "new.sqlite")).text
    assert text.count("No leader: nothing was compiled yet") == 2
    assert "On which day they were made is not kept there" in text


def test_what_a_compiler_says_cannot_break_the_page(recorded, tmp_path):
    from fagen.problem import Problem
    from fagen.search.tasks import Compiled

    slug, target = "fwd_fp16_d128_full_m64n32", Problem("fp16", 128, 128, "full")
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(recorded.path.read_bytes())
    with Store(broken) as kept:
        note = "<script>alert('x')</script>"
        kept.put_compiled(target, Compiled(slug, "x", "nvcc", "failed", note), "")
    text = page(broken)
    assert "<script" not in text and "<script>alert" in Tree(text).text


# ---- one source ----------------------------------------------------------------------------------


def test_a_committed_page_is_what_its_store_says_byte_for_byte(committed):
    page = committed.path.with_suffix(".html")
    assert page.read_text() == committed.text, f"run: fagen search report {committed.path}"


def test_a_committed_page_says_of_when_and_of_which_sources_it_is(committed):
    (session,) = committed.sessions
    assert session.date in committed.path.stem and session.version
    large = committed.path in DATABASES
    assert "revision" in session.version or not large
    text = committed.tree.text
    line = f"Searched on {session.date} by fagen {session.version}. {session.note}"
    assert line.rstrip() in text
    leaders = [target.leader for target in committed.report.targets if target.leader]
    renewed = sum(leader.renewed for leader in leaders)
    assert (f"{renewed} of the {len(leaders)} leaders ran as sources" in text) == bool(renewed)
    for result in committed.found:
        if lead := result.lead:
            (compiled,) = [compiled for compiled in result.compiled if compiled.slug == lead.slug]
            another = compiled.source_hash != source_hash(plan_of(lead.slug))
            line = f"Source {compiled.source_hash[:12]}: fagen renders another one"
            assert (line in text) == another
            assert another or not large


def test_every_row_of_the_table_is_as_the_store_says_or_names_what_it_was_measured_by(committed):
    of_store = str(committed.path.relative_to(ROOT))
    rows = table_at(ROOT / "schedules/dispatch.toml")
    served = [row for target in committed.report.targets for row in target.served]
    for result in committed.found:
        for row in rows:
            if f"_{result.target.name}_" not in row.slug or row.by != of_store:
                continue
            sizes = [s for s in result.sizes if row.keys_from <= s.seqlen_k <= row.keys_to]
            assert sizes, row
            assert {result.best_at(size, result.lead.slug) for size in sizes} == {row.slug}
    # others may agree with the store, too
    named = sum(row.by == of_store for row in rows)
    assert named <= sum(row.same is True for row in served)
    unsaid = ["".join(row.name) for row in served if not row.by]
    assert not unsaid, "say in dispatch.toml `by` what they were measured"


def test_what_a_row_was_measured_by_is_there():
    for by in {row.by for row in table_at(ROOT / "schedules/dispatch.toml")} - {""}:
        path, _, anchor = by.partition("#")
        text = (ROOT / path).read_bytes()
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text.decode(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading).lower() for heading in headings]
            assert anchor in [name.replace(" ", "-") for name in anchors]


def test_the_headline_is_the_first_row_and_a_line_of_the_summary(committed):
    for target in committed.report.targets:
        assert f'<a href="#{target.name}">' in committed.text
        if target.leader is None:
            assert target.fastest == () and "none was timed" in target.untimed
            continue
        first = target.fastest[0]
        assert first.name == target.leader.name
        long = target.leader.runs == "long"
        assert target.leader.over_anchor == (first.long_over_anchor if long else first.over_anchor)
        assert target.leader.over_peer == (first.long_over_peer if long else first.over_peer)


# ---- brief and long runs -------------------------------------------------------------------------


@pytest.fixture
def throttled(recorded, tmp_path):
    """The recorded search, where the third in brief runs is first in long ones.

    There the card is half as fast, but cuDNN as fast as ever, and was timed at one shape only.
    """
    path = tmp_path / "throttled.sqlite"
    path.write_bytes(recorded.path.read_bytes())
    for result in recorded.found:
        third = result.marks.ranked(BRIEF)[2]
        (compiled,) = [compiled for compiled in result.compiled if compiled.slug == third]
        times = []
        for size in result.sizes:
            beside = 2 * result.marks.anchor_seconds(size, BRIEF)
            for number, faster in enumerate((1.25, 1.35)):
                times.append(Time(third, size, LONG, number, beside / faster, beside, 1000))
        beside = result.marks.anchor_seconds(result.sizes[0], BRIEF)
        times.append(Time("cudnn", result.sizes[0], LONG, 0, beside, 2 * beside, 1000))
        with Store(path) as kept:
            kept.put_timed(result.target, CARD, {third: compiled.source_hash}, times, [], [])
    return view(search.found(path))


def test_brief_and_long_runs_are_told_apart(recorded, throttled):
    for brief, long in zip(recorded.report.targets, throttled.targets, strict=True):
        assert (brief.leader.runs, long.leader.runs) == ("brief", "long")
        third = brief.fastest[2]
        assert long.leader.name == third.name and long.leader.brief == brief.leader.name
        assert long.leader.over_anchor == "1.299"  # √(1.25 · 1.35)
        assert long.leader.over_peer == "–"  # it has no long runs at two of the shapes
        assert long.fastest[0].over_anchor == third.over_anchor
        assert long.fastest[0].over_peer == third.over_peer
        assert [row.name for row in long.fastest[1:3]] == [row.name for row in brief.fastest[:2]]
        # the anchor's bars are of long runs, too: half as fast as in brief ones
        for slow, fast in zip(long.sizes, brief.sizes, strict=True):
            speeds = [{b.kind: float(b.text) for b in size.bars} for size in (slow, fast)]
            assert speeds[0]["anchor"] == pytest.approx(speeds[1]["anchor"] / 2, abs=0.6)
        assert "peer" not in {bar.kind for bar in long.sizes[1].bars}
        # the heat map and the plot are of brief runs, which all kernels had
        assert long.correlation == brief.correlation


# ---- how it looks --------------------------------------------------------------------------------


def test_all_bars_of_a_page_are_on_one_scale(committed):
    report = committed.report
    bars = [bar for target in report.targets for size in target.sizes for bar in size.bars]
    targets, sizes = (10, 6) if committed.path in DATABASES else (4, 3)
    assert len(bars) == targets * sizes * 3
    for bar in bars:
        speed = float(bar.text.replace(",", ""))
        assert bar.width == pytest.approx(100 * speed / report.scale.end, abs=0.1)
    assert 90 < max(bar.width for bar in bars) <= 100
    assert 4 <= len(report.scale.ticks) <= 7
    for tick in report.scale.ticks:
        speed = float(tick.text.replace(",", ""))
        assert tick.at == pytest.approx(100 * speed / report.scale.end, abs=0.01)


def test_axes_have_names(recorded):
    text = recorded.tree.text
    for name in ("predicted time, µs", "measured time, µs", "TFLOP/s", "keys"):
        assert text.count(name) >= 2
    for name in ("block_m = 64", "block_n = 16"):  # the others of a row or column follow
        assert text.count(f"{name}\n") == 2


def test_a_slug_may_break_after_its_words_only(recorded):
    slug = recorded.found[0].lead.slug
    assert f"<code>{'_<wbr>'.join(slug.split('_'))}<wbr></code>" in recorded.text


def colours(scheme: str) -> dict[str, tuple[float, ...]]:
    """The page's colours by name, each channel from 0 to 1."""
    css = (locate("templates") / TEMPLATE).read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    codes = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    if scheme == "dark":
        codes |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark))
    return {name: channels(code) for name, code in codes.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_read_at_4_5_to_1_and_marks_are_seen_at_3_to_1(scheme):
    palette = colours(scheme)
    for text in ("ink", "soft", "link"):
        for ground in ("page", "card"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
    assert contrast(palette["soft"], palette["none"]) >= 4.5
    for step in range(101):  # as color-mix() in srgb does
        heat = tuple(
            step / 100 * hot + (1 - step / 100) * cold
            for hot, cold in zip(palette["hot"], palette["cold"], strict=True)
        )
        assert contrast(palette["on-heat"], heat) >= 4.5, step
    for mark in ("leader", "anchor", "peer", "dot"):
        assert contrast(palette[mark], palette["card"]) >= 3, mark


@pytest.mark.parametrize(("low", "high"), [(1e-4, 1e-2), (67e-5, 131e-5), (500e-6, 510e-6)])
def test_axes_are_marked_atround_numbers(low, high):
    marks = round_numbers(math.log(low), math.log(high / low))
    assert 3 <= len(marks) <= 9
    assert all(low <= mark / 1e6 <= high and float(f"{mark:.3g}") == mark for mark in marks)


@given(st.floats(-5, -1), st.floats(0.1, math.log(300)))
def test_no_axis_is_marked_too_little_or_too_much(power, extent):
    assert 3 <= len(round_numbers(power * math.log(10), extent)) <= 9


# ---- in a browser --------------------------------------------------------------------------------

SCHEMES = {"light": 1, "dark": 0}  # as Chromium numbers them


def look(path: Path, width: int, scheme: str, profile: Path, *options: str) -> str:
    """Open a page in a browser and return what that says; skip where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(find_program, names)), None)
    if browser is None:
        pytest.skip("no browser to look at the page with: apt-get install chromium")
    answer = run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--hide-scrollbars", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"),
            *(f"--user-data-dir={profile}", f"--window-size={width},2400", *options),
            path.as_uri(),
        ],
        timeout=120,
    )
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser_the_page_is_drawn_in_light_and_in_dark(scheme, width, recorded, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with matplotlib")
    path, shot = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(recorded.text)
    output = look(path, width, scheme, tmp_path / "profile", f"--screenshot={shot}")
    assert shot.exists(), output
    hues = {name: tuple(round(255 * c) for c in colour) for name, colour in colours(scheme).items()}
    with image.open(shot) as drawn:
        drawn = drawn.convert("RGB")
        assert drawn.size == (width, 2400)
        counts = {colour: count for count, colour in drawn.getcolors(1 << 22)}
        edges = {drawn.getpixel((x, y)) for x in (0, 2, width - 3, width - 1) for y in range(2400)}
    assert edges == {hues["page"]}  # nothing reaches the screen's edge
    for bar in ("leader", "anchor", "peer"):
        assert counts.get(hues[bar], 0) > width, bar
    assert len(counts) > 100  # shades of the heat map, and of letters


@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser_nothing_is_cut_off_broken_or_overlaid(width, committed, tmp_path):
    path = tmp_path / "page.html"
    probe = f"<script>{(Path(__file__).parent / 'page_probe.js').read_text()}</script></body>"
    whole = html.escape(committed.text.replace("</body>", probe))
    # in a frame, since a window is 500 wide at least
    path.write_text(f'<iframe srcdoc="{whole}" style="width: {width}px; border: 0"></iframe>')
    output = look(path, width, "light", tmp_path / "profile", "--dump-dom")
    outcome = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", output).group(1)))
    assert outcome == {"screenWidth": width, "faults": []}
