"""Which kernel computes a call's gradients: by tables, by what is committed, by default."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fagen
from fagen.dispatch import select
from fagen.dispatch.pick import pick
from fagen.dispatch.rows import Row
from fagen.dispatch.tables import table_at, update
from fagen.errors import ScheduleError, UntunedWarning
from fagen.problem import Problem, Sizes
from tests.cli_helpers import fagen as command
from tests.fresh import asked_for

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

CARD = "NVIDIA H200"
PROBLEM = Problem("fp16", 64, 64, "causal", "fp16", "", 0, "backward")
FORWARD = Problem("fp16", 64, 64, "causal", "fp16", "", 0)
USUAL, SMALL = "bwd_fp16_d64_causal_m128n128", "bwd_fp16_d64_causal_m64n64"
LONG = "bwd_fp16_d64_causal_m128n128_underdp_spill64"  # of fagen's own table
FEW, DEEP = "bwd_fp16_d64_causal_m64n64_dss1", "bwd_fp16_d64_causal_m128n128_dss1"
ROWS = [
    Row(CARD, SMALL, 0, 64),
    Row(CARD, DEEP, 65, 4_096),
    Row(CARD, FEW, rows_to=100),
]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's table with rows for gradients, of some numbers of keys and of few query rows."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "fagen" / "dispatch.toml"
    table_at.cache_clear()
    update(path, ROWS)
    yield path
    table_at.cache_clear()


def differentiated(queries: int, keys: int, heads: int = 4) -> list[Tensor]:
    """q, k and v after a call of fagen.attention and its backward pass."""
    q, k, v = (torch.randn(1, s, heads, 64).half().requires_grad_() for s in (queries, keys, keys))
    fagen.attention(q, k, v, causal=True).float().sum().backward()
    return [q, k, v]


# ---- rows ---------------------------------------------------------------------------------------


def rows_for(problem: Problem) -> list[Row]:
    """The rows that name a kernel, in the order in which they are tried."""
    return [row for row in select.flattened(problem, CARD) if row.slug]


def test_a_row_is_for_the_pass_that_its_slug_says(table, tmp_path, monkeypatch):
    assert set(table_at(table)) == {*ROWS}
    assert {row.problem.kind for row in table_at(table)} == {"backward"}
    monkeypatch.setattr(select, "locate", lambda name: tmp_path)
    assert rows_for(PROBLEM) == [ROWS[2], *ROWS[:2]] and not rows_for(FORWARD)


def test_rows_of_both_passes_stand_in_one_table_and_are_replaced_apart(table):
    forward = Row(CARD, "fwd_fp16_d64_causal_m192n128_q2")
    update(table, [forward])
    assert set(table_at(table)) == {*ROWS, forward}
    update(table, [Row(CARD, USUAL)])
    assert set(table_at(table)) == {forward, ROWS[2], Row(CARD, USUAL)}
    assert table.read_text().count("[[kernel]]") == 3


def test_without_a_row_it_is_what_is_committed_or_the_first_tile_that_fits():
    def usual(head_dim: int) -> select.Buildable:
        problem = Problem("fp16", head_dim, head_dim, "full", "fp16", "", 0, "backward")
        return select.buildable(problem)

    assert [schedule.slug for schedule in usual(64).schedules] == ["bwd_fp16_d64_full_m128n128"]
    assert not usual(64).derived and usual(48).derived
    first, *others = (schedule.slug for schedule in usual(48).schedules)
    assert first == "bwd_fp16_d48_full_m128n128" and "bwd_fp16_d48_full_m64n64" in others
    # wide heads issue S a step ahead, where there are registers for it
    assert [schedule.slug for schedule in usual(192).schedules] == [
        "bwd_fp16_d192_full_m64n64_intra",
        "bwd_fp16_d192_full_m64n64",
    ]
    assert [schedule.slug for schedule in usual(248).schedules] == ["bwd_fp16_d248_full_m64n64"]
    with pytest.raises(ScheduleError, match=r"no kernel computes float8.*backward pass"):
        select.buildable(Problem("e4m3", 64, 64, "full", "bf16", "rows", 0, "backward"))


# ---- fagen.attention ----------------------------------------------------------------------------


def test_gradients_come_from_the_row_for_the_calls_sizes(table):
    differentiated(70, 60)
    assert asked_for("backward") == {SMALL}
    differentiated(70, 90)
    assert asked_for("backward") == {SMALL, DEEP}
    differentiated(20, 90)  # 80 query rows
    assert asked_for("backward") == {SMALL, DEEP, FEW}


def test_a_kernel_is_readied_before_the_backward_pass_of_the_first_call(table):
    q, k, v = (torch.randn(1, 80, 4, 64).half().requires_grad_() for _ in range(3))
    fagen.attention(q, k, v, causal=True)
    assert asked_for("backward") == {DEEP}


def test_all_of_a_tables_kernels_are_prepared_unless_sizes_are_named(table):
    how = dict(dtype="fp16", head_dim=64, causal=True, device="cpu", gradient=True)
    fagen.prepare(**how, seqlen=64, rows=400)
    assert asked_for("backward") == {SMALL}
    fagen.prepare(**how)
    assert asked_for("backward") == {SMALL, DEEP, FEW, LONG}


@pytest.mark.usefixtures("fresh_dynamo")
def test_traced_with_sizes_left_open_it_is_the_kernel_of_many_keys(table):
    fagen.prepare(dtype="fp16", head_dim=64, causal=True, device="cpu", gradient=True)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fagen.attention(q, k, v, causal=True).float().sum()

    with torch.profiler.profile() as profile:
        for keys in (70, 90):
            q, k, v = (torch.randn(1, keys, 4, 64).half().requires_grad_() for _ in range(3))
            loss(q, k, v).backward()
            assert q.grad is not None
    called = {event.name for event in profile.events() if event.name.startswith("fagen::bwd")}
    assert called == {f"fagen::{LONG}_emulated"}, "one kernel, chosen when it was traced"


def test_a_derived_kernel_is_said_to_be_one_once():
    q = torch.randn(1, 20, 2, 72).half().requires_grad_()
    with pytest.warns(
        UntunedWarning,
        match=r"gradients of .*72, full, backward pass: bwd_fp16_d72_full_m\d+n\d+ is",
    ):
        fagen.attention(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fagen.attention(q, q, q).float().sum().backward()


def test_a_row_for_deterministic_gradients_serves_no_others(table, tmp_path, monkeypatch):
    row = Row(CARD, "bwd_fp16_d64_causal_m128n128_det")
    update(table, [row])
    assert set(table_at(table)) == {*ROWS, row}
    problem = replace(PROBLEM, deterministic=True)
    monkeypatch.setattr(select, "locate", lambda name: tmp_path)
    assert rows_for(problem) == [row] and row.problem.deterministic
    assert rows_for(PROBLEM) == [ROWS[2], *ROWS[:2]]
    assert select.serve(problem, Sizes(1, 2, 2, 9, 9), CARD).row == row
    assert (problem.name, PROBLEM.name) == ("bwd_fp16_d64_causal_det", "bwd_fp16_d64_causal")
    assert str(problem) == f"{PROBLEM}, deterministic" and problem.opened() == PROBLEM.opened()


# ---- fagen pick ---------------------------------------------------------------------------------


def test_pick_says_which_kernel_computes_the_gradients_and_why(table):
    words = ["--dtype", "fp16", "--head-dim", "64", "--causal", "--pass", "backward"]
    answer = command("pick", *words, "--seqlen", "2048", "--card", CARD)
    assert answer.exit_code == 0 and answer.output.startswith(DEEP)
    assert "dispatch.toml:" in answer.output and "65 to 4,096 keys" in answer.output
    assert f"fagen search {DEEP} --minutes 10 --write" in answer.output
    assert "causal, backward pass; B=1 H=32 Sq=2048" in answer.output
    long = pick(dtype="fp16", head_dim=64, causal=True, seqlen=8_192, kind="backward")
    assert long.slug == LONG and "4,097 keys and more" in long.why
    usual = pick(dtype="fp16", head_dim=256, causal=True, kind="backward")
    assert "plainest committed" in usual.why
    assert usual.file and usual.file.name == f"{usual.slug}.toml"
    assert 100 < usual.predicted_tflops < 990
    assert pick(dtype="fp16", head_dim=64, causal=True).schedule.kind == "forward"
    assert math.isclose(usual.record()["predicted"]["tflops"], usual.predicted_tflops)


def test_pick_tells_deterministic_kernels_apart(table):
    how = dict(dtype="fp16", head_dim=64, causal=True, kind="backward", deterministic=True)
    choice = pick(**how, seqlen=60)
    assert choice.slug.startswith(f"{USUAL}_det_") and choice.schedule.backward.deterministic
    update(table, [Row(CARD, f"{USUAL}_det_dss1")])
    words = ["--dtype", "fp16", "--head-dim", "64", "--causal", "--pass", "backward"]
    answer = command("pick", *words, "--deterministic", "--card", CARD)
    assert answer.output.startswith("bwd_fp16_d64_causal_m128n128_det_dss1\n"), answer.output
    with pytest.raises(ScheduleError, match="forward pass is deterministic anyway"):
        pick(dtype="fp16", head_dim=64, deterministic=True)


def test_pick_refuses_what_no_kernel_differentiates():
    answer = command("pick", "--dtype", "e4m3", "--head-dim", "64", "--pass", "backward")
    assert answer.exit_code == 1 and "no kernel computes float8" in answer.output
    with pytest.raises(ScheduleError, match="kind is 'sideways'; it must be one of forward, backw"):
        pick(dtype="fp16", head_dim=64, kind="sideways")
