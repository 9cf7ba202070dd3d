"""The scripts of benchmarks/ as modules, and a GPU on which they time what is made up."""

import importlib.util
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fagen import flow
from fagen.errors import DeviceError
from fagen.measure import cells, peers
from fagen.measure.card import Card
from fagen.measure.peers import Implementation, ragged_causal
from fagen.measure.rows import DETERMINISTIC
from fagen.measure.timing import Call, Timing
from fagen.paths import locate
from fagen.registry import plan

BENCHMARKS = locate("cli.py").parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
FIELDS = [
    "dtype", "head_dim", "head_dim_v", "mask", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads",
    "implementation", "schedule", "regime", "tflops", "spread", "sm_clock_mhz",
    "pass",
]  # fmt: skip
SECONDS = {"cudnn": 1.1e-3, "fa2": 2.0e-3}


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
    for name in ("plots", "record", "against"):
        sys.modules.pop(name, None)


def pretend_gpu(script, monkeypatch):
    """Make up a GPU, a compiler and clocks; return what a test may still change of them."""
    script("run")  # brings in what is patched
    record = sys.modules["record"]
    fake = SimpleNamespace(wrong=set(), built=[], rounds=set())

    def hopper():
        return Card("NVIDIA H200", "580.1", 132)

    def built(schedule, *, binding):
        fake.built.append(schedule.slug)
        return plan(schedule), SimpleNamespace(slug=schedule.slug, made_with={"nvcc": "13.0"})

    def bind(name, off=0.0):
        def call(case, q, k, v):
            if name == "cudnn" and ragged_causal(case):
                raise DeviceError("aligned to the top left")
            return Call(lambda: torch.full((1, case.sizes.seqlen_q, 1, 1), off))

        return call

    def time_calls(calls, regime, *, clock, seed):
        fake.rounds.add((regime.name, regime.rounds))
        return {
            label: Timing(SECONDS.get(label, 1.01e-3 if "_no" in label else 1e-3), 0.01, 1500)
            for label in calls
        }

    def ours(binary):
        name = DETERMINISTIC if "_det" in binary.slug else "fagen"
        return Implementation(name, bind(name, float(binary.slug in fake.wrong)), binary.slug)

    monkeypatch.setattr(record, "hopper", hopper)
    monkeypatch.setattr(flow, "built", built)
    monkeypatch.setattr(record, "ours", ours)
    for name in ("cudnn", "fa2"):
        monkeypatch.setitem(peers.PEERS, name, bind(name))
        monkeypatch.setitem(peers.GRADIENTS, name, bind(name))
    monkeypatch.setattr(cells, "inputs", lambda case, seed, sigma: (None, None, None))
    monkeypatch.setattr(cells, "time_calls", time_calls)
    return fake
