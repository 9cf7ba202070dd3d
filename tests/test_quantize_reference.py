"""What a quantiser computes, by its reference: rotation, scales, rounding, embedding, layout."""

import pytest
import torch
from torch import Tensor

from fagen.e4m3 import Quantized, by_rows, random_signs, rotate
from fagen.kinds.quantize.oracle import embedded, quantize
from fagen.kinds.quantize.plan import Plan
from fagen.vocab import KEY_ORDER
from tests.quantize_helpers import SEED, planned, uneven


def rotated(plan: Plan, x: Tensor) -> Tensor:
    return rotate(x, random_signs(plan.head_dim, SEED)) if plan.rotate else x.float()


def dequantized(plan: Plan, quantized: Quantized, seqlen: int) -> Tensor:
    values = by_rows(quantized.values, seqlen) if plan.columns else quantized.values
    return Quantized(values, quantized.descale).real(plan.scale_rows)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_the_rotation_is_orthonormal_and_block_diagonal(head_dim):
    plan = planned(f"quant_fp16_d{head_dim}_rot_shead")
    matrix = rotated(plan, torch.eye(head_dim))
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6)
    assert head_dim % plan.hadamard == 0 and plan.hadamard.bit_count() == 1
    block = torch.arange(head_dim) // plan.hadamard
    inside = block[:, None] == block
    assert torch.all(matrix[~inside] == 0)
    assert torch.allclose(matrix[inside].abs(), torch.tensor(plan.norm))


@pytest.mark.parametrize("scales", ["_stensor", "_shead", "_sr32", "", "_sr128"])
@pytest.mark.parametrize("rotate", ["", "_rot"])
def test_descales_are_the_maxima_over_448_of_what_shares_them(scales, rotate):
    plan = planned(f"quant_fp16_d64{rotate}{scales}")
    x = uneven(plan, 2, 200, 3)
    got = quantize(plan, x, SEED)
    y = rotated(plan, x).permute(0, 2, 1, 3).abs()
    if plan.by_tensor:
        expected = y.amax().expand(2, 3, 1)
    else:
        rows = plan.scale_rows or 200
        expected = torch.stack([part.amax((-1, -2)) for part in y.split(rows, 2)], -1)
    assert torch.allclose(got.descale, expected / 448, rtol=1e-6)
    assert got.values.float().abs().amax() == 448
    error = (dequantized(plan, got, 200) - rotated(plan, x)).abs().permute(0, 2, 1, 3)
    # half a step of three bits, or of the smallest numbers
    assert torch.all(error <= torch.maximum(y / 16, got.descale.amax() / 1024) * 1.01)


@pytest.mark.parametrize("pairs", [False, True])
def test_an_embedding_turns_pairs_and_leaves_products_to_distances(pairs):
    """Rows of Q and K are embedded by their places: only the distance of two enters a product."""
    places = torch.arange(40.0)[:, None] * 0.9 ** torch.arange(32.0)
    cos, sin = places.cos(), places.sin()
    q, k = (torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    rows = [x.expand(1, 40, 1, 64) for x in (q, k)]
    turned, other = (embedded(x, cos, sin, pairs=pairs)[0, :, 0] for x in rows)
    products = turned @ other.T
    assert torch.allclose(products[:30, 5:35].diag(), products[0, 5].expand(30), atol=1e-4)
    assert torch.allclose(turned.norm(dim=-1), q.norm().expand(40))
    first = turned.unflatten(-1, (32, 2) if pairs else (2, 32)).unbind(-1 if pairs else -2)[0]
    assert torch.allclose(first[0], q[::2] if pairs else q[:32])
    assert not torch.allclose(first[1], first[0], atol=0.1)


def test_a_given_descale_is_used_and_what_is_too_large_saturates():
    plan = planned("quant_fp16_d64_shead")
    x = uneven(plan, 1, 40, 2)
    got = quantize(plan, x, descale=torch.tensor(1 / 448))
    assert torch.equal(
        got.values.float(), (x.float() * 448).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )


def test_zeros_have_a_scale_and_stay_zeros():
    plan = planned("quant_bf16_d64_rot_sr32")
    got = quantize(plan, torch.zeros(1, 33, 1, 64, dtype=torch.bfloat16), SEED)
    assert torch.all(got.values.float() == 0)
    assert torch.all(got.descale > 0) and torch.all(torch.isfinite(1 / got.descale))


def test_columns_are_in_the_order_of_p_and_filled_up_with_zeros():
    plan = planned("quant_fp16_d16_shead_vcols")
    x = torch.arange(1, 38.0)[None, :, None, None].expand(1, 37, 1, 16).half()
    got = quantize(plan, x, descale=torch.tensor(1.0)).values.float()
    assert got.shape == (1, 1, 16, 48)
    keys = torch.tensor([16 * group + key for group in range(3) for key in KEY_ORDER])
    rounded = (keys + 1.0).to(torch.float8_e4m3fn).float()
    assert torch.equal(got[0, 0, 5], torch.where(keys < 37, rounded, 0.0))
    assert sorted(KEY_ORDER) == list(range(16))


def test_the_order_of_keys_is_that_in_which_a_thread_holds_them():
    """S: lane q has keys 2q, 2q + 1 of each 8. P in e4m3: it has positions 4q … 4q + 3 of 16."""
    for quad in range(4):
        of_s = [8 * matrix + 2 * quad + e for matrix in range(2) for e in range(2)]
        assert list(KEY_ORDER[4 * quad : 4 * quad + 4]) == of_s


def test_what_is_huge_costs_its_own_block_alone():
    x = uneven(planned("quant_bf16_d64_shead"), 1, 256, 1)
    x[0, 5, 0, 3] = 1e9

    def error(slug: str) -> Tensor:
        plan = planned(slug)
        got = dequantized(plan, quantize(plan, x), 256)
        return (got - x.float())[0, 128:].square().mean() / x[0, 128:].float().square().mean()

    assert error("quant_bf16_d64_sr128") < 1e-3
    assert error("quant_bf16_d64_shead") == 1  # all the rest is zero
