"""The kernels of the backward pass: parts of their own text, run on a CPU, and their compiler."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen import flow, registry, simulator
from fagen.build import build
from fagen.expr import words
from fagen.expr.parse import read
from fagen.kinds.backward.defaults import derived
from fagen.kinds.backward.formulae import statistics_bytes
from fagen.kinds.backward.parts.launcher import cuts_rows
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.verify import case
from fagen.masking import named
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.render import render
from fagen.runtime.c_interface import described
from fagen.toolchain import find_disassembler
from fagen.vocab import MASKS, PLAIN_MASKS
from tests.backward_helpers import SPREAD, masked, planned
from tests.backward_tiles import compiled
from tests.often import some
from tests.programs import cut
from tests.test_masks import FUTURE, LENGTHS, WINDOW, seen

# ---- tiles --------------------------------------------------------------------------------------

TILES = """\
int main() {{
  Params params;
  for (int batch, section, cut; std::scanf("%d %d %d %d %d %d %d %d", &params.seqlen_q, &params.seqlen_k, &batch, &params.kv_heads,
                                           &params.group, &params.share_heads, &section, &cut) == 8;) {{
    struct {{ int batch, kv_heads, seqlen_q, seqlen_k; }} a{{batch, params.kv_heads, params.seqlen_q, params.seqlen_k}};
    const int shares = ceil_div(params.group, params.share_heads), heads = batch * params.kv_heads * shares, tile_blocks = kCluster;
    params.m_blocks = ceil_div(params.seqlen_q, kBlockM);
    params.n_blocks = ceil_div(params.seqlen_k, kBlockN);
    params.sections = ceil_div(heads, section);
    params.section_heads = FastDivisor(section);
    params.section_tiles = FastDivisor(section * params.n_blocks);
    params.last_section_heads = FastDivisor(heads - (params.sections - 1) * section);
    params.batch_shares = FastDivisor(params.kv_heads * shares);
    params.shares_divisor = FastDivisor(shares);
    const int64_t flat_heads = heads;
    const int n_blocks = params.n_blocks;
    params.cut = cut;
    struct {{ int cut; }} deal{{cut}};
{cutting}
    for (blockIdx.x = 0; blockIdx.x < tiles; ++blockIdx.x) {{
      const Tile tile = tile_of(params, blockIdx.x);
      for (int head = tile.first_head; head < tile.last_head; ++head)
        std::printf("%d %d %d %d %d %d %d %d\\n", tile.share >= shares, tile.batch, head, tile.first_key, tile.first, tile.full_first,
                    {full_last}, tile.last);
    }}
  }}
}}
"""  # noqa: E501


OPEN = {"window_left": words.OPEN, "window_right": words.OPEN}
GIVEN: tuple[tuple[str, dict[str, int]], ...] = (
    ("window", {"window_left": 0, "window_right": 0}),
    ("window", {"window_left": 99, "window_right": 0}),
    ("window", {"window_left": 64, "window_right": 127}),
    ("window", OPEN | {"window_left": 5}),
    ("window", OPEN | {"window_right": 70}),
    ("window", OPEN),
    ("chunked", {"chunk": 1}),
    ("chunked", {"chunk": 64}),
    ("chunked", {"chunk": 100}),
    ("k_idx <= 2 * q_pos", {}),
    ("k_idx // 32 <= q_pos // 32 and q_pos - k_idx < 200", {}),
)
TILED = [(mask, {}) for mask in (*PLAIN_MASKS.values(), WINDOW, FUTURE)]
TILED += [
    (MASKS[name if name in MASKS else named(read("mask", name))], dict(given))
    for name, given in GIVEN
]


@pytest.mark.parametrize(
    ("mask", "given"),
    TILED,
    ids=lambda x: ".".join(map(str, x.values())) if isinstance(x, dict) else x.name,
)
def test_tiles_of_the_kernels_own_code_hold_every_key_that_a_row_sees_once(mask, given, tmp_path):
    plan, mask = masked("bwd_fp16_d128_causal_m64n128", mask), mask.bound(given)
    full_last = "tile.full_last" if mask.first_by_row else "tile.last"
    text = render(plan).kernel
    cutting = cut(text, "  const int cut_blocks", "  if (m_blocks == 0")
    cutting += cut(text, "  params.cut_keys =", "  const int grid =")
    program = compiled(plan, TILES.format(full_last=full_last, cutting=cutting), tmp_path, given)
    # group, heads of a share, blocks of rows before the cut
    grouped = itertools.cycle(
        [(1, 1, 0), (4, 4, 1), (4, 2, 2), (5, 2, 0), (3, 1, 3), (2, 2, 5), (4, 1, 0)]
    )
    sizes = [sizes for sizes in LENGTHS if sizes[1]]
    for (seqlen_q, seqlen_k), (group, share, cut_rows) in zip(sizes, grouped, strict=False):
        most = -(-seqlen_q // plan.block_m) - 1
        cut_rows = max(0, min(cut_rows, most)) if cuts_rows(plan.mask) else 0
        arguments = f"{seqlen_q} {seqlen_k} 3 2 {group} {share} 4 {cut_rows}\n"
        output = run([program], input=arguments).stdout
        tiles = [tuple(map(int, line.split())) for line in output.splitlines()]
        blocks = range(0, seqlen_k, plan.block_n)
        expected = {(b, h, key) for b in range(3) for h in range(2 * group) for key in blocks}
        after, before = ([tile[1:4] for tile in tiles if tile[0] == part] for part in (0, 1))
        assert len(after) == len(expected) and {*after} == expected
        assert len(before) == len({*before}) and {*before} <= expected
        for part in (
            after,
            before,
        ):  # a tile waits for those of earlier keys, which begin before it
            of_heads: dict[tuple[int, int], list[int]] = {}
            for batch, head, key in part:
                of_heads.setdefault((batch, head), []).append(key)
            assert all(keys == sorted(keys) for keys in of_heads.values())
        whole = seen(mask, seqlen_q, seqlen_k)
        for is_before, *_, first_key, first, full_first, full_last, last in tiles:
            keys = whole[:, first_key : first_key + plan.block_n]
            outside = keys.clone()
            outside[first * plan.block_m : last * plan.block_m] = False
            cut_at = cut_rows * plan.block_m  # the other tile of these keys has the rest
            assert first * plan.block_m >= cut_at or is_before or first == last
            own = outside[:cut_at] if is_before else outside[cut_at:]
            assert not own.any(), "a row that sees a key is in no block"
            if not is_before and outside.any():
                assert first_key in {key for *_, key in before}, "rows before the cut have no tile"
            masked_to, full_to = max(first, min(full_first, last)), min(full_last, last)
            full = keys[masked_to * plan.block_m : max(masked_to, full_to) * plan.block_m]
            assert full.all()
            if full.numel():
                assert keys.shape[1] == plan.block_n, "keys beyond the last are not masked"
        heaviest = [last - first for *_, first, _, _, last in tiles[:2]]
        if mask.name == "causal" and not cut_rows:  # those that most rows see come first
            assert min(heaviest) == max(last - first for *_, first, _, _, last in tiles)


# ---- rows, before and after ---------------------------------------------------------------------


def accumulators(plan: Plan, dq: Tensor) -> Tensor:
    """A block's dq (block_m, columns), in the order in which the threads of wgmma hold it.

    PTX ISA, wgmma.m64nN: a warp has 16 rows; register 4 i + j of lane 4 g + q is row g + j / 2 · 8,
    column 8 i + 2 q + j % 2.
    """
    width = 64 if plan.dq_transposed else plan.dq_columns
    height = plan.dq_columns if plan.dq_transposed else 64
    parts = dq.split(width, dim=1) if plan.dq_column_step else dq.split(height)
    parts = tuple(part.T for part in parts) if plan.dq_transposed else parts
    return torch.cat(
        [
            part.reshape(4, 2, 8, part.shape[1] // 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(-1)
            for part in parts
        ]
    )


@pytest.mark.parametrize("slug", some(SPREAD, (SPREAD[0], SPREAD[6], *SPREAD[14:16])))
def test_rows_are_prepared_and_the_sums_of_dq_rounded(slug):
    """By what a call leaves in the workspace, on the simulated GPU."""
    plan = planned(slug)
    library = simulator.build(render(plan).kernel)
    batch, heads, seqlen, m = 2, 3, plan.block_m + 9, plan.block_m
    sizes = Sizes(batch, heads, heads, seqlen, seqlen // 2)  # causal: rows that see no key
    for seed in (0, 1):  # without a gradient of the LSE, and with one
        arguments, *_ = case(plan, sizes, seed=seed, device="cpu")
        named = dict(zip((x.name for x in plan.signature.arguments), arguments, strict=True))
        lse, dout, scale = named["lse"], named["dout"], named["scale"]
        # nobody has to have written the out of a row that sees no key
        blind = (lse == -math.inf).transpose(1, 2)[..., None]
        named["out"] = out = named["out"].masked_fill(blind, math.nan)
        named |= {f"d{name}": torch.full_like(named[name], math.nan) for name in "qkv"}
        room = plan.launches.workspace.at(vars(sizes))
        workspace = torch.full((room,), 0xFF, dtype=torch.uint8)
        described(plan, library, named, workspace=workspace)(None)
        records = workspace[: 2 * batch * heads * plan.record_bytes].view(torch.float32)
        records = records.view(batch, heads, 2, plan.record_bytes // 4)
        begin = m * plan.head_dim_padded
        end = begin + statistics_bytes(plan.schedule.values()) // 4
        found_lse, deltas = numbers_of_rows(plan, records[..., begin:end])
        nothing = -(2.0**127)
        expected = (lse / -scale).masked_fill(lse == -math.inf, nothing)
        torch.testing.assert_close(found_lse[..., :seqlen], expected, rtol=3e-7, atol=0)
        assert torch.all(found_lse[..., seqlen:] == nothing), "rows beyond the last have weight"

        delta = torch.einsum("bshd,bshd->bhs", out.float(), dout.float())
        delta -= 0 if named["dlse"] is None else named["dlse"]
        delta = delta.masked_fill(lse == -math.inf, 0)
        torch.testing.assert_close(deltas[..., :seqlen], -delta, rtol=1e-5, atol=1e-5)
        assert torch.all(deltas[..., seqlen:] == 0)

        dq = named["dq"].transpose(1, 2).float()
        padded = torch.zeros(batch, heads, 2 * m, plan.head_dim_padded)
        padded[:, :, :seqlen, : plan.head_dim] = dq
        blocks = [accumulators(plan, block) for block in padded.view(-1, m, padded.shape[3])]
        kept = torch.stack(blocks).view(batch, heads, 2, -1) != 0  # elsewhere sums may be anything
        rounded = (records[..., :begin] * scale).to(out.dtype).float()
        assert torch.equal(rounded[kept], torch.stack(blocks).view(rounded.shape)[kept])


def numbers_of_rows(plan: Plan, numbers: Tensor) -> Iterator[Tensor]:
    """LSEs and deltas of a record (batch, heads, blocks, ...), in the order of the rows.

    To be multiplied they are core matrices of eight rows by eight bf16, of one number and of the
    other by turns, and each number is a sum. Where ones lie in shared memory both numbers of a row
    are in the same eight, of three each.
    """
    if plan.ones_in_shared_memory:
        parts = numbers.contiguous().view(torch.bfloat16).unflatten(-1, (-1, 8)).double()
        assert torch.all(parts[..., 6:] == 0)
        for begin in (0, 3):
            yield parts[..., begin : begin + 3].sum(-1).flatten(2).float()
    else:
        parts = numbers.contiguous().view(torch.bfloat16).unflatten(-1, (-1, 2, 8, 8)).double()
        for part in parts.sum(-1).unbind(-2):
            yield part.flatten(2).float()


# ---- their compiler -----------------------------------------------------------------------------


# head dims, of V too, for which a schedule is derived
UNTUNED = [*((d, d) for d in range(72, 225, 8) if d != 128), (192, 128)]


@pytest.mark.long
@pytest.mark.parametrize("mask", list(PLAIN_MASKS))
@pytest.mark.parametrize("head_dims", UNTUNED, ids=str)
def test_the_first_that_is_derived_compiles_so_that_it_serves(head_dims, mask):
    first, *_ = derived(Problem("fp16", *head_dims, mask, kind="backward"))
    _, binary = flow.built(first, binding=False)
    assert binary.report.spill_store_bytes == 0 and not binary.report.remarks


def test_exponentials_stand_before_the_wait_for_dp_where_they_are_to_run_under_it():
    tools = find_disassembler()
    if tools is None:
        pytest.skip("no nvdisasm")
    plan, binary = flow.built(
        registry.from_slug("bwd_fp16_d128_full_m64n128_underdp"), binding=False
    )
    environment = {"PATH": f"{Path(tools.nvdisasm).parent}:{os.environ['PATH']}"}
    listing = run([tools.cuobjdump, "-sass", binary.library], env=environment).stdout
    instructions = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)|(MUFU\.EX2)|(HGMMA)", listing)
    last = ""
    counts: list[Counter[str]] = []
    for wait, exponential, product in instructions:
        if exponential:
            counts[-1][last] += 1
        elif product:
            last = ""
        else:
            last = wait
            counts += [Counter()] if wait == "0x1" else []
    steps = [step for step in counts if step]
    assert len(steps) == 2  # masked and not
    for step in steps:
        assert step.total() == plan.block_m // 2 and step["0x1"] >= plan.block_m // 2 * 3 // 4


@pytest.mark.parametrize(
    "mask",
    [WINDOW, pytest.param(FUTURE, marks=pytest.mark.long)],
    ids=lambda mask: str(mask.name),
)
def test_a_mask_that_no_schedule_has_compiles_and_keeps_the_plans_promises(mask):
    plan = masked("bwd_fp16_d128_causal_m64n128", mask)
    binary = build(render(plan), plan, binding=False)
    assert binary.report.spill_store_bytes == 0 and not binary.report.remarks
