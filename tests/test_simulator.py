"""Kernels' own text on the simulated GPU: right whatever happens when, and faults show."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import registry, simulator
from fagen.errors import BuildError, VerificationError
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.verify import Case, case, errors_of, inputs, judged_by
from fagen.kinds.decode.verify import small_cases
from fagen.problem import Sizes
from fagen.render import render
from fagen.runtime.c_interface import described, workspace_for
from fagen.simulator.translate import translated
from fagen.toolchain import find_gxx
from tests.backward_helpers import MASKED, NARROW, SPREAD, extreme_sizes, in_parts, planned
from tests.cli_helpers import QUANTIZER, fagen
from tests.decode_helpers import SPREAD as DECODE
from tests.often import some
from tests.tensors import normal
from tests.test_mutants import faulted
from tests.varlen_helpers import VARLEN, VARLEN_GRADIENTS

DETERMINISTIC = ("bwd_fp16_d64_causal_m64n64_det", "bwd_bf16_d192_full_m64n64_det")
PAIRS = ("bwd_bf16_d256_causal_m64n64_dss1_c2",)
PERSISTENT = "bwd_fp16_d128_causal_m64n128_persist_post"
# in e4m3: V as it comes; V transposed in the kernel, a descale for each block; each block's PV
# added to O in parts, two at a time, or one while the next block's P is worked out; keys in splits;
# rescaled where parts are added, or seldom; one buffer of rows of V; V transposed by a kernel
# before tiles that are dealt, and before ones that are drawn; all of PV in one part, under row
# maxima and alone; descales whose lanes meet before one arrives
FP8 = (
    "fwd_e4m3_d64_full_m128n128",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "fwd_e4m3_d96_causal_m128n64_nointra_pm1_pc32",
    "fwd_e4m3_d128_full_m128n64_vrows_pm1_pc64",
    "fwd_e4m3_d64_causal_m64n64_split3_vrows_pm1_pc32",
    "fwd_e4m3_d64_full_m64n64_lazymax_pm1_pc32",
    "fwd_e4m3_d128_full_m64n64_vr1_nointra_vrows_pm1_pc32",
    "fwd_e4m3_d96_full_m64n64_vrows_pretrans_pm1_pc32",
    "fwd_e4m3_d96_causal_m64n64_vrows_pretrans_pm1_pc32",
    "fwd_e4m3_d128_causal_m128n64_nointer_vrows_pm1_pc128",
    "fwd_e4m3_d64_causal_m192n64_nointer_nointra_vrows_pm1_pc64",
    "fwd_e4m3_d64_full_m192n128_nointer_vrows_sblock_pm1_smemtotals",
)
# tiles in orders that no committed schedule of such a mask has; K far ahead of V, which waits for O
ORDERED = (
    "fwd_fp16_d64_full_m64n64_dynamic",
    "fwd_fp16_d64_causal_m64n64_c2",
    "fwd_fp16_d64_causal_m128n64_noprod",
    "fwd_fp16_d64_causal_m192n64_s3_reusev_nointer",
    "fwd_e4m3_d64_causal_m64n64_reusev_vrows_sblock",
)
FORWARD = [path.stem for path in registry.schedules("forward") if "e4m3" not in path.stem]
EVERY = (
    *(*FORWARD, *FP8, *ORDERED, *SPREAD, *DETERMINISTIC, *PAIRS),
    *(path.stem for kind in ("backward", "decode") for path in registry.schedules(kind)),
    *(*DECODE, *VARLEN, *VARLEN_GRADIENTS, *MASKED),
)
# beside those whose faults are tried: chunks; a cluster, V's space for O, promoted sums
OFTEN = (
    "fwd_fp16_d256_causal_m128n64_split4",
    "fwd_fp16_d256_full_m64n64_reusev_pm64_smemtotals_c2",
    *(*FP8[::2], *FP8[7::2], SPREAD[0], SPREAD[2], SPREAD[8], SPREAD[10], *PAIRS),
    *(DECODE[0], *DECODE[2:4], DECODE[-5], DECODE[-2]),
    *(MASKED[0], MASKED[6]),
    *(VARLEN[0], *VARLEN[1:4:2], VARLEN[5], VARLEN_GRADIENTS[0], *VARLEN_GRADIENTS[1:4:2]),
)


def may_part(plan: Any) -> bool:
    """Whether nothing makes a warp's lanes meet between a wait and one lane's arrival.

    So it is in skip_v. Here each lane waits by itself, and one that is late misses a phase now and
    then; on a GPU they leave the loop of a wait together.
    """
    if plan.kind != "forward":
        return False
    return bool(plan.pipeline.skips_masked_blocks and not plan.pipeline.skips_idle_warpgroups)


def with_lanes_together(kernel: str) -> str:
    """A kernel's text in which the lanes of a warp leave such waits together, as on a GPU."""
    wait = r"shared\.[kqv]_full\[[^;]*\.wait\([^;]*\);"
    return re.sub(rf"(if \(![kv]_ready\) \{{\s*{wait}\s*\}}|{wait})", r"\1 __syncwarp();", kernel)


@pytest.mark.parametrize("slug", some(EVERY, OFTEN))
def test_a_kernel_is_right_whatever_happens_when(slug):
    plan = registry.plan_of(slug)
    if plan.kind == "backward" and not plan.varlen:
        plan = replace(plan, l2_share_bytes=1)  # sections of one head
    kernel = render(plan).kernel
    if may_part(plan):
        kernel = with_lanes_together(kernel)
    assert simulator.check(plan, kernel, seeds=1) == runs_of(plan)


def test_tiles_are_drawn_behind_v_whatever_their_counter_held():
    """Where V is transposed before, the workspace may hold anything, also numbers of tiles."""
    plan = registry.plan_of("fwd_e4m3_d96_causal_m64n64_vrows_pretrans_pm1_pc32")
    library = simulator.build(render(plan).kernel)
    x = normal(1, 300, 6, 96).to(torch.float8_e4m3fn)
    one = torch.ones(1, 6, 96)
    given = dict.fromkeys("qkv", x) | {"scale": 0.1, "v_descale": one}
    given |= {"q_descale": one[..., :1], "k_descale": one[..., :1]}
    outs = []
    for held in (0, 1, 5):
        outs.append(torch.full(x.shape, math.nan, dtype=torch.bfloat16))
        given["out"] = outs[-1]
        room = workspace_for(plan, library, **given)
        room.view(torch.int32).fill_(held)
        described(plan, library, given, workspace=room)(None)
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


def runs_of(plan: Any) -> int:
    """How many small cases a kernel has."""
    if plan.kind == "decode":
        return len(small_cases(plan)) + 1
    if plan.kind == "backward":
        return 6 if plan.varlen else 10
    return 10 if plan.num_splits > 1 else 6 if plan.varlen and plan.descales else 7


Gradients = tuple[bool, tuple[Tensor, ...]]  # whether they keep the rule of the proof; dq, dk, dv


def backward(plan: Plan, library: Path, sizes: Sizes, seed: int) -> Gradients:
    """What the kernels make of a case."""
    return of_case(plan, library, sizes, seed, case(plan, sizes, seed=seed % 2, device="cpu"))


def of_case(plan: Plan, library: Path, sizes: Sizes, seed: int, call: Case) -> Gradients:
    """The same of tensors that are there."""
    arguments, exact, rough = call
    named = dict(zip((x.name for x in plan.signature.arguments), arguments, strict=True))
    results = {f"d{name}": torch.full_like(named[name], math.nan) for name in "qkv"}
    simulator.call(plan, library, seed=seed, **named, **results)
    gradients = tuple(results.values())
    return errors_of(sizes, gradients, exact, rough).ok, gradients


def for_multiprocessors(plan: Plan, count: int) -> str:
    """The text of a kernel that deals its tiles out as to so many."""
    kernel, most = render(plan).kernel, f"kMultiprocessors = {plan.sms};"
    assert kernel.count(most) == 1
    return kernel.replace(most, f"kMultiprocessors = {count};")


EXTREME = (*NARROW, *SPREAD, *DETERMINISTIC, *PAIRS)
EXTREME_OFTEN = NARROW[:1]


@pytest.mark.parametrize("slug", some(EXTREME, EXTREME_OFTEN))
def test_the_backward_kernels_are_right_for_one_head_large_groups_and_any_rows_to_keys(slug):
    plan = planned(slug)
    # a thread block has a head of a group where they are shared out, else all; and grids of two
    # heads of one batch at most, before and after
    for text in (render(plan).kernel, in_parts(for_multiprocessors(plan, 1))):
        library = simulator.build(text)
        for seed, sizes in enumerate(extreme_sizes(plan)):
            assert backward(plan, library, sizes, seed)[0], sizes


@pytest.mark.parametrize("slug", some((SPREAD[0], SPREAD[5], SPREAD[9]), (SPREAD[0],)))
def test_a_gradient_of_the_output_may_have_strides_of_0(slug):
    plan = planned(slug)
    sizes = Sizes(2, 3, 1, plan.block_m + 9, plan.block_n + 5)
    dout, *qkv = inputs(plan, sizes, device="cpu")
    call = judged_by(plan, dout[:1, :1, :1].expand_as(dout), *qkv)
    assert call[0][0].stride() == (0, 0, 0, 1)
    assert of_case(plan, simulator.build(render(plan).kernel), sizes, 0, call)[0]


def test_the_command_says_what_was_found():
    slug = "bwd_fp16_d64_causal_m64n64"
    answer = fagen("simulate", slug, "--seeds", "1")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == f"{slug}: 10 runs, all right\n"
    refused = fagen("simulate", QUANTIZER)
    assert refused.exit_code == VerificationError.exit_code
    assert "have no verification on the simulator" in refused.stderr


@pytest.mark.parametrize("stays", some(("", "_persist_post"), ("",)))
def test_gradients_in_a_fixed_order_are_the_same_bits_whatever_happens_when(stays):
    sizes = Sizes(1, 2, 1, 200, 600)  # many blocks add to a row of dQ
    for slug in ("bwd_fp16_d64_causal_m64n64", DETERMINISTIC[0]):
        plan = planned(f"{slug}{stays}")
        library = simulator.build(render(plan).kernel)
        dq, *first = backward(plan, library, sizes, 0)[1]
        changes = 0  # of the order of additions to dQ: how soon one shows, a compiler decides
        for seed in range(2, 12 if plan.deterministic else 80, 2):
            again, *others = backward(plan, library, sizes, seed)[1]
            assert all(map(torch.equal, others, first))
            changes += not torch.equal(again, dq)
            if changes:
                break
        assert (changes == 0) == plan.deterministic


# dQ of sections that are done, by a warp of its own
ROUNDED = (
    PERSISTENT,
    "bwd_bf16_d64_full_m128n128_det_underdp_persist_post",
    "bwd_bf16_d48_causal_m64n128_persist_post",
)


@pytest.mark.parametrize("slug", some(ROUNDED, ()))
def test_dq_of_sections_that_are_done_is_rounded_meanwhile(slug):
    """Of heads that have a section each, all but a few."""
    plan = replace(planned(slug), l2_share_bytes=1)
    library = simulator.build(for_multiprocessors(plan, 4))
    many = Sizes(2, 4, 4, 64 + 9, 2 * 128 + 3), Sizes(1, 6, 3, 130, 300), Sizes(3, 2, 2, 300, 131)
    for seed in range(8):
        assert all(backward(plan, library, sizes, seed)[0] for sizes in many)


# ways of a causal step: by keys with and without passing over blocks, dQ's last part by one, pairs
IN_STEP = (
    "bwd_fp16_d128_causal_m64n128_persist_post",
    "bwd_bf16_d64_causal_m128n128_underdp",
    "bwd_fp16_d192v128_causal_m48n128_underdp",
    "bwd_fp16_d192v128_causal_m64n64_intra_c2",
)


@pytest.mark.parametrize("slug", some(IN_STEP, IN_STEP[1:3]))
def test_a_tile_of_several_heads_goes_through_each_block_for_all_of_them(slug):
    """Few tiles are shared out so that each has one head: here they are not."""
    plan = registry.plan_of(slug)
    text = render(plan).kernel
    whole = text.replace("  return best;\n", "  return {group, 0};\n")
    assert whole != text
    sizes = Sizes(1, 4, 1, 3 * plan.block_m + 5, 2 * plan.block_n * plan.cluster + 3)
    assert backward(plan, simulator.build(whole), sizes, 0)[0]


# rows of a mask and of none, persistent thread blocks, pairs, and sums in order
CUT = (
    "bwd_fp16_d128_causal_m64n128_det_persist_post",
    "bwd_bf16_d64_full_m128n128_det_s3_dos2_underdp",
    "bwd_bf16_d64_causal_m128n128_underdp",
    "bwd_fp16_d192v128_causal_m48n128_underdp",
    "bwd_fp16_d256_causal_m64n64_dss1_intra_c2",
)


@pytest.mark.parametrize("slug", some(CUT, CUT[:2]))
def test_rows_that_are_cut_in_two_have_tiles_of_their_own(slug):
    """So few are not cut by themselves; heads are shared out too."""
    plan = registry.plan_of(slug)
    text, m = render(plan).kernel, plan.block_m
    cases = (1, 2, Sizes(1, 4, 2, 3 * m + 5, 4 * m + 3)), (2, 1, Sizes(2, 2, 1, 3 * m, 2 * m + 40))
    for heads, cut, sizes in cases:
        dealt = text.replace("  return best;\n", f"  return {{{heads}, {cut}}};\n")
        assert dealt != text
        assert backward(plan, simulator.build(dealt), sizes, 0)[0]


def test_thread_blocks_that_stay_draw_all_tiles_though_none_has_a_row():
    plan = planned(PERSISTENT)
    assert backward(plan, simulator.build(render(plan).kernel), Sizes(2, 3, 3, 0, 300), 0)[0]


def test_what_is_stuck_or_wrong_is_told_and_the_next_call_is_as_if_nothing_had_been():
    tried = faulted(DETERMINISTIC[0])

    def reason(statement: str) -> str:
        (fault,) = (fault for fault in tried.faults if str(fault) == statement)
        return tried.reason(fault)

    stuck = reason("Consumer::multiply_ds: arrive(shared.q_empty[q.stage]); left out")
    assert "simulator, seed 0: nobody can go on" in stuck
    assert "1 threads from 0 on wait for the mbarrier at byte" in stuck
    loader = "Loader::load_q: shared.q_empty[q.stage].wait(q.phase ^ 1);"
    assert "more arrive at the mbarrier at byte" in reason(f"{loader} left out")
    assert not tried.reason(None)


def test_an_instruction_that_it_does_not_know_is_refused_by_name():
    with pytest.raises(BuildError, match=r"does not know the instruction 'fence\.acq_rel\.gpu;'"):
        translated('void f() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }')


@pytest.mark.long  # compiles, which the cache cannot save
def test_a_compiler_that_checks_jumps_by_itself_does_not_end_a_run(tmp_path, monkeypatch):
    """As Ubuntu's does: glibc would take a jump to another thread's stack for a fault."""
    checking = tmp_path / "g++"
    checking.write_text(f'#!/bin/sh\nexec {find_gxx()[0]} -D_FORTIFY_SOURCE=2 "$@"\n')
    checking.chmod(0o755)
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
    monkeypatch.setenv("CXX", str(checking))
    plan = planned(PERSISTENT)
    assert backward(plan, simulator.build(render(plan).kernel), Sizes(2, 3, 3, 0, 300), 0)[0]


def test_tables_that_fall_leave_no_tile_waiting():
    """Gradients are wrong then, but a tile waits for those alone that come."""
    plan = registry.plan_of("bwd_fp16_d64_document_m64n64_det")
    library = simulator.build(render(plan).kernel)
    tensors, *_ = case(plan, Sizes(1, 2, 1, 400, 400), device="cpu")
    named = dict(zip((x.name for x in plan.signature.arguments), tensors, strict=True))
    dice = torch.Generator().manual_seed(1)
    for name in ("first", "last"):
        named[name] = torch.randint(-9, 450, (1, 400), generator=dice, dtype=torch.int32)
    named |= {f"d{name}": torch.empty_like(named[name]) for name in "qkv"}
    described(plan, library, named)(None)
