"""Kernels with all their faults, run on the simulated GPU with one of them at a time."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen import simulator
from fagen.errors import DeviceError
from fagen.kind import Plan
from fagen.runtime.c_interface import library_at
from tests.mutants import Fault, Faults

Run = Callable[..., None]
# what a kernel under test is called with: each calls its argument with tensors by name
Scene = Callable[[Plan, Run], object]


class Called(NamedTuple):
    """A call, what a kernel without a fault made of it, and the CPU-seconds that took."""

    arguments: dict[str, Any]
    results: dict[str, Tensor]
    seconds: float


class Faulted:
    """A kernel with all its faults, compiled once, and calls in which they are to show."""

    def __init__(self, plan: Plan, faults: Faults, *, loose: str = "") -> None:
        """`loose` is a result that is summed in any order, and its last bits are any."""
        self.plan, self.faults, self.loose = plan, faults.faults, loose
        self.library = simulator.build(faults.source)
        self.result_names = [x.name for x in plan.signature.tensors if x.access != "in"]
        self.calls: list[Called] = []

    def record(self, scene: Scene, most: int | None = None) -> None:
        """Call the kernel, without a fault, as a scene does; keep its longest calls.

        The scene says itself whether what the kernel makes is right.
        """
        before, self.calls = self.calls, []
        scene(self.plan, self._record)
        longest = sorted(self.calls, key=lambda call: -call.seconds)[:most]
        self.calls = sorted(
            before + longest, key=lambda call: call.seconds
        )  # most faults soon show

    def _is_right(self, call: Called, seed: int) -> bool:
        """Whether a call, on a copy of its results, gives what it gave without a fault."""
        arguments = {
            name: x.clone() if name in self.result_names else x
            for name, x in call.arguments.items()
        }
        simulator.call(self.plan, self.library, seed=seed, **arguments)
        return all(self._alike(name, arguments[name], x) for name, x in call.results.items())

    def _record(self, **given: Any) -> None:
        arguments = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
        began = time.process_time()
        simulator.call(self.plan, self.library, seed=0, **given)
        seconds = time.process_time() - began
        names = (name for name in self.result_names if given.get(name) is not None)
        self.calls.append(Called(arguments, {name: given[name].clone() for name in names}, seconds))

    def reason(self, fault: Fault | None) -> str:
        """Why calls are stuck with a fault, in this very process; nothing where they are right."""
        choose = library_at(self.library)["fagen_fault"]
        choose(fault.number if fault else 0)
        try:
            assert all(self._is_right(call, 0) for call in self.calls)
        except DeviceError as error:
            return str(error)
        finally:
            choose(0)
        return ""

    def end(self, fault: int, seeds: int) -> str:
        """How runs with a fault end: the first that is not as without one, or "survives"."""
        child = os.fork()
        if child == 0:
            ending = 3
            try:
                faulthandler.disable()  # who crashes is found, and says nothing
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                ending = self._ending(fault, seeds)
            finally:
                os._exit(ending)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return _ENDINGS[status] if status >= 0 else "crashes" if status == -11 else "hangs"

    def _ending(self, fault: int, seeds: int) -> int:
        library_at(self.library)["fagen_fault"](fault)
        for seed in range(seeds):
            for call in self.calls:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.3 + 5 * call.seconds)
                try:
                    right = self._is_right(call, seed)
                except DeviceError:
                    return 2
                if not right:
                    return 1
        return 0

    def _alike(self, name: str, one: Tensor, other: Tensor) -> bool:
        if name == self.loose:
            # what no sequence has stays NaN
            unset, one, other = other.isnan(), one.double(), other.double()
            distance = (one - other).masked_fill(unset, 0).norm()
            near = distance <= other.masked_fill(unset, 0).norm() / 256
            return torch.equal(one.isnan(), unset) and bool(near)
        return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


_ENDINGS = ("survives", "wrong", "stuck", "broken")
