"""The command line's bad ends: what is not there, no room, no home; what succeeded is kept."""

import json
import os
import sys
from pathlib import Path

import pytest

from fagen import flow, registry, search
from fagen.build import store
from fagen.errors import BuildError, DeviceError
from fagen.paths import write_whole
from fagen.process import run
from tests.cli_helpers import ALL, ROOT, SLUG, fagen
from tests.clock import least_seconds

TOO_LARGE = "fwd_bf16_d256_full_m128n96"


# ---- one of several ------------------------------------------------------------------------------


def test_what_could_be_rendered_is_kept_where_other_schedules_are_wrong(tmp_path):
    words = ["generate", TOO_LARGE, tmp_path / "none.toml", SLUG]
    kernel = flow.rendered(registry.from_slug(SLUG)).kernel
    answer = fagen(*words)
    assert answer.exit_code == 1
    assert answer.stdout == kernel
    assert "fits with block_n" in answer.stderr and "none.toml: cannot be read" in answer.stderr

    in_json = fagen(*words, "--json")
    record = json.loads(in_json.stdout)
    assert in_json.exit_code == record["exit_code"] == 1
    assert [source["kernel"] for source in record["answer"]] == [kernel]
    assert [(failure["schedule"], failure["error"]) for failure in record["failed"]] == [
        (TOO_LARGE, "OverBudget"),
        (str(tmp_path / "none.toml"), "ScheduleError"),
    ]
    assert all(failure["message"] in record["message"] for failure in record["failed"])

    fagen(*words, "-o", tmp_path / "out")
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {f"{SLUG}.cu", "fagen_host.h"}

    assert fagen("generate", TOO_LARGE).stdout == "", "nothing succeeded"
    record = json.loads(fagen("generate", TOO_LARGE, "--json").stdout)
    assert record["answer"] == [] and record["error"] == "OverBudget"


# ---- what is not there ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        *("check {0}.toml", "generate {0}.toml", "verify {0}.toml", "bench {0}.toml"),
        *("build {0}.toml", "build {0}.toml {0}.toml"),
        *("search run {0}.toml", "search report {0}.sqlite", "search report {0}.sqlite --json"),
        "search run fwd_fp16_d64_full_m64n64 --replay {0}.sqlite",
    ],
)
def test_a_file_that_is_not_there_has_one_exit_code(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # nor is a compiler, which is not looked for
    answer = fagen(*words.format(tmp_path / "none").split())
    assert answer.exit_code == 1
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith(str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_cannot_begin_leaves_no_file(tmp_path, monkeypatch):
    began = []

    def without_gpu(*_, **__):
        began.append(True)
        raise DeviceError("there is no Hopper GPU")

    monkeypatch.setattr(search, "LocalExecutor", without_gpu)
    monkeypatch.chdir(tmp_path)
    assert fagen("search", "run", SLUG, "--report", "page.html").exit_code == 5
    assert list(tmp_path.iterdir()) == []
    # and what is no place for results is refused before anything is started
    (tmp_path / "notes.sqlite").write_text("no database")
    for store_ in ("notes.sqlite", "none/search.sqlite"):
        assert fagen("search", "run", SLUG, "--store", store_).exit_code == 1
    assert began == [True]


def test_without_a_home_the_cache_has_no_place_and_that_is_said_in_a_line(monkeypatch):
    for name in ("FAGEN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    answers = [fagen("cache", "list"), fagen("build", SLUG)]
    for place, words in (("~/kernels", ("cache", "prune")), ("~no-such-user", ("cache", "list"))):
        monkeypatch.setenv("FAGEN_CACHE", place)
        answers.append(fagen(*words))
    for answer in answers:
        assert answer.exit_code == 1
        assert len(answer.stderr.splitlines()) == 1
        assert "a home that is not known: set " in answer.stderr
    record = json.loads(fagen("doctor", "--json").stdout)
    assert record["exit_code"] == 3
    findings = {finding["name"]: finding for finding in record["answer"]}
    assert "FAGEN_CACHE" in findings["cache folder"]["remedy"]
    assert findings["clang-format"]["ok"], "the rest is looked at all the same"


# ---- no room -------------------------------------------------------------------------------------


NO_ROOM = "standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "code", "stderr"),
    [
        ("--version > /dev/full", 1, NO_ROOM),
        (f"check {SLUG} --json > /dev/full", 1, NO_ROOM),
        (
            "check none.toml --json > /dev/full",
            1,
            "none.toml: cannot be read: No such file or directory\n",
        ),
        ("check - <&-", 1, "stdin: it is closed\n"),
        ("check - < /dev/zero", 1, "stdin: longer than 16,384 bytes; this is no schedule\n"),
        ("schema >&- 2>&-", 0, ""),
    ],
)
def test_streams_that_are_full_closed_or_never_end_are_said_in_a_line(words, code, stderr):
    shell = f"exec {sys.executable} {ROOT / 'cli.py'} {words}"
    answer = run(["sh", "-c", shell], env={"PYTHONUNBUFFERED": ""}, timeout=30)
    assert (answer.returncode, answer.stderr) == (code, stderr)


def test_a_disk_without_room_is_said_with_the_files_name(tmp_path):
    (tmp_path / f"{SLUG}.cu").symlink_to("/dev/full")
    answer = fagen("generate", SLUG, "-o", tmp_path)
    assert answer.exit_code == 1
    assert answer.stderr == f"{tmp_path / SLUG}.cu: No space left on device\n"
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '/dev/full'"):
        write_whole(Path("/dev/full"), "text")
    folder = tmp_path / "kernels"
    with (
        pytest.raises(BuildError, match=f"{folder}: No space"),
        store.writing(folder),
        Path("/dev/full").open("w") as file,
    ):
        file.write("text")


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["-1", "-0.001", "nan", "inf", "-inf", "1e999", "soon"])
def test_an_age_is_a_number_and_not_negative(number, tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    for words in (["cache", "prune", "--older-than"], ["search", "run", SLUG, "--minutes"]):
        answer = fagen(*words, number)
        assert answer.exit_code == 2
        assert words[-1] in answer.stderr
    assert fagen("cache", "prune", "--older-than", "0").exit_code == 0


# ---- time ----------------------------------------------------------------------------------------


def test_a_list_takes_half_a_cpu_second_and_2_ms_for_each_schedule():
    def lists():
        answer = run([sys.executable, ROOT / "cli.py", "list"])
        assert len(answer.stdout.splitlines()) == 1 + len(ALL)
        return answer.cpu_seconds

    allowed = 0.5 + 0.002 * len(ALL)
    assert least_seconds(lists, allowed) <= allowed


# ---- Ctrl-C -------------------------------------------------------------------------------------

# tests may run in the background of a shell, which has programs ignore Ctrl-C
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
INTERRUPTING = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["fagen", *{words!r}]
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "program"),
    [
        *((module, "cli.py") for module in ("fagen.paths", "click", "fagen.commandline", "sympy")),
        *((module, "fagen/__main__.py") for module in ("fagen.paths", "pydantic", "torch")),
    ],
)
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module, program):
    code = INTERRUPTING.format(name=module, words=["check", SLUG], program=str(ROOT / program))
    answer = run([sys.executable, "-c", HEARD + code], env={"PYTHONPATH": str(ROOT)})
    if module == "torch":  # which this command has no use for
        assert answer.returncode == 0 and "fits" in answer.stdout
    else:
        assert answer.returncode == 130 and not answer.stdout
    assert not answer.stderr.strip()


def test_who_imports_the_command_line_keeps_its_own_handler():
    code = "import signal, cli; print(signal.getsignal(2) is signal.default_int_handler)"
    answer = run([sys.executable, "-c", HEARD + code], env={"PYTHONPATH": str(ROOT)})
    assert answer.stdout == "True\n"


@pytest.mark.parametrize("where", [".", "..", "/", "", "folder", "fifo"])
def test_what_is_no_store_is_said_in_a_line(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    os.mkfifo("fifo")
    answer = fagen("search", "report", where)
    assert answer.exit_code == 1 and answer.stderr.count("\n") == 1
    if where != "fifo":  # as of a shell's <(…), which is waited for
        assert fagen("search", "run", where).exit_code == 1
    answer = fagen("search", "run", SLUG, "--replay", where, "--store", "new.sqlite")
    assert answer.exit_code == 1 and not Path("new.sqlite").exists()
