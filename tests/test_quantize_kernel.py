"""The kernel of a quantiser: its own text, run on a CPU, and what its compilers make of it."""

import ctypes
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen import flow, registry
from fagen.arch import SM90
from fagen.e4m3 import Centered, by_columns, sign_words
from fagen.kinds.quantize.plan import Plan
from fagen.kinds.quantize.reference import quantize
from fagen.process import run
from fagen.render import HASH_WORD, HOST_MARK, formatted, render, token_hash
from fagen.toolchain import find_gxx, find_nvcc
from tests.c_calls import changed
from tests.often import some
from tests.quantize_helpers import SEED, SPREAD, normal, planned, rotary, uneven

# ---- the kernel's text, on a CPU ----------------------------------------------------------------


HARNESS = """
#include "simt.h"
{kernel}
using namespace fagen_{slug}_kernel;

float* aligned(std::vector<float>& of) {{
  return of.data() + (16 - uintptr_t(of.data()) % 16) % 16 / 4;
}}

int main(int count, char** words) {{
  const int batch = atoi(words[1]), seqlen = atoi(words[2]), heads = atoi(words[3]);
  const bool given = atoi(words[4]);
  const int padded = (seqlen + 15) / 16 * 16, blocks = atoi(words[5]);
  std::vector<char> space(sizeof(Element) * batch * seqlen * heads * {head_dim} + 16);
  std::vector<uint8_t> out(size_t(batch) * padded * heads * {head_dim} + 64, 0xee);
  std::vector<float> space_of_descales(batch * heads * blocks + 4, -1);
  std::vector<float> space_of_means(batch * heads * {head_dim} + 4, -1);
  std::vector<float> workspace(batch * heads * ((seqlen + 31) / 32) * 3 * {head_dim}, -1);
  float* descale = aligned(space_of_descales);
  float* mean = aligned(space_of_means);
  char* in = space.data() + (16 - uintptr_t(space.data()) % 16) % 16;
  uint8_t* to = out.data() + (16 - uintptr_t(out.data()) % 16) % 16;
  fread(in, 1, space.size() - 16, stdin);
  std::vector<char> angles(sizeof(Element) * batch * seqlen * {head_dim} + 16);
  char* cos = angles.data() + (16 - uintptr_t(angles.data()) % 16) % 16;
  if ({rotary}) {{
    fread(cos, 1, angles.size() - 16, stdin);
  }}
  if (given) {{
    fread(descale, 4, batch * heads * blocks, stdin);
    fread(mean, 4, batch * heads * {head_dim}, stdin);
  }}
  Params params = {{}};
  params.x = reinterpret_cast<const Element*>(in);
  params.values = to;
  params.descale = descale;
  params.x_stride_head = {head_dim};
  params.x_stride_seq = heads * {head_dim};
  params.x_stride_batch = int64_t(seqlen) * heads * {head_dim};
  params.values_stride_row = {columns} ? padded : heads * {head_dim};
  params.values_stride_head = {columns} ? padded * {head_dim} : {head_dim};
  params.values_stride_batch = int64_t({columns} ? padded : seqlen) * heads * {head_dim};
  params.descale_stride_batch = {by_tensor} ? 0 : heads * blocks;
  params.descale_stride_head = {by_tensor} ? 0 : blocks;
  params.seqlen = seqlen;
  {signs}
  {angles}
  const unsigned rows = (seqlen + kRows - 1) / kRows;
  params.heads = FastDivisor(heads);
  params.tiles = FastDivisor(rows);
  const simt::Index grid = {{heads * rows * batch, 1, 1}};
  const simt::Index of_heads = {{unsigned({by_tensor} ? 1 : heads * batch), 1, 1}};
  {launches}
  fwrite(to, 1, size_t(batch) * ({columns} ? padded : seqlen) * heads * {head_dim}, stdout);
  fwrite(descale, 4, batch * heads * blocks, stdout);
  fwrite(mean, 4, batch * heads * {head_dim}, stdout);
}}
"""
MAXIMA = """
  params.maxima = workspace.data();
  params.maxima_of_one = int64_t(rows) * (BY_TENSOR ? heads * batch : 1);
  if (!given) {
    simt::launch(grid, kThreads, [&] { find_maxima(params); });
    simt::launch(of_heads, kReduceThreads, [&] { reduce_maxima(params); });
  }
"""
OF_COLUMNS = """
  params.numbers = workspace.data();
  params.column_tiles = FastDivisor((seqlen + kColumnRows - 1) / kColumnRows);
  MEAN
  if (!given) {
    const unsigned tiles = params.column_tiles.value;
    simt::launch({heads * tiles * batch, 1, 1}, kColumnThreads, [&] { find_columns(params); });
    simt::launch({unsigned(heads * batch), 1, 1}, kReduceThreads, [&] { reduce_columns(params); });
  }
"""
MEAN = """
  params.mean = mean;
  params.mean_stride_batch = heads * HEAD_DIM;
  params.mean_stride_head = HEAD_DIM;
"""
QUANTIZE = """
  simt::launch(grid, kThreads, [&] { quantize(params); });
"""
ANGLES = """
  params.cos = reinterpret_cast<const Element*>(cos);
  params.sin = params.cos + batch * seqlen * {half};
  params.cos_stride_seq = params.sin_stride_seq = {half};
  params.cos_stride_batch = params.sin_stride_batch = seqlen * {half};
"""
ASM = {
    "mma.sync": "simt::mma<Element>(d, a0, a1, a2, a3, b0, b1);",
    "cvt.rn": "packed = simt::pack(a, b, c, d);",
    "stmatrix": "simt::stmatrix(at, pairs);",
}


def launches(plan: Plan) -> str:
    """What a call launches, in order."""
    text = ""
    if plan.reads_columns:
        text += OF_COLUMNS.replace("MEAN", MEAN if plan.center else "")
    if not plan.by_block and not plan.by_column:
        text += MAXIMA.replace("BY_TENSOR", str(int(plan.by_tensor)))
    return (text + QUANTIZE).replace("HEAD_DIM", str(plan.head_dim))


def run_on_cpu(
    plan: Plan,
    x: Tensor,
    folder: Path,
    descale: Tensor | None = None,
    mean: Tensor | None = None,
) -> Centered:
    """Compile the rendered kernels with g++, each asm as what the PTX manual says, and run them."""
    text = render(plan).kernel.partition("// " + HOST_MARK)[0]

    def meaning(match: re.Match[str]) -> str:
        return next((said for word, said in ASM.items() if word in match[0]), "")

    text = re.sub(r"asm(?: volatile)?\(\n?\s*\".*?\);(?=\s)", meaning, text, flags=re.DOTALL)
    assert "asm" not in text
    text = text[text.index("namespace fagen_") :]
    program = HARNESS.format(
        kernel=text,
        slug=plan.slug,
        head_dim=plan.head_dim,
        columns=int(plan.columns),
        by_tensor=int(plan.by_tensor),
        signs="".join(f"params.signs[{i}] = {sign_words(SEED)[i]}u;" for i in range(plan.chunks))
        if plan.rotate
        else "",
        rotary=int(plan.rotary),
        angles=ANGLES.format(half=plan.angles) if plan.rotary else "",
        launches=launches(plan),
    )
    (folder / "run.cpp").write_text(program)
    shutil.copy(Path(__file__).parent / "simt.h", folder)
    gxx, _ = find_gxx()
    made = run(
        [gxx, "-std=c++17", "-O1", "-w", "-I", find_nvcc().include, "run.cpp", "-o", "run"],
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr[:4000]
    batch, seqlen, heads, head_dim = x.shape
    blocks = -(-seqlen // plan.scale_rows) if plan.by_block else 1
    blocks = head_dim if plan.by_column else blocks
    given = int(descale is not None or mean is not None)
    raw = x.contiguous().view(torch.uint8).numpy().tobytes()
    for angles in rotary(plan, batch, seqlen) or ():
        raw += angles.view(torch.uint8).numpy().tobytes()
    if given:
        descale = torch.ones(()) if descale is None else descale
        mean = torch.zeros(()) if mean is None else mean
        for one, count in ((descale, blocks), (mean, head_dim)):
            raw += one.expand(batch, heads, count).contiguous().numpy().tobytes()
    (folder / "in").write_bytes(raw)
    words = " ".join(map(str, (batch, seqlen, heads, given, blocks)))
    done = run(["sh", "-c", f"./run {words} < in > out"], cwd=folder)
    assert done.returncode == 0, done.stderr
    out = (folder / "out").read_bytes()
    shape = (batch, seqlen, heads, head_dim)
    if plan.columns:
        shape = (batch, heads, head_dim, -(-seqlen // 16) * 16)
    size = math.prod(shape)
    numbers = torch.frombuffer(bytearray(out[size:]), dtype=torch.float32)
    scales, means = numbers.split([batch * heads * blocks, batch * heads * head_dim])
    return Centered(
        torch.frombuffer(bytearray(out[:size]), dtype=torch.uint8).view(shape),
        scales.view(batch, heads, blocks),
        means.view(batch, heads, head_dim),
    )


@pytest.mark.parametrize("slug", some(SPREAD, SPREAD[::3]))
def test_the_kernels_own_text_computes_what_the_reference_does(slug, tmp_path):
    plan = planned(slug)
    x = uneven(plan, 2, 203, 2)
    got = run_on_cpu(plan, x, tmp_path)
    expected = quantize(plan, x, SEED, rotary=rotary(plan, 2, 203))
    if plan.by_tensor:
        assert torch.allclose(got.descale[0, 0], expected.descale[0, 0], rtol=1e-6)
    else:
        assert torch.allclose(got.descale, expected.descale, rtol=1e-5 if plan.center else 1e-6)
    if plan.center:
        assert torch.allclose(got.mean, expected.mean, rtol=1e-5, atol=1e-5)
    bits = expected.values.view(torch.uint8)
    if not (plan.rotate or plan.center):  # nothing is added up
        assert torch.equal(got.values, bits)
    if plan.columns:
        assert not got.values[by_columns(torch.ones_like(x)) == 0].any()
    # sums that were rounded in another order may fall on the other side of a tie
    different = got.values != bits
    assert different.float().mean() < 1e-3
    near = (got.values.int() - bits.int()).abs() <= 1
    assert torch.all(near | (bits.int() % 128 < 2))  # a zero may have either sign


@pytest.mark.parametrize(
    "slug",
    [
        "quant_bf16_d48_center_shead",
        "quant_bf16_d80_rot_center_sr128",
        "quant_fp16_d240_rot_center",
    ],
)
def test_columns_past_the_head_dim_have_no_part_in_maxima(slug, tmp_path):
    """Less their means all numbers are far below one."""
    plan = planned(slug)
    x = (uneven(plan, 1, 150, 2) * 2.0**-10).to(getattr(torch, plan.dtype.torch))
    got = run_on_cpu(plan, x, tmp_path)
    expected = quantize(plan, x, SEED)
    assert torch.allclose(got.descale, expected.descale, rtol=1e-5)
    assert (got.values != expected.values.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("slug", ["quant_fp16_d64_shead_vcols", "quant_fp16_d64_stensor"])
def test_the_kernels_own_text_takes_a_given_descale(slug, tmp_path):
    plan = planned(slug)
    x = uneven(plan, 1, 50, 2)
    descale = torch.tensor(0.01)
    got = run_on_cpu(plan, x, tmp_path, descale=descale)
    assert torch.equal(got.values, quantize(plan, x, descale=descale).values.view(torch.uint8))


@pytest.mark.parametrize("slug", ["quant_fp16_d64_center_scol_vcols", "quant_bf16_d128_rot_center"])
def test_the_kernels_own_text_takes_given_means(slug, tmp_path):
    plan = planned(slug)
    x = uneven(plan, 1, 50, 2)
    given = dict(mean=normal(1, 2, plan.head_dim).float())
    given |= dict(descale=torch.full((1, 2, plan.head_dim), 0.01)) if plan.by_column else {}
    got = run_on_cpu(plan, x, tmp_path, **given)
    expected = quantize(plan, x, SEED, **given).values.view(torch.uint8)
    assert (got.values != expected).float().mean() < 1e-3


# ---- its text and its compiler ------------------------------------------------------------------


@pytest.mark.parametrize("slug", SPREAD)
def test_its_text_is_laid_out_complete_and_says_its_hash_once(slug):
    source = render(planned(slug))
    assert formatted(source.kernel) == source.kernel
    assert source.kernel.count(f'"{source.hash}"') == 1 and HASH_WORD not in source.kernel
    assert token_hash(source.kernel.replace(source.hash, HASH_WORD)) == source.hash
    assert not re.search(r"\b(None|True|False)\b|{%|{{ ", source.kernel)
    assert f"int fagen_{slug}(" in source.kernel


@pytest.fixture(scope="module", params=["quant_fp16_d64_shead", "quant_fp16_d64_vcols"])
def library(request) -> tuple[Plan, ctypes.CDLL]:
    plan, binary = flow.built(registry.from_slug(request.param), binding=False)
    return plan, ctypes.CDLL(str(binary.library))


def test_its_launcher_refuses_what_it_cannot_do(library):
    plan, kernel = library
    launch, message = kernel[f"fagen_{plan.slug}"], kernel[f"fagen_{plan.slug}_message"]
    message.restype = ctypes.c_char_p

    def said(**changes: int) -> str:
        args = changed(plan, dict(batch=1, heads=2, seqlen=48), changes)
        return message(launch(ctypes.byref(args), None)).decode()

    for key in ("struct_bytes", "version"):
        assert said(**{key: 8}) == "struct_bytes or version is that of another FagenQuantizeArgs"
    for key in ("x", "values", "descale"):
        assert said(**{key: 0}) == "a tensor that is needed is null"
    for key in ("x", "values"):
        assert said(**{key: 4104}) == (
            "a tensor does not begin at a multiple of 16 bytes (descale: 4)"
        )
    bad_stride = "a stride is negative, too large, or no multiple of 16 bytes"
    for key in ("x_stride_seq", "x_stride_head"):
        assert said(**{key: 4}) == bad_stride
    assert said(values_stride_seq=40) == bad_stride
    overlap = "elements of an output (values, descale) overlap: a stride is 0 or too small"
    for key in ("values_stride_seq", "values_stride_head"):
        assert said(**{key: 0}) == overlap
    assert said(x_stride_head=-64) == bad_stride
    assert said(descale_stride_head=(1 << 30) + 1) == bad_stride
    for key in ("batch", "heads", "seqlen"):
        assert said(**{key: -1}) == "a size is negative or too large"
        assert said(**{key: 0}) == "launched"  # nothing to do
    for key in ("seqlen", "batch", "heads"):
        assert said(**{key: (1 << 30) + 1}) == "a size is negative or too large"
    for most in (dict(batch=1 << 16), dict(seqlen=(1 << 21) + 1)):
        assert said(**most, workspace_bytes=1 << 40) == said()  # as many as there may be
    assert said(batch=1 << 29, workspace_bytes=1 << 40) == "there are 2^30 tiles or more"
    if plan.by_block:
        assert said(descale_given=1) == "descales of blocks are found, they cannot be given"
    else:
        for change in (dict(workspace=0), dict(workspace_bytes=7)):
            assert said(**change).startswith("the workspace is null, too small, or does not begin")
            assert "workspace" not in said(**change, descale_given=1)
    assert "Hopper" in said() or torch.cuda.is_available()
    assert "null" in message(launch(None, None)).decode()
    assert message(99) == b"unknown status"


WIDE = (  # of these registers are scarcest
    "quant_bf16_d256_rot_sr32_vcols",
    "quant_bf16_d192_halves_rot",
    "quant_bf16_d256_pairs_rot_shead",
    "quant_fp16_d128_center_scol_vcols",
    "quant_bf16_d256_center_scol_vcols",
    "quant_bf16_d256_rot_center",
    "quant_fp16_d128_rot_center",
    "quant_fp16_d112_rot_center",
    "quant_bf16_d224_rot_center_shead_vcols",
)


@pytest.mark.parametrize("slug", some((*SPREAD[:8], *WIDE), (*SPREAD[:2], *WIDE[::3])))
def test_it_compiles_without_a_spill_or_a_warning(slug):
    plan, binary = flow.built(registry.from_slug(slug), binding=False)
    assert "warning" not in (binary.folder / "compiler.log").read_text()
    assert binary.report.stack_bytes == binary.report.spill_store_bytes == 0
    assert 0 < binary.report.registers <= plan.launch_registers
    assert plan.launch_registers * plan.threads * plan.blocks <= SM90.registers_per_sm
