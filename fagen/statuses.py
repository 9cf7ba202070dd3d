"""How a call of a kernel's C function ends: each status, with words that name its arguments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 16  # bytes, of base pointers, strides that TMA follows, and the workspace
NO_KERNEL = 100  # of a vendored folder, where none of its kernels computes a call


@dataclass(frozen=True)
class Status:
    """A status; its number is its place."""

    name: str  # in words: "bad size"
    message: str

    @property
    def constant(self) -> str:
        """In a kernel's source: kBadSize."""
        return "k" + "".join(word.capitalize() for word in self.name.split())

    @property
    def macro(self) -> str:
        """In a vendored header, behind the folder's name: BAD_SIZE."""
        return self.name.upper().replace(" ", "_")


def statuses(signatures: Sequence[Any]) -> tuple[Status, ...]:
    """Return how calls of these Signatures end, in the order in which that is found out."""
    structs = _once(signature.struct for signature in signatures)
    inputs = [tensor for signature in signatures for tensor in signature.inputs]
    numbers = [s for signature in signatures for s in signature.numbers if s.positive]
    limited = _once(f"{s.name} {s.limit}" for s in numbers if s.limit)
    scalars = _once(s.name for s in numbers)
    between = _once(
        f"{s.name} {s.demand}" for of in signatures for s in of.numbers if s.least is not None
    )
    ratios = _once(f"{r.size} must be a multiple of {r.by}" for s in signatures for r in s.rules)
    together = _once(
        f"{_and(tensor.name for tensor in group)} go together; only one is given"
        for signature in signatures
        for group in signature.made_groups
    )
    refused = _once(tensor.refused for tensor in inputs if tensor.refused)
    counted = _once(limit.name for signature in signatures for limit in signature.limits)
    tensors = [tensor for signature in signatures for tensor in signature.tensors if tensor.present]
    plain = _once(
        f"{tensor.name}: {tensor.dtype.bytes}" for tensor in tensors if not tensor.aligned
    )
    written = _once(tensor.name for tensor in tensors if tensor.access != "in")
    a_struct = structs[0] if len(structs) == 1 else "struct"
    return (
        Status("ok", "launched"),
        Status("wrong struct", f"struct_bytes or version is that of another {a_struct}"),
        Status("bad size", "a size is negative or too large"),
        Status("bad ratio", ", ".join(ratios) or "sizes do not go together"),
        Status("too many", f"there are 2^30 {' or '.join(counted) or 'tiles'} or more"),
        Status(
            "bad scalar",
            f"{', '.join(scalars) or 'a number'} must be finite and positive"
            + "".join(f", {limit}" for limit in limited)
            + "".join(f"; {bounds}" for bounds in between),
        ),
        Status("refused", "; ".join((*refused, *together)) or "a tensor is given that cannot be"),
        Status("null pointer", "a tensor that is needed is null"),
        Status(
            "misaligned",
            f"a tensor does not begin at a multiple of {ALIGNMENT} bytes"
            + (f" ({', '.join(plain)})" if plain else ""),
        ),
        Status(
            "bad stride", f"a stride is negative, too large, or no multiple of {ALIGNMENT} bytes"
        ),
        Status(
            "overlap",
            f"elements of an output ({', '.join(written)}) overlap: a stride is 0 or too small",
        ),
        Status(
            "bad workspace",
            "the workspace is null, too small, or does not begin at a multiple of "
            f"{ALIGNMENT} bytes",
        ),
        Status("not hopper", "the current device is not a Hopper GPU (compute capability 9.0)"),
        Status("no driver", "the CUDA driver is missing, or too old for tensor maps"),
        Status("tensor map refused", "the CUDA driver refused to describe a tensor for TMA"),
        Status("launch failed", "the kernel could not be launched"),
    )


def _once(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))


def _and(words: Iterable[str]) -> str:
    return " and ".join(words)
