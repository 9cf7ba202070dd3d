"""fagen.quantize, on CPU tensors: what it returns, and what it says of wrong arguments."""

import pytest
import torch

import fagen
from fagen.e4m3 import Quantized
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.oracle import embedded, quantize
from fagen.kinds.quantize.plan import plan
from fagen.vocab import LEAST_MAXIMUM
from tests.quantize_helpers import normal, same

ROWS = 64  # that share a scale where a call does not say


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize(
    "keys",
    [
        dict(),
        dict(rotate=True, seed=3),
        dict(scales="head", layout="columns"),
        dict(scales="tensor", rotate=True),
        dict(scale_rows=32, layout="columns", rotate=True),
    ],
)
def test_on_the_cpu_it_is_what_the_reference_computes(dtype, head_dim, keys):
    x = normal(2, 70, 3, head_dim, dtype=dtype)
    got = fagen.quantize(x, **keys)
    keys = dict(keys)
    seed = keys.pop("seed", 0)
    name = "fp16" if dtype == torch.float16 else "bf16"
    schedule = Schedule.make(dtype=name, head_dim=head_dim, **keys)
    expected = quantize(plan(schedule), x, seed)
    assert same(got.values, expected.values)
    assert torch.equal(got.descale.flatten(), expected.descale.flatten()[: got.descale.numel()])


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        (dict(), (2, 3, 4)),  # blocks of 64 rows
        (dict(scale_rows=128), (2, 3, 2)),
        (dict(scale_rows=32), (2, 3, 7)),
        (dict(scales="head"), (2, 3)),
        (dict(scales="head", scale_rows=32), (2, 3)),
        (dict(scales="tensor"), ()),
    ],
)
def test_descales_have_the_shape_of_what_shares_them(keys, shape):
    out = fagen.quantize(normal(2, 200, 3, 64), **keys)
    assert out.descale.shape == shape and out.descale.dtype == torch.float32
    assert out.values.shape == (2, 200, 3, 64) and out.values.dtype == torch.float8_e4m3fn
    assert out.values.is_contiguous() and out.descale.is_contiguous()
    assert fagen.quantize(normal(2, 200, 3, 64), layout="columns", **keys).values.shape == (
        *(2, 3, 64),
        208,
    )


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_what_it_returns_stands_for_what_came_in(scales):
    x = normal(2, 300, 3, 128) * torch.tensor([1, 2, 4])[:, None]
    quantized = fagen.quantize(x, scales=scales)
    assert isinstance(quantized, Quantized)
    assert torch.allclose(quantized.real(ROWS), x.float(), rtol=2**-4, atol=0.01)
    assert not torch.allclose(quantized.values.float(), x.float(), atol=1)


def test_q_and_k_that_are_rotated_alike_keep_their_products():
    q, k = normal(1, 8, 1, 96), normal(1, 9, 1, 96) + 1
    exact = (q[0, :, 0].float() @ k[0, :, 0].float().T).flatten()

    def product(seed):
        turned = [fagen.quantize(x, rotate=True, seed=s) for x, s in ((q, 5), (k, seed))]
        first, other = (x.real(ROWS)[0, :, 0] for x in turned)
        return (first @ other.T).flatten()

    assert torch.corrcoef(torch.stack((product(5), exact)))[0, 1] > 0.99
    assert torch.corrcoef(torch.stack((product(6), exact)))[0, 1] < 0.9


@pytest.mark.parametrize(
    ("scales", "descale", "shape"),
    [
        ("tensor", 0.01, ()),
        ("head", 0.01, (2, 3)),
        ("tensor", torch.tensor(0.01), ()),
        ("head", torch.full((2, 3), 0.01), (2, 3)),
        ("head", torch.tensor(0.01), (2, 3)),
    ],
)
def test_a_given_descale_is_used_and_comes_back(scales, descale, shape):
    x = normal(2, 40, 3, 64)
    x[0, 0] = 100
    quantized = fagen.quantize(x, scales=scales, descale=descale)
    assert torch.equal(quantized.descale, torch.full(shape, 0.01))
    assert torch.all(quantized.values[0, 0].float() == 448)
    assert torch.allclose(quantized.values[1:].float() * 0.01, x[1:].float(), rtol=2**-4, atol=1e-4)


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 3, 64), (2, 5, 0, 64)])
def test_of_nothing_it_makes_nothing_and_a_descale_that_is_a_number(scales, shape):
    quantized = fagen.quantize(torch.zeros(shape, dtype=torch.float16), scales=scales)
    assert quantized.values.shape == shape
    assert torch.all(quantized.descale == LEAST_MAXIMUM / 448)


def test_any_strides_of_16_bytes_will_do():
    packed = normal(2, 70, 3, 192)
    x = packed[..., 64:128]
    assert same(fagen.quantize(x).values, fagen.quantize(x.contiguous()).values)
    by_heads = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert same(fagen.quantize(by_heads).values, fagen.quantize(x).values)


@pytest.mark.parametrize("pairs", [False, True])
def test_an_embedding_comes_before_all_else(pairs):
    x = normal(2, 40, 3, 64)
    places = torch.arange(40.0)[:, None] * 0.9 ** torch.arange(32.0)
    cos, sin = places.cos().half(), places.sin().half()
    expected = fagen.quantize(embedded(x, cos, sin, pairs=pairs), rotate=True)
    for rotary in ((cos, sin), (cos.expand(2, -1, -1), sin.expand(2, -1, -1))):
        quantized = fagen.quantize(x, rotate=True, rotary=rotary, rotary_pairs=pairs)
        assert same(quantized.values, expected.values)
        assert torch.equal(quantized.descale, expected.descale)
    assert not same(fagen.quantize(x, rotate=True).values, expected.values)


def test_columns_half_a_row_apart_need_rows_of_64():
    cos = torch.ones(40, 48, dtype=torch.float16)
    with pytest.raises(ValueError, match=r'rotary = "halves" needs a head_dim of 64, 128, …'):
        fagen.quantize(normal(2, 40, 3, 96), rotary=(cos, cos))
    fagen.quantize(normal(2, 40, 3, 96), rotary=(cos, cos), rotary_pairs=True)
