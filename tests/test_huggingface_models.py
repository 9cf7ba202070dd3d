"""fagen in models of transformers, tiny ones with random weights: on the CPU, so emulated."""

from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import huggingface
from fagen.huggingface.functions import Meaning
from tests.op_helpers import refusal

pytestmark = [
    pytest.mark.skipif(
        not find_spec("transformers"),
        reason="transformers is not installed: python -m pip install 'transformers>=5.4'",
    ),
    pytest.mark.filterwarnings("ignore::fagen.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
GPT2 = dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256)
BERT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}

IDS = torch.randint(3, 97, (2, 23), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(IDS)


@pytest.fixture(scope="module", autouse=True)
def quiet_registration():
    from transformers.utils import logging

    logging.set_verbosity_error()  # of generate()'s settings, which tiny models have none of
    huggingface.register()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model(
    config: str, implementation: str = "fagen", dtype: torch.dtype = torch.float16, **more: Any
) -> Any:
    """A model with the same random weights, whichever implementation it has, rounded to dtype."""
    import transformers

    kind = (
        transformers.AutoModelForMaskedLM if "Bert" in config else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(7)
    sizes = {"GPT2Config": GPT2, "BertConfig": BERT}.get(config, SIZES)
    form = getattr(transformers, config)(**sizes | more)
    weights = kind.from_config(form, dtype=torch.float32).state_dict()
    model = kind.from_config(deepcopy(form), attn_implementation=implementation, dtype=dtype).eval()
    model.load_state_dict({name: weight.half() for name, weight in weights.items()})
    return model


def pair(config: str, **more: Any) -> tuple[Any, Any]:
    """The model with transformers' own attention, and with fagen's."""
    return model(config, "eager", **more), model(config, **more)


def all_same(call: Callable[[Any], Tensor], models: tuple[Any, Any]) -> bool:
    theirs, ours = map(call, models)
    return torch.equal(theirs, ours)


MODELS = [
    ("LlamaConfig", {}),
    ("GPT2Config", {}),
    ("Gemma3TextConfig", dict(head_dim=32, sliding_window=23)),
    ("BertConfig", {}),
    pytest.param("Qwen2Config", {}, marks=pytest.mark.long),
    pytest.param("Qwen2MoeConfig", {}, marks=pytest.mark.long),  # masks a window that it has not
    pytest.param("Qwen3Config", dict(head_dim=32), marks=pytest.mark.long),
    pytest.param("GemmaConfig", dict(head_dim=32), marks=pytest.mark.long),
    pytest.param("CohereConfig", dict(head_dim=32), marks=pytest.mark.long),  # Command R
]


@pytest.mark.parametrize(("config", "more"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_are_as_near_to_fp32_as_those_of_eager_attention(config, more, dtype):
    truth = model(config, "eager", torch.float32, **more)(IDS).logits
    eager, ours = (
        (
            model(config, implementation, dtype, **more)(IDS, attention_mask=mask).logits - truth
        ).abs()
        for implementation, mask in (("eager", None), ("fagen", ONES))
    )
    assert ours.max() <= 2 * eager.max() + 1e-3
    assert ours.mean() <= 1.5 * eager.mean()


@pytest.mark.parametrize("config", ["LlamaConfig", "GPT2Config"])
def test_a_sequence_in_pieces_is_the_same_as_in_one(config):
    eager, ours = pair(config)
    whole, cache, pieces = eager(IDS).logits, None, []
    for start, end in ((0, 9), (9, 20), (20, 21), (21, 22), (22, 23)):
        output = ours(IDS[:, start:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=4e-3, rtol=0)


def test_a_saved_model_is_loaded_with_fagen(tmp_path):
    from transformers import AutoModelForCausalLM

    eager = model("LlamaConfig", "eager")
    eager.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="fagen", dtype=torch.float16
    )
    torch.testing.assert_close(loaded(IDS).logits, eager(IDS).logits, atol=4e-3, rtol=0)
    switched = deepcopy(eager)
    switched.set_attn_implementation("fagen")
    assert torch.equal(switched(IDS).logits, loaded(IDS).logits)


def padded(*places: tuple[int, slice]) -> Tensor:
    mask = ONES.clone()
    for place in places:
        mask[place] = 0
    return mask


LEFT, RIGHT = padded((0, slice(0, 7))), padded((1, slice(18, None)))


@pytest.mark.parametrize("config", ["LlamaConfig", "GPT2Config", "BertConfig"])
@pytest.mark.parametrize("mask", [LEFT, RIGHT, LEFT * RIGHT], ids=["left", "right", "both"])
def test_padding_is_not_attended_to(config, mask):
    where = (mask.cumsum(1) - 1).clamp(min=0)
    options = dict(attention_mask=mask, position_ids=where)
    truth = model(config, "eager", torch.float32)(IDS, **options).logits
    eager, ours = (
        (model(config, implementation)(IDS, **options).logits - truth)[mask.bool()].abs()
        for implementation in ("eager", "fagen")
    )
    assert ours.max() <= 2 * eager.max() + 1e-3 and ours.mean() <= 1.5 * eager.mean()
    # and it would be seen if it were
    whole = model(config, "eager", torch.float32)(IDS, position_ids=where).logits
    if config == "BertConfig" or mask is not RIGHT:
        assert (whole - truth)[mask.bool()].abs().max() > 4 * ours.max()


STATIC = {"cache_implementation": "static"}


def long(*args: Any) -> Any:
    return pytest.param(*args, marks=pytest.mark.long)


# ---- windows, chunks, caps, sinks ---------------------------------------------------------------

# Weights are large, so that a key that is seen or not shows. Of two experts the better one may be
# another in fp16, and of such a token all else: Llama 4, which asks one, has one.
APART: dict[str, Any] = dict(head_dim=32, initializer_range=0.3)
HALF: dict[str, Any] = APART | dict(layer_types=["sliding_attention", "full_attention"])
SPECIAL = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}

LOCAL = {
    "MistralConfig": APART | dict(sliding_window=6),  # as of version 0.1
    "Gemma2Config": HALF
    | dict(sliding_window=6, query_pre_attn_scalar=1, attn_logit_softcapping=2.0),
    "Gemma3TextConfig": HALF | dict(sliding_window=6),
    "Qwen3Config": HALF | dict(sliding_window=6, use_sliding_window=True),
    "Cohere2Config": HALF | dict(sliding_window=6),  # Command R7B
    "GptOssConfig": HALF | dict(sliding_window=6, num_local_experts=2, num_experts_per_tok=2),
    "ModernBertConfig": HALF | SPECIAL | dict(local_attention=8, head_dim=None),
    "Llama4TextConfig": APART
    | dict(
        num_local_experts=1,
        num_experts_per_tok=1,
        attention_chunk_size=6,
        intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention"],
    ),
}
GENERATING = [config for config in LOCAL if "Bert" not in config]
WINDOWS = "sliding_window", "local_attention", "attention_chunk_size"


def with_windows(more: dict[str, Any], times: int) -> dict[str, Any]:
    """The same with windows, or chunks, so many times as wide."""
    return more | {key: times * more[key] for key in WINDOWS if key in more}


@pytest.mark.parametrize("config", LOCAL)
@pytest.mark.parametrize(
    "mask", [ONES, LEFT, RIGHT, long(LEFT * RIGHT)], ids=["whole", "left", "right", "both"]
)
def test_a_model_with_windows_or_chunks_is_as_near_to_fp32_as_eager_attention(config, mask):
    as_near_as_eager(config, LOCAL[config], IDS, mask)


def as_near_as_eager(config: str, more: dict[str, Any], ids: Tensor, mask: Tensor) -> None:
    """Hold logits in fp16 to those of fp32, beside eager's; a window that hides nothing would show.

    Wherever `ids` are.
    """
    kept = mask.bool()
    options = dict(attention_mask=mask)
    if config != "ModernBertConfig":  # which counts positions itself
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)

    def logits(implementation: str, dtype: torch.dtype, more: dict[str, Any] = more) -> Tensor:
        network = model(config, implementation, dtype, **more).to(ids.device)
        found: Tensor = network(ids, **options).logits[kept]
        return found

    truth = logits("eager", torch.float32)
    wide = logits("eager", torch.float32, with_windows(more, 10))
    eager, ours = ((logits(name, torch.float16) - truth).abs() for name in ("eager", "fagen"))
    assert ours.max() <= 2 * eager.max() + 1e-3 and ours.mean() <= 1.5 * eager.mean()
    assert (wide - truth).abs().max() > 16 * ours.max()  # what is hidden is not seen


@pytest.mark.parametrize("how", [{}, STATIC, {"prefill_chunk_size": 8}], ids=str)
@pytest.mark.parametrize("mask", [long(ONES), LEFT], ids=["whole", "left"])
@pytest.mark.parametrize("config", GENERATING)
def test_models_with_windows_or_chunks_generate_the_likeliest_tokens(config, mask, how):
    likeliest_tokens(config, LOCAL[config], IDS, mask, how)


def likeliest_tokens(
    config: str, more: dict[str, Any], ids: Tensor, mask: Tensor, how: dict[str, Any]
) -> None:
    """Hold tokens to the largest logits in fp32, of what stands before them; nearly so will do.

    That is by as much as two of eager's logits in fp16 may err, and ours twice as much as these:
    which token is first among equals, rounding says.
    """
    if (config, how) == ("Llama4TextConfig", STATIC) and not has_images_in_chunks():
        pytest.skip("this transformers makes no chunks over a static cache, eager or not")
    ours, truth, eager = (
        model(config, implementation, dtype, **more).to(ids.device)
        for implementation, dtype in (
            ("fagen", torch.float16),
            ("eager", torch.float32),
            ("eager", torch.float16),
        )
    )
    options = dict(attention_mask=mask, max_new_tokens=9, do_sample=False) | how
    options["disable_compile"] = True  # which on a GPU takes half a minute
    tokens = ours.generate(ids, **options)[:, ids.shape[1] :]
    assert tokens.shape[1] == 9 or (tokens == ours.generation_config.eos_token_id).any()
    ids, mask = (torch.cat((x, y), 1)[:, :-1] for x, y in ((ids, tokens), (mask, tokens * 0 + 1)))
    forced = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    new = tokens.shape[1]
    logits, rounded = (network(ids, **forced).logits[:, -new:] for network in (truth, eager))
    error = (logits - rounded).abs().max()
    behind = logits.max(-1).values - logits.gather(-1, tokens[..., None])[..., 0]
    assert behind.max() <= 4 * error + 1e-3
    assert error < logits.std() / 16  # else anything would do


def test_the_mask_functions_of_this_transformers_are_known():
    from transformers import masking_utils as masks

    known = huggingface.functions(masks)
    assert None not in (known.both, known.either) and all(code for code, _ in known.made)
    numbers = torch.zeros(2, 9)
    packed = masks.packed_sequence_mask_function(numbers)
    for function, meaning in (
        (masks.causal_mask_function, Meaning(causal=True)),
        (masks.bidirectional_mask_function, Meaning()),
        (masks.sliding_window_causal_mask_function(7), Meaning(True, 6)),
        (masks.sliding_window_bidirectional_mask_function(7), Meaning(False, 7, 7)),
        (masks.chunked_causal_mask_function(7, numbers), Meaning(True, chunk=7)),
        (masks.and_masks(masks.causal_mask_function, packed), Meaning(True)),
        (masks.or_masks(masks.causal_mask_function, packed), "or_masks"),
        (masks.padding_mask_function(numbers), "padding_mask_function"),
        (masks.add_offsets_to_mask_function(packed, 1, 1), "add_offsets_to_mask_function"),
    ):
        assert known.read(function) == meaning
    read = known.read(masks.and_masks(masks.causal_mask_function, packed))
    assert isinstance(read, Meaning) and read.packed is numbers


def has_images_in_chunks() -> bool:
    """Whether transformers makes chunks as its own generate() asks for them; 5.17 does not."""
    from transformers.masking_utils import create_chunked_causal_mask

    return "block_sequence_ids" in signature(create_chunked_causal_mask).parameters


@pytest.mark.parametrize("mask", [ONES, LEFT], ids=["whole", "left"])
def test_tokens_of_an_image_see_each_other(mask):
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    if not hasattr(gemma, "create_masks_for_vision_model"):
        pytest.skip("this transformers puts masks of images together otherwise")
    images = torch.full((2, 23), -1)
    images[0, 9:14], images[0, 14:19], images[1, 2:11] = 0, 1, 0

    def logits(implementation, dtype=torch.float16, blocks=images):
        network = model("Gemma3TextConfig", implementation, dtype, **LOCAL["Gemma3TextConfig"])
        masks = gemma.create_masks_for_vision_model(
            network.config, network.get_input_embeddings()(IDS), mask, None, None, blocks
        )
        return network(IDS, attention_mask=masks, use_cache=False).logits[mask.bool()]

    truth = logits("eager", torch.float32)
    eager, ours = ((logits(name) - truth).abs() for name in ("eager", "fagen"))
    assert ours.max() <= 2 * eager.max() + 1e-3 and ours.mean() <= 1.5 * eager.mean()
    none = logits("eager", torch.float32, torch.full_like(images, -1))
    assert (none - truth).abs().max() > 16 * ours.max()


@pytest.mark.parametrize(
    "config", ["ModernBertConfig", long("MistralConfig"), long("Llama4TextConfig")]
)
def test_a_traced_model_with_windows_or_chunks_computes_the_same(config, fresh_dynamo):
    ours = model(config, **LOCAL[config])
    compiled = torch.compile(ours, backend="eager")
    for kept in (ONES, LEFT):
        expected = ours(IDS, attention_mask=kept).logits[kept.bool()]
        logits = compiled(IDS, attention_mask=kept).logits[kept.bool()]
        torch.testing.assert_close(logits, expected, atol=4e-3, rtol=0)


# ---- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "config", "more"),
    [
        (ONES, "LlamaConfig", {}),
        (LEFT, "LlamaConfig", {}),
        (LEFT, "Qwen2Config", {}),
        (ONES, "LlamaConfig", STATIC),
        (LEFT, "LlamaConfig", STATIC),
        (LEFT, "LlamaConfig", STATIC | {"max_new_tokens": 1}),
        (LEFT, "Qwen2Config", STATIC),
        long(ONES[:1], "LlamaConfig", {"prompt_lookup_num_tokens": 3}),  # for one row alone
        *(
            long(mask, config, options)
            for mask, config in (
                (ONES, "LlamaConfig"),
                (LEFT, "LlamaConfig"),
                (LEFT, "Qwen2Config"),
            )
            for options in ({"num_beams": 3}, {"prefill_chunk_size": 8})
        ),
        *(
            long(LEFT, config, STATIC | {"prefill_chunk_size": 8})
            for config in ("LlamaConfig", "Qwen2Config")
        ),
    ],
)
def test_models_generate_the_same_tokens_also_of_prompts_padded_on_the_left(mask, config, more):
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False) | more
    assert all_same(lambda model: model.generate(IDS[: len(mask)], **options), pair(config))


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_a_decoder_reads_what_an_encoder_made_of_a_padded_batch(mask):
    from transformers import BartConfig, BartForConditionalGeneration

    each_has = {"layers": 1, "attention_heads": 4, "ffn_dim": 96}
    sizes = {f"{end}_{name}": n for end in ("encoder", "decoder") for name, n in each_has.items()}

    def bart(implementation):
        torch.manual_seed(1)
        config = BartConfig(
            vocab_size=97, d_model=64, max_position_embeddings=64, init_std=0.2, **sizes
        )
        network = BartForConditionalGeneration._from_config(
            config, attn_implementation=implementation, dtype=torch.float16
        )
        return network.eval()

    eager, ours = (
        network(IDS, attention_mask=mask, decoder_input_ids=IDS[:, :9]).logits
        for network in (bart("eager"), bart("fagen"))
    )
    unseen = bart("eager")(IDS, decoder_input_ids=IDS[:, :9]).logits
    assert (ours - eager).abs().max() < 0.04 < 0.2 < (unseen - eager).abs().max()


@pytest.mark.parametrize("config", ["LlamaConfig", "GptOssConfig", long("Gemma2Config")])
def test_decoding_from_a_static_cache_compiles_into_whole_graphs(config, fresh_dynamo):
    from transformers import CompileConfig

    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph

    ours = model(config, **LOCAL.get(config, {}))
    config = CompileConfig(backend=counting, mode=None, fullgraph=True)
    config._compile_all_devices = True
    options = dict(attention_mask=LEFT, max_new_tokens=5, do_sample=False)
    expected = ours.generate(IDS, **options)
    options |= dict(cache_implementation="static", compile_config=config)
    assert torch.equal(ours.generate(IDS, **options), expected)
    assert graphs


@pytest.mark.parametrize("static", [False, True])
def test_a_new_token_compiles_into_one_graph(static, fresh_dynamo):
    from transformers import DynamicCache, StaticCache

    ours = model("LlamaConfig", num_hidden_layers=1)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")

    def last(model, mask):
        cache = (
            StaticCache(config=ours.config, max_cache_len=30)
            if static
            else DynamicCache(config=ours.config)
        )
        ours(IDS[:, :22], attention_mask=LEFT[:, :22], past_key_values=cache)
        return model(IDS[:, 22:], attention_mask=mask, past_key_values=cache).logits

    assert torch.equal(last(compiled, LEFT), last(ours, LEFT))
    hole = padded((0, slice(0, 7)), (0, slice(15, 16)))
    with pytest.raises(RuntimeError, match="hides keys between others"):
        last(compiled, hole)
    assert "hides keys between others" in refusal(lambda: last(ours, hole))


def test_tokens_after_padding_are_refused():
    for options in ({}, STATIC):
        words = refusal(
            lambda options=options: model("LlamaConfig").generate(
                IDS, attention_mask=RIGHT, max_new_tokens=3, **options
            )
        )
        assert "hides keys between others" in words and 'padding_side = "left"' in words


# ---- training -----------------------------------------------------------------------------------


def trained(
    config: str,
    of_ours: dict[str, Any],
    of_theirs: dict[str, Any],
    beside: str = "sdpa",
    **more: Any,
) -> None:
    """Hold that loss and gradients are those of SDPA, in two calls that mean the same."""
    ours, theirs = model(config, **more).train(), model(config, beside, **more).train()
    with torch.enable_grad():
        losses = [
            network(**batch).loss for network, batch in ((ours, of_ours), (theirs, of_theirs))
        ]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        if beside == "sdpa":
            torch.testing.assert_close(a.grad.float(), b.grad.float(), rtol=0.1, atol=2e-3)
        else:  # larger scores, whose rounding is eager's own
            off = (a.grad.float() - b.grad.float()).norm()
            assert off < 0.12 * b.grad.float().norm() + 1e-3


@pytest.mark.parametrize("mask", [ONES, RIGHT], ids=["whole", "padded on the right"])
def test_a_batch_that_says_no_positions_trains_as_beside_sdpa(mask):
    labels = IDS.masked_fill(mask == 0, -100)
    batch = dict(input_ids=IDS, labels=labels) | ({"attention_mask": mask} if mask is RIGHT else {})
    trained("LlamaConfig", batch, batch)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("LlamaConfig", {}),
        ("BertConfig", dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)),
        pytest.param("Qwen3Config", dict(head_dim=32), marks=pytest.mark.long),
    ],
)
def test_a_batch_that_is_padded_on_either_side_trains_as_beside_sdpa(config, more):
    for mask in (LEFT, padded((0, slice(0, 7)), (1, slice(15, 23)))):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        labels = IDS.masked_fill(mask == 0, -100)
        batch = dict(input_ids=IDS, attention_mask=mask, labels=labels, position_ids=positions)
        trained(config, batch, batch, **more)


FEATURES = [{"input_ids": IDS[0, :n].tolist()} for n in (10, 1, 23, 7)]


def flattened(**how: Any) -> dict[str, Any]:
    """A batch without padding, as transformers' collator makes it."""
    from transformers import DataCollatorWithFlattening

    batch: dict[str, Any] = DataCollatorWithFlattening(return_tensors="pt", **how)(FEATURES)
    return batch


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ({}, dict(use_cache=False)),  # transformers makes a mask of varlen sequences
        ({}, {}),  # and here none: position_ids tell each layer, as FlashAttention's
        (dict(return_flash_attn_kwargs=True), dict(use_cache=False)),
        (dict(return_flash_attn_kwargs=True, return_seq_idx=True), {}),
        (dict(return_flash_attn_kwargs=True, return_position_ids=False), "positions"),
    ],
)
def test_sequences_packed_into_one_row_train_as_beside_sdpa(how, more):
    batch = flattened(**how)
    if more == "positions":  # offsets alone
        more = dict(position_ids=flattened()["position_ids"] + 0)
    trained("LlamaConfig", batch | more, flattened() | dict(use_cache=False))


@pytest.mark.parametrize("config", ["MistralConfig", "Gemma2Config", "GptOssConfig"])
def test_windows_caps_and_sinks_train_packed_and_padded_as_beside_eager_attention(config):
    more = LOCAL[config] | dict(attention_dropout=0.0)
    if config != "GptOssConfig":  # where packed sequences see each other
        trained(config, flattened(), flattened() | dict(use_cache=False), "eager", **more)
    batch = dict(input_ids=IDS, attention_mask=RIGHT, labels=IDS.masked_fill(RIGHT == 0, -100))
    trained(config, batch, batch, "eager", **more)


@pytest.mark.parametrize("window", [23, 24])
def test_packed_sequences_fit_into_a_window_one_by_one(window):
    theirs, more = flattened() | dict(use_cache=False), dict(sliding_window=window)
    for batch in (theirs, flattened(return_flash_attn_kwargs=True), flattened()):
        trained("MistralConfig", batch, theirs, **more)


def test_a_window_counts_within_each_packed_sequence():
    more = APART | dict(sliding_window=6)
    plain = flattened() | dict(use_cache=False)
    expected = model("MistralConfig", "eager", **more)(**plain).logits
    ours = model("MistralConfig", **more)
    for batch in (plain, flattened(return_flash_attn_kwargs=True), flattened()):
        torch.testing.assert_close(ours(**batch).logits, expected, atol=4e-2, rtol=0)
    wide = model("MistralConfig", **more | dict(sliding_window=64))(**plain).logits
    assert (wide - expected).abs().max() > 0.5


def test_chunks_count_within_each_packed_sequence_where_transformers_counts_so():
    from transformers import masking_utils

    more, plain = LOCAL["Llama4TextConfig"], flattened() | dict(use_cache=False)
    expected = model("Llama4TextConfig", "eager", **more)(**plain).logits
    ours = model("Llama4TextConfig", **more)
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        assert "this transformers counts chunks from the row's begin" in refusal(
            lambda: ours(**plain)
        )
    else:
        torch.testing.assert_close(ours(**plain).logits, expected, atol=4e-2, rtol=0)


def test_several_rows_may_hold_several_sequences_each():
    again = torch.cat((torch.arange(9), torch.arange(14)))
    for positions in (torch.stack((torch.arange(23), again)), again[None]):
        batch = dict(input_ids=IDS, position_ids=positions, labels=IDS)
        trained("LlamaConfig", batch, batch | dict(use_cache=False))
        trained("LlamaConfig", batch | dict(use_cache=False), batch | dict(use_cache=False))


def test_positions_that_tell_of_no_sequences_change_nothing():
    ours = model("LlamaConfig")
    for positions in (
        torch.arange(23)[None] + 5,
        torch.arange(0, 46, 2)[None],
        torch.zeros(1, 23).long(),
    ):
        eager = model("LlamaConfig", "eager")(IDS, position_ids=positions).logits
        torch.testing.assert_close(
            ours(IDS, position_ids=positions).logits, eager, atol=4e-3, rtol=0
        )


REFUSED: list[tuple[str, Callable[[Any], object]]] = [
    ("shape (2, 1, 23, 23)", lambda ours: ours(IDS, attention_mask=torch.zeros(2, 1, 23, 23))),
    ("cu_seq_lens_k is missing", lambda ours: ours(IDS, cu_seq_lens_q=torch.tensor([0, 10, 23]))),
    ("output_attentions", lambda ours: ours(IDS, output_attentions=True)),
    ("float32", lambda ours: ours.float()(IDS)),
    ("dropout", lambda ours: ours.train()(IDS)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_a_call_that_no_kernel_computes_is_refused(message, call):
    ours = model("LlamaConfig", attention_dropout=0.1)
    assert message in refusal(lambda: call(ours))


@pytest.mark.parametrize(
    ("config", "more", "why"),
    [
        (
            "Gemma3TextConfig",
            dict(use_bidirectional_attention=True),
            "a mask of its own (Gemma3TextModel.forward)",
        ),
        ("LlamaConfig", dict(head_dim=20), "head_dim 20; it must be a multiple of 8"),
    ],
)
def test_a_model_with_attention_of_its_own_is_refused(config, more, why):
    assert why in refusal(lambda: model(config, **dict(head_dim=32) | more)(IDS))


def test_a_decoder_told_to_look_both_ways_does():
    eager, ours = pair("LlamaConfig")
    both_ways = eager(IDS, is_causal=False).logits
    assert (both_ways - eager(IDS).logits).abs().max() > 0.05
    torch.testing.assert_close(ours(IDS, is_causal=False).logits, both_ways, atol=4e-3, rtol=0)


@pytest.mark.long
def test_a_compiled_model_computes_and_refuses_the_same():
    ours = model("LlamaConfig", num_hidden_layers=1)
    expected = ours(IDS).logits
    compiled = torch.compile(ours, backend="eager")
    assert torch.equal(compiled(IDS).logits, expected)
    assert torch.equal(compiled(IDS, attention_mask=ONES).logits, expected)
    for mask in (LEFT, RIGHT):
        expected = ours(IDS, attention_mask=mask).logits
        logits = compiled(IDS, attention_mask=mask).logits
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=4e-3, rtol=0)
