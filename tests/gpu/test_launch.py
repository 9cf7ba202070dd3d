"""What a call has the GPU do besides its kernel: nothing."""

import pytest

from fagen.measure.launch import launch_costs

pytestmark = pytest.mark.gpu


def test_a_call_is_one_kernel_and_allocates_its_outputs_only(one_kernel):
    costs = launch_costs(one_kernel.plan, one_kernel.binary)
    for name, outputs in (("torch op", 2), ("torch op without lse", 1), ("fagen.attention", 1)):
        cost = costs[name]
        done = cost.kernels, cost.memsets, cost.copies, cost.allocations
        assert done == (1, 0, 0, outputs), name
