"""Where a search's work is done: the workers of a dask.distributed cluster, as Futures.

A worker that may compile has the resource CPU, one for each of its threads; a worker that has a GPU
to itself has the resource GPU=1.  Work of a worker that is lost is done by another one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from fagen.errors import DeviceError, FagenError
from fagen.search.executor import COMPILE_TIMEOUT, Work, timeout_of
from fagen.search.tasks import Compiled, Round, Timed
from fagen.search.workers import ChildDied

CONNECT = 30.0  # seconds to wait for the scheduler
QUEUED = 60.0  # seconds more than on one machine: a worker may be starting


class ClusterExecutor:
    """The workers of one scheduler; more may join, and some may go."""

    def __init__(self, address: str, work: Work) -> None:
        """Connect.  Raises FagenError where there is no scheduler or no worker of a kind."""
        from distributed import Client  # an extra

        self.work = work
        try:
            self._client = Client(address, timeout=CONNECT)
        except (OSError, ValueError) as error:
            raise FagenError(f"{address}: no dask scheduler answers: {error}") from None
        try:
            if not self.compile_slots:
                raise FagenError(f'{address}: no worker has --resources "CPU=…" to compile')
            if not self.gpus:
                raise DeviceError(f'{address}: no worker has --resources "GPU=1"')
            self.card: tuple[str, str] = self._card()
        except BaseException:
            self.close()
            raise

    def _card(self) -> tuple[str, str]:
        """The GPUs' name and driver.  Raises FagenError where they are not all of one kind."""
        cards: dict[str, tuple[str, str]] = self._client.run(
            self.work.card, 0, workers=self._having("GPU")
        )
        kinds = sorted(set(cards.values()))
        if len(kinds) > 1:
            raise FagenError(f"GPUs of several kinds, search one at a time: {kinds}")
        return kinds[0]

    def _workers(self) -> dict[str, dict[str, Any]]:
        workers: dict[str, dict[str, Any]] = self._client.scheduler_info(n_workers=-1)["workers"]
        return workers

    def _having(self, resource: str) -> list[str]:
        return [name for name, about in self._workers().items() if about["resources"].get(resource)]

    def _count(self, resource: str) -> int:
        return int(sum(about["resources"].get(resource, 0) for about in self._workers().values()))

    @property
    def compile_slots(self) -> int:
        """How many kernels may be compiled at once, now."""
        return self._count("CPU")

    @property
    def gpus(self) -> tuple[int, ...]:
        """A number for each GPU there is now; which one takes a Round is the scheduler's choice."""
        return tuple(range(self._count("GPU")))

    def compile(self, slug: str) -> "Future[Compiled]":
        """Compile a kernel where there is a processor, and have it sent here."""
        return self._submit(self.work.send, slug, resource="CPU", timeout=COMPILE_TIMEOUT)

    def time(self, task: Round, gpu: int) -> "Future[Timed]":
        """Time kernels where there is a GPU: each worker sees one, as its first."""
        return self._submit(
            self.work.time, task, 0, resource="GPU", timeout=QUEUED + timeout_of(task)
        )

    def _submit(
        self, work: Callable[..., Any], *arguments: Any, resource: str, timeout: float
    ) -> "Future[Any]":
        task = self._client.submit(work, *arguments, pure=False, resources={resource: 1})
        answer: Future[Any] = Future()

        def finish(task: Any) -> None:
            watch.cancel()
            with suppress(InvalidStateError):  # it came too late
                if task.status == "finished":
                    answer.set_result(task.result())
                else:
                    answer.set_exception(task.exception() or ChildDied(f"it is {task.status}"))

        def overdue() -> None:
            """Begin the worker anew that is at it; one that only waits for its turn goes on."""
            at_it = [w for w, keys in self._client.processing().items() if task.key in keys]
            with suppress(InvalidStateError):
                answer.set_exception(ChildDied(f"took longer than {timeout:g} s and was ended"))
            task.cancel(force=True)
            if at_it:
                self._client.restart_workers(at_it, raise_for_error=False)

        watch = threading.Timer(timeout, overdue)
        watch.daemon = True
        watch.start()
        task.add_done_callback(finish)
        return answer

    def close(self) -> None:
        """Take back what is under way; the cluster stays."""
        self._client.close()
