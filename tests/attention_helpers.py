"""Calls of fagen.attention, in 16 bits and in e4m3, and what a schedule computes of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.dispatch import select
from fagen.dispatch.select import buildable
from fagen.e4m3 import by_columns, rounded
from fagen.kinds.forward.emulate import emulate, emulate_fp8
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.runtime.arguments import dtype_of, key_of
from fagen.runtime.attention import ATTENTION
from fagen.runtime.call import placed
from tests.tensors import leaves, normal

# a table may name each for other sizes; they differ in the tile alone
FEW, FEWER, MANY = (f"fwd_fp16_d64_full_m64n{block_n}" for block_n in (16, 32, 64))
LONG = "fwd_fp16_d64_full_m64n96"  # for many keys
QUERY_ROWS = 2 * 70 * 4  # of qkv()


def qkv(
    dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    queries: int = 70,
    keys: int = 200,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(2, queries, 4, head_dim, dtype=dtype),
        normal(2, keys, 2, head_dim, seed=1, dtype=dtype),
        normal(2, keys, 2, head_dim_v or head_dim, seed=2, dtype=dtype),
    )


@contextmanager
def torch_asks() -> Iterator[None]:
    """Have torch demand the same bits of every call."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def hold_to_one_graph(
    dense: Callable[..., Tensor],
    varlen: Callable[..., Tensor],
    check: Callable[[], None],
    *,
    dynamic: bool,
    deterministic: bool,
) -> None:
    """Two calls in one graph, where `deterministic` is a constant, train as they do without it.

    `check` looks at what computed the gradients, after each pass that did.
    """

    def loss(*args: Tensor) -> Tensor:
        q, k, v, *at = args
        out = dense(q, k, v, causal=True, deterministic=deterministic)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        apart = varlen(*flat, *at, causal=True, deterministic=deterministic)
        return out.float().sum() + apart.float().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for queries in (20, 30):
        tensors = qkv(queries=queries, keys=40)
        at = [torch.tensor([0, 7, 2 * length], dtype=torch.int32) for length in (queries, 40)]
        results = []
        for function in (compiled, loss):
            trained = leaves(*tensors)
            function(*trained, *at).backward()
            check()
            results.append([x.grad for x in trained])
        assert all(map(torch.equal, *results))


def picked(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    seqlen: int,
    rows: int | None = None,
    device: str | None = None,
    v_layout: str = "rows",
    scale_rows: int = 0,
) -> Schedule:
    """The schedule that fagen.attention takes for so many keys and query rows; many if left out."""
    columns = head_dim, head_dim if head_dim_v is None else head_dim_v
    more = torch.bfloat16, v_layout, scale_rows
    key = key_of(placed(device), dtype_of(dtype), *columns, causal, None, *more)
    table = ATTENTION.rows(key)
    assert table is not None and key.problem is not None
    schedule: Schedule = buildable(key.problem, table.slugs(rows, seqlen)[-1]).schedules[0]
    return schedule


def computed(slug: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the schedule of a slug computes of 16-bit tensors."""
    return emulate(plan(Schedule.from_slug(slug)), q, k, v, q.shape[3] ** -0.5)[0]


def quantised(
    scale_rows: int = 0, layout: str = "rows", **sizes: int
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Q, K and V in e4m3, and what else a call of fagen.attention takes of them."""
    scales = "block" if scale_rows else "head"
    kinds = zip(qkv(**sizes), (scales, scales, "column"), strict=True)  # type: ignore[arg-type]
    quantized = [rounded(x, shared, scale_rows) for x, shared in kinds]
    q, k, v = (x.values for x in quantized)
    how: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), quantized, strict=True))
    how = {name: x.descale for name, x in how.items()} | {"v_layout": layout}
    return (q, k, by_columns(v) if layout == "columns" else v), how


def computed_fp8(slug: str, tensors: tuple[Tensor, ...], how: dict[str, Any]) -> Tensor:
    """What the schedule of a slug computes of quantised()."""
    q, k, v = tensors
    descales = how["q_descale"], how["k_descale"], how["v_descale"]
    return emulate_fp8(plan(Schedule.from_slug(slug)), q, k, v, q.shape[3] ** -0.5, *descales)[0]


def write_toml(path: Path, slug: str) -> None:
    """Write a schedule of problem and tile alone."""
    schedule = Schedule.from_slug(slug)
    keys = schedule.attention
    path.write_text(
        f'[attention]\nhead_dim = {keys.head_dim}\ndtype = "{keys.dtype}"\nmask = "{keys.mask}"\n'
        f"[tile]\nblock_m = {schedule.tile.block_m}\nblock_n = {schedule.tile.block_n}\n"
    )


def fill(folder: Path, *slugs: str) -> None:
    """Have a schedules folder hold these schedules."""
    for number, slug in enumerate(slugs):
        write_toml(folder / "forward" / f"{number}.toml", slug)
    select.committed.cache_clear()


def noted(patch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> list[str]:
    """The names of these functions of modules as they are called, in that order."""
    names: list[str] = []

    def noting(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            names.append(real.__name__)
            return real(*arguments, **named)

        return call

    for module, name in places:
        patch.setattr(module, name, noting(getattr(module, name)))
    return names
