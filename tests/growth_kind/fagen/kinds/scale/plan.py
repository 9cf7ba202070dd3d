"""Turn a schedule of scaling into its Plan."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fagen.kind import Role
from fagen.kinds.scale.keys import Schedule
from fagen.launch import Grid, Launch, Launches, Product
from fagen.part import (
    ELEMENT,
    FLOAT,
    HEADERS,
    INT,
    INT64,
    Alias,
    Argument,
    Constant,
    Field,
    Part,
    Parts,
    pointer_to,
)
from fagen.signature import Dim, Extent, Scalar, Signature, Size, Tensor
from fagen.vocab import SIXTEEN_BITS, Dtype

ROWS = (Dim(Extent("batch"), "batch"), Dim(Extent("seqlen"), "seq"))
_FIELDS = {
    "x": pointer_to(ELEMENT, const=True),
    "out": pointer_to(ELEMENT),
    **{f"{tensor}_stride_{dim}": INT64 for tensor in ("x", "out") for dim in ("batch", "seq")},
    "seqlen": INT,
    "factor": FLOAT,
}


@dataclass(frozen=True)
class Plan:
    """Scaling, worked out."""

    kind: ClassVar[str] = "scale"
    blocks: ClassVar[int] = 1
    launch_registers: ClassVar[int] = 64
    roles: ClassVar[tuple[Role, ...]] = ()
    modelled_registers: ClassVar[int] = 0
    max_spill_bytes: ClassVar[int] = 0
    spill_remedy: ClassVar[str] = ""
    shared_bytes: ClassVar[int] = 0

    schedule: Schedule
    slug: str
    dtype: Dtype
    head_dim: int
    threads: int

    @property
    def launches(self) -> Launches:
        """One kernel: a thread block for each row."""
        grid = Grid(Product((Extent("batch"), Extent("seqlen"))))
        return Launches((Launch("scale", grid, self.threads),), empty=("batch", "seqlen"))

    @property
    def parts(self) -> Parts:
        """What the kernel is made of."""
        part = Part(
            about=("scale/about.cuh.j2",),
            headers=(*HEADERS, self.dtype.header),
            constants=(
                Alias("Element", "dtype.cpp"),
                *map(Constant, ("head_dim", "threads", "shared_bytes", "launch_registers")),
            ),
            params=tuple(Field(name, type, Argument(name)) for name, type in _FIELDS.items()),
        )
        return Parts((part,), sections=("scale/kernel.j2",))

    @property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        rows = (*ROWS, Dim(Extent(number=self.head_dim)))
        return Signature(
            kind=self.kind,
            version=1,
            sizes=(Size("batch"), Size("seqlen")),
            tensors=(
                Tensor("x", rows, self.dtype, "what is scaled"),
                Tensor("out", rows, self.dtype, "x times factor", access="out"),
            ),
            scalars=(Scalar("factor", "float", "by which"),),
            order=("x", "factor"),
        )

    @property
    def ledger(self) -> str:
        """What it takes of an SM."""
        return f"threads {self.threads}"

    def explained(self) -> str:
        """The same."""
        return self.ledger

    def record(self) -> dict[str, Any]:
        """Return keys, for JSON."""
        return {"schedule": self.slug, "keys": self.schedule.values()}


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out."""
    keys = schedule.scale
    return Plan(schedule, schedule.slug, SIXTEEN_BITS[keys.dtype], keys.head_dim, keys.threads)
