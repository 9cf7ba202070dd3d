"""Tiles of the backward pass by a kernel's own text, in a program that a CPU runs."""

from pathlib import Path

from fagen.kinds.backward.plan import Plan
from fagen.process import run
from fagen.render import render
from fagen.toolchain import find_gxx

HEAD = """\
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>
#define __host__
#define __device__
#define __forceinline__ inline
using std::max, std::min;
struct {{ int x; }} blockIdx;
constexpr int kBlockM = {block_m}, kBlockN = {block_n}, kCluster = {cluster};
inline uint32_t __umulhi(uint32_t a, uint32_t b) {{ return uint64_t(a) * b >> 32; }}
inline int cluster_rank() {{ return blockIdx.x % kCluster; }}
{divisor}
struct Params {{
  int seqlen_q, seqlen_k, heads, kv_heads, group, shares, share_heads, m_blocks, n_blocks, sections;
  FastDivisor section_tiles, section_heads, last_section_heads, batch_shares, shares_divisor;
}};
{tiles}
"""


def cut(text: str, begin: str, end: str) -> str:
    """From where one begins up to where the other does, after it."""
    return text[(at := text.index(begin)) : text.index(end, at)]


def compiled(plan: Plan, main: str, folder: Path) -> Path:
    """The program `main` under what it calls: Params, FastDivisor, Tile, tile_of(params)."""
    text = render(plan).kernel
    head = HEAD.format(
        block_m=plan.block_m,
        block_n=plan.block_n,
        cluster=plan.cluster,
        divisor=cut(text, "template <class Integer>", "// Rows (batch,"),
        tiles=cut(text, "struct Keys {", "// ---- Rows"),
    )
    (folder / "tiles.cpp").write_text(head + main)
    flags = ("-std=c++17", "-O2", "-I", str(Path(__file__).parent))
    made = run([find_gxx()[0], *flags, "tiles.cpp", "-o", "tiles"], cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder / "tiles"
