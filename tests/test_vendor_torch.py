"""A vendored Python package for torch: which kernel it picks, and a build by pip that is used."""

import sys
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from fagen import registry, vendor
from fagen.process import run
from fagen.render import render
from tests.vendor_helpers import (
    COMBINE,
    KERNELS,
    USED,
    asked,
    installed,
    python,
    seen,
    vendored,
    walled,
)

# ---- the folder ---------------------------------------------------------------------------------


def test_the_folder_is_that_of_plain_source_and_a_package():
    plain = vendor.FORMATS["source"](vendor.folder_of(asked("demo", "source", *KERNELS)))
    files = vendor.FORMATS["torch"](vendor.folder_of(asked("demo", "torch", *KERNELS)))
    assert {path for path in plain if plain[path] != files.get(path)} == {
        "README.md",  # which is README.c.md there
        "manifest.json",
    }
    assert files["README.c.md"] == plain["README.md"]
    for slug in KERNELS:
        assert files[f"src/{slug}_torch.cpp"] == render(registry.plan_of(slug)).binding
        assert f"def {slug}(" in files["python/demo/__init__.py"]
        assert f"`{slug}`" in files["README.md"]
    without = vendor.FORMATS["torch"](vendor.folder_of(asked("demo", "torch", COMBINE)))
    assert "python/demo/_attention.py" not in without
    assert "attention(" not in without["README.md"] and "cutlass" not in without["README.md"]


def test_both_formats_have_the_same_python():
    """Of calls of all kinds, or of varlen sequences alone."""
    varlen = ("fwd_fp16_d64_causal_m64n64_varlen", "bwd_fp16_d64_causal_m64n64_varlen")
    these = (*varlen, "fwd_e4m3_d64_full_m64n64_varlen")
    dense = ("fwd_fp16_d64_causal_m128n128", "bwd_fp16_d64_causal_m128n128")
    for slugs in (these, (*dense, *varlen, "dec_fp16_d32_causal_r8n64", COMBINE)):
        manifests = (asked("demo", form, *slugs) for form in ("torch", "hf-kernel"))
        torchs, hub = (vendor.FORMATS[m.format](vendor.folder_of(m)) for m in manifests)
        own = {path.rpartition("/")[2] for path in torchs if path.startswith("python/demo/")}
        own.remove("_ops.py")
        public = torchs["python/demo/__init__.py"].partition("__all__ = ")[2].partition("]")[0]
        assert '"attention_varlen"' in public
        assert ('"attention"' in public and '"attention_decode"' in public) == (slugs != these)
        assert torchs["python/demo/_ops.py"] == hub["_ops.py"]
        for name in own:
            assert torchs[f"python/demo/{name}"] == hub[f"torch-ext/demo/{name}"]
        some = {"__init__.py", "_varlen.py", "_gradients.py", "_autocast.py", "_fakes.py"}
        every = some | {"_attention.py", "_decode.py", "_rows.py"}
        assert own == (some if slugs == these else every)
        for readme in (torchs["README.md"], torchs["README.c.md"], hub["README.md"]):
            assert "_varlen" in readme.partition("## ")[2]
        assert "torch.autocast" in torchs["README.md"] and "torch.autocast" in hub["README.md"]


def test_a_manifest_gives_kernels_names_in_python(tmp_path):
    manifest = 'name = "demo"\nformat = "torch"\n[kernels]\ncausal = "{}"\n'
    (tmp_path / "vendor.toml").write_text(manifest.format(KERNELS[0]))
    vendor.vendor(vendor.read(tmp_path / "vendor.toml"), tmp_path / "out")
    text = (tmp_path / "out/python/demo/__init__.py").read_text()
    assert text.endswith(f"\n\n\ncausal = {KERNELS[0]}\n") and '    "causal",\n' in text
    # another kernel: what changed is written, what was edited stays
    (tmp_path / "out/python/demo/_fakes.py").write_text("mine")
    (tmp_path / "vendor.toml").write_text(manifest.format(COMBINE))
    again = vendor.vendor(vendor.read(tmp_path / "vendor.toml"), tmp_path / "out")
    assert again.kept == ("python/demo/_fakes.py",) and "setup.py" in again.unchanged
    assert f"src/{COMBINE}_torch.cpp" in again.new
    assert {f"src/{KERNELS[0]}_torch.cpp", "python/demo/_attention.py"} <= {*again.removed}


def test_build_toml_names_every_source():
    files = vendor.FORMATS["hf-kernel"](vendor.folder_of(asked("my_demo", "hf-kernel", *KERNELS)))
    build = tomllib.loads(files["build.toml"])
    assert build["general"]["name"] == "my-demo" and build["torch"]["stable-abi"]["cuda"] == "2.10"
    kernel = build["kernel"]["my_demo"]
    assert kernel["depends"] == ["torch", "cutlass_4_0"]
    assert kernel["src"] == ["src/fagen_host.h", *(f"src/{slug}.cu" for slug in KERNELS)]
    assert "--expt-relaxed-constexpr" in kernel["cuda-flags"]
    bindings = [f"src/{slug}_torch.cpp" for slug in KERNELS]
    assert build["torch"]["src"] == ["torch-ext/torch_binding.cpp", *bindings]
    assert {*kernel["src"], *build["torch"]["src"]} <= set(files)
    with_headers = asked("my_demo", "hf-kernel", *KERNELS, with_cutlass=True)
    files = vendor.FORMATS["hf-kernel"](vendor.folder_of(with_headers))
    kernel = tomllib.loads(files["build.toml"])["kernel"]["my_demo"]
    assert kernel["depends"] == ["torch"] and kernel["include"] == ["third_party/cutlass/include"]
    assert "third_party/cutlass/LICENSE.txt" in files


# ---- what a build finds -------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """compile_kernels.py of a folder, as a module; it sees no packages and no CUDA."""
    vendored("demo", "torch", tmp_path, KERNELS[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    module = import_module("compile_kernels")
    monkeypatch.setattr(module, "packages", lambda: [tmp_path / "site"])
    monkeypatch.setattr(module, "SYSTEM_CUDA", tmp_path / "nowhere")
    yield module
    del sys.modules["compile_kernels"]


def compiler(path: Path, version: str) -> Path:
    """Something that says of itself what nvcc says, in a toolkit."""
    path.parent.mkdir(parents=True)
    top = path.parent.parent
    body = (
        f'[ "$1" = --version ] && echo "release {version}, V{version}.1" || echo "#$ TOP={top}" >&2'
    )
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_found_where_fagen_finds_it(script, tmp_path, monkeypatch):
    with pytest.raises(
        SystemExit, match=r"^demo: nvcc, the CUDA compiler, is missing: python -m pip"
    ):
        script.find_nvcc()
    wheel = compiler(tmp_path / "site/nvidia/cu13/bin/nvcc", "13.0")
    assert script.find_nvcc() == (wheel, wheel.parent.parent)
    script.SYSTEM_CUDA = tmp_path / "cuda"
    system = compiler(script.SYSTEM_CUDA / "bin/nvcc", "12.4")
    assert script.find_nvcc()[0] == system
    old = compiler(tmp_path / "old/bin/nvcc", "11.8")
    monkeypatch.setenv("PATH", str(old.parent))
    assert script.find_nvcc()[0] == system
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    with pytest.raises(SystemExit, match=r"^demo: .*nvcc is older than 12\.4; CUDA_HOME is .*$"):
        script.find_nvcc()
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(
        SystemExit, match=r"^demo: CUDA_HOME is /nowhere: unset it, or set it to .*$"
    ):
        script.find_nvcc()


def test_g_is_the_one_that_a_variable_names_and_compilers_get_no_flags_of_a_user(
    script, tmp_path, monkeypatch
):
    own = tmp_path / "own/g++"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\nenv >&2; exit 1\n")
    own.chmod(0o755)
    for variable, named in (("CXX", own), ("NVCC_CCBIN", own.parent)):
        monkeypatch.setenv(variable, str(named))
        assert script.find_gxx() == str(own)
        monkeypatch.setenv(variable, "/nowhere/g++")
        with pytest.raises(SystemExit, match=rf"^demo: {variable} is '/nowhere/g\+\+': unset it"):
            script.find_gxx()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("CPATH", "/elsewhere")
    with pytest.raises(SystemExit) as ended:
        script.run([own])
    assert "PATH=/usr/bin" in str(ended.value)
    assert "fast_math" not in str(ended.value) and "elsewhere" not in str(ended.value)


def test_what_else_is_missing_is_said_in_a_line(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^demo: torch is missing: pip install torch; .*$"):
        script.find_torch()
    (tmp_path / "site/torch").mkdir(parents=True)
    version = tmp_path / "site/torch/version.py"
    version.write_text("__version__ = '2.9.1+cpu'\ncuda: Optional[str] = None\n")
    with pytest.raises(SystemExit, match=r"^demo: torch 2\.9\.1\+cpu is older than 2\.10: .*$"):
        script.find_torch()
    version.write_text("__version__ = '2.10.0'\ncuda: Optional[str] = '12.8'\n")
    assert script.torch_says(script.find_torch(), "cuda") == "12.8"
    with pytest.raises(SystemExit, match=r"^demo: the CUTLASS headers are not installed: .*$"):
        script.find_cutlass()
    monkeypatch.setenv("CUTLASS_DIR", "/nowhere")
    with pytest.raises(SystemExit, match=r"^demo: the CUTLASS headers are not in CUTLASS_DIR"):
        script.find_cutlass()
    with pytest.raises(SystemExit, match=r"^demo: the CUDA toolkit at .* has no cuda_runtime\.h"):
        script.first(tmp_path, "cuda_runtime.h", "include")
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(SystemExit, match=r"^demo: MAX_JOBS is 'many': set it to a number above 0$"):
        script.compile_library(tmp_path / "x.so", "demo")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"^demo: g\+\+ is missing: apt install g\+\+$"):
        script.find_gxx()
    with pytest.raises(SystemExit, match=r"(?s)^demo: x\.o was not built\n.*to repeat it: /bin/ls"):
        script.run(["/bin/ls", "/nowhere", "x.o"])


# ---- a build by pip -----------------------------------------------------------------------------


def test_pip_builds_a_package_that_works_without_fagen(tmp_path):
    folder, site = tmp_path / "a folder, quick", tmp_path / "site"
    vendored("quick", "torch", folder, COMBINE)
    installed(folder, site, "--no-build-isolation")
    path = walled(tmp_path / "wall", site)
    assert python("-c", USED, "quick", cwd=tmp_path, PYTHONPATH=path).splitlines() == seen("quick")
    words = [sys.executable, "-m", "pip", "install", "--no-build-isolation", folder]
    answer = run([*map(str, words)], env={"CUDA_HOME": "/nowhere", "PYTHONPATH": path})
    lines = (answer.stdout + answer.stderr).splitlines()
    (message,) = [line for line in lines if "CUDA_HOME" in line]
    assert answer.returncode and "quick: CUDA_HOME is /nowhere: unset it" in message
    (folder / f"src/{COMBINE}_torch.cpp").write_text("nonsense")
    build = "from compile_kernels import *; compile_library(Path('made.so'), 'quick')"
    answer = run([sys.executable, "-c", build], cwd=folder)
    assert answer.returncode == 1 and not (folder / "made.so").exists()
    assert f"quick: {tempfile.gettempdir()}" in answer.stderr and "nonsense" in answer.stderr
    assert "to repeat it: " in answer.stderr and "Traceback" not in answer.stderr
