"""What chooses among a vendored folder's kernels of decoding, in C."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fagen
from fagen import registry
from fagen.dispatch import tables
from fagen.problem import Problem, Sizes
from fagen.runtime import decode
from fagen.vendor.decoding import table_of_decoding
from tests.test_vendor import asked_of, dispatcher

DECODE = "decode"


def every(*slugs: str) -> list[Any]:
    """All schedules that fagen.attention_decode derives for the problems of these."""
    found: dict[str, Any] = {}
    for schedule in map(registry.from_slug, slugs):
        for step in registry.kind(DECODE).steps(schedule):
            found[step.schedule.slug] = step.schedule
    return [*found.values()]


def drawn(randomness: random.Random) -> Sizes:
    """Sizes of calls, many at the ends of rows."""
    kv_heads = randomness.choice((1, 2, 3, 4, 5, 7, 8, 9, 16, 64))
    group = randomness.choice((1, 2, 3, 4, 5, 8, 16, 17))
    queries = randomness.choice((1, 1, 1, 2, 3, 4, 8, 9, 40))
    batch = randomness.choice((1, 2, 8, int(2 ** randomness.uniform(0, 9))))
    if randomness.random() < 0.5:  # about where chunks are dealt in runs
        batch = max(1, randomness.choice((198, 396)) // kv_heads + randomness.randint(-1, 1))
    return Sizes(batch, kv_heads * group, kv_heads, queries, randomness.randint(1, 10_000))


def fagens(problem: Problem, sizes: Sizes) -> str:
    """The slug that fagen.attention_decode takes."""
    return fagen.prepare_decode(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        batch=sizes.batch,
        queries=sizes.seqlen_q,
        causal=problem.mask == "causal",
        device="cpu",
    )


OWN = (
    "dec_fp16_d128_causal_r8n64",
    "dec_fp16_d128_full_r8n64",
    "dec_bf16_d256_causal_r8n64",
    "dec_bf16_d64v32_full_r8n128",
    "dec_bf16_d64v32_causal_r8n128",
)
FOUND = ("dec_fp16_d128_causal_r8n64_s4", "dec_fp16_d128_causal_r16n128_c64")
MISSING = "dec_fp16_d128_causal_r8n64_s5"


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's table with what a search has found, of which one kernel is in no folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(decode, "_tables", {})
    monkeypatch.setattr(decode, "_ready", {})
    (tmp_path / "config/fagen").mkdir(parents=True)
    of = [
        tables.Row.of("NVIDIA H200", FOUND[0], group=8, rows=500),
        tables.Row.of("NVIDIA H200", MISSING, group=8),
        tables.Row.of("NVIDIA H200", FOUND[1], group=16),
    ]
    tables.update(tmp_path / "config/fagen" / tables.NAME, of)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("searched", [False, True])
def test_the_dispatcher_chooses_as_fagen_does(searched, tmp_path, request):
    schedules = every(*OWN)
    if searched:  # of the table's kernels one is not in the folder
        request.getfixturevalue("found")
        schedules += [registry.from_slug(slug) for slug in FOUND]
    library, table = dispatcher(schedules, tmp_path), table_of_decoding(schedules)
    assert library.refused_decode() == 1
    randomness, chosen = random.Random(5), set()
    for problem in dict.fromkeys(map(Problem.searched, schedules)):
        for _ in range(150):
            sizes = drawn(randomness)
            slug, wanted = asked_of(library, problem, sizes, DECODE), fagens(problem, sizes)
            assert slug == wanted or wanted == MISSING, (problem, sizes)
            assert slug == schedules[table.picked(problem, sizes).kernel].slug
            chosen.add(slug)
            assert asked_of(library, problem, sizes, DECODE, out_dtype=0) == slug
        assert asked_of(library, problem, sizes, DECODE, head_dim=8) == ""
    assert len(chosen) > len(schedules) * 0.7
    assert set(FOUND) <= chosen or not searched


ONE = "dec_fp16_d128_causal_r16n64_c8"


def test_one_kernel_serves_every_call_of_its_problem(tmp_path):
    own = registry.from_slug(ONE)
    library, problem = dispatcher([own], tmp_path), Problem.of(own)
    randomness = random.Random(6)
    for sizes in (drawn(randomness) for _ in range(50)):
        assert asked_of(library, problem, sizes, DECODE) == ONE
        full = asked_of(library, replace(problem, mask="full"), sizes, DECODE)
        assert full == (ONE if sizes.seqlen_q == 1 else "")
    for sizes in (Sizes(0, 0, 0, 0, 0), Sizes(1, 3, 2, 1, 1), Sizes(1, 1, 0, 1, 1)):
        assert asked_of(library, problem, sizes, DECODE) == ONE  # which refuses what is wrong
    for change in ({"dtype": 2}, {"head_dim_v": 64}, {"out_dtype": 2}, {"scale_rows": 64}):
        assert asked_of(library, problem, Sizes(1, 8, 8, 1, 9), DECODE, **change) == ""
    assert not hasattr(library, "demo_forward")


def test_what_is_not_in_the_folder_falls_to_what_comes_nearest(tmp_path):
    name = "dec_fp16_d128_causal_r{}"
    slugs = [name.format(tile) for tile in ("24n64_c32", "8n64_c64", "8n64_c8", "24n64_c64_runs")]
    library = dispatcher([registry.from_slug(slug) for slug in slugs], tmp_path)
    problem = Problem.of(registry.from_slug(slugs[0]))
    for heads, kv_heads, batch, slug in (
        (8, 8, 1, slugs[1]),  # 64 chunks for want of 16, of which 8 are too few
        (8, 1, 1, slugs[1]),
        (9, 1, 1, slugs[3]),
        (64, 4, 1, slugs[0]),
        (64, 4, 1000, slugs[0]),  # chunks go before how they are dealt
        (25, 1, 1, slugs[3]),  # in several tiles
        (1000, 8, 1, slugs[0]),
    ):
        sizes = Sizes(batch, heads, kv_heads, 1, 100)
        assert asked_of(library, problem, sizes, DECODE) == slug, sizes


def test_kernels_that_take_a_reference_are_called_by_their_own_names(tmp_path):
    unified = registry.from_slug("dec_fp16_d128_causal_r8n64_unified")
    (tmp_path / "one").mkdir()
    assert not hasattr(dispatcher([unified], tmp_path / "one"), "demo_decode")
    library = dispatcher([unified, registry.from_slug(ONE)], tmp_path)
    assert asked_of(library, Problem.of(unified), Sizes(1, 8, 8, 1, 9), DECODE) == ONE


def test_what_serves_which_sizes_is_what_stands_in_at_them():
    randomness = random.Random(7)
    for schedule in (registry.from_slug(slug) for slug in (*OWN, "dec_fp16_d192v128_full_r8n64")):
        kind = registry.kind(schedule.kind)
        steps = [*kind.steps(schedule)]
        most = max(step.rows for step in steps)
        for sizes in (drawn(randomness) for _ in range(40)):
            rows = sizes.seqlen_q * sizes.heads // sizes.kv_heads
            tiles = -(-rows // most) * sizes.kv_heads * sizes.batch
            (found, *_) = (
                step.schedule
                for step in steps
                if (rows <= step.rows or step.rows == most)
                and sizes.kv_heads >= step.kv_heads
                and tiles >= step.tiles
            )
            assert found == kind.sized(schedule, sizes), sizes
