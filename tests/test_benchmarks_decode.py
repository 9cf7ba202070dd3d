"""benchmarks/decode.py without a GPU: its kernels, and what it writes of times that are made up."""

import json
from types import SimpleNamespace

import pytest
import torch

from fagen import registry
from fagen.measure.launch import LaunchCost
from fagen.measure.rotating import Rotated
from fagen.records import DecodeSpeed
from tests.benchmark_helpers import refused_without_a_gpu


@pytest.fixture(params=["decode"])
def decode(request, script, made_up_gpu, monkeypatch):
    """The script, on a GPU where ours takes a microsecond for each of its rows, cuDNN 10."""
    module = script(request.param)

    def timed_together(kernels, sizes, *, eager=False):
        megabytes = 4 * sizes.batch * sizes.seqlen_k * sizes.kv_heads * 128 / 1e6
        peers = (10.0, None)
        shape = sizes.batch, sizes.seqlen_q, sizes.seqlen_k, sizes.heads, sizes.kv_heads
        return {
            slug: DecodeSpeed(*shape, megabytes, plan.rows * (1.0 + eager), 0.0, *peers)
            for slug, (plan, _) in kernels.items()
        }

    def rotated(kernels, sizes, *, peers, more):
        megabytes = 4 * sizes.batch * sizes.seqlen_k * sizes.kv_heads * 128 / 1e6
        lengths = [more[slug]["seqused_k"] for slug in kernels]
        assert all(int(each.sum()) == sum(module.zipf()) for each in lengths) and not peers
        return Rotated(dict.fromkeys(kernels, 1e3), dict.fromkeys(kernels, 0.0), megabytes)

    monkeypatch.setattr(module, "timed_together", timed_together)
    monkeypatch.setattr(module, "rotated", rotated, raising=False)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    built = module.build

    def build(schedules, *, binding):
        kernels = built(schedules, binding=binding)
        for _, binary in kernels.values():
            binary.library = None
        return kernels

    monkeypatch.setattr(module, "build", build)
    return module


def test_every_shape_has_a_committed_kernel_and_its_variants(decode, tmp_path, capsys):
    assert decode.main(["--out", str(tmp_path), "--with", "c32", "--with", "s4_b1"]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-decode.json")
    found = json.loads(path.read_text())
    assert not {"host", "user", "path"} & set(found["about"]) and found["about"]["nvcc"]
    slugs = {row["slug"] for row in found["rows"]}
    committed = {path.stem for path in registry.schedules("decode")}
    usual = {"dec_fp16_d128_causal_r8n64", "dec_fp16_d128_causal_r16n64"}
    assert slugs & committed == usual | {f"{slug}_runs" for slug in usual}
    assert len(slugs) == 8 and len(found["rows"]) == 9 * 4
    largest = max(row["megabytes"] for row in found["rows"])
    assert largest == pytest.approx(1_074, abs=1)
    printed = capsys.readouterr().out
    assert "1 x 8,192 keys, 1 queries: 8.0 us, 4194 GB/s, 1.25 times as fast as cuDNN" in printed
    assert "cuDNN" in printed and "FA2" not in printed


def test_another_dtype_and_head_dim_have_kernels_too(decode, tmp_path):
    assert decode.main(["--out", str(tmp_path), "--dtype", "bf16", "--head-dim", "64"]) == 0
    (path,) = tmp_path.glob("*-decode.json")
    assert "dec_bf16_d64_causal_r16n128" in path.read_text()


def test_other_head_dims_groups_and_queries_are_timed_by_the_kernel_that_is_taken(decode, tmp_path):
    assert decode.main(["--out", str(tmp_path), "--around"]) == 0
    (path,) = tmp_path.glob("*-decode-around.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 16 and {row["slug"] for row in rows} <= {
        path.stem for path in registry.schedules("decode")
    }
    assert {row["heads"] // row["kv_heads"] for row in rows} == {1, 4, 8}


def test_mixed_lengths_count_the_keys_that_there_are(decode, tmp_path, capsys):
    assert decode.main(["--out", str(tmp_path), "--mixed"]) == 0
    (path,) = tmp_path.glob("*-decode-mixed.json")
    rows = json.loads(path.read_text())["rows"]
    keys = sum(decode.zipf())
    lengths = decode.zipf()
    assert len(lengths) == 64 and (lengths[0], lengths[-1]) == (65_536, 100)
    assert lengths == sorted(lengths, reverse=True) and lengths[1] == round(65_536 / 2**1.5593)
    assert {(row["longest"], row["shortest"]) for row in rows} == {(65_536, 100)}
    assert [row["megabytes"] for row in rows] == [pytest.approx(keys * 4_096 / 1e6)] * 2
    assert f"1000.0 us, {keys * 4_096 / 1e6:.0f} GB/s" in capsys.readouterr().out


def test_a_calls_host_time_is_written_beside_torchs(decode, tmp_path, monkeypatch, capsys):
    asked = []

    def launch_costs(plan, binary):
        asked.append((plan.slug, binary.slug))
        names = ("fagen.attention_decode", "torch's attention")
        return {name: LaunchCost(12.5 + i, 2 - i, 0, 0, 2) for i, name in enumerate(names)}

    monkeypatch.setattr(decode, "launch_costs", launch_costs)
    monkeypatch.setattr(decode, "build", lambda schedules: {s.slug: stub(s) for s in schedules})
    assert decode.main(["--out", str(tmp_path), "--host"]) == 0
    (path,) = tmp_path.glob("*-decode-host.json")
    ours, torchs = json.loads(path.read_text())["rows"]
    assert asked == [("dec_fp16_d128_causal_r8n64",) * 2] and ours["slug"] == asked[0][0]
    assert (ours["call"], ours["kernels"], ours["host_microseconds"]) == (
        "fagen.attention_decode",
        2,
        12.5,
    )
    assert torchs["kernels"] == 1 and ours["seqlen_q"] == 1
    printed = capsys.readouterr().out
    assert "fagen.attention_decode: 12.5 µs of the host; kernels 2, memsets 0, copies 0" in printed


def stub(schedule):
    """A Plan, and what stands for its binary."""
    return registry.plan(schedule), SimpleNamespace(slug=schedule.slug, made_with={"nvcc": "13.0"})


@pytest.mark.parametrize("decode", ["decode_ablation"], indirect=True)
def test_each_form_is_another_kernel_that_fits_and_is_timed_both_ways(decode, tmp_path):
    assert decode.main(["--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-decode-ablation.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(decode.SHAPES) * len(decode.FORMS) * 2
    whole = [row for row in rows if row["form"] == "the whole"]
    assert {row["slug"].endswith("_runs") for row in whole} == {True, False}
    of_one = [r["slug"] for r in rows if r["way"] == "eager" and r["seqlen_k"] == 1_024]
    assert len(set(of_one)) == len(decode.FORMS)
    assert {row["microseconds"] for row in whole if row["way"] == "eager"} == {16.0, 32.0}
    page = path.with_suffix(".md").read_text()
    assert page.count("the whole |") == len(decode.SHAPES) and "Not timed" not in page
    assert "1 x 8,192 keys, 4 queries:" in page and "16.0 (1.00) |  32.0 (1.00) |" in page
    assert "cuDNN" in page and "FA2" not in page
    assert decode.main(["--redraw", str(path)]) == 0 and path.with_suffix(".md").read_text() == page


@pytest.mark.parametrize("decode", ["decode_ablation"], indirect=True)
def test_a_run_that_was_cut_short_says_which_shape_it_lacks(decode, tmp_path, monkeypatch):
    timed = decode.timed_together

    def cut(kernels, sizes, *, eager=False):
        if sizes.batch == 8:
            raise KeyboardInterrupt
        return timed(kernels, sizes, eager=eager)

    monkeypatch.setattr(decode, "timed_together", cut)
    with pytest.raises(KeyboardInterrupt):
        decode.main(["--out", str(tmp_path)])
    (page,) = tmp_path.glob("*-decode-ablation.md")
    lacking = "8 x 8,192 keys, 1 query; 32 x 4,096 keys, 1 query; 128 x 2,048 keys, 1 query."
    assert f"Not timed: {lacking}" in page.read_text()


@pytest.mark.parametrize("name", ["decode", "decode_ablation"])
def test_it_needs_a_gpu(name, script, tmp_path, capsys):
    assert refused_without_a_gpu(script(name), tmp_path / "out", capsys)
