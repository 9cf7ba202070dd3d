"""Machine code goes in, real and made up; what its instructions use comes out, role by role."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fagen.errors import BuildError, ToolchainError
from fagen.process import run
from fagen.sass import machine_code, read_listing
from fagen.toolchain import find_disassembler, find_nvcc

PTX = """\
.version 8.0
.target sm_90a
.address_size 64
// {comment}
.visible .entry {name}(.param .u64 out)
.maxntid 256
.minnctapersm 1
{{
  .reg .b32 %r<8>;
  .reg .b64 %rd<4>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  setp.ge.u32 %p1, %r1, 128;
  @%p1 bra CONSUMER;
  setmaxnreg.dec.sync.aligned.u32 24;
  bar.arrive 1, 256;
  ret;
CONSUMER:
  setmaxnreg.inc.sync.aligned.u32 240;
  bar.sync 1, 256;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  mul.lo.u32 %r2, %r1, {factor};
  st.global.u32 [%rd3], %r2;
  ret;
}}
"""


def assemble(folder: Path, name: str = "kernel", factor: int = 7, comment: str = "a") -> Path:
    source = folder / f"{name}.ptx"
    source.write_text(PTX.format(name=name, factor=factor, comment=comment))
    cubin = source.with_suffix(".cubin")
    result = run([find_nvcc().nvcc, "-arch=sm_90a", "-cubin", source, "-o", cubin])
    assert result.returncode == 0, result.stderr
    return cubin


def test_roles_are_told_apart_and_the_hash_is_of_the_code_and_not_of_names_or_comments(tmp_path):
    code = machine_code(assemble(tmp_path))
    assert code.kernel == "kernel"
    assert (code.lowered_to, code.raised_to) == ((24,), (240,))
    assert code.count("STG") == 1 and code.count("USETMAXREG") == 2
    assert code.producer_registers is not None and code.consumer_registers is not None
    assert 0 < code.producer_registers < code.consumer_registers == code.registers <= 24
    renamed = machine_code(assemble(tmp_path, name="another_name", comment="b"))
    changed = machine_code(assemble(tmp_path, name="changed", factor=9))
    assert renamed.hash == code.hash != changed.hash
    assert replace(renamed, kernel="kernel") == code


def test_what_holds_no_kernel_is_refused(tmp_path):
    empty = tmp_path / "empty.so"
    empty.write_bytes(b"nothing")
    with pytest.raises(BuildError, match="holds 0 cubins"):
        machine_code(empty)
    with pytest.raises(ToolchainError, match="cannot read"):
        machine_code(empty.rename(tmp_path / "empty.cubin"))


def listing(*lines: str) -> str:
    """Text as nvdisasm prints it: labels as they are, of an instruction its registers behind //."""
    printed = ["//---- .text.kernel ----", "  .x  // | # 0123456789 | PRED"]
    offset = 0
    for line in lines:
        text, _, registers = line.partition("//")
        if text.strip().endswith(":"):
            printed.append(f"{text.strip()}     // +....")
        else:
            used = ":" * int(registers or 0)
            printed.append(f"    /*{offset:04x}*/    {text.strip()} ;    // | 9 {used:10} | 1 |")
            offset += 16
    return "\n".join(printed)


def test_of_all_registers_there_is_no_table_and_all_count():
    drawn = listing("LDG.E R4, desc[UR4][R2.64] // 6", "EXIT // 6")
    bare = re.sub(r"//[ -]*\|.*", "", drawn)
    assert read_listing(bare, "", untold=255) == replace(read_listing(drawn, ""), registers=255)
    with pytest.raises(BuildError, match="no register table"):
        read_listing(bare, "")


@pytest.mark.parametrize(
    ("refusal", "read"), [("Invalid register count : '255'", True), ("out of order", False)]
)
def test_where_nvdisasm_draws_no_table_roles_have_no_registers_of_their_own(
    refusal, read, tmp_path
):
    cubin, tools = assemble(tmp_path), find_disassembler()
    assert tools is not None
    fussy = tmp_path / "nvdisasm"
    fussy.write_text(
        f'#!/bin/sh\ncase "$*" in *-lrm*) echo "nvdisasm fatal   : {refusal}" >&2; exit 255;; '
        f'esac\nexec "{tools.nvdisasm}" "$@"\n'
    )
    fussy.chmod(0o755)
    if not read:
        with pytest.raises(ToolchainError, match=r"cannot read .*: nvdisasm fatal"):
            machine_code(cubin, replace(tools, nvdisasm=fussy))
        return
    machine = machine_code(cubin, tools)
    code = machine_code(cubin, replace(tools, nvdisasm=fussy))
    assert machine.producer_registers and machine.consumer_registers
    assert (code.registers, code.producer_registers, code.consumer_registers) == (255, None, None)
    assert (code.hash, code.raised_to, code.lowered_to) == (machine.hash, (240,), (24,))
    # what fills a kernel's end up is listed only without the table
    assert {**code.opcodes, "NOP": 0, "BRA": 0} == {**machine.opcodes, "NOP": 0, "BRA": 0}


def test_threads_that_meet_again_go_on_where_they_agreed_to():
    # both roles end in the common code behind .L_end; the way there is told by BSSY alone
    code = read_listing(
        listing(
            "BSSY B0, `(.L_end) // 2",
            "@P0 BRA `(.L_consumer) // 2",
            "USETMAXREG.DEALLOC.CTAPOOL 0x18 // 3",
            "BSYNC B0 // 3",
            ".L_consumer:",
            "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 // 5",
            "BSYNC B0 // 8",
            "NOP // 10",
            ".L_end:",
            "EXIT // 4",
        ),
        "",
    )
    assert (code.producer_registers, code.consumer_registers, code.registers) == (4, 8, 10)


def test_of_several_kernels_the_figures_are_the_sums_and_the_largest():
    parts = [listing("LDL R1 // 3", "EXIT // 2"), listing("NOP // 7", "NOP // 1", "EXIT // 1")]
    both = f"{parts[0]}\n{parts[1].replace('.text.kernel', '.text.other')}"
    code = read_listing(both, "hash", 2)
    assert (code.kernel, code.instructions, code.registers) == ("kernel other", 5, 7)
    assert code.opcodes == {"EXIT": 2, "LDL": 1, "NOP": 2}
    assert code.consumer_registers is None and code.hash == "hash"
    for expected in (1, 3):
        with pytest.raises(BuildError, match=rf"{expected}, not \['kernel', 'other'\]"):
            read_listing(both, "hash", expected)


def test_a_conditional_branch_goes_both_ways_and_a_plain_one_does_not():
    code = read_listing(
        listing(
            "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 // 1",
            "@!P0 BRA `(.L_more) // 2",
            "BRA.U UP0, `(.L_more) // 2",
            "CALL.REL.NOINC `(.L_call) // 3",
            "BRA `(.L_out) // 3",
            "NOP // 9",
            ".L_more:",
            "NOP // 5",
            ".L_out:",
            "@P1 EXIT // 4",
            "EXIT // 4",
            ".L_call:",
            "RET.REL.NODEC R2 `(kernel) // 6",
            "NOP // 10",
        ),
        "",
    )
    assert (code.consumer_registers, code.registers) == (6, 10)
    assert code.producer_registers is None


def test_a_branch_that_cannot_be_followed_is_not_passed_over():
    with pytest.raises(BuildError, match="a branch to nowhere"):
        read_listing(listing("BRA `(.L_gone) // 1", "EXIT // 1"), "")


# ---- Real kernels --------------------------------------------------------------------------------


def steps(plan: Any) -> tuple[int, int]:
    """Wgmma instructions of S = QKᵀ and of PV, of one block."""
    return plan.tile.head_dim_padded // plan.dtype.wgmma_k, plan.block_n // plan.dtype.wgmma_k


def test_wgmma_tma_and_setmaxnreg_are_in_the_machine_code_where_the_plan_says_so(kernel):
    plan, code = kernel.plan, kernel.binary.report.machine
    shapes = {opcode.split(".")[1] for opcode in code.opcodes if opcode.startswith("HGMMA")}
    assert shapes == {f"64x{plan.block_n}x16", f"64x{plan.tile.o_columns}x16"}
    # two GEMMs, each issued step by step at least once
    assert code.count("HGMMA") >= sum(steps(plan))
    # Q, K and V come, and O goes, in boxes of one slab
    qk_slabs, v_slabs = (
        plan.tile.head_dim_padded // plan.tile.qk_slab,
        plan.tile.head_dim_v_padded // plan.tile.v_slab,
    )
    boxes = 2 * qk_slabs + v_slabs if plan.pipeline.unrolled_copies > 1 else 3
    assert code.count("UTMALDG") >= boxes
    assert code.count("UTMASTG") >= v_slabs
    assert bool(code.count("USETMAXREG")) is plan.producer_warp
    if plan.producer_warp:
        assert (code.lowered_to, code.raised_to) == (
            (plan.producer_registers,),
            (plan.consumer_registers,),
        )
    assert code.count("SYNCS") > 0


def test_nothing_goes_through_local_memory_or_past_tma(kernel):
    plan, code = kernel.plan, kernel.binary.report.machine
    # no spills; K and V neither through registers nor by cp.async; nothing is accumulated in memory
    assert code.count("LDL", "STL", "LDGSTS", "LDG", "LD", "ST", "RED") == 0
    assert bool(code.count("ATOMG")) is plan.order.dynamic  # tiles are drawn


def test_no_role_uses_a_register_beyond_its_budget(kernel):
    plan, code = kernel.plan, kernel.binary.report.machine
    if plan.producer_warp:
        assert 0 < code.producer_registers <= plan.producer_registers
        assert 0 < code.consumer_registers <= plan.consumer_registers
    else:
        assert code.consumer_registers is None and code.producer_registers is None
        assert code.registers <= plan.launch_registers


def test_p_reaches_the_pv_gemm_from_registers_and_q_never_does(kernel):
    plan, code = kernel.plan, kernel.binary.report.machine
    qk_steps, pv_steps = steps(plan)
    assert pv_steps <= code.wgmma_from_registers <= code.count("HGMMA") - qk_steps
