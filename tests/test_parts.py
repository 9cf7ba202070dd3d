"""The laws of parts: what a kernel is made of stays small, plain and in its own place.

And those of Plans: what one says is said once, and read.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jinja2 import meta, nodes

from fagen import registry
from fagen.kind import Plan
from fagen.part import SEATS, Alias
from fagen.paths import locate
from tests import growth
from tests.backward_helpers import MASKED as MASKED_BACKWARD
from tests.backward_helpers import SPREAD as BACKWARD
from tests.combine_helpers import SPREAD as COMBINE
from tests.committed import Committed
from tests.decode_helpers import SPREAD as DECODE
from tests.quantize_helpers import SPREAD as QUANTIZE
from tests.score_helpers import word_of
from tests.test_templates import parsed

ROOT = locate("templates").parent
TEMPLATES = growth.kernel_templates(ROOT)
TEXTS = [path for path in TEMPLATES if ".cuh" in path.suffixes]
LINES = 200
FEW = 5  # conditionals

# conditionals of templates, of forward and of all kernels, and branches of forward's parts
MOST = {"forward": 160, "all": 480, "branches": 120}

# How many more folders than one read a choice, summed up over a kind's choices. What reads it in
# another folder is to become a text that parts choose: no more of them are added.
ELSEWHERE = {"forward": 21, "backward": 13, "decode": 0, "quantize": 7, "combine": 0}

CONCERNS = "tile", "pipeline", "softmax", "scales", "order"  # which nest the fields of a Plan

# schedules of which no other test's list has one, for what they alone have
MORE = (
    "fwd_fp16_d128_causal_m128n128_lpt",
    "fwd_bf16_d256_causal_m128n64_reusev",
    "fwd_e4m3_d128_full_m128n128_lazymax",
    "fwd_e4m3_d128_full_m128n128_lazymax_pm1_pc64",
    "fwd_e4m3_d64_causal_m128n128_sblock_vsblock",
    "fwd_fp16_d64_full_m64n64_tensorsum_onlinemax",
    "fwd_bf16_d128_full_m64n128_varlen",
    "bwd_bf16_d256_full_m64n64_varlen_det",
    "bwd_bf16_d192v128_causal_m64n64_sinkfp32_intra_c2",
    "bwd_fp16_d64_full_m64n64_sinkfp16_varlen",
    "quant_fp16_d256_center_sr128",
    "fwd_bf16_d128_causal_m128n128_c2",
    "fwd_e4m3_d128_full_m128n128_t4_sblock",
    "fwd_fp16_d64_full_m64n64_nointra_pm2",
    "fwd_fp16_d128_causal_m128n128_varlen_packgqa",
    "fwd_fp16_d64_causal_m256n64_varlen_packgqa_s4_q2_nointer",
    "fwd_bf16_d64_full_m64n48_varlen_packgqa",
    "fwd_fp16_d64_causal_m256n64_packgqa_s4_q2_nointer",
    "fwd_bf16_d64_full_m192n64_packgqa_s3",
    "fwd_e4m3_d64_causal_m128n64_sinkbf16_packgqa_vrows",
    "fwd_e4m3_d64_causal_m64n64_softcap_packgqa_vrows_pm1_pc32",
    "fwd_e4m3_d96_full_m128n64_packgqa_nointer_vrows_pretrans_parts",
    "fwd_e4m3_d64_full_m64n64_vrows_pretrans_pm1_pc32_parts",
    "fwd_fp16_d64_prefix_m64n64_c2",
    "fwd_fp16_d64_document_m128n64",
    "fwd_fp16_d64_document_m128n64_varlen",
    "fwd_fp16_d64_window_m64n64_split3",
    "dec_fp16_d64_prefix_r8n64_streamk",
    "dec_fp16_d64_window_r8n64",
    "dec_fp16_d64_causal_r8n64_softcap_fixed",
    "fwd_e4m3_d64_causal_m64n64_softcap_split3_vrows_pm1_pc32",
    "fwd_e4m3_d64_full_m64n64_softcap_vrows_sblock_pm1_pc32",
    "fwd_fp16_d64_window_m128n64_sinkfp16",
    "fwd_bf16_d64_causal_m64n64_sinkfp32_packgqa",
    "fwd_fp16_d64_causal_m64n64_sinkfp32_packgqa_tensorsum_onlinemax",
    "fwd_e4m3_d64_causal_m64n64_sinkfp32_vrows",
    "fwd_bf16_d64_causal_m64n64_sinkbf16_split3",
    "fwd_e4m3_d64_causal_m64n64_sinkfp32_split3_vrows_pm1_pc32",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "templates").as_posix()


def parts_of(kind: str) -> Path:
    """Return the module that maps a kind's keys to parts, or the package."""
    folder = ROOT / "fagen" / "kinds" / kind
    return next(path for path in (folder / "parts", folder / "parts.py") if path.exists())


def every_plan(committed: Committed) -> list[Any]:
    """Plans of what is committed, of what tests of each kind have, and of a few more."""
    forms = ("striped", ""), ("rooted", ""), ("by_batch", "_varlen")
    texts = (f"fwd_fp16_d64_causal_m64n64_{word_of(label)}{more}" for label, more in forms)
    tried = *BACKWARD, *MASKED_BACKWARD, *COMBINE, *DECODE, *QUANTIZE, *MORE
    slugs = {*tried, *texts} - committed.plans.keys()
    return [*committed.plans.values(), *map(registry.plan_of, sorted(slugs))]


def test_there_are_parts():
    assert len(TEXTS) > 100


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_a_text_is_short_and_hardly_chooses(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LINES
    if path.suffix == ".cuh":
        assert not [sign for sign in ("{%", "{#", "{{ ", "plan.") if sign in text]
    else:
        assert path.suffixes[-2:] == [".cuh", ".j2"]
        assert "{%" in text or "{{ " in text, "without Jinja it is a .cuh"
        assert sum(1 for _ in growth.choices(path)) <= FEW


def test_every_text_is_of_a_kernel_that_some_schedule_has(committed):
    """Of those that are committed, those that tests of each kind have, and a few more."""
    used = {
        text for plan in every_plan(committed) for seat in SEATS for text in plan.parts.texts(seat)
    }
    for path in TEMPLATES:
        if path.suffix == ".j2":
            used |= {*filter(None, meta.find_referenced_templates(parsed(name_of(path))))}
    assert {name_of(path) for path in TEXTS} - used == set()


def test_conditionals_and_branches_are_within_their_budgets():
    counted = {
        "forward": growth.conditionals(ROOT, "forward"),
        "all": growth.conditionals(ROOT),
        "branches": growth.branches(parts_of("forward")),
    }
    assert counted == {name: min(most, counted[name]) for name, most in MOST.items()}


def folders_by_choice(kind: str) -> dict[str, set[str]]:
    """Return in which folders of a kind's templates a choice is made by each field of the Plan."""
    folders = defaultdict(set)
    for path in growth.kernel_templates(ROOT, kind):
        inner = path.relative_to(ROOT / "templates").parts[1:-1]
        for test in growth.choices(path):
            for owner, read in reads(test):
                if owner in ("plan", *CONCERNS) and read not in CONCERNS:
                    folders[read].add("/".join(inner[:1]))
    return folders


@pytest.mark.parametrize("kind", registry.ENTRIES)
def test_a_choice_is_made_in_one_folder(kind):
    folders = folders_by_choice(kind)
    assert sum(len(where) - 1 for where in folders.values()) <= ELSEWHERE[kind], {
        field: sorted(where) for field, where in folders.items() if len(where) > 1
    }


# ---- Plans ---------------------------------------------------------------------------------------


def concerns(plan: Any) -> dict[str, Any]:
    """What a Plan is nested by, by its name, and first the Plan itself."""
    nested = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {"plan": plan, **{name: x for name, x in nested.items() if name in CONCERNS}}


def public_names(one: Any) -> Iterator[str]:
    """Yield what a Plan, or a concern, and what it has in common with others say."""
    for base in type(one).__mro__[:-1]:
        yield from (name for name in vars(base) if not name.startswith("_"))


def in_templates(kind: str, name: str) -> Iterator[str]:
    """Yield what templates read of a Plan or of its concern, but for those of other kinds."""
    others = {ROOT / "templates" / other for other in registry.ENTRIES if other != kind}
    for path in (ROOT / "templates").rglob("*.j2"):
        if not others & {*path.parents}:
            yield from (read for owner, read in reads(parsed(name_of(path))) if owner == name)


def reads(node: nodes.Node) -> Iterator[tuple[str, str]]:
    """Yield what is read in a template, of what, by their names."""
    for read in (node, *node.find_all(nodes.Getattr)):
        if isinstance(read, nodes.Getattr) and isinstance(read.node, nodes.Name | nodes.Getattr):
            owner = read.node.name if isinstance(read.node, nodes.Name) else read.node.attr
            yield owner, read.attr


def in_parts(plan: Any) -> Iterator[tuple[str, str]]:
    """Yield what a Plan's parts have constants of, and tensor maps: of what, by their names."""
    for part in plan.parts.parts:
        declared = [
            *(one.field for one in part.constants if isinstance(one, Alias) or not one.value),
            *(name for one in part.maps for name in (one.swizzle, one.columns, one.elements[1])),
        ]
        for name in declared:
            yield from pairwise(("plan", *name.split(".")))


def in_modules(paths: Iterable[Path], name: str) -> Iterator[str]:
    """Yield what modules read of what they call by this name."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if owner == name:
                    yield node.attr


@pytest.mark.parametrize("kind", registry.ENTRIES)
def test_what_a_plan_says_is_read(kind, committed):
    """Its fields by others, and those of its concerns; the rest perhaps by themselves."""
    plans = [plan for plan in every_plan(committed) if plan.kind == kind]
    kinds = ROOT / "fagen" / "kinds"
    others = {kinds / other for other in registry.ENTRIES if other != kind}
    own = kinds / kind / "plan.py"
    modules = [x for x in (ROOT / "fagen").rglob("*.py") if x != own and not others & {*x.parents}]
    declared = {pair for plan in plans for pair in in_parts(plan)}
    for name, one in concerns(plans[0]).items():
        bases = {Path(inspect.getfile(base)) for base in type(one).__mro__[:-1]}
        read = {*in_templates(kind, name), *in_modules([*modules], name)}
        read |= {*in_modules(bases - {own}, "self"), *vars(Plan), *Plan.__annotations__}
        read |= {attr for owner, attr in declared if owner == name}
        own_reads = {*in_modules([own], "self" if name == "plan" else name)}
        whole = {*concerns(plans[0])} if name == "plan" else own_reads
        assert {field.name for field in fields(one)} - read - whole == set()
        assert {*public_names(one)} - read - own_reads == set()


@pytest.mark.parametrize("kind", registry.ENTRIES)
def test_a_bit_has_one_name_in_a_plan(kind, committed):
    """No two that are true or false always agree, and none are always opposite."""
    plans = [plan for plan in every_plan(committed) if plan.kind == kind]
    values = defaultdict(list)
    for plan in plans:
        for concern, one in concerns(plan).items():
            names = {field.name for field in fields(one)}
            for base in type(one).__mro__[:-1]:
                properties = property | cached_property
                names |= {x for x, y in vars(base).items() if isinstance(y, properties)}
            for name in names:
                values[f"{concern}.{name}"].append(getattr(one, name))
    alike = defaultdict(list)
    for name, bits in sorted(values.items()):
        if all(isinstance(bit, bool) for bit in bits):
            alike[tuple(bit is bits[0] for bit in bits)].append(name)
    assert [same for same in alike.values() if len(same) > 1] == []
