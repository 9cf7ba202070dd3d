"""What chooses among a vendored folder's kernels of varlen sequences, in C and in Python."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.process import run
from tests.cli_helpers import ROOT
from tests.varlen_helpers import exact, packed, packed8
from tests.vendor_gradients import package
from tests.vendor_helpers import vendored


def test_what_the_page_shows_compiles(tmp_path: Path) -> None:
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    section = page.partition("\n## Varlen\n")[2].partition("\n## ")[0]
    body = section.partition("```cpp\n")[2].partition("```")[0]
    slugs = "fwd_fp16_d64_causal_m64n64_varlen", "bwd_fp16_d64_causal_m64n64_varlen"
    vendored("my_attention", "source", tmp_path / "c", *slugs)
    head = "#include <my_attention.h>\nint64_t called(void* stream) {\n"
    head += "struct MyAttentionProblem problem = {};\nstruct FagenForwardVarlenArgs args = {};\n"
    head += "struct FagenBackwardVarlenArgs gradients = {};\n"
    (tmp_path / "use.cpp").write_text(f"{head}{body}return bytes + status; }}\n")
    words = ["g++", "-Wall", "-Werror", "-fsyntax-only", "-I", str(tmp_path / "c/include")]
    answer = run([*words, str(tmp_path / "use.cpp")])
    assert answer.returncode == 0, answer.stderr


HALF, BY = "fwd_fp16_d64_causal_m64n64_varlen", "bwd_fp16_d64_causal_m64n64_varlen"
EIGHT = "fwd_e4m3_d64_full_m64n64_varlen"
LENGTHS = ((5, 5), (0, 7), (40, 40), (3, 0), (1, 130), (70, 33))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A package whose kernels compute on the CPU as they would on a GPU."""
    slugs = (HALF, BY, f"{BY}_det", EIGHT, "fwd_bf16_d64_full_m64n64_varlen")
    with package(tmp_path_factory.mktemp("demo"), *slugs) as found:
        yield found


def test_its_bits_are_the_kernels_also_compiled(fresh_dynamo: None, demo: ModuleType) -> None:
    assert "attention_varlen" in demo.__all__ and not hasattr(demo, "attention")

    def compiled_call(*given: Any, **named: Any) -> Any:
        return demo.attention_varlen(*given, **named)

    compiled = torch.compile(compiled_call, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (LENGTHS, LENGTHS[:3]):
        given, used = packed(lengths), torch.tensor([2] * len(lengths), dtype=torch.int32)
        named: dict[str, Any] = {"seqused_k": used, "causal": True, "scale": 0.2}
        right = fagen.attention_varlen(*given, **named, schedule=HALF, return_lse=True)
        for call in (demo.attention_varlen, compiled):
            for mine, own in zip(call(*given, **named, return_lse=True), right, strict=True):
                assert torch.equal(mine, own)
            assert torch.equal(call(*given, **named), right[0])


def test_in_e4m3_its_bits_are_the_kernels_too(demo: ModuleType) -> None:
    of = packed8(by_column=True)
    out = demo.attention_varlen(*of.tensors, **of.named)
    assert torch.equal(out, fagen.attention_varlen(*of.tensors, **of.named, schedule=EIGHT))
    right, _ = of.exact()
    seen = ~right.isnan().any(-1)
    assert (out.double() - right)[seen].norm() < 0.1 * right[seen].norm()


def leaves(dtype: torch.dtype = torch.float16) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v of varlen sequences, which require gradients; and their offsets."""
    q, k, v, *at = packed(LENGTHS, dtype)
    return [x.requires_grad_() for x in (q, k, v)], at


def test_its_gradients_are_those_of_the_formula(fresh_dynamo: None, demo: ModuleType) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, *at: Tensor) -> Tensor:
        out, lse = demo.attention_varlen(q, k, v, *at, causal=True, return_lse=True)
        sums: Tensor = out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        return sums

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    fine = [x.detach().double().requires_grad_() for x in leaves()[0]]
    at_q, at_k = leaves()[1]
    out, lse = exact(fine[0], fine[1], fine[2], at_q, at_k, causal=True)
    (out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    for call in (loss, compiled):
        given, at = leaves()
        call(*given, *at).backward()
        for mine, right in zip(given, fine, strict=True):
            assert mine.grad is not None and right.grad is not None
            off = (mine.grad.double() - right.grad).abs().max()
            assert off <= 8 * 2.0**-11 * (1 + right.grad.abs().max())


def test_what_needs_a_gradient_is_refused_where_no_kernel_computes_it(demo: ModuleType) -> None:
    given, at = leaves(torch.bfloat16)
    with pytest.raises(ValueError, match="no kernel here computes it: add bwd_bf16_d64_full_"):
        demo.attention_varlen(*given, *at)
    with torch.no_grad():
        assert not demo.attention_varlen(*given, *at).requires_grad
    q8, *others = (x.detach().to(torch.float8_e4m3fn) for x in given)
    with pytest.raises(ValueError, match="requires a gradient, and this op has no backward"):
        demo.attention_varlen(q8.requires_grad_(), *others, *at)


def test_what_is_chosen_does_not_depend_on_lengths(demo: ModuleType) -> None:
    dice = random.Random(3)
    whole = [(dice.randint(1, 90),) * 2 for _ in range(5)]
    q, k, v, at, _ = packed(whole)
    out = demo.attention_varlen(q, k, v, at, causal=True)
    for begin, end in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
        ends = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = (x[begin:end] for x in (q, k, v))
        assert torch.equal(demo.attention_varlen(*alone, ends, causal=True), out[begin:end])
