"""The quantiser: its keys and names, what it computes, and the kernel's own text, run on a CPU."""

import ctypes
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen import flow
from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.paths import locate
from fagen.process import run
from fagen.runtime.quantize import QuantizeArgs
from fagen.quantizer import (
    QuantizePlan,
    QuantizeSchedule,
    parse_quantizer,
    plan_quantizer,
    read_quantizer,
)
from fagen.vocab import KEY_ORDER
from fagen.e4m3 import (
    Quantized,
    by_rows,
    embedded,
    quantize,
    random_signs,
    rotate,
    sign_words,
)
from fagen.render import HASH_WORD, HOST_MARK, formatted, render, token_hash
from fagen.toolchain import find_gxx, find_nvcc

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SEED = 7

SPREAD = (
    "quant_fp16_d128_rot_block128",
    "quant_bf16_d128_block128_vcols",
    "quant_fp16_d128_rot_head",
    "quant_fp16_d64_rot_tensor",
    "quant_bf16_d256_rot_block64",
    "quant_fp16_d256_block128_vcols",
    "quant_bf16_d256_rot_head_vcols",
    "quant_fp16_d96_rot_block32_r32",
    "quant_fp16_d80_rot_block64_vcols_r64",
    "quant_bf16_d144_rot_head",
    "quant_fp16_d16_block32_vcols_r32",
    "quant_fp16_d48_rot_tensor_vcols_r32",
    "quant_fp16_d192_rot_block128_vcols",
    "quant_bf16_d240_rot_block32",
    "quant_fp16_d256_rot_block64_vcols_r64",
    "quant_fp16_d128_halves_rot_block128",
    "quant_bf16_d64_pairs_head_vcols",
    "quant_fp16_d80_pairs_rot_block32_r32",
    "quant_bf16_d256_halves_tensor",
)


def made(slug: str) -> QuantizePlan:
    return plan_quantizer(QuantizeSchedule.from_slug(slug))


def rotated(plan: QuantizePlan, x: Tensor) -> Tensor:
    return rotate(x, random_signs(plan.head_dim, SEED)) if plan.rotate else x.float()


def dequantized(plan: QuantizePlan, made: Quantized, seqlen: int) -> Tensor:
    values = by_rows(made.values, seqlen) if plan.columns else made.values
    return Quantized(values, made.descale).real(plan.scale_rows)


def rotary(plan: QuantizePlan, batch: int, seqlen: int) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of angles that are others in every batch, row and pair of columns."""
    if not plan.rotary:
        return None
    angles = torch.arange(float(batch * seqlen * plan.angles)).view(batch, seqlen, -1) * 0.37
    dtype = DTYPES[plan.dtype.name]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def normal(plan: QuantizePlan, batch: int, seqlen: int, heads: int) -> Tensor:
    """N(0, 1) with some entries of N(0, 100), and a scale of its own for each head."""
    generator = torch.Generator().manual_seed(3)
    shape = (batch, seqlen, heads, plan.head_dim)
    x = torch.randn(shape, generator=generator)
    x += (
        torch.randn(shape, generator=generator)
        * 10
        * (torch.rand(shape, generator=generator) < 0.001)
    )
    x *= torch.arange(1, heads + 1)[:, None]
    return x.to(DTYPES[plan.dtype.name])


# ---- the schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", SPREAD)
def test_a_slug_reads_back(slug):
    assert QuantizeSchedule.from_slug(slug).slug == slug


@pytest.mark.parametrize("path", sorted(locate("schedules").glob("quant_*.toml")), ids=str)
def test_a_committed_quantiser_is_called_by_its_slug(path):
    assert read_quantizer(path).slug == path.stem


def test_a_file_says_what_its_slug_says():
    text = '[quantize]\ndtype = "fp16"\nhead_dim = 128\nrotate = true\nscales = "block"\n'
    assert parse_quantizer(text) == QuantizeSchedule.from_slug("quant_fp16_d128_rot_block128")


def test_all_faults_are_said_at_once_each_with_its_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[quantize]\ndtype = "fp8"\nhead_dim = 100\nrotated = true\n')
    with pytest.raises(ScheduleError) as refused:
        read_quantizer(path)
    said = str(refused.value).splitlines()
    assert said[0] == f'{path}:2: quantize.dtype = "fp8" must be "fp16" or "bf16"'
    assert "head_dim = 100 must be a whole number from 16 to 256 in steps of 16" in said[1]
    assert said[2].startswith(f"{path}:4: quantize.rotated is not a key of [quantize]: dtype,")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(scales="head", scale_rows=64), "scale_rows has no meaning"),
        (dict(scales="block", rows=64), "multiple of scale_rows = 128"),
        (dict(scales="row"), '"tensor" or "head" or "block"'),
        (dict(rows=48), "32 or 64 or 128"),
        (dict(rotary="halves", head_dim=96), 'needs a head_dim of 64, 128, … .* rotary = "pairs"'),
        (dict(rotary="both"), '"none" or "halves" or "pairs"'),
    ],
)
def test_what_does_not_go_together_is_refused(keys, said):
    with pytest.raises(ScheduleError, match=said):
        QuantizeSchedule.make(**dict(dtype="fp16", head_dim=128) | keys)


@pytest.mark.parametrize(
    "slug",
    [
        "quant_fp16",
        "fwd_fp16_d128_full_m128n128",
        "quant_fp16_d128_head_r128",
        "quant_fp16_d8_head",
    ],
)
def test_what_is_no_slug_is_refused(slug):
    with pytest.raises(ScheduleError):
        QuantizeSchedule.from_slug(slug)


def test_a_missing_file_or_table_is_said():
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_quantizer("nowhere.toml")
    with pytest.raises(ScheduleError, match="a table with dtype, head_dim"):
        parse_quantizer("")


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_the_rotation_is_orthonormal_and_block_diagonal(head_dim):
    plan = made(f"quant_fp16_d{head_dim}_rot_head")
    matrix = rotated(plan, torch.eye(head_dim))
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6)
    assert head_dim % plan.hadamard == 0 and plan.hadamard.bit_count() == 1
    block = torch.arange(head_dim) // plan.hadamard
    inside = block[:, None] == block
    assert torch.all(matrix[~inside] == 0)
    assert torch.allclose(matrix[inside].abs(), torch.tensor(plan.norm))


def test_a_rotation_of_both_leaves_their_product():
    plan = made("quant_fp16_d96_rot_head")
    q, k = torch.randn(5, 96), torch.randn(7, 96)
    both = rotated(plan, q) @ rotated(plan, k).T
    assert torch.allclose(both, q @ k.T, atol=1e-4)


@pytest.mark.parametrize("scales", ["tensor", "head", "block32", "block64", "block128"])
@pytest.mark.parametrize("rotate", ["", "_rot"])
def test_descales_are_the_maxima_over_448_of_what_shares_them(scales, rotate):
    plan = made(f"quant_fp16_d64{rotate}_{scales}")
    x = normal(plan, 2, 200, 3)
    got = quantize(plan, x, SEED)
    y = rotated(plan, x).permute(0, 2, 1, 3).abs()
    if plan.by_tensor:
        expected = y.amax().expand(2, 3, 1)
    else:
        rows = plan.scale_rows or 200
        expected = torch.stack([part.amax((-1, -2)) for part in y.split(rows, 2)], -1)
    assert torch.allclose(got.descale, expected / 448, rtol=1e-6)
    assert got.values.float().abs().amax() == 448
    error = (dequantized(plan, got, 200) - rotated(plan, x)).abs().permute(0, 2, 1, 3)
    # half a step of three bits, or of the smallest numbers
    assert torch.all(error <= torch.maximum(y / 16, got.descale.amax() / 1024) * 1.01)


@pytest.mark.parametrize("pairs", [False, True])
def test_an_embedding_turns_pairs_and_leaves_products_to_distances(pairs):
    """Rows of Q and K are embedded by their places: only the distance of two enters a product."""
    places = torch.arange(40.0)[:, None] * 0.9 ** torch.arange(32.0)
    cos, sin = places.cos(), places.sin()
    q, k = (torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    rows = [x.expand(1, 40, 1, 64) for x in (q, k)]
    one, other = (embedded(x, cos, sin, pairs=pairs)[0, :, 0] for x in rows)
    products = one @ other.T
    assert torch.allclose(products[:30, 5:35].diag(), products[0, 5].expand(30), atol=1e-4)
    assert torch.allclose(one.norm(dim=-1), q.norm().expand(40))
    first = one.unflatten(-1, (32, 2) if pairs else (2, 32)).unbind(-1 if pairs else -2)[0]
    assert torch.allclose(first[0], q[::2] if pairs else q[:32])
    assert not torch.allclose(first[1], first[0], atol=0.1)


def test_a_given_descale_is_used_and_what_is_too_large_saturates():
    plan = made("quant_fp16_d64_head")
    x = normal(plan, 1, 40, 2)
    got = quantize(plan, x, descale=torch.tensor(1 / 448))
    assert torch.equal(
        got.values.float(), (x.float() * 448).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )


def test_zeros_have_a_scale_and_stay_zeros():
    plan = made("quant_bf16_d64_rot_block32")
    got = quantize(plan, torch.zeros(1, 33, 1, 64, dtype=torch.bfloat16), SEED)
    assert torch.all(got.values.float() == 0)
    assert torch.all(got.descale > 0) and torch.all(torch.isfinite(1 / got.descale))


def test_columns_are_in_the_order_of_p_and_filled_up_with_zeros():
    plan = made("quant_fp16_d16_head_vcols")
    x = torch.arange(1, 38.0)[None, :, None, None].expand(1, 37, 1, 16).half()
    got = quantize(plan, x, descale=torch.tensor(1.0)).values.float()
    assert got.shape == (1, 1, 16, 48)
    keys = torch.tensor([16 * group + key for group in range(3) for key in KEY_ORDER])
    rounded = (keys + 1.0).to(torch.float8_e4m3fn).float()
    assert torch.equal(got[0, 0, 5], torch.where(keys < 37, rounded, 0.0))
    assert sorted(KEY_ORDER) == list(range(16))


def test_the_order_of_keys_is_that_in_which_a_thread_holds_them():
    """S: lane q has keys 2q, 2q + 1 of each 8. P in e4m3: it has positions 4q … 4q + 3 of 16."""
    for quad in range(4):
        of_s = [8 * brick + 2 * quad + e for brick in range(2) for e in range(2)]
        assert list(KEY_ORDER[4 * quad : 4 * quad + 4]) == of_s


def test_what_is_huge_costs_its_own_block_alone():
    x = normal(made("quant_bf16_d64_head"), 1, 256, 1)
    x[0, 5, 0, 3] = 1e9

    def error(slug: str) -> Tensor:
        plan = made(slug)
        got = dequantized(plan, quantize(plan, x), 256)
        return (got - x.float())[0, 128:].square().mean() / x[0, 128:].float().square().mean()

    assert error("quant_bf16_d64_block128") < 1e-3
    assert error("quant_bf16_d64_head") == 1  # all the rest is zero


# ---- the kernel's text, on a CPU ----------------------------------------------------------------

HARNESS = """
#include "simt.h"
{kernel}
using namespace fagen_{slug}_kernel;

// heads first, then rows, then batches: as the host launches them
int main(int count, char** words) {{
  const int batch = atoi(words[1]), seqlen = atoi(words[2]), heads = atoi(words[3]);
  const bool given = atoi(words[4]);
  const int padded = (seqlen + 15) / 16 * 16, blocks = atoi(words[5]);
  std::vector<char> space(sizeof(Element) * batch * seqlen * heads * {head_dim} + 16);
  std::vector<uint8_t> out(size_t(batch) * padded * heads * {head_dim} + 64, 0xee);
  std::vector<float> descale(batch * heads * blocks, -1);
  std::vector<float> workspace(batch * heads * ((seqlen + 31) / 32), -1);
  char* in = space.data() + (16 - uintptr_t(space.data()) % 16) % 16;
  uint8_t* to = out.data() + (16 - uintptr_t(out.data()) % 16) % 16;
  fread(in, 1, space.size() - 16, stdin);
  std::vector<char> angles(sizeof(Element) * batch * seqlen * {head_dim} + 16);
  char* cos = angles.data() + (16 - uintptr_t(angles.data()) % 16) % 16;
  if ({rotary}) {{
    fread(cos, 1, angles.size() - 16, stdin);
  }}
  if (given) {{
    fread(descale.data(), 4, descale.size(), stdin);
  }}
  Params params = {{}};
  params.in = reinterpret_cast<const Element*>(in);
  params.out = to;
  params.descale = descale.data();
  params.in_stride_head = {head_dim};
  params.in_stride_seq = heads * {head_dim};
  params.in_stride_batch = int64_t(seqlen) * heads * {head_dim};
  params.out_stride_row = {columns} ? padded : heads * {head_dim};
  params.out_stride_head = {columns} ? padded * {head_dim} : {head_dim};
  params.out_stride_batch = int64_t({columns} ? padded : seqlen) * heads * {head_dim};
  params.descale_stride_batch = {by_tensor} ? 0 : heads * blocks;
  params.descale_stride_head = {by_tensor} ? 0 : blocks;
  params.descale_stride_block = 1;
  params.seqlen = seqlen;
  {signs}
  {angles}
  const unsigned rows = (seqlen + kRows - 1) / kRows;
  const simt::Index grid = {{unsigned(heads), rows, unsigned(batch)}};
  {launches}
  fwrite(to, 1, size_t(batch) * ({columns} ? padded : seqlen) * heads * {head_dim}, stdout);
  fwrite(descale.data(), 4, descale.size(), stdout);
}}
"""
BY_BLOCK = """
  simt::launch(grid, kThreads, [&] { quantize(params); });
"""
WHOLE = """
  params.maxima = workspace.data();
  if (!given) {
    simt::launch(grid, kThreads, [&] { find_maxima(params); });
    simt::launch({SETTLED}, kSettlers, [&] { settle(params, COUNT); });
  }
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


def run_on_cpu(
    plan: QuantizePlan, x: Tensor, folder: Path, descale: Tensor | None = None
) -> Quantized:
    """Compile the rendered kernels with g++, each asm as what the PTX manual says, and run them."""
    text = render(plan).kernel.partition("// " + HOST_MARK)[0]

    def meaning(match: re.Match[str]) -> str:
        return next((said for word, said in ASM.items() if word in match[0]), "")

    text = re.sub(r"asm(?: volatile)?\(\n?\s*\".*?\);(?=\s)", meaning, text, flags=re.DOTALL)
    assert "asm" not in text
    text = text[text.index("namespace fagen_") :]
    whole = WHOLE.replace("COUNT", "rows * heads * batch" if plan.by_tensor else "rows")
    settled = "1, 1, 1" if plan.by_tensor else "unsigned(heads), unsigned(batch), 1"
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
        launches=BY_BLOCK if plan.by_block else whole.replace("SETTLED", settled),
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
    given = int(descale is not None)
    raw = x.contiguous().view(torch.uint8).numpy().tobytes()
    for angles in rotary(plan, batch, seqlen) or ():
        raw += angles.view(torch.uint8).numpy().tobytes()
    if descale is not None:
        raw += descale.expand(batch, heads, 1).contiguous().numpy().tobytes()
    (folder / "in").write_bytes(raw)
    words = " ".join(map(str, (batch, seqlen, heads, given, blocks)))
    done = run(["sh", "-c", f"./run {words} < in > out"], cwd=folder)
    assert done.returncode == 0, done.stderr
    out = (folder / "out").read_bytes()
    shape = (batch, seqlen, heads, head_dim)
    if plan.columns:
        shape = (batch, heads, head_dim, -(-seqlen // 16) * 16)
    size = math.prod(shape)
    scales = torch.frombuffer(bytearray(out[size:]), dtype=torch.float32)
    return Quantized(
        torch.frombuffer(bytearray(out[:size]), dtype=torch.uint8).view(shape),
        scales.view(batch, heads, blocks),
    )


@pytest.mark.parametrize("slug", SPREAD)
def test_the_kernels_own_text_computes_what_the_reference_does(slug, tmp_path):
    plan = made(slug)
    x = normal(plan, 2, 203, 2)
    got = run_on_cpu(plan, x, tmp_path)
    expected = quantize(plan, x, SEED, rotary=rotary(plan, 2, 203))
    if plan.by_tensor:
        assert torch.allclose(got.descale[0, 0], expected.descale[0, 0], rtol=1e-6)
    else:
        assert torch.allclose(got.descale, expected.descale, rtol=1e-6)
    # sums that were rounded in another order may fall on the other side of a tie
    bits = expected.values.view(torch.uint8)
    different = got.values != bits
    assert different.float().mean() < 1e-3
    near = (got.values.int() - bits.int()).abs() <= 1
    assert torch.all(near | (bits.int() % 128 < 2))  # a zero may have either sign


@pytest.mark.parametrize("slug", ["quant_fp16_d64_head_vcols_r64", "quant_fp16_d64_tensor_r32"])
def test_the_kernels_own_text_takes_a_given_descale(slug, tmp_path):
    plan = made(slug)
    x = normal(plan, 1, 50, 2)
    descale = torch.tensor(0.01)
    got = run_on_cpu(plan, x, tmp_path, descale=descale)
    assert torch.equal(got.values, quantize(plan, x, descale=descale).values.view(torch.uint8))


# ---- its text and its compiler ------------------------------------------------------------------


@pytest.mark.parametrize("slug", SPREAD)
def test_its_text_is_laid_out_complete_and_says_its_hash_once(slug):
    source = render(made(slug))
    assert formatted(source.kernel) == source.kernel
    assert source.kernel.count(f'"{source.hash}"') == 1 and HASH_WORD not in source.kernel
    assert token_hash(source.kernel.replace(source.hash, HASH_WORD)) == source.hash
    assert not re.search(r"\b(None|True|False)\b|{%|{{ ", source.kernel)
    assert f"int fagen_{slug}(" in source.kernel


@pytest.fixture(scope="module", params=["quant_fp16_d64_head", "quant_fp16_d64_block64_vcols"])
def library(request) -> tuple[QuantizePlan, ctypes.CDLL]:
    plan, binary = flow.built(QuantizeSchedule.from_slug(request.param), binding=False)
    return plan, ctypes.CDLL(str(binary.library))


def test_its_launcher_refuses_what_it_cannot_do(library):
    plan, kernel = library
    launch, message = kernel[f"fagen_{plan.slug}"], kernel[f"fagen_{plan.slug}_message"]
    message.restype = ctypes.c_char_p

    def said(**changes: int) -> str:
        args = QuantizeArgs(struct_bytes=ctypes.sizeof(QuantizeArgs), batch=1, heads=2, seqlen=48)
        args.input = args.out = args.descale = args.workspace = 4096
        args.in_stride_seq, args.in_stride_head = 128, 64
        args.out_stride_head, args.out_stride_row = 64 * 48, 48
        for key, value in changes.items():
            setattr(args, key, value)
        return message(launch(ctypes.byref(args), None)).decode()

    assert said(struct_bytes=8).startswith("struct_bytes")
    assert "must not be null" in said(input=0)
    assert "must not be null" in said(descale=0)
    assert "aligned to 16" in said(out=4104)
    for key in ("in_stride_seq", "in_stride_head"):
        assert "multiples of 16 bytes" in said(**{key: 4})
    assert "multiples of 16 bytes" in said(out_stride_row=40)
    assert "multiples of 16 bytes" in said(in_stride_head=-64)
    for key in ("batch", "heads", "seqlen"):
        assert "must lie in" in said(**{key: -1})
        assert said(**{key: 0}) == "launched"  # nothing to do
    assert "must lie in" in said(seqlen=65535 * 32 + 1)
    if plan.by_block:
        assert "cannot be given" in said(given=1)
    else:
        assert "workspace" in said(workspace=0)
    assert "Hopper" in said() or torch.cuda.is_available()
    assert launch(None, None) == 1
    assert message(99) == b"unknown status"


WIDE = (  # of these registers are scarcest
    "quant_bf16_d256_rot_block32_vcols_r32",
    "quant_bf16_d192_halves_rot_block64",
    "quant_bf16_d256_pairs_rot_head",
)


@pytest.mark.parametrize("slug", (*SPREAD[:8], *WIDE))
def test_it_compiles_without_a_spill_or_a_warning(slug):
    plan, binary = flow.built(QuantizeSchedule.from_slug(slug), binding=False)
    assert "warning" not in (binary.folder / "compiler.log").read_text()
    assert binary.report.stack_bytes == binary.report.spill_store_bytes == 0
    assert 0 < binary.report.registers <= plan.registers
    assert plan.registers * plan.threads * plan.blocks <= SM90.registers_per_sm
