"""A Python package for torch: plain source, its binding and what calls it, built by pip."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from fagen.dispatch.rows import OPEN_KEYS
from fagen.problem import Problem
from fagen.render import written
from fagen.statuses import ALIGNMENT
from fagen.toolchain import (
    BINDING_FLAGS,
    INSTALL_NVCC,
    NVCC_SINCE,
    RUNTIME_LIBRARIES,
    SYSTEM_CUDA,
    TORCH_LIBRARIES,
    TORCH_SINCE,
)
from fagen.vendor import source
from fagen.vendor.contents import Folder, Gradient
from fagen.vendor.table import Entry, Table
from fagen.vocab import DTYPES, SIXTEEN_BITS

_OWN = {
    "setup.py": "vendor/torch/setup.py.j2",
    "pyproject.toml": "vendor/torch/pyproject.toml.j2",
    "MANIFEST.in": "vendor/torch/MANIFEST.in.j2",
    "README.md": "vendor/torch/README.md.j2",
}
_CALLS = {
    "__init__.py": "vendor/torch/__init__.py.j2",
    "_fakes.py": "vendor/torch/_fakes.py.j2",
}
# of a problem's fields: in 16 bits the others are always the same, of decoding O's dtype too
_PLAIN, _OF_DECODING = 5, 4


Listed = tuple[tuple[str, tuple[Entry, ...]], ...]  # by problem, as the literal of a tuple


@dataclass(frozen=True)
class Package:
    """What the templates of a Python package read: a folder, and more of it in Python's words."""

    folder: Folder

    binding_flags = BINDING_FLAGS
    # The runtime is static, and the library's own: it loads where torch has no CUDA, or another.
    libraries = (*TORCH_LIBRARIES, *RUNTIME_LIBRARIES)
    nvcc_oldest, torch_oldest = (".".join(map(str, since)) for since in (NVCC_SINCE, TORCH_SINCE))
    torch_digits = "".join(map(str, TORCH_SINCE))
    install_nvcc, system_cuda = INSTALL_NVCC, SYSTEM_CUDA
    open_keys = OPEN_KEYS
    alignment = ALIGNMENT
    cutlass = source.CUTLASS

    @property
    def name(self) -> str:
        """Of the package."""
        return self.folder.name

    @property
    def dashed(self) -> str:
        """The name as Hugging Face has it."""
        return self.name.replace("_", "-")

    @property
    def forms(self) -> tuple[Gradient, ...]:
        """Of those that a kernel of the folder computes one for each form that calls have."""
        return tuple({one.suffix: one for one in self.folder.differentiable}.values())

    @property
    def repeating(self) -> tuple[Gradient, ...]:
        """Those that a kernel of the folder computes with the same bits in each call."""
        return tuple(one for one in self.folder.differentiable if one.repeating)

    @property
    def varying(self) -> tuple[Gradient, ...]:
        """Those that none of the folder computes so."""
        return tuple(one for one in self.folder.differentiable if not one.repeating)

    @property
    def not_repeating(self) -> tuple[Gradient, ...]:
        """Those, and the ones that none computes at all."""
        return (*self.varying, *self.folder.lacking)

    @property
    def in_16_bits(self) -> tuple[str, ...]:
        """torch's words for the dtypes of calls that torch.autocast may cast to."""
        rows = chain(*(one.table.rows for one in self.folder.called))
        names = dict.fromkeys(row.problem.dtype for row in rows)
        return tuple(DTYPES[name].torch for name in names if name in SIXTEEN_BITS)

    @property
    def varlen(self) -> tuple[tuple[str, str], ...]:
        """What is computed of varlen sequences, as keys of Python have it, with the kernels."""
        found: dict[str, str] = {}
        for one in self.folder.varlen:
            assert not one.table.bounds, one.kind
            for row in one.table.rows:
                found.setdefault(self._key(row.problem, _PLAIN), row.row.slug)
        return tuple(found.items())

    @property
    def varlen_extras(self) -> tuple[str, ...]:
        """The tensors that some kernel of varlen sequences takes beside those that all do."""
        taken = [
            dict.fromkeys(t.name for kernel in one.kernels for t in kernel.signature.inputs)
            for one in self.folder.varlen
        ]
        usual = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        return tuple(name for name in dict.fromkeys(chain(*taken)) if name not in usual)

    @property
    def extras(self) -> tuple[str, ...]:
        """The tensors beside q, k and v that some kernel of attention takes."""
        if not self.folder.table.rows:
            return ()
        kernels = self.folder.dispatched.kernels
        named = (tensor.name for kernel in kernels for tensor in kernel.signature.inputs)
        return tuple(name for name in dict.fromkeys(named) if name not in ("q", "k", "v"))

    @property
    def usual(self) -> tuple[tuple[str, str], ...]:
        """torch's words for dtypes, and for those of O where a call does not say."""
        return _usual([self.folder.table])

    @property
    def varlen_usual(self) -> tuple[tuple[str, str], ...]:
        """The same of varlen sequences."""
        return _usual([one.table for one in self.folder.varlen])

    @property
    def problems(self) -> Listed:
        """The rows of the dispatcher of attention."""
        return self._listed(self.folder.table, None if self.extras else _PLAIN)

    @property
    def decoded(self) -> Listed:
        """The same of kernels of decoding, whose O is always in the dtype of q."""
        found = self.folder.decoding
        return self._listed(found.table, _OF_DECODING) if found else ()

    @property
    def calls(self) -> dict[str, str]:
        """The modules of calls that choose among kernels, and their templates."""
        there = {
            "vendor/torch/_attention.py.j2": self.problems,
            "vendor/torch/_decode.py.j2": self.decoded,
            "vendor/torch/_varlen.py.j2": self.varlen,
        }
        return {_module(template): template for template, rows in there.items() if rows}

    def _listed(self, table: Table, fields: int | None) -> Listed:
        """A table's rows by so many fields of problems."""
        by_problem: dict[Problem, list[Entry]] = {}
        for row in table.rows:
            by_problem.setdefault(row.problem, []).append(row)
        return tuple((self._key(one, fields), tuple(rows)) for one, rows in by_problem.items())

    @staticmethod
    def _key(problem: Problem, fields: int | None) -> str:
        dtype, out = DTYPES[problem.dtype], DTYPES[problem.out_dtype or ""]
        said = [
            *(f"torch.{dtype.torch}", problem.head_dim, problem.head_dim_v),
            *(f'"{problem.mask}"', f"torch.{out.torch}"),
            *(f'"{problem.v_layout or ""}"', problem.scale_rows or 0),
        ]
        return ", ".join(map(str, said[:fields]))


def _usual(tables: Iterable[Table]) -> tuple[tuple[str, str], ...]:
    """torch's words for the dtypes of tables, and for those of O where a call does not say."""
    names = dict.fromkeys(row.problem.dtype for table in tables for row in table.rows)
    return tuple((DTYPES[name].torch, DTYPES[DTYPES[name].out].torch) for name in names)


def _module(template: str) -> str:
    return template.rpartition("/")[2].removesuffix(".j2")


def texts(folder: Folder) -> dict[str, str]:
    """Return the files of the folder by path.  Raises ToolchainError where CUTLASS is missing."""
    package, place = Package(folder), f"python/{folder.name}"
    own = {name: written(template, package=package) for name, template in _OWN.items()}
    plain = source.texts(folder)
    plain["README.c.md"] = plain.pop("README.md")
    return plain | dict(python_texts(package, place, ops=f"{place}/_ops.py")) | own


def python_texts(package: Package, place: str, *, ops: str) -> Iterator[tuple[str, str]]:
    """Give bindings, what compiles them, and Python in a folder; `ops` is where _ops.py lies."""
    for kernel in package.folder.kernels:
        yield f"src/{kernel.slug}_torch.cpp", kernel.source.binding
    yield f"src/{package.name}_torch.map", written("vendor/torch/symbols.map.j2", package=package)
    yield "compile_kernels.py", written("vendor/torch/compile_kernels.py.j2", package=package)
    yield ops, written("vendor/torch/_ops.py.j2", package=package)
    for name, template in _CALLS.items():
        yield f"{place}/{name}", written(template, package=package)
    if package.folder.gradients:
        found = written("vendor/torch/_gradients.py.j2", package=package)
        yield f"{place}/_gradients.py", found
    if package.in_16_bits:
        yield f"{place}/_autocast.py", written("vendor/torch/_autocast.py.j2", package=package)
    for name, template in package.calls.items():
        yield f"{place}/{name}", written(template, package=package)
    if package.problems or package.decoded:
        yield f"{place}/_rows.py", written("vendor/torch/_rows.py.j2", package=package)
