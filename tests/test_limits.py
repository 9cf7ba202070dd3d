"""How large calls may be: what is launched for very many heads and sequences, without a GPU."""

import ctypes
from functools import cache
from pathlib import Path

import pytest

from fagen import registry, simulator
from fagen.kind import Plan
from fagen.render import render
from fagen.runtime.c_interface import library_at, struct_of
from tests.backward_helpers import NARROW
from tests.test_varlen_backward_kernel import SMALL

SOMEWHERE = 4096  # an address that nothing reads


@cache
def simulated(slug: str) -> tuple[Plan, Path]:
    plan = registry.plan_of(slug)
    return plan, simulator.build(render(plan).kernel)


def grids(slug: str, **sizes: int) -> list[tuple[int, ...]]:
    """The grids that a call of the C function launches, on a GPU that runs none of them."""
    plan, library = simulated(slug)
    loaded, words = library_at(library), struct_of(plan.signature)
    args = words(struct_bytes=ctypes.sizeof(words), version=plan.signature.version, scale=0.1)
    for tensor in plan.signature.tensors:
        setattr(args, tensor.name, SOMEWHERE)
        for step, word in enumerate(tensor.strides, 1):
            setattr(args, f"{tensor.name}_stride_{word}", 256 * step)
    for name, size in sizes.items():
        setattr(args, name, size)
    args.workspace, args.workspace_bytes = SOMEWHERE, 1 << 62
    noted = loaded["fagen_simulator_noted"]
    noted.restype = ctypes.c_char_p
    loaded["fagen_simulator_notes"](1)
    status = loaded[f"fagen_{plan.slug}"](ctypes.byref(args), None)
    loaded["fagen_simulator_notes"](0)
    assert status == 0
    return [tuple(map(int, line.split())) for line in noted().decode().splitlines()]


HEADS, SEQUENCES = dict(heads=65_536, kv_heads=2), dict(batch=65_536)


@pytest.mark.parametrize(
    ("many", "parts"),
    [
        (HEADS, [(1, 65_535, 1), (1, 1, 1)]),
        (SEQUENCES, [(1, 2, 65_535), (1, 2, 1)]),
        (HEADS | dict(batch=3), [(1, 65_535, 3), (1, 1, 3)]),
    ],
    ids=("heads", "sequences", "both"),
)
def test_gradients_of_65536_heads_or_sequences_are_launched_in_parts(many, parts):
    sizes = dict(batch=1, heads=2, kv_heads=2, seqlen_q=1, seqlen_k=1) | many
    found = grids(NARROW[0], **sizes)
    assert found[: len(parts)] == found[-len(parts) :] == parts


def test_gradients_of_65536_heads_of_packed_sequences_are_launched_in_parts():
    sizes = dict(total_q=3, total_k=3, offsets=65_537, heads=65_536, kv_heads=2)
    rows = 1 + 65_537  # a block, and room for one more at each offset
    parts = [(rows, 65_535, 1), (rows, 1, 1)]
    assert grids(SMALL, **sizes) == [*parts, (2 * rows, 1, 1), *parts]
