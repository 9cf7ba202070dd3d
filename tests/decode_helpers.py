"""Plans of decoding."""

from fagen import registry

planned = registry.plan_of

# dtypes, masks, rows, both widths of a step, head dims that fill slabs and that do not, few chunks
# and many, by turns and by runs, keys in pages, a unified maximum, pairs of heads
SPREAD = (
    "dec_fp16_d128_causal_r8n64",
    "dec_bf16_d64_causal_r16n128",
    "dec_fp16_d96_full_r24n64_c20",
    "dec_bf16_d192v128_causal_r8n64_c4",
    "dec_fp16_d128v192_full_r8n128_s3",
    "dec_bf16_d256_full_r32n64",
    "dec_fp16_d64_causal_r8n128_paged_c3",
    "dec_bf16_d128_full_r16n64_paged_c5_streamk",
    "dec_fp16_d40v24_causal_r8n64_c3_b3",
    "dec_fp16_d96_causal_r8n64_h2_c3",
    "dec_bf16_d160_causal_r8n64_h2_c5_streamk",
    "dec_fp16_d64_causal_r8n64_c3_fixed",
    "dec_bf16_d96_causal_r8n64_c5_streamk",
    "dec_fp16_d128_causal_r64n64",
)
