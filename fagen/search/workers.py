"""Do work in child processes: a function and its arguments go in, a Future comes out.

A child that dies or takes too long fails its own task and is replaced; the others do not notice.
Children end when their parent does, however it ends.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from fagen.errors import FagenError

_SPAWN = multiprocessing.get_context("spawn")  # a forked child could not use a GPU


class ChildDied(FagenError):  # noqa: N818 - it names what happened
    """The process that did a task ended, or was ended since it took too long."""


class Workers:
    """`size` child processes, each with one task at a time; started when first needed."""

    def __init__(self, size: int, *, niceness: int = 0) -> None:
        self._niceness = niceness
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="workers")
        self._idle: SimpleQueue[_Child | None] = SimpleQueue()
        for _ in range(size):
            self._idle.put(None)
        self._busy: set[_Child] = set()
        self._closed = False

    def submit(
        self, work: Callable[..., Any], *arguments: Any, timeout: float | None = None
    ) -> Future[Any]:
        """Run work(*arguments) in a child; the work and its answer must survive pickling.

        The Future raises what the work raised, or ChildDied, also after `timeout` seconds.
        """
        return self._threads.submit(self._run, work, arguments, timeout)

    def close(self) -> None:
        """End the children at once."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in list(self._busy):
            child.kill()  # its thread hears of it, and sees to the rest
        while not self._idle.empty():
            if idle := self._idle.get():
                idle.end()

    def _run(self, work: Callable[..., Any], arguments: Any, timeout: float | None) -> Any:
        child: _Child | None = self._idle.get() or _Child(self._niceness)
        assert child
        well = False
        self._busy.add(child)
        try:
            done, answer = child.ask((work, arguments), timeout)
            # what was not foreseen may have broken more than the task: a GPU's context, for one
            well = not self._closed and (done or isinstance(answer, FagenError))
        finally:
            self._busy.discard(child)
            if not well:
                child.end()
                child = None
            self._idle.put(child)
        if not done:
            raise answer
        return answer


class _Child:
    def __init__(self, niceness: int) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        # not a daemon: what it runs may have children of its own
        self._process: BaseProcess = _SPAWN.Process(target=_serve, args=(theirs, niceness))
        self._process.start()
        theirs.close()  # only the child's end is left: it hears when we are gone

    def ask(self, task: Any, timeout: float | None) -> tuple[bool, Any]:
        try:
            self._pipe.send(task)
            if not self._pipe.poll(timeout):
                raise ChildDied(f"took longer than {timeout:g} s and was ended")
            return self._pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            raise ChildDied(f"its process ended with status {self._process.exitcode}") from None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _end_with_parent() -> None:
    """End in the middle of a task, too; what that runs, a compiler for one, ends with it."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _serve(pipe: Connection, niceness: int) -> None:
    """Answer (done, answer) to each (work, arguments), until the other end is gone."""
    os.nice(niceness)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to judge
    while True:
        try:
            work, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, work(*arguments))
        except Exception as error:
            plain = isinstance(error, FagenError) or type(error).__module__ == "builtins"
            # another package's exception would have the parent import that package
            answer = (False, error if plain else RuntimeError(f"{type(error).__name__}: {error}"))
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # an answer that does not travel
            pipe.send((False, RuntimeError(f"{type(error).__name__}: {error}; {answer[1]!r}")))
