"""The arguments of an e4m3 kernel's op: each wrong one is named, everywhere in the same words."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.e4m3 import by_columns, by_rows
from fagen.runtime import op
from fagen.runtime.checks import checked
from tests.op_helpers import COLUMNS, ROWS, Arguments, arguments, refusal
from tests.stubs import StubOp


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused, made from a good one, and what must be said of it."""

    name: str
    slug: str
    change: Callable[[Arguments], dict[str, object]]
    said: str
    needs_data: bool = False


def strided(tensor: Tensor, *strides: int) -> Tensor:
    room = tensor.new_zeros(sum(s * n for s, n in zip(strides, tensor.shape, strict=True)) + 1)
    return room.as_strided(tensor.shape, strides)


BY_COLUMNS = "(batch = 2, kv_heads = 2, 32, ceil(seqlen_k / 16) · 16 = 112)"
WRONG = [
    Wrong(
        "q_dtype",
        ROWS,
        lambda a: dict(q=a.q.half()),
        "q is not float8_e4m3fn, which this kernel takes; fagen.quantize(q) makes it so, with its ",
    ),
    Wrong("k_dtype", COLUMNS, lambda a: dict(k=a.k.to(torch.float8_e5m2)), "k is not float8_e4m3f"),
    Wrong(
        "q_columns",
        COLUMNS,
        lambda a: dict(q=a.q[..., :48]),
        "q has shape (2, 70, 4, 48); it must be (batch, seqlen_q, heads, 64)",
    ),
    Wrong(
        "k_stride",
        ROWS,
        lambda a: dict(k=strided(a.k, 14_400, 144, 68, 1)),
        "k has stride 68 in dimension 2, which must be a multiple of 16 elements (16 bytes); ",
    ),
    Wrong(
        "k_address",
        ROWS,
        lambda a: dict(k=torch.zeros(a.k.numel() + 1).to(a.k.dtype)[1:].view(a.k.shape)),
        "k does not begin at a multiple of 16 bytes; k.clone() does",
        needs_data=True,
    ),
    Wrong(
        "v_by_rows",
        COLUMNS,
        lambda a: dict(v=by_rows(a.v, 100).contiguous()),
        "v has shape (2, 100, 2, 32); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_rank",
        COLUMNS,
        lambda a: dict(v=a.v[0]),
        "v has shape (2, 32, 112); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_wide",
        COLUMNS,
        lambda a: dict(v=torch.cat([a.v, a.v], 2)),
        "v has shape (2, 2, 64, 112); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_not_filled_up",
        COLUMNS,
        lambda a: dict(v=strided(a.v[..., :100], 7168, 3584, 112, 1)),
        "v has shape (2, 2, 32, 100); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_too_long",
        COLUMNS,
        lambda a: dict(v=torch.cat([a.v, a.v[..., :16]], 3)),
        "v has shape (2, 2, 32, 128); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_heads",
        COLUMNS,
        lambda a: dict(v=a.v[:, :1]),
        "v has shape (2, 1, 32, 112); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_batch",
        COLUMNS,
        lambda a: dict(v=a.v[:1]),
        "v has shape (1, 2, 32, 112); it must be " + BY_COLUMNS,
    ),
    Wrong(
        "v_row_stride",
        COLUMNS,
        lambda a: dict(v=strided(a.v, 2 * 32 * 120, 32 * 120, 120, 1)),
        "v has stride 120 in dimension 2, which must be a multiple of 16 elements (16 bytes)",
    ),
    Wrong(
        "v_of_columns_for_rows",
        ROWS,
        lambda a: dict(v=by_columns(a.v)),
        "v has shape (2, 2, 32, 112); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)",
    ),
    Wrong(
        "v_keys",
        ROWS,
        lambda a: dict(v=a.v[:, :9]),
        "v has shape (2, 9, 2, 32); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)",
    ),
    *(
        Wrong(
            f"{name}_missing",
            COLUMNS,
            lambda a, name=name: {name: None},
            f"{name} is missing; this kernel has scales by block of 32 rows",
        )
        for name in ("q_descale", "k_descale")
    ),
    Wrong(
        "descale_of_one_block",
        COLUMNS,
        lambda a: dict(k_descale=a.k_descale[..., :1]),  # type: ignore[index]
        "k_descale has shape (2, 2, 1); it must be (batch = 2 or 1, kv_heads = 2 or 1, "
        "ceil(seqlen_k / 32) = 4)",
    ),
    Wrong(
        "descale_blocks",
        COLUMNS,
        lambda a: dict(q_descale=torch.ones(2, 4, 2)),
        "q_descale has shape (2, 4, 2); it must be (batch = 2 or 1, heads = 4 or 1, "
        "ceil(seqlen_q / 32) = 3)",
    ),
    Wrong(
        "descale_of_blocks_for_a_head",
        ROWS,
        lambda a: dict(k_descale=torch.ones(2, 2, 4)),
        "k_descale has shape (2, 2, 4); it must be (batch = 2 or 1, kv_heads = 2 or 1, 1)",
    ),
    Wrong(
        "descale_of_blocks_for_columns",
        COLUMNS,
        lambda a: dict(v_descale=torch.ones(2, 2, 4)),
        "v_descale has shape (2, 2, 4); it must be (batch = 2 or 1, kv_heads = 2 or 1, 32 or 1)",
    ),
    Wrong(
        "descale_rank",
        ROWS,
        lambda a: dict(v_descale=torch.ones(2, 2)),
        "v_descale has shape (2, 2); it must be (batch = 2 or 1, kv_heads = 2 or 1, 32 or 1)",
    ),
    Wrong(
        "mean_of_v_for_k",
        ROWS,
        lambda a: dict(k_mean=a.v_mean),
        "k_mean has shape (2, 2, 32); it must be (batch = 2 or 1, kv_heads = 2 or 1, 64 or 1)",
    ),
    Wrong(
        "mean_heads",
        COLUMNS,
        lambda a: dict(v_mean=torch.ones(2, 4, 32)),
        "v_mean has shape (2, 4, 32); it must be (batch = 2 or 1, kv_heads = 2 or 1, 32 or 1)",
    ),
    Wrong(
        "descale_batch",
        ROWS,
        lambda a: dict(k_descale=torch.ones(3, 2, 1)),
        "k_descale has shape (3, 2, 1); it must be (batch = 2 or 1, kv_heads = 2 or 1, 1)",
    ),
    Wrong(
        "descale_of_kv_heads_for_q",
        ROWS,
        lambda a: dict(q_descale=torch.ones(2, 2, 1)),
        "q_descale has shape (2, 2, 1); it must be (batch = 2 or 1, heads = 4 or 1, 1)",
    ),
    Wrong(
        "descale_dtype",
        ROWS,
        lambda a: dict(q_descale=torch.ones(2, 4, 1).double()),
        "q_descale is not float32, which this kernel takes; q_descale.to(torch.float32) converts",
    ),
    Wrong(
        "descale_stride",
        COLUMNS,
        lambda a: dict(k_descale=strided(a.k_descale, 16, 8, 2)),  # type: ignore[arg-type]
        "k_descale has stride 2 in dimension 2, which must be 1; k_descale.contiguous() makes it",
    ),
    Wrong("scale", ROWS, lambda a: dict(scale=0.0), "scale is 0; it must be finite and above 0"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(
    stub_op: Callable[[str], StubOp], wrong: Wrong
) -> None:
    of = stub_op(wrong.slug)
    given = arguments(of.plan)
    given = replace(given, **wrong.change(given))  # type: ignore[arg-type]
    calls = [
        lambda: of.op(*given),  # C++, through Autograd
        lambda: of.below(*given),  # C++
        lambda: of.alone(*given),
        lambda: op.emulated(wrong.slug)(*given),  # Python
        lambda: checked(of.plan, vars(given)),
    ]
    said = [refusal(call) for call in calls]
    if not wrong.needs_data:
        with FakeTensorMode() as mode:
            pretended = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
            given = Arguments(*pretended)  # which the calls read anew
            said += [refusal(call) for call in calls[:4]]
    assert set(said) == {said[0]}
    assert said[0].startswith(f"fagen::{wrong.slug}: {wrong.said}")
