"""Plans of quantisers, and the tensors that they are given."""

from functools import partial

import torch
from torch import Tensor

from fagen import registry
from fagen.kinds.quantize.plan import Plan
from tests import tensors

planned = registry.plan_of

# every kind of quantiser: dtypes, head dims, scales, layouts of V, rotations, rotary embeddings
SPREAD = (
    "quant_fp16_d128_rot_sr128",
    "quant_bf16_d128_sr128_vcols",
    "quant_fp16_d128_rot_shead",
    "quant_fp16_d64_rot_stensor",
    "quant_bf16_d256_rot",
    "quant_fp16_d256_sr128_vcols",
    "quant_bf16_d256_rot_shead_vcols",
    "quant_fp16_d96_rot_sr32",
    "quant_fp16_d80_rot_vcols",
    "quant_bf16_d144_rot_shead",
    "quant_fp16_d16_sr32_vcols",
    "quant_fp16_d48_rot_stensor_vcols",
    "quant_fp16_d192_rot_sr128_vcols",
    "quant_bf16_d240_rot_sr32",
    "quant_fp16_d256_rot_vcols",
    "quant_fp16_d128_halves_rot_sr128",
    "quant_bf16_d64_pairs_shead_vcols",
    "quant_fp16_d80_pairs_rot_sr32",
    "quant_bf16_d256_halves_stensor",
    "quant_fp16_d128_center_scol_vcols",
    "quant_bf16_d64_scol",
    "quant_bf16_d80_center_scol_vcols",
    "quant_fp16_d256_center_scol",
    "quant_fp16_d128_rot_center",
    "quant_bf16_d256_rot_center",
    "quant_fp16_d48_rot_center_shead",
    "quant_bf16_d64_center_stensor_vcols",
)

# fewer, for what takes longer
SLUGS = (
    "quant_fp16_d64_rot_shead",
    "quant_bf16_d48_stensor_vcols",
    "quant_fp16_d80_rot",
    "quant_bf16_d128_halves_rot_sr128",
    "quant_fp16_d32_pairs_shead",
)

SEED = 11
normal = partial(tensors.normal, seed=2, dtype=torch.float16)


def same(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors of e4m3, which torch does not compare, are equal byte by byte."""
    return torch.equal(x.view(torch.uint8), other.view(torch.uint8))


def uneven(plan: Plan, batch: int, seqlen: int, heads: int) -> Tensor:
    """N(0, 1) with some entries of N(0, 100), and a scale of its own for each head."""
    generator = torch.Generator().manual_seed(3)
    shape = (batch, seqlen, heads, plan.head_dim)
    x = torch.randn(shape, generator=generator)
    outliers = torch.randn(shape, generator=generator) * 10
    x += outliers * (torch.rand(shape, generator=generator) < 0.001)
    x *= torch.arange(1, heads + 1)[:, None]
    return x.to(getattr(torch, plan.dtype.torch))


def rotary(plan: Plan, batch: int, seqlen: int) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of angles that are others in every batch, row and pair of columns."""
    if not plan.rotary:
        return None
    angles = torch.arange(float(batch * seqlen * plan.angles)).view(batch, seqlen, -1) * 0.37
    dtype = getattr(torch, plan.dtype.torch)
    return angles.cos().to(dtype), angles.sin().to(dtype)
