"""Vendored folders, and Python that uses them with fagen out of reach."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fagen import registry, vendor
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import Row, first_fit, measures_of
from fagen.kinds.backward.signature import INSTEAD, NO_GRADIENT
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.render import Source, written
from fagen.vendor import torch_package
from fagen.vendor.contents import Folder, Kernel
from fagen.vendor.place import Written
from fagen.vendor.table import Table

KERNELS = [
    "fwd_fp16_d128_causal_m128n128",
    "fwd_e4m3_d64_full_m256n64_s3",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "quant_bf16_d128_halves_rot",
    "quant_fp16_d128_center_scol_vcols",
    "comb_fp32_d128_obf16_varlen",
]
*_, COMBINE = KERNELS


def asked(name: str, form: str, *slugs: str, with_cutlass: bool = False) -> vendor.Manifest:
    """The manifest of kernels by their slugs."""
    schedules = [registry.from_slug(slug) for slug in slugs]
    return vendor.asked(name, schedules, form, with_cutlass)


def vendored(name: str, form: str, place: Path, *slugs: str, with_cutlass: bool = False) -> Written:
    """Write such a folder."""
    manifest = asked(name, form, *slugs, with_cutlass=with_cutlass)
    return vendor.vendor(manifest, place, force=False)


def walled(place: Path, *ahead: Path | str) -> str:
    """A PYTHONPATH with these folders, and with a fagen before any other that is none."""
    place.mkdir(exist_ok=True)
    (place / "fagen.py").write_text('raise ImportError("fagen is out of reach")\n')
    return os.pathsep.join(map(str, (place, *ahead)))


def python(*words: object, cwd: Path, **environment: str) -> str:
    """Run Python, which is to end well; what it prints. Triton keeps what it compiles at home."""
    home = {"HOME": str(cwd)}
    answer = run([sys.executable, *map(str, words)], cwd=cwd, env=home | environment)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def installed(folder: Path, site: Path, *options: str) -> None:
    """Build a folder's package with pip, into a folder of packages."""
    words = ["install", "--no-deps", "--disable-pip-version-check", "--target", site, *options]
    path = walled(site.with_name("wall"))
    python("-m", "pip", *words, folder, cwd=site.parent, PYTHONPATH=path)


def hugging_face(config: pytest.Config) -> Path:
    """A folder of packages with Hugging Face's `kernels`, which is fetched where it is not there.

    It is none of fagen's own: transformers does other things where it is installed.
    """
    place = config.rootpath / ".pytest_cache" / "kernels"
    if not place.is_dir():
        words = ["install", "--quiet", "--upgrade", "--target", place, "kernels>=0.17"]
        python("-m", "pip", *words, cwd=config.rootpath)
    return place


# Ops that give what they are called with: their names and arguments.
OPS = """\
from types import SimpleNamespace


class Ops:
    name = "demo"

    def __getattr__(self, slug):
        return SimpleNamespace(default=lambda *given, **named: (slug, given, named))


ops = Ops()
"""


@contextmanager
def calls_of(schedules: list[Any], place: Path) -> Iterator[dict[str, ModuleType]]:
    """The modules of a package for torch that choose among kernels, over ops that are none."""
    nothing = Source("", "", "", "", "")
    kernels = tuple(Kernel("", s, registry.plan(s), nothing, None) for s in schedules)
    package = torch_package.Package(Folder("demo", kernels, False, "torch"))
    (place / "demo").mkdir()
    (place / "demo/__init__.py").touch()
    (place / "demo/_ops.py").write_text(OPS)
    calls = [name.removesuffix(".py") for name in package.calls]
    for module in (*calls, "_autocast", "_gradients", "_rows"):
        text = written(f"vendor/torch/{module}.py.j2", package=package)
        (place / f"demo/{module}.py").write_text(text)
    sys.path.insert(0, str(place))
    try:
        yield {name: import_module(f"demo.{name}") for name in calls}
    finally:
        sys.path.remove(str(place))
        for name in [name for name in sys.modules if name.partition(".")[0] == "demo"]:
            del sys.modules[name]


# What a program sees of a package: its first argument names it.
USED = """
import sys, torch
from importlib import import_module

package = import_module(sys.argv[1])
outs, lses = torch.empty(2, 9, 4, 128), torch.empty(2, 4, 9)
lengths = torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
combine = package.comb_fp32_d128_obf16_varlen

def refused(*given):
    try:
        combine(*given)
    except (ValueError, RuntimeError) as refusal:  # RuntimeError from torch 2.15 on
        return str(refusal)

print(refused(outs, lses, *lengths))
print(refused(outs[..., 1:], lses, *lengths))
meta = [tensor.to("meta") for tensor in (outs, lses, *lengths)]
print([(tuple(t.shape), t.dtype) for t in combine(*meta)])
print(refused(meta[0].requires_grad_(), *meta[1:]))
print(refused(meta[0].detach(), meta[1].double(), *meta[2:]))
print(refused(meta[0].detach(), meta[1][:, 1:], *meta[2:]))
"""


def seen(name: str) -> list[str]:
    """What that prints of a package."""
    op = f"{name}::{COMBINE}"
    return [
        f"{op}: outs is on the CPU; the kernel runs on a Hopper GPU (compute capability 9.0)",
        f"{op}: outs has shape (2, 9, 4, 127); it must be (splits, seqlen, heads, 128)",
        "[((9, 4, 128), torch.bfloat16), ((4, 9), torch.float32)]",
        f"{op}: outs, lses, num_splits or cu_seqlens requires a gradient, and combining has none "
        "yet; call it under torch.no_grad()",
        f"{op}: lses is torch.float64; this kernel takes torch.float32",
        f"{op}: lses has shape (2, 3, 9); it must be (splits, heads, seqlen)",
    ]


# A kernel, that of its gradients, and one whose gradients no kernel of the folder computes.
DIFFERENTIABLE = (
    "fwd_fp16_d64_causal_m128n128",
    "bwd_fp16_d64_causal_m128n128",
    "fwd_fp16_d64_full_m128n128",
)
# What a program sees of gradients without a GPU: on tensors without numbers, and refusals.
GRADIENTS = """
import sys, torch
from importlib import import_module

package = import_module(sys.argv[1])
forward, backward, lacking = sys.argv[2:]

def tensors(device):
    shapes = (2, 9, 4, 64), (2, 12, 2, 64), (2, 12, 2, 64)
    made = [torch.zeros(shape, dtype=torch.half, device=device) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]

def refused(call, *given):
    try:
        call(*given)
    except (ValueError, RuntimeError) as refusal:  # RuntimeError from torch 2.15 on
        print(str(refusal).splitlines()[0])

given = tensors("meta")
for call in (package.attention, torch.compile(package.attention, fullgraph=True, backend="eager")):
    out, lse = call(*given, causal=True, return_lse=True)
    print(tuple(out.shape), tuple(lse.shape), out.requires_grad, lse.requires_grad)
    found = torch.autograd.grad(out.float().sum() + lse.sum(), given)
    print([tuple(x.shape) for x in found], {x.dtype for x in found}, {x.device.type for x in found})
refused(lambda: package.attention(*given, causal=True, deterministic=True))
refused(lambda: package.attention(*given, deterministic=True))
refused(lambda: package.attention(*(x.float() for x in given), causal=True))
out, lse = getattr(package, forward)(*given, 0.1)
refused(lambda: torch.autograd.grad(out.sum(), given, create_graph=True))
(found,) = torch.autograd.grad(lse.sum(), given[1:2])
print(tuple(found.shape))
refused(getattr(package, forward), *given[:2], given[2][:, :, :1], 0.1)
refused(lambda: package.attention(*given))
refused(getattr(package, lacking), *given, 0.1)
given = tensors("cpu")
refused(lambda: package.attention(*given, causal=True))
with torch.autocast("cpu", torch.half):
    call = lambda q, k, v: package.attention(q, k.float(), v, causal=True)
    refused(call, *given)
    refused(torch.compile(call, fullgraph=True, backend="eager"), *given)
refused(getattr(package, forward), *given, 0.1)
out, lse = (torch.zeros_like(given[0]), torch.zeros(2, 4, 9))
with torch.no_grad():
    refused(getattr(package, backward), out, *given, out, lse, 0.1)
"""


def differentiated(name: str) -> list[str]:
    """What that prints of a package."""
    forward, backward, lacking = (f"{name}::{slug}" for slug in DIFFERENTIABLE)
    shapes = [(2, 9, 4, 64), (2, 12, 2, 64), (2, 12, 2, 64)]
    called = ["(2, 9, 4, 64) (2, 4, 9) True True", f"{shapes} {{torch.float16}} {{'meta'}}"]
    wanted = DIFFERENTIABLE[1].replace("causal", "full")
    cpu = "is on the CPU; the kernel runs on a Hopper GPU (compute capability 9.0)"

    def lacks(by: str) -> str:
        return (
            f"{lacking}: a tensor requires a gradient, and no kernel here computes it: add {by} to "
            "the kernels that fagen vendor writes, in a manifest under [kernels]; or call it under "
            "torch.no_grad()"
        )

    return [
        *called,
        *called,
        f"{forward}: its gradient of q is added up in any order, so that its last bits differ from "
        f"call to call, and deterministic=True forbids that: add {DIFFERENTIABLE[1]}_det to the "
        "kernels that fagen vendor writes",
        lacks(f"{wanted}_det"),
        "q is torch.float32; kernels here take torch.float16: q.to(torch.float16) converts it, and "
        "so does torch.autocast around the call",
        f"{backward}: dout, q, k, v, out, lse or dlse requires a gradient, and {NO_GRADIENT}; "
        f"{INSTEAD}",
        "(2, 12, 2, 64)",
        f"{forward}: v has shape (2, 12, 1, 64); it must be (batch, seqlen_k, kv_heads, 64)",
        *[lacks(wanted)] * 2,
        *[f"{forward}: q {cpu}"] * 4,
        f"{backward}: dout {cpu}",
    ]


# ---- kernels for few queries or tiles -----------------------------------------------------------

PLAIN = "fwd_fp16_d128_causal_m128n128"
SPLIT_4, SPLIT_16 = f"{PLAIN}_split4", f"{PLAIN}_split16"
DECODING = "dec_fp16_d128_causal_r8n64"
# What a user's table has, for fewer keys than any such row of fagen's own.
NARROW = [
    Row("NVIDIA H200", DECODING, 100, queries_to=2),
    Row("NVIDIA H200", SPLIT_16, 100, 900, queries_to=4),
    Row("NVIDIA H200", SPLIT_4, 300, 800, tiles_to=8),
]
MANY = 2**31 - 1
# Kernels of a folder, and calls by what is to serve them.
SERVED = (
    (
        (PLAIN, SPLIT_4, SPLIT_16, DECODING),
        {
            Sizes(1, 1, 1, 1, 100): SPLIT_16,  # no kernel of attention's own is before it
            Sizes(1, 1, 1, 4, 99): PLAIN,
            Sizes(MANY, MANY, 1, 4, 900): SPLIT_16,
            Sizes(1, 1, 1, 4, 901): PLAIN,
            Sizes(1, 1, 1, 5, 300): SPLIT_4,
            Sizes(2, 4, 1, 128, 800): SPLIT_4,
            Sizes(2, 4, 1, 129, 800): PLAIN,
            Sizes(3, 3, 1, 5, 800): PLAIN,
            Sizes(1, 8, 1, 5, 801): PLAIN,
            Sizes(MANY, MANY, 1, MANY, 500): PLAIN,
            Sizes(0, 8, 1, 500, 500): SPLIT_4,
        },
    ),
    (
        (SPLIT_4, PLAIN),
        {
            Sizes(1, 1, 1, 1, 300): SPLIT_4,
            Sizes(1, 1, 1, 1, 100): PLAIN,
            Sizes(3, 3, 1, 1, 300): PLAIN,
        },
    ),
    ((PLAIN, SPLIT_16), {Sizes(1, 1, 1, 5, 300): PLAIN, Sizes(9, 9, 1, 3, 300): SPLIT_16}),
    ((SPLIT_4,), dict.fromkeys((Sizes(1, 1, 1, 1, 9), Sizes(9, 9, 1, 999, 999)), SPLIT_4)),
)


def first_of(table: Table, problem: Problem, sizes: Sizes) -> str:
    """The slug of the first row that fits, as Python reads a dispatcher's rows."""
    own = ((entry.row.slug, entry.row.limits) for entry in table.rows if entry.problem == problem)
    return str(first_fit(own, measures_of(sizes, table.tile)))


def narrow_rows(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a user's table have rows by queries and tiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    (place / "config/fagen").mkdir(parents=True)
    dispatch_table.update(place / "config/fagen" / dispatch_table.NAME, NARROW)
