"""What nvcc makes of kernels of every kind: no warning, and registers as their Plans say."""

import pytest

from fagen import flow, registry
from fagen.arch import SM90
from tests import backward_helpers, combine_helpers, decode_helpers, quantize_helpers
from tests.often import some

# one of each form, five CPU-seconds each; of the others their evidence says it too
BACKWARD = (
    "bwd_fp16_d128_causal_m64n128",
    "bwd_fp16_d128_causal_m64n128_varlen",
    "bwd_bf16_d256_causal_m64n64_det_dss1_intra_c2",
    "bwd_bf16_d128_causal_m80n128",  # dQ transposed, ones in shared memory
    "bwd_fp16_d128_causal_m64n128_persist_post",  # tiles drawn, dQ rounded meanwhile
)
# beside them dQ by one warpgroup, and seven boxes to a tile of Q
OTHERS = (
    "bwd_bf16_d64_full_m128n128_det",
    "bwd_fp16_d112_full_m64n128",
    "bwd_bf16_d48_causal_m64n128_persist",
)
# rows of 96 numbers, in a warp and a half, and of 32, in half of one
MERGED = ("dec_fp16_d96_full_r24n64_c20", "dec_bf16_d32_full_r8n64_c64")
WIDTHS = tuple(
    f"dec_bf16_d{d}_causal_r8n64{by}" for d in range(16, 257, 8) for by in ("", "_streamk")
)
# registers are scarcest
COMBINE = ("comb_bf16_d512_varlen", "comb_fp16_d8_varlen", "comb_fp16_d128")
QUANTIZE = (
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
FEW = (*combine_helpers.SPREAD[:6], *quantize_helpers.SPREAD[:8])
EVERY = (
    *(*BACKWARD, *OTHERS, *MERGED, *COMBINE, *QUANTIZE, *FEW, *WIDTHS, *decode_helpers.SPREAD),
    *backward_helpers.SPREAD[4:],
    *(path.stem for kind in ("backward", "decode") for path in registry.schedules(kind)),
)
OFTEN = (
    *(*BACKWARD, *MERGED, combine_helpers.SPREAD[1], *COMBINE[:2]),
    *(*quantize_helpers.SPREAD[:2], *QUANTIZE[::3]),
)


@pytest.mark.parametrize("slug", some(EVERY, OFTEN))
def test_a_kernel_compiles_without_a_warning_and_as_its_plan_says(slug: str) -> None:
    plan, binary = flow.built(registry.from_slug(slug), binding=False)
    report = binary.report
    assert "warning" not in (binary.folder / "compiler.log").read_text()
    assert not report.remarks
    assert report.spill_load_bytes <= plan.max_spill_bytes
    if plan.kind == "decode":  # whose schedules allow a spill only where nothing else is in line
        assert (report.spill_store_bytes > 0) == (plan.max_spill_bytes > 0)
    assert plan.max_spill_bytes or report.stack_bytes == report.spill_store_bytes == 0
    if plan.kind in ("combine", "quantize"):
        assert 0 < report.registers <= plan.launch_registers
        assert plan.launch_registers * plan.threads * plan.blocks <= SM90.registers_per_sm
