"""fagen.attention on a GPU: captured, compiled, and what it refuses while a graph is captured."""

import math

import pytest
import torch

import fagen
from fagen import dispatch
from fagen.emulator import reference
from fagen.errors import FagenError

pytestmark = pytest.mark.gpu


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 40, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    return [torch.randn(shape, generator=generator).half().cuda() for shape in shapes]


@pytest.fixture
def nothing_is_ready(monkeypatch):
    monkeypatch.setattr(dispatch, "_ready", {})
    monkeypatch.setattr(dispatch, "_kernels", {})
    monkeypatch.setattr(dispatch, "_ranges", {})


def test_prepared_it_gives_the_same_called_captured_or_compiled(qkv, nothing_is_ready):
    slug = fagen.prepare(dtype="fp16", head_dim=64, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fagen.attention(*qkv, causal=True)
    captured.fill_(math.nan)
    graph.replay()
    out = fagen.attention(*qkv, causal=True)
    assert torch.equal(captured, out)
    exact, _ = reference(*qkv, causal=True, scale=1 / 8)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)

    def attention(q, k, v):
        return fagen.attention(q, k, v, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*qkv), out)
    assert torch.equal(fagen.attention(*qkv, causal=True, schedule=slug), out)


def test_an_unbuilt_kernel_fails_the_capture_and_nothing_else(qkv, nothing_is_ready):
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(FagenError, match="while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        fagen.attention(*qkv)
    assert fagen.attention(*qkv).isfinite().all()
