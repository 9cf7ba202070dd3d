"""The script that tunes fagen for a model: what it records of it, and all its steps on a CPU."""

import json
import shlex
import sys
import tomllib

import pytest

from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.search.recording import read_recording
from tests.recordings import record

SCRIPT = locate("cli.py").parent / "benchmarks" / "recorded_model.py"
SMALL = shlex.split(
    "--layers 3 --hidden 64 --heads 4 --kv-heads 2 --head-dim 32 --mix 2x40:2,1x70 --new-tokens 1 "
    "--device cpu --rounds 2"
)


def test_every_layer_and_batch_of_the_model_is_recorded(tmp_path, script):
    assert (
        script("recorded_model").main([*SMALL, "--phase", "record", "--keep", str(tmp_path)]) == 0
    )
    counts = {(2, 40, 40): 6, (2, 1, 41): 6, (1, 70, 70): 3, (1, 1, 71): 3}
    sizes = {Sizes(b, 4, 2, q, k): count for (b, q, k), count in counts.items()}
    problem = Problem("bf16", 32, 32, "causal", None, "", 0)
    assert read_recording(tmp_path / "mine.toml") == {problem: sizes}


@pytest.mark.parametrize("mix", ["", "8", "8x", "0x5", "2x3:0", "a"])
def test_what_is_no_mix_is_refused(mix, script, capsys):
    with pytest.raises(SystemExit):
        script("recorded_model").main(["--mix", mix])
    assert "is no mix, as 8x512:6,1x777 is one" in capsys.readouterr().err


@pytest.mark.long
def test_its_steps_end_with_the_kernels_that_the_search_has_found(tmp_path):
    def ran(*words):
        root = {"PYTHONPATH": str(SCRIPT.parent.parent)}
        ended = run([sys.executable, SCRIPT, *SMALL, "--keep", tmp_path, *words], env=root)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    ran("--phase", "record")
    recorded = tmp_path / "mine.toml"
    store = record(tmp_path / "recorded.sqlite", kernels=40, text=recorded.read_text())
    recorded.unlink()
    printed = ran("--replay", store)
    found = json.loads((tmp_path / "results.json").read_text())
    table = tomllib.loads((tmp_path / "fagen" / "dispatch.toml").read_text())["kernel"]
    assert {shape["after"] for shape in found["shapes"]} == {row["slug"] for row in table}
    assert {shape["after"] for shape in found["shapes"]}.isdisjoint(
        shape["before"] for shape in found["shapes"]
    )
    assert len(found["shapes"]) == 4 and found["largest_difference"] < 0.1
    for said in ("tokens/s", "after ÷ before", "2 x 1/41", table[0]["slug"]):
        assert said in printed
