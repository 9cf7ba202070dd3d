"""Gradients of a vendored package for JAX: calls with jax.custom_vjp, through the FFI on a CPU."""

import ast

import pytest

from tests.cli_helpers import ROOT
from tests.test_vendor_jax import ON_TWO, on_a_cpu, python, ran, texts

__all__ = ["python"]  # a fixture

FORWARD, WITHOUT, BACKWARD, VARLEN, _, PACKED_BY = SLUGS = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_bf16_d64_full_m128n128",
    "bwd_fp16_d128_causal_m64n128",
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_bf16_d64_full_m64n64_varlen",
    "bwd_fp16_d64_causal_m64n64_varlen",
)


def function(slug: str) -> str:
    """The text of a kernel's function."""
    tree = ast.parse(texts(*SLUGS)["jax/demo/kernels.py"])
    (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == slug)
    return ast.unparse(found)


def test_a_kernel_is_differentiated_by_the_one_of_its_problem():
    assert f"call.differentiated({BACKWARD}, " in function(FORWARD)
    assert f"call.differentiated({PACKED_BY}, " in function(VARLEN)
    for slug in (WITHOUT, BACKWARD):
        assert "call.differentiated" not in function(slug)
    assert "fagen vendor adds bwd_bf16_d64_full_m128n128, in a manifest" in function(WITHOUT)
    assert "second derivatives are not supported" in function(BACKWARD)


@pytest.fixture(scope="module")
def place(python, tmp_path_factory):
    return on_a_cpu(python, tmp_path_factory.mktemp("cpu"), *SLUGS)


def test_gradients_are_right_through_the_ffi_on_a_cpu(python, place):
    told = ran(python, ROOT / "tests/jax_gradients.py", place=place, **ON_TWO)
    assert told.count(": right on cpu") == 8


PAGE = """\
import sys
import demo
import jax.numpy as jnp

sys.modules["my_attention"] = demo
q, k, v = (jnp.ones((1, 20, heads, 128), jnp.float16) for heads in (4, 2, 2))
{snippet}
print(dq.shape, dk.shape, dv.shape)
"""


def test_what_the_page_shows_differentiates(python, place):
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    section = page.partition("\n## Gradients\n")[2].partition("\n## ")[0]
    snippet = section.partition("```python\n")[2].partition("```")[0]
    told = ran(python, "-c", PAGE.format(snippet=snippet), place=place, JAX_PLATFORMS="cpu")
    assert told == "(1, 20, 4, 128) (1, 20, 2, 128) (1, 20, 2, 128)\n"
