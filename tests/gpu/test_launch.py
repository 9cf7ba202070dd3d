"""What a call has the GPU do besides its kernel: nothing."""

import pytest

from fagen.measure.launch import launch_costs

pytestmark = pytest.mark.gpu


def test_a_call_is_one_kernel_and_allocates_its_outputs_only(one_kernel):
    costs = launch_costs(one_kernel.plan, one_kernel.binary)
    for name in ("torch op", "fagen.attention"):
        cost = costs[name]
        assert (cost.kernels, cost.memsets, cost.copies, cost.allocations) == (1, 0, 0, 2), name
