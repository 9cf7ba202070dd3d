"""The example that writes by fagen's attention and by torch's: the same tokens, ties aside."""

import runpy
import shlex
from importlib.util import find_spec

import pytest
import torch

from fagen.huggingface import layer
from fagen.paths import locate

pytestmark = [
    pytest.mark.skipif(
        not find_spec("transformers"),
        reason="transformers is not installed: python -m pip install 'transformers>=5.4'",
    ),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

SMALL = shlex.split(
    "--device cpu --layers 1 --hidden 64 --heads 2 --kv-heads 1 --vocabulary 97 --length 16 "
    "--new 4 --batch 3"
)


@pytest.fixture
def example():
    return runpy.run_path(str(locate("cli.py").parent / "examples" / "generate.py"))


def test_tokens_are_the_same_however_prompts_are_padded_and_cached(example, capsys):
    example["main"](SMALL)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["padding", "cache", "same", "ties"]
    rows = [line.split() for line in lines]
    assert [line[:2] for line in rows] == [
        *(["none", "dynamic"], ["left", "dynamic"], ["none", "static"], ["left", "static"]),
        ["right", "none"],
    ]
    assert all(int(same) + int(ties) == 3 and int(ties) < 3 for _, _, same, ties, *_ in rows)
    assert all(len(line) == 6 for line in rows[:4])


def test_padding_that_is_attended_to_is_told(example, monkeypatch, capsys):
    real = layer.attention_cache
    monkeypatch.setattr(
        layer,
        "attention_cache",
        lambda *args, leftpad_k, **named: real(*args, leftpad_k=None, **named),
    )
    with pytest.raises(SystemExit, match="differ without a tie"):
        example["main"](SMALL)


def test_a_sequence_is_compared_up_to_its_first_tie(example):
    logits = torch.tensor([[[0.0, 1.0, 0.5], [0.3, 0.31, 0.0], [0.0, 0.0, 1.0]]]).repeat(3, 1, 1)
    theirs = logits.argmax(-1)
    ours = theirs.clone()
    ours[1] = torch.tensor([1, 0, 0])  # a tie, and what comes of it
    ours[2] = torch.tensor([2, 1, 2])

    def off(by):
        return lambda row, new: logits[row, len(new)] + torch.tensor([by, 0.0, 0.0])

    assert example["compared"]((ours, logits), (theirs, logits), off(0.02)) == (1, 1)
    assert example["compared"]((ours, logits), (theirs, logits), off(-0.004)) == (0, 2)
