"""Generate text with a small random model, with fagen's attention and with torch's, and compare.

    python examples/generate.py                           8 layers in bf16, on a Hopper GPU
    python examples/generate.py --device cpu --layers 1 --hidden 64 --heads 2 --kv-heads 1 \\
        --vocabulary 97 --length 20 --new 4 --batch 2     kernels are emulated

The model is transformers' Llama; nothing is downloaded. Prompts of different lengths are padded on
the left, as generate() needs it, and on the right, where only the next token is computed. Caches
are dynamic or static. For each case the script prints how many sequences have the same greedy
tokens, and how many tokens per second are decoded, without the prefill. Two implementations round
differently, so tokens may differ in a tie: two logits that are closer in fp32 than twice the
rounding error of torch's own. The exit code is 1 where tokens differ without a tie.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fagen import huggingface

Written = tuple[Tensor, Tensor]  # tokens (B, new); what they were chosen by, (B, new, vocabulary)
Exact = Callable[[int, Tensor], Tensor]  # a sequence's number and new tokens in, logits of the next


def models(options: argparse.Namespace) -> dict[str, Any]:
    """Return models with the same weights: "fagen" and "sdpa" in bf16, torch's in fp32."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    huggingface.register()
    by_name = {}
    for name, attention in (("fagen", "fagen"), ("sdpa", "sdpa"), ("fp32", "sdpa")):
        config = LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            max_position_embeddings=options.length + options.new,
            initializer_range=options.hidden**-0.5,  # so that what is attended to shows
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.bfloat16
            )
        by_name[name] = model.float().eval() if name == "fp32" else model.eval()
    return by_name


def prompts(options: argparse.Namespace, side: str) -> Written:
    """Return tokens and their padding mask, (B, length) each; padded on a side, or not at all."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        1, options.vocabulary, (options.batch, options.length), generator=generator
    )
    lengths = torch.randint(
        options.length // 2, options.length, (options.batch, 1), generator=generator
    )
    position = torch.arange(options.length)
    kept = {
        "none": torch.ones_like(tokens).bool(),
        "left": position >= options.length - lengths,
        "right": position < lengths,
    }[side]
    return (tokens * kept).to(options.device), kept.long().to(options.device)


def write(model: Any, prompt: Written, new: int, cache: str) -> Written:
    """Return greedy tokens and the logits that they were chosen by."""
    output = model.generate(
        prompt[0],
        attention_mask=prompt[1],
        max_new_tokens=new,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, prompt[0].shape[1] :], torch.stack(output.logits, 1)


def next_of(model: Any, prompt: Written) -> Written:
    """Return the token after each prompt, wherever its padding is, and what it was chosen by."""
    tokens, kept = prompt
    where = (kept.cumsum(1) - 1).clamp(min=0)
    last = (kept * torch.arange(kept.shape[1], device=kept.device)).argmax(1)
    logits = model(tokens, attention_mask=kept, position_ids=where).logits
    chosen_by = logits[torch.arange(len(tokens)), last][:, None]
    return chosen_by.argmax(-1), chosen_by


def exact(model: Any, prompt: Written, row: int, new: Tensor) -> Tensor:
    """Return the logits (vocabulary,) after a prompt without its padding, and new tokens."""
    tokens, kept = prompt
    return model(torch.cat([tokens[row][kept[row].bool()], new])[None]).logits[0, -1]


def compared(ours: Written, theirs: Written, exactly: Exact) -> tuple[int, int]:
    """Return how many sequences end in a tie, and how many differ without one."""
    ties = wrong = 0
    for row, differ in enumerate((ours[0] != theirs[0]).cpu()):
        if differ.any():
            step = int(differ.int().argmax())
            right = exactly(row, theirs[0][row, :step])
            rounding = (theirs[1][row, step] - right).abs().max()
            apart = (right[theirs[0][row, step]] - right[ours[0][row, step]]).abs()
            is_tie = bool(apart <= 2 * rounding)
            ties, wrong = ties + is_tie, wrong + (not is_tie)
    return ties, wrong


def speed(model: Any, prompt: Written, new: int, cache: str) -> float:
    """Return tokens decoded per second, after a first run has prepared everything.

    nan where decoding so few tokens takes less than the noise of the prefill.
    """

    def seconds(tokens: int) -> float:
        if prompt[0].is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        write(model, prompt, tokens, cache)[0].tolist()  # waits for the GPU
        return time.perf_counter() - began

    prefill = seconds(1)
    decoding = seconds(new) - prefill
    return len(prompt[0]) * (new - 1) / decoding if decoding > 0 else math.nan


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Generate with both, and print how they compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, size in dict(
        layers=8,
        hidden=2048,
        heads=16,
        kv_heads=4,
        vocabulary=32_000,
        length=2048,
        new=128,
        batch=8,
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; -h shows sizes for --device cpu")

    by = models(options)
    oracle = by.pop("fp32")
    wrong = 0
    print("padding  cache     same  ties  fagen tokens/s  sdpa tokens/s")
    for side, cache in (
        *(("none", "dynamic"), ("left", "dynamic")),
        *(("none", "static"), ("left", "static"), ("right", "")),
    ):
        prompt = prompts(options, side)
        speeds = ""
        if cache:
            ours, theirs = (write(model, prompt, options.new, cache) for model in by.values())
            rates = [speed(model, prompt, options.new, cache) for model in by.values()]
            speeds = f"{rates[0]:14,.0f} {rates[1]:14,.0f}"
        else:
            ours, theirs = (next_of(model, prompt) for model in by.values())
        ties, differ = compared(ours, theirs, partial(exact, oracle, prompt))
        wrong += differ
        same = options.batch - ties - differ
        print(f"{side:8} {cache or 'none':8} {same:5} {ties:5}  {speeds}".rstrip())
    if wrong:
        raise SystemExit(f"{wrong} sequences differ without a tie")


if __name__ == "__main__":
    main()
