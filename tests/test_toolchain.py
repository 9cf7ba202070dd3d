"""Toolchains of every kind of completeness, made of scripts, go in; paths or remedies come out."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fagen import paths, programs, toolchain
from fagen.build import build_together
from fagen.doctor import doctor
from fagen.errors import ToolchainError
from tests.scripted_compilers import make_cutlass, make_program

NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
*) echo "#\\$ TOP={root}/bin/.." >&2 ;;
esac
"""


def make_cuda(root: Path, release: str = "13.0", headers: str = "13000", lib: str = "lib") -> Path:
    """A CUDA toolkit in the shape of NVIDIA's wheels, with nothing in it but what is looked for."""
    for folder in ("bin", "include/crt", "nvvm/bin", lib):
        (root / folder).mkdir(parents=True)
    make_program(root / "bin/nvcc", NVCC.format(release=release, root=root))
    for file in (
        "bin/ptxas",
        "nvvm/bin/cicc",
        "include/cuda_runtime.h",
        "include/crt/host_config.h",
    ):
        (root / file).touch()
    (root / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {headers}\n")
    (root / lib / "libcudart_static.a").touch()
    return root


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    """A machine with nothing: no programs, no wheels, no variables; returns its folder on PATH."""
    folder = tmp_path / "path"
    folder.mkdir()
    for name in ("CUDA_HOME", "FAGEN_CUTLASS", "NVCC_CCBIN", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(paths.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "no-cuda")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    return folder


def test_this_machine_has_a_whole_toolchain():
    found = toolchain.find_toolchain()
    assert found.nvcc.is_file() and (found.cuda_include / "cuda_runtime.h").is_file()
    assert (found.cutlass / "cute/tensor.hpp").is_file()
    assert any((folder / "libcudart_static.a").is_file() for folder in found.library_dirs)


def test_everything_missing_is_named_at_once_with_the_command_that_fixes_it(bare):
    with pytest.raises(ToolchainError) as caught:
        toolchain.find_toolchain()
    said = str(caught.value)
    assert 'pip install "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"' in said
    assert "pip install --no-deps nvidia-cutlass==4.2.0.0" in said
    assert "apt install g++" in said
    assert "pip install ninja" in said
    assert len(said.splitlines()) == 4


def test_cuda_home_alone_counts_where_it_is_set(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", make_cuda(tmp_path / "system"))
    monkeypatch.setenv("CUDA_HOME", str(make_cuda(tmp_path / "own", "13.1", "13010")))
    assert toolchain.find_nvcc().version == "13.1.88"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=r"CUDA_HOME is .*nowhere, where there is no bin/nvcc"):
        toolchain.find_nvcc()


def test_where_cuda_home_is_wrong_the_advice_is_what_helps(bare, tmp_path, monkeypatch):
    def advice(home: Path) -> str:
        monkeypatch.setenv("CUDA_HOME", str(home))
        with pytest.raises(programs.MissingError) as caught:
            toolchain.find_nvcc()
        return caught.value.remedy

    # an installed package would not be looked at either
    assert advice(tmp_path / "nowhere").startswith("unset it, and python -m pip install")
    own, system = make_cuda(tmp_path / "own"), make_cuda(tmp_path / "system", "13.1", "13010")
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", system)
    assert advice(tmp_path / "nowhere") == (f"unset it, nvcc 13.1.88 at {system}/bin/nvcc will do")
    assert advice(own / "bin") == f"set it to {own}, nvcc 13.0.88 at {own}/bin/nvcc will do"
    half = make_cuda(tmp_path / "half")
    (half / "bin/ptxas").unlink()
    assert advice(half).startswith("unset it, nvcc 13.1.88")


def test_an_old_nvcc_on_path_is_passed_over_for_a_new_one(bare, tmp_path, monkeypatch):
    old = make_cuda(tmp_path / "old", "11.8", "11080")
    (bare / "nvcc").symlink_to(old / "bin/nvcc")
    with pytest.raises(
        ToolchainError, match=r"nvcc 11\.8\.88 at .* is too old, 12\.4 is the oldest"
    ):
        toolchain.find_nvcc()
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", make_cuda(tmp_path / "new", lib="lib64"))
    found = toolchain.find_nvcc()
    assert found.version == "13.0.88"
    assert found.library_dirs == (tmp_path / "new/lib64",)


def test_a_wrapper_on_path_leads_to_the_toolkit_behind_it(bare, tmp_path):
    real = make_cuda(tmp_path / "real")
    make_program(bare / "nvcc", f'#!/bin/sh\nexec {real}/bin/nvcc "$@"\n')
    found = toolchain.find_nvcc()
    assert found.nvcc == bare / "nvcc"
    assert found.include == real / "include"


def test_the_wheels_of_pypi_are_enough_and_the_newest_is_taken(bare, tmp_path, monkeypatch):
    site = tmp_path / "site-packages/nvidia"
    make_cuda(site / "cu12", "12.9", "12090")
    make_cuda(site / "cu13")
    for tool in ("nvdisasm", "cuobjdump"):
        (site / "cu13/bin" / tool).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(site)], origin=None)
    monkeypatch.setattr(
        toolchain.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None
    )
    assert toolchain.find_nvcc().include == site / "cu13/include"
    tools = toolchain.find_disassembler()
    assert tools is not None and tools.nvdisasm == site / "cu13/bin/nvdisasm"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("include/cuda_runtime.h", "cudart"),
        ("lib/libcudart_static.a", "cudart"),
        ("include/crt/host_config.h", "crt"),
        ("nvvm/bin/cicc", "nvvm"),
    ],
)
def test_half_a_toolkit_is_refused_by_what_it_lacks(bare, tmp_path, monkeypatch, file, words):
    root = make_cuda(tmp_path / "cuda")
    (root / file).unlink()
    monkeypatch.setenv("CUDA_HOME", str(root))
    with pytest.raises(ToolchainError, match=rf"lacks .*{words}.*: unset it, and python -m pip"):
        toolchain.find_nvcc()


def test_headers_of_another_release_than_the_compiler_are_refused(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make_cuda(tmp_path / "cuda", "13.0", "13050")))
    with pytest.raises(ToolchainError, match=r"13\.0\.88 but its headers are of 13\.5"):
        toolchain.find_nvcc()


def test_cutlass_is_found_in_a_checkout_or_its_include_folder_and_an_old_one_refused(
    bare, tmp_path, monkeypatch
):
    include = make_cutlass(tmp_path / "checkout/include", (4, 3, 1))
    for place in (include, include.parent):
        monkeypatch.setenv("FAGEN_CUTLASS", str(place))
        assert toolchain.find_cutlass() == (include, "4.3.1")
    monkeypatch.setenv("FAGEN_CUTLASS", str(make_cutlass(tmp_path / "old", (3, 5, 0))))
    with pytest.raises(ToolchainError, match=r"CUTLASS 3\.5\.0 at .* is too old"):
        toolchain.find_cutlass()
    monkeypatch.setenv("FAGEN_CUTLASS", str(tmp_path))
    with pytest.raises(ToolchainError, match="not in FAGEN_CUTLASS"):
        toolchain.find_cutlass()


@pytest.mark.parametrize(
    ("version", "usable"),
    [("2.9.1", False), ("2.10.0+cu128", True), ("2.13.0+cpu", True), ("3.0.0a0+git1", True)],
)
def test_any_torch_since_the_stable_abi_that_is_asked_for_will_do(tmp_path, version, usable):
    header = tmp_path / "include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert toolchain.Torch(version, tmp_path).usable is usable
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in toolchain.BINDING_FLAGS


def test_torch_is_found_without_being_imported():
    code = (
        "import sys; from fagen.toolchain import find_torch; t = find_torch();"
        "print(t.version, t.usable, 'torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(toolchain.__file__).parent.parent,
    ).stdout.split()  # fmt: skip
    assert re.fullmatch(r"2\.\d+\..*", said[0]) and said[1:] == ["True", "False"]


def test_the_doctor_names_a_remedy_for_all_that_ails_and_never_raises(bare):
    findings = {finding.name: finding for finding in doctor()}
    ill = {name for name, finding in findings.items() if not finding.ok}
    assert ill >= {"nvcc", "g++", "ninja", "CUTLASS", "disassembler", "torch", "GPU"}
    assert all(findings[name].remedy and findings[name].needed_for for name in ill)


@pytest.mark.parametrize(("driver", "fits"), [("580.95.05", True), ("575.57.08", False)])
def test_the_doctor_compares_the_driver_with_the_runtime_that_is_linked(
    bare, tmp_path, monkeypatch, driver, fits
):
    monkeypatch.setenv("CUDA_HOME", str(make_cuda(tmp_path / "cuda")))
    make_program(
        bare / "nvidia-smi",
        "#!/bin/sh\n"
        f'case "$1" in *driver*) echo {driver};; *name*) echo NVIDIA H200;; *) echo 9.0;; esac\n',
    )
    findings = {finding.name: finding for finding in doctor()}
    assert findings["GPU"].ok and findings["GPU"].found == "NVIDIA H200"
    assert findings["driver"].ok is fits
    assert fits or "R580" in findings["driver"].remedy


# ---- g++, and how many at once -------------------------------------------------------------------


def make_gxx(path: Path, version: str) -> Path:
    return make_program(path, f"#!/bin/sh\necho {version}\n")


@pytest.fixture
def nvcc(bare, tmp_path, monkeypatch) -> toolchain.Compiler:
    monkeypatch.setenv("CUDA_HOME", str(make_cuda(tmp_path / "cuda")))
    return toolchain.find_nvcc()


@pytest.mark.parametrize(
    ("release", "newest"),
    [("12.4", 13), ("12.6", 13), ("12.8", 14), ("12.9", 14), ("13.0", 15), ("13.1", 15)],
)
def test_the_newest_g_that_an_nvcc_takes_is_told_by_its_headers_or_else_by_its_release(
    bare, tmp_path, monkeypatch, release, newest
):
    major, minor = release.split(".")
    headers = f"{int(major) * 1000 + int(minor) * 10}"
    root = make_cuda(tmp_path / "cuda", release, headers)
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert toolchain.find_nvcc().newest_gxx == newest
    own = make_cuda(tmp_path / "own", release, headers)
    (own / "include/crt/host_config.h").write_text("#if __GNUC__ > 16\n#error no\n#endif\n")
    monkeypatch.setenv("CUDA_HOME", str(own))
    assert toolchain.find_nvcc().newest_gxx == 16


def test_this_nvccs_own_limit_is_read_as_its_table_has_it():
    found = toolchain.find_nvcc()
    release = programs.numbers(found.version)
    if release < (13, 1):
        assert found.newest_gxx == toolchain._newest(toolchain.GXX_UNTIL, found.version)
        assert found.newest_clang == toolchain._newest(toolchain.CLANG_UNTIL, found.version)


def test_a_g_too_new_for_nvcc_is_refused_or_an_older_one_beside_it_taken(bare, nvcc):
    make_gxx(bare / "g++", "16.1.0")
    said = r"g\+\+ 16\.1\.0 at .* is too new for nvcc 13\.0\.88, which takes g\+\+ 15 at most: apt "
    with pytest.raises(ToolchainError, match=said + r"install g\+\+-15"):
        toolchain.find_gxx(nvcc)
    (finding,) = (one for one in doctor() if one.name == "g++")
    assert not finding.ok and finding.remedy == "apt install g++-15"
    with pytest.raises(ToolchainError, match="is too new"):
        toolchain.find_toolchain()
    assert toolchain.find_gxx() == (bare / "g++", "16.1.0")  # the simulator has no nvcc
    make_gxx(bare / "g++-16", "16.1.0")
    older = make_gxx(bare / "g++-14", "14.2.0")
    assert toolchain.find_gxx(nvcc) == (older, "14.2.0")
    assert next(one for one in doctor() if one.name == "g++").found == f"14.2.0 at {older}"
    make_gxx(bare / "g++", "8.5.0")
    assert toolchain.find_gxx(nvcc) == (older, "14.2.0")


def test_nvcc_ccbin_and_then_cxx_name_the_host_compiler(bare, tmp_path, nvcc, monkeypatch):
    make_gxx(bare / "g++", "12.2.0")
    own = make_gxx(tmp_path / "own/g++", "13.1.0")
    other = make_gxx(tmp_path / "a folder/x86_64-conda-linux-gnu-g++", "14.1.0")
    named = make_gxx(bare / "g++-11", "11.4.0")
    for said, found in (
        (own, own), (own.parent / "gcc", own), ("g++-11", named), ("gcc-11", named),
        ("ccache distcc g++-11", named), (f"/usr/bin/ccache '{own}'", own), (f"'{other}'", other),
    ):  # fmt: skip
        make_gxx(bare / "gcc-11", "11.4.0")
        monkeypatch.setenv("CXX", str(said))
        assert toolchain.find_gxx(nvcc)[0] == found, said
    for said, found in ((other, other), (own.parent, own), ("g++-11", named)):
        monkeypatch.setenv("NVCC_CCBIN", str(said))
        assert toolchain.find_gxx(nvcc)[0] == found, said


def make_clang(path: Path, version: str) -> Path:
    """It has no -dumpfullversion."""
    told = f'[ "$1" = --version ] && echo "Some clang version {version}+1" && exit 0; exit 1'
    return make_program(path, f"#!/bin/sh\n{told}\n")


def test_a_host_compiler_may_be_clang(bare, tmp_path, nvcc, monkeypatch):
    make_gxx(bare / "g++", "12.2.0")
    clang = make_clang(tmp_path / "clang++-20", "20.1.8")
    monkeypatch.setenv("CXX", str(clang))
    assert toolchain.find_gxx(nvcc) == (clang, "clang 20.1.8")
    monkeypatch.setenv("NVCC_CCBIN", str(clang.with_name("clang-20")))
    assert toolchain.find_gxx(nvcc) == (clang, "clang 20.1.8")
    make_clang(clang, "8.0.1")
    with pytest.raises(ToolchainError, match=r"clang\+\+ 8\.0\.1 at .* is too old"):
        toolchain.find_gxx(nvcc)


@pytest.mark.parametrize("variable", ["NVCC_CCBIN", "CXX"])
def test_a_host_compiler_that_will_not_do_is_refused_by_its_variable(
    bare, tmp_path, nvcc, monkeypatch, variable
):
    make_gxx(bare / "g++", "12.2.0")
    other = make_program(tmp_path / "icpx", "#!/bin/sh\necho unknown argument >&2; exit 1\n")
    clang = make_clang(tmp_path / "clang++", "21.1.0")
    for said, words in (
        ("/nowhere/g++", "no such compiler"), (__file__, "is no g"), ("/dev/zero", "no such"),
        ("icpx", "no such compiler"),
        (str(other), "is no g"), (str(clang), r"clang\+\+ 21\.1\.0 at .* is too new for nvcc"),
        (str(make_gxx(tmp_path / "new", "16.1.0")), "is too new for nvcc"),
        (str(make_gxx(tmp_path / "old", "8.1.0")), "is too old"),
        ("a\nb", "no such compiler|one program"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, said)
        with pytest.raises(ToolchainError, match=words) as refused:
            toolchain.find_gxx(nvcc)
        assert f"set {variable} to the path of a g++ or clang++, or unset it" in str(refused.value)
        assert str(refused.value).isprintable()
    if variable == "CXX":
        monkeypatch.setenv("CXX", "g++ -m32")
        with pytest.raises(ToolchainError, match="not one program alone"):
            toolchain.find_gxx(nvcc)


def test_max_jobs_says_how_many_compilers_run_at_once(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert toolchain.compile_jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.compile_jobs() == 3
    asked = []
    monkeypatch.setattr("fagen.build.together.run", lambda argv, **_: asked.append(argv))
    build_together(["x"])
    assert asked[0][-2:] == ["-j", "3"]
    for odd in ("0", "-1", "many", "1.5", "99999", "1\n"):
        monkeypatch.setenv("MAX_JOBS", odd)
        with pytest.raises(ToolchainError, match=r"MAX_JOBS is .*: set it to a number from 1 to"):
            toolchain.compile_jobs()
        (finding,) = (one for one in doctor() if one.name == "compilers")
        assert not finding.ok and "MAX_JOBS" in finding.found


def test_folders_named_from_where_one_is_are_found_from_anywhere(bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_cuda(tmp_path / "cuda")
    make_cutlass(tmp_path / "cutlass")
    monkeypatch.setenv("CUDA_HOME", "cuda")
    monkeypatch.setenv("FAGEN_CUTLASS", "./cutlass")
    make_gxx(tmp_path / "g++", "12.2.0")
    monkeypatch.setenv("CXX", "./g++")
    assert toolchain.find_nvcc().nvcc == tmp_path / "cuda/bin/nvcc"
    assert toolchain.find_cutlass()[0] == tmp_path / "cutlass"
    assert toolchain.find_gxx()[0] == tmp_path / "g++"


@pytest.mark.parametrize("text", [b"\xff\xfe", b"#define CUTLASS_MAJOR " + b"9" * 5000, b""])
def test_a_version_of_cutlass_that_is_no_text_is_too_old(bare, tmp_path, monkeypatch, text):
    (make_cutlass(tmp_path / "cutlass") / "cutlass/version.h").write_bytes(text)
    monkeypatch.setenv("FAGEN_CUTLASS", str(tmp_path / "cutlass"))
    with pytest.raises(ToolchainError, match=r"CUTLASS 0\.0\.0 at .* is too old"):
        toolchain.find_cutlass()


def test_what_is_installed_by_the_extra_is_what_is_tested_and_told():
    root = Path(toolchain.__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    cuda = extras["optional-dependencies"]["cuda"]
    assert cuda[0] == "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"  # all five, or they drift
    told = f"{toolchain.INSTALL_NVCC} {toolchain.INSTALL_DISASSEMBLER}".replace('"', "")
    assert set(cuda) <= set(told.split())
    made = (root / "Makefile").read_text()
    assert all(one in made for one in cuda)


def test_nobody_sets_the_macro_that_quadruples_the_time_to_compile():
    flags = " ".join((*toolchain.FLAGS, *toolchain.BINDING_FLAGS))
    assert "EXTENDED_MMA_SHAPES" not in flags and "fast_math" not in flags
