"""What is no schedule is refused: every fault at once, each with its line."""

import math

import pytest

from fagen import registry
from fagen.dispatch.pick import pick
from fagen.errors import ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.toml_lines import near_word
from tests.schedule_helpers import (
    E4M3,
    KINDS,
    ONLINE,
    PLAIN_FORWARD,
    QUANTIZER,
    TEXT,
    but,
    refusal,
)

QUANTISER = '[quantize]\ndtype = "fp16"\nhead_dim = 128\n'


# ---- kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "text"), [("forward", TEXT), ("quantize", QUANTISER)])
def test_a_file_says_its_kind_or_its_tables_do(kind, text):
    silent, explicit = registry.parse(text), registry.parse(f'kind = "{kind}"\n{text}')
    assert silent == explicit and silent.kind == explicit.kind == kind
    assert registry.plan(explicit).kind == kind


@pytest.mark.parametrize(
    ("text", "value", "near"),
    [
        ('kind = "sideways"', '"sideways"', ""),
        ('kind = "quantise"', '"quantise"', '; did you mean "quantize"?'),
        ('"kind" = "x\\u0007"', r'"x\u0007"', ""),
        ("kind = 3", "3", ""),
        ("kind = nan", "nan", ""),
        ("kind = []", "a list", ""),
        ("kind = {a = 1}", "a table", ""),
        ("[kind]", "a table", ""),
        ("[[kind]]", "a list", ""),
        ("kind.forward = 1", "a table", ""),
    ],
)
def test_an_unknown_kind_is_refused_with_its_line_and_the_list(text, value, near):
    listed = " or ".join(f'"{kind}"' for kind in KINDS)
    assert refusal(f"# one\n{text}\n") == [f"x.toml:2: kind = {value} must be {listed}{near}"]


def test_a_table_of_another_kind_is_refused_by_the_tables_of_this_one():
    (line,) = refusal(f'kind = "quantize"\n{QUANTISER}{TEXT}'.replace("[tile]", "[attention.x]"))
    assert line == "x.toml:5: attention is not a table of this kind of schedule: quantize"
    assert refusal('kind = "quantize"\n')[0].startswith("x.toml: quantize is missing: a table with")
    assert "[quantize]" not in "\n".join(refusal('kind = "forward"\n'))


def test_a_kind_or_slug_that_nobody_has_is_refused_with_those_that_there_are():
    with pytest.raises(ScheduleError, match=f"there are {', '.join(KINDS)}"):
        registry.kind("sideways")
    for slug in ("side_fp16_d64", "", "fwd", "\x1b[2J"):
        with pytest.raises(ScheduleError, match="begins with fwd_, bwd_, quant_") as error:
            registry.kind_of_slug(slug)
        assert str(error.value).isprintable()


# ---- refusals -----------------------------------------------------------------------------------


FAULTY = {  # in each faulty line what its refusal says
    "forward": """\
#:schema schedule.schema.json
[attention]
head_dim = 129  # must be a whole number from 16 to 256 in steps of 8; the nearest is 128
dtype = "pf16"  # did you mean "fp16"?
mask = "casual"  # did you mean "causal"?
[tile]  # tile.block_n is missing
block_m = 128.0  # must be
blok_n = 3  # is not a key of [tile]; did you mean block_n?
[pipelines]  # did you mean pipeline?
[softmax]
rescale_threshold = nan  # must be
stages = 2  # belongs under [pipeline]
[grid]
cluster = 3  # must be
[overlap]
intra_warpgroup = 1  # must be true or false
""",
    "backward": """\
[backward]
dtype = "e4m3"  # must be
head_dim = 100  # must be
mask = "windows"  # must be
[tile]
block_m = 72  # must be
block_n = 256  # must be
[pipeline]
ds_stages = 3  # must be
""",
    "decode": """\
[decode]
dtype = "e4m3"  # must be
head_dim = 100  # must be
mask = "causal"
[tile]
rows = 12  # must be
block_n = 96  # must be
[split]
num_splits = 0  # must be
""",
    "combine": """\
[combine]
dtype = "e4m3"  # must be
head_dim = 100  # must be
layout = "ragged"  # must be
stages = 3  # is gone
unroll = 4  # is not a key of [combine]
""",
    "quantize": """\
[quantize]
dtype = "fp8"  # must be "fp16" or "bf16"
head_dim = 100  # must be a whole number from 16 to 256 in steps of 16
rotated = true  # is not a key of [quantize]; did you mean rotate?
""",
}


@pytest.mark.parametrize("kind", FAULTY)
def test_all_faults_are_listed_at_once_each_with_its_line(kind):
    expected = [
        (f"x.toml:{number}:", line.split()[0].strip("[]"), line.split("  # ")[1])
        for number, line in enumerate(FAULTY[kind].splitlines(), 1)
        if "  # " in line
    ]
    for message, parts in zip(refusal(FAULTY[kind]), expected, strict=True):
        assert message.startswith(parts[0]) and all(part in message for part in parts), message


PAIR = "fwd_fp16_d64_full_m128n128_c2"
SPLIT = "fwd_fp16_d64_causal_m128n64_split4"


def offset(p: float, threshold: float) -> dict[str, float]:
    return {"p_offset": p, "rescale_threshold": threshold}


REFUSED = {  # what keys are changed to, and what is said of it
    PLAIN_FORWARD: [
        ({"scale_rows": 96}, "32 or 64 or 128"),
        ({"scale_rows": "64"}, r"did you mean 64\?"),
        ({"p_offset": 8.125}, "from 0 to 8"),
        ({"promote": 65}, "from 0 to 64"),
        ({"cluster": 4}, "from 1 to 2"),
        ({"head_dim": 8}, "from 16 to 256"),
        ({"head_dim": 264}, "from 16 to 256"),
        ({"head_dim_v": 20}, "the nearest is"),
        ({"block_n": 24}, "in steps of 16"),
        ({"block_m": 320}, "from 64 to 256 in steps of 64"),
        ({"stages": 1}, "from 2 to 8"),
        ({"q_stages": 3}, "from 1 to 2"),
        ({"sum": "tensors"}, r'did you mean "tensor"\?'),
        ({"consumer_registers": 236}, "in steps of 8"),
        ({"producer_registers": 16}, "from 24 to 256"),
        ({"rescale_threshold": 16}, "from 0 to 15"),
        ({"rescale_threshold": math.inf}, "from 0 to 15"),
        ({"sum": True}, '"threads" or "tensor"'),
        ({"stages": True}, "whole number"),
        ({"max_spill_bytes": -1}, "from 0"),
        ({"mask": None}, '"full" or "causal"'),
        ({"wonder": 1}, "is not a table"),
        ({"producer": "none", "order": "dynamic"}, '"lpt"'),
        ({"cluster": 2, "order": "dynamic"}, '"lpt"'),
        (
            {"sum": "tensor", **ONLINE},
            'sum "tensor" needs V in one slab of shared memory, as with head_dim_v = 64; it is 128 '
            'here: use sum = "threads"',
        ),
        *(
            (
                {"head_dim_v": columns, "output": "half"},
                'output "half" needs O in an even number of slabs of shared memory, as with '
                f"head_dim_v = 128 or 256; it has {slabs} here: use output = "
                '"own" or "reuse_v"',
            )
            for columns, slabs in ((64, 1), (96, 3), (192, 3), (80, 5))
        ),
        # of e4m3 only
        *(
            ({key: value}, f'fp8.{key} has no meaning with dtype.*use dtype = "e4m3"')
            for key, value in (
                *(("v_layout", "columns"), ("v_layout", "rows"), ("scales", "head")),
                *(("scale_rows", 128), ("v_scales", "column"), ("p_offset", 1.0)),
            )
        ),
        (
            {"promote": 1, "promote_columns": 32},
            'softmax.promote_columns has no meaning with dtype = "fp16"',
        ),
        ({"out_dtype": "bf16"}, 'attention.out_dtype "bf16" does not go with dtype = "fp16"'),
    ],
    "fwd_bf16_d64_full_m128n128": [  # rounded to bf16 P is not added up by tensor cores
        ({"sum": "tensor", **ONLINE}, '1e-3 is promised.*use sum = "threads"'),
    ],
    PAIR: [  # of blocks, which needs a producer and room for unequal steps
        ({"mask": "causal", "block_n": 32}, "a stage for each of the 4 blocks"),
        ({"mask": "causal", "intra_warpgroup": False}, "needs intra_warpgroup = true"),
        ({"producer": "none"}, '2 needs producer = "warp"'),
        ({"order": "dynamic"}, '2 needs order = "persistent"'),
    ],
    SPLIT: [
        ({"dtype": "e4m3", "scales": "block"}, '"block" is not for splits so far'),
        ({"lengths": "varlen"}, "fagen.attention_decode splits sequences"),
        ({"producer": "none"}, 'producer must be "warp" with num_splits > 1'),
        ({"output": "reuse_v"}, 'output must be "own" with num_splits > 1'),
        ({"order": "lpt"}, '"lpt" does not go with num_splits > 1'),
        ({"order": "dynamic"}, '"dynamic" does not go with num_splits > 1'),
        ({"sum": "tensor", **ONLINE}, 'sum must be "threads" with num_splits > 1'),
        ({"mask": "full", "cluster": 2}, "cluster must be 1 with num_splits > 1"),
        ({"num_splits": 129}, "num_splits"),
        ({"num_splits": 0}, "num_splits"),
    ],
    E4M3: [
        ({"head_dim": 72}, r"\.head_dim .*multiple of 16"),
        ({"head_dim_v": 24}, r"\.head_dim_v .*pieces of 16 bytes"),
        ({"block_n": 48}, r"\.block_n .*multiple of 32"),
        ({"head_dim": 64, "sum": "tensor", **ONLINE}, r'\.sum .*must be "threads"'),
        ({"producer": "none"}, r'\.producer .*must be "warp"'),
        ({"cluster": 2}, r"\.cluster .*must be 1"),
        ({"scale_rows": 64}, r'\.scale_rows .*with scales = "block"'),
        ({"v_row_stages": 1}, r'\.v_row_stages .*but with v_layout = "rows"'),
        ({"transposes": "kernel"}, r'\.transposes .*but with v_layout = "rows"'),
        (
            {"v_layout": "rows", "transposes": "kernel", "v_row_stages": 2},
            r"\.v_row_stages .*which the producer transposes",
        ),
        (
            {"v_layout": "rows", "transposes": "kernel", "lengths": "varlen"},
            r'\.lengths .*must be "equal" with transposes = "kernel"',
        ),
        (
            {"v_layout": "rows", "transposes": "kernel", "num_splits": 3},
            r'\.num_splits .*must be 1 with transposes = "kernel"',
        ),
        ({"v_layout": "rows", "v_row_stages": 1}, r"\.v_row_stages .*intra_warpgroup = false"),
        ({"v_layout": "rows", "v_row_stages": 3}, r"\.v_row_stages .*neither 1 nor stages, 2"),
        ({"v_scales": "block"}, r'\.v_scales .*"block" needs scales = "block"'),
        ({"promote_columns": 64}, r"\.promote_columns .*needs promote = 1"),
        ({"promote": 2, "promote_columns": 64}, r"\.promote_columns .*needs promote = 1"),
        (
            {"promote": 1, "totals": "shared", "promote_columns": 64},
            r'\.promote_columns .*totals = "registers"',
        ),
        ({"promote": 1, "promote_columns": 48}, r"\.promote_columns .*does not divide the 128"),
        ({"promote": 1, "promote_columns": 256}, r"\.promote_columns .*does not divide the 128"),
        *(
            ({"totals": value}, "softmax.totals has no meaning but with promote; leave it out")
            for value in ("registers", "shared")
        ),
        # P that e4m3 would cut off, with the sum
        *(
            (ONLINE | keys, rf"{total}.*8\.807, the log2 of 448.*{nearest}")
            for keys, total, nearest in (
                (offset(8.0, 4.0), r"8 \+ 4 = 12", "p_offset = 4,"),
                (offset(8.0, 0.875), r"8 \+ 0.875 = 8.875", "p_offset = 7,"),
                ({"rescale_threshold": 9.0}, r"0 \+ 9 = 9", "rescale_threshold = 8"),
                (offset(1.0, 9.0), r"1 \+ 9 = 10", "rescale_threshold = 8"),
            )
        ),
    ],
    QUANTIZER: [
        ({"scales": "head", "scale_rows": 64}, "scale_rows has no meaning"),
        ({"scales": "row"}, '"head" or "tensor" or "block"'),
        ({"scale_rows": 48}, "32 or 64 or 128"),
        (
            {"rotary": "halves", "head_dim": 96},
            'needs a head_dim of 64, 128, … .* rotary = "pairs"',
        ),
        ({"rotary": "both"}, '"none" or "halves" or "pairs"'),
    ],
}
SAID_BY_A_SLUG = {
    "bwd_fp16_d96_full_m64n128_dqall": "with block_n = 128: .* slabs of .*; use block_n = 64",
    "bwd_bf16_d64_full_m64n128_dqall": "with block_n = 128: .* slabs of .*; use block_n = 64",
    "bwd_fp16_d256_full_m64n128_bygrads": 'partition = "gradients" a tile is 64 x 64; use 64',
    "bwd_fp16_d256_full_m64n64_dqone": "both compute dQ; leave it out",
    "bwd_fp16_d64_full_m128n128_dqone": "computes dQ, of 64 rows; use 64",
    "bwd_fp16_d128_full_m64n128_s1_intra": "two steps need their Q at once; use 2",
    "dec_fp16_d96_causal_r8n64_c3_fixed_h2": "needs kv_heads = 1",
    "bwd_fp16_d96_full_m80n128": "into 64 columns, or of 64 columns into 16 rows times",
    "bwd_fp16_d64_full_m112n128": "for each of 2 warpgroups; use 64",
    "bwd_fp16_d256_full_m64n64_keepk": 'only with partition = "keys"; leave it out',
    "bwd_fp16_d256_full_m64n64_persist": 'only with partition = "keys"; leave it out',
    "bwd_fp16_d128_full_m64n128_post": "only with persistent = true; leave it out",
    "bwd_fp16_d64_full_m96n128_persist_post": "only with whole 64 rows a step; leave it out",
    "bwd_fp16_d128_full_m64n128_varlen_persist": 'with lengths = "varlen"; leave it out',
    "bwd_fp16_d64_full_m128n128_dqs2_persist": "all of dQ's buffer; use dq_slices = 1",
    "bwd_fp16_d128_full_m64n128_dss1_persist": "which has 1 x 64; use ds_stages = 2 or a",
    "bwd_fp16_d48_full_m64n192_persist": "has room for 128; use a larger block_m",
    "bwd_fp16_d128_full_m64n128_dqr240": "that is consumer_registers = 232; leave it out",
}
REFUSED |= {slug: [({}, message)] for slug, message in SAID_BY_A_SLUG.items()}


@pytest.mark.parametrize(
    ("slug", "changes", "message"),
    [(slug, *refused) for slug, cases in REFUSED.items() for refused in cases],
    ids=str,
)
def test_what_is_no_value_or_does_not_go_together_is_refused_by_its_key_with_what_does(
    slug, changes, message
):
    with pytest.raises(ScheduleError, match=message) as error:
        but(slug, changes)
    lines = str(error.value).splitlines()
    assert len(lines) == 1 or slug == SPLIT or not changes
    assert not changes or any(key in line for key in changes for line in lines)


@pytest.mark.parametrize("maximum", ["", 'maximum = "lazy"\n'])
def test_a_lazy_row_max_needs_sums_by_threads_that_no_threshold_has_let_grow(maximum):
    keys = f'[softmax]\nsum = "tensor"\n{maximum}rescale_threshold = 8.0\n'
    text = TEXT.replace("= 128", "= 64") + keys
    reason = (
        'does not go with maximum = "lazy", by which a row max is raised where P, or what threads '
        'add up of it, grows too large; use maximum = "online", or leave'
    )
    assert refusal(text) == [
        f'x.toml:9: softmax.sum = "tensor" {reason} sum out',
        f"x.toml:{11 if maximum else 10}: softmax.rescale_threshold = 8.0 {reason} "
        "rescale_threshold out",
    ]
    online = text.replace(maximum, "") + 'maximum = "online"\n'
    assert registry.parse(online).softmax.rescale_threshold == 8


def test_the_tensor_cores_add_rows_up_where_v_is_one_slab_wide():
    """Ones lie one step from V's columns: 16, 32 or 64 of them, with those that fill them up."""

    def fits(columns: int) -> bool:
        keys = dict(head_dim=128, head_dim_v=columns, dtype="fp16", mask="full", sum="tensor")
        try:
            return bool(Schedule.make(**keys, maximum="online", block_m=64, block_n=64))
        except ScheduleError:
            return False

    assert [columns for columns in range(16, 257, 8) if fits(columns)] == [16, 24, 32, 56, 64]


def test_all_broken_rules_are_listed_at_once():
    lines = refusal(
        TEXT.replace("block_m = 128", "block_m = 64")
        + '[warps]\nproducer = "none"\nproducer_registers = 24\n'
        + "consumer_registers = 240\n[overlap]\ninter_warpgroup = true\n"
    )
    assert [line.split(" ")[:2] for line in lines] == [
        ["x.toml:10:", "warps.producer_registers"],
        ["x.toml:11:", "warps.consumer_registers"],
        ["x.toml:13:", "overlap.inter_warpgroup"],
    ]


def test_an_empty_file_says_what_is_needed():
    assert refusal("") == [
        "x.toml: attention is missing: a table with head_dim, dtype, mask",
        "x.toml: tile is missing: a table with block_m, block_n",
    ]


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (
            ("fp8", "FP8", "float8", "fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn", "e4m3fn"),
            "e4m3",
        ),
        (("float16", "half", "f16", "torch.float16", "FP16", "fp_16"), "fp16"),
        (("bfloat16", "torch.bfloat16", "BF16"), "bf16"),
    ],
)
def test_a_dtype_is_told_by_what_others_call_it(words, dtype):
    for word in words:
        with pytest.raises(ScheduleError, match=f'; did you mean "{dtype}"\\?$'):
            registry.parse(TEXT.replace('"fp16"', f'"{word}"'))
    for word in ("fp8", "half"):
        with pytest.raises(ScheduleError, match=r"did you mean (e4m3|fp16)\?"):
            pick(dtype=word, head_dim=128)
    assert near_word("float32", ["fp16", "bf16", "e4m3"]) is None and near_word(3, ["fp16"]) is None


@pytest.mark.parametrize(
    ("kind", "key", "value", "code", "message"),
    [
        ("forward", "output", "halves", "halves", 'is called "half" now'),
        ("forward", "output", "v_space", "vspace", 'is called "reuse_v" now'),
        ("forward", "maximum", "each", "eachmax", 'is called "online" now'),
        ("forward", "maximum", "late", "", 'is called "lazy" now'),
        ("forward", "chunks", 4, "", "is called num_splits now"),
        ("backward", "split", "keys", "", "is called partition now"),
        ("decode", "by", "run", "runs", 'is called "stream_k" now'),
        ("decode", "maximum", "unified", "unified", 'is called "fixed" now'),
        ("combine", "layout", "packed", "packed", 'is called "varlen" now'),
        ("forward", "p", "registers", "pshared", "P reaches the PV GEMM from registers; leave it"),
        ("forward", "consumers", 2, "w2", "a consumer warpgroup takes 64 rows of block_m; leave"),
        ("forward", "order", "single", "single", "stay and take many tiles; leave order"),
        ("forward", "scales", "tensor", "stensor", 'is passed for each head; use "head"'),
        ("backward", "kept", "kv", "keepkv", 'V is read from shared memory; use "k", or leave it'),
        ("combine", "threads", 64, "t64", "takes rows in one way; leave it out"),
        ("combine", "stages", 4, "s4", "takes rows in one way; leave it out"),
        ("quantize", "rows", 64, "r64", "as many as suit the other keys; leave it out"),
    ],
)
def test_what_schedules_once_had_is_refused_by_name_with_the_new_one_or_the_way_out(
    kind, key, value, code, message
):
    path = registry.schedules(kind)[0]
    in_a_slug = rf'"{code}" in it is called \w+ now'
    if "is called" not in message:
        message = in_a_slug = f"is gone: .*{message}"
    with pytest.raises(ScheduleError, match=message):
        registry.read(path).but(**{key: value})
    if code:
        with pytest.raises(ScheduleError, match=in_a_slug):
            registry.from_slug(f"{path.stem}_{code}")
