"""One Problem and one Sizes: what they say, FLOPs by counting, and a new mask found by dispatch."""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fagen
from fagen.dispatch import select
from fagen.dispatch.rows import MOST, Row
from fagen.dispatch.tables import NAME, update
from fagen.errors import ScheduleError
from fagen.kinds.forward.keys import Attention, Schedule
from fagen.paths import locate
from fagen.problem import Cell, Problem, Sizes, flops, in_order, solves, standard_sizes
from fagen.process import run
from fagen.registry import from_slug
from fagen.vocab import MASKS, PLAIN_MASKS
from tests.attention_helpers import computed, fill, picked, qkv

# ---- what is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slug", "problem", "words"),
    [
        (
            "fwd_fp16_d64_causal_m64n64",
            Problem("fp16", 64, 64, "causal", "fp16", "", 0),
            "float16, head_dim 64, causal",
        ),
        (
            "fwd_bf16_d192v128_full_m64n64",
            Problem("bf16", 192, 128, "full", "bf16", "", 0),
            "bfloat16, head_dim 192 and 128 (V), full",
        ),
        (
            "fwd_e4m3_d64_full_m64n64_ofp16_vrows_sblock_sr32",
            Problem("e4m3", 64, 64, "full", "fp16", "rows", 32),
            "float8_e4m3fn, head_dim 64, full, V row-major, scales by block of 32 rows, "
            "out in float16",
        ),
        (
            "fwd_e4m3_d64_full_m64n64_po4",
            Problem("e4m3", 64, 64, "full", "bf16", "columns", 0),
            "float8_e4m3fn, head_dim 64, full, V transposed, scales by head or tensor, "
            "out in bfloat16",
        ),
    ],
)
def test_a_schedule_says_what_it_computes(slug: str, problem: Problem, words: str) -> None:
    schedule = from_slug(slug)
    assert Problem.of(schedule) == problem
    assert str(problem) == words
    assert slug.startswith(f"fwd_{problem.name}_")
    assert solves(schedule, problem) and solves(schedule, problem.opened())
    wrong = {"dtype": "none", "head_dim": 8, "head_dim_v": 8, "mask": "none"}
    wrong |= {"out_dtype": "none", "v_layout": "none", "scale_rows": 1}
    for key, value in wrong.items():
        assert not solves(schedule, replace(problem, **{key: value})), key


def test_a_schedule_that_computes_no_attention_is_refused_in_words() -> None:
    with pytest.raises(ScheduleError, match="quant_fp16_d128_rot computes no attention"):
        Problem.of(from_slug("quant_fp16_d128_rot"))
    with pytest.raises(ScheduleError, match="computes no attention"):
        select.buildable(Problem("fp16", 64, 64, "full"), "quant_fp16_d128_rot").schedules[0]


def test_what_is_left_open_is_not_said_and_a_foreign_dtype_keeps_torchs_word() -> None:
    assert str(Problem("e4m3", 64, 64, "full")) == "float8_e4m3fn, head_dim 64, full"
    assert str(Problem("float32", 64, 64, "full")) == "float32, head_dim 64, full"


def test_cells_say_problem_and_sizes_and_have_an_order() -> None:
    grouped = Sizes(2, 8, 2, 100, 300)
    assert str(Cell(Problem("bf16", 192, 128, "causal"), grouped)) == (
        "bf16 hd192/128 causal B=2 H=8/2 Sq=100 Sk=300"
    )
    cells = [
        Cell(Problem(dtype, head_dim, head_dim, mask), standard_sizes(head_dim, seqlen))
        for dtype in ("bf16", "fp16")
        for head_dim in (64, 128)
        for mask in PLAIN_MASKS
        for seqlen in (512, 4_096)
    ]
    assert in_order(cells[::-1]) == cells


def test_the_standard_sizes_have_16384_tokens_and_hidden_size_2048() -> None:
    for head_dim in (64, 128, 256):
        for seqlen in (512, 16_384):
            sizes = standard_sizes(head_dim, seqlen)
            assert sizes.batch * sizes.seqlen_q == 16_384
            assert sizes.heads * head_dim == 2048 and sizes.square


# ---- what it costs ------------------------------------------------------------------------------

LENGTHS = [(1, 1), (5, 5), (3, 9), (9, 3), (4, 0), (0, 4), (1, 7)]


def counted(problem: Problem, sizes: Sizes) -> tuple[int, int]:
    """Multiplications and additions of both GEMMs one by one, and the pairs on the diagonal."""
    keys, whole, diagonal = MASKS[problem.mask].keys, 0, 0
    for _, _, row in itertools.product(*map(range, (sizes.batch, sizes.heads, sizes.seqlen_q))):
        first, last = keys(row, sizes.seqlen_q, sizes.seqlen_k)
        for key in range(sizes.seqlen_k):
            if first <= key < last:
                whole += 2 * problem.head_dim + 2 * problem.head_dim_v
                diagonal += key == last - 1
    return whole, diagonal


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
def test_flops_of_full_attention_are_those_that_are_counted(
    head_dims: tuple[int, int], lengths: tuple[int, int]
) -> None:
    problem, sizes = Problem("fp16", *head_dims, "full"), Sizes(2, 4, 2, *lengths)
    whole, _ = counted(problem, sizes)
    assert flops(problem, sizes) == Cell(problem, sizes).flops == whole


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
def test_flops_of_causal_attention_are_those_but_for_half_the_diagonal(
    head_dims: tuple[int, int], lengths: tuple[int, int]
) -> None:
    problem, sizes = Problem("fp16", *head_dims, "causal"), Sizes(2, 4, 2, *lengths)
    whole, diagonal = counted(problem, sizes)
    assert flops(problem, sizes) == whole - diagonal * sum(head_dims)
    if lengths[0] == lengths[1]:
        assert flops(problem, sizes) == flops(replace(problem, mask="full"), sizes) / 2


# ---- without torch ------------------------------------------------------------------------------


def test_a_schedule_is_picked_and_a_space_surveyed_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fagen.dispatch.select import serve\n"
        "from fagen.problem import Problem, flops, standard_sizes\n"
        "from fagen.search.declared import parse_space\n"
        "from fagen.search.space import survey\n"
        "problem = Problem('fp16', 128, 128, 'causal', 'fp16', '', 0)\n"
        "print(serve(problem, standard_sizes(128), 'NVIDIA H200').schedule.slug)\n"
        'tables = \'[attention]\\ndtype = "fp16"\\nhead_dim = 64\\nmask = "full"\\n\'\n'
        "space = parse_space(tables + '[tile]\\nblock_m = 128\\nblock_n = 128\\n')\n"
        "print(len(survey(space, space.targets()[0]).points) > 0)\n"
    )
    result = run([sys.executable, "-c", code], cwd=locate("cli.py").parent)
    slug, fits = result.stdout.split()
    assert slug.startswith("fwd_fp16_d128_causal_") and fits == "True", result.stderr


def test_what_is_picked_is_what_attention_takes() -> None:
    for causal, seqlen, layout in itertools.product(
        (False, True), (200, 8_000), ("rows", "columns")
    ):
        mask = "causal" if causal else "full"
        sizes = Sizes(2, 4, 2, 100, seqlen)
        how: dict[str, Any] = dict(causal=causal, head_dim=64, seqlen=seqlen, device="cpu")
        problem = Problem("e4m3", 64, 64, mask, "bf16", layout, 64)
        schedule = picked(dtype="e4m3", v_layout=layout, scale_rows=64, rows=800, **how)
        assert select.serve(problem, sizes, "").schedule == schedule
        problem = Problem("fp16", 64, 64, mask, "fp16", "", 0)
        # of so few tiles keys are split, by queries and heads that this function is not told
        sizes = Sizes(64, 32, 2, 100, seqlen)
        schedule = picked(dtype="fp16", rows=64 * 32 * 100, **how)
        assert select.serve(problem, sizes, "").schedule == schedule


# ---- another mask -------------------------------------------------------------------------------


@pytest.fixture
def band(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Another mask with the row of the causal one, as a schedule may say it."""
    rebuild: list[Callable[..., object]] = [Attention.model_rebuild, Schedule.model_rebuild]
    with monkeypatch.context() as patch:
        patch.setitem(MASKS, "band", replace(MASKS["causal"], name="band"))  # type: ignore[arg-type]
        for model in rebuild:
            model(force=True)
        yield "band"
    for model in rebuild:
        model(force=True)


def test_a_mask_that_hides_the_same_keys_as_another_has_its_own_kernels(
    band: str, schedules_folder: Path, nothing_is_ready: None
) -> None:
    """A mask is told by its name: no property that two of them share decides."""
    slugs = {mask: f"fwd_fp16_d64_{mask}_m64n64" for mask in (band, "causal")}
    fill(schedules_folder, *slugs.values())
    for mask, slug in slugs.items():
        problem = Problem("fp16", 64, 64, mask, "fp16", "", 0)
        assert select.buildable(problem).schedules[0].slug == slug
    tables = {mask: [f"fwd_fp16_d64_{mask}_m64n{n}" for n in (16, 32)] for mask in slugs}
    rows = [
        Row("NVIDIA H200", slug, *keys)
        for pair in tables.values()
        for slug, keys in zip(pair, ((0, 99), (100,)), strict=True)
    ]
    update(schedules_folder / NAME, rows)
    for mask, (few, many) in tables.items():
        problem = Problem("fp16", 64, 64, mask, "fp16", "", 0)
        assert select.select(problem, "NVIDIA H200").many == ((99, few, ()), (MOST, many, ()))
    q, k, v = qkv(keys=64)
    slug = tables["causal"][0]
    assert fagen.prepare(dtype="fp16", head_dim=64, causal=True, seqlen=64, device="cpu") == slug
    assert (fagen.attention(q, k, v, causal=True) == computed(slug, q, k, v)).all()
    with pytest.raises(ScheduleError, match=r"computes float16, head_dim 64, band; the call asks"):
        fagen.attention(q, k, v, causal=True, schedule=slugs[band])
