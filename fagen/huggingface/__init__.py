"""A model's masks and tensors as transformers hands them over → fagen's calls, or a refusal.

transformers calls two functions of an attention implementation: one makes the masks, once for all
layers, and the other attends, in each layer. Here the first makes no mask but tells which of those
that kernels have was meant, causal or full, in a window or in chunks, where each sequence's keys
begin and end, and where sequences do that lie one after another in a row; what is none of them is
refused. So no call that should have been masked ever runs without its mask.
"""

import inspect
from functools import partial

from fagen.errors import ToolchainError
from fagen.huggingface.functions import Functions, functions
from fagen.huggingface.layer import attend
from fagen.huggingface.masks import Mask, mask_of

__all__ = ["Functions", "Mask", "attend", "functions", "mask_of", "register"]

NAME = "fagen"
OLDEST = "5.4"  # the first transformers that tells a mask function where the queries begin


def register() -> None:
    """Make "fagen" an attn_implementation of transformers' models, in this process.

    Calls of it are as of fagen.attention and fagen.attention_decode: fp16 or bf16. A mask that no
    kernel has, an argument that no kernel takes and one that fagen does not know are refused with a
    ValueError when the model is called. Registering again changes nothing.

    Raises ModuleNotFoundError without transformers, ToolchainError where it is older than 5.4.
    """
    import transformers

    try:
        from transformers import masking_utils

        takes_offset = "q_offset" in inspect.signature(masking_utils.sdpa_mask).parameters
    except ImportError:
        takes_offset = False
    if not takes_offset:
        raise ToolchainError(
            f"transformers is {transformers.__version__}, and fagen needs {OLDEST} or later: "
            "python -m pip install --upgrade transformers"
        )
    known = functions(masking_utils)
    transformers.AttentionMaskInterface.register(NAME, partial(mask_of, known))
    transformers.AttentionInterface.register(NAME, attend)
