"""Where a search's work is done: this machine's processors and GPUs, as Futures.

An Executor runs two kinds of work, to compile a slug and to time a Round; what they are is its
Work, so that a recording can stand in for compiler and GPU.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from fagen.search import tasks
from fagen.search.tasks import Compiled, Round, Timed
from fagen.search.workers import Workers
from fagen.toolchain import compile_jobs

MAX_JOBS = 1_024  # that are compiled at once
COMPILE_TIMEOUT = 600.0  # seconds
ROUND_TIMEOUT = 45.0
LONE_TIMEOUT = 25.0  # of a round of one kernel, which may be the one that hangs
START_TIMEOUT = 120.0  # until a GPU answers for the first time


@dataclass(frozen=True)
class Work:
    """The functions that a search sends out; all survive pickling.

    `send` is `compile` with the kernel itself in the answer, for another machine.
    `source_hash` tells of a slug whether what is known of it is about today's source; `cards` gives
    the numbers of this machine's GPUs, `card` the name and the driver of one.
    """

    compile: Callable[[str], Compiled] = tasks.compile_kernel
    send: Callable[[str], Compiled] = tasks.compile_to_send
    time: Callable[[Round, int], Timed] = tasks.time_round
    source_hash: Callable[[str], str] = tasks.source_hash
    compiler: Callable[[], str] = tasks.compiler
    cards: Callable[[], tuple[int, ...]] = tasks.find_cards
    card: Callable[[int], tuple[str, str]] = tasks.card


REAL = Work()


class Executor(Protocol):
    """What a search works with."""

    work: Work

    @property
    def compile_slots(self) -> int:
        """How many kernels may be compiled at once."""

    @property
    def gpus(self) -> tuple[Any, ...]:
        """The GPUs, each of which times one Round at a time."""

    @property
    def card(self) -> tuple[str, str]:
        """The GPUs' name and driver; all are of one kind."""

    def compile(self, slug: str) -> "Future[Compiled]":
        """Compile a kernel."""

    def time(self, task: Round, gpu: Any) -> "Future[Timed]":
        """Time kernels on one of the GPUs."""

    def close(self) -> None:
        """Give everything back at once."""


def timeout_of(task: Round) -> float:
    """The seconds after which a round is given up."""
    return ROUND_TIMEOUT if len(task.kernels) > 1 else LONE_TIMEOUT


class LocalExecutor:
    """This machine: a process for each compilation, and one for each GPU."""

    def __init__(self, work: Work = REAL, *, jobs: int | None = None) -> None:
        """`jobs` kernels are compiled at once; by default as `compile_jobs` says.

        Raises DeviceError where there is no Hopper GPU, ToolchainError where there is no compiler.
        """
        self.work = work
        work.compiler()  # raises before anything is started
        self.compile_slots = jobs or compile_jobs()
        self._compilers = Workers(self.compile_slots, niceness=10)
        first = Workers(1)
        self._timers: dict[int, Workers] = {}
        try:
            self.gpus: tuple[int, ...] = first.submit(work.cards, timeout=START_TIMEOUT).result()
            self.card: tuple[str, str] = first.submit(work.card, self.gpus[0]).result()
        except BaseException:
            first.close()
            raise
        self._timers = {gpu: first if gpu == self.gpus[0] else Workers(1) for gpu in self.gpus}

    def compile(self, slug: str) -> "Future[Compiled]":
        """Compile a kernel in a process of its own."""
        return self._compilers.submit(self.work.compile, slug, timeout=COMPILE_TIMEOUT)

    def time(self, task: Round, gpu: int) -> "Future[Timed]":
        """Time kernels in the process of a GPU."""
        return self._timers[gpu].submit(self.work.time, task, gpu, timeout=timeout_of(task))

    def close(self) -> None:
        """End all processes."""
        for workers in (self._compilers, *self._timers.values()):
            workers.close()
