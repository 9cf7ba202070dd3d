"""How large calls may be: what is refused, the workspace of the rest, and what is launched."""

import ctypes
import math
import random
import time
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path

import pytest

from fagen import process, registry, simulator
from fagen.kind import Plan
from fagen.render import render
from fagen.runtime.c_interface import library_at
from fagen.statuses import ALIGNMENT
from fagen.toolchain import find_gxx
from tests.backward_helpers import NARROW, SPREAD
from tests.c_calls import SOMEWHERE, arguments, changed, dense, launchers_of
from tests.stubs import WARNINGS
from tests.test_varlen_backward_kernel import SMALL

MOST = 1 << 30

# one for each launcher, and for each way to count
KINDS = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_fp16_d128_full_m128n128_c2",
    "fwd_e4m3_d128_full_m128n128_sblock",
    "fwd_fp16_d256_causal_m128n64_split4",
    "fwd_fp16_d128_causal_m128n128_varlen_packgqa",
    "fwd_e4m3_d64_causal_m64n64_varlen",
    "bwd_fp16_d256_full_m64n64_dss1_intra_c2",
    "bwd_bf16_d128_full_m64n128_varlen",
    "dec_bf16_d128_causal_r8n64",
    "dec_bf16_d128_causal_r8n64_streamk",
    "quant_fp16_d128_center_scol_vcols",
    "quant_fp16_d64_vcols",
    "quant_fp16_d64_stensor",
    "comb_fp16_d64",
    "comb_fp32_d128_obf16_varlen",
)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The launchers of KINDS but for their launches, in one library."""
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "all.cpp").write_text(launchers_of(map(registry.plan_of, KINDS)))
    command: list[str | Path] = [find_gxx()[0], "-std=c++17", "-O0", "-fPIC", "-shared", *WARNINGS]
    compiled = process.run([*command, "all.cpp", "-o", "all.so"], cwd=folder)
    assert compiled.returncode == 0, compiled.stderr
    return library_at(folder / "all.so")


def expected(plan: Plan, sizes: Mapping[str, int]) -> str:
    """What a call of these sizes ends with, as far as sizes go."""
    signature = plan.signature
    if any(not 0 <= sizes[size.name] <= size.most for size in signature.sizes):
        return "bad size"
    for rule in signature.rules:
        extent, by = sizes[rule.size], sizes[rule.by]
        if extent if by == 0 else extent % by:
            return "bad ratio"
    for limit in signature.counts:
        if prod(factor.at(sizes) for factor in limit.factors) >= MOST:
            return "too many"
    return "ok"


SIZES = (0, 1, 2, 3, 7, 64, 65_535, 65_536, 1 << 20, 1 << 29, MOST - 1, MOST, MOST + 1, -1, -MOST)


@pytest.mark.parametrize("slug", KINDS)
def test_any_sizes_are_refused_or_have_the_workspace_of_the_plan(
    slug: str, launchers: ctypes.CDLL
) -> None:
    plan, dice = registry.plan_of(slug), random.Random(slug)
    signature, names = plan.signature, [status.name for status in plan.signature.statuses]
    ask, launch = launchers[f"fagen_{slug}_workspace"], launchers[f"fagen_{slug}"]
    ask.restype = ctypes.c_int64
    ended = dict.fromkeys(("ok", "bad size", "too many"), 0)
    for number in range(600):
        few = SIZES[: 3 + number % len(SIZES)]
        sizes = {size.name: dice.choice(few) for size in signature.sizes}
        for rule in signature.rules:
            if number % 4:
                sizes[rule.size] = min(MOST, sizes[rule.by] * dice.choice((1, 1, 2, 8)))
        args, outcome = changed(plan, sizes, sizes), expected(plan, sizes)
        needed = plan.launches.workspace.at(sizes) if outcome == "ok" else -1
        assert ask(ctypes.byref(args)) == needed, sizes
        status = names[launch(ctypes.byref(args), None)]
        # of tensors that are too large for strides of their own no more is asked
        assert status == outcome or (outcome == "ok" and status in ("bad stride", "overlap")), sizes
        ended[outcome] = ended.get(outcome, 0) + 1
    assert all(count > 9 for count in ended.values()), ended


def small_call(
    slug: str, launchers: ctypes.CDLL
) -> tuple[Plan, dict[str, int], Callable[..., str]]:
    """A Plan, sizes of three, and how a call of them ends with some fields changed."""
    plan = registry.plan_of(slug)
    sizes = dict.fromkeys((size.name for size in plan.signature.sizes), 3)

    def ends(**changes: float) -> str:
        status = launchers[f"fagen_{slug}"](ctypes.byref(changed(plan, sizes, changes)), None)
        return plan.signature.statuses[status].name

    assert ends() == "ok"
    return plan, sizes, ends


@pytest.mark.parametrize("slug", KINDS)
def test_a_call_that_cannot_be_has_the_status_that_says_so(
    slug: str, launchers: ctypes.CDLL
) -> None:
    plan, sizes, ends = small_call(slug, launchers)
    for field in ("struct_bytes", "version"):
        assert ends(**{field: 8}) == "wrong struct"
    for scalar in plan.signature.numbers:
        for number in (0.0, -1.0, math.nan, math.inf) if scalar.positive else ():
            assert ends(**{scalar.name: number}) == "bad scalar", scalar.name
    for tensor in filter(lambda tensor: tensor.present, plan.signature.tensors):
        if tensor.refused:
            assert ends(**{f"{tensor.name}_given": 1}) == "refused"
        optional = tensor.optional or tensor.omittable
        assert ends(**{tensor.name: 0}) == ("ok" if optional else "null pointer"), tensor.name
        odd = ALIGNMENT // 2 if tensor.aligned else tensor.dtype.bytes // 2
        assert not odd or ends(**{tensor.name: SOMEWHERE + odd}) == "misaligned", tensor.name
        for name, stride in dense(tensor, sizes).items():
            for wrong in (-stride, (1 << 38) + 8, *([stride + 1] if tensor.step > 1 else [])):
                assert ends(**{name: wrong}) == "bad stride", name
    nothing = {size.name: 0 for size in plan.signature.sizes if size.name != "offsets"}
    assert ends(**nothing) == "ok"
    needed = plan.launches.workspace.at(sizes) if plan.launches.needs_workspace else 0
    for field, number in (
        *(("workspace", 0), ("workspace", SOMEWHERE + 8), ("workspace_bytes", needed - 1)),
    ):
        assert ends(**{field: number}) == ("bad workspace" if needed else "ok"), field
        if plan.launches.unless:  # where all is given nothing is to be found
            flags = {f"{tensor.name}_given": 1 for tensor in plan.signature.tensors if tensor.made}
            assert ends(**{field: number}, **flags) == "ok"


@pytest.mark.parametrize("slug", KINDS)
def test_a_c_function_says_each_status_and_bears_no_call_at_all(
    slug: str, launchers: ctypes.CDLL
) -> None:
    message, ask = launchers[f"fagen_{slug}_message"], launchers[f"fagen_{slug}_workspace"]
    message.restype, ask.restype = ctypes.c_char_p, ctypes.c_int64
    statuses = registry.plan_of(slug).signature.statuses
    assert [message(number).decode() for number in range(len(statuses))] == [
        status.message for status in statuses
    ]
    assert message(99) == message(-1) == b"unknown status"
    assert statuses[launchers[f"fagen_{slug}"](None, None)].name == "null pointer"
    assert ask(None) == -1


@pytest.mark.parametrize("slug", KINDS)
def test_no_output_may_have_elements_that_overlap(slug: str, launchers: ctypes.CDLL) -> None:
    plan, sizes, ends = small_call(slug, launchers)
    for tensor in plan.signature.outputs:
        strides = dense(tensor, sizes)
        assert all(ends(**{name: 0}) == "overlap" for name in strides)
        assert not strides or ends(**dict.fromkeys(strides, 0)) == "overlap"  # forgotten
        assert (
            len(strides) < 2 or ends(**dict.fromkeys(strides, max(strides.values()))) == "overlap"
        )
        # any order will do, and room in between
        apart = {name: stride * 16 for name, stride in strides.items()}
        assert ends(**apart) == "ok"
    for tensor in plan.signature.tensors:
        if tensor.present and tensor.access == "in":
            assert ends(**dict.fromkeys(dense(tensor, sizes), 0)) == "ok", tensor.name


# ---- what is launched ---------------------------------------------------------------------------


@cache
def simulated(slug: str) -> tuple[Plan, Path]:
    plan = registry.plan_of(slug)
    return plan, simulator.build(render(plan).kernel)


def grids(slug: str, **sizes: int) -> list[tuple[int, ...]]:
    """The grids that a call of the C function launches, on a GPU that runs none of them."""
    plan, library = simulated(slug)
    loaded, args = library_at(library), arguments(plan, sizes)
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
def test_gradients_of_65536_heads_or_sequences_are_launched_in_parts(
    many: dict[str, int], parts: list[tuple[int, ...]]
) -> None:
    sizes = dict(batch=1, heads=2, kv_heads=2, seqlen_q=1, seqlen_k=1) | many
    shapes = grids(NARROW[0], **sizes)
    assert shapes[: len(parts)] == shapes[-len(parts) :] == parts


def test_gradients_of_65536_heads_of_packed_sequences_are_launched_in_parts() -> None:
    sizes = dict(total_q=3, total_k=3, offsets=9, heads=65_536, kv_heads=2)
    blocks = 1 + 9  # of rows and of keys: one, and room for one more at each offset
    tiles = blocks + 4 * blocks  # and for the parts of groups that are shared out

    def by_heads(blocks: int) -> list[tuple[int, ...]]:
        return [(blocks, 65_535, 1), (blocks, 1, 1)]

    prepared, rounded = by_heads(1 + blocks), by_heads(tiles + blocks)
    assert grids(SMALL, **sizes) == [*prepared, (2 * tiles, 1, 1), *rounded]


def test_the_workspace_of_gradients_holds_sums_of_a_groups_shares_and_of_rows_cut_in_two() -> None:
    plan, library = simulated(SPREAD[0])
    ask = library_at(library)[f"fagen_{plan.slug}_workspace"]
    ask.restype = ctypes.c_int64

    def room(heads: int, keys: int = 300) -> int:
        sizes = dict(batch=2, heads=heads, kv_heads=2, seqlen_q=keys, seqlen_k=keys)
        return int(ask(ctypes.byref(arguments(plan, sizes))))

    assert room(2) == 2 * 2 * 5 * plan.record_bytes
    sums = 128 * (128 + 128) * 4  # of dK and dV, by each of a group's two shares
    assert room(4) == 2 * 4 * 5 * plan.record_bytes + 2 * 2 * 2 * 3 * sums
    # long and few: rows are cut in two
    assert room(2, 1280) == 2 * 2 * 20 * plan.record_bytes + 2 * 2 * 2 * 10 * sums


def test_the_workspace_of_gradients_is_told_at_once_for_any_group_of_heads() -> None:
    plan, library = simulated(NARROW[0])
    ask = library_at(library)[f"fagen_{plan.slug}_workspace"]
    ask.restype = ctypes.c_int64
    begun = time.process_time()
    for heads in (MOST - 1, (1 << 29) - 1, 1 << 29, 99_999_999):
        for keys in (1, 1_000, 1 << 20):
            sizes = dict(batch=1, heads=heads, kv_heads=1, seqlen_q=64, seqlen_k=keys)
            records = plan.launches.workspace.at(sizes)
            assert ask(ctypes.byref(arguments(plan, sizes))) >= records
    assert time.process_time() - begun < 0.5  # twelve times; one took seconds
