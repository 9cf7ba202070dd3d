"""A row of the table of masks is all that a mask needs: of the kernel, of the emulator, of sums."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen.build import build
from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import Plan, plan
from fagen.process import run
from fagen.render import render
from fagen.vocab import MASKS, PLAIN_MASKS, Mask
from tests.often import some
from tests.programs import answers, compiled

REACH = 100  # keys before a query's own that the window holds

WINDOW = Mask(
    "window",
    order="lpt",
    first=f"row + seqlen_k - seqlen_q - {REACH}",
    last="row + seqlen_k - seqlen_q + 1",
    keys=lambda row, seqlen_q, seqlen_k: (
        row + seqlen_k - seqlen_q - REACH,
        row + seqlen_k - seqlen_q + 1,
    ),
    pairs=lambda seqlen_q, seqlen_k: 0.0,
)
# what comes after a query's own key: no end depends on the row but the first
FUTURE = Mask(
    "future",
    order="lpt",
    first="row + seqlen_k - seqlen_q",
    keys=lambda row, seqlen_q, seqlen_k: (row + seqlen_k - seqlen_q, seqlen_k),
    pairs=lambda seqlen_q, seqlen_k: 0.0,
)
ALL = [*PLAIN_MASKS.values(), WINDOW, FUTURE]
LENGTHS = [(1, 1), (64, 64), (130, 300), (300, 130), (257, 0), (1, 500), (200, 200), (500, 1)]


def planned(mask: Mask, slug: str = "fwd_fp16_d64_causal_m128n64_noprod") -> Plan:
    """The Plan of a schedule, with any mask."""
    if mask.name in PLAIN_MASKS:
        return plan(Schedule.from_slug(slug.replace("causal", mask.name)))
    usual = plan(Schedule.from_slug(slug))
    return replace(usual, slug=slug.replace("causal", mask.name), mask=mask)


def seen(mask: Mask, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Whether a query (rows) sees a key (columns), one by one."""
    rows = [mask.keys(row, seqlen_q, seqlen_k) for row in range(seqlen_q)]
    return torch.tensor(
        [[first <= key < last for key in range(seqlen_k)] for first, last in rows],
        dtype=torch.bool,
    ).view(seqlen_q, seqlen_k)


# ---- the row itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ALL, ids=lambda mask: mask.name)
def test_of_tensors_a_mask_says_the_same_as_of_numbers(mask: Mask) -> None:
    for sizes in LENGTHS:
        first, last = mask.keys(torch.arange(sizes[0])[:, None], *sizes)
        key = torch.arange(sizes[1])
        whole = ((key >= first) & (key < last)).expand(sizes)
        assert torch.equal(whole, seen(mask, *sizes))


@pytest.mark.parametrize("mask", ALL, ids=lambda mask: mask.name)
def test_no_mask_breaks_what_tiles_rely_on(mask: Mask) -> None:
    """Both ends rise, by a key at most, and only a row beyond all keys sees none."""
    for seqlen_q, seqlen_k in LENGTHS:
        ends = [mask.keys(row, seqlen_q, seqlen_k) for row in range(seqlen_q)]
        for (first, last), (next_first, next_last) in pairwise(ends):
            assert 0 <= next_first - first <= 1 and 0 <= next_last - last <= 1
        for first, last in ends:
            cut = min(max(first, 0), seqlen_k), min(max(last, 0), seqlen_k)
            assert cut[0] < cut[1] or (cut[0] == cut[1] and (last <= 0 or first >= seqlen_k))


def test_full_and_causal_are_aligned_to_the_bottom_right() -> None:
    for rows, keys in LENGTHS:
        assert torch.equal(seen(MASKS["full"], rows, keys), torch.ones(rows, keys).bool())
        lower = torch.ones(rows, keys).bool().tril(keys - rows)
        assert torch.equal(seen(MASKS["causal"], rows, keys), lower)


@pytest.mark.parametrize("mask", PLAIN_MASKS.values(), ids=lambda mask: mask.name)
def test_pairs_are_those_that_are_seen_but_for_half_the_diagonal(mask: Mask) -> None:
    for rows, keys in LENGTHS:
        counted = int(seen(mask, rows, keys).sum())
        diagonal = min(rows, keys) / 2 if mask.last_by_row else 0
        assert mask.pairs(rows, keys) == counted - diagonal


# ---- the kernel's own code ----------------------------------------------------------------------

PROGRAM = """\
struct Params {{ int seqlen_q, seqlen_k; }};
{code}
int main() {{
  Params params;
  for (int top, bottom; std::scanf("%d %d %d %d", &params.seqlen_q, &params.seqlen_k, &top, &bottom) == 4;) {{
    const Blocks blocks = blocks_of(params, top, bottom);
    const auto [first, last] = {keys};
    std::printf("%d %d %d %d %d %d\\n", first, last, blocks.first, {full_first}, {full_last}, blocks.last);
  }}
}}
"""  # noqa: E501


@pytest.mark.parametrize("mask", ALL, ids=lambda mask: mask.name)
def test_tiles_of_the_kernels_own_code_are_those_that_the_rows_make(mask: Mask, tmp_path: Path):
    block_n, block_m = 64, 128
    plan = planned(mask)
    kernel = render(plan).kernel
    blocks, tile = kernel.index("struct Blocks {"), kernel.index("struct Tile {")
    parts = [
        "constexpr int kBlockM = 128, kBlockN = 64;",
        kernel[kernel.index("template <class Integer>") : kernel.index("// n / value")],
        kernel[blocks:tile],
        kernel[
            kernel.index("using Lengths") : kernel.index("__device__ __forceinline__ Tile tile_of")
        ],
    ]
    code = PROGRAM.format(
        code="\n".join(parts),
        keys="seen_by(params, top)" if mask.by_row else "std::pair(0, params.seqlen_k)",
        full_first="blocks.full_first" if mask.first_by_row else "blocks.first",
        full_last="blocks.full_last" if plan.pipeline.masked_steps else "params.seqlen_k / kBlockN",
    )
    program = compiled(code, tmp_path)
    cases = [(*sizes, top) for sizes in LENGTHS for top in range(0, sizes[0], block_m)]
    lines = answers(program, [(q, k, top, top + block_m - 1) for q, k, top in cases])
    for (seqlen_q, seqlen_k, top), line in zip(cases, lines, strict=True):
        key, end, first, full_first, full_last, last = map(int, line.split())
        whole = seen(mask, seqlen_q, seqlen_k)
        assert [key <= column < end for column in range(seqlen_k)] == whole[top].tolist()
        tile = whole[top : top + block_m]
        assert 0 <= first <= last <= math.ceil(seqlen_k / block_n)
        assert first <= full_last <= last and first <= full_first
        outside = tile.clone()
        outside[:, first * block_n : last * block_n] = False
        assert not outside.any(), "a key that a row sees is in no block"
        assert tile[:, full_first * block_n : full_last * block_n].all()
        if tile.any():
            assert tile[:, first * block_n : first * block_n + block_n].any()
            assert tile[:, (last - 1) * block_n : last * block_n].any()
        if top + block_m <= seqlen_q:  # no block that all see is masked; rows beyond may cost one
            blocks = [tile[:, n * block_n :][:, :block_n] for n in range(first, last)]
            full = [block.shape[1] == block_n and bool(block.all()) for block in blocks]
            expected = [full_first <= first + n < full_last for n in range(last - first)]
            assert full == expected


# ---- a window, which is in no table -------------------------------------------------------------


@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
def test_a_window_is_emulated_as_a_dense_softmax_has_it(sizes: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = sizes
    dice = torch.Generator().manual_seed(seqlen_q)
    q, k, v = (torch.randn(1, n, 2, 64, generator=dice).half() for n in (*sizes, seqlen_k))
    out, lse = emulate(planned(WINDOW), q, k, v, 0.125)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 0.125
    scores = scores.masked_fill(~seen(WINDOW, *sizes), -math.inf)
    exact = scores.softmax(-1).nan_to_num(0.0) @ v.double().transpose(1, 2)
    torch.testing.assert_close(out.double(), exact.transpose(1, 2), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


WINDOWED = (
    "fwd_fp16_d64_causal_m192n128_q2",  # warpgroups skip blocks, and one may have no rows
    "fwd_bf16_d128_causal_m128n64_nointra",
    "fwd_e4m3_d64_causal_m128n64_vrows_sblock",
)


@pytest.mark.parametrize("slug", some(WINDOWED, WINDOWED[:1]))
def test_a_window_compiles_and_keeps_the_plans_promises(slug: str) -> None:
    plan = planned(WINDOW, slug)
    binary = build(render(plan), plan, binding=False)
    assert binary.report.spill_store_bytes == 0 and not binary.report.remarks


def test_a_row_of_the_table_is_all_that_a_schedule_needs() -> None:
    code = (
        "from fagen import vocab\n"
        "row = vocab.Mask('window', order='lpt', first='row + seqlen_k - seqlen_q - 9', pairs=None,"
        " last='row + seqlen_k - seqlen_q + 1', keys=None)\n"
        "vocab.MASKS[row.name] = row\n"
        "from fagen import registry\n"
        "from fagen.render import render\n"
        "slug = 'fwd_bf16_d64_window_m64n64'\n"
        "print(render(registry.plan(registry.from_slug(slug))).kernel)"
    )
    result = run([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    assert "row + seqlen_k - seqlen_q - 9" in result.stdout, result.stderr
