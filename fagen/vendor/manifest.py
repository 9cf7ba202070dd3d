"""Read what is to be vendored: names, schedules and format, from a file or the command line.

A manifest's words become file names, C names and CMake's: all are checked against closed patterns.
"""

import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen.errors import ScheduleError
from fagen.registry import ENTRIES, committed_file, from_slug
from fagen.registry import read as read_schedule
from fagen.schedule import Schedule
from fagen.toml_lines import (
    Origin,
    dotted,
    nearest_or_all,
    one_of,
    printable,
    read_text,
    read_toml,
    shown,
)
from fagen.vendor.place import is_inside
from fagen.vendor.table import PACKED
from fagen.vocab import VENDOR_FORMATS

MOST_NAME = 40  # characters
MOST_KERNELS = 256
NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_NAMED = f"lower-case letters, digits and _, a letter first, {MOST_NAME} at most"
_KEYS = {"name": str, "format": str, "with_cutlass": bool, "kernels": dict}

# Headers of C, POSIX, glibc and CUDA, which include/<name>.h would hide; macros <NAME>_OK; the
# system's libraries; CMake's own targets and words; packages that one of ours would hide.
_HEADERS = """
    assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign
    stdarg stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time uchar
    wchar wctype
    aio alloca ar argp argz byteswap cpio crypt dirent dlfcn elf endian envz err error execinfo
    fcntl features fmtmsg fnmatch fstab fts ftw gcov gconv getopt glob grp gshadow iconv ifaddrs
    langinfo lastlog libgen libintl link malloc mcheck memory mm_malloc mntent monetary mqueue netdb
    nss obstack omp paths poll printf pthread pty pwd re_comp regex regexp resolv sched search
    semaphore sgtty shadow spawn stab stdio_ext strings syscall sysexits syslimits syslog tar
    termio termios ttyent ucontext ulimit unistd unwind utime utmp utmpx values varargs wait wordexp
    builtin_types channel_descriptor common_functions cooperative_groups crt cub cublas cufft cupti
    curand cusolver cusparse cute cutlass device_atomic_functions device_double_functions
    device_functions device_launch_parameters device_types driver_functions driver_types
    fatbinary_section host_config host_defines library_types math_constants math_functions mma
    nvcc nvjitlink nvrtc surface_indirect_functions surface_types texture_indirect_functions
    texture_types thrust vector_functions vector_types
"""
_MACROS = "f r w x z ex mm"  # of unistd.h, zlib.h, sysexits.h and fmtmsg.h
_LIBRARIES = "c dl g gcc l m nsl rt stdc util y z"
_TARGETS = """
    all clean depend edit_cache help install list_install_components package package_source
    preinstall rebuild_cache test debug general optimized
"""
# Packages that a Python package would hide from torch, JAX or pip, and names that torch.ops has.
_MODULES = """
    filelock fsspec jinja2 kernels markupsafe mpmath networkx numpy setuptools sympy torch triton
    jax jaxlib pip scikit_build_core wheel
    aten c10d debug_mode_ops debugprims export higher_order import_module inductor inductor_prims
    load_library loaded_libraries mkl mkldnn mkldnn_prepacked onednn prim prims profiler
    quantization quantized rngprims sparse static_runtime symm_mem
"""
_WORDS = " ".join((_HEADERS, _MACROS, _LIBRARIES, _TARGETS, _MODULES)).split()
_TAKEN = frozenset([*_WORDS, *sys.stdlib_module_names, "fagen"])
_TAKEN_STARTS = ("cmake", "cuda", "nv_", "sm_", *(f"fagen_{e.prefix}" for e in ENTRIES.values()))
# functions of a folder, which are <name>_<own> in C, and what its Python has or reads itself
_OWN = ("pick", *(f"pick_{e}" for e in ENTRIES), "message", "attention", "ops", "kernels")
_OWN += ("attention_decode", "attention_varlen", "differentiated", "torch")
_OWN += (*PACKED, *(f"pick_{name}" for name in PACKED))
_ENDS = ("_workspace", "_message", "_info")


@dataclass(frozen=True)
class Manifest:
    """What is to be vendored: schedules, each with the name that it is pinned to, or ""."""

    name: str
    kernels: tuple[tuple[str, Schedule], ...]
    format: str = VENDOR_FORMATS[0]
    with_cutlass: bool = False


def asked(
    name: str,
    schedules: Sequence[Schedule],
    format: str = VENDOR_FORMATS[0],
    with_cutlass: bool = False,
) -> Manifest:
    """Return the manifest of schedules without pinned names.  Raises ScheduleError."""
    if fault := _unnameable(name):
        raise ScheduleError(f"name = {shown(name)} {fault}")
    found = {schedule.slug: schedule for schedule in schedules}  # one that is named twice is one
    if not 0 < len(found) <= MOST_KERNELS:
        raise ScheduleError(f"{len(found)} schedules; a folder has from 1 to {MOST_KERNELS}")
    return Manifest(name, tuple(("", one) for one in found.values()), format, with_cutlass)


def read(path: Path) -> Manifest:
    """Read a manifest.  Raises ScheduleError with file and line.

    Schedules are slugs, or files beside the manifest and below.
    """
    tables, origin = read_toml(read_text(path, "manifest"), str(path))

    def wrong(said: str, *keys: str) -> ScheduleError:
        return ScheduleError(f"{origin.at(*keys)}: {said}")

    for key, value in tables.items():
        if key not in _KEYS:
            raise wrong(f"{dotted((key,))} is not one{nearest_or_all(key, _KEYS, ' of ')}", key)
        if type(value) is not _KEYS[key]:
            words = {str: "text", bool: "true or false", dict: "a table"}
            raise wrong(f"{key} = {shown(value)} is not {words[_KEYS[key]]}", key)
    if missing := [key for key in ("name", "kernels") if key not in tables]:
        raise wrong(f"without {' and '.join(missing)}", "")
    if fault := _unnameable(tables["name"]):
        raise wrong(f"name = {shown(tables['name'])} {fault}", "name")
    form = tables.get("format", VENDOR_FORMATS[0])
    if form not in VENDOR_FORMATS:
        raise wrong(f"format = {shown(form)} {one_of(VENDOR_FORMATS, form)}", "format")
    listed = tables["kernels"]
    if not 0 < len(listed) <= MOST_KERNELS:
        raise wrong(f"{len(listed)} kernels; a folder has from 1 to {MOST_KERNELS}", "kernels")
    kernels = []
    slugs: dict[str, str] = {}
    for name, said in listed.items():
        if fault := _unnameable(name, own=True):
            raise wrong(f"kernels.{dotted((name,))} {fault}", "kernels", name)
        schedule = _schedule(said, path.parent, origin, name)
        if schedule.slug in slugs:
            both = f"kernels.{slugs[schedule.slug]} and kernels.{name}"
            raise wrong(f"{both} are both {schedule.slug}", "kernels", name)
        slugs[schedule.slug] = name
        kernels.append((name, schedule))
    for name in listed:
        if slugs.get(name, name) != name:
            raise wrong(f"kernels.{name} is the name of another kernel", "kernels", name)
    return Manifest(tables["name"], tuple(kernels), form, tables.get("with_cutlass", False))


def _schedule(said: Any, beside: Path, origin: Origin, name: str) -> Schedule:
    """Return the schedule that a manifest names: by its slug, or by its file."""
    at = f"{origin.at('kernels', name)}: kernels.{name}"
    if isinstance(said, str) and len(said) <= 200:
        if NAME.fullmatch(said):
            try:
                own = committed_file(said)
                return read_schedule(own) if own.exists() else from_slug(said)
            except ScheduleError as error:
                raise ScheduleError(f"{at}: {'; '.join(str(error).splitlines())}") from None
        if is_inside(said) and said.endswith(".toml"):
            return read_schedule(beside / said)
    raise ScheduleError(
        f"{at} = {shown(said)} is neither a slug nor the path of a schedule's .toml below "
        f"{printable(str(beside))}"
    )


def _unnameable(name: str, own: bool = False) -> str:
    """Why something cannot be called so, or ""; `own` is the name of one kernel in a folder."""
    if len(name) > MOST_NAME or not NAME.fullmatch(name) or "__" in name or name.endswith("_"):
        return f"is no name: {_NAMED}, no two _ together and none at the end"
    if keyword.iskeyword(name):
        return "is a word of Python: choose another"
    if own and (name in _OWN or name.endswith(_ENDS) or name in ENTRIES):
        return "would be the name of another function of the folder"
    if not own and (name in _TAKEN or name.startswith(_TAKEN_STARTS)):
        return "is the name of something of C, CUDA, CMake, Python or torch: choose another"
    return ""
