"""A vendored folder worked out: its kernels by kind, the dispatcher's rows, what templates read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any

import fagen
from fagen import evidence
from fagen.combining import Filling
from fagen.dispatch.rows import (
    COMBINING,
    DRAWN_LAST,
    GROUP_TILE,
    MOST,
    MOST_SHARED,
    TRANSPOSED_LAUNCH,
)
from fagen.errors import ScheduleError
from fagen.evidence import Evidence
from fagen.expr import words
from fagen.expr.canonical import all_of
from fagen.expr.cpp import HELPERS
from fagen.expr.words import OPEN
from fagen.kind import Plan
from fagen.masking import name_of
from fagen.paths import locate
from fagen.registry import plan
from fagen.render import Source, render, written
from fagen.schedule import Schedule
from fagen.signature import Scalar, Signature
from fagen.statuses import NO_KERNEL, Status, statuses
from fagen.toolchain import FLAGS
from fagen.vendor.closure import needed
from fagen.vendor.examples import Example, of_group
from fagen.vendor.gradients import Gradient, gradients_of
from fagen.vendor.manifest import Manifest
from fagen.vendor.table import FIELDS, Table, table_of, variant_of
from fagen.vocab import BACKWARD, CACHES, DECODE, DTYPES, FORWARD, PARTIALS, SCALE_ROWS

# What CMake sets in its own ways: the standard, the architecture, position-independent code.
_CMAKES = ("-std=", "-gencode", "-Xcompiler", "-fPIC")
# They leave machine code as it is: -lineinfo makes a library four times as large, by its PTX.
_NOT_FOR_USERS = ("-lineinfo", "-Xptxas", "-v")

# What a folder's manifest.json has of a kernel's evidence, beside its speeds.
_OF_EVIDENCE = ("card", "date", "driver", "compiler", "cutlass", "machine_code", "yardstick")

_ATTENTION = (FORWARD, BACKWARD, DECODE)
# words of `mask` that calls say beside causal and window
_BESIDE = "chunked", "prefix", "document"

# of the test program's calls: around a block's ends, and by turns
_LENGTHS = (1, 128, 127, 333, 260)
_COUNTS = (1, 2, 3, 2, 1)
_SCALE, _CAP, _FEW_KEYS = 0.1, 1.5, 5


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
        exists = (locate("templates") / template).exists()
        return written(template, plan=self.plan) if exists else ""

    def record(self) -> Mapping[str, Any]:
        """Return what manifest.json says of it."""
        ran = self.evidence
        return {
            "slug": self.slug,
            "name": self.alias,
            "kind": self.plan.kind,
            "schedule": dict(self.schedule.settings()),
            "source_hash": self.source.hash,
            "device_hash": self.source.hashes.device,
            "launcher_hash": self.source.hashes.launcher,
            "evidence": ran
            and {
                **{name: getattr(ran, name) for name in _OF_EVIDENCE},
                "speeds": [vars(speed) for speed in ran.speeds],
            },
        }

    @property
    def numbers(self) -> tuple[tuple[str, float], ...]:
        """The numbers of calls that the test program makes, as C has them."""
        scalars = (scalar for scalar in self.signature.numbers if not scalar.words)
        return tuple((scalar.in_struct, _number(scalar)) for scalar in scalars)

    @property
    def cases(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of calls that the test program makes, in the signature's order."""
        return tuple(_case(self.signature, number) for number in range(len(_LENGTHS)))


@dataclass(frozen=True)
class Group:
    """The kernels of one kind, and of one form of its calls, which share a struct.

    A C function chooses among those of attention, by the rows of `table`.
    """

    name: str
    kernels: tuple[Kernel, ...]

    @property
    def signature(self) -> Signature:
        """That of the first; of another only what its tensors hold differs."""
        return self.kernels[0].signature

    @cached_property
    def table(self) -> Table:
        """What chooses among them; without rows where nothing does."""
        return table_of([kernel.schedule for kernel in self.kernels], self.signature.form)

    @property
    def kind(self) -> str:
        """The name of what the function computes."""
        return self.table.kind

    @property
    def varlen(self) -> bool:
        """Whether they take varlen sequences, and something chooses among them."""
        kinds = FORWARD, BACKWARD
        return self.signature.kind in kinds and "varlen" in self.signature.form.split()

    @property
    def variant(self) -> str:
        """The words of their struct that are of what mask, score or sinks are given."""
        return variant_of(self.signature.form)

    @cached_property
    def statuses(self) -> tuple[Status, ...]:
        """How calls of the function end, in words of all that it chooses among."""
        return statuses([kernel.signature for kernel in self.kernels])

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What they take, in torch's words."""
        names = dict.fromkeys(row.problem.dtype for row in self.table.rows)
        return tuple(DTYPES[name].torch for name in names)

    @property
    def usual(self) -> tuple[tuple[str, str], ...]:
        """The same, and what O is in where a call does not say."""
        names = dict.fromkeys(row.problem.dtype for row in self.table.rows)
        return tuple((DTYPES[name].torch, DTYPES[DTYPES[name].out].torch) for name in names)

    @property
    def clobbers(self) -> bool:
        """Whether one of them leaves anything in its workspace, where another's holds zeros."""
        launches = [kernel.plan.launches for kernel in self.kernels]
        return self.zeroed and any(x.needs_workspace and not x.zeroed for x in launches)

    @property
    def zeroed(self) -> bool:
        """Whether the workspace of one of them is zeros before the first call."""
        return any(kernel.plan.launches.zeroed for kernel in self.kernels)


@dataclass(frozen=True)
class Called:
    """What chooses among the kernels of one call in Python: by struct, as C has it."""

    groups: tuple[Group, ...]

    @property
    def table(self) -> Table:
        """The rows, of all structs."""
        tables = [group.table for group in self.groups]
        return Table(tables[0].kind, tuple(chain(*(table.rows for table in tables))))

    @property
    def plain(self) -> str:
        """What chooses in C where nothing is given to a mask or a score."""
        return self.groups[0].table.pick

    @property
    def has_variants(self) -> bool:
        """Whether a mask, a score or sinks give something to a kernel."""
        return any(group.variant for group in self.groups)


@dataclass(frozen=True)
class Folder:
    """All that is in a vendored folder."""

    name: str
    kernels: tuple[Kernel, ...]
    with_cutlass: bool
    format: str
    own_version: str = ""  # that a manifest gives it

    version = fagen.__version__
    fields = FIELDS  # of a problem
    scale_rows = SCALE_ROWS  # how many rows may share a scale
    most = MOST  # what is open to the top
    drawn_last, combining = DRAWN_LAST, COMBINING
    split_keys, split_unit = Filling.most_keys, Filling.unit
    transposed_launch = TRANSPOSED_LAUNCH
    most_shared, group_tile = MOST_SHARED, GROUP_TILE
    open = OPEN  # how far a window goes to a side without an end
    sinks = tuple((row.name, row.torch) for row in PARTIALS.values())  # in what they may be
    no_kernel = NO_KERNEL  # the status of a call that none of its kernels computes
    # nvcc's flags, for whoever builds without CMake; and those that CMake knows by no other words
    all_flags = tuple(flag for flag in FLAGS if flag not in _NOT_FOR_USERS)
    flags = tuple(flag for flag in all_flags if not flag.startswith(_CMAKES))

    @property
    def several(self) -> list[tuple[str, str]]:
        """Of which masks of calls, said together, a mask of its kernels is the and."""
        plans: list[Any] = [x.plan for x in self.kernels if x.signature.kind in _ATTENTION]
        texts = {plan.mask.name for plan in plans} - {*words.MASKS}
        called = (("", "window", "causal"), ("", "causal_by_sequence"), ("", *_BESIDE))
        found = []
        for parts in (tuple(filter(None, some)) for some in product(*called)) if texts else ():
            both = all_of(*(words.MASKS[part].expression for part in parts))
            if (name := name_of(both)) in texts:
                found.append((" ".join(parts), name))
        return found

    @property
    def helpers(self) -> str:
        """Functions that the texts of its masks and scores call, as C++."""
        plans: list[Any] = [x.plan for x in self.kernels if x.signature.kind in _ATTENTION]
        called = any(plan.mask.helpers or _helpers_of_score(plan) for plan in plans)
        return "\n".join(HELPERS.values()) if called else ""

    @property
    def released(self) -> str:
        """The version of a package: its own, else fagen's."""
        return self.own_version or self.version

    @property
    def upper(self) -> str:
        """The name as macros and constants begin."""
        return self.name.upper()

    @property
    def struct(self) -> str:
        """The name as C's structs begin."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def needs_cutlass(self) -> bool:
        """Whether a kernel includes CUTLASS's headers."""
        return any(needed([kernel.source.kernel]) for kernel in self.kernels)

    @property
    def unverified(self) -> tuple[Kernel, ...]:
        """The kernels of whose source nothing is on record."""
        return tuple(kernel for kernel in self.kernels if not kernel.evidence)

    @property
    def pinned(self) -> tuple[Kernel, ...]:
        """The kernels that have a name of their own."""
        return tuple(kernel for kernel in self.kernels if kernel.alias)

    @cached_property
    def statuses(self) -> tuple[Status, ...]:
        """How calls of any of its functions end."""
        return statuses([kernel.signature for kernel in self.kernels])

    # ---- what chooses ----

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The kernels by struct."""
        by_struct: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            signature = kernel.signature
            by_struct.setdefault(f"{signature.kind} {signature.form}".strip(), []).append(kernel)
        return tuple(Group(name, tuple(kernels)) for name, kernels in by_struct.items())

    @cached_property
    def dispatchers(self) -> tuple[Group, ...]:
        """Those whose C functions choose: of what is computed, its gradients, and decoding.

        Then those of varlen sequences.
        """
        choosing = [group for group in self.groups if group.table.rows]
        choosing.sort(key=lambda group: (group.varlen, 0 if group.varlen else _rank(group)))
        return tuple(choosing)

    def _dispatcher(self, kind: str) -> Group | None:
        return next((group for group in self.dispatchers if group.kind == kind), None)

    @property
    def attends(self) -> bool:
        """Whether there are kernels of attention."""
        return any(group.signature.kind in _ATTENTION for group in self.groups)

    @property
    def attention(self) -> Group | None:
        """What chooses among the kernels of fagen.attention; None where there are none."""
        return self._dispatcher(FORWARD)

    @property
    def attending(self) -> Called | None:
        """What chooses among the kernels of fagen.attention; None where there are none."""
        return _called_of(
            group for group in self.called if group.signature.kind == FORWARD and not group.varlen
        )

    @property
    def decoders(self) -> Called | None:
        """The same of decoding."""
        return _called_of(group for group in self.called if group.signature.kind == DECODE)

    @property
    def packed(self) -> Called | None:
        """The same of varlen sequences."""
        return _called_of(self.varlen)

    @property
    def variants(self) -> tuple[Group, ...]:
        """Those of dispatchers whose kernels a mask, a score or sinks give something to."""
        return tuple(group for group in self.called if group.variant)

    @property
    def decoding(self) -> Group | None:
        """The same of decoding."""
        return self._dispatcher(DECODE)

    @property
    def of_gradients(self) -> Group | None:
        """The same of gradients."""
        return self._dispatcher(BACKWARD)

    @property
    def of_varlen_gradients(self) -> Group | None:
        """The same of the gradients of varlen sequences."""
        return self._dispatcher(f"{BACKWARD}_varlen")

    @property
    def called(self) -> tuple[Group, ...]:
        """Those of calls that users of Python make: all but those of gradients."""
        return tuple(group for group in self.dispatchers if group.signature.kind != BACKWARD)

    @property
    def varlen(self) -> tuple[Group, ...]:
        """What chooses among the kernels of varlen sequences, by struct."""
        return tuple(group for group in self.called if group.varlen)

    @cached_property
    def measured(self) -> frozenset[str]:
        """What of calls the dispatchers choose by."""
        return frozenset(name for group in self.dispatchers for name in group.table.measured)

    @property
    def by_clocks(self) -> bool:
        """Whether some calls choose by what tiles cost."""
        return any(group.table.by_clocks for group in self.dispatchers)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """A call of each struct."""
        return tuple(of_group(group, self.name) for group in self.groups)

    # ---- gradients ----

    @cached_property
    def gradients(self) -> Mapping[str, Gradient]:
        """By slug, the kernels whose results have gradients, here or by another kernel."""
        return gradients_of(self.kernels)

    @property
    def differentiable(self) -> tuple[Gradient, ...]:
        """Those of them whose gradients a kernel of the folder computes."""
        return tuple(gradient for gradient in self.gradients.values() if gradient.backward)

    @property
    def lacking(self) -> tuple[Gradient, ...]:
        """Those of them whose gradients none of the folder computes."""
        return tuple(gradient for gradient in self.gradients.values() if not gradient.backward)

    # ---- what is written beside texts ----

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """The C functions that others may call, the only ones that the library shows."""
        own = [f"{self.name}_message"]
        for table in (group.table for group in self.dispatchers):
            own += [f"{self.name}_{table.pick}", *_called(f"{self.name}_{table.kind}")]
        for kernel in self.pinned:
            own += _called(f"{self.name}_{kernel.alias}")
        return (*own, *(function for kernel in self.kernels for function in kernel.functions))

    def record(self) -> Mapping[str, Any]:
        """Return what it is made of, for manifest.json."""
        return {
            "fagen": self.version,
            "name": self.name,
            "version": self.released,
            "format": self.format,
            "with_cutlass": self.with_cutlass,
            "kernels": [kernel.record() for kernel in self.kernels],
        }


def _helpers_of_score(plan: Any) -> str:
    return str(plan.score.helpers) if plan.kind != BACKWARD else ""


def _called_of(groups: Iterable[Group]) -> Called | None:
    """What chooses among these, plain ones first; None where there are none."""
    in_order = tuple(sorted(groups, key=lambda group: bool(group.variant)))
    return Called(in_order) if in_order else None


def _called(name: str) -> list[str]:
    """A function of C, and those that say of it how much workspace it needs and how it ended."""
    return [f"{name}{end}" for end in ("", "_workspace", "_message")]


def _rank(group: Group) -> int:
    return _ATTENTION.index(group.signature.kind)


def _case(signature: Signature, number: int) -> tuple[int, ...]:
    """Some sizes of a call, which keep the signature's rules."""
    sizes = {
        size.name: (_LENGTHS if size.name.startswith(("seqlen", "total")) else _COUNTS)[
            (number + place) % len(_LENGTHS)
        ]
        for place, size in enumerate(signature.sizes)
    }
    for rule in signature.rules:
        sizes[rule.size] = sizes[rule.by] * (1 + number % 2)
    return tuple(sizes.values())


def _number(scalar: Scalar) -> float:
    """A number of a call: a small scale, and what shows of a mask and a score."""
    if scalar.type == "float":
        return _SCALE if scalar.positive and not scalar.field and scalar.name == "scale" else _CAP
    least, most = scalar.least or 0, scalar.most or _FEW_KEYS
    return int(min(max(least, _FEW_KEYS), most))


def folder_of(manifest: Manifest) -> Folder:
    """Work a manifest out.

    Raises OverBudget, ScheduleError for a kernel that no folder has yet, and ToolchainError where
    clang-format is missing.
    """
    kernels = tuple(_kernel(alias, schedule) for alias, schedule in manifest.kernels)
    return Folder(
        name=manifest.name,
        kernels=kernels,
        with_cutlass=manifest.with_cutlass,
        format=manifest.format,
        own_version=manifest.version,
    )


def _kernel(alias: str, schedule: Schedule) -> Kernel:
    if schedule.values().get("cache", CACHES[0]) != CACHES[0]:
        raise ScheduleError(
            f"{schedule.slug}: so far no folder has kernels of keys in pages; "
            "`fagen generate` writes one, and fagen.attention_decode calls it"
        )
    planned = plan(schedule)
    source = render(planned)
    ran = evidence.of_source(source.slug, lambda: source.hashes)
    return Kernel(alias, schedule, planned, source, ran)
