"""Vendored folders, and Python that uses them with fagen out of reach."""

import os
import sys
from pathlib import Path

import pytest

from fagen import registry, vendor
from fagen.kinds.backward.signature import INSTEAD, NO_GRADIENT
from fagen.process import run
from fagen.vendor.place import Written
from tests.cli_helpers import ROOT

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


def of_page(section: str, language: str) -> str:
    """The first program in a language that a section of the page on vendoring shows."""
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return text.partition(f"```{language}\n")[2].partition("```")[0]


def hugging_face(config: pytest.Config) -> Path:
    """A folder of packages with Hugging Face's `kernels`, which is fetched where it is not there.

    It is none of fagen's own: transformers does other things where it is installed.
    """
    place = config.rootpath / ".pytest_cache" / "kernels"
    if not place.is_dir():
        words = ["install", "--quiet", "--upgrade", "--target", place, "kernels>=0.17"]
        python("-m", "pip", *words, cwd=config.rootpath)
    return place


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
    missing = DIFFERENTIABLE[1].replace("causal", "full")
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
        lacks(f"{missing}_det"),
        "q is torch.float32; kernels here take torch.float16: q.to(torch.float16) converts it, and "
        "so does torch.autocast around the call",
        f"{backward}: dout, q, k, v, out, lse or dlse requires a gradient, and {NO_GRADIENT}; "
        f"{INSTEAD}",
        "(2, 12, 2, 64)",
        f"{forward}: v has shape (2, 12, 1, 64); it must be (batch, seqlen_k, kv_heads, 64)",
        *[lacks(missing)] * 2,
        *[f"{forward}: q {cpu}"] * 4,
        f"{backward}: dout {cpu}",
    ]
