"""What lies in generated/: each schedule rendered as of today, and evidence that this one ran."""

import re

import pytest

from fagen import evidence, flow, render
from fagen.paths import locate
from fagen.toolchain import find_cutlass

LAID_OUT_OFTEN = 16  # one of so many kernels; clang-format takes most of the time


def all_but_layout(text):
    return re.sub(r"[\s/]", "", text)  # a comment that is broken has more slashes


@pytest.mark.parametrize("every", [LAID_OUT_OFTEN, pytest.param(1, marks=pytest.mark.long)])
def test_every_committed_kernel_is_a_fresh_rendering_with_evidence_and_nothing_else_is_there(
    every, monkeypatch
):
    files = sorted(locate("generated").rglob("*.cu"))
    texts = (file.read_text() for at, file in enumerate(files) if at % every)
    committed = {all_but_layout(text): text for text in texts}
    lay_out = render.formatted

    def formatted(text):
        if "__global__" not in text:  # a binding is not committed
            return text
        return committed.get(all_but_layout(text)) or lay_out(text)

    monkeypatch.setattr(render, "formatted", formatted)
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
