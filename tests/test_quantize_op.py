"""fagen.quantize and the op of a quantiser: the real kernel and binding, on CPU tensors."""

import ctypes
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fagen
from fagen import flow, op, process, quantize_op
from fagen.build import Binary
from fagen.errors import DeviceError, FagenError
from fagen.runtime.c_interface import library_at
from fagen.quantizer import QuantizePlan, QuantizeSchedule, plan_quantizer
from fagen.kinds.quantize.plan import LEAST_MAXIMUM
from fagen.e4m3 import Quantized, embedded, quantize, sign_words
from fagen.render import environment
from fagen.toolchain import BINDING_FLAGS, BINDING_LINK_FLAGS, find_gxx, find_torch
from fagen.vocab import USUAL_SCALE_ROWS

SLUGS = (
    "quant_fp16_d64_rot_head",
    "quant_bf16_d48_tensor_vcols",
    "quant_fp16_d80_rot_block64",
    "quant_bf16_d128_halves_rot_block128",
    "quant_fp16_d32_pairs_head",
)
SEED = 11


def planned(slug: str) -> QuantizePlan:
    return plan_quantizer(QuantizeSchedule.from_slug(slug))


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# ---- the function -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize(
    "keys",
    [
        dict(),
        dict(rotate=True, seed=3),
        dict(scales="head", layout="columns"),
        dict(scales="tensor", rotate=True),
        dict(scale_rows=32, layout="columns", rotate=True),
    ],
)
def test_on_the_cpu_it_is_what_the_reference_computes(dtype, head_dim, keys):
    x = normal(2, 70, 3, head_dim, dtype=dtype)
    got = fagen.quantize(x, **keys)
    keys = dict(keys)
    seed = keys.pop("seed", 0)
    schedule = QuantizeSchedule.make(
        dtype="fp16" if dtype == torch.float16 else "bf16",
        head_dim=head_dim,
        **({} if "scales" in keys else {"scales": "block", "scale_rows": USUAL_SCALE_ROWS}) | keys,
    )
    expected = quantize(plan_quantizer(schedule), x, seed)
    assert same(got.values, expected.values)
    assert torch.equal(got.descale.flatten(), expected.descale.flatten()[: got.descale.numel()])


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        (dict(), (2, 3, 4)),  # blocks of 64 rows
        (dict(scale_rows=128), (2, 3, 2)),
        (dict(scale_rows=32), (2, 3, 7)),
        (dict(scales="head"), (2, 3)),
        (dict(scales="head", scale_rows=32), (2, 3)),
        (dict(scales="tensor"), ()),
    ],
)
def test_descales_have_the_shape_of_what_shares_them(keys, shape):
    made = fagen.quantize(normal(2, 200, 3, 64), **keys)
    assert made.descale.shape == shape and made.descale.dtype == torch.float32
    assert made.values.shape == (2, 200, 3, 64) and made.values.dtype == torch.float8_e4m3fn
    assert made.values.is_contiguous() and made.descale.is_contiguous()
    assert fagen.quantize(normal(2, 200, 3, 64), layout="columns", **keys).values.shape == (
        *(2, 3, 64),
        208,
    )


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_what_it_returns_stands_for_what_came_in(scales):
    x = normal(2, 300, 3, 128) * torch.tensor([1, 2, 4])[:, None]
    made = fagen.quantize(x, scales=scales)
    assert isinstance(made, Quantized)
    assert torch.allclose(made.real(USUAL_SCALE_ROWS), x.float(), rtol=2**-4, atol=0.01)
    assert not torch.allclose(made.values.float(), x.float(), atol=1)


def test_q_and_k_that_are_rotated_alike_keep_their_products():
    q, k = normal(1, 8, 1, 96), normal(1, 9, 1, 96) + 1
    exact = (q[0, :, 0].float() @ k[0, :, 0].float().T).flatten()

    def product(seed: int) -> Tensor:
        turned = [fagen.quantize(x, rotate=True, seed=s) for x, s in ((q, 5), (k, seed))]
        one, other = (x.real(USUAL_SCALE_ROWS)[0, :, 0] for x in turned)
        return (one @ other.T).flatten()

    assert torch.corrcoef(torch.stack((product(5), exact)))[0, 1] > 0.99
    assert torch.corrcoef(torch.stack((product(6), exact)))[0, 1] < 0.9


@pytest.mark.parametrize(
    ("scales", "given", "shape"),
    [
        ("tensor", 0.01, ()),
        ("head", 0.01, (2, 3)),
        ("tensor", torch.tensor(0.01), ()),
        ("head", torch.full((2, 3), 0.01), (2, 3)),
        ("head", torch.tensor(0.01), (2, 3)),
    ],
)
def test_a_given_descale_is_used_and_comes_back(scales, given, shape):
    x = normal(2, 40, 3, 64)
    x[0, 0] = 100
    made = fagen.quantize(x, scales=scales, descale=given)
    assert torch.equal(made.descale, torch.full(shape, 0.01))
    assert torch.all(made.values[0, 0].float() == 448)
    assert torch.allclose(made.values[1:].float() * 0.01, x[1:].float(), rtol=2**-4, atol=1e-4)


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 3, 64), (2, 5, 0, 64)])
def test_of_nothing_it_makes_nothing_and_a_descale_that_is_a_number(scales, shape):
    made = fagen.quantize(torch.zeros(shape, dtype=torch.float16), scales=scales)
    assert made.values.shape == shape
    assert torch.all(made.descale == LEAST_MAXIMUM / 448)


@pytest.mark.parametrize(
    ("x", "keys", "said"),
    [
        (normal(3, 2, 64), {}, r"x has 3 dimensions; it must have 4"),
        (normal(1, 3, 2, 64).float(), {}, r'dtype = "float32" must be "fp16" or "bf16"'),
        (normal(1, 3, 2, 72), {}, r"head_dim = 72 must be a whole number from 16 to 256 in steps"),
        (normal(1, 3, 2, 272), {}, r"head_dim = 272 must be"),
        (normal(1, 3, 2, 64), dict(scales="row"), r'scales = "row" must be "tensor" or "head"'),
        (normal(1, 3, 2, 64), dict(scale_rows=48), r"scale_rows = 48 must be 32 or 64 or 128"),
        (normal(1, 3, 2, 64), dict(layout="vcols"), r'layout = "vcols" must be "rows" or "col'),
        (normal(1, 3, 2, 65)[..., :64], {}, r"x has stride 130 in dimension 1, which must be a mu"),
        (normal(1, 3, 2, 128)[..., ::2], {}, r"x has stride 2 in its last dimension"),
        (normal(401)[1:385].view(1, 3, 2, 64), {}, r"x does not begin at a multiple of 16 bytes"),
        (normal(1, 3, 2, 64), dict(descale=0.1), r"descales of blocks are found, they cannot be"),
        (
            normal(1, 3, 2, 64),
            dict(scales="head", descale=torch.ones(2, 1)),
            r"descale has shape \(2, 1\); it must be \(1, 2\)",
        ),
        (
            normal(1, 3, 2, 64),
            dict(scales="tensor", descale=torch.ones(1)),
            r"descale has shape \(1\); it must be \(\)",
        ),
        (
            normal(1, 3, 2, 64),
            dict(scales="tensor", descale=torch.tensor(1, dtype=torch.float64)),
            r"descale is not float32; descale\.float\(\) converts it",
        ),
        (normal(1, 3, 2, 64), dict(scales="tensor", descale=0.0), r"descale is 0; it must be fin"),
        (normal(1, 3, 2, 64), dict(scales="tensor", descale=torch.inf), r"descale is inf"),
        (normal(1, 3, 2, 64).requires_grad_(), {}, r"requires a gradient"),
    ],
)
def test_a_wrong_argument_is_named(x, keys, said):
    with pytest.raises(ValueError, match=said):
        fagen.quantize(x, **keys)


def test_a_device_that_has_no_kernels_is_named():
    with pytest.raises(DeviceError, match="x is on meta"):
        fagen.quantize(torch.empty(1, 3, 2, 64, dtype=torch.float16, device="meta"))


def test_any_strides_of_16_bytes_will_do():
    packed = normal(2, 70, 3, 192)
    x = packed[..., 64:128]
    assert same(fagen.quantize(x).values, fagen.quantize(x.contiguous()).values)
    by_heads = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert same(fagen.quantize(by_heads).values, fagen.quantize(x).values)


@pytest.mark.parametrize("pairs", [False, True])
def test_an_embedding_comes_before_all_else(pairs):
    x = normal(2, 40, 3, 64)
    places = torch.arange(40.0)[:, None] * 0.9 ** torch.arange(32.0)
    cos, sin = places.cos().half(), places.sin().half()
    expected = fagen.quantize(embedded(x, cos, sin, pairs=pairs), rotate=True)
    for rotary in ((cos, sin), (cos.expand(2, -1, -1), sin.expand(2, -1, -1))):
        made = fagen.quantize(x, rotate=True, rotary=rotary, rotary_pairs=pairs)
        assert same(made.values, expected.values)
        assert torch.equal(made.descale, expected.descale)
    assert not same(fagen.quantize(x, rotate=True).values, expected.values)


@pytest.mark.parametrize(
    ("shape", "change", "said"),
    [
        ((40, 32), lambda t: t.float(), r"cos is not float16, as x is; cos\.to\(x\.dtype\)"),
        ((39, 32), lambda t: t, r"cos has shape \(2, 39, 32\); it must be \(2, 40, 32\)"),
        ((1, 40, 32), lambda t: t, r"cos has shape \(1, 40, 32\); it must be \(2, 40, 32\)"),
        ((40, 33), lambda t: t[:, :32], r"cos has stride 33 in dimension 1; cos\.contiguous\(\)"),
        ((40, 64), lambda t: t[:, ::2], r"cos has stride 2 in dimension 2"),
        ((41, 33), lambda t: t.flatten()[1:1281].view(40, 32), r"cos does not begin at a multiple"),
    ],
)
def test_wrong_cosines_are_named(shape, change, said):
    cos = change(torch.ones(shape, dtype=torch.float16))
    with pytest.raises(ValueError, match=said):
        fagen.quantize(normal(2, 40, 3, 64), rotary=(cos, cos))


def test_columns_half_a_row_apart_need_rows_of_64():
    cos = torch.ones(40, 48, dtype=torch.float16)
    with pytest.raises(ValueError, match=r'rotary = "halves" needs a head_dim of 64, 128, …'):
        fagen.quantize(normal(2, 40, 3, 96), rotary=(cos, cos))
    fagen.quantize(normal(2, 40, 3, 96), rotary=(cos, cos), rotary_pairs=True)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_once_called_it_compiles_into_one_graph(fresh_dynamo, dynamic):
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        made = fagen.quantize(x * 2, rotate=True, layout="columns")
        return made.values.float() + 1, made.descale * 2

    x = normal(3, 70, 5, 64)
    expected = twice(x)
    compiled = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for one, other in zip(compiled(x), expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(compiled(x[:2, :33])[0], twice(x[:2, :33])[0])


def test_uncalled_it_says_so_to_torch_compile(fresh_dynamo):
    compiled = torch.compile(fagen.quantize, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"call fagen\.quantize") as refusal:
        compiled(normal(1, 2, 3, 208))
    assert "cannot be built while torch.compile traces the call" in str(refusal.value)


def test_a_quantiser_is_prepared_by_its_slug():
    keys = dict(dtype=torch.bfloat16, head_dim=176, device=torch.device("cpu"))
    assert quantize_op.prepare_quantizer(**keys) == "quant_bf16_d176_block64"
    slug = quantize_op.prepare_quantizer(**keys, rotate=True, scales="head", layout="columns")
    assert slug == "quant_bf16_d176_rot_head_vcols"


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


# ---- what the kernel is told --------------------------------------------------------------------

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
def test_binding_and_python_tell_the_kernel_the_same(stub, given):
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


@pytest.mark.parametrize("slug", SLUGS)
def test_the_python_struct_has_the_fields_of_the_c_one(slug):
    of = planned(slug)
    text = environment().get_template("quantize/abi.h.j2").render(plan=of)
    struct = text.partition("struct FagenQuantizeArgs {")[2].partition("};")[0]
    struct = re.sub(r"//.*", "", struct)
    named = re.findall(r"(\w+)(?:\[8\])?\s*[,;]", struct)
    fields = [name for name, _ in quantize_op.QuantizeArgs._fields_]
    fields += [name for name, _ in quantize_op.RotaryQuantizeArgs._fields_] * of.rotary
    assert ["in" if name == "input" else name for name in fields] == named


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
