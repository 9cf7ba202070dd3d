"""fagen.attention: what it computes, and what it says of calls that it cannot serve."""

import re
import warnings

import pytest
import torch

import fagen
from fagen.errors import DeviceError, ScheduleError
from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.paths import locate
from fagen.problem import Problem
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
    found = picked(
        dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, seqlen=1_000
    )
    mask = "causal" if causal else "full"
    assert Problem.of(found).answered_by(Problem(dtype, head_dim, head_dim_v, mask, dtype, "", 0))
    assert plan(found).registers.fits


def test_a_derived_schedule_is_said_once_with_the_search_for_a_better_one():
    q, k, v = qkv(torch.bfloat16, 40, 24)
    with pytest.warns(fagen.UntunedWarning) as said:
        out = fagen.attention(q, k, v, causal=True)
    (warning,) = said
    assert warning.filename == __file__
    words = str(warning.message)
    assert words.startswith("no schedule was tuned for bfloat16, head_dim 40 and 24 (V), causal: ")
    slug = words.split("fagen search ")[1].split()[0]
    assert torch.equal(out, fagen.attention(q, k, v, causal=True, schedule=slug))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fagen.attention(q, k, v, causal=True)
        asked = dict(dtype="bf16", head_dim=40, head_dim_v=24, causal=True, device="cpu")
        assert fagen.prepare(**asked) == slug


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e5m2])
def test_another_dtype_is_refused_with_how_to_convert_it(dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    name = str(dtype).removeprefix("torch.")
    said = rf"q is {name}; use fp16 or bf16: q\.to\(torch\.bfloat16\)"
    for schedule in (None, "fwd_fp16_d64_full_m64n64"):
        with pytest.raises(ValueError, match=said):
            fagen.attention(q, k, v, schedule=schedule)
    with pytest.raises(ValueError, match=said):
        fagen.prepare(dtype=dtype, head_dim=64)


MULTIPLE = "; it must be a multiple of 8 from 16 to 256"


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "message"),
    [
        (20, 64, f"q and k have head_dim 20{MULTIPLE}: fill it up "),
        (8, 64, "fill it up with zeros to 16, and pass scale = 8 ** -0.5"),
        (64, 30, f"v has head_dim 30{MULTIPLE}: fill it up with ze"),
        (512, 64, f"q and k have head_dim 512{MULTIPLE}"),
    ],
)
def test_head_dims_of_no_kernel_are_refused_with_the_nearest(head_dim, head_dim_v, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fagen.attention(*qkv(head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            "fwd_fp16_d64_causal_m64n64",
            "computes float16, head_dim 64, causal; the call asks for float16, head_dim 64, full",
        ),
        ("fwd_bf16_d64_full_m64n64", "computes bfloat16, head_dim 64, full; the call asks for "),
        ("fwd_fp16_d64v32_full_m64n64", "computes float16, head_dim 64 and 32 (V), full; "),
        ("fwd_fp16", '"fwd_fp16" is no slug'),
        ("nowhere/x.toml", "nowhere/x.toml: cannot be read: No such file or directory"),
    ],
)
def test_a_schedule_for_something_else_is_refused(choice, said):
    with pytest.raises(ScheduleError, match=re.escape(said)):
        fagen.attention(*qkv(), schedule=choice)


def test_prepare_takes_torchs_names_and_fagens_and_no_others():
    names = "fp16", "float16", torch.float16
    assert len({fagen.prepare(dtype=name, head_dim=64) for name in names}) == 1
    with pytest.raises(ValueError, match="dtype is 'half'; it must be one of fp16, float16, bf16"):
        fagen.prepare(dtype="half", head_dim=64)


# ---- wrong calls --------------------------------------------------------------------------------


Q, K, V = qkv()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, "q has 3 dimensions and v has 4; both must have 4"),
        ({"k": K[0]}, ValueError, "k has shape"),
        ({"k": K.bfloat16()}, ValueError, "k is not float16"),
        ({"scale": -1}, ValueError, "scale is -1; it must be finite and above 0"),
        (
            {name: x.to("meta") for name, x in (("q", Q), ("k", K), ("v", V))},
            DeviceError,
            "tensors are on meta; a kernel runs on a Hopper GPU",
        ),
    ],
)
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        fagen.attention(**dict(q=Q, k=K, v=V) | change)
