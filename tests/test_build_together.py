"""Many kernels at once: one ninja over all processors, and what becomes of those that fail."""

import json
import sys
from pathlib import Path

import pytest

from fagen import build, flow
from fagen.build import together
from fagen.errors import BuildError, FagenError, RefusedBuild, ToolchainError
from tests.cli_helpers import QUANTIZER, SLUG, fagen

# Stands in for `fagen build --json SLUG`: the slug says what becomes of it.
CHILD = """
import json, os, pathlib, sys, time
slug, folder = sys.argv[-1], pathlib.Path({folder!r})
(folder / slug).write_text(" ".join(sys.argv[1:-1]) + " in " + os.getcwd())
if "waits" in slug:
    until = time.monotonic() + 20
    while sum("waits" in name for name in os.listdir(folder)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    print("[]" if time.monotonic() < until else "{{}}")
elif "fails" in slug:
    error = {{"error": slug.partition("_")[2], "exit_code": 3 if "Missing" in slug else 4}}
    print(json.dumps({{**error, "message": slug + " is wrong"}}))
    print(slug + " is wrong\\nand more lines", file=sys.stderr)
    sys.exit(4)
elif "dies" in slug:
    os.kill(os.getpid(), 9)
else:
    print("[]")
"""


@pytest.fixture
def started(tmp_path, monkeypatch) -> Path:
    """A folder with a file for each kernel whose build was begun: options, and where."""
    folder = tmp_path / "a 'folder'\n of $HOME"
    folder.mkdir()
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(folder=str(folder)))
    words = (sys.executable, str(script))
    monkeypatch.setattr(together, "own_program", lambda: (words, {}))
    monkeypatch.chdir(folder)
    return folder


def test_kernels_are_built_at_the_same_time(started, monkeypatch):
    monkeypatch.setattr(together.os, "sched_getaffinity", lambda _: {0, 1})
    assert build.build_together(["one_waits", "two_waits"]) == {}


def test_each_kernel_is_built_as_it_would_be_alone(started):
    for binding, option in ((None, ""), (True, " --binding"), (False, " --no-binding")):
        build.build_together(["kernel"], binding=binding)
        assert (started / "kernel").read_text() == f"build --json{option} in {started}"


def test_one_that_fails_is_named_and_the_others_are_built(started, capfd):
    slugs = ["fails_BuildError", "a", "fails_RefusedBuild", "fails_MissingError", "dies", "b"]
    failed = build.build_together(slugs)
    assert {path.name for path in started.iterdir()} == set(slugs)
    assert {slug: (type(error), error.exit_code) for slug, error in failed.items()} == {
        "fails_BuildError": (BuildError, 4),
        "fails_RefusedBuild": (RefusedBuild, 4),
        "fails_MissingError": (FagenError, ToolchainError.exit_code),
        "dies": (BuildError, 4),
    }
    assert str(failed["fails_BuildError"]) == "fails_BuildError is wrong"
    assert str(failed["dies"]).startswith("dies: the process that was to build it gave no answer")
    out, err = capfd.readouterr()
    assert out == ""
    progress = err.splitlines()
    assert [line.partition("/")[0] for line in progress if line.startswith("[")] == [
        f"[{number}" for number in range(1, 7)
    ]
    assert "fails_BuildError is wrong" in progress and "and more lines" not in err
    assert "child.py" not in err, "no command is shown"


def test_fagen_itself_is_what_builds_each_kernel(built, tmp_path, monkeypatch):
    built(SLUG)
    (tmp_path / "fagen.py").write_text("raise SystemExit('another fagen')")
    monkeypatch.chdir(tmp_path)
    too_large = "fwd_bf16_d256_full_m128n96"
    failed = build.build_together([SLUG, too_large])
    assert list(failed) == [too_large]
    assert failed[too_large].exit_code == 1 and "does not fit" in str(failed[too_large])


def test_what_is_in_the_cache_is_taken_and_only_the_rest_built(built, tmp_path, monkeypatch):
    binary = built(SLUG).binary
    others = ["fwd_fp16_d120v24_full_m64n64", "fwd_fp16_d120v24_full_m64n80"]  # that none builds
    builds = []

    def failing(slugs, *, binding):
        builds.append((slugs, binding))
        return {slug: BuildError(f"{slug} spills") for slug in slugs}

    monkeypatch.setattr(flow, "build_together", failing)
    words = ["build", "--no-binding", "--json", others[0], SLUG, tmp_path / "none.toml", others[1]]
    answer = fagen(*words)
    record = json.loads(answer.stdout)
    assert builds == [(others, False)]
    assert [kernel["library"] for kernel in record["answer"]] == [str(binary.library)]
    assert record["answer"][0]["cached"] is True
    assert [failure["schedule"] for failure in record["failed"]] == [
        *(others[0], str(tmp_path / "none.toml"), others[1])
    ]
    assert answer.exit_code == 4


@pytest.mark.long
def test_several_kernels_are_built_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    slugs = [QUANTIZER, "comb_fp32_d128"]
    for cached in (False, True):
        kernels = json.loads(fagen("build", "--no-binding", "--json", *slugs).stdout)
        assert [kernel["slug"] for kernel in kernels] == slugs
        assert [kernel["cached"] for kernel in kernels] == [cached, cached]
