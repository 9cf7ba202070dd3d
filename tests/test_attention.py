"""fagen.attention: what it computes, and what it says of calls that it cannot serve."""

import re
from pathlib import Path

import pytest
import torch

import fagen
from fagen.errors import DeviceError, ScheduleError
from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.reference import reference
from fagen.paths import locate
from fagen.problem import Problem
from fagen.registry import read as read_schedule
from fagen.runtime.arguments import dtype_of
from tests.attention_helpers import QUERY_ROWS, qkv, write_toml

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


THERE = [read_schedule(path) for path in sorted((locate("schedules") / "forward").glob("*.toml"))]


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_attention(causal: bool) -> None:
    q, k, v = qkv()
    exact, exact_lse = reference(q, k, v, mask="causal" if causal else "full", scale=1 / 8)
    out = fagen.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)
    again, lse = fagen.attention(q, k, v, causal=causal, scale=1 / 8, return_lse=True)
    assert torch.equal(out, again)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "schedule",
    [schedule for schedule in THERE if schedule.attention.dtype != "e4m3"],
    ids=lambda schedule: schedule.slug,
)
def test_every_schedule_of_the_folder_serves_its_problem(schedule: Schedule) -> None:
    problem = Problem.of(schedule)
    causal = problem.mask == "causal"
    slug = fagen.prepare(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=causal,
        seqlen=200,
        rows=QUERY_ROWS,
        device="cpu",
    )
    assert Problem.of(Schedule.from_slug(slug)) == problem
    q, k, v = qkv(dtype_of(problem.dtype), problem.head_dim, problem.head_dim_v)
    out, lse = fagen.attention(q, k, v, causal=causal, return_lse=True)
    expected = emulate(plan(Schedule.from_slug(slug)), q, k, v, problem.head_dim**-0.5)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_schedule_may_be_a_path_a_slug_or_itself(tmp_path: Path) -> None:
    schedule = Schedule.from_slug("fwd_fp16_d64_full_m64n16")
    write_toml(tmp_path / "mine.toml", schedule.slug)
    q, k, v = qkv()
    expected = emulate(plan(schedule), q, k, v, 0.125)[0]
    assert not torch.equal(expected, fagen.attention(q, k, v)), "the tile shows in the roundings"
    for choice in (schedule, schedule.slug, tmp_path / "mine.toml", str(tmp_path / "mine.toml")):
        assert torch.equal(fagen.attention(q, k, v, schedule=choice), expected)
        assert fagen.prepare(dtype="fp16", head_dim=64, schedule=choice) == schedule.slug


# ---- which schedule -----------------------------------------------------------------------------


def test_where_no_schedule_fits_there_is_a_list_of_those_that_exist() -> None:
    with pytest.raises(ScheduleError) as refusal:
        fagen.attention(*qkv(torch.bfloat16, 40, 24), causal=True)
    said = str(refusal.value)
    assert said.startswith("no schedule computes bfloat16, head_dim 40 and 24 (V), causal; in ")
    assert all(f"\n  {schedule.slug}\n" in said for schedule in THERE)
    with pytest.raises(ScheduleError, match="no schedule computes float32, head_dim 64, full;"):
        fagen.attention(*qkv(torch.float32))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            "fwd_fp16_d64_causal_m64n64",
            "computes float16, head_dim 64, causal; the call asks for float16, head_dim 64, full",
        ),
        ("fwd_bf16_d64_full_m64n64", "computes bfloat16, head_dim 64, full; the call asks for "),
        ("fwd_fp16_d64v32_full_m64n64", "computes float16, head_dim 64 and 32 (V), full; "),
        ("fwd_fp16", "'fwd_fp16' is no slug"),
        ("nowhere/x.toml", "nowhere/x.toml: cannot be read: No such file or directory"),
    ],
)
def test_a_schedule_for_something_else_is_refused(choice: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        fagen.attention(*qkv(), schedule=choice)


def test_prepare_takes_torchs_names_and_fagens_and_no_others() -> None:
    slugs = {
        fagen.prepare(dtype=dtype, head_dim=64) for dtype in ("fp16", "float16", torch.float16)
    }
    assert len(slugs) == 1
    with pytest.raises(ValueError, match="dtype is 'half'; it must be one of fp16, float16, bf16"):
        fagen.prepare(dtype="half", head_dim=64)


# ---- wrong calls --------------------------------------------------------------------------------


def test_wrong_arguments_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="q has 3 dimensions and v has 4; both must have 4"):
        fagen.attention(q[0], k, v)
    with pytest.raises(ValueError, match="k has shape"):
        fagen.attention(q, k[0], v)
    with pytest.raises(ValueError, match="k is not float16"):
        fagen.attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="scale is -1; it must be finite and above 0"):
        fagen.attention(q, k, v, scale=-1)
    with pytest.raises(DeviceError, match="tensors are on meta; a kernel runs on a Hopper GPU"):
        fagen.attention(*(t.to("meta") for t in (q, k, v)))


@pytest.mark.parametrize("which", range(3))
def test_a_call_that_needs_a_gradient_is_refused(which: int) -> None:
    tensors = [*qkv()]
    tensors[which].requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient, and there is no backward yet"):
        fagen.attention(*tensors)
    with torch.no_grad():
        assert not fagen.attention(*tensors).requires_grad


def test_a_functional_gradient_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="requires a gradient"):
        torch.func.grad(lambda t: fagen.attention(t, k, v).float().sum())(q)
