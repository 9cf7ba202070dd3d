"""A vendored folder of plain source: its texts, as a C and a C++ compiler take them."""

import ctypes
import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fagen import registry, vendor
from fagen.dispatch.rows import MOST, OPEN_KEYS, first_fit, measures_of
from fagen.dispatch.select import flattened, serve
from fagen.dispatch.tables import table_at
from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.render import Source, formatted, written
from fagen.signature import Signature
from fagen.toolchain import find_cutlass, find_gxx
from fagen.vendor import closure, source
from fagen.vendor.contents import Folder, Kernel
from fagen.vendor.table import in_c, table_of
from fagen.vocab import DTYPES, FORWARD
from tests.vendor_helpers import SERVED, first_of, narrow_rows

WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
C = ["gcc", "-std=c99", *WARNINGS]
CPP = ["g++", "-std=c++17", *WARNINGS, "-x", "c++"]
KERNELS = [
    "fwd_fp16_d128_causal_m128n128",
    "fwd_e4m3_d64_full_m256n64_s3",
    "quant_fp16_d128_rot_shead",
    "comb_fp32_d128_obf16_varlen",
    "bwd_fp16_d128_causal_m64n128",
    "dec_fp16_d128_causal_r8n64",
]


@cache
def texts(*slugs: str, with_cutlass: bool = False) -> dict[str, str]:
    """The files of a folder called demo."""
    schedules = [registry.from_slug(slug) for slug in slugs]
    asked = vendor.asked("demo", schedules, with_cutlass=with_cutlass)
    return source.texts(vendor.folder_of(asked))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, text in texts(*KERNELS).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def compiled(words: list[str], *more: object) -> None:
    answer = run([*words, *map(str, more)])
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("compiler", [C, CPP], ids=["C", "C++"])
def test_header_and_dispatcher_are_c_and_cpp(folder, compiler):
    compiled(compiler, "-fsyntax-only", "-I", folder / "include", folder / "src/demo.c")


def interface(kernel: str) -> str:
    """What a kernel's source says of itself: the part that any C++ compiler takes."""
    return kernel[kernel.index("// ---- The C interface") : kernel.index("namespace fagen_")]


def test_header_and_kernels_say_the_same_in_one_translation_unit(folder):
    parts = [interface(texts(*KERNELS)[f"src/{slug}.cu"]) for slug in KERNELS]
    header = '#include "demo.h"\n'
    for name, order in {"first": [header, *parts], "last": [*parts, header]}.items():
        (folder / f"{name}.cpp").write_text("#include <cstdint>\n" + "\n".join(order))
        compiled(CPP, "-fsyntax-only", "-I", folder / "include", folder / f"{name}.cpp")
    # each struct is the header's, size and all, whoever declares it first
    sizes = {}
    for name, text in {"header": header, "kernels": "\n".join(parts)}.items():
        structs = sorted(
            set(re.findall(r"struct (Fagen\w+) \{", text + texts(*KERNELS)["include/demo.h"]))
        )
        said = "".join(
            f'  std::printf("%zu %zu\\n", sizeof({s}), alignof({s}));\n' for s in structs
        )
        (folder / f"{name}.cpp").write_text(
            f"#include <cstdint>\n#include <cstdio>\n{text}\nint main() {{\n{said}}}\n"
        )
        compiled(CPP, "-I", folder / "include", folder / f"{name}.cpp", "-o", folder / name)
        sizes[name] = run([folder / name]).stdout
    assert sizes["header"] == sizes["kernels"] and sizes["header"].count("\n") == 6


def test_kernels_of_another_version_are_refused_by_the_compiler(folder):
    (folder / "old.cpp").write_text('#define FAGEN_FORWARD_ARGS 1\n#include "demo.h"\n')
    answer = run([*CPP, "-fsyntax-only", "-I", folder / "include", folder / "old.cpp"])
    assert "kernels of kind forward of two versions of fagen" in answer.stderr


def test_the_headers_statuses_are_the_kernels():
    found = texts(*KERNELS)
    header = re.search(
        r"enum \{\s*(DEMO_OK = 0.*?),\s*DEMO_NO_KERNEL", found["include/demo.h"], re.S
    )
    said = [word.split(" = ") for word in re.split(r",\s*", header[1])]
    assert [int(number) for _, number in said] == [*range(len(said))]
    named = [name for name, _ in said]
    for slug in KERNELS:
        own = re.search(r"enum Status \{(.*?)\}", found[f"src/{slug}.cu"], re.S)
        words = [word.strip() for word in own[1].split(",") if word.strip()]
        assert named == ["DEMO" + re.sub(r"([A-Z])", r"_\1", w[1:]).upper() for w in words]


def test_only_c_functions_are_to_be_seen():
    found = texts(*KERNELS)
    exported = re.findall(r"^    (\w+);$", found["src/demo.map"], re.M)
    declared = re.findall(r"^[a-z][\w ]*\*? ?\b(\w+)\(", found["include/demo.h"], re.M)
    assert sorted(exported) == sorted(declared) and len(exported) == 13 + 4 * len(KERNELS)
    assert "local:\n    *;" in found["src/demo.map"]


# ---- the dispatcher -----------------------------------------------------------------------------


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


def _assigned(signature: Signature) -> str:
    """C that takes the sizes of a call, in the order in which they are declared."""
    names = (size.name for size in signature.sizes)
    return " ".join(f"args.{name} = (int)sizes[{place}];" for place, name in enumerate(names))


def dispatcher(schedules: list[Any], place: Path) -> Any:
    """The dispatcher of some schedules, compiled beside kernels that do nothing."""
    nothing = Source("", "", "", "", "")
    kernels = tuple(Kernel("", s, registry.plan(s), nothing, None) for s in schedules)
    folder = Folder("demo", kernels, False, "source")
    (place / "demo.h").write_text(written("vendor/header.h.j2", folder=folder))
    (place / "demo.c").write_text(written("vendor/dispatch.c.j2", folder=folder))
    stubs = "".join(
        f"int fagen_{k.slug}(const struct {k.signature.struct}* a, void* s) "
        f"{{ (void)a; (void)s; return {number}; }}\n"
        f"int64_t fagen_{k.slug}_workspace(const struct {k.signature.struct}* a) "
        "{ return a ? 4 : -1; }\n"
        f'const char* fagen_{k.slug}_message(int s) {{ (void)s; return ""; }}\n'
        f"const struct FagenKernelInfo* fagen_{k.slug}_info(void) {{ return 0; }}\n"
        for number, k in enumerate(kernels, 200)
    )
    calls = "".join(
        CALLS.replace("@kind@", of.kind)
        .replace("@pick@", of.table.pick)
        .replace("@struct@", of.table.struct)
        .replace("@args@", of.signature.struct)
        .replace("@version@", of.signature.guard)
        .replace("@sizes@", _assigned(of.signature))
        for of in folder.dispatchers
    )
    (place / "stubs.c").write_text(f'#include "demo.h"\n#include <string.h>\n{stubs}{calls}')
    words = ["gcc", "-std=c99", "-Wall", "-Werror", "-shared", "-fPIC", "-I", str(place)]
    compiled(words, place / "demo.c", place / "stubs.c", "-o", place / "demo.so")
    library = ctypes.CDLL(str(place / "demo.so"))
    library.demo_message.restype = ctypes.c_char_p
    for kind in (of.kind for of in folder.dispatchers):
        call = getattr(library, f"call_{kind}")
        call.restype, call.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_void_p]
    return library


def asked_of(
    library: Any, problem: Problem, sizes: Sizes, kind: str = FORWARD, **changes: int
) -> str:
    fields = (ctypes.c_int32 * 7)(*(in_c(problem) | changes).values())
    call = getattr(library, f"call_{kind}")
    return call(fields, (ctypes.c_int64 * 5)(*vars(sizes).values())).decode()


def drawn(randomness: random.Random, ends: list[int]) -> Sizes:
    """Sizes of all magnitudes, many at the very ends of rows."""

    def size(most: float) -> int:
        return int(2 ** randomness.uniform(0, most))

    keys = randomness.choice(ends) + randomness.randint(-1, 1) if ends else size(22)
    keys = max(1, min(keys, 2**30)) if randomness.random() < 0.5 else size(22)
    if randomness.random() < 0.5:  # few tiles
        return Sizes(size(2), size(4), 1, size(10), keys)
    return Sizes(size(8), size(7), 1, size(20) if randomness.random() < 0.9 else 2**30, keys)


def ends_of_the_table() -> list[int]:
    """Numbers of keys where rows of fagen's own table end or begin."""
    rows = table_at(locate("schedules") / "dispatch.toml")
    return [int(end) for row in rows for end in (row.keys_from, row.keys_to) if 0 < end < MOST]


def of_the_table() -> list[Any]:
    """All schedules of fagen's own table that are attention's own, also with O in fp16."""
    table = table_at(locate("schedules") / "dispatch.toml")
    schedules = [registry.from_slug(slug) for slug in dict.fromkeys(row.slug for row in table)]
    schedules = [schedule for schedule in schedules if schedule.kind == FORWARD]
    other = [s.but(out_dtype="fp16") for s in schedules if DTYPES[s.values()["dtype"]].fp8]
    return [*schedules, *other]


def chosen_by_fagen(problem: Problem, sizes: Sizes) -> str:
    """The slug that fagen.attention takes, or would without kernels of decoding."""
    served = serve(problem, sizes, "").schedule
    if served.kind == FORWARD:
        return served.slug
    own = [
        (row.slug, row.limits)
        for row in flattened(problem, "")
        if not row.slug or registry.kind_of_slug(row.slug).name == FORWARD
    ]
    return str(first_fit(own, measures_of(sizes)))


def test_the_dispatcher_chooses_as_fagen_does(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    schedules = of_the_table()
    library = dispatcher(schedules, tmp_path)
    assert library.refused_forward() == 1
    table = table_of(schedules)
    randomness, ends = random.Random(17), ends_of_the_table()
    chosen = set()
    for problem in dict.fromkeys(map(Problem.of, schedules)):
        for _ in range(16):
            sizes = drawn(randomness, ends)
            slug = asked_of(library, problem, sizes)
            assert slug == chosen_by_fagen(problem, sizes), (problem, sizes)
            assert slug == first_of(table, problem, sizes)
            chosen.add(slug)
            usual = problem.out_dtype == DTYPES[problem.dtype].out
            assert asked_of(library, problem, sizes, out_dtype=0) == (
                slug if usual else asked_of(library, usual_of(problem), sizes)
            )
        assert (
            asked_of(library, problem, drawn(randomness, []), head_dim=problem.head_dim + 8) == ""
        )
        assert asked_of(library, problem, drawn(randomness, []), mask=9) == ""
    assert len(chosen) > len(schedules) * 0.85
    assert len([slug for slug in chosen if "_split" in slug]) > 20


@pytest.mark.parametrize(("slugs", "calls"), SERVED)
def test_few_queries_or_tiles_go_to_what_is_there_for_them(tmp_path, monkeypatch, slugs, calls):
    narrow_rows(tmp_path, monkeypatch)
    schedules = [registry.from_slug(slug) for slug in slugs]
    library, problem = dispatcher(schedules, tmp_path), Problem.of(schedules[0])
    table = table_of([schedule for schedule in schedules if schedule.kind == FORWARD])
    for sizes, slug in calls.items():
        assert asked_of(library, problem, sizes) == slug, sizes
        assert first_of(table, problem, sizes) == slug


def usual_of(problem: Problem) -> Problem:
    return replace(problem, out_dtype=DTYPES[problem.dtype].out)


def test_what_is_not_in_the_folder_falls_to_what_is_but_never_a_kernel_for_accuracy(tmp_path):
    few = [registry.from_slug("fwd_fp16_d128_causal_m128n128")]
    library = dispatcher(few, tmp_path)
    problem = Problem.of(few[0])
    for keys in (1, 1000, 20_000, OPEN_KEYS):
        assert asked_of(library, problem, Sizes(1, 1, 1, 1, keys)) == few[0].slug
    sizes = Sizes(1, 1, 1, 1, 2**20)
    assert serve(problem, sizes, "").schedule.slug != few[0].slug
    assert asked_of(library, problem, sizes) == ""
    for message in (library.demo_message, library.demo_forward_message):
        message.restype = ctypes.c_char_p
        assert b"no kernel of demo" in message(100)
        assert message(-1) == message(16) == b"unknown status"
        said = [message(status) for status in range(16)]
        assert all(said) and len(set(said)) == 16
    # of the function that chooses, with the names of its own arguments
    assert b"kv_heads" in library.demo_forward_message(3) and b"tiles" in said[4]


def test_a_problem_that_no_table_has_is_served_by_its_only_kernel(tmp_path):
    own = registry.from_slug("fwd_fp16_d136_full_m128n64")
    library = dispatcher([own], tmp_path)
    for keys in (1, 2**20):
        assert asked_of(library, Problem.of(own), Sizes(1, 1, 1, 1, keys)) == own.slug


def test_gradients_are_chosen_by_dtype_head_dims_and_mask(tmp_path):
    forwards = ("fwd_fp16_d128_causal_m128n128", "fwd_bf16_d64_full_m128n128")
    own = (
        "bwd_bf16_d64_full_m64n64",
        "bwd_bf16_d64_full_m128n128",
        "bwd_fp16_d120v40_full_m64n128",
    )
    library = dispatcher([registry.from_slug(slug) for slug in (*forwards, *own)], tmp_path)
    assert library.refused_forward() == library.refused_backward() == 1
    problem = Problem("bf16", 64, 64, "full", "bf16", "", 0)
    for sizes in (Sizes(1, 1, 1, 1, 1), Sizes(8, 16, 2, 2**20, 2**20), Sizes(0, 0, 0, 0, 0)):
        assert asked_of(library, problem, sizes, "backward") == own[0]  # the first of two
        for change in ({"out_dtype": 0}, {"head_dim_v": 0}):  # as usual, and as head_dim
            assert asked_of(library, problem, sizes, "backward", **change) == own[0]
        for change in ({"dtype": 1}, {"mask": 2}, {"head_dim_v": 32}, {"out_dtype": 1}):
            assert asked_of(library, problem, sizes, "backward", **change) == ""
    other = Problem("fp16", 120, 40, "full", "fp16", "", 0)
    assert asked_of(library, other, sizes, "backward", head_dim_v=0) == ""
    assert asked_of(library, other, Sizes(1, 1, 1, 1, 1), "backward") == own[2]
    assert asked_of(library, Problem.of(registry.from_slug(forwards[1])), sizes) == forwards[1]


def test_a_folder_of_gradients_alone_has_a_dispatcher_of_them(tmp_path):
    own = "bwd_bf16_d64_full_m128n128"
    library = dispatcher([registry.from_slug(own)], tmp_path)
    problem = Problem("bf16", 64, 64, "full", "bf16", "", 0)
    assert asked_of(library, problem, Sizes(1, 1, 1, 1, 1), "backward") == own
    assert not hasattr(library, "demo_forward")


# ---- CUTLASS ------------------------------------------------------------------------------------


def test_the_closure_is_small_and_has_all_that_it_includes():
    found = texts(KERNELS[0], with_cutlass=True)
    headers = {p: t for p, t in found.items() if p.startswith("third_party/cutlass/include/")}
    assert 30 < len(headers) < 136
    assert sum(map(len, found.values())) < 6e6
    root = "third_party/cutlass/include"
    include, _ = find_cutlass()
    for path, text in headers.items():
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M):
            if (include / name).exists():
                assert f"{root}/{name}" in headers, (path, name)
    licence = found["third_party/cutlass/LICENSE.txt"]
    assert "Redistribution and use" in licence and "NVIDIA" in licence
    assert not [p for p in texts(KERNELS[3], with_cutlass=True) if p.startswith("third_party")]


@pytest.mark.long
def test_the_closure_is_what_the_compiler_reads(tmp_path):
    include, _ = find_cutlass()
    kernel = texts(KERNELS[0])[f"src/{KERNELS[0]}.cu"]
    (tmp_path / "k.cu").write_text(kernel)
    words = ["nvcc", "-std=c++17", "-arch=sm_90a", "-M", f"-I{include}", str(tmp_path / "k.cu")]
    answer = run(words)
    assert answer.returncode == 0, answer.stderr
    read = {
        w.removeprefix(f"{include}/") for w in answer.stdout.split() if w.startswith(f"{include}/")
    }
    found = set(closure.headers([kernel]))
    assert read <= found and len(found - read) < 10


# ---- all of it ----------------------------------------------------------------------------------


def test_manifest_json_says_what_a_folder_is_made_of():
    record = json.loads(texts(*KERNELS)["manifest.json"])
    assert [kernel["slug"] for kernel in record["kernels"]] == KERNELS
    first = record["kernels"][0]
    assert first["evidence"]["card"] == "NVIDIA H200" and first["kind"] == "forward"
    made = registry.kind("forward").schedule.make(**first["schedule"])
    assert made.slug == KERNELS[0]
    assert first["source_hash"] in texts(*KERNELS)[f"src/{KERNELS[0]}.cu"]


def test_the_readme_has_every_argument_and_flag():
    found = texts(*KERNELS)["README.md"]
    for slug in KERNELS:
        signature = registry.plan_of(slug).signature
        section = found.partition(f"### `fagen_{slug}`")[2].partition("\n### ")[0]
        for name in [t.name for t in signature.tensors if t.present] + [*signature.most]:
            assert f"| `{name}` |" in section
    assert "--expt-relaxed-constexpr" in found and "-lineinfo" not in found
    assert "--expt-relaxed-constexpr" in texts(*KERNELS)["CMakeLists.txt"]


def test_the_test_program_is_cpp_for_every_kind(folder):
    find_gxx()
    cuda = Path("/usr/local/cuda/include")
    if not cuda.exists():
        pytest.skip("the CUDA headers are not there")
    words = [*CPP[:-2], "-fsyntax-only", "-I", folder / "include", "-isystem", cuda]
    compiled([str(word) for word in words], folder / "tests/demo_test.cpp")
    assert (
        formatted(texts(*KERNELS)["tests/demo_test.cpp"]) == texts(*KERNELS)["tests/demo_test.cpp"]
    )
