"""The order of the backward pass' causal tiles, by the kernel's own code: all end together."""

import random
import re
from pathlib import Path

import pytest

from fagen.kinds.backward import cost
from fagen.kinds.backward.plan import Plan
from fagen.render import render
from tests import backward_tiles
from tests.backward_helpers import planned
from tests.programs import answers, cut
from tests.test_order import shapes

# Thread blocks begin in the order of their numbers, each on whichever SM comes free (a
# pair of them on two); beside that the same tiles, those that take longest first. What a tile waits
# for others within its steps, and the kernels before and after, are left out of both.
DEALT = """\
#include "makespan.h"
constexpr int kHeadDim = {head_dim}, kHeadDimV = {head_dim_v};
constexpr int kHeadDimPadded = {head_dim_padded}, kHeadDimVPadded = {head_dim_v_padded};
constexpr int kLine = {line_bytes};
constexpr int64_t kL2Share = {l2_share_bytes};
using Element = char[{element_bytes}];
struct FagenBackwardArgs {{
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
}};
{key_block}
{shares}
int main() {{
  for (FagenBackwardArgs a; std::scanf("%d %d %d %d %d", &a.batch, &a.heads, &a.kv_heads, &a.seqlen_q, &a.seqlen_k) == 5;) {{
    Params params;
    params.seqlen_q = a.seqlen_q, params.seqlen_k = a.seqlen_k, params.kv_heads = a.kv_heads, params.group = a.heads / a.kv_heads;
{sizes}
{dealing}
    constexpr int machines = {sms} / kCluster;
    std::vector<double> clocks;
    std::vector<int> dealt(a.batch * a.heads), before(a.batch * a.heads);  // of each head, its blocks of keys so far, of rows before the cut too
    bool rising = true;
    for (int64_t tile_index = 0; tile_index < tiles; ++tile_index) {{
      blockIdx.x = tile_index * kCluster;
      const Tile tile = tile_of(params, tile_index);
      std::vector<int>& own = tile.share < shares ? dealt : before;
      for (int head = tile.first_head; head < tile.last_head; ++head) {{
        rising &= tile.first_key == own[tile.batch * a.heads + head]++ * kCluster * kBlockN;
      }}
      clocks.push_back((tile.last_head - tile.first_head) * (tile.last - tile.first) * {step} + {tile});
    }}
    for (int head = 0; head < a.batch * a.heads; ++head) {{
      rising &= dealt[head] == n_blocks && before[head] == cut_blocks;
    }}
    const double taken = makespan(clocks, machines);
    std::sort(clocks.rbegin(), clocks.rend());
    std::printf("%d %d %.4f\\n", rising, tiles > machines, taken / makespan(clocks, machines));
  }}
}}
"""  # noqa: E501

SLUGS = (
    "bwd_fp16_d64_causal_m128n128",
    "bwd_bf16_d96_causal_m64n128",
    "bwd_fp16_d128_causal_m64n128",
    "bwd_bf16_d128_causal_m80n128_underdp",
    "bwd_bf16_d192_causal_m64n64_intra",
    "bwd_fp16_d256_causal_m64n64_dss1_intra_c2",
)
SHAPES = 600  # of each schedule
# Of these shapes 95 % are within 5.3 %; of 2,000 that were tried once 99 % were within 7.6 %, and
# the worst were 19 % longer. Without what keeps tiles together that read the same it would be less,
# and the L2 cache would hold less of what they read.
MOST, WORST = 1.055, 1.2


def program(plan: Plan, folder: Path) -> Path:
    """The dealing of a Plan's tiles: sizes in, a verdict on each out."""
    text = render(plan).kernel
    host = text[text.index("// ---- The host's side") :]
    main = DEALT.format(
        **{
            name: getattr(plan, name)
            for name in (
                *("head_dim", "head_dim_v", "head_dim_padded", "head_dim_v_padded"),
                *("line_bytes", "l2_share_bytes", "sms"),
            )
        },
        element_bytes=plan.dtype.bytes,
        key_block=cut(text, "struct alignas(kLine) KeyBlock", "};") + "};",
        shares=cut(host, "constexpr int kMultiprocessors", "// What parts of dK and dV take"),
        sizes=re.sub(
            r"\n  (if \(m_blocks[^}]*}|params\.key_blocks[^;]*;)",
            "",
            cut(host, "  const int tile_blocks", "  // Tiles come in sections"),
        ),
        dealing=cut(host, "  const int64_t flat_heads", "  const int grid ="),
        step=cost.step(plan.schedule.values()).clocks,
        tile=cost.tile(plan.schedule.values()),
    )
    return backward_tiles.compiled(plan, main, folder)


@pytest.mark.parametrize("slug", SLUGS)
def test_most_causal_tiles_end_nearly_as_soon_as_longest_first_and_all_within_a_quarter(
    slug: str, tmp_path: Path
) -> None:
    """A tile takes its steps, of all heads of its share, and what it takes to begin and end one."""
    dice = random.Random(slug)
    cases = [shapes(dice) for _ in range(SHAPES)]
    lines = answers(program(planned(slug), tmp_path), cases)
    ratios = []
    for sizes, line in zip(cases, lines, strict=True):
        rising, queue, ratio = line.split()
        # each once, and behind those of fewer keys, which have to be there before it
        assert rising == "1", sizes
        assert float(ratio) <= WORST, (sizes, ratio)
        if queue == "1":  # else all begin at once
            ratios.append(float(ratio))
    assert len(ratios) > SHAPES // 2
    assert sorted(ratios)[len(ratios) * 95 // 100] <= MOST
