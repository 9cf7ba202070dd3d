"""What lies in generated/: what every schedule renders to as of today, and evidence that it ran."""

import pytest

from fagen import evidence, flow, render
from fagen.paths import locate
from fagen.registry import ENTRIES
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


def test_every_template_of_a_kernel_is_seen_in_a_kernel_that_is_committed_as_text(
    committed, monkeypatch
):
    forms = evidence.forms()
    assert 0 < len(forms) <= 20
    assert forms.keys() <= committed.plans.keys()
    names: set[str] = set()
    environment = render.environment()
    get = environment.get_template  # of each file that one includes or imports, when it does
    monkeypatch.setattr(
        environment, "get_template", lambda name, *how: names.add(name) or get(name, *how)
    )
    for slug in forms:
        render.kernel_text(committed.plans[slug])
    environment.get_template("fagen_host.h.j2").render(calls=committed.plans[slug].signature)
    folder = locate("templates")
    of_kernels = [render.KERNEL, "abi.h.j2", "fagen_host.h.j2"]
    for part in (*ENTRIES, "attention", "host", "parts", "sm90"):
        texts = (path for path in (folder / part).rglob("*") if path.is_file())
        of_kernels += [path.relative_to(folder).as_posix() for path in texts]
    assert {*of_kernels} == names


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
