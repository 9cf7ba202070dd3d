"""A call's key in, its kernel out: chosen, built and loaded once, then looked up.

A public call declares a Door. What a call has at hand is looked up as it is; where that is new, the
call makes its CallKey, rows of the dispatch tables choose by sizes, and what is built is kept.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch._C import _is_tracing
from torch.compiler import is_dynamo_compiling

from fagen.dispatch.pick import search_command
from fagen.dispatch.select import Buildable, Rows, buildable, first_slug, select, sized_slug
from fagen.errors import DeviceError, UntunedWarning
from fagen.kind import Plan
from fagen.problem import Problem
from fagen.registry import committed_file, given
from fagen.runtime import op
from fagen.runtime.op import Kernel, Named
from fagen.schedule import Schedule

Choice = str | Path | Schedule | None  # a file, a slug, or the thing itself
Sizes = tuple[Any, Any, Any, Any, Any]  # batch, heads, KV heads, queries, keys
Function = TypeVar("Function", bound=Callable[..., Any])

MOST_KNOWN = 10_000  # calls of different sizes of a door: some hundred bytes each
_PLAIN = [int] * 5  # the types of sizes that torch leaves none of open


@dataclass(frozen=True)
class CallKey:
    """What tells the kernels of one call from those of another, whatever its sizes; hashed once."""

    device: torch.device
    problem: Problem | None = None  # None where no table chooses
    schedule: Choice = None  # that the caller named
    derived: tuple[Schedule, ...] = ()  # the best first, where no table has a kernel
    tabled: bool = True  # whether tables are asked

    def __post_init__(self) -> None:
        parts = self.device, self.problem, self.schedule, self.derived, self.tabled
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return cast(int, self._hash)  # type: ignore[attr-defined]

    @property
    def card(self) -> str:
        """The name of the GPU; "" of a CPU, which has the rows of the card that comes first."""
        return card_of(self.device)


class Ready:
    """What a CallKey has: rows of the tables, None where none is asked, and kernels by their slugs.

    One thread readies a kernel of it at a time, and the others wait.
    """

    def __init__(self, key: CallKey) -> None:
        self.key = key
        self.lock = RLock()
        self.rows: Rows | None = None
        self.is_looked_up = False
        self.kernels: dict[Choice, Kernel] = {}  # None the usual one

    def look_up(self) -> Rows | None:
        """Return the rows; the first time tables are read.  Raises ScheduleError."""
        with self.lock:
            key = self.key
            if not self.is_looked_up and key.problem and key.tabled and key.schedule is None:
                self.rows = select(key.problem, key.card)
            self.is_looked_up = True
            return self.rows


# All that is ready in this process.
_ready: dict[CallKey, Ready] = {}


class Door:
    """A public call: how it is called and readied, in words, and how its CallKey is made.

    `key_of` takes what torch.compile can tell of a call: numbers, words, dtypes and devices.
    `not_ready` begins the refusal to build while a CUDA graph is captured; it `computes` a problem,
    which `call` is for.
    """

    def __init__(
        self,
        name: str,
        key_of: Callable[..., CallKey],
        not_ready: str,
        computes: str = "{}",
        call: str = "",
    ) -> None:
        self.key_of, self.not_ready, self.computes = key_of, not_ready, computes
        self.call = call or f"fagen.{name}"
        # By what calls have at hand, their kernels: asking a tensor costs more than all else in
        # Python, and so does a key.
        self.known: dict[tuple[Any, ...], Kernel] = {}
        # By the arguments of key_of, what is ready for calls that differ in sizes alone: a call of
        # new sizes is one of each step of a loop whose keys grow.
        self.alike: dict[tuple[Any, ...], Ready] = {}
        # What counts calls while they are recorded.
        self.note: Callable[..., None] | None = None
        DOORS[name] = self

    def rows(self, key: CallKey) -> Rows | None:
        """What tables have for a call; None where none is asked.  Raises ScheduleError."""
        return self.ready(key).look_up()

    def ready(self, key: CallKey, known_key: tuple[Any, ...] = ()) -> Ready:
        """Return what is ready for a key, kept as that of these arguments of key_of."""
        ready = _ready.get(key) or _ready.setdefault(key, Ready(key))
        if known_key and len(self.alike) < MOST_KNOWN:
            self.alike[known_key] = ready
        return ready

    def find(
        self,
        ready: Ready,
        sizes: Sizes | None = None,
        call: tuple[Any, ...] = (),
        *,
        slug: Choice = None,
        progress: Callable[[str], None] | None = None,
    ) -> Kernel:
        """Return the kernel of a call of these sizes, or that of a slug, readied if need be.

        It is kept as that of such calls. While a CUDA graph is captured a kernel for few queries
        that is not ready is passed over. Raises what the public call does.
        """
        # One frame: what serves a call can be read, and stepped through, from here down. Where the
        # kernel is ready, sizes are all that is looked at: no lock is taken and no key made.
        rows = ready.rows if ready.is_looked_up else ready.look_up()
        by_sizes = surely_so = None
        if rows is None:
            slug = ready.key.schedule
        elif slug is None:
            slug = rows.only
            if sizes is not None and rows.others:
                by_sizes = sizes
                if [*map(type, sizes)] != _PLAIN:
                    surely_so = surely
                slug = first_slug(rows, *sizes, surely=surely_so)
        kernel, is_final = ready.kernels.get(slug), True
        if kernel is None:
            key = ready.key
            with ready.lock:
                if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    is_final = by_sizes is None
                    if rows is not None and by_sizes is not None:
                        is_ready = ready.kernels.__contains__
                        slug = first_slug(rows, *by_sizes, surely=surely_so, ready=is_ready)
                        if key.problem and key.problem.varlen and not is_ready(slug):
                            slug = next(iter(ready.kernels), slug)  # each is for all lengths
                kernel = ready.kernels.get(slug)
                if kernel is None:
                    usual = Buildable(key.derived, bool(key.problem and key.schedule is None))
                    serving = usual if slug == key.schedule and key.derived else None
                    schedules, derived = serving or buildable(cast(Problem, key.problem), slug)
                    in_order = key.problem and key.problem.deterministic
                    more = ", deterministic=True" if in_order else ""
                    kernel = op.ready(
                        schedules,
                        key.device,
                        not_ready=self.not_ready.format(more=more),
                        progress=progress,
                    )
                    if derived and not (serving and committed_file(kernel.slug).exists()):
                        search = search_command(kernel.slug)
                        search = search and (
                            f". To search for a faster one, which {self.call} then takes: {search}"
                        )
                        warnings.warn(
                            f"no schedule was tuned for {self.computes.format(key.problem)}: "
                            f"{kernel.slug} is derived{search}",
                            UntunedWarning,
                            stacklevel=_outside(),
                        )
                    ready.kernels[slug] = kernel
        if call and is_final and not _is_tracing() and len(self.known) < MOST_KNOWN:
            kernel = kernel.of_sizes()
            try:
                self.known[call] = kernel
            except TypeError:  # sizes that are left open are no keys
                kernel.numbers = None
        return kernel

    def prepare(
        self, key: CallKey, slug: Choice, progress: Callable[[str], None] | None = None
    ) -> Kernel:
        """Ready the kernel of a slug, run once on a GPU so that calls of it can be captured."""
        ready = self.ready(key)
        is_new = slug not in ready.kernels
        kernel = self.find(ready, slug=slug, progress=progress)
        if is_new and key.device.type == "cuda":
            op.run_once(cast(Plan, kernel.plan), key.device)
        return kernel


DOORS: dict[str, Door] = {}

# What the node of gradients knows of calls of fagen.attention, by their bytes: of their kernel the
# numbers, and the scale that is meant.
known_calls: dict[bytes, tuple[dict[bool, int], float]] = {}


def reset() -> None:
    """Forget what is ready, as in a new process; ops stay registered with torch."""
    _ready.clear()
    known_calls.clear()
    for door in DOORS.values():
        door.known.clear()
        door.alike.clear()
    op.forget()


def _outside() -> int:
    """How many frames up the caller of fagen is, from whoever warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("fagen."):
        level, frame = level + 1, frame.f_back
    return level


# ---- what torch.compile traces -------------------------------------------------------------------


def surely(fits: Any) -> bool:
    """Whether a comparison holds for all that traced sizes may be; this adds no guard."""
    if isinstance(fits, torch.Tensor):  # of sizes as torch.jit.trace has them, which are known
        return bool(fits)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # sympy: half a second

    return statically_known_true(fits)  # type: ignore[no-any-return]


def untraced(function: Function) -> Function:
    """Have torch.compile call a function as it is while it traces, and keep what it returns.

    Arguments and results are numbers, words, dtypes and devices, or tuples of these. What it
    readies is so outside of the graph, in which nothing of it is left. What it raises is a
    ValueError of the same words there, which torch takes for the caller's: what is not to be one
    graph runs untraced, and raises it as it is.
    """

    def tried(*args: Any, **named: Any) -> tuple[Any, str | None]:
        try:
            return function(*args, **named), None
        except Exception as error:
            return None, str(error)

    # as torch.compiler.assume_constant_result does; importing that takes more than a second
    tried._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not is_dynamo_compiling():
            return function(*args, **named)
        result, refusal = tried(*args, **named)
        if refusal is not None:
            raise ValueError(refusal)
        return result

    return cast(Function, call)


def traced(door: str, sizes: Sizes | None, *fields: Any) -> tuple[Named, Kernel]:
    """Return the kernel of a call that is traced, by name too; its key is made of `fields`."""
    note = DOORS[door].note
    if note is not None:
        note()
    slug, rows = None, None if sizes is None else _rows_of(door, fields)
    if rows is not None and sizes is not None:
        slug = first_slug(rows, *sizes, surely=surely, sized=_sized_slug)
    name = _named(door, fields, slug)
    return name, op.traced_kernel(name)


_sized_slug = untraced(sized_slug)


@untraced
def _rows_of(door: str, fields: tuple[Any, ...]) -> tuple[Any, ...] | None:
    rows = DOORS[door].rows(DOORS[door].key_of(*fields))
    return None if rows is None else tuple(rows)


@untraced
def _named(door: str, fields: tuple[Any, ...], slug: str | None) -> Named:
    """Ready a kernel, and tell of it by name."""
    public = DOORS[door]
    key = public.key_of(*fields)
    kernel = public.find(public.ready(key), slug=slug)
    return op.named(cast(Plan, kernel.plan), key.device.type)


@untraced
def slug_of(schedule: str | Path | Schedule) -> str:
    """The slug of a schedule that a caller has chosen.  Raises ScheduleError where it is none."""
    return given(schedule).slug


# ---- which device --------------------------------------------------------------------------------


@untraced
@cache
def card_of(device: torch.device) -> str:
    """The name of a GPU; "" of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def placed(device: torch.device | str | None) -> torch.device:
    """The device that a caller means: None is the current GPU, or the CPU where there is none.

    Raises ValueError where torch knows none of that name, DeviceError where torch sees no GPU and
    one is meant.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # lists what all torch's backends are called
        raise ValueError(f"device is {device!r}, which torch does not know here") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f'device is "{place}", and torch sees no GPU; leave it out, and calls on CPU tensors '
            "are emulated"
        )
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place
