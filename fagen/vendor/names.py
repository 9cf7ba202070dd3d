"""What names of a folder and of its kernels may be: they become files, C names and CMake's."""

import builtins
import keyword
import re
import sys
from collections.abc import Mapping

from fagen.expr import words
from fagen.registry import ENTRIES
from fagen.vendor.table import VARLEN

MOST = 40  # characters
NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_NAMED = f"lower-case letters, digits and _, a letter first, {MOST} at most"

# Headers of C, POSIX, glibc and CUDA, which include/<name>.h would hide.
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
# Of unistd.h, zlib.h, sysexits.h and fmtmsg.h: macros <NAME>_OK, which a folder has too.
_MACROS = "f r w x z ex mm"
_LIBRARIES = "c dl g gcc l m nsl rt stdc util y z"
_TARGETS = """
    all clean depend edit_cache help install list_install_components package package_source
    preinstall rebuild_cache test debug general optimized
"""
# Packages that a Python package would hide from torch, JAX or pip, and names that torch.ops has.
_PACKAGES = """
    filelock fsspec jinja2 kernels markupsafe mpmath networkx numpy setuptools sympy torch triton
    jax jaxlib pip scikit_build_core wheel
"""
_NAMESPACES = """
    aten c10d debug_mode_ops debugprims export higher_order import_module inductor inductor_prims
    load_library loaded_libraries mkl mkldnn mkldnn_prepacked onednn prim prims profiler
    quantization quantized rngprims sparse static_runtime symm_mem
"""
_PORTS = (f"{port}{i}" for port in ("com", "lpt") for i in range(10))
_DEVICES = ("aux", "con", "nul", "prn", *_PORTS)


def _said(words: str, what: str) -> Mapping[str, str]:
    return {word: what.format(word) for word in words.split()}


_TAKEN: Mapping[str, str] = {
    **_said(" ".join(sys.stdlib_module_names), "a module of Python, {}"),
    **_said(_NAMESPACES, "torch.ops.{}"),
    **_said(_PACKAGES, "a package of Python, {}"),
    **_said(_TARGETS, "a target or a word of CMake, {}"),
    **_said(_LIBRARIES, "a library of the system, lib{}"),
    **{word: f"a macro of the system, {word.upper()}_OK" for word in _MACROS.split()},
    **_said(_HEADERS, "a header of C, POSIX or CUDA, {}.h"),
    **_said(" ".join(_DEVICES), "a device of Windows, where no file is called {}"),
    **_said("fagen", "fagen itself"),
}
_TAKEN_STARTS: Mapping[str, str] = {
    "cmake": "of CMake",
    "cuda": "of CUDA",
    "nv_": "of CUDA",
    "sm_": "of CUDA",
    **{f"fagen_{entry.prefix}": "of fagen's kernels" for entry in ENTRIES.values()},
}
# functions of a folder, which are <name>_<own> in C, and what its Python has or reads itself
_OWN = ("pick", *(f"pick_{e}" for e in ENTRIES), *ENTRIES, "message", "attention", "ops", "kernels")
_OWN += ("attention_decode", "attention_varlen", "differentiated", "torch", "jax", "jnp")
_OWN += (*VARLEN, *(f"pick_{name}" for name in VARLEN))
# and of those whose kernels a mask, a score or sinks give something to
_VARIANT = "|".join((*words.GIVEN, *words.SCORES, "sink", "(?:mask|score)[0-9a-f]{10}"))
_CHOOSING = re.compile(rf"(pick_)?(forward|decode)(_varlen)?(_fp8)?(_({_VARIANT}))+")
_ENDS = ("_workspace", "_message", "_info")


def fault_of(name: str) -> str:
    """Why a folder cannot be called so, with what has that name already, or ""."""
    if fault := _unlike_a_name(name):
        return fault
    if name in _TAKEN:
        return f"is the name of {_TAKEN[name]}: choose another"
    start = next((start for start in _TAKEN_STARTS if name.startswith(start)), "")
    if start:
        return f"begins with {start}, as names {_TAKEN_STARTS[start]} do: choose another"
    return ""


def fault_of_kernel(name: str) -> str:
    """The same of the name that a manifest gives one of a folder's kernels."""
    if fault := _unlike_a_name(name):
        return fault
    if name in _OWN or _CHOOSING.fullmatch(name):
        return f"would be the name of another function of the folder, …_{name}: choose another"
    end = next((end for end in _ENDS if name.endswith(end)), "")
    if end:
        return f"ends in {end}, as another function of the folder does: choose another"
    if name in vars(builtins):
        return f"is the name of a built-in of Python, {name}: choose another"
    return ""


def _unlike_a_name(name: str) -> str:
    if len(name) > MOST or not NAME.fullmatch(name) or "__" in name or name.endswith("_"):
        return f"is no name: {_NAMED}, no two _ together and none at the end"
    if keyword.iskeyword(name):
        return f"is a word of Python, {name}: choose another"
    return ""
