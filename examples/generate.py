"""Write text with a small model of random weights, by fagen's attention and by torch's.

    python examples/generate.py                           8 layers in bf16, on a Hopper GPU
    python examples/generate.py --device cpu --layers 1 --hidden 64 --heads 2 --kv-heads 1 \\
        --vocabulary 97 --length 20 --new 4 --batch 2     kernels are emulated

The model is transformers' Llama, nothing is downloaded. Prompts of different lengths are padded on
the left, as generate() needs it, and on the right, where only the next token is asked for; caches
grow or are static. Said are, for each, whether greedy tokens are the same, and how many per second
are decoded, the prompt's time taken off. Two implementations round differently, so tokens may
differ where two are nearly as likely: a tie, after which a sequence is left out. What nearly is,
the same model in fp32 says: less apart than twice what rounding makes of torch's own logits there.
Ends with 1 where tokens differ without one.
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


def models(asked: argparse.Namespace) -> dict[str, Any]:
    """Return models with the same weights: "fagen" and "sdpa" in bf16, torch's in fp32."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    huggingface.register()
    found = {}
    for name, attention in (("fagen", "fagen"), ("sdpa", "sdpa"), ("fp32", "sdpa")):
        config = LlamaConfig(
            vocab_size=asked.vocabulary,
            hidden_size=asked.hidden,
            intermediate_size=4 * asked.hidden,
            num_hidden_layers=asked.layers,
            num_attention_heads=asked.heads,
            num_key_value_heads=asked.kv_heads,
            max_position_embeddings=asked.length + asked.new,
            initializer_range=asked.hidden**-0.5,  # so that what is attended to shows
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        with torch.device(asked.device):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.bfloat16
            )
        found[name] = model.float().eval() if name == "fp32" else model.eval()
    return found


def prompts(asked: argparse.Namespace, side: str) -> Written:
    """Return tokens and their padding mask, (B, length) each; padded on a side, or not at all."""
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, asked.vocabulary, (asked.batch, asked.length), generator=dice)
    lengths = torch.randint(asked.length // 2, asked.length, (asked.batch, 1), generator=dice)
    position = torch.arange(asked.length)
    kept = {
        "none": torch.ones_like(tokens).bool(),
        "left": position >= asked.length - lengths,
        "right": position < lengths,
    }[side]
    return (tokens * kept).to(asked.device), kept.long().to(asked.device)


def write(model: Any, given: Written, new: int, cache: str) -> Written:
    """Return greedy tokens and the logits that they were chosen by."""
    told = model.generate(
        given[0],
        attention_mask=given[1],
        max_new_tokens=new,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return told.sequences[:, given[0].shape[1] :], torch.stack(told.logits, 1)


def next_of(model: Any, given: Written) -> Written:
    """Return the token after each prompt, wherever its padding is, and what it was chosen by."""
    tokens, kept = given
    where = (kept.cumsum(1) - 1).clamp(min=0)
    last = (kept * torch.arange(kept.shape[1], device=kept.device)).argmax(1)
    logits = model(tokens, attention_mask=kept, position_ids=where).logits
    chosen_by = logits[torch.arange(len(tokens)), last][:, None]
    return chosen_by.argmax(-1), chosen_by


def exact(model: Any, given: Written, row: int, new: Tensor) -> Tensor:
    """Return the logits (vocabulary,) after a prompt without its padding, and new tokens."""
    tokens, kept = given
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


def speed(model: Any, given: Written, new: int, cache: str) -> float:
    """Return tokens decoded in a second; a first run has readied everything.

    nan where so few were asked for that the prompt's time hides theirs.
    """

    def seconds(tokens: int) -> float:
        if given[0].is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        write(model, given, tokens, cache)[0].tolist()  # waits for the GPU
        return time.perf_counter() - began

    prompt = seconds(1)
    decoding = seconds(new) - prompt
    return len(given[0]) * (new - 1) / decoding if decoding > 0 else math.nan


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Write by both, and say how they compare."""
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
    asked = parser.parse_args(argv)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; -h shows sizes for --device cpu")

    by = models(asked)
    judge = by.pop("fp32")
    wrong = 0
    print("padding  cache     same  ties  fagen tokens/s  sdpa tokens/s")
    for side, cache in (
        *(("none", "dynamic"), ("left", "dynamic")),
        *(("none", "static"), ("left", "static"), ("right", "")),
    ):
        given = prompts(asked, side)
        speeds = ""
        if cache:
            ours, theirs = (write(model, given, asked.new, cache) for model in by.values())
            found = [speed(model, given, asked.new, cache) for model in by.values()]
            speeds = f"{found[0]:14,.0f} {found[1]:14,.0f}"
        else:
            ours, theirs = (next_of(model, given) for model in by.values())
        ties, differ = compared(ours, theirs, partial(exact, judge, given))
        wrong += differ
        same = asked.batch - ties - differ
        print(f"{side:8} {cache or 'none':8} {same:5} {ties:5}  {speeds}".rstrip())
    if wrong:
        raise SystemExit(f"{wrong} sequences differ without a tie")


if __name__ == "__main__":
    main()
