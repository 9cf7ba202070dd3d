"""What a template may do: read one value and choose; and that each one is used."""

import ast
from functools import cache
from pathlib import Path

import pytest
from jinja2 import meta, nodes

import fagen
from fagen import registry
from fagen.paths import locate
from fagen.render import environment
from fagen.vocab import DTYPES, MASKS

TEMPLATES = environment().list_templates(extensions=["j2"])
RAW = environment().list_templates(extensions=["cuh"])  # no template: rendered as they stand
ARITHMETIC = (
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Pow,
    nodes.Neg,
    nodes.Concat,
    nodes.FilterBlock,
    nodes.CallBlock,
)
WRITE_PARTS = {
    *("cpp", "members", "initialised", "filled", "described", "counted", "checked"),
    *("join", "map", "batch"),
}  # filters: what parts, launches and signatures declare, as C++


@cache
def parsed(name: str) -> nodes.Template:
    return environment().parse((locate("templates") / name).read_text())


def macros(name: str) -> set[str]:
    """Return what a template may call: its macros, and those that it takes from others."""
    own = {macro.name for macro in parsed(name).find_all(nodes.Macro)}
    for imported in parsed(name).find_all(nodes.FromImport):
        defined = {macro.name for macro in parsed(imported.template.value).find_all(nodes.Macro)}
        for alias in imported.names:
            source, target = alias if isinstance(alias, tuple) else (alias, alias)
            assert source in defined, f"{imported.template.value} has no macro {source}"
            own.add(target)
    return own


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_reads_one_value_and_only_chooses(name):
    value = "report" if name.endswith(".html.j2") else "plan"
    if name in ("fagen_host.h.j2", "host/calls.cuh.j2"):  # of all kernels of a kind
        value = "calls"
    if name.startswith("vendor/") and not name.startswith("vendor/check/"):
        value = "folder"
    if name.startswith(("vendor/torch/", "vendor/hf_kernel/")):
        value = "package"
    blocks = {node.target.name for node in parsed(name).find_all(nodes.AssignBlock)}
    assert meta.find_undeclared_variables(parsed(name)) - blocks <= {value}
    computed = [(type(node).__name__, node.lineno) for node in parsed(name).find_all(ARITHMETIC)]
    assert not computed
    assert {node.name for node in parsed(name).find_all(nodes.Filter)} <= WRITE_PARTS
    own = {"range"} | macros(name)
    for call in parsed(name).find_all(nodes.Call):
        of_parts = isinstance(call.node, nodes.Getattr) and call.node.attr == "texts"
        of_macro = isinstance(call.node, nodes.Name) and call.node.name in own
        assert of_parts or of_macro, call.lineno


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_asks_for_capabilities_and_not_for_a_dtype_a_mask_or_a_kind(name):
    for node in parsed(name).find_all(nodes.Getattr):
        assert node.attr not in {"fp8", "causal"}, node.lineno
    for node in parsed(name).find_all(nodes.Compare):
        words = {constant.value for constant in node.find_all(nodes.Const)}
        assert not words & {*DTYPES, *MASKS, *registry.ENTRIES}, node.lineno


def test_every_template_is_used():
    used = {f"vendor/check/{kind}.j2" for kind in registry.ENTRIES} & set(TEMPLATES)
    words = {
        node.value
        for path in Path(fagen.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    ends = tuple(word for word in words if word.endswith((".j2", ".cuh", ".cpp")))
    used |= {name for name in (*TEMPLATES, *RAW) if name.endswith(ends)}
    for name in TEMPLATES:
        used |= set(filter(None, meta.find_referenced_templates(parsed(name))))
    assert used == {*TEMPLATES, *RAW}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith("binding")])
def test_a_binding_writes_numbers_without_a_stream(name):
    """Where g++ links a second C++ runtime into it, streams use the tables of both, and die."""
    text = (locate("templates") / name).read_text()
    assert "stringstream" not in text and "<sstream>" not in text
