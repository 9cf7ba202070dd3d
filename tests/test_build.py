"""Builds with compilers made of scripts, to break them; and with the real ones, to hold them."""

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fagen.arch import SM90
from fagen.build import broken_promises, build, cache_entries, prune, records, store
from fagen.build.report import NO_DISASSEMBLER
from fagen.errors import BuildError, RefusedBuild
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import Plan, plan
from fagen.registry import from_slug
from fagen.registry import plan as plan_any
from fagen.toolchain import Toolchain, find_disassembler
from tests.clock import least_seconds
from tests.process_helpers import is_running, pid_said, wait_until
from tests.scripted_compilers import (
    GOOD,
    LOG,
    SPILLS,
    compilations,
    make,
    make_program,
    scripted,
    source,
)

SERIALISED = (
    "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources\n"
)


@pytest.fixture
def planned() -> Plan:
    return plan(Schedule.from_slug("fwd_fp16_d128_full_m128n128"))


@pytest.fixture
def counter(tmp_path) -> Path:
    """A file with a line for every time a compiler ran."""
    return tmp_path / "counter"


@pytest.fixture
def tools(tmp_path, cache) -> Toolchain:
    return scripted(tmp_path)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, whose path has a space and a dollar in it."""
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "my $cache"))
    return tmp_path / "my $cache/kernels"


# ---- The cache -----------------------------------------------------------------------------------


def test_the_second_build_is_found_and_no_compiler_runs(planned, tools, counter):
    first, second = make(GOOD, planned, tools), make(GOOD, planned, tools)
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first
    assert first.library.read_text() == "machine code" and compilations(counter) == 1


def test_whatever_decides_the_outcome_decides_the_folder(planned, tools, monkeypatch):
    folders = {make(GOOD, planned, tools).folder}
    folders.add(make(GOOD + "// a comment\n", planned, tools).folder)
    for change in (
        {"nvcc_version": "13.0.89"},
        {"gxx_version": "13.1.0"},
        {"cutlass_version": "4.3.0"},
    ):
        folders.add(make(GOOD, planned, replace(tools, **change)).folder)
    monkeypatch.setattr("fagen.build.FLAGS", ("-O0",))
    folders.add(make(GOOD, planned, tools).folder)
    assert len(folders) == 6


@pytest.mark.parametrize("harm", ["library gone", "library cut", "record cut", "record another"])
def test_a_broken_entry_is_built_again(planned, tools, counter, harm):
    built = make(GOOD, planned, tools)
    if harm == "library gone":
        built.library.unlink()
    elif harm == "library cut":
        built.library.write_bytes(built.library.read_bytes()[:-1])
    elif harm == "record cut":
        record = built.folder / records.RECORD
        record.write_text(record.read_text()[:100])
    else:
        (built.folder / records.RECORD).write_text("[]")
    assert [entry.state for entry in cache_entries()] == ["broken"]
    again = make(GOOD, planned, tools)
    assert not again.cached and compilations(counter) == 2
    assert again.library.read_text() == "machine code"
    assert [entry.state for entry in cache_entries()] == ["finished"]


CHILD = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is in the background ignores it
sys.path[:0] = [{tests!r}, {root!r}]
from fagen.build import build
from fagen.registry import from_slug, plan
from fagen.render import Hashes, Source
from fagen.toolchain import Toolchain
from pathlib import PosixPath
tools = {tools!r}
planned = plan(from_slug("fwd_fp16_d128_full_m128n128"))
source = Source("fwd_x", {log!r}, "", "0" * 64, "0" * 64, planned)
print(build(source, planned, binding=False, toolchain=tools).cached, flush=True)
"""


def start(tools: Toolchain, log: str, stderr: int | None = None) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    code = CHILD.format(tests=str(here), root=str(here.parent), tools=tools, log=log)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def test_a_killed_build_leaves_nothing_that_is_taken_for_finished(planned, tools, counter, cache):
    done = tools.nvcc.with_name("done")
    slow = f"until [ -e {shlex.quote(str(done))} ]; do sleep 0.01; done"
    make_program(tools.nvcc, tools.nvcc.read_text().replace("sleep 60", slow))
    child = start(tools, GOOD + "SLOW\n")
    wait_until(lambda: bool(compilations(counter)))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert [entry.state for entry in cache_entries()] == ["unfinished"]
    done.touch()
    assert not make(GOOD + "SLOW\n", planned, tools).cached
    assert [entry.state for entry in cache_entries()] == ["finished"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_leaves_no_compiler_running(tools, tmp_path, how):
    steps = {step: tmp_path / f"{step}.pid" for step in ("nvcc", "cicc")}
    quoted = {step: shlex.quote(str(path)) for step, path in steps.items()}
    make_program(
        tools.nvcc,
        "#!/bin/sh\n"
        f"echo $$ > {quoted['nvcc']}\n"
        f"sh -c 'echo $$ > \"$0\"; sleep 20; true' {quoted['cicc']}\n",
    )
    child = start(tools, GOOD, stderr=subprocess.DEVNULL)
    pids = [pid_said(path) for path in steps.values()]
    child.send_signal(how)
    child.communicate()
    wait_until(lambda: not any(map(is_running, pids)))


def test_two_processes_never_build_the_same_kernel(tools, counter):
    make_program(tools.nvcc, tools.nvcc.read_text().replace("sleep 60", "sleep 1"))
    children = [start(tools, GOOD + "SLOW\n") for _ in range(3)]
    said = sorted(child.communicate()[0].strip() for child in children)
    assert said == ["False", "True", "True"] and compilations(counter) == 1


@pytest.mark.parametrize("before", ["nothing", "broken"])
def test_what_was_finished_while_prune_looked_around_stays(tools, cache, monkeypatch, before):
    done = tools.nvcc.with_name("done")
    slow = f"until [ -e {shlex.quote(str(done))} ]; do sleep 0.01; done"
    make_program(tools.nvcc, tools.nvcc.read_text().replace("sleep 60", slow))
    log = GOOD + "SLOW\n"
    if before == "broken":
        done.touch()
        start(tools, log).communicate()
        next(cache.glob("*/fwd_x.so")).write_text("cut")
        done.unlink()
    child = start(tools, log)

    def look() -> tuple[store.CacheEntry, ...]:
        wait_until(lambda: any(cache.glob("*.making-*")))
        seen = cache_entries()
        done.touch()
        assert child.communicate()[0] == "False\n"
        return seen

    monkeypatch.setattr(store, "cache_entries", look)
    assert prune() == ()
    assert [entry.state for entry in cache_entries()] == ["finished"]


def test_a_cache_that_cannot_be_written_is_said_with_the_way_out(
    planned, tools, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot be written(.|\n)*FAGEN_CACHE"):
        make(GOOD, planned, tools)


def test_a_full_disk_is_a_build_error_and_leaves_nothing(planned, tools, monkeypatch):
    def full(folder: Path, record: object) -> None:
        raise OSError(28, os.strerror(28), str(folder))

    monkeypatch.setattr(store, "write_record", full)
    with pytest.raises(BuildError, match="No space left on device"):
        make(GOOD, planned, tools)
    assert cache_entries() == ()


def test_a_kernel_in_a_cache_that_became_read_only_is_still_found(planned, tools, monkeypatch):
    make(GOOD, planned, tools)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, os.strerror(30))

    def only_read(path: Path, flags: int, mode: int = 0o777) -> int:
        return refuse() if flags & (os.O_WRONLY | os.O_RDWR) else opened(path, flags, mode)

    opened = os.open
    for name in ("utime", "mkdir", "rename"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "open", only_read)
    assert make(GOOD, planned, tools).cached


def test_prune_keeps_the_newest_and_removes_what_failed(planned, tools):
    folders = [make(GOOD, planned, tools, slug).folder for slug in ("fwd_a", "fwd_b", "fwd_c")]
    for age, folder in zip((3000, 2000, 1000), folders, strict=True):
        os.utime(folder, (time.time() - age,) * 2)
    with pytest.raises(BuildError):
        make("error: no\n", planned, tools)
    assert [entry.folder for entry in prune(older_than=2500)][1:] == folders[:1]
    assert [entry.folder for entry in prune(keep=1)] == folders[1:2]
    assert [entry.folder for entry in cache_entries()] == folders[2:]
    with store.locked(store.lock_of(folders[2])):  # as a build of it would
        assert prune(everything=True) == ()
    assert [entry.folder for entry in prune(everything=True)] == folders[2:]
    assert list(folders[2].parent.iterdir()) == []


# ---- The compiler's report -----------------------------------------------------------------------


def test_spills_fail_a_build_unless_the_schedule_tolerates_them(planned, tools):
    with pytest.raises(BuildError, match=r"12 bytes of registers spilled, 20 loaded again"):
        make(SPILLS, planned, tools)
    report = make(SPILLS, replace(planned, max_spill_bytes=20), tools).report
    assert (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes) == (12, 20, 16)
    with pytest.raises(BuildError):  # now in the cache, and judged by the Plan of this call
        make(SPILLS, planned, tools)


def test_what_spills_is_compiled_once_and_what_does_not_compile_each_time(planned, tools, counter):
    said = set()
    for _ in range(3):
        with pytest.raises(RefusedBuild) as refused:
            make(SPILLS, planned, tools)
        said.add(str(refused.value))
    assert compilations(counter) == 1 and len(said) == 1
    assert make(SPILLS, replace(planned, max_spill_bytes=20), tools).report.spill_load_bytes == 20
    for number in range(2):
        with pytest.raises(BuildError) as failed:
            make("error: no\n", planned, tools)
        assert not isinstance(failed.value, RefusedBuild)
        assert compilations(counter) == 3 + number


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (LOG.format(stack=64, stores=0, loads=0, registers=168), "a stack frame of 64 bytes"),
        (LOG.format(stack=0, stores=0, loads=0, registers=176), "67,584 at launch"),
        (GOOD + SERIALISED, r"\(C7511\) Potential Performance Loss"),
        (GOOD + "ptxas info : (C7517) warpgroup.wait is injected in around line 3\n", "C7517"),
        ("", "one kernel"),
    ],
)
def test_what_the_plan_did_not_allow_fails_the_build(planned, tools, log, words):
    with pytest.raises(BuildError, match=words):
        make(log, planned, tools)
    assert [entry.state for entry in cache_entries()] == ["failed"]


def test_a_quantiser_of_three_kernels_is_judged_by_the_worst_of_them(tools):
    of = plan_any(from_slug("quant_fp16_d128_shead"))
    logs = [
        LOG.format(stack=0, stores=0, loads=0, registers=registers) for registers in (40, 80, 32)
    ]
    binary = build(source("".join(logs), "quant_x"), of, binding=False, toolchain=tools)
    assert binary.report.registers == 80
    for last, words in (
        (LOG.format(stack=0, stores=0, loads=0, registers=88), "88 registers x 768 threads"),
        (LOG.format(stack=8, stores=8, loads=4, registers=32), r"the schedule allows 0$"),
        ("", "was to report on 3 kernels"),
    ):
        log = "".join(logs[:2]) + last
        with pytest.raises(BuildError, match=re.compile(words, re.M)):
            build(source(log, "quant_x"), of, binding=False, toolchain=tools)


def test_a_failed_build_shows_the_compilers_lines_and_a_command_that_repeats_it(
    planned, tools, counter
):
    line = "fwd_x.cu(7): error: identifier is undefined"
    with pytest.raises(BuildError) as caught:
        make(line + "\n", planned, tools)
    said = str(caught.value).splitlines()
    assert f"  {line}" in said
    command = said[said.index("to repeat it:") + 1]
    again = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert again.returncode == 2 and line in again.stdout and compilations(counter) == 2
    assert shlex.split(command)[0] == "cd"


def test_without_a_disassembler_the_report_says_what_was_not_checked(planned, tools):
    report = make(GOOD, planned, tools).report
    assert report.machine is None
    assert "not read, no disassembler is installed: python -m pip install" in str(report)


# ---- Real compilers ------------------------------------------------------------------------------


class KernelInfo(ctypes.Structure):
    """What fagen_<slug>_info() points to."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("launch_registers", ctypes.c_uint32),
        ("slug", ctypes.c_char_p),
        ("source_hash", ctypes.c_char_p),
    )


def test_the_library_loads_without_a_gpu_and_was_laid_out_as_the_ledger_says(kernel):
    check_info(kernel)


def test_so_was_that_of_a_quantiser(built):
    check_info(built("quant_fp16_d128_rot_shead"))


def check_info(kernel: Any) -> None:
    plan, source, binary = kernel.plan, kernel.source, kernel.binary
    info_of = ctypes.CDLL(str(binary.library))[f"fagen_{plan.slug}_info"]
    info_of.restype = ctypes.POINTER(KernelInfo)
    info = info_of().contents
    assert info.struct_bytes == ctypes.sizeof(KernelInfo)
    assert info.shared_bytes == plan.shared_bytes
    assert (info.threads, info.launch_registers) == (plan.threads, plan.launch_registers)
    assert info.slug.decode() == plan.slug
    assert info.source_hash.decode() == source.hash == binary.source_hash


def test_a_kernel_keeps_its_promises_within_fifteen_cpu_seconds(kernel, tmp_path, monkeypatch):
    check_promises(kernel, 15, tmp_path, monkeypatch)


# by keys; by gradients, in pairs of thread blocks
@pytest.mark.parametrize(
    "slug", ["bwd_fp16_d128_causal_m64n128", "bwd_bf16_d256_causal_m64n64_det_dss1_intra_c2"]
)
def test_so_do_those_of_the_backward_pass_within_twenty_five(built, slug, tmp_path, monkeypatch):
    check_promises(built(slug), 25, tmp_path, monkeypatch)


def check_promises(
    kernel: Any, cpu_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = kernel.binary
    assert broken_promises(binary.report, kernel.plan) == []
    assert binary.report.registers * kernel.plan.threads <= SM90.registers_per_sm
    assert binary.report.machine_note == "read with nvdisasm"

    def build_again() -> float:
        monkeypatch.setenv("FAGEN_CACHE", tempfile.mkdtemp(dir=tmp_path))
        return build(kernel.source, kernel.plan, binding=True).cpu_seconds

    assert binary.cpu_seconds > 0
    quick = binary.cpu_seconds <= cpu_seconds
    assert quick or least_seconds(build_again, cpu_seconds) <= cpu_seconds


def test_the_library_needs_neither_torch_nor_a_cuda_runtime_and_the_binding_little(built):
    binary = built("fwd_fp16_d128_causal_m128n128").binary
    assert needed(binary.library) <= {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"}
    theirs = needed(binary.binding)
    assert {"libtorch.so", binary.library.name} <= theirs
    assert not any(name.startswith(("libpython", "libc10", "libcuda")) for name in theirs)


def needed(library: Path) -> set[str]:
    """The libraries that the loader will look for."""
    said = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", said.stdout)) - {"ld-linux-x86-64.so.2"}


def test_a_kernel_built_before_there_was_a_disassembler_is_read_once_there_is_one(
    built, tools, tmp_path
):
    real = built("fwd_fp16_d128_causal_m128n128")  # as other tests do
    (tmp_path / "library").write_bytes(real.binary.library.read_bytes())
    assert make(GOOD, real.plan, tools).report.machine_note == NO_DISASSEMBLER
    later = replace(tools, disassembler=find_disassembler())
    report = make(GOOD, real.plan, later).report
    assert report.machine == real.binary.report.machine
    assert make(GOOD, real.plan, tools).report == report  # it was written down
    narrow = replace(real.plan, consumer_registers=24)
    with pytest.raises(BuildError, match=r"the consumer uses \d+ registers, it has 24"):
        make(GOOD, narrow, later)
