"""Plans of decoding, and what their emulation does as a kernel would."""

from functools import partial
from typing import Any

from torch import Tensor

from fagen import registry
from fagen.kinds.decode.emulate import compute
from fagen.kinds.decode.plan import Plan

planned = registry.plan_of

# dtypes, masks, rows, both widths of a step, head dims that fill slabs and that do not, few chunks
# and many, by turns and by runs, a unified maximum
SPREAD = (
    "dec_fp16_d128_causal_r8n64",
    "dec_bf16_d64_causal_r16n128",
    "dec_fp16_d96_full_r24n64_c20",
    "dec_bf16_d192v128_causal_r8n64_c4",
    "dec_fp16_d128v192_full_r8n128_s3",
    "dec_bf16_d256_full_r32n64",
    "dec_fp16_d40v24_causal_r8n64_c3_b3",
    "dec_fp16_d64_causal_r8n64_c3_fixed",
    "dec_bf16_d96_causal_r8n64_c5_streamk",
    "dec_fp16_d128_causal_r64n64",
)


def emulated(plan: Plan) -> Any:
    """What runs a call as a kernel does: inputs and outputs by name."""
    return partial(_emulate, plan)


def _emulate(plan: Plan, *, out: Tensor, lse: Tensor, **given: Any) -> None:
    for into, made in zip((out, lse), compute(plan, **given), strict=True):
        into.copy_(made)
