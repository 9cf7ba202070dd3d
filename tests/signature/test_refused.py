"""Wrong arguments are refused in the same words in Python and C++, and by the C function."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fagen.runtime import c_interface, op
from fagen.runtime.c_interface import library_at
from fagen.runtime.checks import checked
from tests import toy, wrong
from tests.op_helpers import refusal, refused_everywhere
from tests.stubs import (
    StubOp,
    load_stub,
)

# ---- refusals: the same words everywhere --------------------------------------------------------

FINITE = "it must be finite and above 0 as a float32"
WRONG = f"""
toy_base:
  x=x[0] -> x has shape (36, 3, 16); it must be (batch, rows, heads, 16)
  x=x[..., :8] -> x has shape (2, 36, 3, 8); it must be (batch, rows, heads, 16)
  x=x.bfloat16() -> x is not float16, which this kernel takes; x.to(torch.float16) converts it
  x=x[:, :1].expand(-1, 1001, -1, -1) -> x has rows = 1001; it may be 1000 at most
  x=x[:, :, :1].expand(-1, -1, 36, -1) -> there are 2^30 pairs or what a launcher counts or more
  x=strided(x, 9216, 256, 64, 2)
    -> x has stride 2 in dimension 3, which must be 1; x.contiguous() makes it so
  x=strided(x, 1920, 52, 16, 1) -> x has stride 52 in dimension 1, which must be a multiple of 8
    -> elements (16 bytes); x.cont
  x=shifted(x) -> x does not begin at a multiple of 16 bytes; x.clone() does
  weights=weights[:, :2]
    -> weights has shape (2, 2); it must be (batch = 2 or 1, ceil(rows / 16) = 3 or 1)
  weights=ones(3, 3)
    -> weights has shape (3, 3); it must be (batch = 2 or 1, ceil(rows / 16) = 3 or 1)
  weights=strided(weights, 66, 1)
    -> weights has stride 66 in dimension 0, which must not exceed 64; weights.contiguous() m
  ends=ends[:2] -> ends has shape (2); it must be (batch + 1 = 3)
  ends=ends.long() -> ends is not int32, which this kernel takes; ends.to(torch.int32) converts it
  cos=None -> cos and sin go together; only sin is given
  sin=None -> cos and sin go together; only cos is given
  sin=sin[:5] -> sin has shape (5, 8); it must be (rows = 36, 8)
  factor=ones(2, 1) -> factor has shape (2, 1); it must be (batch = 2, heads = 3)
  x=x[:, :35], weights=None, cos=None, sin=None -> rows = 35 must be a multiple of heads = 3
  x=x[:, :, :0], weights=None, cos=None, sin=None -> rows = 36 must be a multiple of heads = 0
  gain=0.0 -> gain is 0; {FINITE}, and 1024 at most
  gain=-2.5 -> gain is -2.5; {FINITE}, and 1024 at most
  gain=nan -> gain is nan; {FINITE}, and 1024 at most
  gain=1e39 -> gain is 1e+39; {FINITE}, and 1024 at most
  gain=1024.5 -> gain is 1024.5; {FINITE}, and 1024 at most
  count=0 -> count is 0; it must be above 0
  count=-123456789 -> count is -123456789; it must be above 0

toy_bias:
  bias=bias[:2] -> bias has shape (2, 16); it must be (heads = 3, 16)
  bias=bias.float() -> bias is not float16,
  bias=strided(bias, 20, 1)
    -> bias has stride 20 in dimension 0, which must be a multiple of 8 elements
  bias=shifted(bias) -> bias does not begin at a multiple of 16 bytes

toy_shift:
  shift=-1.0 -> shift is -1; {FINITE}
"""


@pytest.mark.parametrize(("slug", "change", "error", "words"), wrong.cases(WRONG))
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(
    stub_op: Callable[[str], StubOp], slug: str, change: str, error: Any, words: str
) -> None:
    stub = stub_op(slug)
    changed = wrong.changed(change, toy.arguments(stub.plan))
    assert refused_everywhere(stub.plan, stub.op, changed).startswith(words)


def test_what_is_missing_is_named(biased: StubOp) -> None:
    named = toy.arguments(biased.plan)
    for name in ("x", "ends", "bias", "gain"):
        for without in ({**named, name: None}, {k: v for k, v in named.items() if k != name}):
            message = refusal(partial(checked, biased.plan, without))
            assert message == f"fagen::toy_bias: {name} is missing"


def test_a_refused_tensor_and_one_that_must_be_given_say_why(tmp_path: Path) -> None:
    tensors = {tensor.name: tensor for tensor in toy.BASE.tensors}
    tensors["factor"] = replace(tensors["factor"], refused="a toy finds its own")
    tensors["weights"] = replace(tensors["weights"], optional=False, missing="this toy weighs rows")
    signature = replace(toy.BASE, tensors=tuple(tensors.values()))
    slug = "toy_strict"
    toy.SIGNATURES[slug] = signature
    try:
        stub = load_stub(slug, tmp_path)
    finally:
        del toy.SIGNATURES[slug]
    named = toy.arguments(stub.plan)
    stub.op(**named)
    for change, message in (
        ({"factor": torch.ones(2, 3)}, "factor: a toy finds its own"),
        ({"weights": None}, "weights is missing; this toy weighs rows"),
    ):
        for call in (stub.op, stub.below, op.emulated(slug)):
            assert refusal(partial(call, **named | change)) == f"fagen::{slug}: {message}"
    status = statuses(stub)
    assert status() == "launched"
    assert status(factor_given=1) == "a toy finds its own"
    assert status(weights=0) == "a tensor that is needed is null"


def test_every_tensor_may_be_what_requires_a_gradient(biased: StubOp) -> None:
    names = ["x", "weights", "cos", "sin", "factor", "bias"]
    message = (
        "fagen::toy_bias: x, weights, ends, cos, sin, factor or bias requires a gradient, and a "
        "toy has none; call it under torch.no_grad()"
    )
    for name in names:
        named = toy.arguments(biased.plan)
        named |= {"factor": torch.ones(2, 3)} if name == "factor" else {}
        named[name] = named[name].requires_grad_()
        for call in (biased.op, biased.out_only):
            assert refusal(partial(call, **named)) == message
        by_place = [named.get(argument.name) for argument in biased.plan.signature.arguments]
        assert refusal(partial(op.kernel_of(biased.plan, "cpu").op, *by_place)) == message
        with torch.no_grad():
            assert not biased.op(**named)[1].requires_grad


# ---- the C function's own checks ----------------------------------------------------------------


def statuses(stub: StubOp) -> Callable[..., str]:
    """What the C function says of a good call with some fields changed."""
    library = library_at(stub.binary.library)
    launch, message = library[f"fagen_{stub.slug}"], library[f"fagen_{stub.slug}_message"]
    message.restype = ctypes.c_char_p
    named = toy.completed(stub.plan, toy.arguments(stub.plan))
    workspace = ctypes.create_string_buffer(1 << 10)

    def status(**changes: Any) -> str:
        args = c_interface.arguments(stub.plan, named, checked(stub.plan, named))
        args.workspace, args.workspace_bytes = ctypes.addressof(workspace), 2 * 3 * 2 * 4
        for name, value in changes.items():
            assert hasattr(args, name)
            setattr(args, name, value)
        return message(launch(ctypes.byref(args), None)).decode()  # type: ignore[no-any-return]

    return status


NULL = "a tensor that is needed is null"
MISALIGNED = (
    "a tensor does not begin at a multiple of 16 bytes (weights: 4, ends: 4, factor: 4, sums: 4)"
)
BAD_STRIDE = "a stride is negative, too large, or no multiple of 16 bytes"
BAD_SIZE = "a size is negative or too large"
OVERLAP = "elements of an output (factor, out, sums) overlap: a stride is 0 or too small"
NO_SPACE = "the workspace is null, too small, or does not begin at a multiple of 16 bytes"


def test_the_c_function_has_a_status_for_every_refusal(stub: StubOp) -> None:
    status = statuses(stub)
    assert status() == "launched"
    refused: dict[str, list[dict[str, Any]]] = {
        "struct_bytes or version is that of another FagenToyArgs": [
            dict(struct_bytes=8),
            dict(version=6),
        ],
        BAD_SIZE: [dict(rows=1001), dict(batch=-1), dict(heads=-1), dict(batch=(1 << 30) + 1)],
        "rows must be a multiple of heads": [dict(rows=35), dict(heads=0), dict(heads=5)],
        "there are 2^30 pairs or what a launcher counts or more": [dict(heads=36)],
        "gain, count must be finite and positive, gain 1024 at most": [
            *(dict(gain=bad) for bad in (0, -1, math.nan, math.inf, 1024.5)),
            *(dict(count=bad) for bad in (0, -3)),
        ],
        NULL: [
            *({name: 0} for name in ("x", "ends", "factor", "out")),
            dict(cos=0),  # one of a group alone
            dict(sin=0),
            dict(factor=0, factor_given=1),
        ],
        MISALIGNED: [
            *({name: 8} for name in ("x", "cos", "sin", "out")),
            *({name: 4098} for name in ("weights", "ends", "factor", "sums")),
        ],
        BAD_STRIDE: [
            dict(x_stride_row=52),
            dict(x_stride_head=-16),
            dict(x_stride_batch=(1 << 38) + 8),
            dict(cos_stride_row=4),
            dict(out_stride_column=7),
            dict(weights_stride_batch=-1),
            dict(weights_stride_block=65),  # its most is 64
            dict(sums_stride_batch=(1 << 38) + 1),
            dict(factor_stride_batch=-3),
        ],
        OVERLAP: [
            dict(out_stride_batch=0, out_stride_head=0, out_stride_column=0),
            *({f"out_stride_{word}": 0} for word in ("batch", "head", "column")),
            dict(sums_stride_batch=0),
            dict(sums_stride_batch=35),  # 36 rows lie side by side
            dict(factor_stride_batch=2),
            dict(out_stride_column=32),  # of 48 rows
            dict(out_stride_batch=3 * 16 * 48 - 8),
            dict(out_stride_head=48, out_stride_batch=48, out_stride_column=48),
        ],
        NO_SPACE: [
            dict(workspace=0),
            dict(workspace_bytes=47),
            dict(workspace_bytes=0),
            dict(workspace=4104, workspace_bytes=1 << 10),
        ],
    }
    for expected, calls in refused.items():
        for changes in calls:
            assert status(**changes) == expected, changes
    library = library_at(stub.binary.library)
    assert library[f"fagen_{stub.slug}"](None, None) != 0
    assert library[f"fagen_{stub.slug}_workspace"](None) == -1
    message = library[f"fagen_{stub.slug}_message"]
    message.restype = ctypes.c_char_p
    for number in (-1, 16, 99):
        assert message(number) == b"unknown status"
    assert message(100) == b"no kernel computes that"


def test_the_c_function_takes_what_may_be_left_out(stub: StubOp) -> None:
    status = statuses(stub)
    for changes in (
        dict(weights=0),
        dict(cos=0, sin=0),
        dict(sums=0),  # not wanted
        dict(factor_given=1, workspace=0, workspace_bytes=0),  # nothing to find
        dict(weights_stride_batch=0, weights_stride_block=0),
        dict(ends=4, sums=4, factor=4),  # numbers are as aligned as they are large
        dict(x_stride_batch=0, x_stride_row=0, x_stride_head=0),
        # an output in any order, with room in between
        dict(out_stride_column=48, out_stride_batch=16 * 48, out_stride_head=2 * 16 * 48 + 8),
        dict(factor_given=1, factor_stride_batch=0),  # it is read
        # nothing is read where nothing is
        dict(batch=0, x=0, out=0, factor=0, sums=0, ends=0, workspace=0),
        dict(rows=0, heads=0, x=0, out=0, factor=0, sums=0, cos=0, workspace=0),
        dict(batch=1, x_stride_batch=-5, out_stride_batch=3),  # nor stepped along one
    ):
        expected = NULL if changes.get("batch") == 0 and changes.get("ends") == 0 else "launched"
        assert status(**changes) == expected, changes


def test_an_argument_more_is_checked_in_c(biased: StubOp, shifted: StubOp) -> None:
    status = statuses(biased)
    assert status() == "launched"
    assert status(bias=0) == NULL
    assert status(bias=8) == MISALIGNED
    assert status(bias_stride_head=20) == BAD_STRIDE
    status = statuses(shifted)
    assert status() == "launched"
    assert status(shift=-1) == "gain, count, shift must be finite and positive, gain 1024 at most"
    assert status(gain=1024) == "launched"
