"""What lies in generated/: each schedule rendered as of today, and evidence that this one ran."""

import pytest

from fagen import evidence, flow
from fagen.toolchain import find_cutlass


def test_every_committed_kernel_is_a_fresh_rendering_with_evidence_and_nothing_else_is_there():
    _, cutlass = find_cutlass()
    found = evidence.faults(map(flow.rendered, flow.all_committed()), cutlass=cutlass)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("slug", ["fwd_fp16_d128_causal_m128n128", "quant_fp16_d128_rot_shead"])
def test_machine_code_that_the_same_compiler_gives_is_that_which_ran(built, slug):
    """Two kernels stand for all: each is compiled for this, and the flow is the same."""
    found = evidence.read(slug)
    if found is None or slug in evidence.read_excuses():
        pytest.skip(f"{slug} has no evidence of today's source, as {evidence.UNVERIFIED} says")
    kernel = built(slug)
    stale = evidence.staleness(
        found,
        kernel.source.hash,
        machine_code=kernel.binary.report.machine.hash,
        compiler=kernel.binary.made_with["nvcc"],
    )
    assert not stale, "\n".join(stale)
