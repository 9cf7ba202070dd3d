"""What a Signature says once is in structs, in tables of the docs, and in one translation unit."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from fagen import process, registry
from fagen.paths import locate
from fagen.render import HEADER, render
from fagen.runtime.c_interface import struct_of
from fagen.signature import Extent, random_words
from fagen.toolchain import FLAGS, LINK_FLAGS, find_gxx, find_toolchain
from tests import toy
from tests.committed import Committed
from tests.stubs import (
    WARNINGS,
    StubOp,
    compile_cpp,
    rendered,
    template,
)

# of varlen sequences, whose lengths are on the device, and of masks whose numbers a call gives
FORMS = (
    *("FagenForwardVarlenArgs", "FagenForwardVarlenFp8Args"),
    *("FagenBackwardVarlenArgs", "FagenDecodePagedArgs"),
)
GIVEN = re.compile("(Window)?(Softcap)?(Sink)?Args$")  # what masks, scores and sinks add to a form


# ---- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extent", "message", "at_70"),
    [
        (Extent(number=64), "64", 64),
        (Extent("rows"), "rows", 70),
        (Extent("rows", per=32), "ceil(rows / 32)", 3),
        (Extent("rows", per=16, times=16), "ceil(rows / 16) · 16", 80),
        (Extent("rows", per=32, times=2), "ceil(rows / 32) · 2", 6),
        (Extent("rows", times=4), "rows · 4", 280),
        (Extent("rows", plus=1), "rows + 1", 71),
        (Extent("rows", per=32, plus=1), "ceil(rows / 32) + 1", 4),
    ],
)
def test_an_extent_says_what_it_is(extent: Extent, message: str, at_70: int) -> None:
    assert str(extent) == message
    assert extent.at({"rows": 70}) == at_70
    assert extent.plain == (message == "rows")


def test_random_words_are_splitmix64s_numbers_lower_half_first() -> None:
    words = random_words(0, 8)
    numbers = [words[i] | words[i + 1] << 32 for i in range(0, 8, 2)]
    assert numbers[:3] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert random_words(0, 3) == words[:3]
    assert random_words(-1, 12) == random_words(2**64 - 1, 12) != random_words(1, 12)


# ---- the C struct -------------------------------------------------------------------------------

PRINTED = 'std::printf("%zu %zu\\n", offsetof({0}, {1}), sizeof({0}::{1}));'


def test_every_field_lies_in_ctypes_where_the_compiler_puts_it(
    committed: Committed, tmp_path: Path
) -> None:
    """In the structs of all kinds, and in those of toys."""
    plans: list[Any] = [registry.plan_of(slug) for slug in toy.SIGNATURES]
    plans += committed.plans.values()
    twins = {struct_of(plan.signature): plan for plan in plans}
    assert {plan.kind for plan in twins.values()} == set(registry.ENTRIES)
    text, prints, places = "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n", [], []
    for number, (twin, plan) in enumerate(twins.items()):
        header, name = rendered(plan, template("abi.h.j2")), plan.signature.struct
        # structs of several toys have one name
        text += f"namespace n{number} {{\n{header}}}\n#undef {plan.signature.guard}\n"
        for field, _ in twin._fields_:  # type: ignore[misc]
            prints.append(PRINTED.format(f"n{number}::{name}", field))
            places.append(f"{getattr(twin, field).offset} {getattr(twin, field).size}")
        prints.append(f'std::printf("%zu\\n", sizeof(n{number}::{name}));')
        places.append(f"{ctypes.sizeof(twin)}")
    (tmp_path / "all.cpp").write_text(text + "int main() {\n" + "\n".join(prints) + "\n}\n")
    compile_cpp(*WARNINGS, "-std=c++17", "all.cpp", "-o", "all", folder=tmp_path)
    assert process.run([tmp_path / "all"]).stdout.splitlines() == places


def test_kernels_of_a_kind_and_form_are_called_by_one_struct(committed: Committed) -> None:
    structs: dict[str, Any] = {}
    kinds = set()
    for plan in committed.plans.values():
        fields = struct_of(plan.signature)._fields_  # type: ignore[misc]
        message = [(name, getattr(ctype, "_length_", ctype)) for name, ctype in fields]
        assert message == structs.setdefault(plan.signature.struct, message), plan.slug
        kinds.add(plan.kind)
    assert kinds == registry.ENTRIES.keys() - {"toy"}
    plain = {GIVEN.sub("Args", struct) for struct in structs}
    assert plain == {*(f"Fagen{kind.capitalize()}Args" for kind in kinds), *FORMS}


def test_a_size_is_told_by_a_needed_tensor_before_anything_follows_from_it(
    committed: Committed,
) -> None:
    signatures = [plan.signature for plan in committed.plans.values()] + [*toy.SIGNATURES.values()]
    for signature in signatures:
        sizes: set[str] = set()
        for tensor in signature.inputs:
            if not tensor.may_be_none or tensor.missing:
                sizes |= {dim.extent.name for dim in tensor.dims if dim.extent.plain}
            named = {dim.extent.name for dim in tensor.dims if dim.extent.name}
            assert named <= sizes, (signature.kind, tensor.name)
        for tensor in signature.outputs:
            assert {dim.extent.name for dim in tensor.dims if dim.extent.name} <= sizes
        assert {name for rule in signature.rules for name in (rule.size, rule.by)} <= sizes
        assert sizes <= set(signature.most)


# ---- the docs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fill() -> Any:
    """docs/fill.py."""
    spec = spec_from_file_location("fill", locate("cli.py").parent / "docs" / "fill.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_argument_more_is_a_row_of_the_table_in_the_docs(
    fill: Any, stub_op: Callable[[str], StubOp]
) -> None:
    tables = {slug: [*fill.signature_table(toy.SIGNATURES[slug])] for slug in toy.SIGNATURES}
    more = {
        slug: [line for line in lines if line not in tables["toy_base"] and line.startswith("|")]
        for slug, lines in tables.items()
    }
    assert more["toy_bias"] == ["| `bias` | (heads, 16) | float16 | added to each row |"]
    assert more["toy_shift"] == [
        "| `shift` |  | float | added to all; finite and above 0 as a float32 |"
    ]
    for slug, lines in tables.items():
        stub_op(slug)
        schema = getattr(torch.ops.fagen, slug).default._schema
        assert lines[1] == f"torch.ops.{schema}".replace(f"::{slug}", ".<slug>")


def test_the_table_in_the_docs_says_what_a_shape_does_not(fill: Any) -> None:
    lines = [*fill.signature_table(toy.BASE)]
    assert lines[2].startswith("torch.ops.fagen.<slug>_without_sums(Tensor x, Tensor ends, ")
    for row in (
        "| `weights` | (batch or 1, ceil(rows / 16) or 1) | float32 | of each block of rows |",
        "| `ends` | (batch + 1) | int32 | of sequences |",
        "| `sin` | (rows, 8) | float16 | of an angle; goes with `cos` |",
        "| `factor` | (batch, heads) | float32 | by which all is divided; found and returned where "
        "it is not given |",
        "| `count` |  | int | of repetitions; above 0 |",
        "| → `found_factor` | (batch, heads) | float32 | by which all is divided; empty where "
        "`factor` is given |",
        "| → `out` | (batch, heads, 16, ceil(rows / 16) · 16) | bfloat16 | transposed |",
        "| → `sums` | (batch, rows) | float32 | of rows; not of `<slug>_without_sums` |",
        "`rows` is a multiple of `heads`; `batch`, `heads`: at most 1,073,741,824; `rows`: at most "
        "1,000; pairs: rows · heads · heads · 65536, fewer than 2^30.",
    ):
        assert row in lines
    assert not any("history" in line or "decay" in line for line in lines)


# ---- several kernels in one program -------------------------------------------------------------


def test_structs_of_two_versions_do_not_meet_in_one_program(tmp_path: Path) -> None:
    plan = registry.plan_of("toy_base")
    newer = replace(plan, signature=replace(toy.BASE, version=8))
    header = template("abi.h.j2")
    for first, second, fits in ((plan, plan, True), (plan, newer, False)):
        text = "#include <cstdint>\n" + rendered(first, header) + rendered(second, header)
        (tmp_path / "two.cpp").write_text(text)
        gxx, _ = find_gxx()
        message = process.run([gxx, "-fsyntax-only", *WARNINGS, "two.cpp"], cwd=tmp_path)
        assert (message.returncode == 0) == fits
        assert fits or "kernels of kind toy of two versions of fagen" in message.stderr


def test_kernels_of_one_kind_and_of_several_compile_in_one_translation_unit(tmp_path: Path) -> None:
    slugs = (
        "fwd_fp16_d64_full_m64n64",
        "fwd_fp16_d64_causal_m64n64",
        "quant_fp16_d64",
        "comb_fp16_d64",
        "bwd_fp16_d64_full_m64n64",
        "dec_fp16_d64_causal_r8n128",
        "dec_fp16_d64_causal_r16n128",
    )
    for slug in slugs:
        source = render(registry.plan_of(slug))
        (tmp_path / f"{slug}.cu").write_text(source.kernel)
        (tmp_path / HEADER).write_text(source.header)
    calls = ", ".join(f"fagen_{slug}_info()" for slug in slugs)
    lines = [*(f'#include "{slug}.cu"' for slug in slugs)]
    lines += ["int main() {", f"  const FagenKernelInfo* infos[] = {{{calls}}};"]
    lines += [
        '  for (const auto* info : infos) std::printf("%s %u\\n", info->slug, info->threads);'
    ]
    lines += ["}"]
    (tmp_path / "all.cu").write_text("#include <cstdio>\n" + "\n".join(lines))
    tools = find_toolchain()
    command = [tools.nvcc, *FLAGS, "-I", tools.cutlass, "-c", "all.cu", "-o", "all.o"]
    compiled = process.run(command, cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    assert "warning" not in compiled.stdout + compiled.stderr
    libraries = [f"-L{folder}" for folder in tools.library_dirs]
    link = [flag for flag in LINK_FLAGS if flag != "-shared"]
    compile_cpp("all.o", *libraries, *link, "-o", "all", folder=tmp_path)
    message = process.run([tmp_path / "all"]).stdout.splitlines()
    assert message == [f"{slug} {registry.plan_of(slug).threads}" for slug in slugs]
