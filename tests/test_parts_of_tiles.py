"""Tiles of a last round that leaves SMs idle, in parts of their keys, on the simulated GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import registry, simulator
from fagen.errors import ScheduleError
from fagen.kinds.forward import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.render import render
from fagen.runtime.c_interface import described, library_at, workspace_for
from tests.often import some
from tests.tensors import normal

# one warpgroup, two in turns at the tensor cores; heads that share tiles
SLUGS = (
    "fwd_e4m3_d64_full_m64n64_vrows_pretrans_pm1_pc32_parts",
    "fwd_e4m3_d128_full_m128n64_half_nointra_vrows_pretrans_pm1_pc64_parts",
    "fwd_e4m3_d96_full_m128n64_packgqa_nointer_vrows_pretrans_parts",
)
# of the simulator's four SMs: tiles of a last round behind others, and alone; of so few keys that
# they stay whole, and of none
SIZES = (1, 5, 5, 40, 715), (2, 3, 1, 130, 640), (1, 3, 3, 70, 130), (1, 2, 2, 300, 0)
SCALE = 0.3
SIZES = (
    *((1, 2, 1, 100, 900), (1, 5, 5, 40, 715), (2, 3, 3, 130, 640), (1, 2, 1, 70, 130)),
    *((1, 2, 2, 300, 0), (1, 4, 2, 30, 700), (3, 6, 2, 77, 1_500)),
)


def case(plan: Any, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    batch, heads, kv_heads, seqlen_q, seqlen_k = sizes
    q, k, v = (
        normal(batch, length, count, plan.head_dim, seed=i).to(torch.float8_e4m3fn)
        for i, (length, count) in enumerate(((seqlen_q, heads), *((seqlen_k, kv_heads),) * 2))
    )
    of_heads = normal(batch, heads, 1).abs() + 0.1
    of_v = normal(batch, kv_heads, plan.head_dim_v).abs() + 0.1
    numbers = {"q_descale": of_heads, "k_descale": of_heads[:, :kv_heads], "v_descale": of_v}
    return {"q": q, "k": k, "v": v, **numbers}


def results(plan: Any, library: Any, given: dict[str, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """What a kernel makes of a case, in a workspace that may hold anything."""
    q = given["q"]
    out = torch.full(q.shape, 7.0, dtype=torch.bfloat16)
    lse = torch.full((len(q), q.shape[2], q.shape[1]), 7.0)
    call = {**given, "scale": SCALE, "out": out, "lse": lse}
    room = workspace_for(plan, library, **call)
    room.view(torch.int32).fill_(seed)
    library_at(library)["fagen_simulator_seed"](seed)
    described(plan, library, call, workspace=room)(None)
    return out, lse


@pytest.mark.parametrize("slug", some(SLUGS, SLUGS[:1]))
def test_a_tile_in_parts_is_what_it_is_as_a_whole_and_the_same_bits_each_time(slug: str) -> None:
    plans = [registry.plan_of(name) for name in (slug, slug.removesuffix("_parts"))]
    (parts, own), (whole, other) = ((p, simulator.build(render(p).kernel)) for p in plans)
    for sizes in SIZES:
        given = case(parts, sizes)
        first, again = (results(parts, own, given, seed) for seed in (0, 1))
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        out, lse = results(whole, other, given, 0)
        torch.testing.assert_close(first[1], lse, rtol=1e-6, atol=1e-5)
        q, k, v = (given[name].double() for name in "qkv")
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            x *= given[f"{name}_descale"].double()[:, None]
        exact = reference(q, k, v, mask="full", scale=SCALE)[0]
        errors = [(x.double() - exact).square().mean().sqrt() for x in (first[0], out)]
        assert errors[0] <= 1.1 * errors[1], sizes


@pytest.mark.parametrize(
    ("slug", "why"),
    [
        ("fwd_e4m3_d64_full_m64n64_vrows_pm1_pc32_parts", 'transposes = "kernel" so far'),
        ("fwd_e4m3_d64_causal_m64n64_vrows_pretrans_parts", "for a full mask"),
        ("fwd_e4m3_d64_full_m64n64_vrows_pretrans_pm1_parts", "needs promote_columns"),
    ],
)
def test_what_has_no_parts_is_refused(slug: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Schedule.from_slug(slug)
