"""Committed pages of results are what their data says today, and each plot belongs to one."""

import re

import pytest

from fagen.measure.rows import read_rows
from tests.benchmark_helpers import RESULTS, scripts


@pytest.fixture
def pages(monkeypatch):
    with scripts(monkeypatch) as load:
        yield load("pages")


@pytest.fixture
def plots(monkeypatch):
    with scripts(monkeypatch) as load:
        yield load("plots")


def test_a_page_of_results_is_what_its_data_says_and_shows_its_own_plots(
    pages, monkeypatch, tmp_path, capsys
):
    import plots  # of benchmarks/, as its scripts find it

    def undrawn(rows, folder, stem, **_):  # plots take their time: they are compared below
        return tuple(plots.places(rows, folder, stem).values())

    monkeypatch.setattr(plots, "plot", undrawn)
    shown = set()
    for page in sorted(RESULTS.glob("*.md")):
        drawn = dict(pages.drawn(page, tmp_path))
        assert {place.name for place in drawn.values()} == {page.name}
        for path, place in drawn.items():
            assert pages.alike(path, place), f"{page.name}: run make pages"
        text = page.read_text("utf-8")
        assert text.startswith("# ") and text.count("\n# ") == 0
        of = re.findall(r"\]\(([^)]*\.svg)\)", text)
        assert all(name.startswith(page.stem) and (RESULTS / name).exists() for name in of)
        shown.update(of)
    others = {path.name for path in RESULTS.glob("*.svg")} - shown
    assert {name for name in others if "train" not in name} == {"speeds.svg"}  # the README's


def test_what_sums_a_run_up_comes_before_its_table():
    page = (RESULTS / "nvidia-h200-2026-11-26-backward.md").read_text("utf-8")
    assert page.index("fagen ÷ cuDNN:") < page.index(".svg)") < page.index("mask |     S |")


def test_a_plot_is_drawn_for_light_and_for_dark_screens(plots, pages, tmp_path):
    stem = "nvidia-h200-2026-11-26-backward"
    rows = [row for row in read_rows(RESULTS / f"{stem}.json") if row.head_dim == 64][:8]
    (path, *_) = plots.plot(rows, tmp_path, "x", subtitle="of few rows", ceilings={})
    text = path.read_text("utf-8")
    assert "@media (prefers-color-scheme: dark)" in text
    used = set(re.findall(r"#[0-9a-f]{6}", text.partition("</defs>")[2]))
    assert {plots.GROUND, plots.INK, plots.ACCENT} <= used
    for light, dark in plots.DARK.items():
        assert f'[style*="fill: {light}"] {{ fill: {dark} !important }}' in text
    # what is drawn in other colours stands out from either ground
    for colour in used - plots.DARK.keys():
        assert min(contrast(colour, plots.GROUND), contrast(colour, plots.DARK[plots.GROUND])) > 1.8
    for light, dark in plots.DARK.items():
        if light not in (plots.GROUND, plots.FAINT):
            assert (
                contrast(light, plots.GROUND) > 3 and contrast(dark, plots.DARK[plots.GROUND]) > 3
            )
    for committed in RESULTS.glob("*.svg"):
        text = committed.read_text("utf-8")
        transparent = "#ffffff" not in text
        assert transparent or "prefers-color-scheme: dark" in text, committed.name


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, as WCAG has it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.long
def test_every_plot_is_what_its_data_says(pages, capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().out
