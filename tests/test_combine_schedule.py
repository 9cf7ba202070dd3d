"""A schedule of combining: its keys and slug, what is refused, and what its Plan works out."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fagen import registry
from fagen.arch import SM90
from fagen.kinds.combine.keys import Schedule
from fagen.kinds.combine.plan import LOAD_BYTES
from fagen.render import kernel_text
from fagen.vocab import LAYOUTS, PARTIALS
from tests.combine_helpers import SPREAD, planned


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    return Schedule.make(
        dtype=draw(st.sampled_from(sorted(PARTIALS))),
        head_dim=draw(st.integers(1, 64)) * 8,
        out_dtype=draw(st.sampled_from(sorted(PARTIALS))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules())
def test_a_plan_fits_and_its_text_renders(schedule):
    plan = registry.plan(schedule)
    assert plan.shared.fits
    assert plan.rows * plan.lanes == plan.threads <= 128
    assert plan.lanes * plan.loads * LOAD_BYTES >= plan.head_dim * plan.dtype.bytes
    assert 1 <= plan.full_blocks <= plan.blocks
    assert plan.threads * plan.blocks * plan.launch_registers <= SM90.registers_per_sm
    assert (plan.shared_bytes + SM90.smem_reserved) * plan.full_blocks <= SM90.smem_per_sm
    assert plan.slug in kernel_text(plan)
    assert Schedule.from_slug(plan.slug) == schedule


def test_the_ledger_and_the_record_say_what_is_moved():
    plan = planned("comb_fp32_d128_obf16")
    assert plan.moved(rows=10, splits=4) == 10 * (4 * (128 * 4 + 4) + 128 * 2 + 4)
    assert "batch · seqlen · heads · (splits · 516 + 260)" in plan.explained()
    grid = plan.launches.kernels[0].grid.x
    assert grid.at(dict(batch=3, seqlen=5, heads=7)) == -(-105 // plan.rows)
    assert plan.launches.kernels[0].overlaps and not plan.launches.needs_workspace
    assert plan.record()["row_bytes"] == (516, 260)


def test_a_struct_is_the_same_for_dense_and_packed_rows():
    dense, packed = (planned(slug).signature for slug in SPREAD[:2])
    assert [tensor.name for tensor in dense.tensors] == [tensor.name for tensor in packed.tensors]
    assert [t.strides for t in dense.tensors] == [t.strides for t in packed.tensors]
    assert dense.sizes == packed.sizes
    assert [tensor.name for tensor in dense.inputs] == ["outs", "lses"]
