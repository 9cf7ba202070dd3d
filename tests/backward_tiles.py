"""Tiles of the backward pass by a kernel's own text, in a program that a CPU runs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fagen.kinds.backward.plan import Plan
from fagen.render import render
from tests import programs
from tests.programs import cut

NOTHING: Mapping[str, int] = MappingProxyType({})
HEAD = """\
struct {{ int x; }} blockIdx;
constexpr int kBlockM = {block_m}, kBlockN = {block_n}, kCluster = {cluster};
{tile_and_divisor}
struct Params {{
  int seqlen_q, seqlen_k, heads, kv_heads, group, shares, share_heads, m_blocks, n_blocks, sections;
  int cut, cut_keys, kept_keys, flat_shares, first_paired, first_mixed, tail_blocks;
  int {numbers};
  FastDivisor section_tiles, section_heads, last_section_heads, batch_shares, shares_divisor, paired_heads;
}};
using Lengths = Params;
{tiles}
"""  # noqa: E501


def compiled(plan: Plan, main: str, folder: Path, given: Mapping[str, int] = NOTHING) -> Path:
    """The program `main` under what it calls: Params, FastDivisor, Tile, tile_of(params, index).

    A mask is `given` these numbers.
    """
    text = render(plan).kernel
    head = HEAD.format(
        block_m=plan.block_m,
        block_n=plan.block_n,
        cluster=plan.cluster,
        numbers=", ".join(f"{name} = {x}" for name, x in (given or {"none": 0}).items()),
        tile_and_divisor=cut(text, "template <class Integer>", "// Rows (batch,"),
        tiles=cut(text, "struct Keys {", "__device__ __forceinline__ const Lengths& lengths_of"),
    )
    return programs.compiled(head + main, folder)
