"""What a call launches: kernels in order, their grids, the workspace, and what may overlap."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fagen.signature import Extent


@dataclass(frozen=True)
class Product:
    """A number of things: extents multiplied, each a formula of the call's sizes, or its blocks.

    ⌈factors / per⌉ + plus: with `per` above 1 it is the number of blocks of so many things.
    """

    factors: tuple[Extent, ...] = ()
    per: int = 1
    plus: int = 0

    def at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how many that are."""
        product = math.prod(factor.at(sizes) for factor in self.factors)
        return (product + self.per - 1) // self.per + self.plus

    def __str__(self) -> str:
        things = " · ".join(map(str, self.factors)) or "1"
        blocks = f"ceil({things} / {self.per})" if self.per > 1 else things
        return f"{blocks} + {self.plus}" if self.plus else blocks


@dataclass(frozen=True)
class Grid:
    """Thread blocks of a launch in three directions.

    With `resident` there are no more in x than SMs, or than so many times as many as
    each has room for, and each takes many tiles of x; a `cluster` is so many neighbours in x.
    """

    x: Product
    y: Product = Product()
    z: Product = Product()
    resident: bool = False
    cluster: int = 1
    per_sm: int = 1

    def __str__(self) -> str:
        times = f"{self.per_sm} · " if self.per_sm > 1 else ""
        x = f"min({self.x}, {times}SMs)" if self.resident else f"{self.x}"
        if self.cluster > 1:
            x += f", in clusters of {self.cluster}"
        return f"({x}, {self.y}, {self.z})"


@dataclass(frozen=True)
class Launch:
    """One kernel of a call."""

    kernel: str  # the function's name in the source
    grid: Grid
    threads: int
    shared_bytes: int = 0  # that it is launched with
    unless: str = ""  # the argument that makes it needless where it is given
    overlaps: bool = False  # it may start under the end of the launch before it
    threads_as: str = ""  # what the kernel's text calls `threads`, if it has a name
    needless: str = ""  # the member of Params that makes it needless where it is true


@dataclass(frozen=True)
class Launches:
    """The kernels of a call in order, and the workspace that the caller brings, in bytes.

    The workspace is needless where the argument `unless` is given. One that is `zeroed` holds zeros
    before the first call, and every call leaves it so: calls that may run at once need one each.
    """

    kernels: tuple[Launch, ...]
    workspace: Product = Product((Extent(number=0),))
    unless: str = ""
    zeroed: bool = False
    empty: tuple[str, ...] = ()  # sizes: where one is 0 a call does nothing
    shares: bool = False  # parts of outputs are kept there too, where one function of C says so

    @property
    def main(self) -> Launch:
        """The kernel with the most shared memory."""
        return max(self.kernels, key=lambda launch: launch.shared_bytes)

    @property
    def needs_workspace(self) -> bool:
        """Whether any call needs one."""
        return all(factor.name or factor.number for factor in self.workspace.factors)
