"""A kind of kernels that only tests have: its signature has one of everything that one may say."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor as Data

from fagen import registry
from fagen.errors import ScheduleError
from fagen.launch import Grid, Launch, Launches, Product
from fagen.registry import Entry
from fagen.runtime.checks import allocated, checked
from fagen.signature import (
    Dim,
    Extent,
    Limit,
    Multiple,
    Scalar,
    Signature,
    Size,
    Tensor,
    random_words,
)
from fagen.vocab import DTYPES, FP32, INT32

FP16, BF16 = DTYPES["fp16"], DTYPES["bf16"]
COLUMNS = 16
_BATCH = Dim(Extent("batch"), "batch")
_ROWS = Dim(Extent("rows"), "row")
_HEADS = Dim(Extent("heads"), "head")


def angles(name: str) -> Tensor:
    dims = (_ROWS, Dim(Extent(number=8)))
    return Tensor(name, dims, FP16, "of an angle", optional=True, group="rotary")


BASE = Signature(
    kind="toy",
    version=7,
    sizes=(Size("batch"), Size("rows", 1000), Size("heads")),
    tensors=(
        Tensor("x", (_BATCH, _ROWS, _HEADS, Dim(Extent(number=COLUMNS))), FP16, "what is turned"),
        Tensor(
            "weights",
            (
                Dim(Extent("batch"), "batch", broadcast=True),
                Dim(Extent("rows", per=16), "block", broadcast=True),
            ),
            FP32,
            "of each block of rows",
            optional=True,
            aligned=False,
            max_stride=64,
        ),
        Tensor("ends", (Dim(Extent("batch", plus=1)),), INT32, "of sequences", aligned=False),
        angles("cos"),
        angles("sin"),
        Tensor(
            "factor",
            (_BATCH, Dim(Extent("heads"))),
            FP32,
            "by which all is divided",
            access="made",
            aligned=False,
            all_strides=("batch", "head"),
            if_empty=0.5,
        ),
        Tensor("history", (_BATCH,), FP32, "of other kernels", present=False),
        Tensor(
            "out",
            (
                _BATCH,
                _HEADS,
                Dim(Extent(number=COLUMNS), "column"),
                Dim(Extent("rows", "", 16, 16)),
            ),
            BF16,
            "transposed",
            access="out",
        ),
        Tensor(
            "sums",
            (_BATCH, Dim(Extent("rows"))),
            FP32,
            "of rows",
            access="out",
            aligned=False,
            omittable=True,
        ),
    ),
    scalars=(
        Scalar("gain", "float", "of all", positive=True, most=1024.0),
        Scalar("count", "int", "of repetitions", default=3, positive=True),
        Scalar("seed", "int", "of signs", default=0, field="signs", words=4),
        Scalar("salt", "int", "of noise", default=1, field="noise", words=12),
        Scalar("decay", "float", "of other kernels", present=False),
    ),
    order=("x", "ends", "gain", "weights", "factor"),
    rules=(Multiple("rows", "heads"),),
    limits=(
        Limit("pairs", (*map(Extent, ("rows", "heads", "heads")), Extent(number=1 << 16))),
        Limit("what a launcher counts"),
    ),
    keyword_from="cos",
    no_gradient="a toy has none",
)

# what one line adds
BIAS = Tensor("bias", (_HEADS, Dim(Extent(number=COLUMNS))), FP16, "added to each row")
SHIFT = Scalar("shift", "float", "added to all", default=0.25, positive=True)

SIGNATURES = {
    "toy_base": BASE,
    "toy_bias": replace(BASE, tensors=(*BASE.tensors, BIAS)),
    "toy_shift": replace(BASE, scalars=(*BASE.scalars, SHIFT)),
    # one output, which may be given; nothing else
    "toy_found": replace(
        BASE,
        tensors=tuple(t for t in BASE.tensors if t.name in ("x", "factor")),
        scalars=(),
        rules=(),
        keyword_from="",
    ),
}

# four bytes for each block of 32 rows, where factor has to be found
WORKSPACE = Product((Extent("batch"), Extent("heads"), Extent("rows", per=32), Extent(number=4)))
_FIND = Launch("find", Grid(Product((Extent("rows"),))), 128, unless="factor")
_TURN = Launch("turn", Grid(Product((Extent("rows"),))), 128)


@dataclass(frozen=True)
class Schedule:
    slug: str
    kind: ClassVar[str] = "toy"

    @classmethod
    def from_slug(cls, slug: str) -> "Schedule":
        if slug not in SIGNATURES:
            raise ScheduleError(f"{slug!r} is no slug")
        return cls(slug)


@dataclass(frozen=True)
class Plan:
    """What the templates that all kinds share ask of a Plan."""

    kind: ClassVar[str] = "toy"
    threads: ClassVar[int] = 128
    shared_bytes: ClassVar[int] = 1024
    launch_registers: ClassVar[int] = 64

    schedule: Schedule
    signature: Signature
    launches: Launches

    @property
    def slug(self) -> str:
        return self.schedule.slug


def plan(schedule: Schedule) -> Plan:
    launches = Launches((_FIND, _TURN), WORKSPACE, unless="factor")
    return Plan(schedule, SIGNATURES[schedule.slug], launches)


def compute(plan: Plan, x: Data, factor: Data | None = None, **more: Any) -> Any:
    """Emulate a toy: enough that each argument changes an output."""
    factor_given = factor
    if factor is None:
        factor = x.new_full((x.shape[0], x.shape[2]), 0.5, dtype=torch.float32)
        factor = x.float().abs().amax((1, 3)) if x.numel() else factor
    factors = factor if factor_given is None else x.new_empty(0, dtype=torch.float32)
    if plan.slug == "toy_found":
        return factors
    y = x.float() / factor[:, None, :, None] * more["gain"] * more["count"]
    if more["weights"] is not None:
        rows = more["weights"].repeat_interleave(16, 1)[:, : x.shape[1]]
        y = y * rows[:, :, None, None]
    if more["cos"] is not None:
        y = y * (more["cos"] + more["sin"]).repeat_interleave(2, 1)[None, :, None]
    y = y + more.get("shift", 0.0) + more.get("bias", 0.0) + int(more["ends"].sum())
    y = y + random_words(more["seed"], 4)[0] % 7 + random_words(more["salt"], 12)[11] % 7
    turned = y.new_zeros(x.shape[0], x.shape[2], COLUMNS, -(-x.shape[1] // 16) * 16)
    turned[..., : x.shape[1]] = y.permute(0, 2, 3, 1)
    return factors, turned.bfloat16(), y.sum((2, 3))


KIND = SimpleNamespace(name="toy", schedule=Schedule, plan=plan, emulate="tests.toy:compute")


def arguments(plan: Plan, batch: int = 2, rows: int = 36, heads: int = 3) -> dict[str, Any]:
    """A call of a toy in which everything is given that may be, but for the factor."""
    dice = torch.Generator().manual_seed(5)
    sizes = dict(batch=batch, rows=rows, heads=heads)
    call: dict[str, Any] = {}
    for tensor in plan.signature.inputs:
        if not tensor.made:
            shape = [dim.extent.at(sizes) for dim in tensor.dims]
            numbers = torch.randn(shape, generator=dice) * 3
            call[tensor.name] = numbers.to(getattr(torch, tensor.dtype.torch))
    numbers = dict(gain=0.5, count=2, seed=11, salt=-5, shift=1.5)
    return call | {scalar.name: numbers[scalar.name] for scalar in plan.signature.numbers}


def completed(plan: Any, named: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with its outputs, as the binding allocates them."""
    outputs = allocated(plan, named, checked(plan, named))
    results = [tensor.result for tensor in plan.signature.outputs]
    return {**named, **dict(zip(results, outputs, strict=True))}


def register() -> None:
    """Make it a kind, as one line of the registry makes any."""
    registry.ENTRIES["toy"] = Entry("toy", "tests.toy", "toy_", "toy")


def unregister() -> None:
    """Undo that."""
    del registry.ENTRIES["toy"]
