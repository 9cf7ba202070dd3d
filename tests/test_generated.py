"""What lies in generated/: what every schedule renders to as of today, and evidence that it ran."""

import pytest

from fagen import evidence, flow
from fagen.toolchain import find_cutlass


def test_everything_in_generated_is_as_schedules_want_it_and_nothing_else_is_there(committed):
    forms = evidence.forms()
    renderings = [
        flow.to_commit(committed.schedules[slug])
        if slug in forms
        else evidence.Rendering(slug, hashes)
        for slug, hashes in committed.hashes.items()
    ]
    _, cutlass = find_cutlass()
    faults = evidence.faults(renderings, cutlass=cutlass)
    assert not faults, "\n".join(map(str, faults))


def test_kernels_that_are_committed_as_text_are_few(committed):
    """One of each form; that each text is of some kernel, tests of parts say."""
    forms = evidence.forms()
    assert 0 < len(forms) <= 20
    assert forms.keys() <= committed.plans.keys()


@pytest.mark.parametrize("slug", ["fwd_fp16_d128_causal_m128n128", "quant_fp16_d128_rot_shead"])
def test_machine_code_that_the_same_compiler_gives_is_that_which_ran(built, slug):
    """Two kernels stand for all: each is compiled for this, and the flow is the same."""
    line = evidence.read_line(slug)
    if line is None or line.evidence is None or slug in evidence.read_excuses():
        pytest.skip(f"{slug} has no evidence of today's source, as {evidence.UNVERIFIED} says")
    kernel = built(slug)
    stale = evidence.staleness(
        line.evidence,
        kernel.source.hashes,
        launchers=evidence.launchers(slug),
        machine_code=kernel.binary.report.machine.hash,
        compiler=kernel.binary.made_with["nvcc"],
    )
    assert not stale, "\n".join(stale)
