"""Which part of a kernel's text is in which of its hashes, and what is in none."""

import dataclasses
from functools import cache

import pytest

from fagen.registry import from_slug, plan, plan_of
from fagen.render import Hashes, hashes, hashes_of, header_text, kernel_text, render, tokens
from tests.same_sources import compared

SLUG = "fwd_fp16_d128_full_m128n128"
KERNELS = {  # of each kind one whose launcher says more than others'
    "forward": SLUG,
    "varlen": "fwd_bf16_d128_causal_m128n128_varlen_packgqa",
    "split": "fwd_fp16_d128_causal_m128n128_split16",
    "backward": "bwd_bf16_d64_full_m128n128_det_underdp_persist_post",
    "decode": "dec_bf16_d128_causal_r8n64_streamk",
    "combine": "comb_fp32_d128_obf16_varlen",
    "quantize": "quant_fp16_d128_center_scol_vcols",
}


@cache
def text_and_hashes(slug: str) -> tuple[str, Hashes]:
    text = kernel_text(plan_of(slug))
    return text, hashes_of(text, slug)


def moved(slug: str, old: str, new: str) -> set[str]:
    """The hashes of a kernel where one thing in it, or in the header beside it, is another."""
    text, before = text_and_hashes(slug)
    assert old in text + header_text(), old
    kernel, header = (one.replace(old, new) for one in (text, header_text()))
    after = tokens.hashes_of(kernel, slug, header)
    return {name for name, hash_ in vars(before).items() if hash_ != vars(after)[name]}


@pytest.mark.parametrize("slug", KERNELS.values(), ids=KERNELS)
def test_every_hash_is_the_same_laid_out_or_not_and_under_another_slug(slug):
    planned = plan_of(slug)
    source = render(planned)
    assert source.hashes == hashes(planned) == hashes_of(source.kernel, slug)
    assert len({*vars(source.hashes).values(), source.hash}) == 4
    renamed = dataclasses.replace(planned, slug="fwd_another_name")
    assert hashes(renamed) == source.hashes
    assert render(renamed).hash != source.hash


@pytest.mark.parametrize("slug", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"a size is negative', '"some size is negative'),  # a message
        ("return kBadSize;", "return kRefused;"),  # a check
        ("kTooMany, ", "kTooMany, kNew, "),  # a status
        ("!data || empty", "!data"),  # one that all kernels share
        ("uint32_t version;", "uint32_t version, more;"),  # a field of the C struct
        ("sizeof(FagenKernelInfo), ", ""),  # what a kernel says of itself
        ("// ---- The schedule", "// A comment.\n\n// ---- The schedule"),
    ],
)
def test_no_hash_has_messages_checks_comments_or_c_structs(slug, old, new):
    assert not moved(slug, old, new)


@pytest.mark.parametrize(
    ("kernel", "old", "new", "hashed"),
    [
        ("forward", "#include <cuda_fp16.h>", "#include <cuda_bf16.h>", {"device"}),
        ("forward", "__launch_bounds__(kThreads", "__launch_bounds__(384", {"device"}),
        ("forward", "constexpr int kSpreadKeys = ", "constexpr int kSpreadKeys = 1 + ", {"device"}),
        ("forward", "wgmma.commit_group", "wgmma.end_group", {"device"}),
        # what machine code need not show
        ("backward", "kL2Share = ", "kL2Share = 2 * ", {"device", "constants"}),
        ("varlen", "{ kRagged = 1 << ", "{ kRagged = 2 << ", {"device", "constants"}),
        ("split", "return int64_t(", "return int64_t(1 + ", {"constants"}),  # the workspace
        # what the launcher has of the device's text
        ("forward", "struct Params {", "struct Params {\n  int more;", {"device", "launcher"}),
        ("forward", "(int divisor = 1)", "(int divisor = 2)", {"device", "launcher"}),
        # the launcher itself, and what it asks the driver for
        ("forward", "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_SWIZZLE_64B", {"launcher"}),
        ("forward", "bytes = sizeof(SharedStorage)", "bytes = sizeof(Params)", {"launcher"}),
        ("forward", '"cuTensorMapEncodeTiled"', '"cuTensorMapEncodeIm2col"', {"launcher"}),
        ("forward", "static_cast<cudaStream_t>(stream))", "nullptr)", {"launcher"}),
        ("backward", "if (m_blocks > 0)", "if (m_blocks > 1)", {"launcher"}),
        ("forward", "strides[dim - 1] * t.element_bytes", "strides[dim - 1]", {"launcher"}),
        # it has no tensor maps
        ("quantize", "strides[dim - 1] * t.element_bytes", "strides[dim - 1]", set()),
        ("forward", "major == 9", "major == 10", {"launcher"}),
        ("decode", "SerializationAllowed = 1", "SerializationAllowed = 0", {"launcher"}),
        ("combine", "std::min(a.splits, kStages)", "a.splits", {"launcher", "constants"}),
        ("quantize", "if (!a.descale_given)", "if (a.descale_given)", {"launcher"}),
        # a name that the text itself gives
        ("forward", "kBlockM", "kRowsOfATile", set()),
        ("decode", "combine_partial_outputs", "kernel_behind", set()),
        ("decode", "kNumSplits", "kBlockN", {"device", "launcher"}),  # two in one
        ("backward", "params.group", "params.heads", {"device", "launcher"}),
    ],
)
def test_what_runs_is_in_the_hash_of_where_it_runs(kernel, old, new, hashed):
    assert moved(KERNELS[kernel], old, new) == hashed


def test_kernels_that_differ_in_numbers_alone_share_their_launcher():
    by_slug = {slug: hashes(plan(from_slug(slug))) for slug in (SLUG, f"{SLUG[:-4]}n64_s3")}
    first, other = by_slug.values()
    assert first.launcher == other.launcher
    assert first.device != other.device and first.constants != other.constants
    # the type of a tensor map is in the launcher's text
    assert hashes(plan_of(SLUG.replace("fp16", "bf16"))).launcher != first.launcher


def test_a_change_is_shown_once_for_all_kernels_that_it_changes_alike():
    twice, other = (SLUG, f"{SLUG[:-4]}n64_s3"), "comb_fp16_d64"
    before = {slug: kernel_text(plan_of(slug)) for slug in (*twice, other)}
    after = {slug: text.replace("kLaunchFailed;", "kLate;") for slug, text in before.items()}
    after[other] = before[other].replace("// What calls end", "// How calls end")
    lines, differs = compared({**before, "gone": ""}, after)
    assert differs and lines[0] == "gone: only before"
    assert [line for line in lines if " change like " in line] == [
        f"1 change like {other}",
        f"2 change like {SLUG}",
    ]
    assert len([line for line in lines if line.startswith("+") and "kLate" in line]) == 1
    assert lines[-5:] == [
        "device: 0 of 3 moved",
        "launcher: 2 of 3 moved",
        *(f"  {slug}" for slug in twice),
        "constants: 0 of 3 moved",
    ]
    assert not compared(before, before)[1]
