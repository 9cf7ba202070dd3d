"""A vendored folder worked out: its kernels by kind, the dispatcher's rows, what templates read."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fagen
from fagen import evidence
from fagen.dispatch.choice import KIND
from fagen.evidence import Evidence
from fagen.kind import Plan
from fagen.paths import locate
from fagen.registry import plan
from fagen.render import Source, render, written
from fagen.schedule import Schedule
from fagen.signature import Signature
from fagen.toolchain import FLAGS
from fagen.vendor.closure import needed
from fagen.vendor.manifest import Manifest
from fagen.vendor.table import Table, table_of

# What CMake sets in its own ways: the standard, the architecture, position-independent code.
_CMAKES = ("-std=", "-gencode", "-Xcompiler", "-fPIC")
# They leave machine code as it is: -lineinfo makes a library four times as large, by its PTX.
_NOT_FOR_USERS = ("-lineinfo", "-Xptxas", "-v")

# of the test program's calls: around a block's ends, and by turns
_LENGTHS = (1, 128, 127, 333, 260)
_COUNTS = (1, 2, 3, 2, 1)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a folder; `alias` is the name that a manifest pins it to, or ""."""

    alias: str
    schedule: Schedule
    plan: Plan
    source: Source
    evidence: Evidence | None  # of exactly this source

    @property
    def slug(self) -> str:
        """The schedule's."""
        return self.plan.slug

    @property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return self.plan.signature

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions of its source."""
        return tuple(f"fagen_{self.slug}{end}" for end in ("", "_workspace", "_message", "_info"))

    @property
    def check(self) -> str:
        """C++ that compares a call with what it should compute; "" where its kind has none."""
        template = f"vendor/check/{self.plan.kind}.j2"
        there = (locate("templates") / template).exists()
        return written(template, plan=self.plan) if there else ""

    @property
    def cases(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of calls that the test program makes, in the signature's order."""
        return tuple(_case(self.signature, number) for number in range(len(_LENGTHS)))


@dataclass(frozen=True)
class Group:
    """The kernels of one kind: they share a struct."""

    name: str
    kernels: tuple[Kernel, ...]

    @property
    def signature(self) -> Signature:
        """That of the first; of another only what its tensors hold differs."""
        return self.kernels[0].signature


@dataclass(frozen=True)
class Folder:
    """All that is in a vendored folder."""

    name: str
    kernels: tuple[Kernel, ...]
    table: Table  # of the kernels that compute a problem
    with_cutlass: bool
    format: str

    @property
    def upper(self) -> str:
        """The name as macros and constants begin."""
        return self.name.upper()

    @property
    def version(self) -> str:
        """Of fagen."""
        return fagen.__version__

    @property
    def struct(self) -> str:
        """The name as C's structs begin."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def needs_cutlass(self) -> bool:
        """Whether a kernel includes CUTLASS's headers."""
        return any(needed([kernel.source.kernel]) for kernel in self.kernels)

    @property
    def dispatched(self) -> "Group":
        """The kernels that the dispatcher chooses among; there are some where it has rows."""
        return next(group for group in self.groups if group.name == self.table.kind)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The kernels by kind."""
        names = dict.fromkeys(kernel.plan.kind for kernel in self.kernels)
        return tuple(
            Group(name, tuple(k for k in self.kernels if k.plan.kind == name)) for name in names
        )

    @property
    def pinned(self) -> tuple[Kernel, ...]:
        """The kernels that have a name of their own."""
        return tuple(kernel for kernel in self.kernels if kernel.alias)

    @property
    def flags(self) -> tuple[str, ...]:
        """nvcc's, but for those that CMake knows by other words."""
        return tuple(flag for flag in self.all_flags if not flag.startswith(_CMAKES))

    @property
    def all_flags(self) -> tuple[str, ...]:
        """nvcc's, for whoever builds without CMake."""
        return tuple(flag for flag in FLAGS if flag not in _NOT_FOR_USERS)

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """The C functions that others may call, the only ones that the library shows."""
        own = [f"{self.name}_message"]
        if self.table.rows:
            op = f"{self.name}_{self.table.kind}"
            own += [f"{self.name}_pick", op, f"{op}_workspace"]
        for kernel in self.pinned:
            own += [f"{self.name}_{kernel.alias}{end}" for end in ("", "_workspace", "_message")]
        return (*own, *(function for kernel in self.kernels for function in kernel.functions))

    def record(self) -> Mapping[str, Any]:
        """Return what it is made of, for manifest.json."""
        return {
            "fagen": self.version,
            "name": self.name,
            "format": self.format,
            "with_cutlass": self.with_cutlass,
            "kernels": [
                {
                    "slug": kernel.slug,
                    "name": kernel.alias,
                    "kind": kernel.plan.kind,
                    "schedule": dict(kernel.schedule.settings()),
                    "source_hash": kernel.source.hash,
                    "host_hash": kernel.source.host_hash,
                    "evidence": kernel.evidence and _told(kernel.evidence),
                }
                for kernel in self.kernels
            ],
        }


def _case(signature: Signature, number: int) -> tuple[int, ...]:
    """Some sizes of a call, which keep the signature's rules."""
    sizes = {
        size.name: (_LENGTHS if size.name.startswith("seqlen") else _COUNTS)[
            (number + place) % len(_LENGTHS)
        ]
        for place, size in enumerate(signature.sizes)
    }
    for rule in signature.rules:
        sizes[rule.of] = sizes[rule.by] * (1 + number % 2)
    return tuple(sizes.values())


def folder_of(manifest: Manifest) -> Folder:
    """Work a manifest out.  Raises OverBudget, and ToolchainError where clang-format is missing."""
    kernels = tuple(_kernel(alias, schedule) for alias, schedule in manifest.kernels)
    return Folder(
        name=manifest.name,
        kernels=kernels,
        table=table_of([kernel.schedule for kernel in kernels if kernel.schedule.kind == KIND]),
        with_cutlass=manifest.with_cutlass,
        format=manifest.format,
    )


def _kernel(alias: str, schedule: Schedule) -> Kernel:
    planned = plan(schedule)
    source = render(planned)
    found = evidence.of_source(source.slug, lambda: source.hash)
    return Kernel(alias, schedule, planned, source, found)


def _told(found: Evidence) -> Mapping[str, Any]:
    return {
        "card": found.card,
        "date": found.date,
        "driver": found.driver,
        "compiler": found.compiler,
        "cutlass": found.cutlass,
        "machine_code": found.machine_code,
        "speeds": [vars(speed) for speed in found.speeds],
    }
