"""What a Signature says reaches the kernel, its emulation and the fakes, an argument more too."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen import registry
from fagen.launch import Launches
from fagen.runtime import c_interface, op
from fagen.runtime.c_interface import struct_of, workspace_bytes
from fagen.runtime.checks import checked
from fagen.runtime.op import run_once
from fagen.signature import random_words
from tests import toy
from tests.stubs import (
    StubOp,
    fields_of,
    rendered,
    stub_of,
    template,
)

# ---- one line more ------------------------------------------------------------------------------


def test_an_argument_more_is_in_the_struct_and_its_twin() -> None:
    base, bias, shift = (
        dict(struct_of(toy.SIGNATURES[slug])._fields_)  # type: ignore[misc]
        for slug in ("toy_base", "toy_bias", "toy_shift")
    )
    assert bias.keys() - base.keys() == {"bias", "bias_stride_head"}
    assert shift.keys() - base.keys() == {"shift"}
    header = rendered(registry.plan_of("toy_bias"), template("abi.h.j2"))
    assert "const void* bias;  // fp16 (heads, 16): added to each row\n" in header
    assert "int64_t bias_stride_head;\n" in header
    header = rendered(registry.plan_of("toy_shift"), template("abi.h.j2"))
    assert "float shift;  // added to all; finite and positive\n" in header


def test_an_argument_more_is_in_the_schemas_of_its_ops(
    stub: StubOp, biased: StubOp, shifted: StubOp
) -> None:
    tensors = (
        "Tensor x, Tensor ends, float gain, Tensor? weights=None, Tensor? factor=None, *, "
        "Tensor? cos=None, Tensor? sin=None, "
    )
    numbers = "int count=3, int seed=0, int salt=1"
    every, fewer = "Tensor found_factor, Tensor out, Tensor sums", "Tensor found_factor, Tensor out"
    for kernel, arguments in (
        (stub, tensors + numbers),
        (biased, f"{tensors}Tensor bias, {numbers}"),
        (shifted, f"{tensors}{numbers}, float shift=0.25"),
    ):
        # torch has no argument without a default behind one that has it, but by its name
        by_place = arguments if kernel is biased else arguments.replace("*, ", "")
        for end, inputs, results in (
            ("", arguments, every),
            ("_no_grad", by_place, every),
            ("_emulated", by_place, every),
            ("_without_sums", arguments, fewer),
            ("_without_sums_no_grad", by_place, fewer),
        ):
            name = f"{kernel.slug}{end}"
            schema = getattr(torch.ops.fagen, name).default._schema
            assert str(schema) == f"fagen::{name}({inputs}) -> ({results})"


def test_an_argument_more_reaches_the_kernel_and_the_emulation(
    biased: StubOp, shifted: StubOp
) -> None:
    for kernel, name in ((biased, "bias"), (shifted, "shift")):
        named = toy.arguments(kernel.plan)
        noted = kernel.noted(**toy.completed(kernel.plan, named))
        value = named[name]
        assert getattr(noted, name) == (value.data_ptr() if name == "bias" else value)
        if name == "bias":
            assert noted.bias_stride_head == toy.COLUMNS
        out = kernel.op(**named)[1]
        assert not torch.equal(out, kernel.op(**{**named, name: value * 2})[1])
    without = {name: value for name, value in named.items() if name != "shift"}
    assert torch.equal(kernel.op(**without)[1], kernel.op(**without, shift=0.25)[1])


# ---- what the kernel is passed ------------------------------------------------------------------


def test_the_binding_and_ctypes_pass_the_same(any_toy: StubOp) -> None:
    plan = any_toy.plan
    whole = toy.arguments(plan)
    factor = torch.full((2, 3), 0.5)
    calls: list[dict[str, Any]] = [{}, {"factor": factor}]
    if any_toy.slug != "toy_found":
        calls += [
            {"weights": None, "cos": None, "sin": None},
            {"weights": whole["weights"][:1]},
            {"weights": whole["weights"][:1, :1], "factor": factor[:1].expand(2, -1)},
            {"x": whole["x"].transpose(1, 2).contiguous().transpose(1, 2)},
        ]
    for change in calls:
        named = toy.completed(plan, whole | change)
        noted = any_toy.noted(**named)
        own = c_interface.arguments(plan, named, checked(plan, named))
        assert fields_of(noted) == fields_of(own)
        assert noted.struct_bytes == ctypes.sizeof(noted)
        assert (noted.version, noted.batch, noted.rows, noted.heads) == (7, 2, 36, 3)
        default = named["found_factor"]
        passed = named.get("factor")
        assert noted.factor == (default if passed is None else passed).data_ptr()
        assert noted.factor_given == int(passed is not None)
        assert default.shape == ((2, 3) if passed is None else (0,))


# of kinds that there are; no other test loads ops of these names
OF_KINDS = (
    "fwd_fp16_d24v40_full_m64n48",
    "fwd_e4m3_d32v48_causal_m64n64_sblock_sr32",
    "quant_bf16_d208_pairs_stensor_vcols",
    "quant_fp16_d208_rot",
    "comb_fp32_d104_obf16",
    "comb_bf16_d136_varlen",
    "bwd_fp16_d24v40_full_m64n64",
    "bwd_bf16_d88_causal_m64n64",
    "dec_fp16_d24v40_full_r8n64",
)


@pytest.mark.parametrize("slug", OF_KINDS)
def test_so_they_do_for_every_kind(stub_op: Callable[[str], StubOp], slug: str) -> None:
    assert {registry.kind_of_slug(slug).name for slug in OF_KINDS} == registry.ENTRIES.keys() - {
        "toy"
    }
    kernel = stub_op(slug)
    signature = kernel.plan.signature
    sizes = {size.name: 2 + 2 * number for number, size in enumerate(signature.sizes)}
    for rule in signature.rules:
        sizes[rule.size] = 3 * sizes[rule.by]
    named: dict[str, Any] = {scalar.name: 5 for scalar in signature.numbers}
    for tensor in signature.inputs:
        if not tensor.made:
            shape = [dim.extent.at(sizes) for dim in tensor.dims]
            named[tensor.name] = torch.zeros(shape).to(getattr(torch, tensor.dtype.torch))
    named = toy.completed(kernel.plan, named)
    assert checked(kernel.plan, named) == sizes
    noted = fields_of(kernel.noted(**named))
    assert noted == fields_of(c_interface.arguments(kernel.plan, named, sizes))
    assert {name: noted[name] for name in sizes} == sizes


def test_what_the_binding_makes_of_numbers_and_shapes(stub: StubOp) -> None:
    named = toy.completed(stub.plan, toy.arguments(stub.plan))
    noted = stub.noted(**named)
    assert (noted.gain, noted.count, noted.decay) == (0.5, 2, 0)
    assert tuple(noted.signs) == random_words(11, 4)
    assert tuple(noted.noise) == random_words(-5, 12)
    assert noted.history is None  # of other kernels
    assert (noted.factor_stride_batch, noted.factor_stride_head) == (3, 0)
    assert noted.out_stride_column == 48
    weights = named["weights"]
    assert (noted.weights_stride_batch, noted.weights_stride_block) == (3, 1)
    for shared, strides in ((weights[:1], (0, 1)), (weights[:, :1], (3, 0))):
        noted = stub.noted(**named | {"weights": shared})
        assert (noted.weights_stride_batch, noted.weights_stride_block) == strides


def test_the_workspace_is_as_large_as_its_formula_says(stub: StubOp, tmp_path: Path) -> None:
    plan = stub.plan
    for rows in (0, 3, 33, 999):
        named = toy.arguments(plan, batch=5, rows=rows)
        sizes = checked(plan, named)
        args = c_interface.arguments(plan, named, sizes)
        needed = workspace_bytes(plan.slug, stub.binary.library, args)
        assert needed == plan.launches.workspace.at(sizes) == 5 * 3 * -(-rows // 32) * 4
        # no find, no workspace
        args = c_interface.arguments(plan, {**named, "factor": torch.ones(5, 3)}, sizes)
        assert workspace_bytes(plan.slug, stub.binary.library, args) == 0
    without = replace(plan, launches=Launches(plan.launches.kernels))
    assert plan.launches.needs_workspace and not without.launches.needs_workspace
    assert workspace_bytes(plan.slug, stub_of(without, tmp_path), args) == 0


def test_the_largest_workspace_is_counted_in_64_bits(stub: StubOp) -> None:
    args = struct_of(stub.plan.signature)(batch=1 << 29, heads=3, rows=33)
    assert workspace_bytes(stub.slug, stub.binary.library, args) == (1 << 29) * 3 * 2 * 4


# ---- torch --------------------------------------------------------------------------------------


def test_it_loads_and_torch_finds_nothing_wrong(any_toy: StubOp) -> None:
    named = toy.arguments(any_toy.plan)
    with torch.no_grad():
        run_once(any_toy.plan, torch.device("cpu"), any_toy.op)
    torch.library.opcheck(any_toy.op, (), named)
    torch.library.opcheck(any_toy.op, (), toy.arguments(any_toy.plan, 1, 0, 3))
    torch.library.opcheck(any_toy.op, (), {**named, "factor": torch.ones(2, 3)})
    torch.library.opcheck(op.emulated(any_toy.slug), (), named)
    if any_toy.slug != "toy_found":
        torch.library.opcheck(any_toy.out_only, (), named)
        torch.library.opcheck(any_toy.op, (), {**named, "weights": None, "cos": None, "sin": None})


def test_fakes_are_what_the_op_returns(any_toy: StubOp) -> None:
    for change in ({}, {"factor": torch.ones(2, 3)}):
        named = toy.arguments(any_toy.plan) | change
        real = any_toy.op(**named)
        with FakeTensorMode() as mode:
            fakes = {
                k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in named.items()
            }
            results = any_toy.op(**fakes)
        for fake, other in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (results, real)), strict=True
        ):
            assert (fake.shape, fake.stride(), fake.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )


def test_the_variant_returns_all_but_one(stub: StubOp) -> None:
    named = toy.arguments(stub.plan)
    factor, out, _ = stub.op(**named)
    for result, other in zip(op.out_only(stub.op)(**named), (factor, out), strict=True):
        assert torch.equal(result, other)
