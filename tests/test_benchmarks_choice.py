"""benchmarks/choice.py without a GPU: its borders, of times that are made up and predicted ones."""

import json
import math

import pytest

from fagen import registry
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.tables import table_at
from fagen.paths import locate
from fagen.problem import Sizes
from tests.benchmark_helpers import refused_without_a_gpu


@pytest.fixture
def choice(script):
    return script("choice")


def by_chunks(schedules, sizes):
    """Seconds: decoding's are its queries, others 10 for each round of chunks, and their number."""

    def one(values):
        if "rows" in values:
            return float(sizes.seqlen_q)
        units = sizes.batch * sizes.heads * values["chunks"]
        rounds = -(-units // 132) * sizes.seqlen_k / values["chunks"] / 1_000
        return 10 * rounds + 4 * math.log2(values["chunks"])

    return {schedule.slug: one(schedule.values()) for schedule in schedules}


def test_borders_follow_from_times(choice, capsys):
    assert choice.decoding_border(128, by_chunks) == 24  # 32 of theirs beside 20 of a plain tile
    found = {
        tiles: (chunks, keys)
        for tiles, chunks, keys in choice.split_borders(128, by_chunks, 1.05, choice.LEAST_KEYS)
    }
    assert found[2][0] == 64 and found[33][0] in (4, 16)
    assert all(keys >= choice.LEAST_KEYS for _, keys in found.values())
    assert "tiles" in capsys.readouterr().out
    never = dict.fromkeys(choice._slugs(128), 1.0)
    assert not list(choice.split_borders(128, lambda *_: never, 1.05))
    rows = list(choice.rows_for(128, by_chunks, 1.05, "NVIDIA H200", "somewhere"))
    assert all(row.narrow and row.by == "somewhere" for row in rows)
    assert {(row.problem.dtype, row.problem.mask) for row in rows} == {
        (dtype, mask) for dtype in ("fp16", "bf16") for mask in ("causal", "full")
    }
    for row in rows:
        if row.tiles < math.inf:  # no chunk has more keys than are exact without fp32 totals
            of = registry.plan_of(row.slug)
            assert of.chunk_keys(int(row.most)) <= 131_072


def test_the_committed_rows_are_those_that_are_predicted(choice, tmp_path, monkeypatch, capsys):
    """As long as they say that they are; measured ones are by a committed result."""
    committed = [row for row in table_at(locate("schedules") / dispatch_table.NAME) if row.narrow]
    assert committed
    predicted = [row for row in committed if "predicted" in row.by]
    for row in committed:
        assert row in predicted or (locate("schedules").parent / row.by).is_file()
    if predicted:
        monkeypatch.setattr(choice, "locate", lambda name: tmp_path)
        assert choice.main(["--predicted", "--write"]) == 0
        made = table_at(tmp_path / dispatch_table.NAME)
        assert set(predicted) <= set(made)
        assert "tiles" in capsys.readouterr().out


def test_its_model_of_decoding_is_its_evidence(choice):
    sizes = Sizes(32, 32, 8, 1, 4_096)
    (schedule,) = [registry.from_slug("dec_fp16_d128_causal_r8n64")]
    found = choice.predicted([schedule], sizes)[schedule.slug]
    assert 120e-6 < found < 135e-6  # 124 of one kernel in its evidence, and launches
    wide = registry.from_slug("dec_fp16_d64_causal_r64n128")  # which was not measured
    narrow = registry.from_slug("dec_fp16_d64_causal_r32n128")
    more = Sizes(32, 512, 8, 1, 4_096)
    assert (
        choice.predicted([wide], more)[wide.slug] > choice.predicted([narrow], sizes)[narrow.slug]
    )


def test_measured_borders_are_written_beside_their_times(
    choice, made_up_gpu, tmp_path, monkeypatch, capsys
):
    from fagen.measure import rotating

    def rotated(kernels, sizes, regime, peers=("cudnn", "fa2")):
        plans = [plan.schedule for plan, _ in kernels.values()]
        times = {slug: one * 1e6 for slug, one in by_chunks(plans, sizes).items()}
        times |= dict.fromkeys(peers, 1.0)
        return rotating.Rotated(times, dict.fromkeys(times, 0.0), 1.0)

    monkeypatch.setattr(rotating, "rotated", rotated)
    built = choice.build

    def build(schedules, *, binding):
        kernels = built(schedules, binding=binding)
        for _, binary in kernels.values():
            binary.library = None
        return kernels

    monkeypatch.setattr(choice, "build", build)
    monkeypatch.setattr(choice, "locate", lambda name: tmp_path)
    given = ["--out", str(tmp_path), "--head-dim", "128", "--write"]
    assert choice.main(given) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-choice.json")
    found = json.loads(path.read_text())
    assert {"slug", "microseconds", "batch", "seqlen_k"} <= set(found["rows"][0])
    rows = table_at(tmp_path / dispatch_table.NAME)
    assert rows and all(row.by == f"benchmarks/results/{path.name}" for row in rows)
    (tmp_path / dispatch_table.NAME).unlink()
    again = ["--redraw", str(path), "--head-dim", "128", "--write"]
    assert choice.main(again) == 0 and table_at(tmp_path / dispatch_table.NAME) == rows
    assert choice.main([*again[:2], "--head-dim", "64"]) == 1
    assert "has no time of" in capsys.readouterr().err
    assert choice.main(["--out", str(tmp_path), "--long"]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-choice-long.json")
    rows = json.loads(path.read_text())["rows"]
    assert {(row["seqlen_q"], row["seqlen_k"], row["heads"]) for row in rows} == {
        (128, 100_000, 32)
    }
    assert [row["peer"] for row in rows if "peer" in row] == ["cudnn", "fa2"] and len(rows) == 6


def test_it_needs_a_gpu(script, tmp_path, capsys):
    assert refused_without_a_gpu(script("choice"), tmp_path / "out", capsys)
