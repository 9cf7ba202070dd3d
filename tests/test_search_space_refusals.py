"""What is no space is refused: in words, with its line, before time or memory is spent."""

import math
import re

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
VARLEN = TEXT + 'lengths = "varlen"\n'
FEW = SPACE + "\n[tile]\nblock_m = 128\nblock_n = [64, 128]\n"  # of which all is soon predicted


def refusal(more: str, head: str = TEXT) -> list[str]:
    """Return the lines of a refusal of a space with more below, without its name."""
    with pytest.raises(ScheduleError) as error:
        parse_space(head + more, "x.toml")
    lines = str(error.value).splitlines()
    assert all(line.startswith("x.toml:") and line.isprintable() for line in lines)
    return [line.removeprefix("x.toml:").strip() for line in lines]


# ---- each line of a table is what stands below a space, and how each line of its refusal begins --

RANGES = r"""
{from = 64} -> 6: tile.block_n is a range without to; one looks like
{} -> 6: tile.block_n is a range without from and to; one looks like
{from = 64, to = 128, stepp = 16} -> 6: tile.block_n.stepp is no part of a range; did you mean step?
{from = 4, too = 8} -> 6: tile.block_n.too is no part of a range; did you mean to? | 6: tile.bl
{from = 64.0, to = 256} -> 6: tile.block_n.from = 64.0 must be a whole number
{from = 4, to = true, step = "16"} -> 6: tile.block_n.to = true must | 6: tile.block_n.step = "16"
{from = 64, to = 128, step = 0} -> 6: tile.block_n.step = 0 must be 1 or more
{from = 128, to = 64} -> 6: tile.block_n is a range from 128 down to 64: no
{from = 16, to = 1000000000} -> 6: tile.block_n stands for 999,999,985 values; a space has 1,000,000
{from = 16, to = 0xHUGE} -> 6: tile.block_n stands for a number of 1600 bits values
{from = 16, to = 800000} -> 6: tile.block_n = 800000 must be a whole number from 16 to 256 in steps
[] -> 6: tile.block_n says no value
[[64]] -> 6: tile.block_n = a list must be a whole number from 16
[{from = 64, to = 128}] -> 6: tile.block_n = a table must be a whole number
[16, 17, nan, 18] -> 6: tile.block_n = 17 must be a whole number from 16 to 256 in steps of 16
"""
SECOND_SHAPE = r"""
weight = 0 -> 9: shapes.1.weight = 0: input should be greater than 0
weight = -1.5 -> 9: shapes.1.weight = -1.5: input should be greater than 0
weight = nan -> 9: shapes.1.weight = nan: input should be a finite number
weight = inf -> 9: shapes.1.weight = inf: input should be a finite number
weight = "1" -> 9: shapes.1.weight = "1": input should be a valid number
weigth = 1 -> 9: shapes.1.weigth is not a key of shapes; did you mean weight?
batch = 0xHUGE -> 9: shapes.1.batch = a number of 1600 bits: input should be
heads = 1048577 -> 9: shapes.1.heads = 1048577: input should be less than or
heads = 12\nkv_heads = 5 -> 10: shapes.1.kv_heads = 5 does not divide heads = 12: the nearest
kv_heads = 5 -> 9: shapes.1.kv_heads = 5 does not divide heads = 32, which ~~ is 4
heads = 4\nkv_heads = 8 -> 10: shapes.1.kv_heads = 8 does not divide heads = 4: the nearest that
"""
SEARCH = r"""
[search]\npatiense = 3 -> 6: search.patiense is not a key of search; did you
[search]\ncompile = 0 -> 6: search.compile = 0: input should be greater than or
[search]\ncompile = 5.0 -> 6: search.compile = 5.0: input should be a valid int
lengths = ["equal", "varlen"] -> 5: attention.lengths names both: their shapes are others, so make
[search]\nprune = inf -> 6: search.prune = inf: input should be a finite number
[search]\nshare = 1e308 -> 6: search.share = 1e+308: input should be less than
[serach]\nshare = 1 -> 5: serach is not a table of a space; did you mean search?
[[shape]]\nseqlen = 1 -> 5: shape is not a table of a space; did you mean shapes
[shapes]\nseqlen = 1 -> 5: shapes = a table: input should be a valid list
search = 3 -> 5: attention.search is not a key of [attention]
[search]\nanchor = "fwd_fp16_d64_full_m127n128" -> 6: search.anchor = ~~ is no schedule: ~~: tile
[search]\nanchor = "fwd_fp16_d64_causal_m128n128" -> 6: ~~ computes none of what is searched: fp16
[search]\nanchor = "quant_fp16_d64" -> 6: search.anchor = "quant_fp16_d64" is no schedule:
[search]\nanchor = "fwd_fp16_d64_full_m256n256_s8" -> 6: search.anchor = ~~ does not fit (fits with
[search]\nanchor = "\u001b[2J" -> 6: search.anchor = "\
"""
VARLEN_SHAPE = r"""
seqlens = [3, 0] -> shapes.0.seqlens.1 = 0: input should be greater than or equal to 1
seqlens = [] -> shapes.0.seqlens = a list: list should have at least 1 item
seqlens = 3 -> shapes.0.seqlens = 3: must be a list of lengths, or { from = 16, to =
seqlens = { from = 3 } -> shapes.0.seqlens.to is missing
seqlens = { from = 3, to = 9, too = 9 } -> seqlens.too is not a key of shapes; did you mean to?
seqlens = { from = 30, to = 9 } -> shapes.0.seqlens is a range from 30 down to 9
heads = 3 -> shapes.0.seqlen is missing, or seqlens
seqlen = 3\nseqlens = [3] -> shapes.0.seqlens goes without seqlen
seqlens = [3, 4]\nseqlens_k = [9] -> seqlens_k has 1 lengths, and seqlens 2: one for
seqlen = 3\nseqlens_k = [9] -> shapes.0.seqlens_k goes with a list of seqlens
seqlens = [3]\nseqlen_k = 9 -> shapes.0.seqlen_k goes with seqlen
seqlens = [3]\nbatch = 1 -> shapes.0.batch goes without a list of seqlens
seqlen = 3\ntokens = 9 -> shapes.0.tokens goes with lengths that are drawn, without bat
tokens = 9 -> shapes.0.seqlen is missing, or seqlens, or tokens and batch
tokens = 9\nbatch = 10 -> shapes.0.tokens = 9 leaves some of batch = 10 without any
tokens = 9\nbatch = 2\ntokens_k = 1 -> shapes.0.tokens_k = 1 leaves some of batch = 2 without any
tokens = 9\nbatch = 2\nlongest = 4 -> shapes.0.longest = 4: of 9 tokens in 2 sequences it is 5 … 8
tokens = 90\nbatch = 2\ntokens_k = 9\nlongest_k = 9 -> ~~.longest_k = 9: of 9 tokens in 2 ~~ 5 … 8
seqlen = 3\nlongest = 3 -> shapes.0.longest goes with tokens and batch, without seqlen
tokens = 9\nbatch = 2\nseqlen_k = 9 -> shapes.0.seqlen_k goes with seqlen
tokens = 9\nbatch = 16385 -> shapes.0.batch = 16385: input should be less than or equal
seqlens = [1048576, 1] -> shapes.0 has 1,048,577 queries in all; 1,048,576 at most
seqlens = [1]\nseqlens_k = [1048577] -> seqlens_k.0 = 1048577: input should be less
seqlens = { from = 1, to = 1 }\ntokens = 20000 -> has 16,385 sequences; 16,384 at most
seqlens = [9]\nkv_heads = 3 -> shapes.0.kv_heads = 3 does not divide heads = 32
seqlens = [9]\nx = 3 -> shapes.0.x is not a key of shapes: seqlen, seqlen_k, seqlens,
"""
TABLES = (
    ("[tile]\nblock_n = ", TEXT, RANGES),
    (SHAPES, TEXT, SECOND_SHAPE),
    ("", TEXT, SEARCH),
    ("[[shapes]]\n", VARLEN, VARLEN_SHAPE),
)
CASES = [
    (begin + line.replace(r"\n", "\n").replace("HUGE", "f" * 400), head, starts)
    for begin, head, table in TABLES
    for line, _, starts in (row.partition(" -> ") for row in table.strip().splitlines())
]


@pytest.mark.parametrize(("more", "head", "starts"), CASES)
def test_what_is_no_space_is_refused_with_its_lines(more, head, starts):
    lines, expected = refusal(f"{more}\n", head), starts.split(" | ")
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        begins = "" if head == VARLEN else "^"
        assert re.search(begins + ".*".join(map(re.escape, start.split("~~"))), line), line


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
        assert "50,343,936 points (" in line and "1,000,000 at most" in line
        assert "4,097 of max_spill_bytes" in line and "16 of block_n" in line

    assert least_seconds(refuse, 2) <= 2
    text = TEXT.replace("64", "{ from = 16, to = 256, step = 8 }")
    text += "[build]\nmax_spill_bytes = { from = 0, to = 3 }\n"
    with pytest.raises(ScheduleError, match="1,523,712 points"):
        parse_space(text)
    declared = parse_space(TEXT)
    assert math.prod(map(len, declared.values.values())) < MAX_POINTS


def test_so_are_points_times_shapes():
    shapes = "".join(f"[[shapes]]\nseqlen = {n}\n" for n in range(1, 1_001))
    (line,) = refusal(shapes)
    assert "12,288 points" in line and "at 1,000 shapes, 10,000,000 times at most" in line


# ---- weights -------------------------------------------------------------------------------------


def test_weights_of_any_size_add_up_to_one_and_none_is_lost():
    for weights in ([150.0] * 6, [5e-324, 1e308, 1e308], [1e308] * 7, [10.0, 100.0], [5e-324]):
        shares = normalised(weights)
        assert math.fsum(shares) == pytest.approx(1) and min(shares) > 0
        assert normalised(shares[:1]) == (1.0,)
    assert normalised([1, 3]) == (0.25, 0.75)


@pytest.mark.parametrize("weight", [150.0, 1e-9, 1e300])
def test_a_common_factor_of_all_weights_changes_no_prediction(weight):
    heavy = FEW.replace("[[shapes]]", f"[[shapes]]\nweight = {weight!r}")
    light, other = surveyed(FEW), surveyed(heavy)
    for point in light.points[:50]:
        assert other.predicted(point) == pytest.approx(light.predicted(point), rel=1e-12)
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
    for path, message in [
        ("/dev/zero", "longer than 262,144 bytes; this is no search space"),
        (tmp_path, "cannot be read"),
        ("\0", "is no slug"),
        ("x" * 5000, "is no slug"),
        ("\0.toml", "cannot be read"),
        (tmp_path / "latin.toml", r"latin\.toml:2: this is not UTF-8"),
    ]:
        (tmp_path / "latin.toml").write_bytes(b"# one\n# caf\xe9\n")
        with pytest.raises(ScheduleError, match=message):
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
