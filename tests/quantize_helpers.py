"""Plans of quantisers, and the tensors that they are given."""

from functools import partial

import torch
from torch import Tensor

from fagen.quantizer import QuantizePlan, QuantizeSchedule, plan_quantizer
from tests import tensors

# every kind of quantiser: dtypes, head dims, scales, layouts of V, rotations, rotary embeddings
SPREAD = (
    "quant_fp16_d128_rot_block128",
    "quant_bf16_d128_block128_vcols",
    "quant_fp16_d128_rot_head",
    "quant_fp16_d64_rot_tensor",
    "quant_bf16_d256_rot_block64",
    "quant_fp16_d256_block128_vcols",
    "quant_bf16_d256_rot_head_vcols",
    "quant_fp16_d96_rot_block32_r32",
    "quant_fp16_d80_rot_block64_vcols_r64",
    "quant_bf16_d144_rot_head",
    "quant_fp16_d16_block32_vcols_r32",
    "quant_fp16_d48_rot_tensor_vcols_r32",
    "quant_fp16_d192_rot_block128_vcols",
    "quant_bf16_d240_rot_block32",
    "quant_fp16_d256_rot_block64_vcols_r64",
    "quant_fp16_d128_halves_rot_block128",
    "quant_bf16_d64_pairs_head_vcols",
    "quant_fp16_d80_pairs_rot_block32_r32",
    "quant_bf16_d256_halves_tensor",
)

# fewer, for what takes longer
SLUGS = (
    "quant_fp16_d64_rot_head",
    "quant_bf16_d48_tensor_vcols",
    "quant_fp16_d80_rot_block64",
    "quant_bf16_d128_halves_rot_block128",
    "quant_fp16_d32_pairs_head",
)

SEED = 11
normal = partial(tensors.normal, seed=2, dtype=torch.float16)


def planned(slug: str) -> QuantizePlan:
    return plan_quantizer(QuantizeSchedule.from_slug(slug))


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of e4m3, which torch does not compare, are equal byte by byte."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def uneven(plan: QuantizePlan, batch: int, seqlen: int, heads: int) -> Tensor:
    """N(0, 1) with some entries of N(0, 100), and a scale of its own for each head."""
    generator = torch.Generator().manual_seed(3)
    shape = (batch, seqlen, heads, plan.head_dim)
    x = torch.randn(shape, generator=generator)
    outliers = torch.randn(shape, generator=generator) * 10
    x += outliers * (torch.rand(shape, generator=generator) < 0.001)
    x *= torch.arange(1, heads + 1)[:, None]
    return x.to(getattr(torch, plan.dtype.torch))


def rotary(plan: QuantizePlan, batch: int, seqlen: int) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of angles that are others in every batch, row and pair of columns."""
    if not plan.rotary:
        return None
    angles = torch.arange(float(batch * seqlen * plan.angles)).view(batch, seqlen, -1) * 0.37
    dtype = getattr(torch, plan.dtype.torch)
    return angles.cos().to(dtype), angles.sin().to(dtype)
