"""What decides a build beside its source: compilers, what they find, and no variable of a user."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fagen.build import records, store
from fagen.build.digests import digests
from fagen.build.steps import run_steps
from fagen.errors import BuildError, CacheError, RefusedBuild, ToolchainError
from fagen.paths import compiler_environment
from fagen.programs import MissingError
from fagen.toolchain import find_gxx, find_ninja, find_nvcc, find_toolchain
from tests.cli_helpers import finding_of
from tests.scripted_compilers import GOOD, GXX, SPILLS, make, make_cutlass, make_program

# what nvcc, g++ and ld would take from a user's environment
MEDDLING = {
    **dict.fromkeys(
        ("INCLUDES", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"), "/elsewhere"
    ),
    **dict.fromkeys(("GCC_EXEC_PREFIX", "COMPILER_PATH", "LD_RUN_PATH"), "/elsewhere/"),
    **dict.fromkeys(("CFLAGS", "CXXFLAGS"), "-ffast-math"),
    "NVCC_APPEND_FLAGS": "--use_fast_math",
    "NVCC_PREPEND_FLAGS": "-G",
    "CUDAFE_FLAGS": "--diag_suppress 1",
    "PTXAS_FLAGS": "-O0",
    "LD_PRELOAD": "",
    "SOURCE_DATE_EPOCH": "1",
    "LANG": "de_DE.UTF-8",
    "TMPDIR": "/tmp",
    "MAKEFLAGS": "-j9",
}


@pytest.fixture
def log(tmp_path) -> Path:
    """What the compiler saw."""
    return tmp_path / "told"


def test_a_compiler_sees_what_fagen_states_and_nothing_of_a_user(planned, tools, log, monkeypatch):
    for name, value in MEDDLING.items():
        monkeypatch.setenv(name, value)
    binary = make(GOOD, planned, tools)
    *lines, words = log.read_text().splitlines()
    stated = dict(line.split("=", 1) for line in lines)
    own = {"PWD", "OLDPWD", "SHLVL", "_", "FAGEN_RUNS"}  # of the shell, and of fagen's watch
    assert set(stated) - own <= {"PATH", "HOME", "LD_LIBRARY_PATH", *compiler_environment()}
    assert (stated["LC_ALL"], stated["TMPDIR"]) == ("C", ".")
    assert words.startswith(f"-ccbin {tools.gxx} ")  # and no gcc that happens to be on PATH
    record = records.read_record(binary.folder)
    assert record and record.environment == compiler_environment()
    for name in MEDDLING:
        monkeypatch.delenv(name)
    assert make(GOOD, planned, tools).cached


def test_a_refusal_is_of_a_build_that_no_variable_meddled_with(planned, tools, log, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-maxrregcount=32")
    with pytest.raises(RefusedBuild) as refused:
        make(SPILLS, planned, tools)
    assert "maxrregcount" not in log.read_text()
    command = str(refused.value).splitlines()[-1]
    assert "&& env -i PATH=" in command and "LC_ALL=C" in command  # as it was run


def test_g_and_nvcc_themselves_find_nothing_by_variables(tmp_path, monkeypatch):
    (tmp_path / "stdio.h").write_text("#error found\n")
    (tmp_path / "x.cpp").write_text("#include <stdio.h>\n")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "--no-such-flag")
    step = ("x.o", [find_gxx()[0], "-c", "x.cpp", "-o", "x.o"])
    run_steps(tmp_path, tmp_path, find_ninja()[0], [step, ("y.o", ["cp", "x.o", "y.o"])])
    assert find_nvcc().nvcc_version


def test_a_logger_tells_what_is_built_and_for_how_long_and_nobody_else_hears_of_it(
    planned, tools, capfd
):
    heard: list[logging.LogRecord] = []
    handler, logger = logging.Handler(logging.DEBUG), logging.getLogger("fagen")
    handler.emit = heard.append  # type: ignore[method-assign]
    make(GOOD, planned, tools)
    assert capfd.readouterr() == ("", "")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        make(GOOD, planned, tools)  # from the cache
        assert heard == []
        make(GOOD, planned, replace(tools, nvcc_version="13.0.89"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [record.levelname for record in heard] == ["INFO", "INFO"]
    begun, done = (record.getMessage() for record in heard)
    assert begun == "fwd_x: compiling the kernel with nvcc 13.0.89"
    assert re.fullmatch(r"fwd_x: compiled the kernel in \d+\.\d s", done)


FILES = {  # whose version stays when they change
    "a wrapper of nvcc": "bin/nvcc",
    "a wrapper of g++": "bin/g++",
    "nvcc's profile": "nvcc.profile",
    "the assembler on PATH": "path/as",
    "the linker on PATH": "path/ld",
    "a header of CUTLASS": "cutlass/cute/tensor.hpp",
}
VERSIONS = {"nvcc_version": "13.0.89", "gxx_version": "13.1.0", "cutlass_version": "4.3.0"}


@pytest.mark.parametrize("what", [*FILES, *VERSIONS, "flags", "a comment"])
def test_whatever_decides_the_outcome_decides_the_folder(
    planned, tools, tmp_path, monkeypatch, what
):
    for name in ("as", "ld"):
        make_program(tmp_path / "path" / name, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAGEN_CUTLASS", str(tools.cutlass))
    os.mkfifo(tools.cutlass / "cute/nobody_writes_here.hpp")
    (tools.cutlass / "cute/gone.hpp").symlink_to("nowhere")
    first = make(GOOD, planned, tools)
    log = GOOD
    if what in FILES:
        changed = tmp_path / FILES[what]
        changed.write_text(changed.read_text() + "# -ffast-math\n")
    elif what in VERSIONS:
        tools = replace(tools, **{what: VERSIONS[what]})
    elif what == "flags":
        monkeypatch.setattr("fagen.build.FLAGS", ("-O0",))
    else:
        log += "// a comment\n"
    second = make(log, planned, tools)
    assert not second.cached and second.folder != first.folder
    written = [records.read_record(result.folder) for result in (first, second)]
    assert written[0] and written[1]
    assert (written[0].digests != written[1].digests) == (what in FILES)


def test_the_same_programs_elsewhere_make_the_same(tools, tmp_path):
    moved = {name: tmp_path / "moved" / name for name in ("nvcc", "g++")}
    for name, path in moved.items():
        make_program(path, (tmp_path / "bin" / name).read_text())
    assert digests(replace(tools, nvcc=moved["nvcc"], gxx=moved["g++"])) == digests(tools)


# ---- paths and disks -----------------------------------------------------------------------------

ODD = {
    "newline": "a\nbuild all: phony\n",
    "quote": "a'b; exit",
    "dollar": "$a $out",
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", ODD)
def test_no_path_of_the_cache_is_read_as_a_rule_or_a_command(
    planned, tools, tmp_path, monkeypatch, name
):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / ODD[name]))
    program = make_program(tmp_path / ODD[name] / "g++", GXX.format(folder=tmp_path))
    binary = make(GOOD, planned, replace(tools, gxx=program))
    assert binary.library.read_text() == "machine code" and make(GOOD, planned, tools).cached
    rules = (binary.folder / "build.ninja").read_text()
    assert rules.count("build ") == 2 and rules.count("rule ") == 1 and "$a" not in rules
    with pytest.raises(BuildError) as failed:
        make(SPILLS, planned, tools)
    assert all(line.isprintable() for line in str(failed.value).split("\n"))
    assert not any(line.startswith("build all") for line in str(failed.value).split("\n"))


@pytest.mark.parametrize("odd", ['a"b', "`touch x`", "$(touch x)", "${x?no}"])
def test_a_path_that_nvcc_would_have_a_shell_work_on_is_refused(
    planned, tools, tmp_path, monkeypatch, odd
):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / odd))
    with pytest.raises(MissingError, match="which nvcc gives to a shell: set FAGEN_CACHE to"):
        make(GOOD, planned, tools)
    finding = finding_of("cache folder")
    assert not finding.ok and "set FAGEN_CACHE" in finding.remedy
    for variable, name in (("FAGEN_CUTLASS", "cute"), ("NVCC_CCBIN", "g++"), ("CUDA_HOME", "bin")):
        make_cutlass(tmp_path / variable / odd)
        make_program(tmp_path / variable / odd / "g++", "#!/bin/sh\necho 12.2.0\n")
        make_program(tmp_path / variable / odd / "bin/nvcc", "#!/bin/sh\nexit 1\n")
        monkeypatch.setenv(variable, str(tmp_path / variable / odd))
        assert (tmp_path / variable / odd / name).exists()
        with pytest.raises(ToolchainError, match="which nvcc gives to a shell"):
            find_toolchain()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("step", ["compiler", "record"])
def test_a_full_disk_is_said_and_nothing_half_written_stays(planned, tools, monkeypatch, step):
    if step == "compiler":
        make_program(tools.nvcc, "#!/bin/sh\necho 'x.ii: No space left on device' >&2; exit 2\n")
    else:

        def full(path: Path, content: str) -> None:
            raise OSError(28, os.strerror(28), str(path))

        monkeypatch.setattr(records, "write_whole", full)
    with pytest.raises(CacheError, match=r"No space left on device(.|\n)*FAGEN_CACHE"):
        make(GOOD, planned, tools)
    assert not [path for path in store.kernels_folder().iterdir() if path.suffix != ".lock"]
