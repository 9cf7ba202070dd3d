"""benchmarks/head_dims.py without a GPU: who stands beside which head dim, and what is marked."""

from types import SimpleNamespace

import pytest
import torch

from fagen import flow
from fagen.errors import DeviceError
from fagen.kinds.forward.plan import plan
from fagen.measure import peers
from fagen.measure.peers import Implementation
from fagen.measure.rows import read_rows
from fagen.measure.timing import Call, Timing
from tests.benchmark_helpers import refused_without_a_gpu


@pytest.fixture
def head_dims(script):
    return script("head_dims")


def test_every_tuned_head_dim_is_timed_in_both_dtypes_and_masks_at_four_lengths(head_dims):
    found = list(head_dims.cells(head_dims._arguments([])))
    assert len(found) == len(set(found)) == 16 * 2 * 2 * 4
    assert {cell.problem.head_dims for cell in found} == set(head_dims.DIMS)
    own = next(cell for cell in found if cell.problem.head_dims == "192/128")
    assert (own.problem.head_dim, own.problem.head_dim_v) == (192, 128)


@pytest.fixture
def timed(head_dims, made_up_gpu, monkeypatch):
    """head_dims.py where cuDNN takes 1.2 ms, but refuses hd96, and FA2 2 ms; fagen takes 1 ms."""

    def bind(cell, q, k, v):
        return Call(lambda: torch.zeros(1, cell.sizes.seqlen_q, 1, 1))

    def cudnn(cell, q, k, v):
        if cell.problem.head_dim == 96:
            raise DeviceError("no 96")
        return bind(cell, q, k, v)

    def time_calls(calls, regime, *, clock, seed):
        assert regime is head_dims.ROUND
        slow = {"cudnn": 1.2e-3, "fa2": 2e-3, "fwd_fp16_d64_full_m192n128_q2": 1.19e-3}
        return {label: Timing(slow.get(label, 1e-3), 0.01, 1_900) for label in calls}

    def built(one, binding):
        assert not binding
        return plan(one), SimpleNamespace(slug=one.slug, made_with={"nvcc": "13.0"})

    monkeypatch.setattr(flow, "built", built)
    monkeypatch.setattr(
        head_dims, "called", lambda of, binary: Implementation("fagen", bind, of.slug)
    )
    monkeypatch.setattr(head_dims, "inputs", lambda cell: (None, None, None))
    monkeypatch.setitem(peers.PEERS, "cudnn", cudnn)
    monkeypatch.setattr("fagen.measure.cells.time_calls", time_calls)
    return head_dims


def test_means_are_of_a_head_dim_and_its_peer_and_marked_below_the_goal(timed, tmp_path, capsys):
    asked = ["--dtype", "fp16", "--dims", "64", "--dims", "96", "--mask", "full"]
    assert timed.main([*asked, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-head-dims.json")
    rows = read_rows(path)
    assert {(row.head_dim, row.implementation) for row in rows} == {
        (64, "fagen"), (64, "cudnn"), (96, "fagen"), (96, "fa2"),
    }  # fmt: skip
    page = path.with_suffix(".md").read_text()
    lines = {line[:5].strip("| "): line for line in page.splitlines() if line.count("|") == 7}
    # at 16,384 keys the kernel is a slower one
    assert "1.149" in lines["64"] and "1.01" in lines["64"] and "cuDNN" in lines["64"]
    assert "2.000" in lines["96"] and "FA2" in lines["96"]
    assert "!" not in lines["64"]
    assert "cuDNN left out (no 96): fp16 hd96 full" in page
    assert timed.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page
    timed.main([*asked[:4], "--mask", "full", "--seqlen", "16384", "--out", str(tmp_path)])
    assert "1.008 !" in path.with_suffix(".md").read_text()


def test_without_a_hopper_gpu_it_says_so_and_writes_nothing(head_dims, tmp_path, capsys):
    assert refused_without_a_gpu(head_dims, tmp_path, capsys)
