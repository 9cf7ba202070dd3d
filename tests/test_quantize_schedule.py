"""The schedule of a quantiser: its keys, its names, and what is refused; what its Plan says."""

import pytest

from fagen import registry
from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.plan import plan
from fagen.kinds.quantize.rules import HALVES_STEP

FIRST = dict(dtype="fp16", head_dim=128)


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({}, "quant_fp16_d128"),
        ({"dtype": "bf16", "head_dim": 48}, "quant_bf16_d48"),
        ({"rotate": True}, "quant_fp16_d128_rot"),
        ({"scales": "block", "scale_rows": 64}, "quant_fp16_d128"),
        ({"scale_rows": 128}, "quant_fp16_d128_sr128"),
        ({"scales": "head"}, "quant_fp16_d128_shead"),
        ({"scales": "tensor", "layout": "columns"}, "quant_fp16_d128_stensor_vcols"),
        ({"scale_rows": 32}, "quant_fp16_d128_sr32"),
        ({"rotary": "halves", "rotate": True}, "quant_fp16_d128_halves_rot"),
        ({"rotary": "pairs", "head_dim": 80}, "quant_fp16_d80_pairs"),
    ],
)
def test_a_slug_says_what_is_no_default(changes, slug):
    schedule = Schedule.make(**FIRST | changes)
    assert schedule.slug == slug
    assert registry.from_slug(slug) == schedule


def test_a_file_says_what_its_slug_says():
    text = '[quantize]\ndtype = "fp16"\nhead_dim = 128\nrotate = true\nscales = "block"\n'
    assert registry.parse(text) == registry.from_slug("quant_fp16_d128_rot")


def test_all_faults_are_said_at_once_each_with_its_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[quantize]\ndtype = "fp8"\nhead_dim = 100\nrotated = true\n')
    with pytest.raises(ScheduleError) as refused:
        registry.read(path)
    said = str(refused.value).splitlines()
    assert said[0] == f'{path}:2: quantize.dtype = "fp8" must be "fp16" or "bf16"'
    assert "head_dim = 100 must be a whole number from 16 to 256 in steps of 16" in said[1]
    assert said[2] == f"{path}:4: quantize.rotated is not a key of [quantize]; did you mean rotate?"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(scales="head", scale_rows=64), "scale_rows has no meaning"),
        (dict(scales="row"), '"head" or "tensor" or "block"'),
        (dict(scale_rows=48), "32 or 64 or 128"),
        (dict(rotary="halves", head_dim=96), 'needs a head_dim of 64, 128, … .* rotary = "pairs"'),
        (dict(rotary="both"), '"none" or "halves" or "pairs"'),
    ],
)
def test_what_does_not_go_together_is_refused(keys, said):
    with pytest.raises(ScheduleError, match=said):
        Schedule.make(**FIRST | keys)


@pytest.mark.parametrize(
    "slug",
    [
        "quant_fp16",
        "quant_fp16_d128_sblock",
        "quant_fp16_d128_sr64",
        "quant_fp16_d128_shead_sr64",
        "quant_fp16_d8",
        "quant_e4m3_d128",
        "quant_fp16_d128_block64",
    ],
)
def test_what_is_no_slug_is_refused(slug):
    with pytest.raises(ScheduleError):
        registry.from_slug(slug)
    with pytest.raises(ScheduleError):
        Schedule.from_slug("fwd_fp16_d128_full_m128n128")


def test_a_missing_file_or_table_is_said():
    with pytest.raises(ScheduleError, match="cannot be read"):
        registry.read("nowhere.toml")
    with pytest.raises(ScheduleError, match="a table with dtype, head_dim"):
        registry.parse('kind = "quantize"')


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("scales", ["head", "tensor", "block"])
def test_every_quantiser_fits_a_multiprocessor(head_dim, scales):
    for rotary in ("none", "pairs", *(["halves"] if head_dim % HALVES_STEP == 0 else [])):
        for layout in ("rows", "columns"):
            keys = dict(head_dim=head_dim, scales=scales, rotary=rotary, layout=layout)
            worked = plan(Schedule.make(**FIRST | keys))
            held = worked.threads * worked.blocks
            assert worked.blocks >= 1
            assert held * worked.launch_registers <= SM90.registers_per_sm
            assert worked.shared_bytes * worked.blocks <= SM90.smem_per_block
