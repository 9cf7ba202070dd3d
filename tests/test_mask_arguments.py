"""Masks of which a call gives numbers: emulator and kernels beside dense attention of ours."""

from typing import Any

import pytest
import torch

from fagen import registry
from fagen.errors import ScheduleError
from fagen.kinds.forward.cost import grid
from fagen.problem import Sizes
from fagen.render import render
from fagen.runtime.checks import checked
from tests.mask_helpers import (
    AROUND,
    LENGTHS,
    call_of,
    check,
    check_varlen,
    dense,
    emulated,
    others,
    seen,
    simulated,
    varlen_call,
    varlen_numbers,
    windows,
)
from tests.often import some
from tests.test_simulator import may_part, with_lanes_together

# two warpgroups of which one skips blocks; heads that share tiles; splits, also as many as fill the
# SMs, in which tiles see nothing of the first ones; tiles that are drawn; pairs of tiles; O through
# V's space, three warpgroups; no producer; steps without overlap; e4m3 with scales by block
WINDOWED = (
    "fwd_fp16_d64_window_m128n64",
    "fwd_bf16_d64_window_m64n64_packgqa",
    "fwd_fp16_d64_window_m64n64_split3",
    "fwd_e4m3_d64_window_m128n64_vrows_sblock",
    "fwd_bf16_d64_window_m128n64_split16_fill",
    "fwd_e4m3_d64_window_m64n32",
    "fwd_fp16_d64_window_m64n64_dynamic",
    "fwd_fp16_d64_window_m64n64_c2",
    "fwd_fp16_d64_window_m192n48_s3_reusev_nointer",
    "fwd_bf16_d64_window_m128n64_noprod",
    "fwd_bf16_d64_window_m128n64_nointra",
)
SIZES = (1, 2, 1, 150, 200), (1, 2, 1, 200, 130), (1, 4, 2, 5, 300), (2, 2, 1, 129, 129)
NAMED = "chunked", "prefix", "causal_by_sequence", "document"
PACKED_OF_SEQUENCES = (3, 6, 2, 40, 200), (2, 8, 2, 30, 9)
PACKED = (1, 6, 2, 40, 200), (2, 8, 2, 30, 9), (1, 3, 1, 70, 70)


@pytest.mark.parametrize("slug", some(WINDOWED, WINDOWED[:4]))
def test_a_window_is_what_its_numbers_say_wherever_it_ends(slug: str) -> None:
    plan = registry.plan_of(slug)
    kernel = render(plan).kernel
    if may_part(plan):
        kernel = with_lanes_together(kernel)
    for sizes in PACKED if plan.tile.pack_gqa else SIZES:
        for given in windows(plan.block_n, sizes[-1]):
            plan, call, exact = call_of(slug, sizes, given)
            check(plan, simulated(plan, call, kernel), exact)
            if not plan.descales:  # which sums up as tensor cores do, for long
                check(plan, emulated(plan, call), exact)


# of each mask two warpgroups, one of which skips blocks where it may; heads that share tiles; pairs
OTHERS = (
    *(f"fwd_fp16_d64_{mask}_m128n64" for mask in NAMED),
    *(f"fwd_bf16_d64_{mask}_m64n64_packgqa" for mask in NAMED),
    "fwd_fp16_d64_prefix_m64n64_c2",
    "fwd_e4m3_d64_document_m128n64_vrows_sblock",
)


@pytest.mark.parametrize("slug", some(OTHERS, OTHERS[: len(NAMED)]))
def test_masks_are_what_their_numbers_and_tables_say(slug: str) -> None:
    plan = registry.plan_of(slug)
    kernel = render(plan).kernel
    if may_part(plan):
        kernel = with_lanes_together(kernel)
    sizes = (3, 2, 1, 150, 200), (3, 2, 1, 200, 130), (2, 2, 2, 129, 129)
    for own in PACKED_OF_SEQUENCES if plan.tile.pack_gqa else sizes:
        for given in others(plan.mask.name, own):
            plan, call, exact = call_of(slug, own, given)
            check(plan, simulated(plan, call, kernel), exact)
            if not plan.descales:
                check(plan, emulated(plan, call), exact)


VARLEN = (
    "fwd_fp16_d64_window_m128n64_varlen",
    "fwd_bf16_d64_window_m64n64_varlen_packgqa",
    *(f"fwd_fp16_d64_{mask}_m128n64_varlen" for mask in NAMED),
    "fwd_bf16_d64_document_m64n64_varlen_packgqa",
    "fwd_e4m3_d64_window_m64n64_varlen",
    "fwd_e4m3_d64_document_m128n64_varlen",
)


@pytest.mark.parametrize("slug", some(VARLEN, (VARLEN[0], VARLEN[5])))
def test_varlen_sequences_have_numbers_of_their_own(slug: str) -> None:
    plan = registry.plan_of(slug)
    kernel = render(plan).kernel
    if may_part(plan):
        kernel = with_lanes_together(kernel)
    for given in varlen_numbers(plan.mask.name, plan.block_n):
        heads = (6, 2) if plan.tile.pack_gqa else (2, 1)
        plan, call, exact = varlen_call(slug, given, heads)
        check_varlen(plan, simulated(plan, call, kernel), exact)
        if not plan.descales:
            check_varlen(plan, emulated(plan, call), exact)


@pytest.mark.parametrize(
    ("slug", "words"),
    [
        ("fwd_fp16_d64_prefix_m64n64_dynamic", "the GPU alone"),
        ("fwd_fp16_d64_prefix_m64n64_split3", "so far splits have no mask"),
        ("fwd_fp16_d64_document_m64n64_c2", "far more keys than the other"),
        ("bwd_fp16_d64_prefix_m64n64_persist", "thread blocks that stay have no mask"),
    ],
)
def test_what_no_kernel_has_yet_is_refused_by_name(slug: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        registry.from_slug(slug)


@pytest.mark.parametrize(
    "given", [{"window_left": 9, "window_right": 0}, {"window_left": 3, "window_right": 4}]
)
def test_one_number_more_or_less_is_seen(given: dict[str, int]) -> None:
    """The lambdas of these tests tell windows apart that differ by a key."""
    slug, sizes = "fwd_fp16_d64_window_m64n32", (1, 1, 1, 40, 40)
    plan, call, exact = call_of(slug, sizes, given)
    for name, number in given.items():
        with pytest.raises(AssertionError):
            check(plan, emulated(plan, {**call, name: number + 1}), exact)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("seqlen_q - window_left)", "seqlen_q - window_left + 1)"),
        ("window_right + 1)", "window_right)"),
        ("bottom.first", "top.first"),  # blocks count as full that a row does not see whole
        ("min(top.first,", "min(bottom.first,"),
    ],
)
def test_faults_of_a_windows_text_show(text: str, fault: str) -> None:
    given = {"window_left": 130, "window_right": 5}
    plan, call, exact = call_of("fwd_fp16_d64_window_m64n32", (1, 1, 1, 150, 300), given)
    kernel = render(plan).kernel
    assert text in kernel
    with pytest.raises(AssertionError):
        check(plan, simulated(plan, call, kernel.replace(text, fault)), exact)


def test_blocks_that_nobody_sees_are_neither_computed_nor_loaded() -> None:
    """NaN in K and V there reaches nothing, and costs count what is touched alone."""
    slug, (rows, keys) = "fwd_fp16_d64_window_m64n32", (64, 300)
    given = {"window_left": 20, "window_right": 0}
    plan, call, exact = call_of(slug, (1, 1, 1, rows, keys), given)
    touched = seen("window", (rows, keys), given).any(0)
    unseen = [n for n in range(0, keys, 32) if not touched[n : n + 32].any()]
    assert len(unseen) == 6
    for n in unseen:
        call["k"][:, n : n + 32] = call["v"][:, n : n + 32] = torch.nan
    for found in (emulated(plan, call), simulated(plan, call)):
        check(plan, found, exact)


@pytest.mark.parametrize("form", some(("m128n64", "m128n64_varlen"), ("m128n64_varlen",)))
def test_tables_that_mean_nothing_leave_no_kernel_stuck(form: str) -> None:
    """Ends that fall, and numbers far from any key."""
    slug = f"fwd_fp16_d64_document_{form}"
    dice = torch.Generator().manual_seed(0)
    rows = sum(m for m, _ in LENGTHS) + sum(AROUND)
    for most in (300, 2**31 - 1):
        first, last = (
            torch.randint(-most, most, (rows,), generator=dice, dtype=torch.int64).int()
            for _ in range(2)
        )
        if "varlen" in form:
            plan, call, _ = varlen_call(slug, {"first": first, "last": last})
        else:
            given = {"first": first[None], "last": last[None]}
            plan, call, _ = call_of(slug, (1, 2, 1, rows, 300), given)
        out, _ = simulated(plan, call)
        assert out.isfinite().all()


def test_costs_count_touched_blocks() -> None:
    sizes = Sizes(1, 64, 8, 16_384, 16_384)
    steps, _ = grid(128, 128, "window", "lpt", sizes)
    whole, _ = grid(128, 128, "causal", "lpt", sizes)
    assert 8.7 < steps / (128 * 64 / 132) < 9.1  # of 1,024 keys, a tile
    assert whole / steps > 7


@pytest.mark.parametrize("number", [-1, (1 << 30) + 1, 2.5])
def test_a_number_that_is_none_of_a_window_is_refused(number: Any) -> None:
    given = {"window_left": 3, "window_right": 0}
    plan, call, _ = call_of("fwd_fp16_d64_window_m64n32", (1, 1, 1, 4, 4), given)
    with pytest.raises((ValueError, TypeError), match="window_left"):
        checked(plan, {**call, "window_left": number})


# splits that a second kernel combines, or that are combined as they come; tables; references that
# a call gives
DECODING = (
    "dec_fp16_d64_window_r8n64_c3",
    "dec_bf16_d64_window_r8n64_streamk",
    "dec_fp16_d64_chunked_r8n64_c3",
    "dec_bf16_d64_prefix_r8n64_c3",
    "dec_fp16_d64_causal_by_sequence_r8n64_c3",
    "dec_fp16_d64_window_r8n64_fixed",
)


@pytest.mark.parametrize("slug", some(DECODING, DECODING[:1]))
def test_decoding_leaves_keys_out_that_no_query_sees(slug: str) -> None:
    """Whatever lies there, also where lengths are the sequences' own."""
    plan = registry.plan_of(slug)
    kernel, batch, heads = render(plan).kernel, 3, (4, 2)
    for rows, keys in ((1, 300), (3, 150), (5, 1000), (4, 2)):
        sizes, begins = (batch, *heads, rows, keys), (0, 1, 0)
        ends = keys, max(1, keys - 37), 0
        numbers = windows(plan.block_n, keys) if "window" in slug else others(plan.mask.name, sizes)
        for given in numbers:
            plan, call, _ = call_of(slug, sizes, given)
            if plan.fixed:
                call["reference"] = torch.zeros(heads[0])
            exact = []
            for number, (first, last) in enumerate(zip(begins, ends, strict=True)):
                visible = seen(plan.mask.name, (rows, last - first), given, number)
                own = (x[number, first:last].float() for x in (call["k"], call["v"]))
                exact.append(dense(call["q"][number].float(), *own, visible, call["scale"]))
                unseen = first + int(visible.any(0).int().argmax()) if visible.any() else last
                call["k"][number, :unseen] = call["v"][number, :unseen] = torch.nan
            call["seqused_k"], call["leftpad_k"] = (
                torch.tensor(x, dtype=torch.int32) for x in (ends, begins)
            )
            for found in (emulated(plan, call), simulated(plan, call, kernel)):
                check(plan, found, exact)
