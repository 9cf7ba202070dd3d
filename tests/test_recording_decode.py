"""What fagen.recording writes of decoding, where the host knows what room a cache has."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.flash_attn_interface import flash_attn_with_kvcache
from fagen.problem import Problem, Sizes
from fagen.runtime.decode import DECODING
from fagen.search.files import read_spaces
from fagen.search.recording import read_recording
from tests import cli_helpers, tensors

ONE = Problem("fp16", 64, 64, "causal", None, "", 0, "decode")
FULL = Problem("fp16", 64, 64, "full", None, "", 0, "decode")
USED = torch.tensor([3, 90], dtype=torch.int32)


def normal(*shape: int) -> Tensor:
    """Numbers in fp16."""
    return tensors.normal(*shape, dtype=torch.float16)


def call(queries: int = 1, keys: int = 100, **said: Any) -> Any:
    k = normal(2, keys, 2, 64)
    return fagen.attention_decode(normal(2, queries, 8, 64), k, k, **said)


def test_calls_of_decoding_are_written_beside_others_and_added_to(tmp_path):
    path, q = tmp_path / "mine.toml", normal(1, 60, 4, 64)
    for times in (1, 2):
        with fagen.recording(path):
            for _ in range(2):
                call(seqused_k=USED)
            call(causal=False)  # one query sees the same keys
            call(4, causal=False)
            fagen.attention(q, q, q)
        assert read_recording(path) == {
            ONE: {Sizes(2, 8, 2, 1, 100): 3 * times},
            FULL: {Sizes(2, 8, 2, 4, 100): times},
            Problem("fp16", 64, 64, "full", None, "", 0): {Sizes(1, 4, 4, 60, 60): times},
        }
    call()  # which nobody records
    assert DECODING.note is None
    names = [space.targets()[0].name for space in read_spaces(path)]
    assert names == ["dec_fp16_d64_causal", "dec_fp16_d64_full", "fp16_d64_full"]
    answer = cli_helpers.fagen("search", path, "--dry-run")
    assert answer.exit_code == 0, answer.output
    assert "dec_fp16_d64_causal: " in answer.output and "dec_fp16_d64_full_r8" in answer.output


def test_a_cache_of_as_many_keys_as_queries_and_heads_says_all_sizes(tmp_path):
    path, q = tmp_path / "mine.toml", normal(2, 4, 2, 64)
    with fagen.recording(path):
        fagen.attention_decode(q, q, q)
    assert read_recording(path) == {ONE: {Sizes(2, 2, 2, 4, 4): 1}}


def test_a_cache_read_by_flash_attentions_function_is_recorded(tmp_path):
    path, cache = tmp_path / "mine.toml", normal(2, 100, 2, 64)
    with fagen.recording(path):
        flash_attn_with_kvcache(normal(2, 1, 8, 64), cache, cache, cache_seqlens=USED)
    assert read_recording(path) == {ONE: {Sizes(2, 8, 2, 1, 100): 1}}


def test_what_cannot_be_searched_is_left_out_in_words(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.warns(UserWarning) as said, fagen.recording(path):
        call(reference=torch.zeros(8))
        call(0)
        call()
    told = [str(one.message) for one in said]
    assert any("1 calls with a reference, for which tables have no" in one for one in told), told
    assert any("1 calls of no rows or no keys" in one for one in told), told
    assert read_recording(path) == {ONE: {Sizes(2, 8, 2, 1, 100): 1}}
