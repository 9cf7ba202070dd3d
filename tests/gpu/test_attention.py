"""fagen.attention on a GPU: captured, compiled, in e4m3, and refused while a graph is captured."""

import pytest
import torch

import fagen
from fagen.dispatch.rows import OPEN_KEYS
from fagen.errors import FagenError
from fagen.flash_attn_interface import flash_attn_func
from fagen.kinds.forward.oracle import reference
from tests.gpu.helpers import graph_of, same, spoil

pytestmark = pytest.mark.gpu


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 40, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    return [torch.randn(shape, generator=generator).half().cuda() for shape in shapes]


def test_prepared_it_gives_the_same_called_captured_or_compiled(qkv, nothing_is_ready):
    fagen.prepare(dtype="fp16", head_dim=64, causal=True)
    most = fagen.prepare(dtype="fp16", head_dim=64, causal=True, seqlen=OPEN_KEYS)
    sizes = dict(batch=2, heads=4, kv_heads=2, seqlen=40, seqlen_k=90)
    card = torch.cuda.get_device_name()
    few = fagen.pick(dtype="fp16", head_dim=64, causal=True, card=card, **sizes).slug
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fagen.attention(*qkv, causal=True)
    spoil(captured)
    graph.replay()
    out = fagen.attention(*qkv, causal=True)
    assert torch.equal(captured, out)
    exact, _ = reference(*qkv, mask="causal", scale=1 / 8)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)

    def attention(q, k, v):
        return fagen.attention(q, k, v, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    assert torch.equal(fagen.attention(*qkv, causal=True, schedule=few), out)
    # with sizes left open, rows count as many and keys as OPEN_KEYS
    expected = fagen.attention(*qkv, causal=True, schedule=most)
    assert torch.equal(compiled(*qkv), expected)


def test_an_unbuilt_kernel_fails_the_capture_and_nothing_else(qkv, nothing_is_ready):
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(FagenError, match="while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        fagen.attention(*qkv)
    assert fagen.attention(*qkv).isfinite().all()


# ---- e4m3


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("v_layout", ["rows", "columns"])
@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_in_e4m3_it_gives_what_it_gives_on_a_cpu(qkv, causal, v_layout, scales):
    given = dict(causal=causal, v_layout=v_layout, scales=scales, return_lse=True)
    out, lse = fagen.attention_fp8(*qkv, **given)
    exact, exact_lse = reference(*qkv, mask="causal" if causal else "full", scale=1 / 8)
    emulated, _ = fagen.attention_fp8(*(x.cpu() for x in qkv), **given)
    theirs = (emulated.cuda().double() - exact).square().mean().sqrt()
    ours = (out.double() - exact).square().mean().sqrt()
    assert out.dtype == torch.float16
    # three bits of mantissa each of Q, K, V and P
    assert float(ours) < 0.07 * float(exact.square().mean().sqrt())
    assert float(ours) < 1.15 * float(theirs)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=0.1)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_in_e4m3_any_head_dim_has_a_kernel_without_a_schedule_of_its_own(head_dim):
    generator = torch.Generator().manual_seed(1)
    shape = (1, 200, 4, head_dim)
    qkv = [torch.randn(shape, generator=generator).bfloat16().cuda() for _ in range(3)]
    out = fagen.attention_fp8(*qkv)
    exact, _ = reference(*qkv, mask="full", scale=head_dim**-0.5)
    assert float((out - exact).square().mean().sqrt()) < 0.1 * float(exact.square().mean().sqrt())


def test_in_e4m3_it_is_captured_with_its_quantisers(qkv):
    graph, captured = graph_of(lambda: fagen.attention_fp8(*qkv, causal=True))
    spoil(captured)
    graph.replay()
    assert torch.equal(captured, fagen.attention_fp8(*qkv, causal=True))


@pytest.mark.parametrize("descales", ["of each KV head", "shared", "none"])
def test_as_flash_attention_3_is_called_e4m3_is_captured_and_near_fp64(qkv, descales):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv)
    sizes = {
        "of each KV head": torch.tensor([[0.5, 2.0], [4.0, 0.25]]).to(q.device),
        "shared": torch.tensor(0.5).to(q.device).expand(2, 2),
        "none": None,
    }[descales]

    def call():
        return flash_attn_func(q, k, v, None, True, None, *[sizes] * 3, return_attn_probs=True)

    out, lse = call()
    graph, captured = graph_of(call)
    spoil(*captured)
    graph.replay()
    assert same(captured, (out, lse))

    real = [x.double() for x in (q, k, v)]
    if sizes is not None:
        by_head = [sizes.double().repeat_interleave(x.shape[2] // 2, 1) for x in real]
        real = [x * size[:, None, :, None] for x, size in zip(real, by_head, strict=True)]
    exact, exact_lse = reference(*real, mask="causal", scale=1 / 8)
    assert out.dtype == torch.bfloat16
    # three bits of mantissa of P
    assert float((out - exact).square().mean().sqrt()) < 0.05 * float(exact.square().mean().sqrt())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-3, atol=0.1)
