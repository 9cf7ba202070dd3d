"""What a call costs beside its arithmetic, with the GPU, its profiler and its memory made up."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import launch
from benchmarks.launch import BATCH, BATCHES, PROFILED, SMALL, LaunchCost, launch_costs
from fagen import registry
from fagen.errors import DeviceError
from fagen.measure.inputs import inputs
from fagen.measure.timing import Call

SLUG = "fwd_fp16_d64_full_m192n128"
DECODING = "dec_fp16_d128_causal_r8n64"


@pytest.fixture
def gpu(monkeypatch):
    """One on which every call of the fake op is a kernel and two allocations."""
    fake = SimpleNamespace(calls=0, synchronised=[], names=["void kernel<64>(Args)"], taken=7)

    class Profile:
        def __init__(self, activities):
            self.began = fake.calls

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.ended = fake.calls

        def events(self):
            seen = [("cudaLaunchKernel", DeviceType.CPU), ("cudaDeviceSynchronize", DeviceType.CPU)]
            seen += [(name, DeviceType.CUDA) for name in fake.names]
            each = self.ended - self.began
            return [SimpleNamespace(name=n, device_type=of) for n, of in seen for _ in range(each)]

    def op(q, k, v, scale):
        fake.calls += 1
        fake.taken += 2
        return torch.empty_like(q), torch.empty(1)

    monkeypatch.setattr(launch, "profile", Profile)
    monkeypatch.setattr(launch, "hopper", lambda: None)
    monkeypatch.setattr(launch, "inputs", lambda case: inputs(case, device="cpu"))
    monkeypatch.setattr(launch, "attention", lambda q, k, v, causal: op(q, k, v, 1.0)[0])
    monkeypatch.setattr(launch.op, "load", lambda binary: op)
    monkeypatch.setattr(torch.ops.fagen, SLUG, op, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.synchronised.append(fake.calls))
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": fake.taken}
    )
    return fake


def costs(slug=SLUG):
    return launch_costs(registry.plan_of(slug), SimpleNamespace(slug=slug))


def test_a_call_is_one_kernel_and_two_allocations_and_cudnn_is_left_out_where_it_cannot(gpu):
    found = costs()
    assert list(found) == ["torch op", "torch op without lse", "fagen.attention"], "no cuDNN here"
    for cost in found.values():
        assert cost.host_microseconds > 0
        assert (cost.kernels, cost.memsets, cost.copies, cost.allocations) == (1, 0, 0, 2)


def test_a_decode_call_has_lengths_and_torchs_attention_beside_it(gpu, monkeypatch):
    given = []

    def op(q, k, v, scale=1.0, *, seqused_k):
        given.append((q.shape, k.shape, seqused_k.tolist()))
        gpu.calls += 1
        return torch.empty_like(q), torch.empty(1)

    monkeypatch.setattr(launch, "BATCHES", 1)  # torch's attention computes
    monkeypatch.setattr(launch.op, "load", lambda binary: op)
    monkeypatch.setattr(launch.op, "alone", lambda kernel: lambda *of, **more: kernel(*of, **more))
    monkeypatch.setattr(launch, "attention_decode", op)
    monkeypatch.setattr(torch.ops.fagen, DECODING, op, raising=False)
    sdpa, seen = torch.nn.functional.scaled_dot_product_attention, []

    def torchs(*tensors, **how):
        seen.append(how)
        gpu.calls += 1
        return sdpa(*tensors, **how)

    monkeypatch.setattr(launch.functional, "scaled_dot_product_attention", torchs)
    found = costs(DECODING)
    assert list(found) == [
        *("torch op", "torch op without lse", "fagen.attention_decode", "torch's attention")
    ], "no cuDNN here"
    of = launch.SMALL_DECODING
    shapes = (1, 1, of.heads, 128), (1, of.seqlen_k, of.kv_heads, 128)
    assert set(map(str, given)) == {str((*map(torch.Size, shapes), [of.seqlen_k]))}
    assert seen and all(how == {"enable_gqa": True} for how in seen)


def test_whatever_else_a_call_has_the_gpu_do_is_counted(gpu):
    gpu.names += ["Memset (Device)", "Memcpy HtoD (Pageable -> Device)", "combine(float*)"]
    cost = costs()["torch op"]
    assert cost == LaunchCost(cost.host_microseconds, kernels=2, memsets=1, copies=1, allocations=2)


def test_a_profiler_that_sees_nothing_is_not_taken_for_a_call_that_does_nothing(gpu):
    gpu.names.clear()
    with pytest.raises(DeviceError, match="profiler"):
        costs()


def test_the_queue_is_emptied_before_every_batch_and_no_batch_can_fill_it(gpu):
    def run():
        gpu.calls += 1

    launch.host_microseconds(Call(run))
    assert gpu.synchronised == [number * BATCH for number in range(BATCHES + 1)]
    assert max(BATCH, PROFILED) < 1000
    assert (SMALL.batch, SMALL.heads, SMALL.seqlen_q) == (1, 1, 64)
