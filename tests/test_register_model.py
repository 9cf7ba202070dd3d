"""The register model beside the machine code: how far off it is stands in a committed file."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from fagen.ledger import Margin
from fagen.registry import plan_of
from tests.cli_helpers import fagen
from tests.conftest import SPREAD

# of the spread and of other kernels that are committed
MARGINS = json.loads(Path(__file__).with_name("register_margins.json").read_text())
FILLED = 8  # registers: the compiler may spend what it has over


def test_the_models_error_is_the_committed_one(kernel):
    """On failure, what is printed is what the file should say; look at why before committing it."""
    machine = kernel.binary.report.machine
    used = machine.consumer_registers or machine.registers
    fresh = {"model": kernel.plan.ledgers.registers.total, "used": used}
    print(json.dumps({kernel.plan.slug: fresh}, indent=1))
    committed = MARGINS["forward"][kernel.plan.slug]
    assert fresh["model"] == committed["model"] and abs(used - committed["used"]) <= FILLED


def test_the_model_is_near_where_registers_are_scarce():
    """Kernels use what they have to spare: lazy ones hold a block of P before they round it."""
    committed = {slug: MARGINS["forward"][slug] for slug in SPREAD}
    assert all(f["used"] >= f["model"] - 16 for f in committed.values())
    room = {slug: plan_of(slug).consumer_registers for slug in committed}
    scarce = [f for slug, f in committed.items() if 0 < room[slug] <= f["model"] + 24]
    assert len(scarce) >= 2
    assert all(abs(f["used"] - f["model"]) <= 16 for f in scarce)


@pytest.mark.parametrize("kind", ["forward", "backward", "decode"])
def test_what_check_says_of_the_models_margin_is_committed(kind):
    """Of kernels as they were built here: model and compiler, in registers of a consumer."""
    margins = MARGINS[kind]
    off = [margin["used"] - margin["model"] for margin in margins.values()]
    formulae = import_module(f"fagen.kinds.{kind}.formulae")
    assert Margin(len(off), min(off), max(off)) == formulae.MARGIN
    for slug, margin in margins.items():
        plan = plan_of(slug)
        assert plan.modelled_registers == margin["model"]
        assert str(formulae.MARGIN) in plan.ledger


def test_check_says_how_far_the_model_is_off():
    output = fagen("check", "fwd_fp16_d128_causal_m128n128").output
    assert "thread, a model: in 29 kernels the compiler took 1 less … 63 more" in output
