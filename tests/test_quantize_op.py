"""The op of a quantiser, with its real kernel and binding, on CPU tensors."""

import ctypes

import pytest
import torch
from torch import Tensor

from fagen import flow, registry
from fagen.e4m3 import Quantized
from fagen.errors import DeviceError, FagenError
from fagen.kinds.quantize.oracle import quantize
from fagen.kinds.quantize.plan import Plan
from fagen.runtime import c_interface, op
from fagen.runtime.c_interface import KernelInfo, info_of, library_at
from fagen.runtime.checks import allocated, checked
from fagen.runtime.quantize import QUANTIZE
from tests import wrong
from tests.fresh import forget
from tests.often import some
from tests.op_helpers import refused_everywhere
from tests.quantize_helpers import SEED, SLUGS, normal, planned, same

# ---- the op -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=some(SLUGS, SLUGS[:3]))
def binary(request, kernel_cache):
    """A quantiser of each kind, built with its binding."""
    return flow.built(registry.from_slug(request.param), binding=True)[1]


@pytest.fixture(scope="module")
def plan(binary):
    return planned(binary.slug)


@pytest.fixture(scope="module")
def kernel(binary):
    return op.load(binary)


def fitting(plan: Plan, batch: int = 2, seqlen: int = 70, heads: int = 3) -> Tensor:
    return normal(batch, seqlen, heads, plan.head_dim, dtype=getattr(torch, plan.dtype.torch))


def angles_for(plan: Plan, x: Tensor) -> dict[str, Tensor]:
    """Cosines and sines, where the op takes them, of a cache that is longer."""
    if not plan.rotary:
        return {}
    places = torch.arange(x.shape[1] + 3.0)[:, None] * 0.8 ** torch.arange(float(plan.angles))
    return {
        name: table.to(x.dtype)[3:].expand(x.shape[0], -1, -1)
        for name, table in (("cos", places.cos()), ("sin", places.sin()))
    }


def expected_of(plan: Plan, x: Tensor, descale: Tensor | None = None) -> Quantized:
    angles = angles_for(plan, x)
    rotary = (angles["cos"], angles["sin"]) if angles else None
    return quantize(plan, x, SEED, descale, rotary)


def given_for(plan: Plan) -> Tensor:
    return torch.tensor(0.02) if plan.by_tensor else torch.full((2, 3), 0.02)


def test_on_cpu_tensors_the_op_is_the_reference(kernel, plan):
    x = fitting(plan)
    angles = angles_for(plan, x)
    values, descale = kernel(x, SEED, **angles)
    expected = expected_of(plan, x)
    assert same(values, expected.values)
    assert torch.equal(descale.flatten(), expected.descale.flatten()[: descale.numel()])
    if not plan.by_block:
        values, nothing = kernel(x, SEED, given_for(plan), **angles)
        assert same(values, expected_of(plan, x, torch.tensor(0.02)).values)
        assert nothing.shape == (0,)


def test_opcheck_finds_nothing(kernel, plan):
    for arguments in ((fitting(plan), SEED), (fitting(plan, 1, 1, 1),), (fitting(plan, 2, 0, 3),)):
        torch.library.opcheck(kernel, arguments, angles_for(plan, arguments[0]))
    turned = fitting(plan).transpose(1, 2).contiguous().transpose(1, 2)
    angles = angles_for(plan, turned)
    torch.library.opcheck(kernel, (turned, -1), angles)
    torch.library.opcheck(op.emulated(plan.slug), (turned, SEED), angles)
    if not plan.by_block:
        torch.library.opcheck(kernel, (turned, SEED, given_for(plan)), angles)


WRONG = """
x:
  x=x[0] -> x has shape (70, 3, {d}); it must be (batch, seqlen, heads, {d})
  x=x[..., :16] -> x has shape (2, 70, 3, 16); it must be (batch, seqlen, heads, {d})
  x=x.float() -> x is not {dtype}, which this kernel takes; x.to(torch.{dtype}) converts it
  x=turned(x, 0, 3) -> x has stride 420 in dimension 3, which
  x=stepped(x, 0) -> x has stride {stride} in dimension 0, which must be a multiple of 8 elem
  x=shifted(x) -> x does not begin at a multiple of 16 bytes; x.clone() does
  x=long(x[:1, :1, :1]) -> x has seqlen = 1073741825; it may be 1073741824 at most
  x=long(x[:1, :1, :1]).transpose(0, 1) -> x has batch = 1073741825; it may be 1073741824 at most

descale:
  descale=ones(7) -> descale has shape (7); it must be {shape}
  descale=ones(2, 4) -> descale has shape (2, 4); it must be {shape}
  descale=descale.double()
    -> descale is not float32, which this kernel takes; descale.to(torch.float32) converts

block:
  descale=descale -> descale: descales of blocks are found, they ca

rotary:
  cos=cos[:1] -> cos has shape (1, 70, {angles}); it must be (batch = 2, seqlen = 70, {angles})
  sin=sin[:, :5] -> sin has shape (2, 5, {angles}); it must be (batch = 2, seqlen = 70, {angles})
  cos=cos.float() -> cos is not {dtype}, which this kernel takes;
  sin=stepped(sin.contiguous(), 0)
    -> sin has stride {angles_stride} in dimension 0, which must be a multiple of
  sin=shifted(sin) -> sin does not begin at a multiple of 16 bytes;
"""


def test_a_wrong_argument_is_refused_in_the_same_words_everywhere(kernel, plan):
    x = fitting(plan)
    good = dict(x=x, seed=SEED, **angles_for(plan, x))
    words = dict(
        d=plan.head_dim,
        dtype=plan.dtype.torch,
        stride=210 * plan.head_dim + 4,
        shape="()" if plan.by_tensor else "(batch = 2, heads = 3)",
        angles=plan.angles,
        angles_stride=70 * plan.angles + 4,
    )
    for case in wrong.cases(WRONG):
        name, change, _, message = case.values
        if name == "x" or name == ("block" if plan.by_block else "descale"):
            arguments = good | wrong.changed(change, good | {"descale": given_for(plan)})
        elif name == "rotary" and plan.rotary:
            arguments = wrong.changed(change, good)
        else:
            continue
        if name == "x":
            arguments = good | {"x": arguments["x"]}
        assert refused_everywhere(plan, kernel, arguments).startswith(message.format(**words))
    if plan.rotary:
        with pytest.raises(ValueError, match=f"^fagen::{plan.slug}: cos is missing$"):
            checked(plan, dict(x=x, sin=good["sin"]))
    else:
        with pytest.raises((TypeError, RuntimeError), match="expected at most 3"):
            kernel(x, SEED, cos=x, sin=x)


def test_a_gradient_is_refused_and_needs_none_without_grad_mode(kernel, plan):
    x = fitting(plan).requires_grad_()
    angles = angles_for(plan, x)
    message = r"x.* or .* requires a gradient, and rounding to e4m3 has none; "
    with pytest.raises(ValueError, match=f"^fagen::{plan.slug}: {message}"):
        kernel(x, SEED, **angles)
    with torch.no_grad():
        assert same(kernel(x, SEED, **angles)[0], kernel(x.detach(), SEED, **angles)[0])


def test_its_kernels_keep_what_their_plan_promises_and_say_so(binary, plan):
    assert binary.report.registers <= plan.launch_registers
    assert binary.report.spill_store_bytes == binary.report.stack_bytes == 0
    machine = binary.report.machine
    assert machine is not None
    assert len(machine.kernel.split()) == len(plan.launches.kernels)
    assert machine.registers <= plan.launch_registers
    assert machine.count("LDL", "STL") == 0
    assert machine.consumer_registers is None
    assert machine.count("HMMA") > 0 or not plan.rotate
    sizes = plan.shared_bytes, plan.threads, plan.launch_registers
    assert info_of(binary.library, plan.slug) == KernelInfo(*sizes, plan.slug, binary.source_hash)


def test_on_a_hopper_gpu_a_call_builds_loads_and_keeps_the_kernel(binary, plan, monkeypatch):
    """All but the launch: the device is said to be a GPU, the tensors are on the CPU."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    forget(monkeypatch)
    keys = plan.schedule.quantize
    how = keys.center, keys.scales, keys.scale_rows or 128, keys.layout, keys.rotary
    dtype = getattr(torch, plan.dtype.torch)

    def ready(device=0):
        key = QUANTIZE.key_of(torch.device("cuda", device), dtype, keys.head_dim, keys.rotate, *how)
        return QUANTIZE.find(QUANTIZE.ready(key))

    kernel = ready()
    assert ready() is kernel and kernel.plan == plan
    assert op.load(binary) is getattr(torch.ops.fagen, plan.slug).default
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    assert ready() is kernel
    with pytest.raises(FagenError, match="cannot be built while a CUDA graph is captured"):
        ready(1)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    assert ready(1).plan == plan
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(DeviceError, match=r"cuda:2 is a NVIDIA A100 of compute capability 8\.0"):
        ready(2)


# ---- what the kernel is passed ------------------------------------------------------------------


def test_a_call_of_the_c_function_needs_a_gpu_and_right_arguments(binary, plan):
    x = fitting(plan)
    named = dict(x=x, seed=SEED, **angles_for(plan, x))
    values, descale = allocated(plan, named, checked(plan, named))
    named |= dict(values=values, found_descale=descale)
    with pytest.raises(DeviceError, match="x is on cpu"):
        c_interface.bind(plan, binary.library, **named)
    for change, message in (
        (dict(x=x[0]), "x has shape"),
        (dict(values=None), "values is missing"),
        (dict(found_descale=None), "found_descale is missing"),
        (dict(values=values.float()), "values is not float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=message):
            c_interface.bind(plan, binary.library, **named | change)
    ask = library_at(binary.library)[f"fagen_{plan.slug}_message"]
    ask.restype = ctypes.c_char_p
    assert ask(0) == b"launched"
