"""benchmarks/head_dims.py without a GPU: who stands beside which head dim, and what is marked."""

from types import SimpleNamespace

import pytest
import torch

from fagen import flow
from fagen.errors import DeviceError, RefusedBuild, VerificationError
from fagen.measure import peers
from fagen.measure.peers import Implementation
from fagen.measure.rows import read_rows
from fagen.measure.timing import Call, Timing
from fagen.registry import plan
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
        head_dims, "called", lambda of, _binary, name, _: Implementation(name, bind, of.slug)
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


# ---- gradients ----------------------------------------------------------------------------------

SIX = ("96", "192", "192/128", "80", "112", "160")
SPACES = {
    "80": "bwd_fp16_d80_causal_m64n128_s3_dos2",
    "112": "bwd_fp16_d112_causal_m64n128_s3_dos2",
    "192/128": "bwd_fp16_d192v128_causal_m64n64_intra",
}


@pytest.fixture
def differentiated(head_dims, made_up_gpu, monkeypatch):
    """head_dims.py where a gradient takes 1 ms; cuDNN's 1.2, but it refuses V of its own head dim.

    So does FA2, and hd112 x 128 spills. `checked` has what was checked by itself, `wrong` what is.
    """
    fake = SimpleNamespace(script=head_dims, built=[], checked=[], wrong=set(), slow={})

    def bind(name):
        def call(cell, q, k, v):
            if not name.startswith("bwd_") and cell.problem.head_dim != cell.problem.head_dim_v:
                raise DeviceError("no V of its own")
            one = torch.full((1, cell.sizes.seqlen_q, 1, 1), float(name in fake.wrong))
            return Call(lambda: (one, one, one))

        return call

    def time_calls(calls, regime, *, clock, seed):
        assert regime is head_dims.GRADIENTS_ROUND
        return {name: Timing(fake.slow.get(name, 1e-3), 0.01, 1_900) for name in calls}

    def built(one, binding):
        assert not binding
        fake.built.append(one.slug)
        if one.slug == "bwd_fp16_d112_full_m64n128":
            raise RefusedBuild("spills")
        return plan(one), SimpleNamespace(slug=one.slug, made_with={"nvcc": "13"}, library=None)

    def quick_check(cell, kernel):
        fake.checked.append(kernel.slug)
        if kernel.slug in fake.wrong:
            raise VerificationError("0.5 at B=2")

    fake.slow["cudnn"] = 1.2e-3
    monkeypatch.setattr(flow, "built", built)
    monkeypatch.setattr(
        head_dims, "called", lambda of, _, name, __: Implementation(name, bind(of.slug), of.slug)
    )
    monkeypatch.setattr(head_dims, "inputs", lambda cell: (None, None, None))
    monkeypatch.setattr(head_dims, "quick_check", quick_check)
    for name in ("cudnn", "fa2"):
        monkeypatch.setitem(peers.GRADIENTS, name, bind(name))
    monkeypatch.setattr("fagen.measure.cells.time_calls", time_calls)
    return fake


def ran(fake, folder, *words, code=0):
    """The rows and the page of a run of gradients."""
    assert fake.script.main(["--pass", "backward", *words, "--out", str(folder)]) == code
    (path,) = folder.glob("nvidia-h200-*-backward-head-dims.json")
    return read_rows(path), path.with_suffix(".md").read_text()


def test_gradients_are_of_head_dims_without_a_schedule_too(head_dims):
    found = list(head_dims.cells(head_dims._arguments(["--pass", "backward"])))
    dims = {cell.problem.head_dims for cell in found}
    assert {*SIX, "64", "128", "256"} <= dims and len(found) == 2 * len(dims)
    assert {cell.problem.kind for cell in found} == {"backward"}
    for cell in found:
        line = head_dims.in_line(cell, "NVIDIA H200")
        assert all(one.kind == "backward" for one in line)
        if cell.problem.head_dims in ("64", "128", "256"):
            assert len(line) == 1, "what is committed stands alone"


def test_a_row_of_a_table_stands_alone_though_it_is_derived_too(head_dims, monkeypatch):
    (cell, *_) = head_dims.cells(head_dims._arguments(["--pass", "backward", "--dims", "192"]))
    assert len(head_dims.in_line(cell, "")) == 2
    plain = head_dims.in_line(cell, "")[1]
    monkeypatch.setattr(head_dims, "serving", lambda *_, **__: [plain])
    assert list(head_dims.in_line(cell, "")) == [plain]


@pytest.mark.parametrize("dims", SIX)
def test_a_space_of_each_head_dim_has_what_serves_and_few_others(head_dims, dims):
    asked = head_dims._arguments(["--pass", "backward", "--spaces", "--dims", dims])
    for cell in head_dims.cells(asked):
        slugs = [one.slug for one in head_dims.of_spaces(cell.problem, asked.most)]
        assert head_dims.in_line(cell, "")[0].slug in slugs
        assert 3 <= len(set(slugs)) == len(slugs) <= 6
        if cell.problem.mask == "causal":
            assert SPACES.get(dims, slugs[0]) in slugs
        assert len(list(head_dims.of_spaces(cell.problem, 2))) == 2


def test_what_serves_is_marked_where_a_candidate_is_faster(differentiated, tmp_path):
    best = SPACES["80"]
    differentiated.slow[best] = 0.85e-3
    rows, page = ran(differentiated, tmp_path, "--spaces", "--dims", "80", "--dims", "64")
    of = [row for row in rows if row.head_dim == 80 and row.mask == "causal"]
    named = [(row.implementation, row.schedule) for row in of]
    assert named[0] == ("fagen", "bwd_fp16_d80_causal_m64n128")
    assert ("candidate", best) in named and len(named) == 5
    assert [row.implementation for row in of].count("fagen") == 1
    shares = {
        line.split("|")[5].strip(): line
        for line in page.splitlines()
        if "bwd_" in line and "|" in line
    }
    marked = shares["bwd_fp16_d80_causal_m64n128"]
    assert best in marked and "0.85 !" in marked
    assert "1.00 |" in shares["bwd_fp16_d80_full_m64n128"]
    # candidates are no part of what stands beside cuDNN
    means = {line[:5].strip("| "): line for line in page.splitlines() if line.count("|") == 7}
    assert "1.200" in means["80"] and " 2 |" in means["80"] and "1.200" in means["64"]
    (path,) = tmp_path.glob("*.run.json")
    rewritten = path.with_name(path.name.replace(".run", ""))
    assert differentiated.script.main(["--redraw", str(rewritten)]) == 0
    assert rewritten.with_suffix(".md").read_text() == page


def test_where_the_first_in_line_spills_the_next_serves(differentiated, tmp_path):
    rows, page = ran(differentiated, tmp_path, "--dims", "112")
    serving = {row.mask: row.schedule for row in rows if row.schedule}
    assert serving == {
        "full": "bwd_fp16_d112_full_m64n64",
        "causal": "bwd_fp16_d112_causal_m64n128",
    }
    assert "does not overlap" not in page and "left out, since it spills" in page
    assert len(differentiated.built) == 3


def test_kernels_that_no_peer_judges_are_checked_against_fp64(differentiated, tmp_path):
    words = ["--spaces", "--dims", "192/128", "--mask", "causal"]
    rows, page = ran(differentiated, tmp_path, *words)
    assert {row.implementation for row in rows} == {"fagen", "candidate"}
    assert sorted(differentiated.checked) == sorted(row.schedule for row in rows)
    assert page.count("left out (no V of its own)") == 2


@pytest.mark.parametrize(("dims", "buffers"), [("160", "s3_dos2"), ("192/128", "dss1")])
def test_a_wrong_candidate_is_not_timed_and_what_serves_is(differentiated, tmp_path, dims, buffers):
    d = dims.replace("/", "v")
    differentiated.wrong.add(f"bwd_fp16_d{d}_full_m64n64_{buffers}")
    words = ["--spaces", "--dims", dims, "--mask", "full"]
    rows, page = ran(differentiated, tmp_path, *words, code=6)
    assert [row.schedule for row in rows if row.schedule] == [f"bwd_fp16_d{d}_full_m64n64_intra"]
    (said,) = [line for line in page.splitlines() if "wrong, and not timed" in line]
    assert f"bwd_fp16_d{d}_full_m64n64_{buffers}" in said


def test_spaces_of_attention_itself_are_not_timed(head_dims, capsys):
    with pytest.raises(SystemExit):
        head_dims.main(["--spaces"])
    assert "--spaces goes with --pass backward" in capsys.readouterr().err


def test_without_a_hopper_gpu_it_says_so_and_writes_nothing(head_dims, tmp_path, capsys):
    assert refused_without_a_gpu(head_dims, tmp_path, capsys)
