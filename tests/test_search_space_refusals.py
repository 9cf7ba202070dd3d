"""What is no space is refused: in words, with its line, before time or memory is spent."""

import math

import pytest

from fagen import search
from fagen.errors import ScheduleError
from fagen.search import replay
from fagen.search.choice import Chooser
from fagen.search.declared import MAX_POINTS, parse_space
from fagen.search.files import read_spaces
from fagen.search.run import summary
from fagen.search.shapes import MAX_SIZE
from fagen.search.space import normalised, survey
from fagen.search.store import Store
from tests.cli_helpers import fagen
from tests.clock import least_seconds
from tests.recordings import SPACE, record, space, surveyed

TEXT = '[attention]\ndtype = "fp16"\nhead_dim = 64\nmask = "full"\n'
SHAPES = "[[shapes]]\nseqlen = 512\n[[shapes]]\nseqlen = 1024\n"


FEW = SPACE + "\n[tile]\nblock_m = 128\nblock_n = [64, 128]\n"  # of which all is soon predicted


def refusal(more: str) -> list[str]:
    """Return the lines of a refusal of TEXT with more below: its first line is number 5."""
    with pytest.raises(ScheduleError) as error:
        parse_space(TEXT + more, "x.toml")
    return str(error.value).splitlines()


# ---- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        (
            "{from = 64}",
            ["x.toml:6: tile.block_n is a range without to; one looks like "],
        ),
        ("{}", ["x.toml:6: tile.block_n is a range without from and to; one looks like "]),
        (
            "{from = 64, to = 128, stepp = 16}",
            ["x.toml:6: tile.block_n.stepp is no part of a range; did you mean step?"],
        ),
        (
            "{from = 64, too = 128}",
            [
                "x.toml:6: tile.block_n.too is no part of a range; did you mean to?",
                "x.toml:6: tile.block_n is a range without to; one looks like ",
            ],
        ),
        (
            '{from = 64.0, to = true, step = "16"}',
            [
                "x.toml:6: tile.block_n.from = 64.0 must be a whole number",
                "x.toml:6: tile.block_n.to = true must be a whole number",
                'x.toml:6: tile.block_n.step = "16" must be a whole number',
            ],
        ),
        ("{from = 64, to = 128, step = 0}", ["x.toml:6: tile.block_n.step = 0 must be 1 or more"]),
        ("{from = 128, to = 64}", ["x.toml:6: tile.block_n is a range from 128 down to 64: no"]),
        (
            "{from = 16, to = 1000000000}",
            ["x.toml:6: tile.block_n stands for 999,999,985 values; a space has 1,000,000 points"],
        ),
        (
            f"{{from = 16, to = 0x{'f' * 400}}}",
            ["x.toml:6: tile.block_n stands for a number of 1600 bits values"],
        ),
        (
            "{from = 16, to = 800000}",
            ["x.toml:6: tile.block_n = 800000 must be a whole number from 16 to 256 in steps"],
        ),
        ("[]", ["x.toml:6: tile.block_n says no value"]),
        ("[[64]]", ["x.toml:6: tile.block_n = a list must be a whole number from 16"]),
        ("[{from = 64, to = 128}]", ["x.toml:6: tile.block_n = a table must be a whole number"]),
        (
            "[16, 17, nan, 18]",
            ["x.toml:6: tile.block_n = 17 must be a whole number from 16 to 256 in steps of 16"],
        ),
    ],
)
def test_what_is_no_range_or_list_is_refused_with_its_line(said, lines):
    found = refusal(f"[tile]\nblock_n = {said}\n")
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


def test_of_many_wrong_values_the_first_is_told_and_how_many_there_are():
    (line,) = refusal("[tile]\nblock_n = [16, 17, 18, 19]\n")
    assert line.endswith("the nearest is 16 (3 of its 4 values are refused)")
    (line,) = refusal("[tile]\nblokn = [16, 17, 18, 19]\n")
    assert "is not a key of [tile]; did you mean block_n?" in line


def test_a_range_of_a_billion_costs_nothing():
    def refuse():
        for last in (10**6, 10**9, 2**63 - 1):
            refusal(f"[tile]\nblock_n = {{from = 16, to = {last}}}\n")
            refusal(f"[build]\nmax_spill_bytes = {{from = 0, to = {last}}}\n")

    assert least_seconds(refuse, 2) <= 2


def test_products_beyond_a_million_points_are_refused_with_their_count():
    def refuse():
        (line,) = refusal("[build]\nmax_spill_bytes = { from = 0, to = 4096 }\n")
        assert "x.toml: 50,343,936 points (" in line and "1,000,000 at most" in line
        assert "4,097 of max_spill_bytes" in line and "16 of block_n" in line

    assert least_seconds(refuse, 2) <= 2
    said = TEXT.replace("64", "{ from = 16, to = 256, step = 8 }")
    said += "[build]\nmax_spill_bytes = { from = 0, to = 3 }\n"
    with pytest.raises(ScheduleError, match="1,523,712 points"):
        parse_space(said)
    declared = parse_space(TEXT)
    assert math.prod(map(len, declared.values.values())) < MAX_POINTS


def test_so_are_points_times_shapes():
    shapes = "".join(f"[[shapes]]\nseqlen = {n}\n" for n in range(1, 1_001))
    (line,) = refusal(shapes)
    assert "12,288 points" in line and "at 1,000 shapes, 10,000,000 times at most" in line


# ---- shapes, weights, the search -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("weight = 0", "x.toml:9: shapes.1.weight = 0: input should be greater than 0"),
        ("weight = -1.5", "x.toml:9: shapes.1.weight = -1.5: input should be greater than 0"),
        ("weight = nan", "x.toml:9: shapes.1.weight = nan: input should be a finite number"),
        ("weight = inf", "x.toml:9: shapes.1.weight = inf: input should be a finite number"),
        ('weight = "1"', 'x.toml:9: shapes.1.weight = "1": input should be a valid number'),
        ("weigth = 1", "x.toml:9: shapes.1.weigth is not a key of shapes; did you mean weight?"),
        (f"batch = {10**400}", "x.toml:9: shapes.1.batch = a number of 1329 bits: input should be"),
        ("heads = 1048577", "x.toml:9: shapes.1.heads = 1048577: input should be less than or"),
        (
            "heads = 12\nkv_heads = 5",
            "x.toml:10: shapes.1.kv_heads = 5 does not divide heads = 12: the nearest",
        ),
        (
            "kv_heads = 5",
            "x.toml:9: shapes.1.kv_heads = 5 does not divide heads = 32, which goes with "
            "head_dim = 64: the nearest that does is 4",
        ),
        (
            "heads = 4\nkv_heads = 8",
            "x.toml:10: shapes.1.kv_heads = 8 does not divide heads = 4: the nearest that",
        ),
    ],
)
def test_a_shape_that_is_none_is_refused_with_its_line(more, line):
    (found,) = refusal(f"{SHAPES}{more}\n")
    assert found.startswith(line), found


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("[search]\npatiense = 3", "x.toml:6: search.patiense is not a key of search; did you"),
        ("[search]\ncompile = 0", "x.toml:6: search.compile = 0: input should be greater than or"),
        ("[search]\ncompile = 5.0", "x.toml:6: search.compile = 5.0: input should be a valid int"),
        (
            'lengths = ["equal", "varlen"]',
            "x.toml:5: attention.lengths names both: their shapes are others, so make two spaces",
        ),
        ("[search]\nprune = inf", "x.toml:6: search.prune = inf: input should be a finite number"),
        ("[search]\nshare = 1e308", "x.toml:6: search.share = 1e+308: input should be less than"),
        ("[serach]\nshare = 1", "x.toml:5: serach is not a table of a space; did you mean search?"),
        ("[[shape]]\nseqlen = 1", "x.toml:5: shape is not a table of a space; did you mean shapes"),
        ("[shapes]\nseqlen = 1", "x.toml:5: shapes = a table: input should be a valid list"),
        ("search = 3", "x.toml:5: attention.search is not a key of [attention]"),
        (
            '[search]\nanchor = "fwd_fp16_d64_full_m127n128"',
            'x.toml:6: search.anchor = "fwd_fp16_d64_full_m127n128" is no schedule: '
            "fwd_fp16_d64_full_m127n128: tile",
        ),
        (
            '[search]\nanchor = "fwd_fp16_d64_causal_m128n128"',
            'x.toml:6: search.anchor = "fwd_fp16_d64_causal_m128n128" computes none of what is '
            "searched: fp16_d64_full",
        ),
        (
            '[search]\nanchor = "quant_fp16_d64"',
            'x.toml:6: search.anchor = "quant_fp16_d64" is no schedule: ',
        ),
        (
            '[search]\nanchor = "fwd_fp16_d64_full_m256n256_s8"',
            'x.toml:6: search.anchor = "fwd_fp16_d64_full_m256n256_s8" does not fit (fits with ',
        ),
        (
            '[search]\nanchor = "\\u001b[2J"',
            'x.toml:6: search.anchor = "\\',
        ),
    ],
)
def test_how_to_search_is_refused_with_its_line(more, line):
    (found,) = refusal(f"{more}\n")
    assert found.startswith(line), found
    assert found.isprintable()


def test_weights_of_any_size_add_up_to_one_and_none_is_lost():
    for weights in ([150.0] * 6, [5e-324, 1e308, 1e308], [1e308] * 7, [10.0, 100.0], [5e-324]):
        found = normalised(weights)
        assert math.fsum(found) == pytest.approx(1) and min(found) > 0
        assert normalised(found[:1]) == (1.0,)
    assert normalised([1, 3]) == (0.25, 0.75)


@pytest.mark.parametrize("weight", [150.0, 1e-9, 1e300])
def test_a_common_factor_of_all_weights_changes_no_prediction(weight):
    heavy = FEW.replace("[[shapes]]", f"[[shapes]]\nweight = {weight!r}")
    one, other = surveyed(FEW), surveyed(heavy)
    for point in one.points[:50]:
        assert other.predicted(point) == pytest.approx(one.predicted(point), rel=1e-12)
    Chooser(other, 1.6)


@pytest.mark.parametrize("weights", [(10.0, 100.0, 50.0), (1e-300, 1.0, 1e300)])
def test_a_replay_is_right_for_any_weights(tmp_path, weights):
    """Its sizes may be fewer than a space's: those that were recorded."""
    parts = FEW.split("[[shapes]]")
    text = parts[0] + "".join(
        f"[[shapes]]\nweight = {weight!r}{part}"
        for weight, part in zip(weights, parts[1:], strict=True)
    )
    recorded = record(tmp_path / "recorded.sqlite", kernels=12, text=FEW)
    again = space(text + "\n[[shapes]]\nseqlen = 768\nweight = 1e308\n")
    target = again.targets()[0]
    only = replay.only_recorded(recorded, survey(again, target))
    assert len(only.sizes) == 3 and math.fsum(only.weights) == pytest.approx(1)
    search.search([again], tmp_path / "found.sqlite", recorded=recorded)
    for result in search.found(tmp_path / "found.sqlite"):
        assert result.lead is not None
        assert all(map(math.isfinite, (result.lead.lead, result.marks.mark(result.lead.slug))))


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_that_can_be_no_space_is_refused_before_it_is_read_whole(tmp_path):
    for path, said in [
        ("/dev/zero", "longer than 262,144 bytes; this is no search space"),
        (tmp_path, "cannot be read"),
        ("\0", "is no slug"),
        ("x" * 5000, "is no slug"),
        ("\0.toml", "cannot be read"),
        (tmp_path / "latin.toml", r"latin\.toml:2: this is not UTF-8"),
    ]:
        (tmp_path / "latin.toml").write_bytes(b"# one\n# caf\xe9\n")
        with pytest.raises(ScheduleError, match=said):
            read_spaces(path)[0]
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert read_spaces(marked)[0].targets() == parse_space(TEXT).targets()


def test_a_store_can_be_read_again_whatever_its_space_is_called_and_however_large(tmp_path):
    largest = "".join(f"{key} = {MAX_SIZE}\n" for key in ("batch", "heads", "seqlen", "kv_heads"))
    tiles = "[tile]\nblock_m = 128\nblock_n = 128\n"
    declared = parse_space(f"{TEXT}{tiles}[[shapes]]\n{largest}", "a\n\x1b[2J.toml")
    (target,) = declared.targets()
    with Store(tmp_path / "s.sqlite") as store:
        store.put_space(declared.name, declared.text)
        store.put_survey(target, summary(survey(declared, target), declared))
        assert store.spaces() == {declared.name: declared.text} and store.surveys()
    assert search.found(tmp_path / "s.sqlite")


def test_the_command_refuses_them_in_one_line_each(tmp_path):
    path = tmp_path / "x.toml"
    for more in ("[tile]\nblock_n = {from = 64}\n", '[search]\nanchor = "fwd"\n'):
        path.write_text(TEXT + more)
        result = fagen("search", path, "--dry-run")
        assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert fagen("search", "/dev/zero", "--dry-run").exit_code == 1
