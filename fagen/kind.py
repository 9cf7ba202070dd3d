"""What a kind of kernel is: the protocol between a package of fagen/kinds/ and the rest of fagen.

A kind declares its schedules, turns one into a Plan, and names its templates. What needs torch or
a GPU it names as a string, "module:attribute", which is imported where it is needed and not before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Protocol

from fagen.launch import Launches
from fagen.part import Parts
from fagen.problem import Problem
from fagen.schedule import Schedule
from fagen.signature import Signature


@dataclass(frozen=True)
class Role:
    """Warps of a kernel that set their own number of registers by setmaxnreg."""

    name: str  # "producer", or what a consumer is called
    registers: int  # per thread


class Plan(Protocol):
    """A schedule that fits, worked out: what every kind's Plan can be asked.

    Sizes that only the kind's own templates read are its own matter.
    """

    kind: ClassVar[str]

    @property
    def schedule(self) -> Any:
        """The schedule that it is of."""

    @property
    def slug(self) -> str:
        """The schedule's."""

    @property
    def threads(self) -> int:
        """Of a thread block."""

    @property
    def blocks(self) -> int:
        """Thread blocks that an SM should hold at least."""

    @property
    def launch_registers(self) -> int:
        """Per thread at launch, at most."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """Who sets registers of their own, the producer last; none where no warp is specialised."""

    @property
    def modelled_registers(self) -> int:
        """What a model says that the widest role takes per thread; 0 without one."""

    @property
    def max_spill_bytes(self) -> int:
        """Per thread."""

    @property
    def spill_remedy(self) -> str:
        """What a schedule may change against {spilled} bytes of spills; "" for nothing."""

    @property
    def shared_bytes(self) -> int:
        """Of a thread block."""

    @property
    def parts(self) -> Parts:
        """What its kernels and their launcher are made of."""

    @property
    def launches(self) -> Launches:
        """The kernels that a call launches, in order, and the workspace that they need."""

    @property
    def signature(self) -> Signature:
        """What a call takes and gives."""

    @property
    def ledger(self) -> str:
        """What it takes of an SM, to be printed."""

    def explained(self) -> str:
        """Return the ledger with its formulae and the limits that they lead to."""

    def record(self) -> Mapping[str, Any]:
        """Return keys and ledgers, for JSON."""


class Step(NamedTuple):
    """A schedule for calls of some sizes; of several the first that fits a call serves it.

    Rows are the queries of a KV head's group of heads. They are so many at most, but any number in
    the steps with the most; their tiles, in all batches and of all KV heads, have that many rows.
    `derive` gives the schedule: to see whether it fits takes milliseconds.
    """

    rows: int
    kv_heads: int  # at least
    tiles: int  # at least
    num_splits: int
    derive: Callable[[], Schedule]


@dataclass(frozen=True)
class Kind:
    """A family of kernels: the parts of its Plans are what the template kernel.cu.j2 is made of.

    emulate, proof, space: "module:attribute". `emulate(plan, *arguments)` computes on a CPU what
    the kernel does, arguments as of its op; `verification` is that of fagen.measure; `space`, a
    fagen.kinds.space.Space, is "" where nothing is searched. `derive(problem)` gives schedules of
    this kind for a problem, the most promising first: all fit, but a compiler may refuse one; it is
    None where no problem is computed. `steps(schedule)` gives those that stand in for a schedule,
    by sizes, where a row of a dispatch table means several; None: no other does.
    """

    name: str
    schedule: type[Schedule]
    plan: Callable[[Any], Plan]
    errors: type  # a record of fagen.records
    speeds: type  # another
    emulate: str
    verification: str
    space: str = ""
    derive: Callable[[Problem], Iterable[Schedule]] | None = None
    steps: Callable[[Any], Iterable[Step]] | None = None


def load_named(name: str) -> Any:
    """Import what a kind names as "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
