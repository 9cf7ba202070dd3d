"""The op of a quantiser, with its real kernel and binding, on CPU tensors."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen import flow, op, process, quantize_op
from fagen.build import Binary
from fagen.errors import DeviceError, FagenError
from fagen.runtime.c_interface import library_at
from fagen.quantizer import QuantizePlan, QuantizeSchedule
from fagen.e4m3 import Quantized, quantize, sign_words
from fagen.render import environment
from fagen.toolchain import BINDING_FLAGS, BINDING_LINK_FLAGS, find_gxx, find_torch
from tests.quantize_helpers import SEED, SLUGS, normal, planned, same

# ---- the op -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SLUGS)
def binary(request: pytest.FixtureRequest, kernel_cache: Path) -> Binary:
    """A quantiser of each kind, built with its binding."""
    return flow.built(QuantizeSchedule.from_slug(request.param), binding=True)[1]


@pytest.fixture(scope="module")
def of(binary: Binary) -> QuantizePlan:
    return planned(binary.slug)


@pytest.fixture(scope="module")
def kernel(binary: Binary) -> op.Op:
    return quantize_op.load(binary)


def fitting(of: QuantizePlan, batch: int = 2, seqlen: int = 70, heads: int = 3) -> Tensor:
    return normal(batch, seqlen, heads, of.head_dim, dtype=getattr(torch, of.dtype.torch))


def angles_for(of: QuantizePlan, x: Tensor) -> dict[str, Tensor]:
    """Cosines and sines, where the op takes them, of a cache that is longer."""
    if not of.rotary:
        return {}
    places = torch.arange(x.shape[1] + 3.0)[:, None] * 0.8 ** torch.arange(float(of.angles))
    return {
        name: table.to(x.dtype)[3:].expand(x.shape[0], -1, -1)
        for name, table in (("cos", places.cos()), ("sin", places.sin()))
    }


def expected_of(of: QuantizePlan, x: Tensor, descale: Tensor | None = None) -> Quantized:
    angles = angles_for(of, x)
    rotary = (angles["cos"], angles["sin"]) if angles else None
    return quantize(of, x, SEED, descale, rotary)


def given_for(of: QuantizePlan) -> Tensor:
    return torch.tensor(0.02) if of.by_tensor else torch.full((2, 3), 0.02)


def test_on_cpu_tensors_the_op_is_the_reference(kernel, of):
    x = fitting(of)
    angles = angles_for(of, x)
    values, descale = kernel(x, SEED, **angles)
    expected = expected_of(of, x)
    assert same(values, expected.values)
    assert torch.equal(descale.flatten(), expected.descale.flatten()[: descale.numel()])
    if not of.by_block:
        values, nothing = kernel(x, SEED, given_for(of), **angles)
        assert same(values, expected_of(of, x, torch.tensor(0.02)).values)
        assert nothing.shape == (0,)


def test_opcheck_finds_nothing(kernel, of):
    for arguments in ((fitting(of), SEED), (fitting(of, 1, 1, 1),), (fitting(of, 2, 0, 3),)):
        torch.library.opcheck(kernel, arguments, angles_for(of, arguments[0]))
    turned = fitting(of).transpose(1, 2).contiguous().transpose(1, 2)
    angles = angles_for(of, turned)
    torch.library.opcheck(kernel, (turned, -1), angles)
    reference = torch.ops.fagen.quantized.default
    rotary = (angles.get("cos"), angles.get("sin"))
    torch.library.opcheck(reference, (turned, SEED, None, *rotary, of.slug))
    if not of.by_block:
        torch.library.opcheck(kernel, (turned, SEED, given_for(of)), angles)


def test_the_binding_refuses_in_the_same_words_as_python(kernel, of):
    x = fitting(of)
    wider = torch.zeros(2, 70, 3, of.head_dim + 1, dtype=x.dtype)[..., : of.head_dim]
    crooked = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    tall = torch.zeros(1, 1, 1, of.head_dim, dtype=x.dtype).expand(1, 65_535 * 32 + 1, 1, -1)
    angles = angles_for(of, x)
    wrong: list[tuple[Tensor, Tensor | None]] = [
        (x[0], None),
        (x[..., :16], None),
        (x.float(), None),
        (x.transpose(0, 3).contiguous().transpose(0, 3), None),
        (wider, None),
        (crooked, None),
        (tall, None),
        (tall.transpose(0, 1), None),
        (x, torch.ones(7)),
        (x, torch.ones(2, 4)),
        (x, given_for(of).double()),
    ]
    for tensor, given in wrong:
        said = []
        for call in (
            lambda t, d: kernel(t, SEED, d, **angles),
            lambda t, d: quantize_op.refuse_arguments(of, t, d, **angles),
        ):
            with pytest.raises(ValueError) as refusal:
                call(tensor, given)
            said.append(str(refusal.value))
        assert said[0] == said[1]
        assert said[0].startswith(f"fagen::{of.slug}: ")


def test_a_gradient_is_refused_and_needs_none_without_grad_mode(kernel, of):
    x = fitting(of).requires_grad_()
    angles = angles_for(of, x)
    with pytest.raises(ValueError, match=r"^fagen::.*: x.* or .* requires a gradient"):
        kernel(x, SEED, **angles)
    with torch.no_grad():
        assert same(kernel(x, SEED, **angles)[0], kernel(x.detach(), SEED, **angles)[0])


def test_its_fake_says_what_comes_out_and_refuses_too(kernel, of):
    angles = angles_for(of, fitting(of))
    real = kernel(fitting(of), SEED, **angles)
    with FakeTensorMode() as mode:
        angles = {name: mode.from_tensor(tensor) for name, tensor in angles.items()}
        made = kernel(mode.from_tensor(fitting(of)), SEED, **angles)
        for fake, tensor in zip(made, real, strict=True):
            assert (fake.shape, fake.dtype) == (tensor.shape, tensor.dtype)
            assert fake.stride() == tensor.stride()
        with pytest.raises(ValueError, match="this kernel takes"):
            kernel(mode.from_tensor(fitting(of)[..., :16]), SEED, **angles)


def test_its_kernels_keep_what_their_plan_promises(binary, of):
    assert binary.report.registers <= of.registers
    assert binary.report.spill_store_bytes == binary.report.stack_bytes == 0
    machine = binary.report.machine
    assert machine is not None
    assert len(machine.kernel.split()) == of.kernels
    assert machine.registers <= of.registers
    assert machine.count("LDL", "STL") == 0
    assert machine.consumer_registers is None
    assert machine.count("HMMA") > 0 or not of.rotate


def test_on_a_hopper_gpu_a_call_builds_loads_and_keeps_the_kernel(binary, of, monkeypatch):
    """All but the launch: the device is said to be a GPU, the tensors are on the CPU."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(quantize_op, "_ready", {})
    keys = of.schedule.quantize
    asked = (
        *(torch.device("cuda", 0), getattr(torch, of.dtype.torch), keys.head_dim, keys.rotate),
        *(keys.scales, keys.scale_rows or 128, keys.layout, keys.rotary),
    )
    kernel = quantize_op._make_ready(asked)
    assert kernel is quantize_op.load(binary) is quantize_op._make_ready(asked)
    assert kernel.name() == f"fagen::{of.slug}"
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    assert quantize_op._make_ready(asked) is kernel
    with pytest.raises(FagenError, match="cannot be built while a CUDA graph is captured"):
        quantize_op._make_ready((torch.device("cuda", 1), *asked[1:]))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(DeviceError, match=r"cuda:2 is a NVIDIA A100 of compute capability 8\.0"):
        quantize_op._make_ready((torch.device("cuda", 2), *asked[1:]))


# ---- what the kernel is passed ------------------------------------------------------------------


# What stands in for a compiled kernel, and a way to its arguments that needs no GPU.
STUB = """
#include <cstdint>
%(abi)s
static FagenQuantizeArgs noted;
extern "C" int fagen_%(slug)s(const FagenQuantizeArgs* args, void*) { noted = *args; return 0; }
extern "C" const char* fagen_%(slug)s_message(int) { return "a stub"; }
extern "C" const void* noted_call(void) { return &noted; }
extern "C" int args_bytes(void) { return sizeof(FagenQuantizeArgs); }
"""
PROBE = """
#include "%(slug)s_torch.cpp"
namespace {
void note(const Tensor& x, int64_t seed, const Tensor& values, const Tensor& descale, const Descale& workspace%(parameters)s) {
  const FagenQuantizeArgs args = describe(x, %(seed)svalues, descale%(workspace)s%(rotary)s);
  fagen_%(slug)s(&args, nullptr);
}
}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT(fagen_test, m) {
  m.def("note_%(slug)s(Tensor x, int seed, Tensor values, Tensor descale, Tensor? workspace%(schema)s) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fagen_test, CPU, m) { m.impl("note_%(slug)s", TORCH_BOX(&note)); }
"""  # noqa: E501


# the stub's ops have names of their own, so that the real ones can be loaded beside them
OF_STUBS = (
    "quant_fp16_d112_rot_head",
    "quant_bf16_d16_tensor_vcols",
    "quant_bf16_d160_block32_vcols",
    "quant_fp16_d192_halves_rot_tensor",
    "quant_bf16_d48_pairs_block64",
)


@pytest.fixture(scope="module", params=OF_STUBS)
def stub(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[QuantizePlan, Callable[..., Any], ctypes.CDLL]:
    """A binding over a C function that notes how it was called."""
    of = planned(request.param)
    folder = tmp_path_factory.mktemp("stub")
    names = {
        "slug": of.slug,
        "abi": environment().get_template("quantize/abi.h.j2").render(plan=of),
        "seed": "seed, " if of.rotate else "",
        "workspace": "" if of.by_block else ", workspace",
        "rotary": ", cos, sin" * of.rotary,
        "parameters": ", const Tensor& cos, const Tensor& sin" * of.rotary,
        "schema": ", Tensor cos, Tensor sin" * of.rotary,
    }
    (folder / "stub.cpp").write_text(STUB % names)
    (folder / f"{of.slug}_torch.cpp").write_text(flow.rendered(of.schedule).binding)
    (folder / "probe.cpp").write_text(PROBE % names)
    found = find_torch()
    assert found is not None
    gxx, _ = find_gxx()
    warned = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    for command in (
        [gxx, "-std=c++17", "-fPIC", "-shared", "stub.cpp", "-o", f"{of.slug}.so"],
        [
            *(gxx, *BINDING_FLAGS, *warned, "-isystem", found.include, found.target, "probe.cpp"),
            *(f"-L{folder}", f"-l:{of.slug}.so", f"-L{found.library_dir}"),
            *(f"-Wl,-rpath,{folder}", *BINDING_LINK_FLAGS, "-o", "probe.so"),
        ],
    ):
        made = process.run(command, cwd=folder)
        assert made.returncode == 0, made.stderr
    torch.ops.load_library(folder / "probe.so")
    library = ctypes.CDLL(str(folder / f"{of.slug}.so"))
    library.noted_call.restype = ctypes.c_void_p
    return of, getattr(torch.ops.fagen_test, f"note_{of.slug}").default, library


def test_wrong_cosines_are_refused_in_the_same_words_as_python(kernel, of):
    x = fitting(of)
    if not of.rotary:
        with pytest.raises((TypeError, RuntimeError)):
            kernel(x, SEED, cos=x, sin=x)
        return
    cos = angles_for(of, x)["cos"]
    wider = torch.ones(2, 70, of.angles + 1, dtype=x.dtype)[..., : of.angles]
    crooked = torch.ones(cos.numel() + 1, dtype=x.dtype)[1:].view(cos.shape)
    for wrong in (cos[:1], cos[:, :5], cos.float(), wider, crooked):
        for name in ("cos", "sin"):
            angles = {"cos": cos, "sin": cos} | {name: wrong}
            said = []
            for call in (partial(kernel, x, SEED), partial(quantize_op.refuse_arguments, of, x)):
                with pytest.raises(ValueError) as refusal:
                    call(**angles)
                said.append(str(refusal.value))
            assert said[0] == said[1] and f": {name} " in said[0]
    with pytest.raises(ValueError, match="cos is missing"):
        quantize_op.refuse_arguments(of, x)


@pytest.mark.parametrize("given", [False, True])
def test_binding_and_python_pass_the_kernel_the_same_arguments(stub, given):
    of, note, library = stub
    kind = quantize_op.RotaryQuantizeArgs if of.rotary else quantize_op.QuantizeArgs
    assert library.args_bytes() == ctypes.sizeof(kind)
    if given and of.by_block:
        with pytest.raises(ValueError, match="cannot be given"):
            given_all = angles_for(of, fitting(of))
            quantize_op.refuse_arguments(of, fitting(of), torch.ones(2, 3), **given_all)
        return
    x = fitting(of).transpose(1, 2).contiguous().transpose(1, 2)
    values, descale = quantize_op.outputs_for(of, x)
    workspace = None if of.by_block or given else torch.empty(6)
    rotary = tuple(angles_for(of, x).values())
    note(x, -SEED, values, descale, workspace, *rotary)
    noted = kind.from_address(library.noted_call())
    expected = quantize_op.quantizer_args(
        of, x, values, descale, workspace, -SEED, rotary if of.rotary else None
    )
    assert bytes(noted) == bytes(expected)
    assert bool(noted.given) == given
    assert (noted.batch, noted.seqlen, noted.heads) == (2, 70, 3)
    assert any(noted.signs) == of.rotate
    assert not of.rotary or (noted.cos_stride_batch, noted.sin_stride_seq) == (0, of.angles)


def test_signs_are_splitmix64s_numbers():
    words = sign_words(0)
    numbers = [words[i] | words[i + 1] << 32 for i in range(0, 8, 2)]
    assert numbers[:3] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert sign_words(-1) == sign_words(2**64 - 1) != sign_words(1)


OFFSETS = """
#include <cstddef>
#include <cstdint>
#include <cstdio>
%(abi)s
int main() {
  %(prints)s
  std::printf("%%zu", sizeof(FagenQuantizeArgs));
}
"""


@pytest.mark.parametrize("slug", SLUGS)
def test_every_field_of_the_python_struct_lies_where_the_compiler_puts_it(slug, tmp_path):
    of = planned(slug)
    kind = quantize_op.RotaryQuantizeArgs if of.rotary else quantize_op.QuantizeArgs
    bases = (one for one in reversed(kind.__mro__) if "_fields_" in vars(one))
    fields = [name for one in bases for name, _ in one._fields_]
    said = ("in" if field == "input" else field for field in fields)
    place = "offsetof(FagenQuantizeArgs, {0}), sizeof(FagenQuantizeArgs::{0})"
    printed = [f'std::printf("%zu %zu\\n", {place.format(name)});' for name in said]
    abi = environment().get_template("quantize/abi.h.j2").render(plan=of)
    program = OFFSETS % {"abi": abi, "prints": "\n  ".join(printed)}
    (tmp_path / "offsets.cpp").write_text(program)
    gxx, _ = find_gxx()
    made = process.run([gxx, "-std=c++17", "offsets.cpp", "-o", "offsets"], cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    *found, size = process.run([tmp_path / "offsets"]).stdout.splitlines()
    places = [getattr(kind, field) for field in fields]
    assert found == [f"{place.offset} {place.size}" for place in places]
    assert int(size) == ctypes.sizeof(kind) == sum(place.size for place in places)


def test_a_call_of_the_c_function_needs_a_gpu_and_right_arguments(binary, of):
    x = fitting(of)
    values, descale = quantize_op.outputs_for(of, x)
    rotary = tuple(angles_for(of, x).values())
    with pytest.raises(DeviceError, match="x is on cpu"):
        quantize_op.bind_quantizer(binary, x, values, descale, rotary=rotary or None)
    with pytest.raises(ValueError, match="this kernel takes"):
        quantize_op.bind_quantizer(binary, x[0], values, descale)
    ask = library_at(binary.library)[f"fagen_{of.slug}_message"]
    ask.restype = ctypes.c_char_p
    assert ask(0) == b"launched"
