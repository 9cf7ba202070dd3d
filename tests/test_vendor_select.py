"""What chooses among a vendored folder's kernels, in C and in Python: both as fagen itself does."""

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

from fagen import registry
from fagen.dispatch import tables
from fagen.dispatch.rows import MOST, OPEN_KEYS, Row, first_fit, measures_of
from fagen.dispatch.select import flattened, serve, sized
from fagen.dispatch.tables import table_at
from fagen.kinds.decode import derived, tile_for
from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.render import Source, written
from fagen.vendor import torch_package
from fagen.vendor.contents import Folder, Group, Kernel
from fagen.vendor.table import FIELDS, VARLEN, Table, in_c, table_of
from fagen.vocab import DECODE, DTYPES, FORWARD, ONE_QUERY, OUT_DTYPES, PLAIN_MASKS
from tests.fresh import forget

pytestmark = pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")

# ---- what chooses, compiled and imported --------------------------------------------------------

CALLS = """
const char* call_@kind@(const int32_t* problem, const int64_t* sizes) {
  struct DemoProblem asked;
  memcpy(&asked, problem, sizeof(asked));
  struct @args@ args = {0};
  args.struct_bytes = sizeof(args), args.version = @version@;
  @sizes@
  const struct Demo@struct@* found = demo_@pick@(&asked, &args);
  const int status = demo_@kind@(&asked, &args, 0);
  if ((status == DEMO_NO_KERNEL) != !found) return "differ";
  if (found && found->launch(&args, 0) != status) return "differ";
  if ((demo_@kind@_workspace(&asked, &args) < 0) != !found) return "differ";
  return found ? found->slug : "";
}
int refused_@kind@(void) {
  struct DemoProblem asked = {0};
  struct @args@ args = {0};
  return demo_@kind@(0, &args, 0) == DEMO_NULL_POINTER &&
         demo_@kind@(&asked, 0, 0) == DEMO_NULL_POINTER &&
         demo_@kind@(&asked, &args, 0) == DEMO_WRONG_STRUCT && !demo_@pick@(0, 0);
}
"""
# Ops that give what they are called with: their names and arguments.
OPS = """\
from types import SimpleNamespace


class Ops:
    name = "demo"

    def __getattr__(self, slug):
        return SimpleNamespace(default=lambda *given, **named: (slug, given, named))


ops = Ops()
"""


def calls_of(group: Group) -> str:
    """C that calls the functions of what chooses among a group's kernels."""
    sizes = enumerate(size.name for size in group.signature.sizes)
    text = CALLS
    for word, meaning in {
        "kind": group.kind,
        "pick": group.table.pick,
        "struct": group.table.struct,
        "args": group.signature.struct,
        "version": group.signature.guard,
        "sizes": " ".join(f"args.{name} = (int)sizes[{place}];" for place, name in sizes),
    }.items():
        text = text.replace(f"@{word}@", meaning)
    return text


def kernels_of(schedules: Iterable[Any]) -> tuple[Kernel, ...]:
    """Kernels whose sources are empty."""
    nothing = Source("", "", "", "", "", "", None)
    return tuple(Kernel("", s, registry.plan(s), nothing, None) for s in schedules)


@dataclass(frozen=True)
class Dispatcher:
    """The dispatcher of a folder in C, compiled beside kernels that do nothing."""

    library: Any
    tables: dict[str, Table]

    def slug(self, problem: Problem, sizes: Sizes, kind: str = FORWARD, **fields: int) -> str:
        """What it chooses, "" where no kernel is for that; fields of the problem may differ."""
        numbers = (ctypes.c_int32 * len(FIELDS))(*(in_c(problem) | fields).values())
        call = getattr(self.library, f"call_{kind}")
        return str(call(numbers, (ctypes.c_int64 * 5)(*vars(sizes).values())).decode())

    def row(self, problem: Problem, sizes: Sizes, kind: str = FORWARD) -> str:
        """The slug of the first row of its table that fits, as Python reads that."""
        table = self.tables[kind]
        own = (
            (entry.row.slug, entry.row.limits, entry.row.tiles)
            for entry in table.rows
            if entry.problem == problem
        )
        return str(first_fit(own, measures_of(sizes)))


def dispatcher(schedules: Iterable[Any], place: Path) -> Dispatcher:
    place.mkdir(exist_ok=True)
    folder = Folder("demo", kernels_of(schedules), False, "source")
    (place / "demo.h").write_text(written("vendor/header.h.j2", folder=folder))
    (place / "demo.c").write_text(written("vendor/dispatch.c.j2", folder=folder))
    stubs = "".join(
        f"int fagen_{k.slug}(const struct {k.signature.struct}* a, void* s) "
        f"{{ (void)a; (void)s; return {number}; }}\n"
        f"int64_t fagen_{k.slug}_workspace(const struct {k.signature.struct}* a) "
        "{ return a ? 4 : -1; }\n"
        f'const char* fagen_{k.slug}_message(int s) {{ (void)s; return ""; }}\n'
        f"const struct FagenKernelInfo* fagen_{k.slug}_info(void) {{ return 0; }}\n"
        for number, k in enumerate(folder.kernels, 200)
    )
    calls = "".join(map(calls_of, folder.dispatchers))
    (place / "stubs.c").write_text(f'#include "demo.h"\n#include <string.h>\n{stubs}{calls}')
    words = ["gcc", "-std=c99", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{place}"]
    words += [f"{place}/demo.c", f"{place}/stubs.c", "-o", f"{place}/demo.so"]
    answer = run(words)
    assert answer.returncode == 0, answer.stderr
    library = ctypes.CDLL(str(place / "demo.so"))
    for group in folder.dispatchers:
        call = getattr(library, f"call_{group.kind}")
        call.restype, call.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_void_p]
        assert getattr(library, f"refused_{group.kind}")() == 1
    for name in ("demo_message", "demo_forward_message"):
        if hasattr(library, name):
            getattr(library, name).restype = ctypes.c_char_p
    return Dispatcher(library, {part.kind: part.table for part in folder.dispatchers})


Modules = Callable[[Iterable[Any]], dict[str, ModuleType]]


@pytest.fixture
def modules_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """The modules of a package for torch that choose among kernels, over ops that are none."""

    def imported(schedules: Iterable[Any]) -> dict[str, ModuleType]:
        package = torch_package.Package(Folder("demo", kernels_of(schedules), False, "torch"))
        (tmp_path / "demo").mkdir()
        (tmp_path / "demo/__init__.py").touch()
        (tmp_path / "demo/_ops.py").write_text(OPS)
        names = ("_attention", "_decode", "_varlen")
        calls = [name for name in names if f"{name}.py" in package.modules]
        for module in (*calls, "_autocast", "_gradients", "_rows", "_variants"):
            template = package.modules.get(f"{module}.py", f"vendor/torch/{module}.py.j2")
            if module != "_variants" or f"{module}.py" in package.modules:
                text = torch_package.text_of(package, template)
                (tmp_path / f"demo/{module}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return {name: import_module(f"demo.{name}") for name in calls}

    yield imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "demo"]:
        del sys.modules[name]


@pytest.fixture
def users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write a user's table, of which nothing is left afterwards; without rows there is none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget(monkeypatch)
    (tmp_path / "config/fagen").mkdir(parents=True)
    yield lambda rows: tables.update(tmp_path / "config/fagen" / tables.NAME, rows)
    tables.table_at.cache_clear()


def all_of(*slugs: str) -> list[Any]:
    return [registry.from_slug(slug) for slug in slugs]


def empty(problem: Problem, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors without numbers."""
    dtype = getattr(torch, DTYPES[problem.dtype].torch)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


# ---- as fagen does ------------------------------------------------------------------------------


def fagens(problem: Problem, sizes: Sizes) -> str:
    """The slug that a call of fagen takes, or would without kernels of decoding.

    tests/test_pick.py holds what serves to what calls take.
    """
    if problem.kind == DECODE and sizes.seqlen_q == 1:
        problem = replace(problem, mask=ONE_QUERY)
    served = serve(problem, sizes, "").schedule
    if served.kind == problem.kind:
        return str(served.slug)
    own = [
        (row.slug, row.limits, row.tiles)
        for row in flattened(problem, "")
        if not row.slug or registry.kind_of_slug(row.slug).name == problem.kind
    ]
    return str(first_fit(own, measures_of(sizes)))


class Attending:
    """Attention over fagen's own table, also with O of e4m3 in fp16."""

    searched = ()
    draws, refused, most = 24, ({"head_dim": 8}, {"mask": 9}), 0.9
    functions = (FORWARD,)
    problem_of = staticmethod(Problem.of)

    @staticmethod
    @cache
    def schedules() -> list[Any]:
        table = table_at(locate("schedules") / "dispatch.toml")
        schedules = all_of(*dict.fromkeys(row.slug for row in table))
        schedules = [
            schedule
            for schedule in schedules
            if schedule.kind == FORWARD and schedule.values()["mask"] in PLAIN_MASKS
            if not Problem.of(schedule).variant
        ]
        fp8 = [schedule for schedule in schedules if DTYPES[schedule.values()["dtype"]].fp8]
        return schedules + [schedule.but(out_dtype="fp16") for schedule in fp8]

    @staticmethod
    @cache
    def ends() -> list[int]:
        """Numbers of keys where rows of fagen's own table end or begin."""
        rows = table_at(locate("schedules") / "dispatch.toml")
        return [int(end) for row in rows for end in (row.keys_from, row.keys_to) if 0 < end < MOST]

    @classmethod
    def sizes(cls, dice: random.Random) -> Sizes:
        """Sizes of all magnitudes, many at the very ends of rows."""

        def size(most: float) -> int:
            return int(2 ** dice.uniform(0, most))

        keys = dice.choice(cls.ends()) + dice.randint(-1, 1)
        keys = max(1, min(keys, 2**30)) if dice.random() < 0.5 else size(22)
        if dice.random() < 0.5:  # few tiles
            return Sizes(size(2), size(4), 1, size(10), keys)
        return Sizes(size(8), size(7), 1, size(20) if dice.random() < 0.9 else 2**30, keys)

    @staticmethod
    def in_python(modules: dict[str, ModuleType], problem: Problem, sizes: Sizes) -> str:
        module = modules["_attention"]
        names = problem.dtype, problem.out_dtype
        dtype, out = (getattr(torch, DTYPES[name].torch) for name in names)
        key = dtype, problem.head_dim, problem.head_dim_v, problem.mask, out
        key = (*key, problem.v_layout or "", problem.scale_rows or 0)
        if len(next(iter(module.ROWS))) == 5:  # a table of 16 bits alone has no more
            key = key[:5]
        heads = sizes.heads, sizes.kv_heads
        slug = module._picked(key, sizes.batch, *heads, sizes.seqlen_q, sizes.seqlen_k)
        return str(slug)


class Decoding:
    """All that fagen.attention_decode derives for some problems, and what a search has found."""

    own = (
        "dec_fp16_d128_causal_r8n64",
        "dec_fp16_d128_full_r8n64",
        "dec_bf16_d256_causal_r8n64",
        "dec_bf16_d64v32_full_r8n128",
        "dec_bf16_d64v32_causal_r8n128",
    )
    tabled = ("dec_fp16_d128_causal_r8n64_s4", "dec_fp16_d128_causal_r16n128_c64")
    searched = (
        Row("NVIDIA H200", tabled[0], group_rows=8, rows_to=500),
        Row("NVIDIA H200", "dec_fp16_d128_causal_r8n64_s3", group_rows=8),  # in no folder
        Row("NVIDIA H200", tabled[1], group_rows=16),
    )
    draws, refused, most = 150, ({"head_dim": 8},), 0.7
    functions = (DECODE,)
    problem_of = staticmethod(Problem.searched)

    @classmethod
    @cache
    def schedules(cls) -> list[Any]:
        kind, own = registry.kind(DECODE), all_of(*cls.own)
        steps = [step.derive() for schedule in own for step in kind.steps(schedule)]
        return [*{schedule.slug: schedule for schedule in steps}.values()]

    @staticmethod
    def sizes(dice: random.Random) -> Sizes:
        """Sizes of calls, many at the ends of rows."""
        kv_heads = dice.choice((1, 2, 3, 4, 5, 7, 8, 9, 16, 64))
        group = dice.choice((1, 2, 3, 4, 5, 8, 16, 17))
        queries = dice.choice((1, 1, 1, 2, 3, 4, 8, 9, 40))
        batch = dice.choice((1, 2, 8, int(2 ** dice.uniform(0, 9))))
        if dice.random() < 0.5:  # about where chunks are dealt in runs
            batch = max(1, dice.choice((198, 396)) // kv_heads + dice.randint(-1, 1))
        return Sizes(batch, kv_heads * group, kv_heads, queries, dice.randint(1, 10_000))

    @staticmethod
    def call(module: ModuleType, problem: Problem, sizes: Sizes, **more: Any) -> Any:
        """What a call of tensors without numbers comes to: an op's name and arguments."""
        q, k, v = empty(
            problem,
            (sizes.batch, sizes.seqlen_q, sizes.heads, problem.head_dim),
            (sizes.batch, sizes.seqlen_k, sizes.kv_heads, problem.head_dim),
            (sizes.batch, sizes.seqlen_k, sizes.kv_heads, problem.head_dim_v),
        )
        return module.attention_decode(q, k, v, causal=problem.mask == "causal", **more)

    @classmethod
    def in_python(cls, modules: dict[str, ModuleType], problem: Problem, sizes: Sizes) -> str:
        return str(cls.call(modules["_decode"], problem, sizes, return_lse=True)[0])


class Packed:
    """All of varlen sequences that are committed, others beside them, and O of e4m3 in fp16."""

    own = tuple(
        path.stem
        for path in registry.schedules("forward")
        if "_varlen" in path.stem and "_sink" not in path.stem
    )
    others = (
        "fwd_fp16_d64_causal_m128n64_varlen",
        "fwd_e4m3_d64_full_m64n64_varlen",
        "fwd_bf16_d96v64_full_m128n64_varlen",  # alone for its problem
    )
    gradients = (
        "bwd_fp16_d64_causal_m64n64_varlen",
        "bwd_fp16_d64_causal_m128n128_varlen_underdp",
        "bwd_bf16_d96v64_full_m64n64_varlen_det",
    )
    tabled = others[:2]
    searched = tuple(
        Row("NVIDIA H200", slug) for slug in (*tabled, "fwd_bf16_d128_causal_m128n64_varlen")
    )
    refused = ({"head_dim": 8}, {"mask": 9}, {"dtype": 9}, {"scale_rows": 64})
    draws, most = 3, 0.0
    functions = VARLEN[:2]
    problem_of = staticmethod(Problem.of)

    @classmethod
    @cache
    def schedules(cls) -> list[Any]:
        fp8 = all_of(*(slug for slug in (*cls.own, *cls.others) if "e4m3" in slug))
        return all_of(*cls.others, *cls.own) + [schedule.but(out_dtype="fp16") for schedule in fp8]

    @staticmethod
    def sizes(dice: random.Random) -> Sizes:
        return Sizes(*(dice.choice((0, 1, 9, 2**30)) for _ in range(5)))

    @staticmethod
    def call(module: ModuleType, problem: Problem, **more: Any) -> Any:
        """What a call of tensors without numbers comes to: an op's name and arguments."""
        dims = problem.head_dim, problem.head_dim, problem.head_dim_v
        q, k, v = empty(problem, *((9, h, d) for h, d in zip((4, 2, 2), dims, strict=True)))
        at = torch.empty(3, dtype=torch.int32, device="meta")
        return module.attention_varlen(q, k, v, at, causal=problem.mask == "causal", **more)

    @classmethod
    def in_python(cls, modules: dict[str, ModuleType], problem: Problem, sizes: Sizes) -> str:
        more: dict[str, Any] = {}
        if DTYPES[problem.dtype].fp8:
            out = OUT_DTYPES[problem.out_dtype or ""].torch
            more = {"out_dtype": getattr(torch, out), "v_descale": torch.ones(())}
        return str(cls.call(modules["_varlen"], problem, return_lse=True, **more)[0])


@pytest.mark.parametrize(
    ("case", "searched"),
    [(Attending, False), (Decoding, False), (Decoding, True), (Packed, False), (Packed, True)],
)
def test_c_and_python_choose_as_fagen_does(
    case: Any, searched: bool, tmp_path: Path, modules_of: Modules, users_table: Callable[..., None]
) -> None:
    schedules, tabled = case.schedules(), ()
    if searched:  # of the table's kernels one is not in the folder
        users_table(case.searched)
        tabled, own_slugs = case.tabled, {schedule.slug for schedule in schedules}
        schedules = schedules + all_of(*(slug for slug in tabled if slug not in own_slugs))
    compiled, modules = dispatcher(schedules, tmp_path), modules_of(schedules)
    assert {*compiled.tables} == {*case.functions}
    slugs, dice, chosen = {schedule.slug for schedule in schedules}, random.Random(17), set()
    for problem in dict.fromkeys(map(case.problem_of, schedules)):
        kind = case.functions[DTYPES[problem.dtype].fp8 if case is Packed else 0]
        usual = replace(problem, out_dtype=DTYPES[problem.dtype].out)
        for sizes in (case.sizes(dice) for _ in range(case.draws)):
            slug, expected = compiled.slug(problem, sizes, kind), fagens(problem, sizes)
            assert slug == expected or (slug and expected not in slugs), (problem, sizes)
            assert slug == compiled.row(problem, sizes, kind)
            assert slug == case.in_python(modules, problem, sizes)
            as_usual = compiled.slug(problem, sizes, kind, out_dtype=0)
            assert as_usual == compiled.slug(usual, sizes, kind)
            chosen.add(slug)
        for fields in case.refused:
            assert compiled.slug(problem, sizes, kind, **fields) == ""
    assert {*tabled} <= chosen <= slugs and len(chosen) > len(schedules) * case.most
    assert case is not Attending or len([slug for slug in chosen if "_split" in slug]) > 20


# ---- kernels for few queries or tiles -----------------------------------------------------------

PLAIN = "fwd_fp16_d128_causal_m128n128"
SPLIT_4, SPLIT_16 = f"{PLAIN}_split4", f"{PLAIN}_split16"
FILL = f"{PLAIN}_split16_fill"
FEW = "dec_fp16_d128_causal_r8n64"
# What a user's table has, for fewer keys than any such row of fagen's own.
NARROW = (
    Row("NVIDIA H200", FEW, 100, queries_to=2),
    Row("NVIDIA H200", SPLIT_16, 100, 900, queries_to=4),
    Row("NVIDIA H200", SPLIT_4, 300, 800, tiles_to=8),
)
MANY = 2**31 - 1


D16 = torch.float16, 128, 128, "causal"


@pytest.mark.parametrize(
    ("slugs", "picked", "calls"),
    [
        (
            (PLAIN, SPLIT_4, SPLIT_16, FILL),
            lambda ours, q, k: ours["_attention"]._picked((*D16, D16[0]), q[0], 4, 4, q[1], k[1]),
            (
                (4, 500, (), SPLIT_16),
                (4, 500, (0,), SPLIT_16),  # which is for any number of tiles
                (5, 500, (), SPLIT_4),
                (5, 500, (0,), PLAIN),
                (4, 500, (1,), PLAIN),
                (4, 500, (3,), 4),  # as of OPEN_KEYS keys
                (5, 200, (3,), 5),
                (5, 500, (0, 1, 3), PLAIN),
            ),
        ),
        (
            (FEW, "dec_fp16_d128_causal_r16n64", "dec_fp16_d128_causal_r64n64", f"{FEW}_streamk"),
            lambda ours, q, k: ours["_decode"]._picked(D16, q[0], k[1], 8, q[1]),
            (
                (3, 32, (), "dec_fp16_d128_causal_r16n64"),
                (2, 32, (), FEW),
                (2, 32, (0,), f"{FEW}_streamk"),  # many tiles
                (3, 32, (0,), "dec_fp16_d128_causal_r16n64"),
                (3, 32, (1,), "dec_fp16_d128_causal_r64n64"),
                (3, 32, (0, 1), "dec_fp16_d128_causal_r64n64"),
            ),
        ),
    ],
    ids=["attention", "decode"],
)
def test_sizes_that_are_left_open_count_as_many(
    slugs: tuple[str, ...],
    picked: Callable[..., str],
    calls: tuple[Any, ...],
    fresh_dynamo: None,
    modules_of: Modules,
    users_table: Callable[..., None],
) -> None:
    users_table(NARROW)
    modules = modules_of(all_of(*slugs))
    problem = Problem.of(registry.from_slug(slugs[0]))

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        return q + 1, picked(modules, q.shape, k.shape)

    for queries, keys, opened, slug in calls:
        if isinstance(slug, int):
            slug = fagens(problem, Sizes(2, 4, 1, slug, OPEN_KEYS))
        torch.compiler.reset()
        q, k = torch.zeros(2, queries), torch.zeros(2, keys)
        for dim in opened:
            torch._dynamo.mark_dynamic(*((q, dim) if dim < 2 else (k, dim - 2)))
        compiled = torch.compile(call, fullgraph=True, dynamic=False, backend="eager")
        assert compiled(q, k)[1] == slug, (queries, keys, opened)


# ---- of a few kernels, in C ---------------------------------------------------------------------

ONE = "dec_fp16_d128_causal_r16n64_c8"
R8, R24 = "dec_fp16_d128_causal_r8n64", "dec_fp16_d128_causal_r24n64"
FORWARDS = (PLAIN, "fwd_bf16_d64_full_m128n128")
BACKWARDS = (
    "bwd_bf16_d64_full_m64n64",
    "bwd_bf16_d64_full_m128n128",
    "bwd_fp16_d120v40_full_m64n128",
)
DENSE = (*FORWARDS, *BACKWARDS)
BESIDE = ("bwd_fp16_d64_causal_m128n128", "fwd_fp16_d64_causal_m128n128")
VARLENS = (Packed.own[0], *Packed.gradients, *BESIDE)
TWO = tuple(f"fwd_bf16_d96_full_{tile}_varlen" for tile in ("m64n64", "m128n64"))
ANY = Sizes(1, 8, 8, 1, 9)
EVERY = (Sizes(0, 0, 0, 0, 0), Sizes(1, 1, 1, 1, 1), Sizes(8, 16, 2, 2**20, 2**20), ANY)
WRONG = (Sizes(1, 3, 2, 1, 1), Sizes(1, 1, 0, 1, 1))  # which a kernel refuses itself
# 64 chunks for want of 16, of which 8 are too few; chunks go before how they are dealt
NEAREST = {
    Sizes(1, 8, 8, 1, 100): 1,
    Sizes(1, 8, 1, 1, 100): 1,
    Sizes(1, 9, 1, 1, 100): 3,
    Sizes(1, 64, 4, 1, 100): 0,
    Sizes(1000, 64, 4, 1, 100): 0,
    Sizes(1, 25, 1, 1, 100): 3,  # in several tiles
    Sizes(1, 1000, 8, 1, 100): 0,
}
# By the rows of NARROW, in folders that have these kernels of it.
OF_NARROW = {
    (PLAIN, SPLIT_4, SPLIT_16, FEW): {
        Sizes(1, 1, 1, 1, 100): 2,  # no kernel of attention's own is before it
        Sizes(1, 1, 1, 4, 99): 0,
        Sizes(MANY, MANY, 1, 4, 900): 2,
        Sizes(1, 1, 1, 4, 901): 0,
        Sizes(1, 1, 1, 5, 300): 1,
        Sizes(2, 4, 1, 128, 800): 1,
        Sizes(2, 4, 1, 129, 800): 0,
        Sizes(3, 3, 1, 5, 800): 0,
        Sizes(1, 8, 1, 5, 801): 0,
        Sizes(MANY, MANY, 1, MANY, 500): 0,
        Sizes(0, 8, 1, 500, 500): 1,
    },
    (SPLIT_4, PLAIN): {
        Sizes(1, 1, 1, 1, 300): 0,
        Sizes(1, 1, 1, 1, 100): 1,
        Sizes(3, 3, 1, 1, 300): 1,
    },
    (PLAIN, SPLIT_16): {Sizes(1, 1, 1, 5, 300): 0, Sizes(9, 9, 1, 3, 300): 1},
    (SPLIT_4,): {Sizes(1, 1, 1, 1, 9): 0, Sizes(9, 9, 1, 999, 999): 0},
}
# Kernels of a folder; what chooses; the place of a kernel that serves these sizes, or places by
# sizes; fields of its problem with which it serves them too, and with which none does.
OF_FOLDERS: list[Any] = [
    (("fwd_fp16_d136_full_m128n64",), FORWARD, 0, (*EVERY, Sizes(1, 1, 1, 1, 2**20)), [{}], []),
    # gradients by dtype, head dims and mask: the first of two, an open dtype and dim as usual
    (DENSE, "backward", 2, EVERY, [{}, {"out_dtype": 0}, {"head_dim_v": 0}],
     [{"dtype": 1}, {"mask": 2}, {"head_dim_v": 32}, {"out_dtype": 1}]),
    (DENSE, "backward", 4, EVERY, [{}], [{"head_dim_v": 0}]),
    (DENSE, FORWARD, 1, (EVERY[0], ANY), [{}], []),
    ((BACKWARDS[1],), "backward", 0, EVERY, [{}], []),
    ((ONE,), DECODE, 0, (*EVERY[1:2], *WRONG, ANY), [{}, {"mask": 1}],
     [{"dtype": 2}, {"head_dim_v": 64}, {"out_dtype": 2}, {"scale_rows": 64}]),
    ((ONE,), DECODE, 0, (EVERY[0], Sizes(1, 8, 8, 2, 9)), [{}], [{"mask": 1}]),  # of one query
    ((f"{R24}_c32", f"{R8}_c64", f"{R8}_c8", f"{R24}_c64_streamk"), DECODE, 0, NEAREST, [{}], []),
    # what takes a reference is called by its own name
    ((f"{R8}_fixed",), "", 0, (), [], []),
    ((f"{R8}_fixed", ONE), DECODE, 1, (ANY,), [{}], []),
    # varlen sequences, where nothing else tells; their gradients are not those of one length
    (TWO, "varlen", 0, EVERY, [{}], []),
    (TWO[::-1], "varlen", 0, EVERY, [{}], []),
    *((VARLENS, "backward_varlen", n, EVERY, [{}],
       [{"dtype": 3}, {"mask": 9}, {"head_dim_v": 32}]) for n in (1, 3)),
    (VARLENS, "backward", 4, EVERY, [{}], []),
    (VARLENS, FORWARD, 5, (EVERY[0], ANY), [{}], []),
    *((slugs, FORWARD, 0, calls, [{}], []) for slugs, calls in OF_NARROW.items()),
]  # fmt: skip


@pytest.mark.parametrize(("slugs", "kind", "place", "calls", "served", "refused"), OF_FOLDERS)
def test_a_call_gets_what_the_folder_has_for_its_problem(
    slugs: tuple[str, ...],
    kind: str,
    place: int,
    calls: Any,
    served: list[dict[str, int]],
    refused: list[dict[str, int]],
    tmp_path: Path,
    modules_of: Modules,
    users_table: Callable[..., None],
) -> None:
    schedules = all_of(*slugs)
    if slugs in OF_NARROW:
        users_table(NARROW)
        modules = modules_of(schedules)
    compiled, problem = dispatcher(schedules, tmp_path), Problem.of(schedules[place])
    for sizes in calls:
        slug = slugs[calls[sizes] if isinstance(calls, dict) else place]
        for fields in served:
            assert compiled.slug(problem, sizes, kind, **fields) == slug, (sizes, fields)
        if slugs in OF_NARROW:
            assert slug == Attending.in_python(modules, problem, sizes), sizes
            assert slug == compiled.row(problem, sizes), sizes
    for fields in refused:
        assert compiled.slug(problem, sizes, kind, **fields) == "", fields
    kinds = {schedule.kind for schedule in schedules if not schedule.slug.endswith("_fixed")}
    for name in (FORWARD, "backward", DECODE):
        exists = name in kinds and not all("_varlen" in s for s in slugs)
        assert hasattr(compiled.library, f"demo_{name}") == exists, name
    assert not hasattr(compiled.library, "demo_varlen_fp8")


def test_what_is_not_in_the_folder_falls_to_what_is_but_never_a_kernel_for_accuracy(
    tmp_path: Path,
) -> None:
    schedules = all_of(PLAIN)
    compiled, problem = dispatcher(schedules, tmp_path), Problem.of(schedules[0])
    for keys in (1, 1000, 20_000, OPEN_KEYS):
        assert compiled.slug(problem, Sizes(1, 1, 1, 1, keys)) == PLAIN
    sizes = Sizes(1, 1, 1, 1, 2**20)
    assert serve(problem, sizes, "").schedule.slug != PLAIN
    assert compiled.slug(problem, sizes) == ""
    for message in (compiled.library.demo_message, compiled.library.demo_forward_message):
        assert b"no kernel of demo" in message(100)
        assert message(-1) == message(16) == b"unknown status"
        messages = [message(status) for status in range(16)]
        assert all(messages) and len(set(messages)) == 16
    # of the function that chooses, with the names of its own arguments
    assert b"kv_heads" in compiled.library.demo_forward_message(3) and b"tiles" in messages[4]


def test_a_row_of_varlen_sequences_has_no_bounds() -> None:
    schedules = [s for s in Packed.schedules() if not DTYPES[s.values()["dtype"]].fp8]
    table = table_of(schedules, "varlen")
    assert not table.bounds and not table.refused and table.kind == "varlen"
    assert len(table.rows) == len({*map(Problem.of, schedules)})
    table = table_of(all_of(*Packed.gradients), "varlen")
    assert table.kind == "backward_varlen" and [row.kernel for row in table.rows] == [0, 2]


def test_steps_are_what_calls_without_a_table_derive() -> None:
    dice = random.Random(7)
    for schedule in all_of(*Decoding.own, "dec_fp16_d192v128_full_r8n64"):
        named = {key: schedule.values()[key] for key in ("dtype", "head_dim", "head_dim_v", "mask")}
        for sizes in (Decoding.sizes(dice) for _ in range(40)):
            rows, kv_heads = sizes.seqlen_q * sizes.heads // sizes.kv_heads, sizes.kv_heads
            tile = tile_for(named["head_dim"], rows, kv_heads, sizes.batch, alike=False)
            first, *_ = derived(**named, **tile._asdict())
            assert sized(schedule.slug, sizes) == first, sizes


# ---- a call in Python ---------------------------------------------------------------------------


def test_a_call_in_16_bits(modules_of: Modules) -> None:
    module = modules_of(all_of(PLAIN))["_attention"]
    q = torch.empty(2, 3, 4, 128, dtype=torch.float16, device="meta")

    def called(keys: int, **more: Any) -> Any:
        k = torch.empty(2, keys, 2, 128, dtype=torch.float16, device="meta")
        return module.attention(q, k, k, **more)

    slug, args, named = called(OPEN_KEYS, causal=True)
    assert slug == f"{PLAIN}_without_lse" and args[3] == 128**-0.5 and not named
    slug, args, named = called(1, causal=True, return_lse=True, scale=2.0)
    assert slug == PLAIN and args[3] == 2.0 and args[1].shape[1] == 1
    for wrong, error, words in (
        # it would be there for its accuracy
        (lambda: called(OPEN_KEYS + 1, causal=True), ValueError, "has no kernel for so many keys"),
        (lambda: called(1), ValueError, r"demo has no kernel for torch\.float16, 128, 128, full"),
        (lambda: module.attention(q[0], q, q), ValueError, "q has 3 dimensions"),
        (lambda: called(1, q_descale=q), TypeError, "q_descale"),  # no kernel here has any
        *(
            (
                lambda n=n, w=w: called(1, **{"causal": True, n: w}),
                TypeError,
                f"{n} is .*; it must be T",
            )
            for n in ("causal", "return_lse")
            for w in ("False", 1.0, 2, None, [], torch.tensor(1))
        ),
    ):
        with pytest.raises(error, match=words):
            wrong()
    for true in (1, numpy.True_):
        assert called(1, causal=true, return_lse=true)[0] == PLAIN


def test_a_call_in_e4m3(modules_of: Modules) -> None:
    slugs = ["fwd_e4m3_d128_full_m128n128_vrows_sblock", "fwd_e4m3_d64_full_m256n64_s3"]
    module = modules_of(all_of(*slugs))["_attention"]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = (empty(2, length, 4, 128, dtype=torch.float8_e4m3fn) for length in (100, 300))
    scales = {"q_descale": empty(2, 4, 2), "k_descale": empty(2, 4, 5), "v_descale": empty()}
    slug, args, named = module.attention(q, k, k, **scales)
    assert slug == f"{slugs[0]}_without_lse" and len(args) == 4
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    assert shapes == {"q_descale": (2, 4, 2), "k_descale": (2, 4, 5), "v_descale": (1, 1, 1)}
    for more in ({}, scales | {"out_dtype": torch.float16}):  # of scales by head; in fp16
        with pytest.raises(ValueError, match="demo has no kernel"):
            module.attention(q, k, k, **more)
    assert module.attention(q, k, k, **scales, scale_rows=64)[0] == slug

    q, k = q[..., :64], k[..., :64]
    v = empty(2, 4, 64, 304, dtype=torch.float8_e4m3fn)
    more = {"q_descale": empty(2, 4), "v_layout": "columns", "v_mean": empty(2, 4, 64)}
    slug, _, named = module.attention(q, k, v, **more, return_lse=True)
    assert slug == slugs[1] and named["q_descale"].shape == (2, 4, 1)
    assert set(named) == {"q_descale", "v_mean"}


def test_a_call_that_decodes(modules_of: Modules) -> None:
    schedules = all_of(ONE)
    module, problem = modules_of(schedules)["_decode"], Problem.of(schedules[0])
    sizes, lengths = Sizes(2, 8, 2, 3, 100), torch.zeros(2, dtype=torch.int32)
    called = Decoding.call
    slug, args, named = called(module, problem, sizes, seqused_k=lengths)
    assert slug == f"{ONE}_without_lse" and args[3] == 128**-0.5 and len(args) == 4
    assert named == {"seqused_k": lengths, "leftpad_k": None}
    slug, args, named = called(module, problem, sizes, leftpad_k=lengths, scale=2.0)
    assert args[3] == 2.0 and named["leftpad_k"] is lengths
    full = replace(problem, mask="full")
    for target, queries in ((problem, 3), (full, 1)):
        size = replace(sizes, seqlen_q=queries)
        assert called(module, target, size, return_lse=True)[0] == ONE
    kernels = "torch.float16, 128, 128, full of one query; torch.float16, 128, 128, causal"
    lacking = (
        f"demo has no kernel that decodes torch.float16, 128, 128, full; it has those for {kernels}"
    )
    for wrong, words in (
        (lambda: called(module, full, sizes), f"^{lacking}$"),
        (lambda: called(module, replace(problem, dtype="bf16"), sizes), "torch.bfloat16, 128, 128"),
        (lambda: called(module, problem, Sizes(1, 3, 2, 1, 9)), "a multiple of k's 2"),
        (lambda: called(module, problem, Sizes(1, 3, 0, 1, 9)), "a multiple of k's 0"),
        (lambda: module.attention_decode(*[lengths] * 3), "q has 1 dimensions; it must have 4"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    with pytest.raises(TypeError, match="reference"):
        called(module, problem, sizes, reference=lengths)


def test_a_call_of_varlen_sequences(modules_of: Modules) -> None:
    (half,) = all_of(Packed.tabled[0])
    module, problem = modules_of([half])["_varlen"], Problem.of(half)
    called, used = Packed.call, torch.empty(2, dtype=torch.int32)
    slug, args, named = called(module, problem, seqused_k=used, max_seqlen_q=9)
    assert slug == f"{half.slug}_without_lse" and args[5] == 64**-0.5 and args[6] is used
    assert args[3] is args[4] and not named
    slug, args, named = called(module, problem, return_lse=True, scale=2.0)
    assert slug == half.slug and args[5] == 2.0 and args[6] is None
    kernels = "it has those for torch.float16, 64, 64, causal, torch.float16"
    for wrong, words in (
        ({"mask": "full"}, f"demo has no kernel of varlen sequences for .*64, full.*{kernels}"),
        ({"dtype": "bf16"}, "for torch.bfloat16, 64, 64, causal, torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            called(module, replace(problem, **wrong))
    q = torch.empty(2, 9, 4, 64)
    with pytest.raises(ValueError, match=r"q has 4 dimensions; it must have 3: \(total, heads,"):
        module.attention_varlen(q, q, q, used)
    with pytest.raises(TypeError, match="q_descale"):
        called(module, problem, q_descale=used)


def test_a_call_of_varlen_sequences_in_e4m3(modules_of: Modules) -> None:
    half, fp8 = all_of(*Packed.tabled)
    module, problem = modules_of([fp8, half])["_varlen"], Problem.of(fp8)
    by_head, fp16 = torch.ones(2, 4), torch.float16
    slug, _, named = Packed.call(module, problem, q_descale=by_head, v_descale=torch.ones(()))
    assert slug == f"{fp8.slug}_without_lse"
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    assert shapes == {"q_descale": (2, 4, 1), "v_descale": (1, 1, 1)}
    with pytest.raises(ValueError, match=r"float8_e4m3fn, 64, 64, full, torch\.float16; it has"):
        Packed.call(module, problem, out_dtype=fp16)
    words = "v_mean, out_dtype: for float8_e4m3fn alone, and q is torch.float16"
    with pytest.raises(ValueError, match=words):
        Packed.call(module, Problem.of(half), v_mean=by_head, out_dtype=fp16)
