"""Toolchains of every kind of completeness, made of scripts, go in; paths or remedies come out."""

import os
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fagen import paths, programs, toolchain
from fagen.build import build_together
from fagen.doctor import doctor
from fagen.errors import ToolchainError
from fagen.process import run
from tests.cli_helpers import finding_of
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
    files = "bin/ptxas nvvm/bin/cicc include/cuda_runtime.h include/crt/host_config.h"
    for file in (*files.split(), f"{lib}/libcudart_static.a"):
        (root / file).touch()
    (root / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {headers}\n")
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


def refusal(find, *args: object) -> str:
    """What is said where something is not found."""
    with pytest.raises(ToolchainError) as refused:
        find(*args)
    return str(refused.value)


def test_this_machine_has_a_whole_toolchain():
    tools = toolchain.find_toolchain()
    assert tools.nvcc.is_file() and (tools.cuda_include / "cuda_runtime.h").is_file()
    assert (tools.cutlass / "cute/tensor.hpp").is_file()
    assert any((folder / "libcudart_static.a").is_file() for folder in tools.library_dirs)


def test_everything_missing_is_named_at_once_with_the_command_that_fixes_it(bare):
    lines = refusal(toolchain.find_toolchain).splitlines()
    for line, command in zip(
        lines,
        (
            'pip install "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"',
            "apt install g++",
            "pip install ninja",
            "pip install --no-deps nvidia-cutlass==4.2.0.0",
        ),
        strict=True,
    ):
        assert command in line


def test_cuda_home_alone_counts_where_it_is_set(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", make_cuda(tmp_path / "system"))
    monkeypatch.setenv("CUDA_HOME", str(make_cuda(tmp_path / "own", "13.1", "13010")))
    assert toolchain.find_nvcc().nvcc_version == "13.1.88"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    message = refusal(toolchain.find_nvcc)
    assert re.match(r"CUDA_HOME is .*nowhere, where there is no bin/nvcc", message)


def test_where_cuda_home_is_wrong_the_advice_is_what_helps(bare, tmp_path, monkeypatch):
    def advice(home: Path) -> str:
        monkeypatch.setenv("CUDA_HOME", str(home))
        with pytest.raises(programs.MissingError) as missing:
            toolchain.find_nvcc()
        return missing.value.remedy

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
    too_old = r"nvcc 11\.8\.88 at .* is too old, 12\.4 is the oldest"
    assert re.search(too_old, refusal(toolchain.find_nvcc))
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", make_cuda(tmp_path / "new", lib="lib64"))
    compiler = toolchain.find_nvcc()
    assert compiler.nvcc_version == "13.0.88"
    assert compiler.library_dirs == (tmp_path / "new/lib64",)


def test_a_wrapper_on_path_leads_to_the_toolkit_behind_it(bare, tmp_path):
    real = make_cuda(tmp_path / "real")
    make_program(bare / "nvcc", f'#!/bin/sh\nexec {real}/bin/nvcc "$@"\n')
    compiler = toolchain.find_nvcc()
    assert (compiler.nvcc, compiler.cuda_include) == (bare / "nvcc", real / "include")


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
    assert toolchain.find_nvcc().cuda_include == site / "cu13/include"
    tools = toolchain.find_disassembler()
    assert tools is not None and tools.nvdisasm == site / "cu13/bin/nvdisasm"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("include/cuda_runtime.h", "cudart"),
        ("lib/libcudart_static.a", "cudart"),
        ("include/crt/host_config.h", "crt"),
        ("nvvm/bin/cicc", "nvvm"),
        (None, r"13\.0\.88 but its headers are of 13\.5"),
    ],
)
def test_half_a_toolkit_or_two_are_refused_by_what_is_wrong(
    bare, tmp_path, monkeypatch, file, words
):
    root = make_cuda(tmp_path / "cuda", headers="13000" if file else "13050")
    if file:
        (root / file).unlink()
        words = rf"lacks .*{words}.*: unset it, and python -m pip"
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert re.search(words, refusal(toolchain.find_nvcc))


def test_cutlass_is_found_in_a_checkout_or_its_include_folder_and_an_old_one_refused(
    bare, tmp_path, monkeypatch
):
    include = make_cutlass(tmp_path / "checkout/include", (4, 3, 1))
    for place in (include, include.parent):
        monkeypatch.setenv("FAGEN_CUTLASS", str(place))
        assert toolchain.find_cutlass() == (include, "4.3.1")
    old, odd = make_cutlass(tmp_path / "old", (3, 5, 0)), make_cutlass(tmp_path / "odd")
    too_old = r"CUTLASS 0\.0\.0 at .* is too old"
    for place, text, words in (
        (old, None, r"CUTLASS 3\.5\.0 at .* is too old"),
        (tmp_path, None, "not in FAGEN_CUTLASS"),
        (odd, b"\xff\xfe", too_old),  # its version is no text
        (odd, b"#define CUTLASS_MAJOR " + b"9" * 5000, too_old),
        (odd, b"", too_old),
    ):
        if text is not None:
            (odd / "cutlass/version.h").write_bytes(text)
        monkeypatch.setenv("FAGEN_CUTLASS", str(place))
        assert re.search(words, refusal(toolchain.find_cutlass))


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
    root = Path(toolchain.__file__).parent.parent
    answer = run([sys.executable, "-c", code], cwd=root).stdout
    assert re.fullmatch(r"2\.\d+\.\S* True False\n", answer)


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
    gpu, of_driver = finding_of("GPU"), finding_of("driver")
    assert gpu.ok and gpu.found == "NVIDIA H200"
    assert of_driver.ok is fits
    assert fits or "R580" in of_driver.remedy


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
    assert toolchain.find_nvcc().newest["g++"] == newest
    own = make_cuda(tmp_path / "own", release, headers)
    (own / "include/crt/host_config.h").write_text("#if __GNUC__ > 16\n#error no\n#endif\n")
    monkeypatch.setenv("CUDA_HOME", str(own))
    assert toolchain.find_nvcc().newest["g++"] == 16


def test_this_nvccs_own_limit_is_read_as_its_table_has_it():
    nvcc = toolchain.find_nvcc()
    if programs.numbers(nvcc.nvcc_version) < (13, 1):
        for name, until in toolchain.HOSTS_UNTIL.items():
            assert nvcc.newest[name] == toolchain._newest(until, nvcc.nvcc_version)


def test_a_g_too_new_for_nvcc_is_refused_or_an_older_one_beside_it_taken(bare, nvcc):
    make_gxx(bare / "g++", "16.1.0")
    too_new = (
        r"g\+\+ 16\.1\.0 at .* is too new for nvcc 13\.0\.88, which takes g\+\+ 15 at most: apt "
    )
    assert re.match(too_new + r"install g\+\+-15", refusal(toolchain.find_gxx, nvcc))
    finding = finding_of("g++")
    assert not finding.ok and finding.remedy == "apt install g++-15"
    assert "is too new" in refusal(toolchain.find_toolchain)
    assert toolchain.find_gxx() == (bare / "g++", "16.1.0")  # the simulator has no nvcc
    make_gxx(bare / "g++-16", "16.1.0")
    older = make_gxx(bare / "g++-14", "14.2.0")
    assert toolchain.find_gxx(nvcc) == (older, "14.2.0")
    assert finding_of("g++").found == f"14.2.0 at {older}"
    make_gxx(bare / "g++", "8.5.0")
    assert toolchain.find_gxx(nvcc) == (older, "14.2.0")


def test_nvcc_ccbin_and_then_cxx_name_the_host_compiler(bare, tmp_path, nvcc, monkeypatch):
    make_gxx(bare / "g++", "12.2.0")
    own = make_gxx(tmp_path / "own/g++", "13.1.0")
    other = make_gxx(tmp_path / "a folder/x86_64-conda-linux-gnu-g++", "14.1.0")
    named = make_gxx(bare / "g++-11", "11.4.0")
    make_gxx(bare / "gcc-11", "11.4.0")
    for name, path in (
        (own, own), (own.parent / "gcc", own), ("g++-11", named), ("gcc-11", named),
        ("ccache distcc g++-11", named), (f"/usr/bin/ccache '{own}'", own), (f"'{other}'", other),
    ):  # fmt: skip
        monkeypatch.setenv("CXX", str(name))
        assert toolchain.find_gxx(nvcc)[0] == path, name
    for name, path in ((other, other), (own.parent, own), ("g++-11", named)):
        monkeypatch.setenv("NVCC_CCBIN", str(name))
        assert toolchain.find_gxx(nvcc)[0] == path, name


def make_clang(path: Path, version: str) -> Path:
    """It has no -dumpfullversion."""
    answer = f'[ "$1" = --version ] && echo "Some clang version {version}+1" && exit 0; exit 1'
    return make_program(path, f"#!/bin/sh\n{answer}\n")


def test_a_host_compiler_may_be_clang(bare, tmp_path, nvcc, monkeypatch):
    make_gxx(bare / "g++", "12.2.0")
    clang = make_clang(tmp_path / "clang++-20", "20.1.8")
    monkeypatch.setenv("CXX", str(clang))
    assert toolchain.find_gxx(nvcc) == (clang, "clang 20.1.8")
    monkeypatch.setenv("NVCC_CCBIN", str(clang.with_name("clang-20")))
    assert toolchain.find_gxx(nvcc) == (clang, "clang 20.1.8")
    make_clang(clang, "8.0.1")
    assert re.search(r"clang\+\+ 8\.0\.1 at .* is too old", refusal(toolchain.find_gxx, nvcc))


@pytest.mark.parametrize("variable", ["NVCC_CCBIN", "CXX"])
def test_a_host_compiler_that_will_not_do_is_refused_by_its_variable(
    bare, tmp_path, nvcc, monkeypatch, variable
):
    make_gxx(bare / "g++", "12.2.0")
    other = make_program(tmp_path / "icpx", "#!/bin/sh\necho unknown argument >&2; exit 1\n")
    clang = make_clang(tmp_path / "clang++", "21.1.0")
    for name, words in (
        ("/nowhere/g++", "no such compiler"), (__file__, "is no g"), ("/dev/zero", "no such"),
        ("icpx", "no such compiler"),
        (str(other), "is no g"), (str(clang), r"clang\+\+ 21\.1\.0 at .* is too new for nvcc"),
        (str(make_gxx(tmp_path / "new", "16.1.0")), "is too new for nvcc"),
        (str(make_gxx(tmp_path / "old", "8.1.0")), "is too old"),
        ("a\nb", "no such compiler|one program"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, name)
        message = refusal(toolchain.find_gxx, nvcc)
        assert re.search(words, message)
        assert f"set {variable} to the path of a g++ or clang++, or unset it" in message
        assert message.isprintable()
    if variable == "CXX":
        monkeypatch.setenv("CXX", "g++ -m32")
        assert "not one program alone" in refusal(toolchain.find_gxx, nvcc)


def test_max_jobs_says_how_many_compilers_run_at_once(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert toolchain.compile_jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.compile_jobs() == 3
    commands = []
    monkeypatch.setattr("fagen.build.together.run", lambda argv, **_: commands.append(argv))
    build_together(["x"])
    assert commands[0][-2:] == ["-j", "3"]
    for odd in ("0", "-1", "many", "1.5", "99999", "1\n"):
        monkeypatch.setenv("MAX_JOBS", odd)
        message = refusal(toolchain.compile_jobs)
        assert re.match(r"MAX_JOBS is .*: set it to a number from 1 to", message)
        finding = finding_of("compilers")
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


def test_what_is_installed_by_the_extra_is_what_is_tested_and_told():
    root = Path(toolchain.__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    cuda = extras["optional-dependencies"]["cuda"]
    assert cuda[0] == "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"  # all five, or they drift
    advice = f"{toolchain.INSTALL_NVCC} {toolchain.INSTALL_DISASSEMBLER}".replace('"', "")
    assert set(cuda) <= set(advice.split())
    makefile = (root / "Makefile").read_text()
    assert all(package in makefile for package in cuda)


def test_nobody_sets_the_macro_that_quadruples_the_time_to_compile():
    flags = " ".join((*toolchain.FLAGS, *toolchain.BINDING_FLAGS))
    assert "EXTENDED_MMA_SHAPES" not in flags and "fast_math" not in flags
