"""The schedule of a quantiser: its keys, its names, and what is refused."""

import pytest

from fagen.errors import ScheduleError
from fagen.paths import locate
from fagen.quantizer import QuantizeSchedule, parse_quantizer, read_quantizer
from tests.quantize_helpers import SPREAD


@pytest.mark.parametrize("slug", SPREAD)
def test_a_slug_reads_back(slug):
    assert QuantizeSchedule.from_slug(slug).slug == slug


@pytest.mark.parametrize("path", sorted(locate("schedules").glob("quant_*.toml")), ids=str)
def test_a_committed_quantiser_is_called_by_its_slug(path):
    assert read_quantizer(path).slug == path.stem


def test_a_file_says_what_its_slug_says():
    text = '[quantize]\ndtype = "fp16"\nhead_dim = 128\nrotate = true\nscales = "block"\n'
    assert parse_quantizer(text) == QuantizeSchedule.from_slug("quant_fp16_d128_rot_block128")


def test_all_faults_are_said_at_once_each_with_its_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[quantize]\ndtype = "fp8"\nhead_dim = 100\nrotated = true\n')
    with pytest.raises(ScheduleError) as refused:
        read_quantizer(path)
    said = str(refused.value).splitlines()
    assert said[0] == f'{path}:2: quantize.dtype = "fp8" must be "fp16" or "bf16"'
    assert "head_dim = 100 must be a whole number from 16 to 256 in steps of 16" in said[1]
    assert said[2].startswith(f"{path}:4: quantize.rotated is not a key of [quantize]: dtype,")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(scales="head", scale_rows=64), "scale_rows has no meaning"),
        (dict(scales="block", rows=64), "multiple of scale_rows = 128"),
        (dict(scales="row"), '"tensor" or "head" or "block"'),
        (dict(rows=48), "32 or 64 or 128"),
        (dict(rotary="halves", head_dim=96), 'needs a head_dim of 64, 128, … .* rotary = "pairs"'),
        (dict(rotary="both"), '"none" or "halves" or "pairs"'),
    ],
)
def test_what_does_not_go_together_is_refused(keys, said):
    with pytest.raises(ScheduleError, match=said):
        QuantizeSchedule.make(**dict(dtype="fp16", head_dim=128) | keys)


@pytest.mark.parametrize(
    "slug",
    [
        "quant_fp16",
        "fwd_fp16_d128_full_m128n128",
        "quant_fp16_d128_head_r128",
        "quant_fp16_d8_head",
    ],
)
def test_what_is_no_slug_is_refused(slug):
    with pytest.raises(ScheduleError):
        QuantizeSchedule.from_slug(slug)


def test_a_missing_file_or_table_is_said():
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_quantizer("nowhere.toml")
    with pytest.raises(ScheduleError, match="a table with dtype, head_dim"):
        parse_quantizer("")
