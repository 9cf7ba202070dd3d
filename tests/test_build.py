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
from fagen.build import broken_promises, build, cache_entries, prune, store
from fagen.build.report import NO_DISASSEMBLER
from fagen.errors import BuildError, RefusedBuild
from fagen.registry import plan_of
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
    slowed,
    source,
)

SERIALISED = (
    "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources\n"
)


@pytest.fixture
def counter(tmp_path) -> Path:
    """A file with a line for every time a compiler ran."""
    return tmp_path / "counter"


# ---- The cache -----------------------------------------------------------------------------------


def test_the_second_build_is_found_and_no_compiler_runs(planned, tools, counter):
    first, second = make(GOOD, planned, tools), make(GOOD, planned, tools)
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first
    assert first.library.read_text() == "machine code" and compilations(counter) == 1


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
source = Source("fwd_x", {log!r}, "", "", "0" * 64, "0" * 64, planned)
print(build(source, planned, binding=False, toolchain=tools).cached, flush=True)
"""
SLOW = GOOD + "SLOW\n"


def start(tools: Toolchain, log: str, stderr: int | None = None) -> subprocess.Popen[str]:
    folder = Path(__file__).parent
    code = CHILD.format(tests=str(folder), root=str(folder.parent), tools=tools, log=log)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def states() -> list[str]:
    return [entry.state for entry in cache_entries()]


def test_a_killed_build_leaves_nothing_that_is_taken_for_finished(planned, tools, counter):
    done = slowed(tools)
    child = start(tools, SLOW)
    wait_until(lambda: bool(compilations(counter)))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert states() == ["unfinished"]
    done.touch()
    assert not make(SLOW, planned, tools).cached
    assert states() == ["finished"]


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


@pytest.mark.parametrize("before", ["nothing", "broken"])
def test_what_was_finished_while_prune_looked_around_stays(tools, cache, monkeypatch, before):
    done = slowed(tools)
    if before == "broken":
        done.touch()
        start(tools, SLOW).communicate()
        next(cache.glob("*/fwd_x.so")).write_text("cut")
        done.unlink()
    child = start(tools, SLOW)

    def look() -> tuple[store.CacheEntry, ...]:
        wait_until(lambda: any(cache.glob("*.making-*")))
        entries = cache_entries()
        done.touch()
        assert child.communicate()[0] == "False\n"
        return entries

    monkeypatch.setattr(store, "cache_entries", look)
    assert prune() == ()
    assert states() == ["finished"]


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


def test_spills_fail_a_build_unless_the_schedule_tolerates_them(planned, tools, counter):
    """They are compiled once; what does not compile is tried each time."""
    tolerant = replace(planned, max_spill_bytes=20)
    refusals = set()
    for _ in range(3):
        with pytest.raises(RefusedBuild, match="12 bytes of registers spilled, 20 loaded") as error:
            make(SPILLS, planned, tools)
        refusals.add(str(error.value))
    assert compilations(counter) == 1 and len(refusals) == 1
    report = make(SPILLS, tolerant, tools).report
    assert (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes) == (12, 20, 16)
    with pytest.raises(BuildError):  # now in the cache, and judged by the Plan of this call
        make(SPILLS, planned, tools)
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
    assert states() == ["failed"]


def test_a_quantiser_of_three_kernels_is_judged_by_the_worst_of_them(tools):
    plan = plan_of("quant_fp16_d128_shead")
    logs = [
        LOG.format(stack=0, stores=0, loads=0, registers=registers) for registers in (40, 80, 32)
    ]
    binary = build(source("".join(logs), "quant_x"), plan, binding=False, toolchain=tools)
    assert binary.report.registers == 80
    for last, words in (
        (LOG.format(stack=0, stores=0, loads=0, registers=88), "88 registers x 768 threads"),
        (LOG.format(stack=8, stores=8, loads=4, registers=32), r"the schedule allows 0$"),
        ("", "was to report on 3 kernels"),
    ):
        log = "".join(logs[:2]) + last
        with pytest.raises(BuildError, match=re.compile(words, re.M)):
            build(source(log, "quant_x"), plan, binding=False, toolchain=tools)


def test_a_failed_build_shows_the_compilers_lines_and_a_command_that_repeats_it(
    planned, tools, counter
):
    line = "fwd_x.cu(7): error: identifier is undefined"
    with pytest.raises(BuildError) as caught:
        make(line + "\n", planned, tools)
    lines = str(caught.value).splitlines()
    assert f"  {line}" in lines
    command = lines[lines.index("to repeat it:") + 1]
    again = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert again.returncode == 2 and line in again.stdout and compilations(counter) == 2
    assert shlex.split(command)[0] == "cd"


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


def test_the_library_loads_without_a_gpu_and_was_laid_out_as_the_ledger_says(kernel, built):
    for case in (kernel, built("quant_fp16_d128_rot_shead")):
        plan, binary = case.plan, case.binary
        info_of = ctypes.CDLL(str(binary.library))[f"fagen_{plan.slug}_info"]
        info_of.restype = ctypes.POINTER(KernelInfo)
        info = info_of().contents
        assert info.struct_bytes == ctypes.sizeof(KernelInfo)
        assert info.shared_bytes == plan.shared_bytes
        assert (info.threads, info.launch_registers) == (plan.threads, plan.launch_registers)
        assert info.slug.decode() == plan.slug
        assert info.source_hash.decode() == case.source.hash == binary.source_hash


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
    by_binding = needed(binary.binding)
    assert {"libtorch.so", binary.library.name} <= by_binding
    assert not any(name.startswith(("libpython", "libc10", "libcuda")) for name in by_binding)


def needed(library: Path) -> set[str]:
    """The libraries that the loader will look for."""
    answer = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", answer.stdout)) - {"ld-linux-x86-64.so.2"}


def test_a_kernel_built_before_there_was_a_disassembler_is_read_once_there_is_one(
    built, tools, tmp_path
):
    real = built("fwd_fp16_d128_causal_m128n128")  # as other tests do
    (tmp_path / "library").write_bytes(real.binary.library.read_bytes())
    unread = make(GOOD, real.plan, tools).report
    assert unread.machine is None and unread.machine_note == NO_DISASSEMBLER
    assert "not read, no disassembler is installed: python -m pip install" in str(unread)
    later = replace(tools, disassembler=find_disassembler())
    report = make(GOOD, real.plan, later).report
    assert report.machine == real.binary.report.machine
    assert make(GOOD, real.plan, tools).report == report  # it was written down
    narrow = replace(real.plan, consumer_registers=24)
    with pytest.raises(BuildError, match=r"the consumer uses \d+ registers, it has 24"):
        make(GOOD, narrow, later)
