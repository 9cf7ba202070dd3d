"""The command line: what it prints, on which stream, and with which exit code it ends."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import cli
from fagen import evidence, flow, measure
from fagen.console import DefaultCommand
from fagen.errors import VerificationError
from fagen.machine import machine_code
from fagen.paths import locate
from fagen.kinds.forward.plan import plan
from fagen.process import run
from fagen.quantizer import read_any
from fagen.schedule import Schedule
from fagen.toolchain import FLAGS

SLUG = "fwd_fp16_d128_causal_m128n128"
ROOT = locate("cli.py").parent
QUANTIZER = "quant_fp16_d128_rot_head"
QUANTIZERS = sorted(path.stem for path in locate("schedules").glob("quant_*.toml"))
COMMITTED = sorted(path.stem for path in locate("schedules").glob("fwd_*.toml"))


def fagen(*words: object, input: str | None = None) -> Result:
    """Run a command; a traceback fails the test."""
    result = CliRunner().invoke(cli.main, [str(w) for w in words], input=input, prog_name="fagen")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def commands(group: click.Group = cli.main, *above: str) -> dict[tuple[str, ...], click.Command]:
    found = {}
    for name, command in group.commands.items():
        found[*above, name] = command
        if isinstance(command, click.Group):
            found |= commands(command, *above, name)
    return found


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands in for generated/."""

    def located(name: str) -> Path:
        return tmp_path if name == "generated" else locate(name)

    for module in (evidence, flow):
        monkeypatch.setattr(module, "locate", located)
    return tmp_path


@pytest.fixture
def without_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# ---- quantisers ----------------------------------------------------------------------------------


def test_a_quantiser_goes_through_the_same_commands(tmp_path):
    path = locate("schedules") / f"{QUANTIZER}.toml"
    answers = [fagen("check", path), fagen("check", QUANTIZER)]
    answers.append(fagen("check", "-", input=path.read_text()))
    assert {answer.output for answer in answers} == {answers[0].output}
    assert answers[0].output.startswith(f"{QUANTIZER} fits\n")
    assert answers[0].output in fagen("check", "--explain", QUANTIZER).output
    told = json.loads(fagen("check", "--json", QUANTIZER).output)
    assert told["keys"]["rotate"] is True and told["kernels"] == 3
    assert fagen("generate", QUANTIZER).output == flow.rendered(read_any(path)).kernel
    answer = fagen("generate", QUANTIZER, SLUG, "-o", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{SLUG}.cu", f"{QUANTIZER}.cu"]
    answer = fagen("build", "--no-binding", QUANTIZER)
    assert answer.exit_code == 0
    assert re.search(r"registers per thread +\d+ +80\n", answer.output)
    assert fagen("check", "quant_fp16_d100_head").exit_code == 1
    path = tmp_path / "mine.toml"
    path.write_text("[quantize]\ndtype = 3\n")
    assert fagen("check", path).stderr.startswith(f"{path}:1: quantize.head_dim is missing")


def test_a_quantiser_is_listed_and_not_timed_beside_cudnn(without_gpu, monkeypatch):
    rows = {row["schedule"]: row for row in json.loads(fagen("list", "--json").output)}
    assert {slug for slug in rows if slug.startswith("quant_")} == set(QUANTIZERS)
    assert rows[QUANTIZER]["tile"] == "128 rows"
    answer = fagen("bench", QUANTIZER)
    assert answer.exit_code == 2 and "fagen verify" in answer.stderr
    assert fagen("verify", QUANTIZER).exit_code == 5
    monkeypatch.setattr(flow, "need_gpu", lambda: None)
    timed = []
    monkeypatch.setattr(flow, "built", lambda schedule, **_: timed.append(schedule.slug))
    monkeypatch.setattr(measure, "bench", lambda *_, **__: [])
    fagen("bench", "--all")
    assert timed == COMMITTED


def test_what_a_quantisers_verification_found_is_said(with_gpu, monkeypatch, tmp_path):
    error = evidence.RoundingError(1, 128, 2, False, 2e-5, 1e-3, 0, 1e-7, 1e-5)
    found = dataclasses.replace(
        proof(QUANTIZER, "hash", "code"),
        errors=(error,),
        speeds=(evidence.Bandwidth(4, 16_384, 16, True, 3_600.0, 4_000.0),),
    )
    monkeypatch.setattr(flow, "built", lambda schedule, **_: (flow.planned(schedule), None))
    monkeypatch.setattr(measure, "verify_quantizer", lambda *_, **__: found)
    said = fagen("verify", QUANTIZER, "-o", tmp_path).output
    assert "2.0e-05 of the values round to the reference's neighbour" in said
    assert "descales given: 3600 GB/s, 0.90 of a copy's" in said


# ---- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_has_help_with_examples_that_name_real_commands_and_options(path):
    answer = fagen(*path, "-h")
    assert answer.exit_code == 0
    assert answer.output == fagen(*path, "--help").output
    examples = re.findall(r"^ +fagen (.+)", answer.output.partition("Examples:")[2], re.M)
    assert examples, f"fagen {' '.join(path)} shows no example"
    for example in examples:
        words = re.split(r" [|>] ", example)[0].split()
        named = tuple(words[:2])
        of = commands()[named if named in commands() else named[:1]]
        if isinstance(of, DefaultCommand):
            of = next(iter(of.commands.values()))
        known = {
            option
            for parameter in of.params
            for option in parameter.opts + parameter.secondary_opts
        }
        assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_that_reports_does_so_in_json_too(path):
    command = commands()[path]
    if not isinstance(command, click.Group) and path != ("schema",):  # which prints nothing else
        assert "--json" in fagen(*path, "-h").output


def test_the_commands_are_listed_in_the_order_of_the_flow():
    listed = re.findall(r"^  (\w+)  ", fagen("-h").output.partition("Commands:")[2], re.M)
    assert listed[:4] == ["check", "generate", "build", "verify"]


def test_cli_py_and_the_module_are_the_same_program():
    answers = {
        run([sys.executable, *words, "--version"], cwd=ROOT).stdout
        for words in (["cli.py"], ["-m", "fagen"])
    }
    assert len(answers) == 1
    assert answers.pop().startswith("fagen, version ")


# ---- check ---------------------------------------------------------------------------------------


def test_a_path_a_slug_and_standard_input_name_the_same_schedule():
    path = locate("schedules") / f"{SLUG}.toml"
    by_path, by_slug = fagen("check", path), fagen("check", SLUG)
    by_input = fagen("check", "-", input=path.read_text())
    assert by_path.exit_code == 0
    assert by_path.output == by_slug.output == by_input.output
    assert by_path.output.startswith(f"{SLUG} fits\n")
    assert plan(Schedule.from_slug(SLUG)).ledger in by_path.output


def test_a_slug_needs_no_file():
    slug = "fwd_bf16_d72_full_m64n48"
    assert slug not in COMMITTED
    assert fagen("check", slug).output.startswith(f"{slug} fits")


def test_check_explains_itself():
    assert "so block_n <= " in fagen("check", "--explain", SLUG).output


def test_check_in_json_has_the_ledgers_with_their_sums():
    told = json.loads(fagen("check", "--json", SLUG).output)
    assert told["schedule"] == SLUG
    assert told["shared"]["total"] == sum(row["amount"] for row in told["shared"]["rows"])
    assert told["keys"]["block_n"] == 128


WRONG = {
    "nothing": b"",
    "no TOML": b"[attention\nhead_dim = 128",
    "no text": b"\xff\xfe\x00\x80",
    "other types": b'attention = 3\ntile = [1, 2]\npipeline = "x"\n',
    "other values": b"[attention]\nhead_dim = -1\ndtype = 7\nmask = []\n[tile]\nblock_m = nan\n",
    "a NUL": b'[attention]\ndtype = "\\u0000"\n',
    "a deep list": b"a = " + b"[" * 900 + b"]" * 900,
    "huge": b"# " + b"x" * 100_000,
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_malformed_schedule_is_refused_on_stderr_with_its_name_and_exit_code_1(content, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    answer = fagen("check", path)
    assert answer.exit_code == 1
    assert answer.stdout == ""
    assert answer.stderr.startswith(f"{path}:")


@pytest.mark.parametrize("word", ["nowhere.toml", "schedules", ".", "", "fwd", "a\0b.toml", "/"])
def test_what_is_no_schedule_at_all_is_refused_too(word):
    answer = fagen("check", word)
    assert answer.exit_code == 1
    assert answer.stderr


def test_a_refusal_in_json_is_an_object_on_stdout_and_words_on_stderr():
    answer = fagen("check", "--json", "fwd_bf16_d256_full_m128n96")
    told = json.loads(answer.stdout)
    assert answer.exit_code == told["exit_code"] == 1
    assert told["error"] == "OverBudget"
    assert told["message"] == answer.stderr.rstrip("\n")
    assert "fits with block_n = " in told["message"]


# ---- generate ------------------------------------------------------------------------------------


def test_generate_prints_the_kernel_and_writes_it_with_its_binding(tmp_path):
    source = flow.rendered(Schedule.from_slug(SLUG))
    assert fagen("generate", SLUG).output == source.kernel
    answer = fagen("generate", SLUG, "--binding", "-o", tmp_path / "new")
    paths = [Path(line) for line in answer.output.splitlines()]
    assert [path.name for path in paths] == [f"{SLUG}.cu", f"{SLUG}_torch.cpp"]
    assert [path.read_text() for path in paths] == [source.kernel, source.binding]


def test_generate_finds_what_is_missing_edited_or_nobodys(generated, monkeypatch):
    mine = Schedule.from_slug(SLUG)
    monkeypatch.setattr(flow, "all_committed", lambda: (mine,))
    assert fagen("generate", "--check").exit_code == 6
    flow.written(flow.rendered(mine), generated)
    (generated / "left_over.cu").touch()
    told = json.loads(fagen("generate", "--check", "--json").stdout.partition("]\n")[0] + "]")
    assert {(fault["slug"], fault["kind"]) for fault in told} == {
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
    told = json.loads(fagen("build", "--json", SLUG).output)
    assert told[0]["source_hash"] == binary.source_hash


def test_without_a_compiler_the_command_that_mends_it_is_named(without_nvcc):
    answer = fagen("build", SLUG, "fwd_fp16_d64_full_m64n64")
    assert answer.exit_code == 3
    assert answer.stderr.count("CUDA_HOME") == 1, "said once, not for every schedule"


def test_a_cache_that_cannot_be_written_is_a_failed_build(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "file"))
    assert fagen("build", "--no-binding", SLUG).exit_code == 4


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


@pytest.mark.parametrize("command", ["generate", "build", "verify", "bench"])
def test_a_command_without_a_schedule_says_how_to_name_one(command, monkeypatch):
    monkeypatch.setattr(flow, "need_gpu", lambda: None)
    answer = fagen(command)
    assert answer.exit_code == 2
    assert "--all" in answer.stderr


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: what would run on it is faked by the test."""
    monkeypatch.setattr(flow, "need_gpu", lambda: None)
    monkeypatch.setattr(flow, "built", lambda schedule, **_: (plan(schedule), None))


def test_bench_times_the_shapes_beside_the_peers_in_the_regimes_that_were_asked_for(
    with_gpu, monkeypatch
):
    asked = {}

    def timed(kernels, shapes, *, peers, regimes, progress):
        asked.update(shapes=shapes, peers=peers, regimes=[regime.name for regime in regimes])
        row = ("fp16", 128, 128, "causal", 1, 8, 8, 2, 2, "fagen", SLUG, "burst", 9.0, 0.1, None)
        return [measure.Row(*row)]

    monkeypatch.setattr(measure, "bench", timed)
    monkeypatch.setattr(measure, "installed", lambda name: False)
    answer = fagen("bench", SLUG)
    assert answer.exit_code == 0 and "| fagen burst" in answer.output
    assert asked == {
        "shapes": [measure.Shape(4, 4096, 4096, 16, 16)],
        "peers": ["cudnn", "fa2"],
        "regimes": ["sustained", "burst"],
    }
    words = ["--shape", "3,8,2,64,65", "--seqlen", "512", "--flex", "--fa3", "--regime", "burst"]
    told = json.loads(fagen("bench", SLUG, *words, "--json").output)
    assert told[0]["tflops"] == 9.0
    assert asked == {
        "shapes": [measure.Shape(3, 64, 65, 8, 2), measure.Shape(32, 512, 512, 16, 16)],
        "peers": ["cudnn", "fa2", "fa3", "flex"],
        "regimes": ["burst"],
    }


def test_one_wrong_kernel_does_not_keep_the_others_from_being_verified(
    with_gpu, monkeypatch, tmp_path
):
    seen = []

    def verified(of, binary, folder, *, progress):
        seen.append(of.slug)
        if "full" in of.slug:
            raise VerificationError(f"{of.slug}: 1 of 18 shapes are wrong")
        return proof(of.slug, "hash", "code")

    monkeypatch.setattr(flow, "verified", verified)
    slugs = ["fwd_fp16_d64_full_m64n64", SLUG, "fwd_bf16_d64_full_m64n64"]
    answer = fagen("verify", *slugs, "-o", tmp_path)
    assert seen == slugs
    assert answer.exit_code == 6
    assert answer.stderr.count("shapes are wrong") == 2
    assert "1 shapes on NVIDIA H200" in fagen("verify", SLUG, "-o", tmp_path).output


def test_evidence_of_a_schedule_that_is_not_committed_needs_a_folder_before_the_gpu_works(
    with_gpu, generated
):
    answer = fagen("verify", "fwd_fp16_d64_full_m64n64")
    assert answer.exit_code == 1
    assert "name a folder by -o" in answer.stderr


def proof(slug: str, source_hash: str, code: str, host_hash: str = "") -> evidence.Evidence:
    error = evidence.ShapeError(1, 8, 8, 1, 1, 1e-3, 1e-3, 3e-3, 0.0, 1e-3)
    speed = evidence.Speed("sustained", 4, 4096, 16, 600.0, 0.01, 1700, 500.0)
    return evidence.Evidence(
        slug=slug,
        source_hash=source_hash,
        host_hash=host_hash,
        flags=FLAGS,
        cutlass="4.2.0",
        machine_code=code,
        compiler="13.0.88",
        card="NVIDIA H200",
        driver="580.1",
        torch="2.13.0",
        date="2026-01-31",
        errors=(error,),
        speeds=(speed,),
    )


def test_evidence_moves_to_a_source_that_gives_the_same_machine_code(generated, built):
    binary = built(SLUG).binary
    assert fagen("verify", "--same-code", SLUG).exit_code == 6, "there is none to renew"

    code = machine_code(binary.library).hash
    evidence.write(proof(SLUG, "of an older source", code, binary.host_hash))
    answer = fagen("verify", "--same-code", SLUG)
    assert answer.exit_code == 0
    assert "sustained: 600 TFLOP/s, 1.20 of cuDNN" in answer.output
    renewed = evidence.read(SLUG)
    assert renewed is not None
    assert renewed.source_hash == binary.source_hash
    assert renewed.date == "2026-01-31", "it ran then, and has not run since"

    for other in ("machine_code", "host_hash"):
        evidence.write(dataclasses.replace(renewed, **{other: "of another kernel"}))
        assert fagen("verify", "--same-code", SLUG).exit_code == 6


# ---- list, schema, cache, doctor -----------------------------------------------------------------


def test_list_knows_every_committed_schedule_and_the_state_of_its_evidence(generated, monkeypatch):
    mine = [Schedule.from_slug(slug) for slug in (SLUG, COMMITTED[0])]
    monkeypatch.setattr(flow, "all_committed", lambda: tuple(mine))
    evidence.write(proof(SLUG, flow.rendered(mine[0]).hash, "code"))
    told = json.loads(fagen("list", "--json").output)
    assert [row["schedule"] for row in told] == [SLUG, COMMITTED[0]]
    assert [row["evidence"] for row in told] == ["NVIDIA H200, 2026-01-31", "none"]
    assert told[0]["TFLOP/s"] == "600"
    evidence.write(proof(SLUG, "of an older source", "code"))
    assert "stale, NVIDIA H200" in fagen("list").output


def test_committed_schedules_are_those_of_the_folder():
    assert [schedule.slug for schedule in flow.committed()] == COMMITTED
    assert [schedule.slug for schedule in flow.all_committed()] == [*COMMITTED, *QUANTIZERS]


def test_the_printed_schema_is_the_one_beside_the_schedules():
    printed = json.loads(fagen("schema").output)
    assert printed == json.loads((locate("schedules") / "schedule.schema.json").read_text())


def test_the_cache_is_listed_and_emptied(tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    assert json.loads(fagen("cache", "list", "--json").output) == []
    (tmp_path / "kernels" / "fwd_broken-0").mkdir(parents=True)
    assert json.loads(fagen("cache", "list", "--json").output)[0]["state"] == "broken"
    assert str(tmp_path) in fagen("cache", "list").output
    assert fagen("cache", "prune").output.endswith("removed: 1\n")
    assert fagen("cache", "list").output == f"{tmp_path}\n"


def test_doctor_names_what_is_missing_and_what_mends_it(without_nvcc):
    answer = fagen("doctor", "--json")
    assert answer.exit_code == 3
    findings = {f["name"]: f for f in json.loads(answer.stdout.partition("]\n")[0] + "]")}
    assert not findings["nvcc"]["ok"] and findings["nvcc"]["remedy"]
    assert findings["g++"]["ok"]


# ---- streams and ends ----------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error():
    shell = f"{sys.executable} cli.py generate {SLUG} | head -n 1"
    answer = run(["sh", "-c", shell], cwd=ROOT)
    assert answer.stdout.startswith("// ")
    assert answer.stderr == ""


def test_an_interruption_ends_at_once_with_the_shells_code(monkeypatch):
    def interrupted(schedule):
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, "rendered", interrupted)
    answer = fagen("generate", SLUG)
    assert answer.exit_code == 130
    assert answer.output.strip() == ""


def test_a_fault_of_fagens_own_is_owned_up_to_without_a_traceback(monkeypatch):
    def faulty(schedule):
        return {}["absent"]

    monkeypatch.setattr(flow, "rendered", faulty)
    answer = fagen("generate", SLUG)
    assert answer.exit_code == 70
    assert "KeyError" in answer.stderr and "--debug" in answer.stderr
    with pytest.raises(KeyError):
        CliRunner().invoke(cli.main, ["--debug", "generate", SLUG], catch_exceptions=False)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    answer = fagen("generate", SLUG, "-o", tmp_path / "file")
    assert answer.exit_code == 1
    assert str(tmp_path / "file") in answer.stderr


def test_what_needs_no_torch_runs_without_and_what_does_says_so():
    code = (
        "import sys; sys.modules['torch'] = None; import cli; "
        "cli.main(sys.argv[1:], prog_name='fagen')"
    )
    for words in (["check", SLUG], ["generate", SLUG], ["schema"], ["list"]):
        answer = run([sys.executable, "-c", code, *words], cwd=ROOT)
        assert answer.returncode == 0, answer.stderr
    answer = run([sys.executable, "-c", code, "bench", SLUG], cwd=ROOT)
    assert answer.returncode == 3
    assert answer.stderr == "torch is not installed: python -m pip install torch\n"


def test_a_shell_completes_commands_and_slugs():
    asked = {"_FAGEN_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    words = f"fagen check {SLUG[:-2]}"
    answer = run(
        [sys.executable, "-m", "fagen"], cwd=ROOT, env={**asked, "COMP_WORDS": words}
    ).stdout
    assert f"plain,{SLUG}" in answer.splitlines()
