"""The example that trains a model by fagen's attention and by torch's: both learn the same."""

import re
import runpy
import shlex

import pytest

from fagen.paths import locate

SMALL = shlex.split(
    "--device cpu --steps 8 --layers 1 --hidden 64 --heads 2 --kv-heads 1 --length 24 --batch 4 "
    "--rate 0.01"
)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_two_runs_from_one_seed_have_the_same_losses(tmp_path, capsys):
    example = runpy.run_path(str(locate("cli.py").parent / "examples" / "train.py"))
    example["main"]([*SMALL, "--out", str(tmp_path / "curves.svg")])
    message = capsys.readouterr().out
    losses = [list(map(float, line.split())) for line in message.splitlines()[1:9]]
    assert len(losses) == 8 and losses[-1][1] < losses[0][1] - 0.02  # it learns
    assert float(re.search(r"losses of fagen and torch are ([\d.]+) apart", message)[1]) < 0.02
    assert "<svg" in (tmp_path / "curves.svg").read_text()
