"""What chooses among a vendored folder's kernels of decoding, in C and in Python."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fagen
from fagen import registry
from fagen.dispatch import tables
from fagen.dispatch.rows import Row
from fagen.problem import Problem, Sizes
from fagen.vendor.table import table_of
from fagen.vocab import DECODE, DTYPES
from tests.fresh import forget
from tests.tensors import normal
from tests.test_vendor import asked_of, dispatcher
from tests.vendor_gradients import package
from tests.vendor_helpers import calls_of, first_of


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
MISSING = "dec_fp16_d128_causal_r8n64_s3"


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's table with what a search has found, of which one kernel is in no folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget(monkeypatch)
    (tmp_path / "config/fagen").mkdir(parents=True)
    of = [
        Row("NVIDIA H200", FOUND[0], group_rows=8, rows_to=500),
        Row("NVIDIA H200", MISSING, group_rows=8),
        Row("NVIDIA H200", FOUND[1], group_rows=16),
    ]
    tables.update(tmp_path / "config/fagen" / tables.NAME, of)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("searched", [False, True])
def test_the_dispatcher_chooses_as_fagen_does(searched, tmp_path, request):
    schedules = every(*OWN)
    if searched:  # of the table's kernels one is not in the folder
        request.getfixturevalue("found")
        schedules += [registry.from_slug(slug) for slug in FOUND]
    library, table = dispatcher(schedules, tmp_path), table_of(schedules)
    assert library.refused_decode() == 1
    randomness, chosen = random.Random(5), set()
    for problem in dict.fromkeys(map(Problem.searched, schedules)):
        for _ in range(150):
            sizes = drawn(randomness)
            slug, wanted = asked_of(library, problem, sizes, DECODE), fagens(problem, sizes)
            assert slug == wanted or wanted == MISSING, (problem, sizes)
            assert slug == first_of(table, problem, sizes)
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
    slugs = [
        name.format(tile) for tile in ("24n64_c32", "8n64_c64", "8n64_c8", "24n64_c64_streamk")
    ]
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
    unified = registry.from_slug("dec_fp16_d128_causal_r8n64_fixed")
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


# ---- in Python ----------------------------------------------------------------------------------


@pytest.fixture
def decoding_of(tmp_path: Path) -> Iterator[Callable[..., ModuleType]]:
    """The module of attention_decode(…) for some schedules, over ops that are none."""
    with ExitStack() as stack:
        yield lambda schedules: stack.enter_context(calls_of(schedules, tmp_path))["_decode"]


def called(module: ModuleType, problem: Problem, sizes: Sizes, **more: Any) -> Any:
    """What a call of tensors without numbers comes to: an op's name and arguments."""
    q, k, v = (
        torch.empty(shape, dtype=getattr(torch, DTYPES[problem.dtype].torch), device="meta")
        for shape in (
            (sizes.batch, sizes.seqlen_q, sizes.heads, problem.head_dim),
            (sizes.batch, sizes.seqlen_k, sizes.kv_heads, problem.head_dim),
            (sizes.batch, sizes.seqlen_k, sizes.kv_heads, problem.head_dim_v),
        )
    )
    return module.attention_decode(q, k, v, causal=problem.mask == "causal", **more)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_the_call_chooses_as_fagen_does(found, decoding_of):
    schedules = [*every(*OWN), *map(registry.from_slug, FOUND)]
    module, table = decoding_of(schedules), table_of(schedules)
    randomness, chosen = random.Random(8), set()
    for problem in dict.fromkeys(map(Problem.searched, schedules)):
        for _ in range(100):
            sizes = drawn(randomness)
            slug, wanted = (
                called(module, problem, sizes, return_lse=True)[0],
                fagens(problem, sizes),
            )
            assert slug == wanted or wanted == MISSING, (problem, sizes)
            assert slug == first_of(table, problem, sizes)
            chosen.add(slug)
    assert len(chosen) > len(schedules) * 0.7 and set(FOUND) <= chosen


def test_a_call_in_python(decoding_of):
    own = registry.from_slug(ONE)
    module, problem = decoding_of([own]), Problem.of(own)
    sizes = Sizes(2, 8, 2, 3, 100)
    lengths = torch.zeros(2, dtype=torch.int32)
    slug, given, named = called(module, problem, sizes, seqused_k=lengths)
    assert slug == f"{ONE}_without_lse" and given[3] == 128**-0.5 and len(given) == 4
    assert named == {"seqused_k": lengths, "leftpad_k": None}
    slug, given, named = called(module, problem, sizes, leftpad_k=lengths, scale=2.0)
    assert given[3] == 2.0 and named["leftpad_k"] is lengths
    assert called(module, problem, sizes, return_lse=True)[0] == ONE
    full = replace(problem, mask="full")
    assert called(module, full, replace(sizes, seqlen_q=1), return_lse=True)[0] == ONE
    there = "torch.float16, 128, 128, full of one query; torch.float16, 128, 128, causal"
    said = (
        f"demo has no kernel that decodes torch.float16, 128, 128, full; it has those for {there}"
    )
    for wrong, words in (
        (lambda: called(module, full, sizes), f"^{said}$"),
        (lambda: called(module, replace(problem, dtype="bf16"), sizes), "torch.bfloat16, 128, 128"),
        (lambda: called(module, problem, Sizes(1, 3, 2, 1, 9)), "a multiple of k's 2"),
        (lambda: called(module, problem, Sizes(1, 3, 0, 1, 9)), "a multiple of k's 0"),
        (lambda: module.attention_decode(*[lengths] * 3), "q has 1 dimensions; it must have 4"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    with pytest.raises(TypeError, match="reference"):
        called(module, problem, sizes, reference=lengths)


def test_sizes_that_are_left_open_count_as_many(fresh_dynamo, decoding_of):
    name = "dec_fp16_d128_causal_r{}n64"
    slugs = [name.format(tile) for tile in (8, 16, 64)] + [f"{name.format(8)}_streamk"]
    module = decoding_of([registry.from_slug(slug) for slug in slugs])

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        (batch, queries), (_, heads) = q.shape, k.shape
        problem = torch.float16, 128, 128, "causal"
        return q + 1, module._picked(problem, batch, heads, 8, queries)

    for batch, queries, opened, slug in (
        (2, 3, (), slugs[1]),
        (2, 2, (), slugs[0]),
        (2, 2, (0,), slugs[3]),  # many tiles
        (2, 3, (0,), slugs[1]),
        (2, 3, (1,), slugs[2]),
        (2, 3, (0, 1), slugs[2]),
    ):
        torch.compiler.reset()
        q, k = torch.zeros(batch, queries), torch.zeros(5, 32)
        for dim in opened:
            torch._dynamo.mark_dynamic(q, dim)
        compiled = torch.compile(call, fullgraph=True, dynamic=False, backend="eager")
        assert compiled(q, k)[1] == slug, (batch, queries, opened)


SMALL = [f"dec_fp16_d64_causal_r{tile}n128_c64" for tile in (8, 16)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A package whose kernels compute on the CPU as they would on a GPU."""
    with package(tmp_path_factory.mktemp("demo"), *SMALL) as found:
        yield found


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_its_bits_are_fagens_also_compiled(fresh_dynamo, demo):
    assert "attention_decode" in demo.__all__ and not hasattr(demo, "attention")

    def compiled_call(*given: Any, **named: Any) -> Any:
        return demo.attention_decode(*given, **named)

    compiled = torch.compile(compiled_call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, queries, heads in ((2, 1, 4), (2, 3, 4), (3, 7, 4), (1, 9, 8)):
        q = normal(batch, queries, heads, 64, seed=1, dtype=torch.float16)
        k, v = (normal(batch, 300, 2, 64, seed=s, dtype=torch.float16) for s in (2, 3))
        used = torch.tensor([300, 170, 0][:batch], dtype=torch.int32)
        named: dict[str, Any] = {"seqused_k": used, "leftpad_k": used // 4, "scale": 0.2}
        right = fagen.attention_decode(q, k, v, **named, return_lse=True)
        for call in (demo.attention_decode, compiled):
            for found, own in zip(call(q, k, v, **named, return_lse=True), right, strict=True):
                assert torch.equal(found, own)
            assert torch.equal(call(q, k, v, **named), right[0])
    leaf = q.clone().requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient, and decoding has none"):
        demo.attention_decode(leaf, k, v)
    with torch.no_grad():
        assert demo.attention_decode(leaf, k, v).shape == q.shape
    with pytest.raises(ValueError, match=r"those for .*, 64, full of one query"):
        demo.attention_decode(q, k, v, causal=False)
