"""The house's own rules, read from its source: who imports whom, and what a template may do."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest
from jinja2 import meta, nodes

import fagen
from fagen.paths import locate
from fagen.process import run
from fagen.render import environment

PACKAGE = Path(fagen.__file__).parent

# from the ground up: a module imports only what stands before it
ORDER = [
    *("errors", "paths", "process", "arch", "vocab", "toml_lines", "schedule"),
    *("dispatch_table", "budget", "plan", "usual", "arguments", "problem", "quantizer"),
    *("render", "emulator", "toolchain", "machine", "build", "op", "quantize_op", "dispatch"),
    *("evidence", "measure", "flow", "search", "report", "console"),
]

# each foreign package, and the modules through which it comes in
DOORS = {
    "tomllib": {"toml_lines"},
    "pydantic": {"schedule", "quantizer", "search"},
    "pydantic_core": {"schedule"},
    "sympy": {"budget"},
    "jinja2": {"render"},
    "subprocess": {"process"},
    "click": {"cli", "console"},
    "torch": {
        *("arguments", "problem", "quantizer", "emulator", "op", "quantize_op", "dispatch"),
        "measure",
    },
    "distributed": {"search"},
    "triton": {"measure"},
    "pynvml": {"measure"},
    "flash_attn_interface": {"measure"},
}
# what each number is of is said in arch.py, and only there
HARDWARE = {232_448, 65_536}


def modules() -> dict[str, list[Path]]:
    """Return each module of the house with its files: one, or those of its folder."""
    found = {path.stem: [path] for path in PACKAGE.glob("*.py")}
    for folder in PACKAGE.iterdir():
        if (folder / "__init__.py").exists():
            found[folder.name] = sorted(folder.rglob("*.py"))
    return found | {"cli": [locate("cli.py")]}


MODULES = modules()
TREES = {
    path: ast.parse(path.read_text(), str(path)) for paths in MODULES.values() for path in paths
}


def imports(name: str) -> set[str]:
    """Return the dotted names that a module imports, at its top or inside a function."""
    found = set()
    for path in MODULES[name]:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_has_its_place():
    assert MODULES.keys() - {"__init__", "__main__", "cli"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_what_stands_before_it(name):
    own = {dotted.split(".")[1] for dotted in imports(name) if dotted.startswith("fagen.")}
    assert own - {name} <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_foreign_package_comes_in_by_its_door(name):
    for package in {dotted.split(".")[0] for dotted in imports(name)} - {"fagen"}:
        if package in DOORS:
            assert name in DOORS[package], f"{package} has no door in {name}"
        else:
            assert package in sys.stdlib_module_names, f"{package} has no door at all"


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"paths"}))
def test_only_paths_reads_the_environment(name):
    for path in MODULES[name]:
        for node in ast.walk(TREES[path]):
            said = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            assert said not in {"environ", "environb", "getenv", "getenvb"}, path
    assert not {"os.environ", "os.getenv"} & imports(name)


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"arch"}))
def test_only_arch_holds_hardware_numbers(name):
    for path in MODULES[name]:
        numbers = {n.value for n in ast.walk(TREES[path]) if isinstance(n, ast.Constant)}
        assert not HARDWARE & {n for n in numbers if isinstance(n, int)}, path


@pytest.mark.parametrize("path", sorted(TREES), ids=lambda path: path.name)
def test_a_module_says_in_one_sentence_what_it_does_and_stays_short(path):
    said = ast.get_docstring(TREES[path])
    assert said and said.splitlines()[0].endswith((".", ";")), path
    assert len(path.read_text().splitlines()) <= 500, f"{path}: time for a package of that name"


def test_importing_fagen_brings_in_nothing():
    code = "import sys; before = set(sys.modules); import fagen; print(*set(sys.modules) - before)"
    brought = run([sys.executable, "-c", code], cwd=PACKAGE.parent).stdout.split()
    assert {name.split(".")[0] for name in brought} <= {"fagen", "importlib", "warnings"}


def test_a_schedule_becomes_source_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fagen.schedule import Schedule; from fagen.kinds.forward.plan import plan\n"
        "from fagen.render import render\n"
        "print(render(plan(Schedule.from_slug('fwd_fp16_d64_full_m64n64'))).hash)"
    )
    result = run([sys.executable, "-c", code], cwd=PACKAGE.parent)
    assert len(result.stdout.strip()) == 64, result.stderr


def test_public_names_are_there_and_none_is_a_modules():
    assert not set(fagen.__all__) & MODULES.keys()
    for name, home in fagen._HOMES.items():
        assert getattr(fagen, name) is getattr(import_module(f"fagen.{home}"), name)
    assert dir(fagen) == sorted(fagen.__all__)
    with pytest.raises(AttributeError, match="wonder"):
        fagen.wonder  # noqa: B018


# ---- templates ----------------------------------------------------------------------------------

TEMPLATES = environment().list_templates(extensions=["j2"])
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
    nodes.Filter,
    nodes.FilterBlock,
    nodes.CallBlock,
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_reads_one_value_and_only_chooses(name):
    tree = environment().parse((locate("templates") / name).read_text())
    value = "report" if name.endswith(".html.j2") else "plan"
    assert meta.find_undeclared_variables(tree) <= {value}
    computed = [(type(node).__name__, node.lineno) for node in tree.find_all(ARITHMETIC)]
    assert not computed
    own = {"range"} | {macro.name for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        assert isinstance(call.node, nodes.Name) and call.node.name in own, call.lineno


def test_every_template_is_used():
    used = {"forward.cu.j2", "quantize.cu.j2", "torch_op.cpp.j2", "quantize_op.cpp.j2"}
    used |= {"search_report.html.j2"}
    for name in TEMPLATES:
        tree = environment().parse((locate("templates") / name).read_text())
        used |= set(filter(None, meta.find_referenced_templates(tree)))
    assert used == set(TEMPLATES)


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"vocab"}))
def test_no_module_but_vocab_writes_cpp(name):
    signs = ("#include", "__global__", "__device__", "__half", "template <", "asm volatile")
    for path in MODULES[name]:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not [sign for sign in signs if sign in node.value], f"{path}:{node.lineno}"
