"""Kernels under compute-sanitizer, called as a C program would."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from fagen import flow, process
from fagen.kinds.forward.structure import scheduler_warp
from fagen.paths import environment
from fagen.registry import from_slug, schedules
from tests.conftest import SPREAD
from tests.gpu.sanitizer import (
    HINT_TO_STOP,
    O_AFTER_THE_LAST_WAIT,
    P_READ_BY_ALL_LANES,
    SCALES_READ_BY_ALL_LANES,
    TILE_READ_BY_ALL_LANES,
    TILE_WRITTEN_BY_ANY_LANE,
    fault,
)
from tests.often import some

pytestmark = pytest.mark.gpu

CALLER = Path(__file__).with_name("c_caller.py")
SMALL_CALL = Path(__file__).with_name("small_call.py")
ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 9  # what compute-sanitizer exits with when it found something
# batch, seqlen_q, seqlen_k, heads, kv_heads: ragged tiles, several tiles, masked rows, no key
SHAPES = ("1,1,1,1,1", "2,130,97,2,1", "1,300,40,2,2", "1,5,333,2,2", "1,9,0,1,1")
RACED = ("2,130,97,2,1", "1,65,333,140,1")  # the latter more tiles than an H200 has SMs

# of e4m3 some that need not be committed: V transposed in the kernel, scales by block, both
FP8 = (
    "fwd_e4m3_d128_causal_m128n128_vrows",
    "fwd_e4m3_d64_full_m128n64_sblock_sr32",
    "fwd_e4m3_d80v48_causal_m64n32_vrows_sblock_sr32",
)


def arguments(kernel, shapes):
    plan = kernel.plan
    dtype = plan.dtype.name
    if plan.descales:
        layout = "rows" if plan.v_rows else "columns"
        scale_rows = plan.scales.rows if plan.scales.by_block else 0
        dtype = f"{dtype}-{plan.out_dtype.name}-{layout}-{scale_rows}"
    numbers = plan.launches.zeroed, plan.head_dim, plan.head_dim_v
    words = [dtype, *(str(int(number)) for number in numbers), *shapes]
    return [sys.executable, CALLER, kernel.binary.library, plan.slug, *words]


@pytest.fixture(scope="module", params=FP8)
def fp8_kernel(request, hopper, built_together):
    return built_together(FP8)(request.param)


def test_a_c_program_without_torch_gets_sound_numbers(any_kernel):
    run_as_c(any_kernel)


def test_a_c_program_gets_sound_numbers_of_e4m3(fp8_kernel):
    run_as_c(fp8_kernel)


def run_as_c(kernel):
    result = process.run(arguments(kernel, SHAPES), timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_compute_sanitizer_finds_nothing(any_kernel):
    sanitize(arguments(any_kernel, SHAPES), "memcheck")


def test_compute_sanitizer_finds_nothing_in_e4m3(fp8_kernel):
    sanitize(arguments(fp8_kernel, SHAPES), "memcheck")


# ---- races, and barriers that are misused -------------------------------------------------------

# One of each way to share memory: by TMA, clusters, P and O and sums in shared memory, ones for the
# tensor cores, transposed V, scales by block, no producer, one tile a thread block.
SHARING = (*SPREAD, *FP8, "fwd_e4m3_d128_full_m128n96_s3_pm8_smemtotals")
BACKWARD = ("batch=1", "heads=4", "kv_heads=2", "seqlen_q=300", "seqlen_k=200")
# Where a tile's first rows see no key of one warpgroup, it meets the others at the same barrier
# from another place in the code. PTX allows that; synccheck calls it divergent, and ends the
# kernel. Here the first block of rows sees keys of every warpgroup of a tile of 128.
MET_IN_ONE_PLACE = ("batch=1", "heads=4", "kv_heads=2", "seqlen_q=100", "seqlen_k=128")
# several steps of a chunk, some of them of no whole block, and fewer rows than a tile has
DECODE = ("batch=2", "heads=6", "kv_heads=2", "seqlen_q=2", "seqlen_k=1300")
# more tiles than an H200 has SMs, of several steps and of one
MANY = ("batch=2", "heads=140", "kv_heads=70", "seqlen_q=150", "seqlen_k=200")
# heads in several sections, of whose dQ all but the last is rounded meanwhile
SECTIONS = ("batch=1", "heads=20", "kv_heads=20", "seqlen_q=1200", "seqlen_k=130")
PACKED = ("heads=4", "kv_heads=2", "total_q=300", "total_k=200", "offsets=4")
PACKED_MET_IN_ONE_PLACE = ("heads=4", "kv_heads=2", "total_q=100", "total_k=128", "offsets=2")
SIZES = {
    "quant_fp16_d128_rot": ("batch=1", "heads=2", "seqlen=200"),
    "quant_fp16_d128_rot_shead": ("batch=1", "heads=2", "seqlen=200"),
    "quant_fp16_d128_center_scol_vcols": ("batch=1", "heads=2", "seqlen=200"),
    "comb_fp32_d128_obf16": ("splits=5", "batch=2", "seqlen=7", "heads=3"),
    # ragged blocks, several steps, two query heads for each of K and V, rows that see no key
    "bwd_fp16_d128_causal_m64n128": BACKWARD,
    "bwd_bf16_d64_full_m128n128": BACKWARD,
    "bwd_fp16_d96_causal_m64n64_s1_dss1": BACKWARD,
    "bwd_bf16_d256_causal_m64n64_det_dss1_intra_c2": BACKWARD,
    # dQ transposed, ones in shared memory; K in registers; additions in order under dP; pairs
    "bwd_fp16_d128_full_m80n128_underdp": BACKWARD,
    "bwd_fp16_d64_causal_m128n128_keepk_spill128": BACKWARD,
    "bwd_fp16_d64_full_m128n128_det_s3_dos2_underdp": BACKWARD,
    "bwd_fp16_d256_causal_m64n64_dss1_intra_c2": BACKWARD,
    "bwd_fp16_d128_causal_m64n128_persist_post": MANY,
    "bwd_fp16_d64_causal_m128n128_det_underdp_persist_post": MANY,
    "bwd_fp16_d128_full_m64n128_persist_post": SECTIONS,
    "bwd_fp16_d128_causal_m64n128_varlen": PACKED,
    "fwd_fp16_d128_causal_m128n128_varlen_packgqa": PACKED,
    "fwd_fp16_d128_causal_m128n128_split16": BACKWARD,
    "dec_fp16_d128_causal_r8n64": DECODE,
    "dec_fp16_d128_causal_r8n64_streamk": DECODE,
    "dec_fp16_d64_causal_r8n64_c3_fixed": DECODE,
    "dec_bf16_d96_full_r40n64": DECODE,
}


def form_of(slug):
    """What kernels have in common that differ in their dtype alone."""
    return slug.replace("_bf16_", "_fp16_")


# One of each other form of the backward pass that is committed. FlashAttention's authors know
# racecheck to report hazards that are none where threads read what bulk copies brought. None of
# these has been seen here, and so none is known to be harmless.
OTHER_FORMS = {
    form: PACKED if "_varlen" in form else BACKWARD
    for form in sorted({form_of(path.stem) for path in schedules("backward")})
    if form not in set(map(form_of, SIZES))
}


@pytest.fixture(scope="module", params=SHARING)
def sharing_kernel(request, hopper, built_together):
    return built_together(SHARING)(request.param)


@pytest.mark.parametrize("tool", ["racecheck", "synccheck"])
def test_threads_are_synchronised(sharing_kernel, tool):
    of = sharing_kernel.plan
    harmless = [*TILE_READ_BY_ALL_LANES] if of.order.dynamic else []
    if of.scales.by_block:
        harmless += SCALES_READ_BY_ALL_LANES
    shapes = [SHAPES if tool == "synccheck" else RACED]
    if of.output == "reuse_v":
        harmless.append(O_AFTER_THE_LAST_WAIT)
        shapes = [[shape] for shape in shapes[0]]  # a finding ends the program
    for together in shapes:
        sanitize(arguments(sharing_kernel, together), tool, harmless)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("slug", some((*SIZES, *OTHER_FORMS), SIZES))
def test_kernels_beside_attention_are_as_clean(hopper, slug, tool):
    plan, binary = flow.built(from_slug(slug), binding=False)
    sizes = sizes_of(plan, tool)
    harmless = P_READ_BY_ALL_LANES if getattr(plan, "partition", None) == "gradients" else ()
    if getattr(plan, "postprocess", False):
        harmless = HINT_TO_STOP
    if plan.kind == "forward" and scheduler_warp(plan.schedule.values()):
        harmless = TILE_WRITTEN_BY_ANY_LANE
    sanitize([sys.executable, SMALL_CALL, binary.library, slug, *sizes], tool, harmless)


def sizes_of(plan, tool):
    """The sizes of the call that a tool looks at."""
    if tool == "synccheck" and plan.kind == "backward" and plan.passes:
        return PACKED_MET_IN_ONE_PLACE if plan.varlen else MET_IN_ONE_PLACE
    return (SIZES | OTHER_FORMS)[plan.slug]


def sanitize(command, tool, harmless=()):
    name = "compute-sanitizer"
    sanitizer = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    options = ["--tool", tool, "--error-exitcode", str(FOUND)]
    result = process.run([sanitizer, *options, *command], timeout=300, env=python_path())
    said = result.stdout + result.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device or this machine")
    wrong = fault(said, tool, result.returncode, harmless)
    assert wrong is None, f"{wrong}\n\nall of it:\n{said}"


def python_path():
    """Where a program finds fagen, and what this process finds beside its Python's own folders.

    Tensors have allocations of their own: what lies beside one, or in a new one, is nobody's.
    """
    folders = [str(ROOT), environment("PYTHONPATH")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return found | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
