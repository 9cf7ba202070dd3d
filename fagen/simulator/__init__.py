"""Run a kernel's own text on a CPU, thread by thread, with everything asynchronous at random times.

For who has no Hopper GPU, or a kernel that hangs on one: a deadlock is told by who waits for what.
It takes seconds for what a GPU does in microseconds, so sizes are to be small.
"""

import hashlib
from pathlib import Path
from typing import Any

from fagen.errors import BuildError
from fagen.kind import Plan
from fagen.process import run
from fagen.simulator.translate import translated
from fagen.toolchain import find_gxx

_HEADER = Path(__file__).with_name("gpu.hpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-gnu-unique", "-w")


def build(kernel: str, folder: Path) -> Path:
    """Compile a kernel's text for the CPU into `folder`; what is there already is taken.

    Raises BuildError where there is no g++, or it refuses.
    """
    text = translated(kernel)
    name = hashlib.sha256((text + _HEADER.read_text()).encode()).hexdigest()[:16]
    library = folder / f"simulated_{name}.so"
    if not library.exists():
        source = library.with_suffix(".cpp")
        source.write_text(text)
        words = [find_gxx()[0], *_FLAGS, f"-I{_HEADER.parent}", source, "-o", library]
        answer = run([str(word) for word in words])
        if answer.returncode:
            raise BuildError(f"g++ refuses what the simulator made of a kernel: {answer.stderr}")
    return library


def call(plan: Plan, library: Path, *, seed: int = 0, **given: Any) -> None:
    """Run a kernel that `build` made on tensors of the CPU, by the names of its signature.

    `seed` draws when what is asynchronous happens. Raises ValueError for a wrong argument,
    DeviceError where the kernel is stuck: who waits for what goes to standard error.
    """
    from fagen.runtime.c_interface import described, library_at  # torch

    launch = described(plan, library, given)
    library_at(library)["fagen_simulator_seed"](seed)
    launch(None)
