"""The small tables below a benchmark's big one: shares, dtypes, kernels, calls."""

import pytest

from fagen.measure.rows import Row
from fagen.measure.summaries import beside_fp16, launch_lines, picks, share_of_matmul


def row(implementation="fagen", tflops=500.0, regime="sustained", **given):
    base = {
        "dtype": "fp16", "head_dim": 128, "head_dim_v": 128, "mask": "full", "batch": 1,
        "seqlen_q": 16_384, "seqlen_k": 16_384, "heads": 16, "kv_heads": 16,
        "implementation": implementation, "schedule": None, "regime": regime,
        "tflops": tflops, "spread": 0.01, "sm_clock_mhz": 1500,
    }  # fmt: skip
    return Row(**{**base, **given})


def lines(text):
    """The cells of each line of a Markdown table, its head first."""
    found = [line for line in text.splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in found if "--" not in line
    ]


def test_shares_are_sustained_full_attention_at_the_longest_length_over_the_matmul_of_its_dtype():
    rows = [
        row(tflops=630.0), row("cudnn", 560.0),
        row(tflops=650.0, dtype="bf16"),
        row(tflops=490.0, head_dim=64, head_dim_v=64),
        row(tflops=999.0, regime="burst"), row(tflops=999.0, mask="causal"),
        row(tflops=999.0, seqlen_q=512, seqlen_k=512), row(tflops=999.0, seqlen_k=32_768),
    ]  # fmt: skip
    products = {"fp16": {"sustained": 700.0, "burst": 1.0}, "bf16": {"sustained": 650.0}}
    head, *body = lines(share_of_matmul(rows, products))
    assert head == ["dtype", "hd", "S", "matmul TFLOP/s", "fagen", "cuDNN"]
    assert body == [
        ["bf16", "128", "16384", "650", "100%", "–"],
        ["fp16", "64", "16384", "700", "70%", "–"],
        ["fp16", "128", "16384", "700", "90%", "80%"],
    ]


@pytest.mark.parametrize("rows", [[], [row(mask="causal")], [row(regime="burst")]])
def test_without_full_sustained_rows_there_are_no_shares(rows):
    assert share_of_matmul(rows, {"fp16": {"sustained": 700.0}}) == ""
    assert share_of_matmul([row()], {}) == ""


def test_bf16_is_compared_with_fp16_cell_by_cell():
    rows = [
        row(tflops=500.0), row(tflops=505.0, dtype="bf16"),
        row(tflops=600.0, regime="burst"), row(tflops=600.0, regime="burst", dtype="bf16"),
        row(tflops=400.0, mask="causal"), row(tflops=380.0, mask="causal", dtype="bf16"),
        row("cudnn", 1.0), row("cudnn", 2.0, dtype="bf16"),
        row(tflops=300.0, head_dim=64, head_dim_v=64),
    ]  # fmt: skip
    head, *body = lines(beside_fp16(rows))
    assert head == ["hd", "mask", "S", "sustained", "burst"]
    assert body == [
        ["128", "full", "16384", "1.010", "1.000"],
        ["128", "causal", "16384", "0.950", "–"],
        ["all", "", "geomean", "0.980", "1.000"],
    ]
    assert beside_fp16([row()]) == ""


def test_the_kernels_that_were_timed_are_listed_with_their_lengths():
    rows = [row(schedule="a"), row(schedule="b", seqlen_k=512), row(schedule="a", seqlen_k=2048)]
    assert picks([*rows, row("cudnn")]) == "- `a`: 2048, 16384 keys\n- `b`: 512 keys\n"


def test_what_a_call_costs_is_said_in_a_line():
    cost = {"host_microseconds": 6.54, "kernels": 1.0, "memsets": 0.0, "copies": 0.0}
    said = launch_lines({"torch op": {**cost, "allocations": 2.0}})
    assert said == (
        "- torch op: 6.5 µs of the host; kernels 1, memsets 0, copies 0, allocations 2\n"
    )
