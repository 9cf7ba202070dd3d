"""Quantisers on a Hopper GPU: numbers beside their reference's, speed beside a copy's."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle

import pytest
import torch

from fagen import flow
from fagen.e4m3 import Quantized, by_rows
from fagen.kinds.forward.operands import Operands
from fagen.kinds.quantize import verify as quantizers
from fagen.kinds.quantize.keys import Schedule as QuantizeSchedule
from fagen.kinds.quantize.verify import VERIFICATION, bandwidth
from fagen.measure.numerics import rms
from fagen.problem import HIDDEN
from fagen.registry import schedules
from fagen.runtime.quantize import quantize
from fagen.vocab import SCALE_ROWS_DEFAULT
from tests.gpu.conftest import BUILDERS
from tests.gpu.helpers import graph_of, same

pytestmark = pytest.mark.gpu

KINDS = cycle(["_rot_sr128", "_shead", "_rot_sr32_vcols", "_rot_stensor", "_vcols"])
HEAD_DIMS = [
    f"quant_{dtype}_d{head_dim}{kind}"
    for head_dim, dtype, kind in zip(
        range(16, 257, 16), cycle(["fp16", "bf16"]), KINDS, strict=False
    )
]
KINDS_OF_128 = [  # each of which a kernel of e4m3 may want
    f"quant_fp16_d128{rotated}{scales}{layout}"
    for rotated in ("", "_rot")
    for scales in ("_stensor", "_shead", "_sr32", "", "_sr128")
    for layout in ("", "_vcols")
]
CENTERED = cycle(
    ["_rot_center", "_center_scol_vcols", "_center_shead", "_center_scol", "_rot_center_sr128"]
)
HEAD_DIMS += [
    f"quant_{dtype}_d{head_dim}{kind}"
    for head_dim, dtype, kind in zip(
        range(16, 257, 16), cycle(["bf16", "fp16"]), CENTERED, strict=False
    )
]
TILES = [
    "quant_bf16_d64_rot_sr32",
    "quant_fp16_d256_vcols",
    "quant_fp16_d128_rot_center_stensor_vcols",
    "quant_bf16_d128_scol_vcols",
]
COMMITTED = [path.stem for path in schedules("quantize")]
SLUGS = list(dict.fromkeys([*COMMITTED, *HEAD_DIMS, *KINDS_OF_128, *TILES]))
# what is worth its bandwidth: all that is committed, and what a call quantises with by default
FAST = list(
    dict.fromkeys(
        [
            *COMMITTED,
            *(f"quant_fp16_d{d}_rot" for d in (64, 128, 256)),
            *(f"quant_bf16_d{d}_rot_center" for d in (64, 128, 256)),
            *(f"quant_bf16_d{d}_center_scol_vcols" for d in (64, 128, 256)),
            "quant_fp16_d128_rot_stensor",
        ]
    )
)
OF_A_COPY = 0.85


@pytest.fixture(scope="module")
def quantiser(hopper, kernel_cache):
    """Plan and Binary by slug, all compiled in parallel beforehand."""

    @cache
    def build(slug):
        return flow.built(QuantizeSchedule.from_slug(slug), binding=True)

    def attempt(slug):
        try:
            build(slug)
        except Exception as error:  # its own tests raise it again
            return error

    with ThreadPoolExecutor(BUILDERS) as pool:
        list(pool.map(attempt, dict.fromkeys([*SLUGS, *FAST])))
    return build


@pytest.mark.parametrize("slug", SLUGS)
def test_values_and_descales_are_the_references(slug, quantiser):
    of, binary = quantiser(slug)
    errors = VERIFICATION.errors(of, binary, None)
    if not (of.rotate or of.center):  # then nothing is added up, and every bit is the reference's
        assert {error.neighbours for error in errors} == {0.0}
        assert max(error.descale_error for error in errors) < 1e-6


@pytest.mark.parametrize("slug", FAST)
def test_it_is_nearly_as_fast_as_a_copy_of_as_many_bytes(slug, quantiser):
    """What rotates 256 columns holds 128 numbers a lane: 12 warps, too few to hide memory."""
    of, binary = quantiser(slug)
    found = [bandwidth(of, binary, given) for given in quantizers._ways(of)]
    print(slug, *(f"{one.ratio:.3f}" for one in found))
    share = 0.7 if of.rotate and of.center and of.head_dim == 256 else OF_A_COPY
    assert min(one.ratio for one in found) >= share, found


def test_twenty_runs_are_bit_identical(quantiser):
    x = torch.randn(2, 1003, 8, 128, device="cuda").half()
    for keys in (
        dict(rotate=True, scales="tensor"),
        dict(scales="head", layout="columns"),
        dict(rotate=True, scales="block"),
        dict(center=True, scales="column", layout="columns"),
        dict(rotate=True, center=True),
    ):
        first = quantize(x, **keys)
        for _ in range(19):
            again = quantize(x, **keys)
            assert torch.equal(again.values.view(torch.uint8), first.values.view(torch.uint8))
            assert torch.equal(again.descale, first.descale)


@pytest.mark.parametrize("scales", ["tensor", "head", "block", "column"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_the_call_gives_what_it_gives_on_a_cpu(scales, layout, quantiser):
    x = torch.randn(2, 515, 4, 128).half()
    given = dict(scales=scales, layout=layout)
    here, there = quantize(x, **given), quantize(x.cuda(), **given)
    assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))
    torch.testing.assert_close(there.descale.cpu(), here.descale, rtol=1e-6, atol=0)


def test_a_call_can_be_captured(quantiser):
    x = torch.randn(1, 300, 2, 128, device="cuda").half()
    for keys in (
        dict(rotate=True, scales="tensor"),
        dict(rotate=True, scales="block"),
        dict(center=True, scales="column"),
    ):
        graph, results = graph_of(lambda keys=keys: quantize(x, **keys))
        x.copy_(torch.randn_like(x) * 3)
        graph.replay()
        expected = quantize(x, **keys)
        assert torch.equal(results.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert same(results[1:], expected[1:])


def test_given_means_and_descales_are_those_of_keys_that_came_before(quantiser):
    """Of a cache that grows, only what is new is read, once."""
    x = (torch.randn(2, 700, 4, 128, device="cuda") + 3).half()
    keys = dict(center=True, scales="column")
    first = quantize(x[:, :600], **keys)
    again = quantize(x[:, :600], **keys, descale=first.descale, mean=first.mean)
    assert torch.equal(first.values.view(torch.uint8), again.values.view(torch.uint8))
    more = quantize(x[:, 600:], **keys, descale=first.descale, mean=first.mean)
    real = more.values.float() * first.descale[:, None] + first.mean[:, None]
    assert rms(real - x[:, 600:].float()) < 0.04 * rms(x[:, 600:].float() - 3)


@pytest.mark.parametrize(("batch", "seqlen"), [(70_000, 3), (1, 2_200_000)])
def test_more_batches_or_rows_than_a_grid_has_in_a_direction(batch, seqlen, quantiser):
    x = torch.randn(batch, seqlen, 1, 16, device="cuda").half()
    last = slice(-1, None), slice(-64, None)  # a block of its own
    found, expected = quantize(x).values[last], quantize(x[last].contiguous()).values
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    values, descale, mean = quantize(x, scales="column", center=True)
    torch.testing.assert_close(mean, x.float().mean(1), rtol=1e-3, atol=1e-5)
    real = values.float() * descale[:, None] + mean[:, None]
    assert rms(real - x.float()) < 0.04 * rms(x)


def test_what_is_quantised_is_what_a_kernel_takes(quantiser):
    """Rotated by one seed, Q and K have the products that they had; V's columns are its rows."""
    q, k, v = (torch.randn(1, 256, HIDDEN // 128, 128, device="cuda").half() for _ in range(3))
    made = [quantize(q, rotate=True), quantize(k, rotate=True), quantize(v, layout="columns")]
    given = Operands(*(x.values for x in made), *(x.descale for x in made))
    rows = Quantized(by_rows(given.v, 256), given.v_descale)
    real = [x.real(SCALE_ROWS_DEFAULT) for x in (*made[:2], rows)]
    assert rms(real[2] - v.float()) < 0.03 * rms(v)
    products, expected = (
        torch.einsum("bshd,bthd->bhst", one.float(), other.float())
        for one, other in ((real[0], real[1]), (q, k))
    )
    assert rms(products - expected) < 0.05 * rms(expected)
