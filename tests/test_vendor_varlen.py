"""What chooses among a vendored folder's kernels of varlen sequences, in C and in Python."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import registry, vendor
from fagen.dispatch import tables
from fagen.dispatch.rows import Row
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.vendor.gradients import problem_of
from fagen.vendor.table import VARLEN, table_of
from fagen.vocab import DTYPES, OUT_DTYPES
from tests.cli_helpers import ROOT
from tests.fresh import forget
from tests.test_vendor import asked_of, dispatcher
from tests.varlen_helpers import exact, packed, packed8
from tests.vendor_gradients import package
from tests.vendor_helpers import calls_of, vendored

OWN = [one.stem for one in registry.schedules("forward") if "_varlen" in one.stem]
OTHERS = (
    "fwd_fp16_d64_causal_m128n64_varlen",
    "fwd_e4m3_d64_full_m64n64_varlen",
    "fwd_bf16_d96v64_full_m128n64_varlen",  # alone for its problem
)
FOUND, MISSING = OTHERS[:2], "fwd_bf16_d128_causal_m128n64_varlen"
GRADIENTS = (
    "bwd_fp16_d64_causal_m64n64_varlen",
    "bwd_fp16_d64_causal_m128n128_varlen",
    "bwd_bf16_d96v64_full_m64n64_varlen_det",
)


def every() -> list[Any]:
    """All that are committed, others beside them, and those of e4m3 with O in fp16 too."""
    slugs = (slug for slug in (*OWN, *OTHERS) if "e4m3" in slug)
    other = [registry.from_slug(slug).but(out_dtype="fp16") for slug in slugs]
    return [*map(registry.from_slug, (*OTHERS, *OWN)), *other]


def kind_of(problem: Problem) -> str:
    """What chooses for a problem."""
    return VARLEN[DTYPES[problem.dtype].fp8]


def fagens(problem: Problem) -> str:
    """The slug that fagen.attention_varlen takes."""
    return fagen.prepare_varlen(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.mask == "causal",
        out_dtype=problem.out_dtype if DTYPES[problem.dtype].fp8 else None,
        device="cpu",
    )


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's table with what a search has found, of which one kernel is in no folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget(monkeypatch)
    (tmp_path / "config/fagen").mkdir(parents=True)
    rows = [Row("NVIDIA H200", slug) for slug in (*FOUND, MISSING)]
    tables.update(tmp_path / "config/fagen" / tables.NAME, rows)
    yield
    tables.table_at.cache_clear()


SIZES = (Sizes(0, 0, 0, 0, 0), Sizes(1, 1, 2, 8, 8), Sizes(2**30, 2**30, 9, 64, 8))


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("searched", [False, True])
def test_the_dispatcher_chooses_as_fagen_does(
    searched: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if searched:
        request.getfixturevalue("found")
    schedules = every()
    library, chosen, there = dispatcher(schedules, tmp_path), set(), {s.slug for s in schedules}
    assert library.refused_varlen() == library.refused_varlen_fp8() == 1
    for problem in dict.fromkeys(map(Problem.of, schedules)):
        kind, wanted = kind_of(problem), fagens(problem)
        own = {asked_of(library, problem, sizes, kind) for sizes in SIZES}
        assert own == {wanted} or (wanted not in there and len(own) == 1), problem
        chosen |= own
        for change in ({"head_dim": 8}, {"mask": 9}, {"dtype": 9}, {"scale_rows": 64}):
            assert asked_of(library, problem, SIZES[1], kind, **change) == ""
        usual = problem.out_dtype == DTYPES[problem.dtype].out
        of = problem if usual else replace(problem, out_dtype=DTYPES[problem.dtype].out)
        left_open = asked_of(library, problem, SIZES[1], kind, out_dtype=0)
        assert left_open == asked_of(library, of, SIZES[1], kind)
    assert len(chosen & there) == len({*map(Problem.of, schedules)})
    assert set(FOUND) <= chosen or not searched
    assert not any(hasattr(library, f"demo_{name}") for name in ("forward", "backward_varlen"))


def test_where_nothing_else_tells_the_first_in_the_folder_serves(tmp_path: Path) -> None:
    slugs = [f"fwd_bf16_d96_full_{tile}_varlen" for tile in ("m64n64", "m128n64")]
    for place, order in enumerate((slugs, slugs[::-1])):
        (tmp_path / str(place)).mkdir()
        library = dispatcher([registry.from_slug(slug) for slug in order], tmp_path / str(place))
        problem = Problem.of(registry.from_slug(slugs[0]))
        assert asked_of(library, problem, SIZES[1], "varlen") == order[0]
    assert b"no kernel of demo computes that" in library.demo_message(100)
    assert not hasattr(library, "demo_varlen_fp8")


def test_gradients_are_chosen_by_dtype_head_dims_and_mask(tmp_path: Path) -> None:
    slugs = (OWN[0], *GRADIENTS, "bwd_fp16_d64_causal_m128n128", "fwd_fp16_d64_causal_m128n128")
    library = dispatcher([registry.from_slug(slug) for slug in slugs], tmp_path)
    assert library.refused_backward_varlen() == library.refused_backward() == 1
    for slug in (GRADIENTS[0], GRADIENTS[2]):  # the first of several
        problem = problem_of(registry.from_slug(slug))
        for sizes in SIZES:
            assert asked_of(library, problem, sizes, "backward_varlen") == slug
        for change in ({"dtype": 3}, {"mask": 9}, {"head_dim_v": 32}):
            assert asked_of(library, problem, SIZES[1], "backward_varlen", **change) == ""
    # those of one length are apart, and so are sequences of one length
    of = replace(problem_of(registry.from_slug(GRADIENTS[0])), lengths="equal")
    assert asked_of(library, of, Sizes(1, 8, 8, 9, 9), "backward") == slugs[4]
    assert asked_of(library, of, Sizes(1, 8, 8, 9, 9)) == slugs[5]


def test_a_row_of_such_a_table_has_no_bounds() -> None:
    schedules = [one for one in every() if not DTYPES[one.values()["dtype"]].fp8]
    table = table_of(schedules, "varlen")
    assert not table.bounds and not table.refused and table.kind == "varlen"
    assert len(table.rows) == len({*map(Problem.of, schedules)})
    by = table_of([*map(registry.from_slug, GRADIENTS)], "varlen")
    assert by.kind == "backward_varlen" and [row.kernel for row in by.rows] == [0, 2]


@pytest.mark.parametrize(
    "name", [*VARLEN, "pick_varlen", "pick_backward_varlen", "attention_varlen"]
)
def test_a_kernel_has_no_name_of_what_chooses(name: str, tmp_path: Path) -> None:
    path = tmp_path / "vendor.toml"
    path.write_text(f'name = "mine"\n[kernels]\n{name} = "{OWN[0]}"\n')
    with pytest.raises(fagen.ScheduleError, match="would be the name of another function"):
        vendor.read(path)


def test_what_the_page_shows_compiles(tmp_path: Path) -> None:
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    section = page.partition("\n## Varlen\n")[2].partition("\n## ")[0]
    body = section.partition("```cpp\n")[2].partition("```")[0]
    vendored("my_attention", "source", tmp_path / "c", OWN[0], GRADIENTS[0])
    head = "#include <my_attention.h>\nint64_t called(void* stream) {\n"
    head += "struct MyAttentionProblem problem = {};\nstruct FagenForwardVarlenArgs args = {};\n"
    head += "struct FagenBackwardVarlenArgs gradients = {};\n"
    (tmp_path / "use.cpp").write_text(f"{head}{body}return bytes + status; }}\n")
    words = ["g++", "-Wall", "-Werror", "-fsyntax-only", "-I", str(tmp_path / "c/include")]
    answer = run([*words, str(tmp_path / "use.cpp")])
    assert answer.returncode == 0, answer.stderr


# ---- in Python ----------------------------------------------------------------------------------


@pytest.fixture
def calls_of_varlen(tmp_path: Path) -> Iterator[Callable[..., ModuleType]]:
    """The module of attention_varlen(…) for some schedules, over ops that are none."""
    with ExitStack() as stack:
        yield lambda schedules: stack.enter_context(calls_of(schedules, tmp_path))["_varlen"]


def called(module: ModuleType, problem: Problem, **more: Any) -> Any:
    """What a call of tensors without numbers comes to: an op's name and arguments."""
    dtype = getattr(torch, DTYPES[problem.dtype].torch)
    columns = problem.head_dim, problem.head_dim, problem.head_dim_v
    q, k, v = (
        torch.empty(9, heads, d, dtype=dtype, device="meta")
        for heads, d in zip((4, 2, 2), columns, strict=True)
    )
    at = torch.empty(3, dtype=torch.int32, device="meta")
    return module.attention_varlen(q, k, v, at, causal=problem.mask == "causal", **more)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_the_call_chooses_as_fagen_does(
    found: None, calls_of_varlen: Callable[..., ModuleType]
) -> None:
    schedules = every()
    module, chosen, there = calls_of_varlen(schedules), set(), {s.slug for s in schedules}
    for problem in dict.fromkeys(map(Problem.of, schedules)):
        more: dict[str, Any] = {}
        if DTYPES[problem.dtype].fp8:
            out = OUT_DTYPES[problem.out_dtype or ""].torch
            more = {"out_dtype": getattr(torch, out), "v_descale": torch.ones(())}
        slug, wanted = called(module, problem, return_lse=True, **more)[0], fagens(problem)
        assert slug == wanted or wanted not in there, problem
        chosen.add(slug)
    assert set(FOUND) <= chosen


def test_a_call_in_python(calls_of_varlen: Callable[..., ModuleType]) -> None:
    own = registry.from_slug(OTHERS[0])
    module, problem = calls_of_varlen([own]), Problem.of(own)
    used = torch.empty(2, dtype=torch.int32)
    slug, given, named = called(module, problem, seqused_k=used, max_seqlen_q=9)
    assert slug == f"{own.slug}_without_lse" and given[5] == 64**-0.5 and given[6] is used
    assert given[3] is given[4] and not named
    slug, given, named = called(module, problem, return_lse=True, scale=2.0)
    assert slug == own.slug and given[5] == 2.0 and given[6] is None
    there = "it has those for torch.float16, 64, 64, causal, torch.float16"
    for wrong, words in (
        ({"mask": "full"}, f"demo has no kernel of varlen sequences for .*64, full.*{there}"),
        ({"dtype": "bf16"}, "for torch.bfloat16, 64, 64, causal, torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            called(module, replace(problem, **wrong))
    q = torch.empty(2, 9, 4, 64)
    with pytest.raises(ValueError, match=r"q has 4 dimensions; it must have 3: \(total, heads,"):
        module.attention_varlen(q, q, q, used)
    with pytest.raises(TypeError, match="q_descale"):
        called(module, problem, q_descale=used)


def test_a_call_in_e4m3_in_python(calls_of_varlen: Callable[..., ModuleType]) -> None:
    own, half = registry.from_slug(OTHERS[1]), registry.from_slug(OTHERS[0])
    module, problem = calls_of_varlen([own, half]), Problem.of(own)
    one, by_head = torch.ones(()), torch.ones(2, 4)
    slug, _, named = called(module, problem, q_descale=by_head, v_descale=one)
    assert slug == f"{own.slug}_without_lse"
    assert {name: tuple(x.shape) for name, x in named.items()} == {
        "q_descale": (2, 4, 1),
        "v_descale": (1, 1, 1),
    }
    with pytest.raises(ValueError, match=r"float8_e4m3fn, 64, 64, full, torch\.float16; it has"):
        called(module, problem, out_dtype=torch.float16)
    said = "v_mean, out_dtype: for float8_e4m3fn alone, and q is torch.float16"
    with pytest.raises(ValueError, match=said):
        called(module, Problem.of(half), v_mean=by_head, out_dtype=torch.float16)


HALF, BY = "fwd_fp16_d64_causal_m64n64_varlen", "bwd_fp16_d64_causal_m64n64_varlen"
EIGHT = "fwd_e4m3_d64_full_m64n64_varlen"
LENGTHS = ((5, 5), (0, 7), (40, 40), (3, 0), (1, 130), (70, 33))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A package whose kernels compute on the CPU as they would on a GPU."""
    slugs = (HALF, BY, f"{BY}_det", EIGHT, "fwd_bf16_d64_full_m64n64_varlen")
    with package(tmp_path_factory.mktemp("demo"), *slugs) as found:
        yield found


def test_its_bits_are_the_kernels_also_compiled(fresh_dynamo: None, demo: ModuleType) -> None:
    assert "attention_varlen" in demo.__all__ and not hasattr(demo, "attention")

    def compiled_call(*given: Any, **named: Any) -> Any:
        return demo.attention_varlen(*given, **named)

    compiled = torch.compile(compiled_call, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (LENGTHS, LENGTHS[:3]):
        given, used = packed(lengths), torch.tensor([2] * len(lengths), dtype=torch.int32)
        named: dict[str, Any] = {"seqused_k": used, "causal": True, "scale": 0.2}
        right = fagen.attention_varlen(*given, **named, schedule=HALF, return_lse=True)
        for call in (demo.attention_varlen, compiled):
            for mine, own in zip(call(*given, **named, return_lse=True), right, strict=True):
                assert torch.equal(mine, own)
            assert torch.equal(call(*given, **named), right[0])


def test_in_e4m3_its_bits_are_the_kernels_too(demo: ModuleType) -> None:
    of = packed8(by_column=True)
    out = demo.attention_varlen(*of.tensors, **of.named)
    assert torch.equal(out, fagen.attention_varlen(*of.tensors, **of.named, schedule=EIGHT))
    right, _ = of.exact()
    seen = ~right.isnan().any(-1)
    assert (out.double() - right)[seen].norm() < 0.1 * right[seen].norm()


def leaves(dtype: torch.dtype = torch.float16) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v of varlen sequences, which require gradients; and their offsets."""
    q, k, v, *at = packed(LENGTHS, dtype)
    return [x.requires_grad_() for x in (q, k, v)], at


def test_its_gradients_are_those_of_the_formula(fresh_dynamo: None, demo: ModuleType) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, *at: Tensor) -> Tensor:
        out, lse = demo.attention_varlen(q, k, v, *at, causal=True, return_lse=True)
        sums: Tensor = out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        return sums

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    fine = [x.detach().double().requires_grad_() for x in leaves()[0]]
    at_q, at_k = leaves()[1]
    out, lse = exact(fine[0], fine[1], fine[2], at_q, at_k, causal=True)
    (out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    for call in (loss, compiled):
        given, at = leaves()
        call(*given, *at).backward()
        for mine, right in zip(given, fine, strict=True):
            assert mine.grad is not None and right.grad is not None
            off = (mine.grad.double() - right.grad).abs().max()
            assert off <= 8 * 2.0**-11 * (1 + right.grad.abs().max())


def test_what_needs_a_gradient_is_refused_where_no_kernel_computes_it(demo: ModuleType) -> None:
    given, at = leaves(torch.bfloat16)
    with pytest.raises(ValueError, match="no kernel here computes it: add bwd_bf16_d64_full_"):
        demo.attention_varlen(*given, *at)
    with torch.no_grad():
        assert not demo.attention_varlen(*given, *at).requires_grad
    q8, *others = (x.detach().to(torch.float8_e4m3fn) for x in given)
    with pytest.raises(ValueError, match="requires a gradient, and this op has no backward"):
        demo.attention_varlen(q8.requires_grad_(), *others, *at)


def test_what_is_chosen_does_not_depend_on_lengths(demo: ModuleType) -> None:
    dice = random.Random(3)
    whole = [(dice.randint(1, 90),) * 2 for _ in range(5)]
    q, k, v, at, _ = packed(whole)
    out = demo.attention_varlen(q, k, v, at, causal=True)
    for begin, end in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
        ends = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = (x[begin:end] for x in (q, k, v))
        assert torch.equal(demo.attention_varlen(*alone, ends, causal=True), out[begin:end])
