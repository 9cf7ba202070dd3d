"""Whom tiles go to, by the kernel's own code: each once that sees a key, and all end together."""

import random
from pathlib import Path

import pytest

from fagen.arch import SM90
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import Plan
from fagen.registry import plan_of
from fagen.render import render
from tests.programs import answers, compiled, cut

# Blocks that take the next tile when they come free, and beside it tiles of falling length, the
# best that a greedy order can do. A tile costs its blocks of keys and what it takes to begin and
# end one.
PROGRAM = """\
#include "makespan.h"
#define alignas(n)
using Element = char[{element_bytes}];
{numbers}
{divisor}
struct Params {{
  FastDivisor heads, heads_per_kv_head;
  int seqlen_q, seqlen_k, m_blocks, m_end, tiles, slots, sections;
  bool has_empty_tiles;
  FastDivisor section_slots, section_heads, last_section_heads;
  uint32_t* tiles_drawn;
}};
struct Args {{
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
  void* workspace;
}};
{tiles}
{seen}
int main() {{
  Args a{{}};
  while (std::scanf("%d %d %d %d %d", &a.batch, &a.heads, &a.kv_heads, &a.seqlen_q, &a.seqlen_k) == 5) {{
    const int m_blocks = ceil_div(a.seqlen_q, kBlockM), SMs = {sms};
    const int64_t tiles = int64_t(m_blocks) * a.heads * a.batch;
    const int grid = std::min<int64_t>(tiles, SMs);
    Params params;
    params.heads = FastDivisor(a.heads);
    params.heads_per_kv_head = FastDivisor(a.heads / a.kv_heads);
    params.seqlen_q = a.seqlen_q;
    params.seqlen_k = a.seqlen_k;
    params.m_blocks = m_blocks;
{dealing}
    std::set<std::tuple<int, int, int>> seen;
    std::vector<double> costs;
    for (int index = 0; index < params.slots; ++index) {{
      const Tile tile = tile_at(params, index);
      seen.insert({{tile.batch, tile.head, tile.first_row}});
      const int end = std::min(tile.first_row + kBlockM + a.seqlen_k - a.seqlen_q, a.seqlen_k);
      costs.push_back(ceil_div(end, kBlockN) + 1.5);
    }}
    const double taken = makespan(costs, grid);
    std::sort(costs.rbegin(), costs.rend());
    const double greedy = makespan(costs, grid);
    int64_t wanted = 0;
    for (int m = 0; m < m_blocks; ++m) wanted += (m + 1) * kBlockM + a.seqlen_k - a.seqlen_q > 0 ? a.heads * a.batch : 0;
    const bool once = int64_t(seen.size()) == wanted && int64_t(costs.size()) == wanted;
    std::printf("%d %.4f\\n", once, taken / greedy);
  }}
}}
"""  # noqa: E501

SLUGS = (
    "fwd_fp16_d64_causal_m256n64_s4_q2_nointer",
    "fwd_fp16_d64_causal_m192n128_q2",
    "fwd_fp16_d128_causal_m128n128",
    "fwd_fp16_d256_causal_m128n64_half",
    "fwd_e4m3_d256_causal_m128n128_vr1_half_nointra_vrows_pm1_pc64_spill48",
)
SHAPES = 600  # of each schedule


def program(plan: Plan, folder: Path) -> Path:
    """The dealing of tiles of a Plan's kernel: sizes in, a verdict on each out."""
    kernel = render(plan).kernel
    numbers = [line for line in kernel.splitlines() if line.startswith("constexpr int")]
    expected = ("kHeadDim ", "kHeadDimV ", "kBlockM ", "kBlockN ", "kL2Share ", "kSectionRounds ")
    code = PROGRAM.format(
        element_bytes=plan.dtype.bytes,
        numbers="\n".join(line for line in numbers if any(word in line for word in expected)),
        divisor=cut(kernel, "template <class Integer>", "struct Blocks {"),
        tiles=cut(kernel, "struct Blocks {", "struct ScaleTensor")
        if plan.descales
        else cut(kernel, "struct Blocks {", "struct SharedStorage"),
        seen=cut(kernel, "using Lengths", "// The tiles that the producer draws"),
        dealing=cut(kernel, "// Whether no row of a tile sees a key", "const Tensor q{"),
        sms=SM90.sm_count,
    )
    return compiled(code, folder)


def shapes(dice: random.Random) -> tuple[int, int, int, int, int]:
    """Sizes of a call that nobody picked: few and many heads, short and long, of any grouping."""
    seqlen = int(2 ** dice.uniform(5, 15))
    kv_heads = dice.choice([1, 2, 3, 4, 5, 8])
    heads = kv_heads * dice.choice([1, 1, 2, 4, 7, 8])
    batch = max(1, int(2 ** dice.uniform(11, 16) / seqlen))
    keys = seqlen if dice.random() < 0.7 else max(1, int(seqlen * dice.uniform(0.2, 4)))
    return batch, heads, kv_heads, seqlen, keys


@pytest.mark.parametrize("slug", SLUGS)
def test_every_tile_goes_to_somebody_once_and_all_end_together(slug: str, tmp_path: Path) -> None:
    dice = random.Random(0)
    cases = [shapes(dice) for _ in range(SHAPES)]
    lines = answers(program(plan_of(slug), tmp_path), cases)
    ratios = []
    for sizes, line in zip(cases, lines, strict=True):
        once, ratio = line.split()
        assert once == "1", sizes
        assert float(ratio) <= 1.06, (sizes, ratio)
        ratios.append(float(ratio))
    assert sorted(ratios)[SHAPES * 97 // 100] <= 1.03


def test_who_draws_tiles_needs_a_producer_warp_and_no_partner() -> None:
    plain = {"head_dim": 128, "dtype": "fp16", "mask": "causal", "block_m": 128, "block_n": 64}
    assert Schedule.make(**plain).grid.order == "dynamic"
    assert Schedule.make(**plain, producer="none").grid.order == "lpt"
    assert Schedule.make(**plain, cluster=2, stages=2).grid.order == "lpt"
    assert Schedule.make(**{**plain, "mask": "full"}).grid.order == "persistent"


def test_the_counter_is_the_callers_and_stays_as_it_was() -> None:
    drawing = plan_of("fwd_fp16_d128_causal_m128n128").launches
    assert drawing.zeroed and drawing.workspace.at({}) == 4
    assert not plan_of("fwd_fp16_d128_full_m128n128").launches.needs_workspace
