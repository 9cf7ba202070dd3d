"""Kernels of varlen sequences: their text on the simulated GPU, their proof, their schedules."""

import ctypes
import math
import re
from itertools import product
from typing import Any

import pytest
import torch

from fagen import registry, simulator
from fagen.errors import ScheduleError
from fagen.kinds.decode.oracle import attend
from fagen.kinds.forward import Schedule
from fagen.kinds.forward.verify.varlen import case_error
from fagen.measure.sequences import Case, small_cases
from fagen.problem import Problem
from fagen.render import render
from fagen.runtime.c_interface import arguments, library_at
from fagen.runtime.cache import as_varlen
from fagen.runtime.checks import checked
from fagen.vendor import FORMATS
from fagen.vendor.contents import folder_of
from fagen.vendor.manifest import Manifest
from fagen.vocab import MASKS
from tests.tensors import normal
from tests.varlen_helpers import exact, packed, planned

COMMITTED = [path.stem for path in registry.schedules("forward") if "varlen" in path.stem]
SMALL = "fwd_fp16_d64_causal_m64n64_varlen"
SMALL_FP8 = "fwd_e4m3_d64_causal_m64n64_varlen"


# ---- on the simulated GPU -----------------------------------------------------------------------


def test_sequences_of_a_cache_are_read_where_they_are() -> None:
    """Heads before keys, as models keep them: the packed view's sequences lie within each other."""
    plan = planned(SMALL)
    library = simulator.build(render(plan).kernel)
    q = normal(3, 70, 4, 64, dtype=torch.float16)
    used, pads = (torch.tensor(x, dtype=torch.int32) for x in ((150, 41, 0), (5, 0, 0)))
    caches = [normal(3, 2, 150, 64, seed=seed, dtype=torch.float16) for seed in (1, 2)]
    for cache, (i, end) in product(caches, enumerate(used.tolist())):
        cache[i, :, end:] = cache[i, :, : pads[i]] = math.nan
    k, v = (cache.transpose(1, 2) for cache in caches)
    laid = as_varlen(k, v, used, pads)
    assert laid is not None
    keys = dict(zip(("k", "v", "cu_seqlens_k", "seqused_k"), laid, strict=True))
    out, lse = torch.full((210, 4, 64), math.nan).half(), torch.full((4, 210), math.nan)
    starts = torch.arange(4, dtype=torch.int32) * 70
    simulator.call(
        plan,
        library,
        q=q.flatten(0, 1),
        cu_seqlens_q=starts,
        scale=0.125,
        out=out,
        lse=lse,
        **keys,
    )
    expected, expected_lse = attend(
        q, k, v, mask=MASKS["causal"], scale=0.125, seqused_k=used, leftpad_k=pads
    )
    torch.testing.assert_close(out.view(3, 70, 4, 64).double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(
        lse.view(4, 3, 70).transpose(0, 1).double(), expected_lse, rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(("name", "number"), [("v", 0.0), ("v", 1e30), ("q", 1e8), ("k", 1e8)])
def test_in_e4m3_a_descale_may_be_as_large_as_documented_and_that_of_v_0(
    name: str, number: float
) -> None:
    """The first key of each sequence has the larger scores, all others one of 0."""
    small = planned(SMALL_FP8)
    library = simulator.build(render(small).kernel)
    q, k, v, at_q, at_k = packed([(3, 70), (5, 5), (2, 2)], torch.float32)
    k.zero_()[at_k[:-1].long()] = 1
    tensors = {"q": q.abs() / 8, "k": k, "v": v}
    eights = {letter: x.to(torch.float8_e4m3fn) for letter, x in tensors.items()}
    descales = {
        f"{letter}_descale": torch.full((3, x.shape[1], 1), number if letter == name else 1.0)
        for letter, x in tensors.items()
    }
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16)
    lse = torch.full((4, len(q)), math.nan)
    at = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k}
    simulator.call(small, library, **eights, **descales, **at, scale=0.125, out=out, lse=lse)
    means = (x.double() * (number if letter == name else 1.0) for letter, x in eights.items())
    expected, expected_lse = exact(*means, at_q, at_k, causal=True)
    by = number if name == "v" and number else 1.0
    torch.testing.assert_close(out.double() / by, expected / by, rtol=0.05, atol=0.05)
    assert number or not out.any()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-2)


@pytest.mark.parametrize("slug", [SMALL, SMALL_FP8])
@pytest.mark.parametrize("offsets", [[], [5], [5, 5], [0, 2], [68, 70], [40, 1 << 30]], ids=str)
def test_rows_of_no_sequence_are_zeros_whatever_they_hold(slug: str, offsets: list[int]) -> None:
    plan = planned(slug)
    library = simulator.build(render(plan).kernel)
    q, k, v = (
        torch.full((70, 2, 64), math.nan).to(getattr(torch, plan.dtype.torch)) for _ in "qkv"
    )
    of_one = slice(*offsets[:2]) if len(offsets) == 2 else slice(0, 0)
    for x in (q, k, v):
        x[of_one] = torch.randn(x[of_one].shape).to(x.dtype)
    room = torch.full((80, 2, 64), 7.0).to(getattr(torch, plan.out_dtype.torch))
    lses = torch.full((4, 70), 7.0)
    into = {"out": room[5:75], "lse": lses[1:3]}
    at = torch.tensor(offsets, dtype=torch.int32)
    arguments = dict(q=q, k=k, v=v, cu_seqlens_q=at, cu_seqlens_k=at, scale=0.125)
    simulator.call(plan, library, **arguments, **into)
    others = torch.ones(70, dtype=torch.bool)
    others[of_one] = False
    assert not into["out"][others].any() and (into["lse"][:, others] == -math.inf).all()
    assert into["out"][~others].any() == into["lse"][:, ~others].isfinite().any() == any(~others)
    assert (room[:5] == 7).all() and (room[75:] == 7).all() and (lses[::3] == 7).all()


@pytest.mark.parametrize("slug", [SMALL, SMALL_FP8])
def test_the_counter_of_tiles_is_left_as_it_was_found(slug: str) -> None:
    """Calls of other lengths one after another, with one workspace."""
    plan = planned(slug)
    library = simulator.build(render(plan).kernel)
    workspace = torch.zeros(1, dtype=torch.int32)

    def run(**named: Any) -> None:
        args = arguments(plan, named, checked(plan, named))
        args.workspace, args.workspace_bytes = workspace.data_ptr(), 4
        library_at(library)["fagen_simulator_seed"](0)
        assert library_at(library)[f"fagen_{plan.slug}"](ctypes.byref(args), None) == 0

    for case in (*small_cases(plan), Case(((0, 0),), 1, 1), Case(((65, 3),) * 40, 2, 2)):
        assert case_error(plan, run, case, device="cpu").ok
        assert not workspace.any()


# ---- schedules ----------------------------------------------------------------------------------


def test_the_committed_ones_are_of_three_head_dims_three_dtypes_and_both_masks() -> None:
    every = [Problem.of(registry.from_slug(slug)) for slug in COMMITTED]
    problems = [problem for problem in every if problem.score == "plain" and not problem.sink]
    combinations = {(problem.dtype, problem.head_dim, problem.mask) for problem in problems}
    assert len(combinations) == len(problems) == 18
    assert {problem.head_dim for problem in problems} == {64, 128, 256}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"producer": "none"}, 'must be "warp" with lengths = "varlen"'),
        ({"order": "lpt"}, 'must be "dynamic" with lengths = "varlen"'),
        ({"cluster": 2}, 'must be 1 with lengths = "varlen"'),
    ],
)
def test_what_cannot_go_with_varlen_is_said(keys: dict[str, Any], message: str) -> None:
    usual = {"head_dim": 64, "dtype": "fp16", "mask": "full", "block_m": 128, "block_n": 64}
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.make(**usual | {"lengths": "varlen"} | keys)


def test_a_folder_has_them_beside_others_with_a_struct_of_their_own() -> None:
    slugs = (COMMITTED[0], "fwd_fp16_d128_causal_m128n128", "comb_fp32_d128_obf16_varlen")
    manifest = Manifest("demo", tuple(("", registry.from_slug(slug)) for slug in slugs))
    folder = folder_of(manifest)
    assert [group.name for group in folder.groups] == ["forward varlen", "forward", "combine"]
    # of two dispatchers each takes one struct, and knows its kernel alone
    assert folder.attention
    assert [kernel.slug for kernel in folder.attention.kernels] == [slugs[1]]
    assert {row.kernel for row in folder.attention.table.rows} <= {0, -1}
    (packed,) = folder.varlen
    assert [kernel.slug for kernel in packed.kernels] == [slugs[0]] and packed.kind == "varlen"
    # nor does that of gradients, which are another kernel's
    gradient = folder.gradients[COMMITTED[0]]
    assert (gradient.backward, gradient.missing) == (None, "bwd_bf16_d128_causal_m64n128_varlen")
    header = FORMATS["source"](folder)["include/demo.h"]
    assert "struct FagenForwardVarlenArgs {" in header and "struct FagenForwardArgs {" in header
    assert f"int fagen_{COMMITTED[0]}(const struct FagenForwardVarlenArgs* args" in header
