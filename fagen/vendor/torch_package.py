"""A Python package for torch: kernels, their bindings and what calls them.

Either with plain source, built by pip, or as Hugging Face's `kernels` loads it and kernel-builder
builds it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from fagen.combining import Filling
from fagen.dispatch.rows import (
    COMBINING,
    DRAWN_LAST,
    GROUP_TILE,
    MOST_SHARED,
    OPEN_KEYS,
    TRANSPOSED_LAUNCH,
)
from fagen.paths import locate
from fagen.problem import Problem
from fagen.render import HEADER, header_file, written
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
from fagen.vendor.contents import Called, Folder, Group
from fagen.vendor.gradients import Gradient
from fagen.vendor.place import MANIFEST
from fagen.vendor.table import Entry
from fagen.vocab import DTYPES, MASKS, SIXTEEN_BITS

VARIANTS = "vendor/variants.py.j2"
_OWN = (
    "vendor/torch/setup.py.j2",
    "vendor/torch/pyproject.toml.j2",
    "vendor/torch/MANIFEST.in.j2",
    "vendor/torch/README.md.j2",
)
_OF_THE_HUB = {
    "build.toml": "vendor/hf_kernel/build.toml.j2",
    "flake.nix": "vendor/hf_kernel/flake.nix.j2",
    "build_variant.py": "vendor/hf_kernel/build_variant.py.j2",
    "README.md": "vendor/hf_kernel/README.md.j2",
    "torch-ext/torch_binding.cpp": "vendor/hf_kernel/torch_binding.cpp.j2",
}
# of a problem's fields: in 16 bits the others are always the same, of decoding O's dtype too
_PLAIN, _OF_DECODING = 5, 4
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@dataclass(frozen=True)
class Call(Called):
    """A call of a package that chooses among kernels: what the template of its module reads."""

    fields: int | None  # of problems, by which it chooses

    @property
    def rows(self) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
        """The rows by problem, as the literal of a tuple."""
        by_key: dict[str, list[Entry]] = {}
        for row in self.table.rows:
            by_key.setdefault(_key(row.problem, self.fields), []).append(row)
        return tuple((key, tuple(rows)) for key, rows in by_key.items())

    @property
    def extras(self) -> tuple[str, ...]:
        """The tensors that some kernel takes beside those that all do."""
        return _extras(self.groups)

    @property
    def usual(self) -> tuple[tuple[str, str], ...]:
        """torch's words for dtypes, and for those of O where a call does not say."""
        return tuple(dict(chain(*(group.usual for group in self.groups))).items())


def _extras(groups: tuple[Group, ...]) -> tuple[str, ...]:
    kernels = chain(*(group.kernels for group in groups))
    names = dict.fromkeys(
        tensor.name
        for kernel in kernels
        for tensor in kernel.signature.inputs
        if tensor.name not in MASKS[kernel.schedule.values()["mask"]].given
    )
    return tuple(name for name in names if name not in ("q", "k", "v", "sinks", *_OFFSETS))


def _key(problem: Problem, fields: int | None) -> str:
    dtype, out = DTYPES[problem.dtype], DTYPES[problem.out_dtype or ""]
    variant = [problem.mask, *problem.variant_words]
    values = [
        *(f"torch.{dtype.torch}", problem.head_dim, problem.head_dim_v),
        *(f'"{"_".join(variant)}"', f"torch.{out.torch}"),
        *(f'"{problem.v_layout or ""}"', problem.scale_rows or 0),
    ]
    return ", ".join(map(str, values[:fields]))


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
    drawn_last, combining = DRAWN_LAST, COMBINING
    split_keys, split_unit = Filling.most_keys, Filling.unit
    transposed_launch = TRANSPOSED_LAUNCH
    most_shared, group_tile = MOST_SHARED, GROUP_TILE
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
        return tuple({form.suffix: form for form in self.folder.differentiable}.values())

    @property
    def repeating(self) -> tuple[Gradient, ...]:
        """Those that a kernel of the folder computes with the same bits in each call."""
        return tuple(form for form in self.folder.differentiable if form.repeating)

    @property
    def varying(self) -> tuple[Gradient, ...]:
        """Those that none of the folder computes so."""
        return tuple(form for form in self.folder.differentiable if not form.repeating)

    @property
    def not_repeating(self) -> tuple[Gradient, ...]:
        """Those, and the ones that none computes at all."""
        return (*self.varying, *self.folder.lacking)

    @property
    def in_16_bits(self) -> tuple[str, ...]:
        """torch's words for the dtypes of calls that torch.autocast may cast to."""
        dtypes = dict.fromkeys(chain(*(group.dtypes for group in self.folder.called)))
        return tuple(name for name in dtypes if name in _IN_16_BITS)

    @property
    def attention(self) -> Call | None:
        """The call that chooses among kernels of attention; None where there are none."""
        if not (called := self.folder.attending):
            return None
        return Call(called.groups, None if _extras(called.groups) else _PLAIN)

    @property
    def decode(self) -> Call | None:
        """The same of decoding, whose O is always in the dtype of q."""
        return Call(called.groups, _OF_DECODING) if (called := self.folder.decoders) else None

    @property
    def varlen(self) -> Call | None:
        """The same of varlen sequences, whose rows have no bounds."""
        return Call(called.groups, _PLAIN) if (called := self.folder.packed) else None

    @property
    def modules(self) -> dict[str, str]:
        """The package's modules that call kernels, and their templates."""
        templates = {
            "vendor/torch/__init__.py.j2": True,
            "vendor/torch/_fakes.py.j2": True,
            "vendor/torch/_gradients.py.j2": self.folder.gradients,
            "vendor/torch/_autocast.py.j2": self.in_16_bits,
            "vendor/torch/_attention.py.j2": self.attention,
            "vendor/torch/_decode.py.j2": self.decode,
            "vendor/torch/_varlen.py.j2": self.varlen,
            VARIANTS: self.folder.variants,
            "vendor/torch/_rows.py.j2": self.attention or self.decode,
        }
        names = {template: _file(template) for template in templates}
        names[VARIANTS] = "_variants.py"
        return {names[template]: template for template, is_there in templates.items() if is_there}


_IN_16_BITS = frozenset(DTYPES[name].torch for name in SIXTEEN_BITS)


def _file(template: str) -> str:
    return template.rpartition("/")[2].removesuffix(".j2")


def texts(folder: Folder) -> dict[str, str]:
    """Return the files of the folder by path.  Raises ToolchainError where CUTLASS is missing."""
    package, place = Package(folder), f"python/{folder.name}"
    own = {_file(template): written(template, package=package) for template in _OWN}
    plain = source.texts(folder)
    plain["README.c.md"] = plain.pop("README.md")
    return plain | dict(_python_texts(package, place, ops=f"{place}/_ops.py")) | own


def hub_texts(folder: Folder) -> dict[str, str]:
    """Return the same of a kernel of Hugging Face's.  Raises as texts does."""
    package = Package(folder)
    files = {f"src/{kernel.slug}.cu": kernel.source.kernel for kernel in folder.kernels}
    files[f"src/{HEADER}"] = header_file()
    files |= dict(_python_texts(package, f"torch-ext/{folder.name}", ops="_ops.py"))
    files |= {path: written(source, package=package) for path, source in _OF_THE_HUB.items()}
    files["LICENSE"] = locate("LICENSE").read_text(encoding="utf-8")
    return files | dict(source.cutlass(folder)) | {MANIFEST: json.dumps(folder.record())}


def _python_texts(package: Package, place: str, *, ops: str) -> Iterator[tuple[str, str]]:
    """Give bindings, what compiles them, and Python in a folder; `ops` is where _ops.py lies."""
    for kernel in package.folder.kernels:
        yield f"src/{kernel.slug}_torch.cpp", kernel.source.binding
    templates = {
        f"src/{package.name}_torch.map": "vendor/torch/symbols.map.j2",
        "compile_kernels.py": "vendor/torch/compile_kernels.py.j2",
        ops: "vendor/torch/_ops.py.j2",
        **{f"{place}/{name}": template for name, template in package.modules.items()},
    }
    for path, template in templates.items():
        yield path, text_of(package, template)


def text_of(package: Package, template: str) -> str:
    """Return what a template is for a package."""
    if template == VARIANTS:  # which packages for JAX have too
        return written(template, folder=package.folder)
    return written(template, package=package)
