"""A call of each kind of a folder's kernels, as its README shows it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fagen.signature import Dim, Extent, Scalar, Signature, Tensor
from fagen.vendor.table import FIELDS, Entry, in_c

if TYPE_CHECKING:
    from fagen.vendor.contents import Group


@dataclass(frozen=True)
class Step:
    """A stride of a tensor in C's struct: the extents of what lies behind its dimension."""

    name: str
    behind: tuple[Extent, ...]


@dataclass(frozen=True)
class Example:
    """A function of C that calls the kernels of one struct, on tensors that are dense."""

    name: str  # "forward", "forward_varlen"
    about: str  # whom it calls, in words
    function: str  # of C: it launches, and with _workspace and _message behind it says the rest
    signature: Signature
    problem: tuple[tuple[str, str, int], ...]  # fields: name, constant or "", number
    zeroed: bool  # whether the workspace is zeros before a call

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What every call takes or gives."""
        return tuple(t for t in self.signature.tensors if t.present and not t.optional)

    @property
    def numbers(self) -> tuple[Scalar, ...]:
        """The numbers of a call."""
        return tuple(scalar for scalar in self.signature.numbers if not scalar.words)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All strides of its tensors."""
        return tuple(step for tensor in self.tensors for step in _steps(tensor))

    @property
    def rounds(self) -> bool:
        """Whether a stride is one of sizes that are rounded up."""
        return any(extent.per > 1 for step in self.steps for extent in step.behind)


def of_group(group: "Group", folder_name: str) -> Example:
    """Return the call of a folder's kernels of one struct: of who chooses, or of the first."""
    name, kernels = group.name.replace(" ", "_"), group.kernels
    first, chosen = kernels[0], bool(group.table.rows)
    about = f"what `{folder_name}_{group.table.pick}` chooses" if chosen else f"`{first.slug}`"
    function = f"{folder_name}_{group.kind}" if chosen else f"fagen_{first.slug}"
    problem = tuple(_problem(group)) if chosen else ()
    zeroed = group.zeroed if chosen else first.plan.launches.zeroed
    return Example(name, about, function, group.signature, problem, zeroed)


def _problem(group: "Group") -> Iterator[tuple[str, str, int]]:
    """The fields of a problem that is a kernel's own, but for what may be left out."""

    def is_own(row: Entry) -> bool:
        # kernels of decoding serve a single query of the other mask too
        mask = group.kernels[row.kernel].schedule.values()["mask"]
        return bool(mask == row.problem.mask)

    rows = [row for row in group.table.rows if row.kernel >= 0]
    row = next(filter(is_own, rows), rows[0])
    numbers = in_c(row.problem)
    if numbers["head_dim_v"] == numbers["head_dim"]:
        numbers["head_dim_v"] = 0
    for field in FIELDS:
        number = numbers[field.name]
        words = {value: word for word, value in field.constants}
        if number and not (field.name == "out_dtype" and row.usual):
            constant = f"{field.upper}_{words[number]}" if number in words else ""
            yield field.name, constant, number


def _steps(tensor: Tensor) -> Iterator[Step]:
    dims: tuple[Dim, ...] = tensor.dims
    for place, dim in enumerate(dims):
        if dim.stride:
            behind = tuple(other.extent for other in dims[place + 1 :])
            yield Step(f"{tensor.name}_stride_{dim.stride}", behind)
