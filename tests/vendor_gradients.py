"""Vendored packages for torch whose compiled ops are stood for by emulations on the CPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fagen import registry
from fagen.process import run
from fagen.runtime.op import emulated
from tests.vendor_helpers import COMBINE, vendored

_numbers = count()

# the kernels that computed something so far, of all packages
computed: list[str] = []


def define(slug: str, library: torch.library.Library) -> None:
    """Define what a compiled library has of a kernel: it computes on a CPU, and has no gradient."""
    signature = registry.plan_of(slug).signature
    emulation = emulated(slug)

    def compute(*arguments: object, **named: object) -> object:
        computed.append(slug)
        return emulation(*arguments, **named)

    def fewer(*arguments: object, **named: object) -> object:
        *kept, _ = compute(*arguments, **named)
        return kept[0] if len(kept) == 1 else tuple(kept)

    variants = {slug: (compute, signature.returns)}
    variants |= {
        f"{slug}_without_{t.name}": (fewer, signature.returns_kept) for t in signature.omittable
    }
    for name, (run_it, returns) in variants.items():
        for below in ("", "_no_grad"):
            schema = signature.asked_by_place if below else signature.asked
            library.define(f"{name}{below}({schema}) -> {returns}")
            library.impl(f"{name}{below}", run_it, "CPU")
        library.impl(name, _refusing(getattr(torch.ops, library.ns), name, signature), "Autograd")


def _refusing(ops: object, name: str, signature: object) -> object:
    def refuse(*arguments: object, **named: object) -> object:
        below = getattr(ops, f"{name}_no_grad").default
        with torch._C._AutoDispatchBelowAutograd():
            results = below(*arguments, **named)
        tensors = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ValueError(f"{ops.name}::{name}: {signature.gradient_refused}")
        return results

    return refuse


# Instead of loading a library. Its name is another each time: torch keeps what it was told.
OPS = """\
import torch

from tests.vendor_gradients import define

NAMESPACE = "{name}"
ops = getattr(torch.ops, NAMESPACE)
library = torch.library.Library(NAMESPACE, "FRAGMENT")
for slug in {slugs!r}:
    define(slug, library)


def add_op_namespace_prefix(name):
    return f"{{NAMESPACE}}::{{name}}"
"""


@contextmanager
def package(place: Path, *slugs: str) -> Iterator[ModuleType]:
    """Import a package of these kernels, which compute on CPU tensors as they would on a GPU."""
    name = f"stands{next(_numbers)}"
    vendored(name, "torch", place, *slugs)
    folder = place / "python" / name
    (folder / "_ops.py").write_text(OPS.format(name=name, slugs=slugs))
    functions = (f"void fagen_{slug}_refused(const char* why) {{ (void)why; }}" for slug in slugs)
    (place / "refused.c").write_text("\n".join(functions))
    library = folder / f"{name}.so"
    answer = run(["gcc", "-shared", "-fPIC", str(place / "refused.c"), "-o", str(library)])
    assert answer.returncode == 0, answer.stderr
    sys.path.insert(0, str(folder.parent))
    try:
        yield import_module(name)
    finally:
        sys.path.remove(str(folder.parent))
        for module in [module_ for module_ in sys.modules if module_.partition(".")[0] == name]:
            del sys.modules[module]


# A kernel of each kind of call in fp16, and of its gradients, in any order and in one.
DENSE, BY = "fwd_fp16_d64_causal_m64n64", "bwd_fp16_d64_causal_m64n64"
VARLEN, PACKED_BY = f"{DENSE}_varlen", f"{BY}_varlen"
BFLOAT, BFLOAT_BY = "fwd_bf16_d96v64_full_m128n96", "bwd_bf16_d96v64_full_m64n64"
# whose gradients have no order here; whose gradients none computes
VARYING = "fwd_bf16_d64_causal_m64n64", "fwd_bf16_d64_causal_m64n64_varlen"
VARYING_BY = "bwd_bf16_d64_causal_m64n64", "bwd_bf16_d64_causal_m64n64_varlen"
WITHOUT, WITHOUT_VARLEN = "fwd_fp16_d64_full_m128n128", "fwd_bf16_d64_full_m64n64_varlen"
EIGHT, EIGHT_VARLEN = "fwd_e4m3_d64_full_m256n64_s3", "fwd_e4m3_d64_full_m64n64_varlen"
# of calls that are cast: bf16 before fp16
CAST = tuple(
    f"{kind}_{dtype}_d32_causal_{tile}"
    for dtype in ("bf16", "fp16")
    for kind, tile in (
        ("fwd", "m64n64"),
        ("bwd", "m64n64"),
        ("fwd", "m64n64_varlen"),
        ("bwd", "m64n64_varlen"),
        ("dec", "r8n64"),
    )
)
# of the package that all tests share
DEMO = (
    *CAST,
    *(DENSE, BY, f"{BY}_det", VARLEN, PACKED_BY, f"{PACKED_BY}_det"),
    *(BFLOAT, BFLOAT_BY, f"{BFLOAT_BY}_det", *VARYING, *VARYING_BY),
    *(WITHOUT, WITHOUT_VARLEN, EIGHT, EIGHT_VARLEN, COMBINE),
    *("dec_fp16_d64_causal_r8n128_c64", "dec_fp16_d64_causal_r16n128_c64"),
)
