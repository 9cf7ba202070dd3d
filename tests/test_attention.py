"""fagen.attention: what it computes, and what it says of calls that it cannot serve."""

import warnings
from dataclasses import replace

import pytest
import torch

import fagen
from fagen.dispatch.select import serve
from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.measure.sinks import usual_sinks
from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.registry import read as read_schedule
from fagen.runtime.arguments import dtype_of
from tests.attention_helpers import QUERY_ROWS, picked, qkv, write_toml

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


THERE = [read_schedule(path) for path in sorted((locate("schedules") / "forward").glob("*.toml"))]


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_attention(causal):
    q, k, v = qkv()
    exact, exact_lse = reference(q, k, v, mask="causal" if causal else "full", scale=1 / 8)
    out = fagen.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)
    again, lse = fagen.attention(q, k, v, causal=causal, scale=1 / 8, return_lse=True)
    assert torch.equal(out, again)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)


def mask_of(problem):
    """A mask and a score as calls say them."""
    how = {"causal": problem.mask != "full"}
    how |= {"window": 9} if problem.mask == "window" else {}
    return how | ({"softcap": 5.0} if problem.score == "softcap" else {})


@pytest.mark.parametrize(
    "schedule",
    [
        schedule  # those of varlen sequences are in test_varlen.py
        for schedule in THERE
        if schedule.attention.dtype != "e4m3" and not Problem.of(schedule).varlen
    ],
    ids=lambda schedule: schedule.slug,
)
def test_every_schedule_of_the_folder_serves_its_problem(schedule):
    problem = Problem.of(schedule)
    mask = mask_of(problem)
    prepared = fagen.prepare(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        **mask,
        sinks=problem.sink or None,
        seqlen=200,
        rows=QUERY_ROWS,
        device="cpu",
    )
    slug = serve(problem, Sizes(2, 4, 2, 70, 200), "").schedule.slug  # of several that it has
    assert {Problem.of(Schedule.from_slug(name)) for name in (slug, prepared)} == {problem}
    q, k, v = qkv(dtype_of(problem.dtype), problem.head_dim, problem.head_dim_v)
    serving = plan(Schedule.from_slug(slug))
    sinks = usual_sinks(serving.sink, q.shape[2], "cpu")
    out, lse = fagen.attention(q, k, v, **mask, **sinks, return_lse=True)
    if problem.mask == "window":
        bound = serving.mask.bound({"window_left": 8, "window_right": 0})
        serving = replace(serving, mask=bound)
    serving = replace(serving, score=serving.score.bound({"softcap": 5.0}))
    expected = emulate(serving, q, k, v, problem.head_dim**-0.5, **sinks)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_schedule_may_be_a_path_a_slug_or_itself(tmp_path):
    schedule = Schedule.from_slug("fwd_fp16_d64_full_m64n16")
    write_toml(tmp_path / "mine.toml", schedule.slug)
    q, k, v = qkv()
    expected = emulate(plan(schedule), q, k, v, 0.125)[0]
    assert not torch.equal(expected, fagen.attention(q, k, v)), "the tile shows in the roundings"
    for choice in (schedule, schedule.slug, tmp_path / "mine.toml", str(tmp_path / "mine.toml")):
        assert torch.equal(fagen.attention(q, k, v, schedule=choice), expected)
        assert fagen.prepare(dtype="fp16", head_dim=64, schedule=choice) == schedule.slug


# ---- which schedule -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::fagen.UntunedWarning")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [*((d, d) for d in range(16, 257, 8)), (64, 256), (192, 128), (256, 128), (16, 256), (24, 200)],
)
def test_every_supported_problem_has_a_schedule_that_fits(dtype, causal, head_dim, head_dim_v):
    results = picked(
        dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, seqlen=1_000
    )
    mask = "causal" if causal else "full"
    assert Problem.of(results).answered_by(Problem(dtype, head_dim, head_dim_v, mask, dtype, "", 0))
    assert plan(results).ledgers.registers.fits


def test_a_derived_schedule_is_said_once_with_the_search_for_a_better_one():
    q, k, v = qkv(torch.bfloat16, 40, 24)
    with pytest.warns(fagen.UntunedWarning) as message:
        out = fagen.attention(q, k, v, causal=True)
    (warning,) = message
    assert warning.filename == __file__
    words = str(warning.message)
    assert words.startswith("no schedule was tuned for bfloat16, head_dim 40 and 24 (V), causal: ")
    slug = words.split("fagen search ")[1].split()[0]
    assert torch.equal(out, fagen.attention(q, k, v, causal=True, schedule=slug))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fagen.attention(q, k, v, causal=True)
        problem = dict(dtype="bf16", head_dim=40, head_dim_v=24, causal=True, device="cpu")
        assert fagen.prepare(**problem) == slug


def test_prepare_takes_torchs_names_and_fagens_and_no_others():
    names = "fp16", "float16", torch.float16
    assert len({fagen.prepare(dtype=name, head_dim=64) for name in names}) == 1
