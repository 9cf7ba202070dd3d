"""What each command does: generate, build, verify, bench, list, schema, cache and doctor."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fagen import evidence, flow, measure, registry
from fagen.build import Binary
from fagen.errors import VerificationError
from fagen.evidence.store import slugs_in_ledgers
from fagen.paths import locate
from fagen.problem import Sizes
from fagen.records import Bandwidth, RoundingError
from tests.cli_helpers import ALL, COMMITTED, QUANTIZER, SLUG, fagen
from tests.evidence_helpers import evidence_of, stand_in


@pytest.fixture
def generated(tmp_path, monkeypatch) -> Path:
    """An empty folder that stands in for generated/."""
    return stand_in(tmp_path, monkeypatch)


@pytest.fixture
def without_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# ---- quantisers ----------------------------------------------------------------------------------


def test_a_quantiser_goes_through_the_same_commands(tmp_path):
    record = json.loads(fagen("check", "--json", QUANTIZER).output)
    assert record["keys"]["rotate"] is True and record["kernels"] == 3
    schedule = registry.from_slug(QUANTIZER)
    assert fagen("generate", QUANTIZER).output == flow.rendered(schedule).kernel
    fagen("generate", QUANTIZER, SLUG, "-o", tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["fagen_host.h", f"{SLUG}.cu", f"{QUANTIZER}.cu"]
    answer = fagen("build", "--no-binding", QUANTIZER)
    assert answer.exit_code == 0
    most = registry.plan(schedule).launch_registers
    for row in ("registers per thread at launch", "in use"):
        assert re.search(rf"^ +{row} +\d+ +{most}$", answer.output, re.M)
    assert fagen("check", "quant_fp16_d100").exit_code == 1
    path = tmp_path / "mine.toml"
    path.write_text("[quantize]\ndtype = 3\n")
    assert fagen("check", path).stderr.startswith(f"{path}:1: quantize.head_dim is missing")


def test_a_quantiser_is_listed_and_not_timed_beside_cudnn(without_gpu, monkeypatch):
    rows = {row["schedule"]: row for row in json.loads(fagen("list", "--json").output)}
    assert {slug for slug in rows if slug.startswith("quant_")} == set(COMMITTED["quantize"])
    assert rows[QUANTIZER]["tile"] == "128 rows"
    answer = fagen("bench", QUANTIZER)
    assert answer.exit_code == 2 and "fagen verify" in answer.stderr
    assert fagen("verify", QUANTIZER).exit_code == 5
    monkeypatch.setattr(flow, "need_gpu", lambda: None)
    timed = []
    monkeypatch.setattr(flow, "built", lambda schedule, **_: timed.append(schedule.slug))
    monkeypatch.setattr(measure, "bench", lambda *_, **__: [])
    fagen("bench", "--all")
    assert timed == COMMITTED["forward"] + COMMITTED["backward"]


def test_what_a_quantisers_verification_found_is_said(with_gpu, monkeypatch, tmp_path):
    error = RoundingError(1, 128, 2, False, 2e-5, 1e-3, 0, 1e-7, 1e-5)
    speed = Bandwidth(4, 16_384, 16, True, 3_600.0, 4_000.0)
    verified = evidence_of(QUANTIZER, yardstick="a copy", errors=(error,), speeds=(speed,))
    monkeypatch.setattr(measure, "verify", lambda *_, **__: verified)
    output = fagen("verify", QUANTIZER, "-o", tmp_path).output
    assert "2.0e-05 of the values round to the reference's neighbour" in output
    assert "descales given: 3600 GB/s, 0.90 of a copy's" in output


# ---- generate ------------------------------------------------------------------------------------


def test_generate_prints_the_kernel_and_writes_it_with_its_binding(tmp_path):
    source = flow.rendered(registry.from_slug(SLUG))
    assert fagen("generate", SLUG).output == source.kernel
    answer = fagen("generate", SLUG, "--binding", "-o", tmp_path / "new")
    paths = [Path(line) for line in answer.output.splitlines()]
    assert [path.name for path in paths] == [f"{SLUG}.cu", f"{SLUG}_torch.cpp", "fagen_host.h"]
    texts = [source.kernel, source.binding, source.header]
    assert [path.read_text() for path in paths] == texts


def test_generate_finds_what_is_missing_edited_or_nobodys(generated, monkeypatch):
    mine = registry.from_slug(SLUG)
    monkeypatch.setattr(flow, "all_committed", lambda: (mine,))
    assert fagen("generate", "--check").exit_code == 6
    names = ("ledger/forward.jsonl", f"forward/{SLUG}.cu", "forward/fagen_host.h")
    paths = [generated / name for name in names]
    assert fagen("generate", "--all").output == "".join(f"{path}\n" for path in paths)
    (generated / "left_over.cu").touch()
    record = json.loads(fagen("generate", "--check", "--json").stdout)
    assert (record["error"], record["exit_code"]) == ("VerificationError", 6)
    assert {(fault["slug"], fault["kind"]) for fault in record["answer"]} == {
        (SLUG, "missing"),  # its evidence
        ("left_over.cu", "orphan"),
    }


# ---- build, verify, bench ------------------------------------------------------------------------


def test_build_shows_what_the_compiler_said_beside_the_plan(built):
    binary = built(SLUG).binary
    answer = fagen("build", SLUG)
    assert answer.exit_code == 0
    assert str(binary.library) in answer.output
    assert re.search(r"in use +\d+ +232\n", answer.output)
    assert re.search(r"spilled bytes per thread +0 +0\n", answer.output)
    (record,) = json.loads(fagen("build", "--json", SLUG).output)
    assert record["source_hash"] == binary.source_hash


def test_without_a_compiler_the_command_that_fixes_it_is_named(without_nvcc):
    answer = fagen("build", SLUG, "fwd_fp16_d64_full_m64n64")
    assert answer.exit_code == 3
    assert answer.stderr.count("CUDA_HOME") == 1, "said once, not for every schedule"


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_without_a_hopper_gpu_nothing_is_built_for_it(command, without_gpu, without_nvcc):
    answer = fagen(command, SLUG)
    assert answer.exit_code == 5
    assert "Hopper" in answer.stderr


@pytest.mark.parametrize(
    "shape", ["", "1,2,3", "1,4,3,5,5", "a,b,c,d,e", "0,1,1,1,1", "1,1,1,1,1,1"]
)
def test_a_shape_that_is_none_is_a_usage_error(shape):
    answer = fagen("bench", SLUG, "--shape", shape)
    assert answer.exit_code == 2
    assert "--shape" in answer.stderr


@pytest.mark.parametrize("command", ["generate", "build", "verify", "bench", "simulate"])
def test_a_command_names_schedules_or_all_of_them_and_not_both(command, without_gpu, monkeypatch):
    def never(*_, **__):
        raise AssertionError("nothing is asked for")

    for work in ("rendered", "written", "maker", "built"):
        monkeypatch.setattr(flow, work, never)
    answer = fagen(command)
    assert answer.exit_code == 2
    assert "--all" in answer.stderr
    for option in ("--all", *["--check"] * (command == "generate")):
        answer = fagen(command, SLUG, option)
        assert answer.exit_code == 2 and answer.stdout == ""
        assert f"{option} means all of schedules/: name no SCHEDULE beside it" in answer.stderr


@pytest.fixture
def with_gpu(monkeypatch):
    """As if there were one: what would run on it is faked by the test."""
    monkeypatch.setattr(flow, "need_gpu", lambda: None)
    monkeypatch.setattr(flow, "built", lambda schedule, **_: (registry.plan(schedule), None))
    monkeypatch.setattr(flow, "maker", lambda *_, **__: flow.built)


def test_bench_times_the_shapes_beside_the_peers_in_the_regimes_that_were_asked_for(
    with_gpu, monkeypatch
):
    options = {}

    def timed(kernels, shapes, *, peers, regimes, progress):
        options.update(shapes=shapes, peers=peers, regimes=[regime.name for regime in regimes])
        row = ("fp16", 128, 128, "causal", 1, 8, 8, 2, 2, "fagen", SLUG, "burst", 9.0, 0.1, None)
        return [measure.Row(*row)]

    monkeypatch.setattr(measure, "bench", timed)
    monkeypatch.setattr(measure, "installed", lambda name: False)
    answer = fagen("bench", SLUG)
    assert answer.exit_code == 0 and "| fagen burst" in answer.output
    assert options == {
        "shapes": [Sizes(4, 16, 16, 4096, 4096)],
        "peers": ["cudnn", "fa2"],
        "regimes": ["sustained", "burst"],
    }
    words = ["--shape", "3,8,2,64,65", "--seqlen", "512", "--flex", "--fa3", "--regime", "burst"]
    (row,) = json.loads(fagen("bench", SLUG, *words, "--json").output)
    assert row["tflops"] == 9.0
    assert options == {
        "shapes": [Sizes(3, 8, 2, 64, 65), Sizes(32, 16, 16, 512, 512)],
        "peers": ["cudnn", "fa2", "fa3", "flex"],
        "regimes": ["burst"],
    }


def test_one_wrong_kernel_does_not_keep_the_others_from_being_verified(
    with_gpu, monkeypatch, tmp_path
):
    visited = []

    def verified(plan, binary, folder, *, progress):
        visited.append(plan.slug)
        if "full" in plan.slug:
            raise VerificationError(f"{plan.slug}: 1 of 18 shapes are wrong")
        return evidence_of(plan.slug)

    monkeypatch.setattr(flow, "verified", verified)
    slugs = ["fwd_fp16_d64_full_m64n64", SLUG, "fwd_bf16_d64_full_m64n64"]
    together = []

    def maker(schedules, **_):
        together.extend(schedule.slug for schedule in schedules)
        return flow.built

    monkeypatch.setattr(flow, "maker", maker)
    answer = fagen("verify", *slugs, "-o", tmp_path)
    assert together == slugs, "all are built before the first is verified"
    assert visited == slugs
    assert answer.exit_code == 6
    assert answer.stderr.count("shapes are wrong") == 2
    assert "1 shapes on NVIDIA H200" in fagen("verify", SLUG, "-o", tmp_path).output


def test_evidence_of_a_schedule_that_is_not_committed_needs_a_folder_before_the_gpu_works(
    with_gpu, generated
):
    answer = fagen("verify", "fwd_fp16_d64_full_m64n64")
    assert answer.exit_code == 1
    assert "name a folder by -o" in answer.stderr


def older(binary: Binary, slug: str = SLUG, **changes: str) -> evidence.Evidence:
    """Evidence of an older source of a kernel that was built, which gave the same machine code."""
    machine = binary.report.machine
    assert machine, "no disassembler is installed"
    same = {"machine_code": machine.hash, **vars(binary.hashes)}
    return evidence_of(slug, **{**same, "device": "of an older source", **changes})


def test_evidence_moves_to_a_source_that_gives_the_same_machine_code(generated, built):
    binary = built(SLUG).binary
    assert fagen("verify", "--same-code", SLUG).exit_code == 6, "there is none to renew"

    evidence.write(older(binary))
    answer = fagen("verify", "--same-code", SLUG)
    assert answer.exit_code == 0
    assert "sustained: 600 TFLOP/s, 1.20 of cuDNN" in answer.output
    renewed = evidence.read(SLUG)
    assert renewed is not None
    assert renewed.hashes == binary.hashes
    assert renewed.date == "2026-01-31", "it ran then, and has not run since"

    for other in ("machine_code", "launcher", "constants"):
        evidence.write(dataclasses.replace(renewed, **{other: "of another kernel"}))
        assert fagen("verify", "--same-code", SLUG).exit_code == 6


BEFORE = "fwd_fp16_d128_causal_m128n128_s2"  # a name that no schedule has


@pytest.mark.parametrize("to", ["generated/", "a folder"])
def test_evidence_of_a_kernel_that_was_renamed_moves_to_its_new_name(generated, built, to):
    binary = built(SLUG).binary
    folder = None if to == "generated/" else generated / "mine"
    words = ["--same-code", SLUG, *(["-o", folder] if folder else [])]
    lost = older(binary, BEFORE)

    def there() -> list[str]:
        return [path.stem for path in folder.glob("*")] if folder else [*slugs_in_ledgers()]

    def put(*others: evidence.Evidence) -> None:
        for slug in there():
            evidence.drop(slug, folder)
        for line in others:
            evidence.write(line, folder)

    put(lost)
    answer = fagen("verify", *words)
    assert answer.exit_code == 0
    assert f"{SLUG}: took over the evidence of {BEFORE}" in answer.stderr
    assert there() == [SLUG]
    assert evidence.read(SLUG, folder) == dataclasses.replace(
        lost, slug=SLUG, device=binary.hashes.device, cutlass=binary.made_with["cutlass"]
    )

    put(lost, older(binary, machine_code="other"))
    assert fagen("verify", *words).exit_code == 6, "it has evidence of its own, of other code"
    for off in (dict(machine_code="other"), dict(launcher="other")):
        put(dataclasses.replace(lost, **off))
        assert fagen("verify", *words).exit_code == 6
        assert there() == [BEFORE], "which stays where it was"
    put(lost, dataclasses.replace(lost, slug=f"{BEFORE}_q1", launcher="other", date="2026-12-31"))
    assert fagen("verify", *words).exit_code == 0, "one of them had this launcher"


def test_evidence_that_has_its_schedule_is_not_taken_for_another_kernel(generated, built):
    binary = built(SLUG).binary
    for other in COMMITTED["forward"]:
        if other.startswith("fwd_fp16_d128_") and other != SLUG:
            evidence.write(older(binary, other))
    answer = fagen("verify", "--same-code", SLUG)
    assert answer.exit_code == 6
    assert "nor any of the same machine code" in answer.stderr


# ---- list, schema, cache, doctor -----------------------------------------------------------------


def test_list_knows_every_committed_schedule_and_the_state_of_its_evidence(generated, monkeypatch):
    slugs = [SLUG, COMMITTED["forward"][0]]
    mine = [registry.from_slug(slug) for slug in slugs]
    monkeypatch.setattr(flow, "all_committed", lambda: tuple(mine))
    fagen("generate", "--all")
    evidence.write(evidence_of(SLUG, **vars(flow.to_commit(mine[0]).hashes)))
    rows = json.loads(fagen("list", "--json").output)
    assert [row["schedule"] for row in rows] == slugs
    assert [row["evidence"] for row in rows] == ["NVIDIA H200, 2026-01-31", "none"]
    assert rows[0]["TFLOP/s"] == "600"
    evidence.note([evidence.Rendering(SLUG, evidence_of(SLUG).hashes)])
    assert "stale, NVIDIA H200" in fagen("list").output


def test_a_list_is_of_the_schedules_that_its_options_say(monkeypatch):
    some = flow.all_committed()[::9]  # all take seconds
    monkeypatch.setattr("fagen.flow.all_committed", lambda: some)

    def listed(*words: object) -> list[dict[str, str]]:
        return json.loads(fagen("list", *words, "--json").output)

    every = listed()
    for words, belongs in (
        (("--kind", "decode"), lambda row: row["schedule"].startswith("dec_")),
        (("--dtype", "e4m3"), lambda row: row["dtype"] == "e4m3"),
        (("--head-dim", 128), lambda row: row["head_dim"] == "128"),
        (("--mask", "full"), lambda row: row["mask"] == "full"),
    ):
        rows = listed(*words)
        assert 0 < len(rows) < len(every) and rows == [row for row in every if belongs(row)]
    good, others = listed("--verified"), listed("--unverified")
    assert len(good) + len(others) == len(every)
    assert all("stale" not in row["evidence"] for row in good)
    assert fagen("list", "--head-dim", 7).output == "no schedule is so\n"
    assert listed("--head-dim", 7) == []
    answer = fagen("list", "--dtype", "fp8")
    assert answer.exit_code == 2 and "did you mean 'e4m3'?" in answer.stderr


def test_committed_schedules_are_those_of_the_folder():
    for kind, slugs in COMMITTED.items():
        assert [schedule.slug for schedule in flow.committed(kind)] == slugs
    assert [schedule.slug for schedule in flow.all_committed()] == ALL


def test_the_printed_schema_is_the_one_beside_the_schedules_of_its_kind():
    for kind in registry.ENTRIES:
        beside = locate("schedules") / kind / "schedule.schema.json"
        assert fagen("schema", "--kind", kind).output == beside.read_text()
    assert fagen("schema").output == fagen("schema", "--kind", "forward").output
    answer = fagen("schema", "--kind", "sideways")
    assert answer.exit_code == 2 and "'forward', 'backward'" in answer.stderr


def test_the_cache_is_listed_and_emptied(tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    assert json.loads(fagen("cache", "list", "--json").output) == []
    (tmp_path / "kernels" / "fwd_broken-0").mkdir(parents=True)
    assert json.loads(fagen("cache", "list", "--json").output)[0]["state"] == "broken"
    assert str(tmp_path) in fagen("cache", "list").output
    assert fagen("cache", "prune").output.endswith("removed: 1\n")
    assert fagen("cache", "list").output == f"{tmp_path}\n"


def test_doctor_names_what_is_missing_and_how_to_fix_it(without_nvcc):
    answer = fagen("doctor", "--json")
    assert answer.exit_code == 3
    findings = {finding["name"]: finding for finding in json.loads(answer.stdout)["answer"]}
    assert not findings["nvcc"]["ok"] and findings["nvcc"]["remedy"]
    assert findings["g++"]["ok"]
