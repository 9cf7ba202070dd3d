"""What chooses among a vendored folder's kernels of decoding, in C and in Python."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import fagen
from tests.tensors import normal
from tests.vendor_gradients import package

SMALL = [f"dec_fp16_d64_causal_r{tile}n128_c64" for tile in (8, 16)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A package whose kernels compute on the CPU as they would on a GPU."""
    with package(tmp_path_factory.mktemp("demo"), *SMALL) as found:
        yield found


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_its_bits_are_fagens_also_compiled(fresh_dynamo, demo):
    assert "attention_decode" in demo.__all__ and not hasattr(demo, "attention")

    def compiled_call(*given: Any, **named: Any) -> Any:
        return demo.attention_decode(*given, **named)

    compiled = torch.compile(compiled_call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, queries, heads in ((2, 1, 4), (2, 3, 4), (3, 7, 4), (1, 9, 8)):
        q = normal(batch, queries, heads, 64, seed=1, dtype=torch.float16)
        k, v = (normal(batch, 300, 2, 64, seed=s, dtype=torch.float16) for s in (2, 3))
        used = torch.tensor([300, 170, 0][:batch], dtype=torch.int32)
        named: dict[str, Any] = {"seqused_k": used, "leftpad_k": used // 4, "scale": 0.2}
        right = fagen.attention_decode(q, k, v, **named, return_lse=True)
        for call in (demo.attention_decode, compiled):
            for found, own in zip(call(q, k, v, **named, return_lse=True), right, strict=True):
                assert torch.equal(found, own)
            assert torch.equal(call(q, k, v, **named), right[0])
    leaf = q.clone().requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient, and decoding has none"):
        demo.attention_decode(leaf, k, v)
    with torch.no_grad():
        assert demo.attention_decode(leaf, k, v).shape == q.shape
    with pytest.raises(ValueError, match=r"those for .*, 64, full of one query"):
        demo.attention_decode(q, k, v, causal=False)
