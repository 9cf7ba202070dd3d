"""A vendored folder worked out: its kernels by kind, the dispatcher's rows, what templates read."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fagen
from fagen import evidence
from fagen.evidence import Evidence
from fagen.kind import Plan
from fagen.paths import locate
from fagen.problem import Problem
from fagen.registry import from_slug, plan
from fagen.render import Source, render, written
from fagen.schedule import Schedule
from fagen.signature import Signature
from fagen.statuses import NO_KERNEL, Status, statuses
from fagen.toolchain import FLAGS
from fagen.vendor import gradients
from fagen.vendor.closure import needed
from fagen.vendor.examples import Example, of_group
from fagen.vendor.manifest import Manifest
from fagen.vendor.table import PLAIN, Table, table_of
from fagen.vocab import BACKWARD, DECODE, DTYPES, FORWARD

# What CMake sets in its own ways: the standard, the architecture, position-independent code.
_CMAKES = ("-std=", "-gencode", "-Xcompiler", "-fPIC")
# They leave machine code as it is: -lineinfo makes a library four times as large, by its PTX.
_NOT_FOR_USERS = ("-lineinfo", "-Xptxas", "-v")

_ATTENTION = (FORWARD, BACKWARD, DECODE)

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
    """The kernels of one kind, and of one form of its calls: they share a struct."""

    name: str
    kernels: tuple[Kernel, ...]

    @property
    def signature(self) -> Signature:
        """That of the first; of another only what its tensors hold differs."""
        return self.kernels[0].signature

    @property
    def table(self) -> Table:
        """What chooses among them."""
        return table_of([kernel.schedule for kernel in self.kernels], self.signature.form)

    @property
    def varlen(self) -> bool:
        """Whether they take varlen sequences, and something chooses among them."""
        return self.signature.kind in (FORWARD, BACKWARD) and bool(self.signature.form)


@dataclass(frozen=True)
class Dispatcher:
    """A C function that chooses among the kernels of one kind, by rows."""

    table: Table
    group: Group

    @property
    def kind(self) -> str:
        """The name of what the kernels compute."""
        return self.table.kind

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What it chooses among."""
        return self.group.kernels

    @property
    def signature(self) -> Signature:
        """Of the struct that it takes."""
        return self.group.signature

    @cached_property
    def statuses(self) -> tuple[Status, ...]:
        """How its calls end, in words of all that it chooses among."""
        return statuses([kernel.signature for kernel in self.kernels])

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What they take, in torch's words."""
        names = dict.fromkeys(row.problem.dtype for row in self.table.rows)
        return tuple(DTYPES[name].torch for name in names)

    @property
    def clobbers(self) -> bool:
        """Whether one of them leaves anything in its workspace, where another's holds zeros."""
        launches = [kernel.plan.launches for kernel in self.kernels]
        return self.zeroed and any(one.needs_workspace and not one.zeroed for one in launches)

    @property
    def zeroed(self) -> bool:
        """Whether the workspace of one of them is zeros before the first call."""
        return any(kernel.plan.launches.zeroed for kernel in self.kernels)


@dataclass(frozen=True)
class Gradient:
    """A kernel of a folder, and the one there that computes the gradients of what it gives.

    Where the folder has none, `by` is None and `wanted` the slug of one that would. `repeating` is
    one that gives the same bits in each call, which may be `by` too.
    """

    of: Kernel
    by: Kernel | None
    repeating: Kernel | None
    wanted: str

    @property
    def passed(self) -> tuple[str, ...]:
        """What `by` takes of a call: its arguments, results and the gradients of these, by name."""
        assert self.by
        return gradients.passed(self.by.signature, self.of.signature)

    @property
    def suffix(self) -> str:
        """The form of the call in a name of Python: none of sequences of one length."""
        return self.of.signature.form.title().replace(" ", "")

    @property
    def taken(self) -> int:
        """How many arguments the call takes."""
        return len(self.of.signature.arguments)

    @property
    def given(self) -> tuple[str, ...]:
        """The inputs of a call whose gradients it gives, in its order."""
        assert self.by
        outputs = self.by.signature.outputs
        return tuple(tensor.name.removeprefix(gradients.PREFIX) for tensor in outputs)

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients of the call's results that it takes."""
        return tuple(f"{gradients.PREFIX}{tensor.name}" for tensor in self.of.signature.outputs)

    @property
    def optional(self) -> tuple[str, ...]:
        """Those of them that may be left out, where the loss is of other results alone."""
        assert self.by
        return tuple(t.name for t in self.by.signature.inputs if t.may_be_none)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of the call."""
        return tuple(scalar.name for scalar in self.of.signature.numbers)

    @property
    def repeating_wanted(self) -> str:
        """The slug of a kernel that does as `by`, or `wanted`, with the same bits in each call."""
        by = self.by.schedule if self.by else from_slug(self.wanted)
        return by.but(deterministic=True).slug


@dataclass(frozen=True)
class Folder:
    """All that is in a vendored folder."""

    name: str
    kernels: tuple[Kernel, ...]
    with_cutlass: bool
    format: str
    own_version: str = ""  # that a manifest gives it

    @property
    def released(self) -> str:
        """The version of a package: its own, else fagen's."""
        return self.own_version or self.version

    @property
    def unverified(self) -> tuple[Kernel, ...]:
        """The kernels of whose source nothing is on record."""
        return tuple(kernel for kernel in self.kernels if not kernel.evidence)

    @property
    def attends(self) -> bool:
        """Whether there are kernels of attention."""
        return any(group.signature.kind in _ATTENTION for group in self.groups)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """A call of each struct."""
        chosen = {one.group.name: one for one in self.dispatchers}
        return tuple(of_group(group, chosen.get(group.name), self.name) for group in self.groups)

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
    def dispatched(self) -> Group:
        """The kernels that compute a problem; there are some where the table has rows."""
        return next(group for group in self.groups if group.name == self.table.kind)

    @cached_property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """The C functions that choose: of what is computed, its gradients, and decoding.

        Then those of varlen sequences, by struct.
        """
        groups = [group for group in self.groups if group.varlen or group.name in _ATTENTION]
        groups.sort(
            key=lambda group: len(_ATTENTION) if group.varlen else _ATTENTION.index(group.name)
        )
        found = [Dispatcher(group.table, group) for group in groups]
        return tuple(dispatcher for dispatcher in found if dispatcher.table.rows)

    @property
    def table(self) -> Table:
        """The rows of the kernels that compute a problem."""
        own = self._dispatcher(FORWARD)
        return own.table if own else Table(FORWARD, ())

    @property
    def decoding(self) -> Dispatcher | None:
        """What chooses among the kernels of decoding; None where there are none."""
        return self._dispatcher(DECODE)

    @property
    def called(self) -> tuple[Dispatcher, ...]:
        """Those of calls that users of JAX make: all but those of gradients."""
        return tuple(one for one in self.dispatchers if one.signature.kind != BACKWARD)

    @property
    def of_gradients(self) -> Dispatcher | None:
        """What chooses among those of gradients; None where there are none."""
        return self._dispatcher(BACKWARD)

    @property
    def varlen(self) -> tuple[Dispatcher, ...]:
        """What chooses among the kernels of varlen sequences, by struct."""
        return tuple(one for one in self.called if one.group.varlen)

    @property
    def of_varlen_gradients(self) -> Dispatcher | None:
        """What chooses among those of their gradients; None where there are none."""
        return self._dispatcher(f"{BACKWARD}_varlen")

    def _dispatcher(self, kind: str) -> Dispatcher | None:
        return next((one for one in self.dispatchers if one.kind == kind), None)

    @cached_property
    def measured(self) -> frozenset[str]:
        """What of calls the dispatchers choose by."""
        return frozenset(name for one in self.dispatchers for name in one.table.measured)

    @property
    def multiplies(self) -> bool:
        """Whether some of that is a product of sizes."""
        return not self.measured <= PLAIN

    @property
    def in_tiles(self) -> bool:
        """Whether some of that is a number of tiles."""
        return bool(self.measured & {"tiles", "group_tiles"})

    @property
    def by_groups(self) -> bool:
        """Whether some of that is of KV heads' groups of heads."""
        return bool(self.measured & {"group", "group_tiles"})

    @cached_property
    def gradients(self) -> Mapping[str, Gradient]:
        """By slug, the kernels whose results have gradients, here or by another kernel."""
        found = (self._gradient(kernel) for kernel in self.kernels)
        return {one.of.slug: one for one in found if one.by or one.wanted}

    def _gradient(self, of: Kernel) -> Gradient:
        every = [k for k in self.kernels if gradients.differentiates(k.schedule, of.schedule)]
        by = next(iter(every), None)
        repeating = next((k for k in every if Problem.of(k.schedule).deterministic), None)
        return Gradient(of, by, repeating, "" if by else gradients.wanted(of.schedule))

    @property
    def differentiable(self) -> tuple[Gradient, ...]:
        """Those of them whose gradients a kernel of the folder computes."""
        return tuple(one for one in self.gradients.values() if one.by)

    @property
    def lacking(self) -> tuple[Gradient, ...]:
        """Those of them whose gradients none of the folder computes."""
        return tuple(one for one in self.gradients.values() if not one.by)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The kernels by struct."""
        found: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            signature = kernel.signature
            found.setdefault(f"{signature.kind} {signature.form}".strip(), []).append(kernel)
        return tuple(Group(name, tuple(kernels)) for name, kernels in found.items())

    @cached_property
    def statuses(self) -> tuple[Status, ...]:
        """How calls of any of its functions end."""
        return statuses([kernel.signature for kernel in self.kernels])

    @property
    def no_kernel(self) -> int:
        """The status of a call that none of its kernels computes."""
        return NO_KERNEL

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
        for table in (one.table for one in self.dispatchers):
            op = f"{self.name}_{table.kind}"
            own += [f"{self.name}_{table.pick}", op, f"{op}_workspace", f"{op}_message"]
        for kernel in self.pinned:
            own += [f"{self.name}_{kernel.alias}{end}" for end in ("", "_workspace", "_message")]
        return (*own, *(function for kernel in self.kernels for function in kernel.functions))

    def record(self) -> Mapping[str, Any]:
        """Return what it is made of, for manifest.json."""
        return {
            "fagen": self.version,
            "name": self.name,
            "version": self.released,
            "format": self.format,
            "with_cutlass": self.with_cutlass,
            "kernels": [
                {
                    "slug": kernel.slug,
                    "name": kernel.alias,
                    "kind": kernel.plan.kind,
                    "schedule": dict(kernel.schedule.settings()),
                    "source_hash": kernel.source.hash,
                    "device_hash": kernel.source.hashes.device,
                    "launcher_hash": kernel.source.hashes.launcher,
                    "evidence": kernel.evidence and _told(kernel.evidence),
                }
                for kernel in self.kernels
            ],
        }


def _case(signature: Signature, number: int) -> tuple[int, ...]:
    """Some sizes of a call, which keep the signature's rules."""
    sizes = {
        size.name: (_LENGTHS if size.name.startswith(("seqlen", "total")) else _COUNTS)[
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
        with_cutlass=manifest.with_cutlass,
        format=manifest.format,
        own_version=manifest.version,
    )


def _kernel(alias: str, schedule: Schedule) -> Kernel:
    planned = plan(schedule)
    source = render(planned)
    found = evidence.of_source(source.slug, lambda: source.hashes)
    return Kernel(alias, schedule, planned, source, found)


def _told(found: Evidence) -> Mapping[str, Any]:
    return {
        "card": found.card,
        "date": found.date,
        "driver": found.driver,
        "compiler": found.compiler,
        "cutlass": found.cutlass,
        "machine_code": found.machine_code,
        "yardstick": found.yardstick,
        "speeds": [vars(speed) for speed in found.speeds],
    }
