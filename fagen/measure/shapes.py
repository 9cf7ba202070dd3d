"""Sizes in, a Problem out: its FLOPs, its tensors; and which sizes are worth trying."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.kinds.forward.plan import Plan
from fagen.measure.rows import pairs
from fagen.vocab import DTYPES

TOKENS = 16_384  # batch x seqlen of every benchmark problem
HIDDEN = 2_048  # heads x head_dim of every benchmark problem
SEQLENS = (512, 2_048, 4_096, 16_384)


@dataclass(frozen=True)
class Shape:
    """The sizes a kernel takes at run time; `heads` is a multiple of `kv_heads`."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"B={self.batch} H={heads} Sq={self.seqlen_q} Sk={self.seqlen_k}"


@dataclass(frozen=True)
class Problem:
    """One attention to compute: what the schedule fixes, and the sizes."""

    dtype: str  # "fp16" | "bf16" | "e4m3"
    head_dim: int
    head_dim_v: int
    mask: str  # "full" | "causal"
    shape: Shape

    @property
    def causal(self) -> bool:
        """Whether a query sees no key past its own place, aligned to the bottom right."""
        return self.mask == "causal"

    @property
    def ragged_causal(self) -> bool:
        """Whether it matters to which corner the causal mask is aligned."""
        return self.causal and self.shape.seqlen_q != self.shape.seqlen_k

    @property
    def flops(self) -> float:
        """Multiplications and additions of both GEMMs over the keys that a row may see."""
        size = self.shape
        both_dims = self.head_dim + self.head_dim_v
        return 2.0 * size.batch * size.heads * both_dims * visible(size, self.causal)

    def __str__(self) -> str:
        dims = f"{self.head_dim}"
        dims += "" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}"
        return f"{self.dtype} hd{dims} {self.mask} {self.shape}"


def visible(shape: Shape, causal: bool) -> float:
    """Query-key pairs of one head, the causal triangle taken as exactly half its square.

    With Sq != Sk the mask is aligned to the bottom right: a trapezoid, or a triangle of side Sk.
    """
    return pairs(shape.seqlen_q, shape.seqlen_k, causal)


def rows_with_keys(shape: Shape, causal: bool) -> int:
    """The first query row that sees a key: Sq where none does."""
    if shape.seqlen_k == 0:
        return shape.seqlen_q
    return max(0, shape.seqlen_q - shape.seqlen_k) if causal else 0


def problem(plan: Plan, shape: Shape) -> Problem:
    """The problem that `plan`'s kernel computes at `shape`."""
    return Problem(plan.dtype.name, plan.head_dim, plan.head_dim_v, plan.mask.name, shape)


def standard_shape(head_dim: int, seqlen: int = 4_096) -> Shape:
    """A benchmark shape: 16,384 tokens in all, hidden size 2048 (rounded down to whole heads)."""
    heads = HIDDEN // head_dim
    return Shape(TOKENS // seqlen, seqlen, seqlen, heads, heads)


def verification_shapes(plan: Plan) -> tuple[Shape, ...]:
    """Sizes that have caught attention kernels out, around the tile of `plan`.

    One tile and one more or less of it in each direction, a single query, no query, no key, more
    queries than keys (whole rows masked when causal), every grouping of heads, enough tiles that
    each block of a persistent grid takes several, and two long ones.
    """
    m, n = plan.block_m, plan.block_n
    sizes = [
        Shape(1, 1, 1, 1, 1),
        Shape(1, m, n, 2, 2),
        Shape(2, m - 1, n - 1, 3, 3),
        Shape(1, m + 1, n + 1, 2, 1),
        Shape(1, 2 * m + 1, 3 * n - 1, 4, 2),
        Shape(2, 1, 2 * n + 1, 4, 4),
        Shape(2, m, 1, 2, 2),
        Shape(2, 0, n, 2, 2),
        Shape(2, m + 1, 0, 4, 2),
        Shape(1, 3 * m - 5, n // 2 + 3, 2, 2),
        Shape(2, m // 2 + 7, 4 * n + 3, 6, 2),
        Shape(3, 255, 511, 5, 1),
        Shape(2, 1_021, 129, 2, 1),
        Shape(1, 512, 512, 8, 8),
        Shape(4, 3 * m, 2 * n, 40, 40),
        Shape(4, 2 * m + 65, 2 * n - 9, 40, 8),
        Shape(1, 2_048, 2_048, 4, 4),
        Shape(1, 1_023, 4_097, 4, 1),
    ]
    return tuple(dict.fromkeys(sizes))


def inputs(
    case: Problem, *, device: torch.device | str = "cuda", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv): N(0, 1), contiguous, repeatable.

    For e4m3 in fp16: what is quantised, and what others compute the same problem with.
    """
    size = case.shape
    given = DTYPES[case.dtype]
    dtype = torch.float16 if given.fp8 else getattr(torch, given.torch)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        wanted = (size.batch, seqlen, heads, dim)
        return torch.randn(wanted, generator=generator, device=device, dtype=dtype)

    return (
        normal(size.seqlen_q, size.heads, case.head_dim),
        normal(size.seqlen_k, size.kv_heads, case.head_dim),
        normal(size.seqlen_k, size.kv_heads, case.head_dim_v),
    )


def softmax_scale(head_dim: int) -> float:
    """The customary scale of q k^T."""
    return 1.0 / math.sqrt(head_dim)
