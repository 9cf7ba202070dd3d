"""The scripts of benchmarks/ as modules, and what they have to write."""

import importlib.util
import sys
from contextlib import contextmanager

import pytest
import torch

from fagen.paths import locate

BENCHMARKS = locate("cli.py").parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
FIELDS = [
    "dtype", "head_dim", "head_dim_v", "mask", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads",
    "implementation", "schedule", "regime", "tflops", "spread", "sm_clock_mhz",
    "pass",
]  # fmt: skip


def refused_without_a_gpu(script, out, capsys, *more):
    """Tell whether a script says that it needs a Hopper GPU, with code 5, and writes nothing."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code = script.main([*more, "--out", str(out)])
    written = list(out.iterdir()) if out.exists() else []
    return code == 5 and "Hopper" in capsys.readouterr().err and not written


@contextmanager
def scripts(monkeypatch):
    """Yield what loads a script of benchmarks/ as a module."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name):
        spec = importlib.util.spec_from_file_location(
            f"benchmarks_{name}", BENCHMARKS / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("plots", "record", "against", "decode", "draws", "launch", "revision", "tables"):
        sys.modules.pop(name, None)
