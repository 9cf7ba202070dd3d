"""Plans of combining."""

from fagen import registry
from fagen.kinds.combine.keys import Schedule
from fagen.kinds.combine.plan import Plan

# dtypes, layouts, head dims from one load to many, lanes of part of a warp and of some, ragged rows
SPREAD = (
    "comb_fp32_d128_obf16",
    "comb_fp32_d128_obf16_packed",
    "comb_fp16_d64",
    "comb_bf16_d256_packed",
    "comb_fp32_d512_obf16",
    "comb_fp32_d8_packed_s4",
    "comb_bf16_d8_packed",
    "comb_fp16_d8_ofp32_t64_l1_s2",
    "comb_fp16_d24_packed_l4",
    "comb_fp32_d72_ofp16_packed_l4_s4",
    "comb_bf16_d136_ofp32_t256_s4",
    "comb_fp32_d384_obf16_packed_l1",
    "comb_fp32_d272_t64_l4_s2",
    "comb_bf16_d40_ofp16_l1_s16",
)


def planned(slug: str) -> Plan:
    schedule = registry.from_slug(slug)
    assert isinstance(schedule, Schedule)
    return registry.kind("combine").plan(schedule)
