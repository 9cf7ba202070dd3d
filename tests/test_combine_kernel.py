"""The kernel of combining: its own text, run on a CPU, and what its compiler makes of it."""

import ctypes
import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from fagen import flow, registry, simulator
from fagen.arch import SM90
from fagen.kinds.combine.emulate import compute
from fagen.kinds.combine.plan import Plan
from fagen.kinds.combine.verify import RULE, Case
from fagen.measure.verification import Run, check
from fagen.render import HASH_WORD, formatted, render, token_hash
from fagen.runtime.c_interface import struct_of
from tests.c_calls import changed
from tests.combine_helpers import SPREAD, planned
from tests.often import some

# ---- the kernel's text, on a CPU ----------------------------------------------------------------

CASES = (
    Case(1, 2, 3, 5),
    Case(2, 3, 5, 2, "some"),
    Case(7, 2, 3, 3, "wide"),
    Case(9, 2, 1, 3, "rising"),
    Case(16, 40, 1, 2, "some"),
    Case(33, 1, 3, 2),
    Case(2, 1, 7, 2, "none"),
)


def on_cpu(plan: Plan) -> Run:
    """The kernel's text on the simulated GPU, given inputs and outputs by name."""
    return partial(simulator.call, plan, simulator.build(render(plan).kernel))


@pytest.mark.parametrize("slug", some(SPREAD, SPREAD[:6]))
def test_the_kernels_own_text_has_the_emulations_bits(slug):
    plan = planned(slug)
    errors = check(plan, RULE, on_cpu(plan), device="cpu")
    assert all(error.differing == 0 for error in errors)


@pytest.mark.parametrize("slug", ["comb_fp32_d8_varlen", "comb_fp32_d128_obf16_varlen"])
def test_a_row_finds_its_sequence_wherever_it_lies(slug):
    plan = planned(slug)
    kernel = on_cpu(plan)
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, rows: int) -> Tensor:
        return torch.randint(0, rows + 1, (batch + 1,), generator=generator).sort().values

    def padded(batch: int, starts: Tensor) -> Tensor:
        return torch.cat((starts, starts[-1:].expand(batch + 1 - len(starts))))

    packings = (
        (torch.arange(101), 100),  # a row each
        (torch.arange(1200), 1199),
        (torch.arange(41) * 3 + 2, 130),  # rows over at both ends
        *((drawn(batch, 90), 97) for batch in (0, 1, 2, 30, 31, 32, 33, 64, 1023, 1025, 2500)),
        (torch.cat((torch.zeros(2000), torch.arange(50))), 49),  # the first ones are empty
        (padded(1100, torch.arange(50)), 60),  # the last ones are
        (padded(500, torch.tensor([0, 7, 7, 8, 60])), 70),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1000]), 1000),
        (torch.full((70,), 5), 9),
        (torch.arange(70) + 1000, 9),  # all of them behind the rows
        (torch.arange(70).flip(0), 64),  # no packing at all: anything, but an end
    )
    for starts, rows in packings:
        batch = len(starts) - 1
        counts = torch.randint(-1, 5, (batch,), generator=generator).int()
        given = dict(
            outs=torch.randn(3, rows, 1, plan.head_dim, generator=generator),
            lses=torch.randn(3, 1, rows, generator=generator),
            num_splits=counts,
            cu_seqlens=starts.int(),
        )
        right = compute(plan, **given)
        out, lse = (torch.full_like(tensor, math.nan) for tensor in right)
        kernel(**given, out=out, lse=lse)
        if starts.equal(starts.sort().values):
            assert torch.equal(out, right[0]) and torch.equal(lse, right[1])


def test_no_splits_at_all_are_zeros_and_minus_infinity():
    plan = planned("comb_fp32_d128_obf16")
    given = dict(outs=torch.empty(0, 2, 3, 5, 128), lses=torch.empty(0, 2, 5, 3))
    out = torch.full((2, 3, 5, 128), math.nan, dtype=torch.bfloat16)
    lse = torch.full((2, 5, 3), math.nan)
    on_cpu(plan)(**given, out=out, lse=lse)
    assert torch.all(out == 0) and torch.all(lse == -math.inf)


# ---- its text and its compiler ------------------------------------------------------------------


@pytest.mark.parametrize("slug", SPREAD)
def test_its_text_is_laid_out_complete_and_says_its_hash_once(slug):
    source = render(planned(slug))
    assert formatted(source.kernel) == source.kernel
    assert source.kernel.count(f'"{source.hash}"') == 1 and HASH_WORD not in source.kernel
    assert token_hash(source.kernel.replace(source.hash, HASH_WORD)) == source.hash
    assert not re.search(r"\b(None|True|False)\b|{%|{{ ", source.kernel)
    assert f"int fagen_{slug}(" in source.kernel


def test_what_comes_from_another_launch_is_read_past_the_read_only_cache():
    text = render(planned("comb_fp32_d128_obf16_varlen")).kernel
    kernel = text[text.index("combine(const __grid_constant__") :]
    assert "__ldg" not in text and "ld.global.nc" not in text
    reads = (kernel.index(word) for word in ("find_splits(", "load_lses(0)", "load_split(stage)"))
    assert kernel.index("griddepcontrol.wait") < min(reads)


@pytest.fixture(scope="module", params=["comb_fp16_d64", "comb_fp32_d128_obf16_varlen"])
def library(request) -> tuple[Plan, ctypes.CDLL]:
    plan, binary = flow.built(registry.from_slug(request.param), binding=False)
    return plan, ctypes.CDLL(str(binary.library))


def test_its_launcher_refuses_what_it_cannot_do(library):
    plan, kernel = library
    launch, message = kernel[f"fagen_{plan.slug}"], kernel[f"fagen_{plan.slug}_message"]
    message.restype = ctypes.c_char_p
    struct = struct_of(plan.signature)
    sizes = dict(splits=4, batch=3, seqlen=5, heads=2)

    def said(**changes: int) -> str:
        args = changed(plan, sizes, changes)
        return message(launch(ctypes.byref(args), None)).decode()

    assert said(struct_bytes=8).startswith("struct_bytes")
    assert said(version=99).startswith("struct_bytes or version")
    for name in ("outs", "lses", "out", "lse"):
        assert "null" in said(**{name: 0})
    for name in ("outs", "out"):
        assert "16 bytes" in said(**{name: 4104})
        assert "multiple of 16 bytes" in said(**{f"{name}_stride_head": 1})
    assert "16 bytes" not in said(lses=4100, lse=4100, lses_stride_head=5)
    assert "multiple of 16 bytes" in said(outs_stride_split=-256)
    for size in ("splits", "batch", "seqlen", "heads"):
        assert "negative or too large" in said(**{size: -1})
    assert said(heads=0) == said(seqlen=0) == "launched"  # nothing to do
    assert "2^30 rows or " in said(seqlen=1 << 20, heads=1 << 20)
    assert "2^30 rows or " in said(batch=1 << 30, seqlen=1, heads=1)
    assert "elements of an output (out, lse) overlap" in said(out_stride_head=0, out_stride_seq=0)
    assert "Hopper" in said() or torch.cuda.is_available()
    workspace = kernel[f"fagen_{plan.slug}_workspace"]
    workspace.restype = ctypes.c_int64
    assert workspace(ctypes.byref(struct())) == 0 and workspace(None) == -1


TIGHT = (  # registers are scarcest
    "comb_bf16_d512_varlen",
    "comb_fp16_d8_varlen",
    "comb_fp16_d128",
)


@pytest.mark.parametrize("slug", some((*SPREAD[:6], *TIGHT), (SPREAD[1], *TIGHT[:2])))
def test_it_compiles_without_a_spill_or_a_warning(slug):
    plan, binary = flow.built(registry.from_slug(slug), binding=False)
    assert "warning" not in (binary.folder / "compiler.log").read_text()
    assert binary.report.stack_bytes == binary.report.spill_store_bytes == 0
    assert 0 < binary.report.registers <= plan.launch_registers
    assert plan.launch_registers * plan.threads * plan.blocks <= SM90.registers_per_sm
