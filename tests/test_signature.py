"""What a Signature says once is everywhere: in C, ctypes, schema, checks, binding, fakes, docs."""

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen import flow, process, registry
from fagen.kind import Plan
from fagen.launch import Launches
from fagen.paths import locate
from fagen.render import render
from fagen.runtime import c_interface, op
from fagen.runtime.c_interface import library_at, struct_of, workspace_bytes
from fagen.runtime.checks import allocated, checked
from fagen.runtime.ready import run_once
from fagen.signature import Extent, random_words
from fagen.toolchain import FLAGS, LINK_FLAGS, find_gxx, find_toolchain
from tests import toy
from tests.op_helpers import refusal
from tests.stubs import (
    WARNINGS,
    StubOp,
    compile_cpp,
    fields_of,
    load_stub,
    rendered,
    stub_of,
    template,
)

TOYS = tuple(toy.SIGNATURES)


@pytest.fixture(scope="module", autouse=True)
def toys_are_a_kind() -> Iterator[None]:
    toy.register()
    yield
    toy.unregister()


@pytest.fixture(scope="module")
def stub(toys_are_a_kind: None, stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op("toy_base")


@pytest.fixture(scope="module")
def biased(toys_are_a_kind: None, stub_op: Callable[[str], StubOp]) -> StubOp:
    """One that takes a tensor more."""
    return stub_op("toy_bias")


@pytest.fixture(scope="module")
def shifted(toys_are_a_kind: None, stub_op: Callable[[str], StubOp]) -> StubOp:
    """One that takes a number more."""
    return stub_op("toy_shift")


@pytest.fixture(params=TOYS)
def any_toy(request: pytest.FixtureRequest, stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op(request.param)


def committed() -> list[Plan]:
    """A Plan of every committed schedule, whatever its kind."""
    return [registry.plan(schedule) for schedule in flow.all_committed()]


# ---- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extent", "said", "at_70"),
    [
        (Extent(number=64), "64", 64),
        (Extent("rows"), "rows", 70),
        (Extent("rows", per=32), "ceil(rows / 32)", 3),
        (Extent("rows", per=16, times=16), "ceil(rows / 16) · 16", 80),
        (Extent("rows", per=32, times=2), "ceil(rows / 32) · 2", 6),
        (Extent("rows", times=4), "rows · 4", 280),
        (Extent("rows", plus=1), "rows + 1", 71),
        (Extent("rows", per=32, plus=1), "ceil(rows / 32) + 1", 4),
    ],
)
def test_an_extent_says_what_it_is(extent: Extent, said: str, at_70: int) -> None:
    assert str(extent) == said
    assert extent.at({"rows": 70}) == at_70
    assert extent.plain == (said == "rows")


def test_random_words_are_splitmix64s_numbers_lower_half_first() -> None:
    words = random_words(0, 8)
    numbers = [words[i] | words[i + 1] << 32 for i in range(0, 8, 2)]
    assert numbers[:3] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert random_words(0, 3) == words[:3]
    assert random_words(-1, 12) == random_words(2**64 - 1, 12) != random_words(1, 12)


# ---- the C struct -------------------------------------------------------------------------------

OFFSETS = """
#include <cstddef>
#include <cstdint>
#include <cstdio>
{header}
int main() {{
  {prints}
  std::printf("%zu", sizeof({struct}));
}}
"""


def test_every_field_lies_in_ctypes_where_the_compiler_puts_it(tmp_path: Path) -> None:
    """In the structs of all kinds, and in those of toys."""
    plans: list[Any] = [registry.plan_of(slug) for slug in TOYS] + committed()
    headers = {struct_of(one.signature): one for one in plans}
    assert {one.kind for one in headers.values()} == set(registry.ENTRIES)
    for number, (twin, one) in enumerate(headers.items()):
        name = one.signature.struct
        fields = [field for field, _ in twin._fields_]  # type: ignore[misc]
        line = 'std::printf("%zu %zu\\n", offsetof({0}, {1}), sizeof({0}::{1}));'
        program = OFFSETS.format(
            header=rendered(one, template("abi.h.j2")),
            prints="\n  ".join(line.format(name, field) for field in fields),
            struct=name,
        )
        (tmp_path / f"{number}.cpp").write_text(program)
        compile_cpp(*WARNINGS, "-std=c++17", f"{number}.cpp", "-o", f"{number}", folder=tmp_path)
        *found, size = process.run([tmp_path / f"{number}"]).stdout.splitlines()
        places = [getattr(twin, field) for field in fields]
        assert found == [f"{place.offset} {place.size}" for place in places]
        assert int(size) == ctypes.sizeof(twin)


def test_kernels_of_a_kind_are_called_by_one_struct() -> None:
    structs: dict[str, Any] = {}
    for one in committed():
        fields = struct_of(one.signature)._fields_  # type: ignore[misc]
        said = [(name, getattr(of, "_length_", of)) for name, of in fields]
        assert said == structs.setdefault(one.kind, said), one.slug
    assert structs.keys() == registry.ENTRIES.keys() - {"toy"}


def test_a_size_is_told_by_a_needed_tensor_before_anything_follows_from_it() -> None:
    signatures = [one.signature for one in committed()] + [*toy.SIGNATURES.values()]
    for signature in signatures:
        known: set[str] = set()
        for tensor in signature.inputs:
            if not tensor.may_be_none or tensor.missing:
                known |= {dim.extent.name for dim in tensor.dims if dim.extent.plain}
            named = {dim.extent.name for dim in tensor.dims if dim.extent.name}
            assert named <= known, (signature.kind, tensor.name)
        for tensor in signature.outputs:
            assert {dim.extent.name for dim in tensor.dims if dim.extent.name} <= known
        assert {name for rule in signature.rules for name in (rule.of, rule.by)} <= known
        assert known <= set(signature.most)


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
    asked = (
        "Tensor x, Tensor ends, float gain, Tensor? weights=None, Tensor? factor=None, *, "
        "Tensor? cos=None, Tensor? sin=None, "
    )
    numbers = "int count=3, int seed=0, int salt=1"
    for one, arguments in (
        (stub, asked + numbers),
        (biased, f"{asked}Tensor bias, {numbers}"),
        (shifted, f"{asked}{numbers}, float shift=0.25"),
    ):
        for end, results in (
            ("", "Tensor found_factor, Tensor out, Tensor sums"),
            ("_emulated", "Tensor found_factor, Tensor out, Tensor sums"),
            ("_without_sums", "Tensor found_factor, Tensor out"),
        ):
            name = f"{one.slug}{end}"
            schema = getattr(torch.ops.fagen, name).default._schema
            assert str(schema) == f"fagen::{name}({arguments}) -> ({results})"


def test_an_argument_more_reaches_the_kernel_and_the_emulation(
    biased: StubOp, shifted: StubOp
) -> None:
    for one, name in ((biased, "bias"), (shifted, "shift")):
        named = toy.arguments(one.plan)
        noted = one.noted(**completed(one.plan, named))
        value = named[name]
        assert getattr(noted, name) == (value.data_ptr() if name == "bias" else value)
        if name == "bias":
            assert noted.bias_stride_head == toy.COLUMNS
        out = one.op(**named)[1]
        assert not torch.equal(out, one.op(**{**named, name: value * 2})[1])
    without = {name: value for name, value in named.items() if name != "shift"}
    assert torch.equal(one.op(**without)[1], one.op(**without, shift=0.25)[1])


def completed(of: Any, named: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with its outputs, as the binding allocates them."""
    made = allocated(of, named, checked(of, named))
    results = [tensor.result for tensor in of.signature.outputs]
    return {**named, **dict(zip(results, made, strict=True))}


# ---- what the kernel is passed ------------------------------------------------------------------


def test_the_binding_and_ctypes_pass_the_same(any_toy: StubOp) -> None:
    of = any_toy.plan
    whole = toy.arguments(of)
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
        named = completed(of, whole | change)
        noted = any_toy.noted(**named)
        own = c_interface.arguments(of, named, checked(of, named))
        assert fields_of(noted) == fields_of(own)
        assert noted.struct_bytes == ctypes.sizeof(noted)
        assert (noted.version, noted.batch, noted.rows, noted.heads) == (7, 2, 36, 3)
        made = named["found_factor"]
        given = named.get("factor")
        assert noted.factor == (made if given is None else given).data_ptr()
        assert noted.factor_given == int(given is not None)
        assert made.shape == ((2, 3) if given is None else (0,))


# of kinds that there are; no other test loads ops of these names
OF_KINDS = (
    "fwd_fp16_d24v40_full_m64n48",
    "fwd_e4m3_d32v48_causal_m64n64_sblock_sr32",
    "quant_bf16_d208_pairs_stensor_vcols",
    "quant_fp16_d208_rot",
    "comb_fp32_d104_obf16",
    "comb_bf16_d136_packed",
)


@pytest.mark.parametrize("slug", OF_KINDS)
def test_so_they_do_for_every_kind(stub_op: Callable[[str], StubOp], slug: str) -> None:
    assert {registry.kind_of_slug(one).name for one in OF_KINDS} == registry.ENTRIES.keys() - {
        "toy"
    }
    one = stub_op(slug)
    signature = one.plan.signature
    sizes = {size.name: 2 + 2 * number for number, size in enumerate(signature.sizes)}
    for rule in signature.rules:
        sizes[rule.of] = 3 * sizes[rule.by]
    named: dict[str, Any] = {scalar.name: 5 for scalar in signature.numbers}
    for tensor in signature.inputs:
        if not tensor.made:
            shape = [dim.extent.at(sizes) for dim in tensor.dims]
            named[tensor.name] = torch.zeros(shape).to(getattr(torch, tensor.dtype.torch))
    named = completed(one.plan, named)
    assert checked(one.plan, named) == sizes
    noted = fields_of(one.noted(**named))
    assert noted == fields_of(c_interface.arguments(one.plan, named, sizes))
    assert {name: noted[name] for name in sizes} == sizes


def test_what_the_binding_makes_of_numbers_and_shapes(stub: StubOp) -> None:
    named = completed(stub.plan, toy.arguments(stub.plan))
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
    of = stub.plan
    for rows in (0, 3, 33, 999):
        named = toy.arguments(of, batch=5, rows=rows)
        sizes = checked(of, named)
        args = c_interface.arguments(of, named, sizes)
        needed = workspace_bytes(of.slug, stub.binary.library, args)
        assert needed == of.launches.workspace.at(sizes) == 5 * 3 * -(-rows // 32) * 4
        # no find, no workspace
        args = c_interface.arguments(of, {**named, "factor": torch.ones(5, 3)}, sizes)
        assert workspace_bytes(of.slug, stub.binary.library, args) == 0
    without = replace(of, launches=Launches(of.launches.kernels))
    assert of.launches.needs_workspace and not without.launches.needs_workspace
    assert workspace_bytes(of.slug, stub_of(without, tmp_path), args) == 0


def test_the_largest_workspace_is_counted_in_64_bits(stub: StubOp) -> None:
    args = struct_of(stub.plan.signature)(batch=1 << 20, heads=1 << 20, rows=33)
    assert workspace_bytes(stub.slug, stub.binary.library, args) == (1 << 40) * 2 * 4


# ---- refusals: the same words everywhere --------------------------------------------------------

Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused, made from a good one, and what must be said of it."""

    name: str
    change: Change
    said: str
    slug: str = "toy_base"
    needs_data: bool = False


def strided(tensor: Tensor, *strides: int) -> Tensor:
    room = tensor.new_zeros(sum(s * n for s, n in zip(strides, tensor.shape, strict=True)) + 1)
    return room.as_strided(tensor.shape, strides)


def misplaced(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)


def number(name: str, value: float, said: str, slug: str = "toy_base") -> Wrong:
    return Wrong(f"{name}_{value:g}", lambda a: {name: value}, said, slug)


X = "(batch, rows, heads, 16)"
FINITE = "it must be finite and above 0 as a float32"
WRONG = [
    Wrong("x_rank", lambda a: dict(x=a["x"][0]), f"x has shape (36, 3, 16); it must be {X}"),
    Wrong(
        "x_columns", lambda a: dict(x=a["x"][..., :8]), f"x has shape (2, 36, 3, 8); it must be {X}"
    ),
    Wrong(
        "x_dtype",
        lambda a: dict(x=a["x"].bfloat16()),
        "x is not float16, which this kernel takes; x.to(torch.float16) converts it",
    ),
    Wrong(
        "x_long",
        lambda a: dict(x=a["x"][:, :1].expand(-1, 1001, -1, -1)),
        "x has rows = 1001; it may be 1000 at most",
    ),
    Wrong(
        "x_last",
        lambda a: dict(x=strided(a["x"], 9216, 256, 64, 2)),
        "x has stride 2 in dimension 3, which must be 1; x.contiguous() makes it so",
    ),
    Wrong(
        "x_step",
        lambda a: dict(x=strided(a["x"], 1920, 52, 16, 1)),
        "x has stride 52 in dimension 1, which must be a multiple of 8 elements (16 bytes); x.cont",
    ),
    Wrong(
        "x_address",
        lambda a: dict(x=misplaced(a["x"])),
        "x does not begin at a multiple of 16 bytes; x.clone() does",
        needs_data=True,
    ),
    Wrong(
        "weights_blocks",
        lambda a: dict(weights=a["weights"][:, :2]),
        "weights has shape (2, 2); it must be (batch = 2 or 1, ceil(rows / 16) = 3 or 1)",
    ),
    Wrong(
        "weights_batch",
        lambda a: dict(weights=torch.ones(3, 3)),
        "weights has shape (3, 3); it must be (batch = 2 or 1, ceil(rows / 16) = 3 or 1)",
    ),
    Wrong(
        "weights_far_apart",
        lambda a: dict(weights=strided(a["weights"], 66, 1)),
        "weights has stride 66 in dimension 0, which must not exceed 64; weights.contiguous() m",
    ),
    Wrong(
        "ends",
        lambda a: dict(ends=a["ends"][:2]),
        "ends has shape (2); it must be (batch + 1 = 3)",
    ),
    Wrong(
        "ends_dtype",
        lambda a: dict(ends=a["ends"].long()),
        "ends is not int32, which this kernel takes; ends.to(torch.int32) converts it",
    ),
    Wrong(
        "half_of_a_group",
        lambda a: dict(cos=None),
        "cos and sin go together; only sin is given",
    ),
    Wrong(
        "other_half_of_a_group",
        lambda a: dict(sin=None),
        "cos and sin go together; only cos is given",
    ),
    Wrong(
        "sin_rows",
        lambda a: dict(sin=a["sin"][:5]),
        "sin has shape (5, 8); it must be (rows = 36, 8)",
    ),
    Wrong(
        "factor_shape",
        lambda a: dict(factor=torch.ones(2, 1)),
        "factor has shape (2, 1); it must be (batch = 2, heads = 3)",
    ),
    Wrong(
        "rule",
        lambda a: dict(x=a["x"][:, :35], weights=None, cos=None, sin=None),
        "rows = 35 must be a multiple of heads = 3",
    ),
    Wrong(
        "rule_of_none",
        lambda a: dict(x=a["x"][:, :, :0], weights=None, cos=None, sin=None),
        "rows = 36 must be a multiple of heads = 0",
    ),
    *(number("gain", one, f"gain is {one:g}; {FINITE}") for one in (0.0, -2.5, math.nan, 1e39)),
    *(number("count", one, f"count is {one}; it must be above 0") for one in (0, -123456789)),
    # what one line adds
    Wrong(
        "bias_shape",
        lambda a: dict(bias=a["bias"][:2]),
        "bias has shape (2, 16); it must be (heads = 3, 16)",
        "toy_bias",
    ),
    Wrong("bias_dtype", lambda a: dict(bias=a["bias"].float()), "bias is not float16,", "toy_bias"),
    Wrong(
        "bias_stride",
        lambda a: dict(bias=strided(a["bias"], 20, 1)),
        "bias has stride 20 in dimension 0, which must be a multiple of 8 elements",
        "toy_bias",
    ),
    Wrong(
        "bias_address",
        lambda a: dict(bias=misplaced(a["bias"])),
        "bias does not begin at a multiple of 16 bytes",
        "toy_bias",
        needs_data=True,
    ),
    number("shift", -1.0, f"shift is -1; {FINITE}", "toy_shift"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(
    stub_op: Callable[[str], StubOp], wrong: Wrong
) -> None:
    one = stub_op(wrong.slug)
    named = toy.arguments(one.plan)
    named |= wrong.change(named)
    calls = [
        lambda: one.op(**named),  # C++, through Autograd
        lambda: one.below(**named),  # C++
        lambda: one.alone(**named),
        lambda: op.emulated(one.slug)(**named),  # Python
        lambda: checked(one.plan, named),
    ]
    said = [refusal(call) for call in calls]
    if not wrong.needs_data:
        with FakeTensorMode() as mode:
            named = {
                k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in named.items()
            }
            said += [refusal(call) for call in calls[:4]]
    assert set(said) == {said[0]}
    assert said[0].startswith(f"fagen::{one.slug}: {wrong.said}")


def test_what_is_missing_is_named(biased: StubOp) -> None:
    named = toy.arguments(biased.plan)
    for name in ("x", "ends", "bias", "gain"):
        for without in ({**named, name: None}, {k: v for k, v in named.items() if k != name}):
            said = refusal(partial(checked, biased.plan, without))
            assert said == f"fagen::toy_bias: {name} is missing"


def test_a_refused_tensor_and_one_that_must_be_given_say_why(tmp_path: Path) -> None:
    tensors = {tensor.name: tensor for tensor in toy.BASE.tensors}
    tensors["factor"] = replace(tensors["factor"], refused="a toy finds its own")
    tensors["weights"] = replace(tensors["weights"], optional=False, missing="this toy weighs rows")
    signature = replace(toy.BASE, tensors=tuple(tensors.values()))
    slug = "toy_strict"
    toy.SIGNATURES[slug] = signature
    try:
        one = load_stub(slug, tmp_path)
    finally:
        del toy.SIGNATURES[slug]
    named = toy.arguments(one.plan)
    one.op(**named)
    for change, said in (
        ({"factor": torch.ones(2, 3)}, "factor: a toy finds its own"),
        ({"weights": None}, "weights is missing; this toy weighs rows"),
    ):
        wrong = named | change
        for call in (one.op, one.below, op.emulated(slug)):
            assert refusal(partial(call, **wrong)) == f"fagen::{slug}: {said}"
    status = statuses(one)
    assert status() == "launched"
    assert status(factor_given=1) == "a toy finds its own"
    assert status(weights=0) == "a tensor that is needed is null"


def test_every_tensor_may_be_what_requires_a_gradient(biased: StubOp) -> None:
    names = ["x", "weights", "cos", "sin", "factor", "bias"]
    said = (
        "fagen::toy_bias: x, weights, ends, cos, sin, factor or bias requires a gradient, and a "
        "toy has none; call it under torch.no_grad()"
    )
    for name in names:
        named = toy.arguments(biased.plan)
        named |= {"factor": torch.ones(2, 3)} if name == "factor" else {}
        named[name] = named[name].requires_grad_()
        for call in (biased.op, biased.alone, op.emulation(biased.slug)):
            assert refusal(partial(call, **named)) == said
        with torch.no_grad():
            assert not biased.op(**named)[1].requires_grad


# ---- the C function's own checks ----------------------------------------------------------------


def statuses(one: StubOp) -> Callable[..., str]:
    """What the C function says of a good call with some fields changed."""
    library = library_at(one.binary.library)
    launch, message = library[f"fagen_{one.slug}"], library[f"fagen_{one.slug}_message"]
    message.restype = ctypes.c_char_p
    named = completed(one.plan, toy.arguments(one.plan))
    workspace = ctypes.create_string_buffer(1 << 10)

    def status(**changes: Any) -> str:
        args = c_interface.arguments(one.plan, named, checked(one.plan, named))
        args.workspace, args.workspace_bytes = ctypes.addressof(workspace), 2 * 3 * 2 * 4
        for name, value in changes.items():
            assert hasattr(args, name)
            setattr(args, name, value)
        return message(launch(ctypes.byref(args), None)).decode()  # type: ignore[no-any-return]

    return status


NULL = "a tensor that is needed is null"
MISALIGNED = "a tensor does not begin at a multiple of 16 bytes"
BAD_STRIDE = "a stride is negative, too large, or no multiple of 16 bytes"
BAD_SIZE = "a size is negative or too large"
NO_SPACE = "the workspace is null or too small"


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
        "gain, count must be finite and positive": [
            *(dict(gain=bad) for bad in (0, -1, math.nan, math.inf)),
            *(dict(count=bad) for bad in (0, -3)),
        ],
        NULL: [
            *({name: 0} for name in ("x", "ends", "factor", "out")),
            dict(cos=0),  # one of a group alone
            dict(sin=0),
            dict(factor=0, factor_given=1),
        ],
        MISALIGNED: [{name: 8} for name in ("x", "cos", "sin", "out")],
        BAD_STRIDE: [
            dict(x_stride_row=52),
            dict(x_stride_head=-16),
            dict(x_stride_batch=(1 << 38) + 8),
            dict(cos_stride_row=4),
            dict(out_stride_column=7),
            dict(weights_stride_batch=-1),
            dict(weights_stride_block=(1 << 30) + 1),
            dict(factor_stride_batch=-3),
        ],
        NO_SPACE: [dict(workspace=0), dict(workspace_bytes=47), dict(workspace_bytes=0)],
    }
    for said, calls in refused.items():
        for changes in calls:
            assert status(**changes) == said, changes
    library = library_at(stub.binary.library)
    assert library[f"fagen_{stub.slug}"](None, None) != 0
    message = library[f"fagen_{stub.slug}_message"]
    message.restype = ctypes.c_char_p
    for number in (-1, 15, 99):
        assert message(number) == b"unknown status"


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
    assert status(shift=-1) == "gain, count, shift must be finite and positive"


# ---- torch --------------------------------------------------------------------------------------


def test_it_loads_and_torch_finds_nothing_wrong(any_toy: StubOp) -> None:
    named = toy.arguments(any_toy.plan)
    with torch.no_grad():
        run_once(any_toy.op, any_toy.slug, torch.device("cpu"))
    torch.library.opcheck(any_toy.op, (), named)
    torch.library.opcheck(any_toy.op, (), toy.arguments(any_toy.plan, 1, 0, 3))
    torch.library.opcheck(any_toy.op, (), {**named, "factor": torch.ones(2, 3)})
    torch.library.opcheck(op.emulated(any_toy.slug), (), named)
    if any_toy.slug != "toy_found":
        torch.library.opcheck(any_toy.alone, (), named)
        torch.library.opcheck(any_toy.op, (), {**named, "weights": None, "cos": None, "sin": None})


def test_fakes_are_what_the_op_returns(any_toy: StubOp) -> None:
    for change in ({}, {"factor": torch.ones(2, 3)}):
        named = toy.arguments(any_toy.plan) | change
        real = any_toy.op(**named)
        with FakeTensorMode() as mode:
            fakes = {
                k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in named.items()
            }
            found = any_toy.op(**fakes)
        for one, other in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (found, real)), strict=True
        ):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )


def test_the_variant_returns_all_but_one(stub: StubOp) -> None:
    named = toy.arguments(stub.plan)
    factor, out, _ = stub.op(**named)
    for one, other in zip(op.alone(stub.op)(**named), (factor, out), strict=True):
        assert torch.equal(one, other)


# ---- the docs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fill() -> Any:
    """docs/fill.py."""
    spec = spec_from_file_location("fill", locate("cli.py").parent / "docs" / "fill.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_argument_more_is_a_row_of_the_table_in_the_docs(fill: Any) -> None:
    tables = {slug: [*fill.signature_table(toy.SIGNATURES[slug])] for slug in TOYS}
    more = {
        slug: [line for line in lines if line not in tables["toy_base"] and line.startswith("|")]
        for slug, lines in tables.items()
    }
    assert more["toy_bias"] == ["| `bias` | (heads, 16) | float16 | added to each row |"]
    assert more["toy_shift"] == [
        "| `shift` |  | float | added to all; finite and above 0 as a float32 |"
    ]
    for slug, lines in tables.items():
        schema = getattr(torch.ops.fagen, slug).default._schema
        assert lines[1] == f"torch.ops.{schema}".replace(f"::{slug}", ".<slug>")


def test_the_table_in_the_docs_says_what_a_shape_does_not(fill: Any) -> None:
    lines = [*fill.signature_table(toy.BASE)]
    assert lines[2].startswith("torch.ops.fagen.<slug>_without_sums(Tensor x, Tensor ends, ")
    for row in (
        "| `weights` | (batch or 1, ceil(rows / 16) or 1) | float32 | of each block of rows |",
        "| `ends` | (batch + 1) | int32 | of sequences |",
        "| `sin` | (rows, 8) | float16 | of an angle; goes with `cos` |",
        "| `factor` | (batch, heads) | float32 | by which all is divided; found and returned where "
        "it is not given |",
        "| `count` |  | int | of repetitions; above 0 |",
        "| → `found_factor` | (batch, heads) | float32 | by which all is divided; empty where "
        "`factor` is given |",
        "| → `out` | (batch, heads, 16, ceil(rows / 16) · 16) | bfloat16 | transposed |",
        "| → `sums` | (batch, rows) | float32 | of rows; not of `<slug>_without_sums` |",
        "`rows` is a multiple of `heads`; `batch`, `heads`: at most 1,073,741,824; `rows`: at most "
        "1,000.",
    ):
        assert row in lines
    assert not any("history" in line or "decay" in line for line in lines)


# ---- several kernels in one program -------------------------------------------------------------


def test_structs_of_two_versions_do_not_meet_in_one_program(tmp_path: Path) -> None:
    of = registry.plan_of("toy_base")
    newer = replace(of, signature=replace(toy.BASE, version=8))
    header = template("abi.h.j2")
    for first, second, fits in ((of, of, True), (of, newer, False)):
        text = "#include <cstdint>\n" + rendered(first, header) + rendered(second, header)
        (tmp_path / "two.cpp").write_text(text)
        gxx, _ = find_gxx()
        said = process.run([gxx, "-fsyntax-only", *WARNINGS, "two.cpp"], cwd=tmp_path)
        assert (said.returncode == 0) == fits
        assert fits or "kernels of kind toy of two versions of fagen" in said.stderr


def test_kernels_of_one_kind_and_of_several_compile_in_one_translation_unit(tmp_path: Path) -> None:
    slugs = (
        "fwd_fp16_d64_full_m64n64",
        "fwd_fp16_d64_causal_m64n64",
        "quant_fp16_d64",
        "comb_fp16_d64",
    )
    for slug in slugs:
        (tmp_path / f"{slug}.cu").write_text(render(registry.plan_of(slug)).kernel)
    calls = ", ".join(f"fagen_{slug}_info()" for slug in slugs)
    lines = [*(f'#include "{slug}.cu"' for slug in slugs)]
    lines += ["int main() {", f"  const FagenKernelInfo* infos[] = {{{calls}}};"]
    lines += [
        '  for (const auto* info : infos) std::printf("%s %u\\n", info->slug, info->threads);'
    ]
    lines += ["}"]
    (tmp_path / "all.cu").write_text("#include <cstdio>\n" + "\n".join(lines))
    tools = find_toolchain()
    command = [tools.nvcc, *FLAGS, "-I", tools.cutlass, "-c", "all.cu", "-o", "all.o"]
    made = process.run(command, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "warning" not in made.stdout + made.stderr
    libraries = [f"-L{folder}" for folder in tools.library_dirs]
    link = [flag for flag in LINK_FLAGS if flag != "-shared"]
    compile_cpp("all.o", *libraries, *link, "-o", "all", folder=tmp_path)
    said = process.run([tmp_path / "all"]).stdout.splitlines()
    assert said == [f"{slug} {registry.plan_of(slug).threads}" for slug in slugs]
