"""Tiles of the backward pass by a kernel's own text, in a program that a CPU runs."""

from pathlib import Path

from fagen.kinds.backward.plan import Plan
from fagen.render import render
from tests import programs
from tests.programs import cut

HEAD = """\
struct {{ int x; }} blockIdx;
constexpr int kBlockM = {block_m}, kBlockN = {block_n}, kCluster = {cluster};
{tile_and_divisor}
struct Params {{
  int seqlen_q, seqlen_k, heads, kv_heads, group, shares, share_heads, m_blocks, n_blocks, sections;
  int cut, cut_keys, kept_keys, flat_shares, first_paired, first_mixed;
  FastDivisor section_tiles, section_heads, last_section_heads, batch_shares, shares_divisor, paired_heads;
}};
using Lengths = Params;
{tiles}
"""  # noqa: E501


def compiled(plan: Plan, main: str, folder: Path) -> Path:
    """The program `main` under what it calls: Params, FastDivisor, Tile, tile_of(params, index)."""
    text = render(plan).kernel
    head = HEAD.format(
        block_m=plan.block_m,
        block_n=plan.block_n,
        cluster=plan.cluster,
        tile_and_divisor=cut(text, "template <class Integer>", "// Rows (batch,"),
        tiles=cut(text, "struct Keys {", "__device__ __forceinline__ const Lengths& lengths_of"),
    )
    return programs.compiled(head + main, folder)
