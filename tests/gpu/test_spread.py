"""Kernels that are not committed: every head dim, and every knob of a schedule, on a Hopper GPU."""

from functools import partial
from itertools import cycle

import pytest

from fagen.kinds.forward.verify.dense import dense, shape_error
from fagen.measure.inputs import cell_of, inputs
from fagen.problem import Sizes
from fagen.runtime.c_interface import call

pytestmark = pytest.mark.gpu

KINDS = cycle([("fp16", "full"), ("bf16", "causal"), ("fp16", "causal"), ("bf16", "full")])
HEAD_DIMS = [
    f"fwd_{dtype}_d{head_dim}_{mask}_m128n64{'_reusev' if head_dim > 224 else ''}"
    for head_dim, (dtype, mask) in zip(range(16, 257, 8), KINDS, strict=False)
]
UNEVEN = [
    "fwd_fp16_d64v256_causal_m128n96_nointra",
    "fwd_bf16_d256v64_full_m128n64",
    "fwd_fp16_d40v72_causal_m64n48",
    "fwd_bf16_d16v136_full_m192n64",
]
KNOBS = [
    "fwd_fp16_d256_causal_m128n64_half_nointer",
    "fwd_bf16_d256_full_m128n64_half",
    "fwd_fp16_d64v128_causal_m64n64_half_noprod",
    "fwd_fp16_d128_full_m128n128_noprod",
    "fwd_fp16_d128_causal_m128n64_noprod",
    "fwd_fp16_d64_causal_m192n64_s4_noprod_nointra",
    "fwd_fp16_d64_causal_m192n96_noprod_inter_onlinemax",
    "fwd_fp16_d64_full_m64n64_s3_reusev_noprod",
    "fwd_fp16_d128_causal_m128n96_nointer",
    "fwd_fp16_d128_causal_m128n128_nointra",
    "fwd_bf16_d64_causal_m192n128_nointra_onlinemax",
    "fwd_fp16_d128_full_m128n128_nointer_nointra",
    "fwd_fp16_d64_causal_m192n128_onlinemax_t8",
    "fwd_bf16_d128_causal_m128n176_reusev",
    "fwd_fp16_d128_full_m128n16_s8",
    "fwd_fp16_d64_causal_m64n224",
    "fwd_fp16_d64_causal_m64n128",
    "fwd_fp16_d128_causal_m128n128_persistent",
    "fwd_fp16_d128_full_m128n128_lpt",
    "fwd_fp16_d32_causal_m192n144_s3",
    "fwd_fp16_d128_full_m128n128_c2",
    "fwd_bf16_d128_full_m128n176_reusev_c2",
    "fwd_fp16_d256_full_m128n80_reusev_onlinemax_t8_c2",
    "fwd_fp16_d72_full_m192n48_nointra_c2",
    "fwd_fp16_d128_causal_m128n128_q2_c2",
    "fwd_fp16_d256_causal_m128n64_reusev_onlinemax_t8_c2_spill16",
    "fwd_fp16_d64_causal_m128n48_s3_c2",
    "fwd_fp16_d64_causal_m128n48_s3_reusev_c2",
    "fwd_fp16_d32_causal_m128n32_s4_c2",
    "fwd_fp16_d128_causal_m128n128_q2",
    "fwd_fp16_d64_full_m128n96_q2_nointra_tensorsum_onlinemax_c2",
    "fwd_fp16_d128v16_causal_m64n128_q2_noprod_tensorsum_onlinemax",
    "fwd_fp16_d64_causal_m192n128_q2_tensorsum_onlinemax",
    "fwd_fp16_d64_full_m64n96_s3_tensorsum_onlinemax",
    "fwd_fp16_d32_full_m128n64_q2_noprod_tensorsum_onlinemax",
    "fwd_fp16_d80v16_causal_m128n64_nointra_tensorsum_onlinemax_t8",
    "fwd_fp16_d64_full_m128n80_q2_tensorsum_onlinemax_c2",
]
SIZES = (
    Sizes(1, 1, 1, 1, 1),
    Sizes(2, 4, 2, 129, 127),
    Sizes(1, 2, 1, 700, 300),
    Sizes(1, 3, 3, 300, 1000),
    Sizes(2, 2, 2, 257, 0),
    Sizes(4, 40, 8, 513, 511),
)


@pytest.mark.parametrize("slug", [*HEAD_DIMS, *UNEVEN, *KNOBS])
def test_any_schedule_that_fits_is_within_bounds(slug, pair_of):
    plan, binary = pair_of(slug)
    for sizes in SIZES:
        case = cell_of(plan, sizes)
        kernel = dense(plan, partial(call, plan, binary.library))
        error = shape_error(case, kernel, *inputs(case))
        assert error.ok, error
