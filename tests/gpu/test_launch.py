"""What a call has the GPU do besides its kernel: nothing."""

import pytest
import torch

import fagen
from benchmarks.launch import launch_costs, launches
from fagen.measure.timing import Call

pytestmark = pytest.mark.gpu


def test_a_call_is_one_kernel_and_allocates_its_outputs_only(one_kernel):
    costs = launch_costs(one_kernel.plan, one_kernel.binary)
    for name, outputs in (("torch op", 2), ("torch op without lse", 1), ("fagen.attention", 1)):
        cost = costs[name]
        done = cost.kernels, cost.memsets, cost.copies, cost.allocations
        assert done == (1, 0, 0, outputs), name


def test_a_decode_call_of_few_keys_is_a_kernel_and_allocates_its_output_and_a_workspace(built):
    kernel = built("dec_fp16_d128_causal_r8n64")
    costs = launch_costs(kernel.plan, kernel.binary)
    print({name: f"{cost.host_microseconds} us" for name, cost in costs.items()})
    for name, made in (("torch op", 3), ("torch op without lse", 2), ("fagen.attention_decode", 2)):
        cost = costs[name]
        assert (cost.kernels, cost.memsets, cost.copies, cost.allocations) == (1, 0, 0, made), name


@pytest.mark.parametrize("head_dim", [128, 256])
def test_where_whole_tiles_leave_nothing_to_merge_it_is_one(head_dim):
    q = torch.randn(32, 1, 32, head_dim, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, 32, 1_024, 8, head_dim, device="cuda", dtype=torch.float16)
    fagen.attention_decode(q, k, v)
    found = launches(Call(lambda: fagen.attention_decode(q, k, v)))
    assert found == {"kernels": 1, "memsets": 0, "copies": 0}
