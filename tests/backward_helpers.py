"""Plans of the backward pass."""

from dataclasses import replace

from fagen import registry
from fagen.kinds.backward.parts import choices_of, parts_of
from fagen.kinds.backward.plan import Plan
from fagen.problem import Sizes
from fagen.render import HEADER, header_text
from fagen.vocab import Mask

planned = registry.plan_of

# dtypes and masks; dQ's rows shared or of one's own, by 1 to 3 warpgroups; head dims that are
# padded, and one for V alone; rings of one buffer; dQ by one warpgroup; S ahead; wide heads, parted
# by gradients, with dQ's columns in unequal parts, or in one; additions in order; pairs of
# blocks; dQ transposed, by columns of its own or rows of its own; K in registers, and V;
# exponentials under dP; 64 columns of dQ more for the last warpgroup than for the other; pairs with
# narrow slabs
SPREAD = (
    "bwd_fp16_d128_causal_m64n128",
    "bwd_bf16_d128_full_m64n128",
    "bwd_fp16_d64_full_m128n128",
    "bwd_bf16_d64_causal_m128n128",
    "bwd_fp16_d96_causal_m64n64",
    "bwd_bf16_d120v40_causal_m64n128",
    "bwd_fp16_d24v56_full_m64n128_s1_dos2_dss1",
    "bwd_bf16_d48_causal_m64n192",
    "bwd_bf16_d96_causal_m64n128",
    "bwd_fp16_d256_causal_m64n64",
    "bwd_bf16_d160_full_m64n64_intra",
    "bwd_fp16_d64v192_causal_m64n64_dss1",
    "bwd_fp16_d128_causal_m64n128_det",
    "bwd_bf16_d64_causal_m128n128_det",
    "bwd_bf16_d256_full_m64n64_dss1_c2",
    "bwd_bf16_d128_causal_m80n128",
    "bwd_fp16_d64_causal_m96n128_keepk",
    "bwd_fp16_d128_full_m64n128_underdp",
    "bwd_fp16_d64_causal_m64n64_keepk_spill12",
    "bwd_fp16_d128_causal_m64n128_persist_post",
    "bwd_bf16_d128_full_m64n128_det_persist",
    "bwd_bf16_d48_causal_m64n128_persist",
    "bwd_fp16_d192v128_causal_m48n128_underdp",
    "bwd_bf16_d192v128_causal_m64n64_intra_c2",
)

# Masks that calls give: windows, of which tiles begin one after another, head by head; what begins
# anew, block by block; numbers and tables of a sequence; tables by row; in order, varlen, in pairs,
# drawn
MASKED = (
    "bwd_fp16_d64_window_m64n128",
    "bwd_bf16_d64_window_m64n64_det",
    "bwd_fp16_d64_window_m64n64_varlen",
    "bwd_bf16_d64_window_m64n64_persist_post",
    "bwd_fp16_d256_window_m64n64_dss1_intra_c2",
    "bwd_fp16_d64_chunked_m64n128",
    "bwd_fp16_d64_chunked_m64n64_varlen_det",
    "bwd_fp16_d64_prefix_m64n64",
    "bwd_bf16_d64_causal_by_sequence_m64n64_varlen",
    "bwd_fp16_d64_document_m64n64_det",
    "bwd_bf16_d64_document_m64n64_varlen",
    "bwd_fp16_d192v128_window_m48n128_underdp",
)

# head dims that are not whole slabs, beside those of V's own and all forms above
NARROW = ("bwd_fp16_d72_causal_m64n128", "bwd_bf16_d80_full_m64n128", "bwd_bf16_d80_causal_m64n64")


def extreme_sizes(plan: Plan) -> tuple[Sizes, ...]:
    """One head alone, whose rows take several steps, or see no key, or are few; 3, 6, 8 a group."""
    m, n = plan.block_m, plan.block_n * plan.cluster
    return (
        Sizes(1, 1, 1, 3 * m + 5, 2 * n + 3),
        Sizes(1, 1, 1, 5 * m, n // 2 - 1),
        Sizes(1, 1, 1, 3, 3 * n + 1),
        Sizes(1, 3, 1, m + 1, n + 1),
        Sizes(1, 6, 1, m - 1, n + 9),
        Sizes(2, 8, 1, m + 9, n - 1),
    )


def masked(slug: str, mask: Mask) -> Plan:
    """The Plan of a causal schedule, with any mask."""
    plan = replace(planned(slug), slug=slug.replace("causal", mask.name), mask=mask)
    vars(plan)["parts"] = parts_of(choices_of(plan.schedule.values()) | {"mask": mask})
    return plan


def in_parts(kernel: str) -> str:
    """The text of a kernel, its header in it, whose grids hold two heads and batches at most."""
    header = header_text().replace("kMostGrid = 65535;", "kMostGrid = 2;")
    include = f'#include "{HEADER}"\n'
    assert header != header_text() and kernel.count(include) == 1
    return kernel.replace(include, header)
