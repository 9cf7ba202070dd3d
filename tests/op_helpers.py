"""What the ops of stubs are called with: slugs and tensors, of 16 bits and of e4m3."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.e4m3 import Quantized, by_columns, rounded
from fagen.kinds.forward.plan import Plan
from fagen.runtime import op
from fagen.schedule import Schedule
from tests.tensors import normal

# no schedule of the package has these slugs, so no other test loads a kernel of that name
SLUG = "fwd_bf16_d64v32_causal_m64n48"
COLUMNS = "fwd_e4m3_d64v32_causal_m64n64_sblock_sr32"
ROWS = "fwd_e4m3_d64v32_full_m64n64_ofp16_vrows"


def qkv(
    batch: int = 2, seqlen_q: int = 70, seqlen_k: int = 100, heads: int = 4, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V for the kernel of SLUG."""
    return (
        normal(batch, seqlen_q, heads, 64, seed=1, dtype=torch.bfloat16),
        normal(batch, seqlen_k, kv_heads, 64, seed=2, dtype=torch.bfloat16),
        normal(batch, seqlen_k, kv_heads, 32, seed=3, dtype=torch.bfloat16),
    )


def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on CPU tensors go by ops that are loaded, where there are some, as on a GPU."""

    def ready(schedules: Sequence[Schedule], *_: Any, **__: Any) -> op.Kernel:
        slug = schedules[0].slug
        return op.kernel_of(slug, "cuda" if hasattr(torch.ops.fagen, slug) else "cpu")

    monkeypatch.setattr(op, "ready", ready)


def refusal(call: Callable[[], object]) -> str:
    """The words in which a call is refused."""
    with pytest.raises(ValueError) as refused:
        call()
    return str(refused.value)


@dataclass(frozen=True)
class Arguments:
    """The arguments of an e4m3 kernel's call, in the order of the op."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_mean: Tensor | None = None
    k_mean: Tensor | None = None

    def __iter__(self) -> Iterator[object]:
        return iter(vars(self).values())


def quantised(of: Plan, batch: int, seqlen_q: int, seqlen_k: int) -> list[Quantized]:
    """Q, K and V as an e4m3 kernel takes them, but for the layout of V."""
    made = []
    shapes = ((seqlen_q, 4, of.head_dim), (seqlen_k, 2, of.head_dim), (seqlen_k, 2, of.head_dim_v))
    for seed, (length, heads, width) in enumerate(shapes):
        x = normal(batch, length, heads, width, seed=seed)
        x = x * torch.arange(1, heads + 1)[:, None]  # no two heads have one scale
        fp8 = of.schedule.fp8
        made.append(rounded(x, fp8.v_scales if seed == 2 else fp8.scales, of.scale_rows))
    return made


def arguments(of: Plan, batch: int = 2, seqlen_q: int = 70, seqlen_k: int = 100) -> Arguments:
    q, k, v = quantised(of, batch, seqlen_q, seqlen_k)
    values = v.values if of.v_rows else by_columns(v.values)
    descales = q.descale, k.descale, v.descale
    means = normal(batch, 2, of.head_dim_v, seed=4), normal(1, 2, of.head_dim, seed=5)
    return Arguments(q.values, k.values, values, 0.1, *descales, *means)
