"""Windows in kernels: whose blocks are skipped at both ends, and what nobody sees is not loaded."""

import ctypes
import re
from typing import Any

import pytest
import torch

from fagen import registry, simulator
from fagen.dispatch.select import serve
from fagen.problem import Problem, Sizes
from fagen.render import render
from fagen.runtime.c_interface import library_at
from fagen.vocab import SIXTEEN_BITS
from tests.mask_helpers import (
    LENGTHS,
    SEES,
    call_of,
    check,
    check_varlen,
    simulated,
    varlen_call,
    windows,
)
from tests.test_simulator import with_lanes_together

# by whether a warpgroup skips a tile's first blocks too: three and four with a stage for each, Q
# beside the blocks or ahead of them, which may be all of a tile's and more; or
# two, in turns; with none to skip; of several heads a tile; in turns with more than one to skip
SKIPPING = {
    "fwd_fp16_d16_window_m192n64_s3_nointer": True,
    "fwd_fp16_d16_window_m256n64_s4_nointer": True,
    "fwd_fp16_d16_window_m256n64_s4_q2_nointer": True,
    "fwd_fp16_d16_window_m256n64_s8_q2_nointer": True,
    "fwd_fp16_d16_window_m128n64": True,
    "fwd_fp16_d16_window_m128n128": False,
    "fwd_fp16_d16_window_m192n64_packgqa_s3_nointer": False,
    "fwd_fp16_d16_window_m256n64_s4_q2": False,
    "fwd_fp16_d16_chunked_m192n64_s3_nointer": False,
}


@pytest.mark.parametrize("slug", SKIPPING)
def test_a_warpgroup_skips_first_blocks_where_it_may_wait_for_what_comes_after(slug: str) -> None:
    assert registry.plan_of(slug).pipeline.skips_first_blocks is SKIPPING[slug]


@pytest.mark.parametrize("slug", [slug for slug, skips in SKIPPING.items() if skips])
def test_windows_are_right_where_warpgroups_skip_blocks_at_both_ends(slug: str) -> None:
    """Several tiles for a thread block; rows that see no key, and rows past the end."""
    m, n = registry.plan_of(slug).block_m, registry.plan_of(slug).block_n
    kernel = with_lanes_together(render(registry.plan_of(slug)).kernel)
    for seed, sizes in enumerate(((1, 3, 1, 2 * m + 70, 2 * m + 70), (1, 2, 2, 3 * m + 5, m + 40))):
        for given in (*list(windows(n, sizes[4]))[::3], {"window_left": 150, "window_right": 70}):
            plan, call, exact = call_of(slug, sizes, given, seed)
            check(plan, simulated(plan, call, kernel, seed), exact)


# ---- loads --------------------------------------------------------------------------------------

COUNT = "fagen_counted_loads"
LOADS = r"(void load_[kv]\(const (?:Tile|Unit)& \w+, int \w+\) \{)"


def counting(kernel: str) -> str:
    """A kernel's text that counts the blocks of K and of V that it loads."""
    text, places = re.subn(LOADS, rf"\1 ++{COUNT};", kernel)
    assert places == 2
    return re.sub(
        r"^(namespace \w+_kernel \{)",
        rf'extern "C" {{ int {COUNT} = 0; }}\n\1',
        text,
        count=1,
        flags=re.M,
    )


def loaded(kernel: str) -> int:
    """How many there were since this was asked last."""
    count = ctypes.c_int.in_dll(library_at(simulator.build(kernel)), COUNT)
    number, count.value = count.value, 0
    return number


def touched(seen: torch.Tensor, rows: int, n: int, aligned: bool = True) -> int:
    """How many blocks of n keys tiles of so many rows see: (queries, keys) of one head."""
    blocks = 0
    for tile in seen.split(rows):
        keys = tile.any(0).nonzero().flatten()
        if len(keys):
            first, last = int(keys[0]), int(keys[-1])
            blocks += last // n - first // n + 1 if aligned else (last - first) // n + 1
    return blocks


def visible(queries: int, keys: int, given: dict[str, Any]) -> torch.Tensor:
    """Whether a query (rows) sees a key (columns)."""
    sees = SEES["window"]
    pairs = [[sees(0, i, queries, j, keys, **given) for j in range(keys)] for i in range(queries)]
    return torch.tensor(pairs, dtype=torch.bool).view(queries, keys)


NARROW = ({"window_left": 40, "window_right": 0}, {"window_left": 9, "window_right": 70})


@pytest.mark.parametrize("given", NARROW, ids=str)
@pytest.mark.parametrize(
    "slug", ["fwd_fp16_d16_window_m128n64_nointer", "fwd_fp16_d16_window_m128n128"]
)
def test_no_block_is_loaded_that_no_row_of_a_tile_sees(slug: str, given: dict[str, int]) -> None:
    sizes = (2, 2, 1, 300, 900)
    plan, call, exact = call_of(slug, sizes, given)
    kernel = counting(with_lanes_together(render(plan).kernel))
    check(plan, simulated(plan, call, kernel), exact)
    blocks = touched(visible(300, 900, given), plan.block_m, plan.block_n)
    assert loaded(kernel) == 2 * 4 * blocks


@pytest.mark.parametrize("given", NARROW, ids=str)
def test_nor_in_varlen_sequences(given: dict[str, int]) -> None:
    plan, call, exact = varlen_call("fwd_fp16_d64_window_m64n16_varlen", given)
    kernel = counting(with_lanes_together(render(plan).kernel))
    check_varlen(plan, simulated(plan, call, kernel), exact)
    blocks = sum(touched(visible(*pair, given), plan.block_m, plan.block_n) for pair in LENGTHS)
    assert loaded(kernel) == 2 * call["q"].shape[1] * blocks


@pytest.mark.parametrize("queries, left", [(1, 700), (3, 700), (2, 40)])
def test_nor_in_decoding_whose_splits_are_of_what_is_seen(queries: int, left: int) -> None:
    slug, given, keys = "dec_fp16_d16_window_r8n64", {"window_left": left, "window_right": 0}, 3000
    plan, call, exact = call_of(slug, (2, 2, 1, queries, keys), given)
    kernel = counting(render(plan).kernel)
    check(plan, simulated(plan, call, kernel), exact)
    seen = visible(queries, keys, given)
    assert loaded(kernel) == 2 * 2 * touched(seen, queries, plan.block_n, aligned=False)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_calls_of_few_rows_have_smaller_tiles(dtype: str) -> None:
    """Up to a round of tiles of 128 rows; with sinks as without."""
    for dim, few, many in ((128, "m128n128", "m192n64"), (64, "m128n128", "m256n64")):
        for sink in ("", "bf16"):
            problem = Problem(dtype, dim, dim, "window", dtype, "", 0, sink=sink)
            for length, tile in ((2_112, few), (2_113, many), (16_384, many)):
                served = serve(problem, Sizes(1, 8, 8, length, length), "NVIDIA H100 80GB HBM3")
                assert served.schedule.slug.split("_")[4] == tile
                assert served.schedule.values()["sink"] == sink
