"""Varlen sequences under a causal mask: the order of tiles where L2 does not hold K and V."""

import pytest

from fagen import simulator
from fagen.measure.sequences import Case
from fagen.render import render
from tests.often import some
from tests.varlen_helpers import is_right, planned

SLUGS = (
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_fp16_d64_causal_m128n64_varlen",  # in ping-pong, which skips blocks that are masked
    "fwd_bf16_d64_causal_m256n64_varlen_s4_q2_nointer",
)
SMALL = SLUGS[0]
# Four SMs are simulated: of five KV heads the last two fill up, and of many the last.
FEW = ((530, 530), (9, 0), (129, 129))
MANY = ((530, 530), (9, 0), (200, 331), (3, 3), (70, 9), (1, 400), (129, 129))
CASES = (
    Case(FEW, 5, 5),
    Case(FEW, 15, 5, gap=1),
    Case(MANY, 5, 5, poisoned=True),
    Case(MANY * 5, 4, 4),  # more than a warp has lanes
    Case(((530, 530),), 4, 1),  # all heads are the last ones
    Case(((5, 0), (0, 5), (90, 0)), 6, 3),
)


def kernel_of(slug: str) -> str:
    """The text of a kernel to which the L2 cache is small."""
    text = render(planned(slug)).kernel
    large = f"kL2Bytes = {planned(slug).l2_bytes};"
    assert large in text
    return text.replace(large, "kL2Bytes = 0;")


@pytest.mark.parametrize("slug", some(SLUGS, [SMALL]))
def test_first_heads_one_by_one_and_last_ones_by_length_are_all_there_are(slug: str) -> None:
    library = simulator.build(kernel_of(slug))
    assert all(is_right(slug, library, case, seed) for seed, case in enumerate(CASES))


def test_where_the_cache_holds_k_and_v_and_in_e4m3_classes_alone_count() -> None:
    full, eight = (
        planned(slug)
        for slug in ("fwd_fp16_d64_full_m64n64_varlen", "fwd_e4m3_d64_causal_m64n64_varlen")
    )
    assert not full.head_major and not eight.head_major
    assert "kL2Bytes" not in render(full).kernel + render(eight).kernel
