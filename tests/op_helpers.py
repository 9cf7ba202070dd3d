"""What the ops of stubs are called with: slugs, arguments by their names, and refusals."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.e4m3 import Quantized, by_columns, rounded
from fagen.kinds.forward.plan import Plan
from fagen.registry import plan_of
from fagen.runtime import op
from fagen.runtime.checks import checked
from fagen.schedule import Schedule
from tests.tensors import normal
from tests.varlen_helpers import packed, packed8

# no schedule of the package has these slugs, so no other test loads a kernel of that name
SLUG = "fwd_bf16_d64v32_causal_m64n48"
COLUMNS = "fwd_e4m3_d64v32_causal_m64n64_sblock_sr32"
ROWS = "fwd_e4m3_d64v32_full_m64n64_ofp16_vrows"
PACKED = "fwd_bf16_d64v32_causal_m64n48_varlen"
PACKED8 = "fwd_e4m3_d64v32_causal_m64n32_varlen"

DESCALES = "q_descale", "k_descale", "v_descale", "v_mean", "k_mean"


def qkv(
    batch: int = 2, seqlen_q: int = 70, seqlen_k: int = 100, heads: int = 4, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V for the kernel of SLUG."""
    return (
        normal(batch, seqlen_q, heads, 64, seed=1, dtype=torch.bfloat16),
        normal(batch, seqlen_k, kv_heads, 64, seed=2, dtype=torch.bfloat16),
        normal(batch, seqlen_k, kv_heads, 32, seed=3, dtype=torch.bfloat16),
    )


def quantised(plan: Plan, batch: int, seqlen_q: int, seqlen_k: int) -> list[Quantized]:
    """Q, K and V as an e4m3 kernel takes them, but for the layout of V."""
    tensors = []
    d, d_v = plan.head_dim, plan.head_dim_v
    shapes = ((seqlen_q, 4, d), (seqlen_k, 2, d), (seqlen_k, 2, d_v))
    for seed, (length, heads, width) in enumerate(shapes):
        x = normal(batch, length, heads, width, seed=seed)
        x = x * torch.arange(1, heads + 1)[:, None]  # no two heads have one scale
        fp8 = plan.schedule.fp8
        tensors.append(rounded(x, fp8.v_scales if seed == 2 else fp8.scales, plan.scales.rows))
    return tensors


def arguments(
    plan: Plan, batch: int = 2, seqlen_q: int = 70, seqlen_k: int = 100
) -> dict[str, Any]:
    """The arguments of an op of one of the slugs above, in the order of the op."""
    names = [argument.name for argument in plan.signature.arguments]
    if plan.slug == SLUG:
        return dict(zip(names, (*qkv(batch, seqlen_q, seqlen_k), 0.1), strict=True))
    if plan.slug in (PACKED, PACKED8):
        *tensors, at_q, at_k = packed(dtype=torch.bfloat16, head_dim_v=32)
        more: dict[str, Any] = {}
        if plan.slug == PACKED8:
            (*tensors, _, _), more, _ = packed8(head_dim_v=32, by_column=True)
            more = {n: x if x.dim() == 3 else x[..., None].contiguous() for n, x in more.items()}
        return dict(zip(names, (*tensors, at_q, at_k, 0.1, None), strict=False)) | more
    q, k, v = quantised(plan, batch, seqlen_q, seqlen_k)
    values = v.values if plan.v_rows else by_columns(v.values)
    descales = q.descale, k.descale, v.descale
    means = normal(batch, 2, plan.head_dim_v, seed=4), normal(1, 2, plan.head_dim, seed=5)
    values_by_place = (q.values, k.values, values, 0.1, *descales, *means)
    return dict(zip(names, values_by_place, strict=True))


def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on CPU tensors go by ops that are loaded, where there are some, as on a GPU."""

    def ready(schedules: Sequence[Schedule], *_: Any, **__: Any) -> op.Kernel:
        plan = plan_of(schedules[0].slug)
        return op.kernel_of(plan, "cuda" if hasattr(torch.ops.fagen, plan.slug) else "cpu")

    monkeypatch.setattr(op, "ready", ready)


def refusal(call: Callable[[], object]) -> str:
    """The words in which a call is refused."""
    with pytest.raises(ValueError) as refused:
        call()
    return str(refused.value)


def refused_everywhere(plan: Plan, loaded_op: op.Op, named: dict[str, Any]) -> str:
    """The words in which a call is refused: by C++, by Python and on fake tensors the same."""
    ops = [
        loaded_op,  # C++, through Autograd
        getattr(torch.ops.fagen, f"{plan.slug}_no_grad").default,  # C++
        op.out_only(loaded_op),
        op.emulated(plan.slug),  # Python
    ]
    words = {refusal(lambda: checked(plan, named))}
    words |= {refusal(lambda call=call: call(**named)) for call in ops}
    (message,) = words
    if "does not begin at" not in message:  # which data alone shows
        with FakeTensorMode() as mode:
            fakes = {
                name: mode.from_tensor(x) if isinstance(x, Tensor) else x
                for name, x in named.items()
            }
            assert {refusal(lambda call=call: call(**fakes)) for call in ops} == words
    prefix = f"fagen::{plan.slug}: "
    assert message.startswith(prefix)
    return message.removeprefix(prefix)
