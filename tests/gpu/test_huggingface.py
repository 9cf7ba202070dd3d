"""fagen in models on a GPU: layers over tensors as a cache holds them, and tiny models whole."""

import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fagen import huggingface
from fagen.dispatch.select import serve
from fagen.huggingface import Functions, Mask, attend, mask_of
from fagen.huggingface.functions import Meaning, functions
from fagen.kinds.decode.oracle import attend as decoded
from fagen.kinds.forward.oracle import reference
from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.vocab import MASKS
from tests.gpu.helpers import graph_of, ints, waiting_for_nothing
from tests.gpu.test_masks_gpu import build_together
from tests.test_huggingface_models import (
    GENERATING,
    LOCAL,
    STATIC,
    as_near_as_eager,
    likeliest_tokens,
    with_windows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def causal(batch, head, query, key):
    return key <= query


mask = partial(
    mask_of, Functions({causal: Meaning(causal=True)}),
    batch_size=2, kv_length=90, mask_function=causal,
)  # fmt: skip


def layer_tensors(queries):
    """Query, key and value, heads before positions: (batch, heads, positions, head dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 64), (2, 2, 90, 64), (2, 2, 90, 64))
    return [torch.randn(shape, generator=generator).half().cuda() for shape in shapes]


@pytest.mark.parametrize("queries", [90, 40, 1])
def test_a_prompt_a_piece_of_one_and_a_token_are_attended_as_their_mask_says(queries):
    tensors = layer_tensors(queries)
    ones = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    given = mask(q_length=queries, q_offset=90 - queries, attention_mask=ones)
    assert given == Mask(True, queries, 90)
    out, _ = attend(nn.Module(), *tensors, given)
    exact, _ = reference(*(each.transpose(1, 2) for each in tensors), mask="causal", scale=1 / 8)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("queries", [90, 40, 1])
def test_padding_on_the_gpu_is_not_attended_to(queries):
    tensors = layer_tensors(queries)
    kept = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    kept[1, :3] = False
    with torch.no_grad():
        out, _ = attend(nn.Module(), *tensors, given_for(kept, queries))
    q, k, v = (each.transpose(1, 2) for each in tensors)
    exact, _ = decoded(q, k, v, mask=MASKS["causal"], scale=1 / 8, leftpad_k=ints(0, 3))
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


def given_for(kept, queries):
    return mask(q_length=queries, q_offset=90 - queries, attention_mask=kept, device="cuda")


@torch.no_grad()
def test_a_token_waits_for_nothing():
    tensors = layer_tensors(1)
    kept = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    place = torch.tensor(70, device="cuda")

    def token():
        bounds = mask(
            q_length=1, q_offset=place, attention_mask=kept, device="cuda",
            allow_is_causal_skip=False,
        )  # fmt: skip
        ours = attend(nn.Module(), *tensors, bounds)[0]
        return ours, attend(nn.Module(), *tensors, given_for(kept, 1))[0]

    token()
    with waiting_for_nothing():
        token()


@torch.no_grad()
def test_a_token_over_a_static_cache_is_captured_and_replayed_further_on():
    tensors = layer_tensors(1)
    kept = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    place = torch.tensor(70, device="cuda")

    def token():
        bounds = mask(q_length=1, q_offset=place, attention_mask=kept, device="cuda")
        return attend(nn.Module(), *tensors, bounds)[0]

    graph, out = graph_of(token)
    q, k, v = (each.transpose(1, 2) for each in tensors)
    for at in (5, 71, 89):
        place.fill_(at)
        kept[0, : at // 2] = False
        graph.replay()
        lengths = dict(seqused_k=ints(at + 1, at + 1), leftpad_k=ints(at // 2, 0))
        exact, _ = decoded(q, k, v, mask=MASKS["causal"], scale=1 / 8, **lengths)
        torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


HOLE = """
import torch
from functools import partial
from fagen.huggingface import Functions, mask_of
from fagen.huggingface.functions import Meaning
causal = lambda batch, head, query, key: key <= query
kept = torch.ones(2, 90, dtype=torch.bool, device="cuda")
kept[1, 3] = False
with torch.no_grad():
    mask_of(
        Functions({causal: Meaning(causal=True)}), batch_size=2, q_length=1, kv_length=90,
        q_offset=89, mask_function=causal, attention_mask=kept, device="cuda",
    )
torch.cuda.synchronize()
"""


def test_a_hole_that_no_host_sees_ends_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", HOLE], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0 and "device-side assert" in ended.stderr


def test_the_example_writes_the_same_tokens_as_torchs_attention(capsys):
    pytest.importorskip("transformers")
    example = runpy.run_path(str(locate("cli.py").parent / "examples" / "generate.py"))
    example["main"](
        shlex.split("--layers 2 --hidden 1024 --heads 8 --kv-heads 2 --length 700 --new 20")
    )
    print(capsys.readouterr().out)


@torch.no_grad()
@pytest.mark.parametrize("queries", [90, 40, 2, 1])
@pytest.mark.parametrize("kind", ["sliding_window", "chunked"])
def test_a_window_and_chunks_of_a_padded_batch_are_as_transformers_masks_say(kind, queries):
    masking = pytest.importorskip("transformers.masking_utils")
    tensors = layer_tensors(queries)
    kept = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    kept[1, :13] = False
    given = [16] if kind == "sliding_window" else [16, (~kept).sum(1)]
    function = getattr(masking, f"{kind}_causal_mask_function")(*given)
    asked = dict(
        batch_size=2, q_length=queries, kv_length=90, q_offset=90 - queries, local_size=16,
        mask_function=function, attention_mask=kept, device="cuda",
    )  # fmt: skip
    seen = masking.sdpa_mask(**asked, allow_is_causal_skip=False)
    out, _ = attend(nn.Module(), *tensors, mask_of(functions(masking), **asked))
    q, k, v = (x.double() for x in tensors)
    scores = (q @ k.repeat_interleave(2, 1).mT / 8).masked_fill(~seen, -torch.inf)
    exact = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    counts = seen[:, 0].any(-1)
    torch.testing.assert_close(out[counts].double(), exact[counts], rtol=2e-3, atol=2e-3)


# ---- whole models --------------------------------------------------------------------------------

# what their kernels compute: masks of prompts, with which scores and sinks
VARIANTS = [
    *((mask, *more) for mask in ("causal", "window") for more in (("plain", ""), ("softcap", ""))),
    *((mask, "plain", "fp16") for mask in ("causal", "window")),
    ("chunked", "plain", ""),
    ("full", "plain", ""),
]


@pytest.fixture(scope="module")
def of_models(hopper):
    """transformers knows fagen, and the kernels of the models below are compiled together."""
    pytest.importorskip("transformers")
    huggingface.register()
    card, sizes, served = torch.cuda.get_device_name(), Sizes(2, 4, 2, 300, 300), {}
    for mask_, score, sink in VARIANTS:
        of_mask = Problem("fp16", 64, 64, mask_, "fp16", "", 0, score=score, sink=sink)
        served[of_mask] = serve(of_mask, sizes, card)
        of_mask = replace(of_mask, lengths="varlen")
        served[of_mask] = serve(of_mask, sizes, card)
        if mask_ == "causal":
            of_mask = replace(of_mask, lengths="equal", kind="decode")
            served[of_mask] = serve(of_mask, replace(sizes, seqlen_q=1), card)
    build_together([one.schedule for one in served.values()])


@pytest.fixture
def batch(of_models):
    """Tokens, and masks of them by which side is padded."""
    ids = torch.randint(3, 97, (2, 300), generator=torch.Generator().manual_seed(0)).cuda()
    whole = torch.ones_like(ids)
    left, right = whole.clone(), whole.clone()
    left[0, :77], right[1, -41:] = 0, 0
    with torch.no_grad():
        yield ids, {"whole": whole, "left": left, "right": right, "both": left * right}


def larger(config):
    """A model of heads of 64 columns, with windows or chunks of 60 keys, ModernBERT's of 81."""
    of_heads = {} if LOCAL[config]["head_dim"] is None else {"head_dim": 64}
    sizes = dict(hidden_size=256, intermediate_size=384, max_position_embeddings=1_024)
    sizes |= dict(initializer_range=0.15)  # scores as large as of those of fewer columns
    return with_windows(LOCAL[config], 10) | sizes | of_heads


@pytest.mark.parametrize("config", LOCAL)
def test_models_are_as_near_to_fp32_as_eager_attention(batch, config):
    ids, masks = batch
    for given in masks.values():
        as_near_as_eager(config, larger(config), ids, given)


@pytest.mark.parametrize("config", GENERATING)
def test_models_generate_the_likeliest_tokens(batch, config):
    ids, masks = batch
    for how in ({}, {"prefill_chunk_size": 70}, STATIC):  # Llama 4 may have none of the last
        likeliest_tokens(config, larger(config), ids, masks["left"], how)
