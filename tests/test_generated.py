"""What lies in generated/: each schedule rendered as of today, and evidence that this one ran."""

from fagen import flow
from fagen.evidence import faults
from fagen.toolchain import find_cutlass


def test_every_committed_kernel_is_a_fresh_rendering_with_evidence_and_nothing_else_is_there():
    _, cutlass = find_cutlass()
    found = faults(map(flow.rendered, flow.all_committed()), cutlass=cutlass)
    assert not found, "\n".join(map(str, found))


def test_machine_code_that_the_same_compiler_gives_is_that_which_ran(built):
    """One kernel stands for all: each is compiled for this, and the flow is the same."""
    slug = "fwd_fp16_d128_causal_m128n128"
    kernel = built(slug)
    found = faults(
        map(flow.rendered, flow.all_committed()),
        machine_codes={slug: kernel.binary.report.machine.hash},
        compiler=kernel.binary.made_with["nvcc"],
    )
    assert not [fault for fault in found if fault.slug == slug], "\n".join(map(str, found))
