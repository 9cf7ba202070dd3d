"""fagen.attention_decode over an op of C++ goes past Autograd, by place, where it may."""

import pytest
import torch
from torch import Tensor

import fagen
from fagen.runtime.op import emulated
from tests.fresh import forget
from tests.op_helpers import loaded, refusal
from tests.tensors import normal

SLUG, UNIFIED = "dec_fp16_d64_causal_r8n128", "dec_fp16_d64_causal_r8n128_unified"
LENGTHS = {
    "seqused_k": torch.tensor([130, 0], dtype=torch.int32),
    "leftpad_k": torch.tensor([3, 0], dtype=torch.int32),
}


def qkv() -> tuple[Tensor, ...]:
    sizes = (1, 8), (200, 2), (200, 2)
    return tuple(
        normal(2, rows, heads, 64, seed=seed, dtype=torch.float16)
        for seed, (rows, heads) in enumerate(sizes)
    )


@pytest.fixture
def over(stub_op, monkeypatch):
    """What readies the stub of a slug for attention_decode; it returns its op."""
    forget(monkeypatch)

    def ready(slug):
        loaded(monkeypatch)
        return stub_op(slug).op

    return ready


@pytest.mark.parametrize("lengths", [(), ("seqused_k",), ("leftpad_k",), tuple(LENGTHS)])
def test_what_is_given_by_place_is_what_is_given_by_name(over, lengths):
    over(SLUG)
    given = {name: LENGTHS[name] for name in lengths}
    out, lse = emulated(SLUG)(*qkv(), 64**-0.5, **given)
    assert torch.equal(fagen.attention_decode(*qkv(), schedule=SLUG, **given), out)
    by_scale = fagen.attention_decode(*qkv(), scale=64**-0.5, schedule=SLUG, **given)
    assert torch.equal(by_scale, out)
    again = fagen.attention_decode(*qkv(), schedule=SLUG, return_lse=True, **given)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_so_is_a_reference(over):
    over(UNIFIED)
    reference = torch.linspace(-1, 1, 8)
    out, _ = emulated(UNIFIED)(*qkv(), reference, 64**-0.5, **LENGTHS)
    found = fagen.attention_decode(*qkv(), reference=reference, schedule=UNIFIED, **LENGTHS)
    assert torch.equal(found, out)


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_is_refused_where_one_is_needed(over, which):
    over(SLUG)
    leaf = [*qkv()]
    leaf[which].requires_grad_()
    inner = [*qkv()]
    inner[which] = leaf[which] * 1
    for tensors in (leaf, inner):
        said = refusal(lambda given=tensors: fagen.attention_decode(*given, schedule=SLUG))
        assert "requires a gradient" in said
        with torch.no_grad():
            assert not fagen.attention_decode(*tensors, schedule=SLUG).requires_grad


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seqused_k": torch.zeros(3, dtype=torch.int32)}, "seqused_k"),
        ({"leftpad_k": torch.zeros(2)}, "leftpad_k"),
        ({"scale": -1.0}, "scale"),
    ],
)
def test_a_wrong_argument_is_named_by_cpp_too(over, wrong, said):
    over(SLUG)
    assert said in refusal(lambda: fagen.attention_decode(*qkv(), schedule=SLUG, **wrong))
