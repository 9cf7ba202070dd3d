"""What fagen.recording writes of a run, what it costs, and what a search makes of it."""

import itertools
import json
import math
import sys
import tomllib
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import fagen
from fagen import flow, search
from fagen.errors import FagenError, ScheduleError
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.runtime.attention import ATTENTION
from fagen.search.files import read_spaces
from fagen.search.recording import MOST_SIZES, read_recording, text_of
from fagen.search.store import Store
from tests import cli_helpers
from tests.attention_helpers import qkv, quantised
from tests.fresh import without_kernels
from tests.recordings import CARD, AtOnce, record
from tests.tensors import normal

Call = tuple[torch.dtype, int, bool, int, int, int, int, int]  # problem, then sizes


def call(
    dtype: torch.dtype, d: int, causal: bool, b: int, h: int, hk: int, sq: int, sk: int
) -> Any:
    q, k = normal(b, sq, h, d, dtype=dtype), normal(b, sk, hk, d, dtype=dtype)
    return fagen.attention(q, k, k, causal=causal)


def counts(path: Path) -> Counter[Call]:
    """The weights in a file, read as plain TOML."""
    tables = tomllib.loads(path.read_text())
    found: Counter[Call] = Counter()
    for space in tables.get("space", [tables]):
        said = space["attention"]
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[said["dtype"]]
        for shape in space["shapes"]:
            problem = dtype, said["head_dim"], said["mask"] == "causal"
            sizes = shape["batch"], shape["heads"], shape.get("kv_heads", shape["heads"])
            lengths = shape["seqlen"], shape.get("seqlen_k", shape["seqlen"])
            found[(*problem, *sizes, *lengths)] += shape["weight"]
    return found


CALLS: list[Call] = [
    (torch.float16, 64, True, 1, 4, 2, 40, 40),
    (torch.float16, 64, True, 2, 4, 4, 1, 90),
    (torch.float16, 64, False, 1, 4, 2, 40, 40),
    (torch.bfloat16, 32, True, 3, 2, 1, 17, 30),
]


@pytest.mark.parametrize("calls", [CALLS[:2], CALLS])
def test_every_problem_and_size_that_was_called_is_written_with_how_often(tmp_path, calls):
    path, expected = tmp_path / "mine.toml", Counter[Call]()
    for times in (1, 2):  # the second recording is added to the first
        with fagen.recording(path):
            assert not path.exists() or counts(path) == expected
            for number, one in enumerate(calls, 1):
                for _ in range(number * times):
                    call(*one)
                expected[one] += number * times
        assert counts(path) == expected
    call(*calls[0])  # which nobody records
    assert counts(path) == expected and ATTENTION.note is None
    targets = [target for space in read_spaces(path) for target in space.targets()]
    assert len(targets) == len({one[:3] for one in calls})  # and nothing else is searched


def test_what_was_called_before_the_body_raised_is_written(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(ZeroDivisionError), fagen.recording(path):
        call(*CALLS[0])
        raise ZeroDivisionError
    assert counts(path) == {CALLS[0]: 1} and ATTENTION.note is None
    with fagen.recording(path), pytest.raises(ValueError, match="head_dim 20"):
        call(torch.float16, 20, True, 1, 4, 2, 40, 40)
        call(*CALLS[0])
    assert counts(path) == {CALLS[0]: 1}


def test_a_call_in_e4m3_is_of_its_layout_and_scales(tmp_path):
    path = tmp_path / "mine.toml"
    tensors, how = quantised(scale_rows=32, layout="columns")
    with fagen.recording(path):
        for _ in range(2):
            fagen.attention(*tensors, **how)
        fagen.attention_fp8(*qkv(), v_layout="rows")
    problem = Problem("e4m3", 64, 64, "full", None, "columns", 32)
    assert read_recording(path) == {problem: {Sizes(2, 4, 2, 70, 200): 2}}
    ((target,), (space,)) = zip(*((s.targets(), s) for s in read_spaces(path)), strict=True)
    assert target == (Problem("e4m3", 64, 64, "full"),)
    assert space.values["scale_rows"] == (32,) and space.values["v_layout"] == ("columns",)


def test_weights_stay_finite_whatever_is_added(tmp_path):
    path, sizes = tmp_path / "mine.toml", Sizes(1, 4, 2, 40, 40)
    problem = Problem("fp16", 64, 64, "causal", None, "", 0)
    text = text_of({problem: {sizes: 1.7e308}})
    path.write_text(text + text[text.index("[[shapes]]") :])  # the same size twice
    for _ in range(2):
        with fagen.recording(path):
            call(*CALLS[0])
        assert read_recording(path) == {problem: {sizes: sys.float_info.max}}
    path.write_text(text_of({problem: {sizes: 0.1}}))
    with fagen.recording(path):
        call(*CALLS[0])
    assert read_recording(path) == {problem: {sizes: 1.1}}


@pytest.mark.long
def test_processes_that_record_into_one_file_at_a_time_lose_nothing(tmp_path):
    code = (
        "import sys, torch, fagen\n"
        "q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)\n"
        "for _ in range(100):\n"
        "    with fagen.recording(sys.argv[1]):\n"
        "        fagen.attention(q, q, q)\n"
    )
    path, root = tmp_path / "mine.toml", str(cli_helpers.ROOT)
    argv = [sys.executable, "-c", code, path]
    with ThreadPoolExecutor() as pool:
        ran = list(pool.map(lambda _: run(argv, env={"PYTHONPATH": root}), range(3)))
    assert [one.returncode for one in ran] == [0] * 3, ran[0].stderr
    assert [*read_recording(path).values()] == [{Sizes(1, 2, 2, 8, 8): 300}]


def test_a_file_that_no_recording_has_written_is_refused_before_the_run(tmp_path):
    path = tmp_path / "mine.toml"
    with fagen.recording(path):
        call(*CALLS[0])
    recorded = path.read_text()
    for text, said in [
        (recorded + "[tile]\nblock_m = 128\n", "the space of fp16_d64_causal says more than a rec"),
        (recorded + "[search]\ncompile = 9\n", "name another file"),
        (recorded.replace('"causal"', '["causal", "full"]'), "says more than a recording"),
        ("a = [", r"mine\.toml:1: this is not TOML"),
        ("[quantize]\nhead_dim = 64\n", "not searched"),
    ]:
        path.write_text(text)
        with pytest.raises(ScheduleError, match=said), fagen.recording(path):
            raise AssertionError("the run has begun")
        assert path.read_text() == text and ATTENTION.note is None
    for where, said in [
        (tmp_path / "nowhere" / "mine.toml", "there is no folder"),
        (tmp_path, "is a folder"),
    ]:
        with pytest.raises(FagenError, match=said), fagen.recording(where):
            raise AssertionError("the run has begun")
    other = tmp_path / "other.toml"
    with fagen.recording(other):
        with pytest.raises(FagenError, match="one recording goes on at a time"):
            fagen.recording(tmp_path / "third.toml").__enter__()
        call(*CALLS[1])
    assert counts(other) == {CALLS[1]: 1}


def test_without_a_call_nothing_is_written(tmp_path):
    with (
        pytest.warns(UserWarning, match="no call of fagen.attention"),
        fagen.recording(tmp_path / "m"),
    ):
        pass
    assert not list(tmp_path.iterdir())
    q, k, v = (torch.empty(1, n, 4, 64).half() for n in (0, 5, 5))
    with pytest.warns(UserWarning, match="1 calls of no rows"), fagen.recording(tmp_path / "m"):
        fagen.attention(q, k, v)
    assert not list(tmp_path.iterdir())


# ---- what it costs, and what torch traces --------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch):
    """What stands in for every kernel returns at once."""
    without_kernels(monkeypatch)


def test_symbolic_sizes_are_skipped_with_a_note(tmp_path):
    fagen.prepare(dtype="fp16", head_dim=64)
    path = tmp_path / "mine.toml"

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = fagen.attention(q, k, v)
            assert isinstance(out, Tensor)
            return out

    with warnings.catch_warnings(record=True) as said, fagen.recording(path):
        warnings.simplefilter("always")
        fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        keys_open = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 2]
        )
        opened = [fake.from_tensor(one, symbolic_context=keys_open) for one in qkv()[1:]]
        with fake:
            out = fagen.attention(fake.from_tensor(qkv()[0], static_shapes=True), *opened)
            assert isinstance(out, Tensor) and out.shape == qkv()[0].shape
        keys = torch.export.Dim("keys")
        shapes = ({}, {1: keys}, {1: keys})
        torch.export.export(Model(), qkv(), dynamic_shapes=shapes, strict=False)
        fagen.attention(*qkv())
    told = [str(one.message) for one in said]
    assert any("calls with symbolic sizes" in one for one in told), told
    assert any("calls traced by torch.compile or torch.export" in one for one in told), told
    assert list(read_recording(path).values()) == [{Sizes(2, 4, 2, 70, 200): 1}]


# ---- many sizes ----------------------------------------------------------------------------------


def test_of_very_many_sizes_those_nearly_alike_count_as_one(tmp_path, no_kernels):
    path = tmp_path / "mine.toml"
    q, k = torch.empty(1, 1, 4, 64).half(), torch.empty(1, 3_000, 2, 64).half()
    with fagen.recording(path):
        for keys in range(1, 3_001):
            fagen.attention(q, k[:, :keys], k[:, :keys])
        for _ in range(10_000):
            fagen.attention(q, k[:, :777], k[:, :777])
    (weights,) = read_recording(path).values()
    assert MOST_SIZES / 2 < len(weights) <= MOST_SIZES
    assert sum(weights.values()) == 13_000
    assert max(weights, key=weights.__getitem__) == Sizes(1, 4, 2, 1, 777)
    kept = sorted(size.seqlen_k for size in weights)
    assert kept[-1] > 2_800 and max(b / a for a, b in itertools.pairwise(kept[8:])) < 1.3


def test_a_recording_of_very_many_problems_can_be_read_back(tmp_path):
    path = tmp_path / "mine.toml"
    sizes = {Sizes(1, 4, 4, n, n): 0.25 for n in range(1, 33)}
    problems = [
        Problem(dtype, d, d, mask, None, "", 0)
        for dtype, d, mask in itertools.product(
            ("fp16", "bf16"), (16, 32, 64, 128), ("full", "causal")
        )
    ]
    path.write_text(text_of(dict.fromkeys(problems[:-1], sizes)))
    said = pytest.warns(UserWarning, match="not recorded: 1 calls of bfloat16, head_dim 128")
    with said, fagen.recording(path):
        for d in (16, 40):
            for _ in range(9):
                call(torch.float16, d, False, 1, 4, 4, 5, 5)
        call(torch.bfloat16, 128, True, 1, 4, 4, 5, 5)
    found = read_recording(path)
    assert len(found) == 16 and found[problems[0]][Sizes(1, 4, 4, 5, 5)] == 9.25
    assert all(set(found[one]) == set(sizes) for one in problems[:-1])


# ---- files of several spaces ---------------------------------------------------------------------

SPACE = '[[space]]\n[space.attention]\ndtype = "fp16"\nhead_dim = {}\nmask = "full"\n'
MORE = "[space.build]\nmax_spill_bytes = {{ from = 0, to = 3 }}\n"  # times as many points


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SPACE.format(64) + SPACE.format(20), r"x\.toml:9: attention\.head_dim = 20"),
        (SPACE.format(64) + "[[space.shapes]]\nseqlen = 0\n", r":7: shapes\.0\.seqlen = 0"),
        (SPACE.format(64) + SPACE.format(64), "fp16_d64_full is searched in another space too"),
        (SPACE.format(64) + "[tile]\nblock_m = 64\n", r":6: tile stands beside \[\[space\]\]"),
        ("space = 3\n", r"x\.toml:1: several spaces are \[\[space\]\] tables"),
        ("space = [1]\n", r"x\.toml:1: several spaces are"),
        ("space = []\n", "0 spaces; a file has 1 to 64"),
        ("".join(map((SPACE + MORE).format, range(16, 256, 8))), "points in 30 spaces"),
    ],
)
def test_a_file_of_several_spaces_is_refused_where_it_is_wrong(tmp_path, text, said):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=said):
        read_spaces(path)
    answer = cli_helpers.fagen("search", path, "--dry-run")
    assert answer.exit_code == 1 and str(path) in answer.output.replace("x.toml: ", f"{path} ")


def test_two_files_for_one_problem_are_refused_before_anything_is_searched(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(SPACE.format(64))
    files = tmp_path / "a.toml", tmp_path / "b.toml"
    answer = cli_helpers.fagen("search", *files, "--store", tmp_path / "s.sqlite")
    assert answer.exit_code == 1 and "also" not in answer.output
    assert "b.toml: fp16_d64_full is searched in another space too, of a.toml" in answer.output
    assert not (tmp_path / "s.sqlite").exists()


# ---- searched ------------------------------------------------------------------------------------


def test_what_a_search_finds_for_a_recording_is_what_its_calls_are_then_served_by(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    monkeypatch.setattr(flow, "all_committed", lambda: flow.committed("combine"))
    sizes = [
        Sizes(8, 32, 8, 1, 700),  # few query rows
        Sizes(1, 32, 8, 300, 300),
        Sizes(1, 32, 8, 900, 900),
        Sizes(1, 32, 8, 4_000, 4_000),  # many
        Sizes(4, 32, 8, 2_500, 9_000),
        Sizes(1, 32, 8, 16_000, 16_000),
    ]
    problem = Problem("bf16", 64, 64, "causal", None, "", 0)
    text = text_of({problem: {size: 10.0 + at for at, size in enumerate(sizes)}})
    text += "[tile]\nblock_m = [64, 128, 192]\nblock_n = [64, 96, 128]\n"  # which takes less time
    space = tmp_path / "mine.toml"
    space.write_text(text)
    store = record(tmp_path / "recorded.sqlite", kernels=60, text=text)
    answer = cli_helpers.fagen(
        *("search", "run", space, "--replay", store, "--store", tmp_path / "found.sqlite"),
        *("--write", tmp_path / "fagen"),
    )
    assert answer.exit_code == 0, answer.output
    times: dict[Sizes, dict[str, float]] = {}
    with Store(store, read_only=True) as recorded:
        for row in recorded.timed():
            if row.source_hash:
                least = times.setdefault(row.time.size, {})
                least[row.time.slug] = min(row.time.seconds, least.get(row.time.slug, math.inf))
    table = tmp_path / "fagen" / "dispatch.toml"
    named = set()
    for size in sizes:
        how = {"batch": size.batch, "heads": 32, "kv_heads": 8}
        lengths = {"seqlen": size.seqlen_q, "seqlen_k": size.seqlen_k}
        found = fagen.pick(dtype="bf16", head_dim=64, causal=True, card=CARD[0], **how, **lengths)
        assert found.row is not None and found.row.where.startswith(f"{table}:")
        assert found.file == tmp_path / "fagen" / "forward" / f"{found.slug}.toml" or (
            found.file is not None and found.file.exists()
        )
        # off by the noise of its times, and by what another kernel has to be worth
        assert times[size][found.slug] <= 1.03 * min(times[size].values()), size
        assert found.file.parent != tmp_path / "fagen" / "forward" or (
            f"{found.found}" in str(found) and "by `fagen search` on NVIDIA H200" in found.found
        )
        named.add(found.slug)
    rows = tomllib.loads(table.read_text())["kernel"]
    assert {row["slug"] for row in rows} == named
    assert max(row.get("rows_to", 0) for row in rows) == 32 * 900
    listed = json.loads(cli_helpers.fagen("list", "--json").output)
    own = [row for row in listed if row["from"].startswith(f"{table}:")]
    assert [row["schedule"] for row in own] == [row["slug"] for row in rows]
    assert all(row["from"].endswith(" on NVIDIA H200") for row in own)
    assert {row["from"] for row in listed} - {row["from"] for row in own} == {"schedules/"}
    # a call that was not recorded, of more rows than few and of another head dim, is served as ever
    other = fagen.pick(dtype="bf16", head_dim=128, causal=True)
    assert other.row is None or "schedules" in other.row.where
