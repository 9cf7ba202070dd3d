"""What a recording is to every public call alike: what it costs, what it reads, what is traced."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.problem import Problem, Sizes, VarlenTotals
from fagen.runtime.attention import ATTENTION
from fagen.runtime.decode import DECODING
from fagen.runtime.varlen import VARLEN
from fagen.search.recording import read_recording
from tests import tensors
from tests.clock import seconds_of_recording
from tests.fresh import without_kernels

OFFSETS = torch.tensor([0, 30, 35, 35, 60], dtype=torch.int32)
USED = torch.tensor([3, 90], dtype=torch.int32)
normal = partial(tensors.normal, dtype=torch.float16)


@dataclass(frozen=True)
class Public:
    """A public call on some tensors: its door, how it is prepared, and what is recorded of it."""

    door: Any
    prepare: Callable[[], object]
    call: Callable[..., Any]  # of q, k and lengths
    tensors: tuple[Tensor, Tensor, Tensor | None]
    problem: Problem
    sizes: Sizes


CALLS = {
    "attention": Public(
        ATTENTION,
        partial(fagen.prepare, dtype="fp16", head_dim=64, causal=True),
        lambda q, k, _: fagen.attention(q, k, k, causal=True),
        (normal(2, 70, 4, 64), normal(2, 200, 2, 64), None),
        Problem("fp16", 64, 64, "causal", None, "", 0),
        Sizes(2, 4, 2, 70, 200),
    ),
    "varlen": Public(
        VARLEN,
        partial(fagen.prepare_varlen, dtype="fp16", head_dim=64, causal=True),
        lambda q, k, at: fagen.attention_varlen(
            q, k, k, at, causal=True, max_seqlen_q=30, max_seqlen_k=30
        ),
        (normal(60, 4, 64), normal(60, 2, 64), OFFSETS),
        Problem("fp16", 64, 64, "causal", None, "", 0, lengths="varlen"),
        VarlenTotals(4, 4, 2, 30, 30, 60, 60),
    ),
    "decode": Public(
        DECODING,
        partial(fagen.prepare_decode, dtype="fp16", head_dim=64, heads=8, kv_heads=2, batch=2),
        lambda q, k, used: fagen.attention_decode(q, k, k, seqused_k=used),
        (normal(2, 1, 8, 64), normal(2, 100, 2, 64), USED),
        Problem("fp16", 64, 64, "causal", None, "", 0, "decode"),
        Sizes(2, 8, 2, 1, 100),
    ),
}


@pytest.fixture(params=CALLS)
def public(request) -> Public:
    return CALLS[request.param]


def test_recording_costs_a_call_at_most_a_microsecond(public, tmp_path, monkeypatch):
    without_kernels(monkeypatch)
    with fagen.recording(tmp_path / "mine.toml"):
        call = partial(public.call, *public.tensors)
        # what counts lines, if anything does, takes as long as the call
        assert seconds_of_recording(public.door, call) <= 1e-6 or sys.gettrace()
    ((problem, counts),) = read_recording(tmp_path / "mine.toml").items()
    assert problem == public.problem and counts.keys() == {public.sizes}
    assert counts.popitem()[1] % 30_000 == 0


def test_what_is_compiled_runs_as_before_and_is_not_counted(public, tmp_path, fresh_dynamo):
    def model(q: Tensor, k: Tensor, lengths: Tensor | None) -> Tensor:
        out = public.call(q * 2, k, lengths)
        assert isinstance(out, Tensor)
        return out

    public.prepare()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    expected = compiled(*public.tensors)
    warned = pytest.warns(UserWarning, match=r"not recorded: \d+ calls traced by torch\.compile")
    with warned, fagen.recording(tmp_path / "mine.toml"):
        assert torch.equal(compiled(*public.tensors), expected)
        model(*public.tensors)
    assert torch.equal(compiled(*public.tensors), expected)
    assert read_recording(tmp_path / "mine.toml") == {public.problem: {public.sizes: 1}}


VARIANTS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"causal": True, "window": 5}, {"mask": "window"}),
    ({"causal": True, "softcap": 5.0}, {"mask": "causal", "score": "softcap"}),
    ({"mask": "chunked", "chunk": 5, "sinks": torch.bfloat16}, {"mask": "chunked", "sink": "bf16"}),
    ({"causal": True, "sinks": torch.float32}, {"mask": "causal", "sink": "fp32"}),
]


@pytest.mark.parametrize(("how", "said"), VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_masks_scores_and_sinks_are_recorded_by_their_names(how, said, tmp_path):
    q, k = (normal(2, 9, heads, 64) for heads in (4, 2))
    if "sinks" in how:
        how = {**how, "sinks": torch.zeros(4, dtype=how["sinks"])}
    for _ in range(2):  # which are added up
        with fagen.recording(tmp_path / "mine.toml"):
            fagen.attention(q, k, k, **how)
            fagen.attention_decode(q[:, :2], k, k, **how)
    problem = Problem("fp16", 64, 64, v_layout="", scale_rows=0, **said)
    sizes = Sizes(2, 4, 2, 9, 9)
    assert read_recording(tmp_path / "mine.toml") == {
        problem: {sizes: 2},
        replace(problem, kind="decode"): {replace(sizes, seqlen_q=2): 2},
    }


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_texts_are_told_of_and_left_out(tmp_path):
    q = normal(1, 9, 2, 64)
    for how, why in (
        ({"mask": "k_idx <= 2 * q_pos"}, "under a mask by its text, which tables do not know"),
        ({"score": "2.0 * score"}, "with a score by its text, which tables do not know"),
    ):
        with (
            pytest.warns(UserWarning, match=f"not recorded: 1 calls {why}"),
            fagen.recording(tmp_path / "mine.toml"),
        ):
            fagen.attention(q, q, q, **how)


def test_lengths_that_cannot_be_read_are_recorded(public, tmp_path, monkeypatch):
    without_kernels(monkeypatch)
    unread = (None if x is None else x.to("meta") for x in public.tensors)
    with fagen.recording(tmp_path / "mine.toml"):
        public.call(*unread)
    assert read_recording(tmp_path / "mine.toml") == {public.problem: {public.sizes: 1}}
