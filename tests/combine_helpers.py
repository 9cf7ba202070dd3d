"""Plans of combining."""

from fagen import registry

planned = registry.plan_of

# dtypes, layouts, head dims from one load to many, lanes of part of a warp and of some, ragged rows
SPREAD = (
    "comb_fp32_d128_obf16",
    "comb_fp32_d128_obf16_varlen",
    "comb_fp16_d64",
    "comb_bf16_d256_varlen",
    "comb_fp32_d512_obf16",
    "comb_fp32_d8_varlen",
    "comb_bf16_d8_varlen",
    "comb_fp16_d8_ofp32",
    "comb_fp16_d24_varlen",
    "comb_fp32_d72_ofp16_varlen",
    "comb_bf16_d136_ofp32",
    "comb_fp32_d384_obf16_varlen",
    "comb_fp32_d272",
    "comb_bf16_d40_ofp16",
    "comb_fp32_d128_obf16_sinkbf16",
    "comb_fp16_d24_varlen_sinkfp32",
)
