"""The house's own rules, read from its source: who imports whom, and what a module may hold."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from math import log2
from pathlib import Path

import pytest

import fagen
from fagen import paths, registry
from fagen.arch import SM90
from fagen.paths import locate
from fagen.process import run

PACKAGE = Path(fagen.__file__).parent

# From the ground up: a module imports only what stands before it.  A kind is three layers: what
# its KIND imports; its emulation, which needs torch; and what is for a GPU or a search.  The two
# latter are named by strings, which runtime, measure and search load.
ORDER = [
    *("errors", "paths", "process", "toml_lines", "decoding", "outputs", "interrupts"),
    *("arch", "expr", "scores", "vocab"),
    *("argument_names", "given", "masking", "scoring", "variants", "ledger", "schedule", "texts"),
    *(
        "problem",
        "statuses",
        "signature",
        "launch",
        "part",
        "combining",
        "records",
        "kind",
        "kinds",
        "registry",
    ),
    *("render", "programs", "toolchain", "sass", "build", "doctor"),
    *("evidence", "dispatch", "vendor"),
    *("e4m3", "tensor_cores", "kinds.emulate", "runtime", "huggingface"),
    "flash_attn_interface",
    *("measure", "kinds.verify", "simulator"),
    *("flow", "search", "commandline"),
]

# each foreign package, and the modules through which it comes in
DOORS = {
    "tomllib": {"toml_lines"},
    "pydantic": {"schedule", "kinds", "search"},
    "pydantic_core": {"schedule"},
    "sympy": {"ledger", "part", "kinds"},
    "jinja2": {"render"},
    "subprocess": {"process"},
    "click": {"commandline"},
    "torch": {
        *("e4m3", "tensor_cores", "kinds.emulate", "kinds.verify", "runtime", "measure"),
        *("huggingface", "flash_attn_interface", "combining", "expr"),
    },
    "transformers": {"huggingface"},
    "distributed": {"search"},
    "triton": {"measure"},
    "pynvml": {"measure"},
    "flash_attn_interface": {"measure"},
}

# Who may know a kind, and which: the calls that users make, each of one kind.  (The registry and
# the public names of fagen/__init__.py name modules by strings.)
KNOWN_KINDS = {f"runtime/{kind}.py": {kind} for kind in registry.ENTRIES}
KNOWN_KINDS |= {"runtime/attention.py": {"forward"}}

# what each number is of is said in arch.py, and only there; powers of two are of many things
HARDWARE = {SM90.registers_per_sm} | {
    number
    for number in (getattr(SM90, field.name) for field in fields(SM90))
    if isinstance(number, int | float) and number > 400 and not log2(number).is_integer()
}

READS_CPP = ("render/tokens.py", "simulator/translate.py")

FILES = dict.fromkeys([*sorted(PACKAGE.rglob("*.py")), locate("cli.py")])


# ---- modules and their layers -------------------------------------------------------------------


def called(path: Path) -> str:
    """Return a file as it is called here: by its path in the package."""
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def file_of(dotted: str) -> Path | None:
    """Return the file of the longest module in a dotted name, None where fagen has none."""
    parts = dotted.split(".")
    for length in range(len(parts), 1, -1):
        place = PACKAGE.joinpath(*parts[1:length])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path in FILES:
                return path
    return None


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file, its module first, which all tests look at."""
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def brought(path: Path) -> frozenset[Path]:
    """Return the files of fagen that one imports itself."""
    ours = {file_of(dotted) for dotted in imports(path) if dotted.startswith("fagen.")}
    return frozenset(file for file in ours if file) - {path}


def closure(start: Path, within: Path) -> set[Path]:
    """Return the files of a folder that one of them imports, and those that these import."""
    visited, ahead = set(), [start]
    while ahead:
        path = ahead.pop()
        if path not in visited and path.is_relative_to(within):
            visited.add(path)
            ahead += brought(path)
    return visited


def layers_of_kinds() -> dict[Path, str]:
    """Return the layer of each file of each kind."""
    layers = {PACKAGE / "kinds" / "__init__.py": "kinds"}
    layers[PACKAGE / "kinds" / "verification.py"] = "kinds.verify"  # which kinds share
    for entry in registry.ENTRIES.values():
        folder, kind = PACKAGE / "kinds" / entry.name, registry.kind(entry.name)
        emulation = file_of(kind.emulate.partition(":")[0])
        assert emulation and emulation.parent != folder / "__init__.py"
        space = file_of(kind.space.partition(":")[0]) if kind.space else None
        for start, layer in (
            (folder / "__init__.py", "kinds"),
            *([(space, "kinds")] if space else []),
            (emulation, "kinds.emulate"),
            *((path, "kinds.verify") for path in sorted(folder.rglob("*.py"))),
        ):
            for path in closure(start, folder):
                layers.setdefault(path, layer)
    return layers


KIND_LAYERS = layers_of_kinds()
LAYERS = {
    path: KIND_LAYERS.get(path) or called(path).split("/")[0].removesuffix(".py") for path in FILES
}
MODULES = [path for path in FILES if LAYERS[path] not in ("__init__", "__main__", "cli")]


def walk(path: Path, *types: type[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a file that are of these types."""
    return (node for node in nodes(path) if isinstance(node, types))


def test_every_module_has_its_place():
    assert {LAYERS[path] for path in MODULES} == set(ORDER)


def test_a_module_imports_only_what_stands_before_it():
    places = {layer: number for number, layer in enumerate(["__init__", *ORDER])}
    assert not [
        f"{called(path)} imports {called(other)}"
        for path in MODULES
        for other in brought(path)
        if places[LAYERS[other]] > places[LAYERS[path]]
    ]


def test_a_foreign_package_comes_in_by_its_door():
    wrong = []
    for path in FILES:
        for package in {dotted.split(".")[0] for dotted in imports(path)} - {"fagen"}:
            allowed = package in DOORS or package in sys.stdlib_module_names
            assert allowed, f"{package}, in {called(path)}, has no door at all"
            if LAYERS[path] not in DOORS.get(package, {LAYERS[path]}):
                wrong.append(f"{package} has no door in {called(path)}")
    assert not wrong


# ---- kinds --------------------------------------------------------------------------------------


def kinds_known(path: Path) -> set[str]:
    """Return the kinds whose modules a file imports."""
    return {
        other.relative_to(PACKAGE / "kinds").parts[0]
        for other in brought(path)
        if other.is_relative_to(PACKAGE / "kinds") and other.parent != PACKAGE / "kinds"
    }


def test_nothing_outside_a_kind_imports_it_but_the_calls_of_that_kind():
    kinds_of = {called(path): kinds_known(path) for path in FILES if path not in KIND_LAYERS}
    assert not [name for name, kinds in kinds_of.items() if kinds - KNOWN_KINDS.get(name, set())]


def test_a_kind_stands_on_its_own():
    for path, layer in KIND_LAYERS.items():
        own = path.relative_to(PACKAGE / "kinds").parts[0]
        assert kinds_known(path) <= {own}, called(path)
        upper = {"kinds": {"kinds.emulate", "kinds.verify"}, "kinds.emulate": {"kinds.verify"}}
        assert not {KIND_LAYERS.get(other) for other in brought(path)} & upper.get(layer, set())


def asks_for_a_kind(path: Path) -> Iterator[str]:
    """Yield where a file tells kinds apart: by class, by name, or by how a slug begins."""
    homes = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in walk(path, ast.ImportFrom)
        for alias in node.names
    }
    names = set(registry.ENTRIES)
    prefixes = {entry.prefix for entry in registry.ENTRIES.values()}

    def constants(node: ast.AST) -> set[object]:
        return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}

    for node in walk(path, ast.Call, ast.Compare, ast.match_case, ast.Dict, ast.Constant):
        where = f"{called(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            function = getattr(node.func, "id", "")
            if function in ("isinstance", "issubclass", "type"):
                passed = [n.id for a in node.args for n in ast.walk(a) if isinstance(n, ast.Name)]
                for home in (homes.get(name, "").split(".") for name in passed):
                    allowed = KNOWN_KINDS.get(called(path), set())
                    if home[:2] == ["fagen", "kinds"] and home[2] not in allowed:
                        yield f"{where}: {function} of {'.'.join(home)}"
        elif isinstance(node, ast.Compare) and constants(node) & names:
            yield f"{where}: compares with {constants(node) & names}"
        elif isinstance(node, ast.match_case) and constants(node.pattern) & names:
            yield f"{where}: matches {constants(node.pattern) & names}"
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if keys & names:
                yield f"{where}: a table by kind, {keys & names}"
        elif isinstance(node, ast.Constant) and node.value in prefixes:
            yield f"{where}: how slugs of a kind begin, {node.value}"


def test_nothing_outside_kinds_asks_which_kind_it_has():
    inside = {"registry", "__init__", "kinds", "kinds.emulate", "kinds.verify"}
    outside = [path for path in FILES if LAYERS[path] not in inside]
    assert not [place for path in outside for place in asks_for_a_kind(path)]


@pytest.mark.parametrize(
    "text",
    [
        "from fagen.kinds.quantize.keys import Schedule as S\nisinstance(x, (int, S))",
        'x.kind == "forward"',
        '"quantize" != name',
        'x.kind in ("forward", "other")',
        'match x:\n    case "quantize":\n        pass',
        '{"forward": 1, "quantize": 2}[x]',
        'x.startswith("fwd_")',
    ],
)
def test_a_question_for_the_kind_is_found(text, monkeypatch):
    monkeypatch.setitem(globals(), "nodes", lambda path: tuple(ast.walk(ast.parse(text))))
    assert list(asks_for_a_kind(PACKAGE / "flow.py"))


@pytest.mark.parametrize("name", registry.ENTRIES)
def test_a_kind_is_what_its_line_in_the_registry_says(name):
    entry, kind = registry.ENTRIES[name], registry.kind(name)
    keys = kind.schedule.keys
    assert kind.name == kind.schedule.kind == name
    assert entry.module == f"fagen.kinds.{name}"
    assert keys.slug.prefix == entry.prefix and keys.slug.example.startswith(entry.prefix)
    assert entry.table in keys.tables
    others = [other for other in registry.ENTRIES.values() if other is not entry]
    assert not [other for other in others if other.table in keys.tables]
    assert not [other for other in others if other.prefix.startswith(entry.prefix)]
    assert kind.plan(registry.from_slug(keys.slug.example)).kind == name


@pytest.mark.parametrize("name", registry.ENTRIES)
def test_what_a_kind_names_is_there_and_imported_by_nothing_of_its_own(name):
    kind, folder = registry.kind(name), PACKAGE / "kinds" / name
    for named in filter(None, (kind.emulate, kind.verification, kind.space)):
        module, _, attribute = named.partition(":")
        path = file_of(module)
        assert path and ".".join(path.with_suffix("").parts).endswith(
            (module, f"{module}.__init__")
        ), module
        assert path.is_relative_to(folder) and path not in closure(folder / "__init__.py", folder)
        defined = {n.name for n in walk(path, ast.FunctionDef, ast.ClassDef)}
        defined |= {n.id for n in walk(path, ast.Name) if isinstance(n.ctx, ast.Store)}
        assert attribute in defined, named


# ---- without torch ------------------------------------------------------------------------------

BLOCKED = "import sys; sys.modules['torch'] = None\n"


def printed(code: str) -> list[str]:
    """Run code in a Python that has no torch, and return the lines that it prints."""
    result = run([sys.executable, "-c", BLOCKED + code], cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_schedule_of_any_kind_is_checked_and_becomes_source_without_torch(tmp_path):
    slugs = {name: registry.schedules(name)[0].stem for name in registry.ENTRIES}
    commands = [
        words
        for name, slug in slugs.items()
        for words in (
            ["check", slug],
            ["check", "--explain", "--json", slug],
            ["generate", "--binding", slug, "-o", str(tmp_path)],
            ["vendor", slug, "-o", str(tmp_path / name)],
            ["schema", "--kind", name],
        )
    ]
    lines = printed(f"""
import cli
for words in {commands!r}:
    try:
        cli.main(words, prog_name="fagen")
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
""")
    assert {f"{slug} fits" for slug in slugs.values()} <= {*lines}
    written = {file.name for file in tmp_path.iterdir() if file.is_file()}
    of_kernels = {f"{slug}{end}" for slug in slugs.values() for end in (".cu", "_torch.cpp")}
    assert written == of_kernels | {"fagen_host.h"}


def test_a_kernel_of_any_kind_is_picked_without_torch():
    """Of every kind by its slug; of attention by the committed table, or the default tiles."""
    modules = [path.stem for path in FILES if LAYERS[path] == "dispatch" and path.stem[0] != "_"]
    lines = printed(f"""
from importlib import import_module
from fagen import evidence, registry
for name in {modules!r}:
    import_module("fagen.dispatch." + name)
from fagen.dispatch.tables import table_at
from fagen.paths import locate
slugs = [path.stem for name in registry.ENTRIES for path in registry.schedules(name)]
slugs += [row.slug for row in table_at(locate("schedules") / "dispatch.toml")]
for slug in dict.fromkeys(slugs):
    picked = registry.plan(registry.read(registry.committed_file(slug)))
    assert picked.slug == slug
    assert evidence.read(slug) is None or evidence.read(slug).slug == slug
print(len(slugs))
""")
    assert int(lines[0]) > sum(len(registry.schedules(name)) for name in registry.ENTRIES)


def test_whatever_stands_below_the_emulators_imports_no_torch():
    below = ORDER[: ORDER.index("e4m3")]
    names = [
        ".".join(("fagen", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in MODULES
        if LAYERS[path] in below
    ]
    code = f"from importlib import import_module\nfor name in {names!r}: import_module(name)\n"
    assert printed(code + "print(len(sys.modules) > 0)") == ["True"]


def test_importing_fagen_brings_in_nothing():
    code = "import sys; before = set(sys.modules); import fagen; print(*set(sys.modules) - before)"
    brought_in = run([sys.executable, "-c", code], cwd=PACKAGE.parent).stdout.split()
    assert {name.split(".")[0] for name in brought_in} <= {"fagen", "importlib", "warnings"}


def test_asking_for_one_kind_imports_no_other():
    lines = printed("""
import os
from fagen import registry
assert not [m for m in sys.modules if m.startswith("fagen.kinds")]
for name in registry.ENTRIES:
    if os.fork() == 0:
        registry.kind(name)
        loaded = {m.split(".")[2] for m in sys.modules if m.startswith("fagen.kinds.")}
        print(*loaded & {*registry.ENTRIES}, flush=True)  # and what some of them share
        os._exit(0)
    assert os.wait()[1] == 0
""")
    assert lines == [*registry.ENTRIES]


# ---- every module -------------------------------------------------------------------------------


def test_only_paths_reads_the_environment():
    for path in FILES:
        if called(path) == "paths.py":
            continue
        for node in walk(path, ast.Attribute, ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert name not in {"environ", "environb", "getenv", "getenvb"}, f"{path}:{node.lineno}"
        assert not {"os.environ", "os.getenv"} & imports(path), path


def test_every_variable_that_is_read_is_in_the_table_and_every_row_of_it_is_of_use():
    readers = {"environment", "named_folder", "_named"}
    read = {
        node.args[0].value
        for path in FILES
        for node in walk(path, ast.Call)
        if getattr(node.func, "id", "") in readers
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    by_name = {"FAGEN_RUNS", "NVCC_CCBIN", "CXX", "HOME"}  # a constant's, a loop's, expanduser's
    for_others = {*paths._COMPILERS_TAKE, "TMPDIR"}
    assert read <= set(paths.VARIABLES) == read | by_name | for_others
    with pytest.raises(AssertionError, match="not in the table"):
        paths.environment("FAGEN_ANYTHING")


def test_only_arch_holds_hardware_numbers():
    assert {232_448, 65_536} <= HARDWARE
    assert not [
        f"{called(path)}:{node.lineno}: {node.value}"
        for path in FILES
        if called(path) != "arch.py"
        for node in walk(path, ast.Constant)
        if type(node.value) in (int, float) and node.value in HARDWARE
    ]


def test_a_module_says_in_one_sentence_what_it_does_and_stays_short():
    for path in FILES:
        text = path.read_text()
        docstring = ast.get_docstring(nodes(path)[0])
        assert docstring and docstring.splitlines()[0].endswith((".", ";")), path
        assert len(text.splitlines()) <= 500, f"{path}: time for a package of that name"


def test_nothing_evaluates_or_unpickles():
    for path in FILES:
        for node in walk(path, ast.Call):
            function = getattr(node.func, "id", getattr(node.func, "attr", ""))
            forbidden = {"exec", "sympify", "parse_expr"} | (
                {"eval"} if isinstance(node.func, ast.Name) else set()
            )
            assert function not in forbidden, f"{path}:{node.lineno}"
        foreign = {dotted.split(".")[0] for dotted in imports(path)}
        assert not foreign & {"pickle", "marshal", "shelve"}, path


def test_public_names_are_there_and_none_is_a_modules():
    assert not set(fagen.__all__) & (set(ORDER) - {"registry"})
    for name, home in fagen._HOMES.items():
        module, _, attribute = home.partition(":")
        assert getattr(fagen, name) is getattr(import_module(f"fagen.{module}"), attribute or name)
        assert name in vars(fagen)  # the next call of that name finds it sooner
    assert dir(fagen) == sorted(fagen.__all__)
    with pytest.raises(AttributeError, match="wonder"):
        fagen.wonder  # noqa: B018


def test_no_module_but_vocab_and_the_printer_of_expressions_writes_cpp():
    signs = ("#include", "__global__", "__device__", "__half", "template <", "asm volatile")
    assert not [
        f"{called(path)}:{node.lineno}: {sign}"
        for path in FILES
        if called(path) not in ("vocab.py", "expr/cpp.py", *READS_CPP)
        for node in walk(path, ast.Constant)
        for sign in signs
        if isinstance(node.value, str) and sign in node.value
    ]
