"""The op, with its real binding and a C function in the kernel's place that only notes its call."""

import ctypes
import math
from threading import Thread

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.build import Binary
from fagen.errors import BuildError, DeviceError, FagenError
from fagen.kinds.forward.emulate import emulate, emulate_fp8
from fagen.runtime import c_interface, op
from fagen.runtime.c_interface import KernelInfo, info_of
from fagen.runtime.checks import checked
from tests.gpu import c_caller
from tests.op_helpers import (
    COLUMNS,
    PACKED8,
    ROWS,
    SLUG,
    arguments,
    qkv,
)
from tests.stubs import HASH, fields_of


@pytest.fixture
def stub(stub_op):
    return stub_op(SLUG)


@pytest.fixture
def binary(stub):
    return stub.binary


@pytest.fixture(params=[SLUG, COLUMNS, ROWS])
def any_stub(request, stub_op):
    """The op of 16 bits, and those of e4m3 with V transposed and by rows."""
    return stub_op(request.param)


@pytest.fixture(params=[COLUMNS, ROWS])
def fp8(request, stub_op):
    return stub_op(request.param)


@pytest.fixture
def rows(stub_op):
    return stub_op(ROWS)


def emulated(plan, named):
    return (emulate if plan.slug.startswith("fwd_bf16") else emulate_fp8)(plan, *named.values())


# ---- what it computes ---------------------------------------------------------------------------


def test_on_cpu_tensors_the_op_is_the_emulated_schedule(any_stub):
    named = arguments(any_stub.plan)
    out, lse = any_stub.op(**named)
    expected, expected_lse = emulated(any_stub.plan, named)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    dtype = getattr(torch, any_stub.plan.out_dtype.torch)
    assert out.shape == (2, 70, 4, 32) and out.is_contiguous() and out.dtype == dtype
    assert lse.shape == (2, 4, 70) and lse.is_contiguous() and lse.dtype == torch.float32


def test_without_a_log_sum_exp_out_is_the_same_also_of_nothing(any_stub):
    for sizes in ((), (1, 0, 5), (2, 3, 0)):
        named = arguments(any_stub.plan, *sizes)
        out, lse = any_stub.op(**named)
        only = any_stub.out_only(**named)
        assert torch.equal(only, out) and only.is_contiguous() and not only.requires_grad
        assert out.shape == (*named["q"].shape[:3], 32)
    assert not out.any() and (lse == -math.inf).all()  # there was no key


def test_what_is_no_kernel_gives_its_first_output_alone():
    assert op.out_only(lambda *args: (args[2], args[3]))(0, 1, 2, 3) == 2


def test_without_descales_a_number_is_its_byte(rows):
    q, k, v, *_ = arguments(rows.plan).values()
    ones = torch.ones(1, 1, 1)
    without = rows.op(q, k, v, 0.1)[0]
    assert torch.equal(without, rows.op(q, k, v, 0.1, ones, ones, ones)[0])
    assert torch.equal(without, rows.op(q, k, v, 0.1, None, ones)[0])
    torch.testing.assert_close(rows.op(q, k, v, 0.1, v_descale=ones * 2)[0], without * 2)


def test_a_descale_for_all_is_one_for_each(fp8):
    q, k, v, scale, *descales = arguments(fp8.plan).values()
    small = [descale[:1, :1] for descale in descales[:3]]
    strided = [x.expand(descale.shape) for x, descale in zip(small, descales, strict=False)]
    expected = fp8.op(q, k, v, scale, *(x.contiguous() for x in strided))[0]
    for same in (small, strided):  # which has strides of 0
        assert torch.equal(fp8.op(q, k, v, scale, *same)[0], expected)


def test_a_16_bit_kernel_takes_no_descales(stub):
    q, ones = qkv(1, 8, 8, 2, 2)[0], torch.ones(1, 1, 1)
    tensors = (q, q, q[..., :32], 0.1)
    for call in (stub.op, op.emulated(SLUG)):
        call(*tensors)
        with pytest.raises(RuntimeError, match="expected at most 4 argument"):
            call(*tensors, q_descale=ones)


# ---- what torch knows of it ---------------------------------------------------------------------


def test_torch_knows_the_kernels_by_their_keys(stub):
    for name in (SLUG, f"{SLUG}_without_lse"):
        for key in ("CPU", "CUDA"):
            for below in ("", "_no_grad"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fagen::{name}{below}", key)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fagen::{name}", "Autograd")
    assert stub.op is getattr(torch.ops.fagen, SLUG).default
    assert stub.out_only is getattr(torch.ops.fagen, f"{SLUG}_without_lse").default


@pytest.mark.usefixtures("comparable")
@pytest.mark.parametrize("slug", [SLUG, COLUMNS, ROWS, PACKED8])
def test_opcheck_finds_nothing(stub_op, slug):
    stub = stub_op(slug)
    sizes = ((2, 70, 100), (1, 0, 5), (2, 3, 0), (1, 1, 1)) if "varlen" not in slug else ((),)
    for size in sizes:
        for call in (stub.op, stub.out_only, op.emulated(slug)):
            torch.library.opcheck(call, tuple(arguments(stub.plan, *size).values()))
    q, k, v, scale, *_ = arguments(stub.plan).values()
    if slug == SLUG:
        torch.library.opcheck(
            stub.op, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, scale)
        )
    if slug == ROWS:  # without descales
        torch.library.opcheck(stub.op, (q, k, v, scale))


# ---- gradients are refused ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_gives_the_same_and_nothing_to_differentiate(stub, mode):
    with mode():
        out, lse = stub.op(*qkv(), 0.1)
    assert not out.requires_grad and not lse.requires_grad
    assert torch.equal(out, stub.op(*qkv(), 0.1)[0])


def test_a_functional_gradient_is_refused_too(stub):
    q, k, v = qkv()
    for call in (lambda t: stub.op(t, k, v, 0.1)[0], lambda t: stub.out_only(t, k, v, 0.1)):
        with pytest.raises(ValueError, match="requires a gradient"):
            torch.func.grad(lambda t, call=call: call(t).float().sum())(q)
    # one that does not go through the op is none of its business
    torch.func.grad(lambda t: (t * stub.op(q, k, v, 0.1)[0].float().sum()).sum())(torch.ones(3))


def test_a_fake_tensor_that_needs_a_gradient_is_refused_as_well(stub):
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in qkv())
        q.requires_grad_()
        for call in (stub.op, stub.out_only):
            with pytest.raises(ValueError, match="requires a gradient"):
                call(q, k, v, 0.1)


# ---- traced -------------------------------------------------------------------------------------


@pytest.fixture
def graphs(fresh_dynamo):
    """The graphs that `compiled` has been given, after AOTAutograd."""
    return []


@pytest.fixture
def compiled(graphs):
    def compiler(graph, _):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler)
    return lambda call, **how: torch.compile(call, fullgraph=True, backend=backend, **how)


def ops_of(graph):
    return [str(node.target) for node in graph.graph.nodes if "fagen" in str(node.target)]


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_it_compiles_into_one_graph_of_its_ops_alone(any_stub, compiled, graphs, dynamic):
    out_only = any_stub.out_only

    def both(q, *more):
        return any_stub.op(q, *more)[0] + 1, out_only(q, *more)

    call = compiled(both, dynamic=dynamic)
    for sizes in ((5, 70, 210), (6, 150, 250), (6, 150, 250)):  # equal sizes would share a symbol
        tensors = tuple(arguments(any_stub.plan, *sizes).values())
        assert all(map(torch.equal, call(*tensors), both(*tensors)))
    assert len(graphs) == (1 if dynamic else 2)
    names = (
        f"fagen.{any_stub.slug}_no_grad.default",
        f"fagen.{any_stub.slug}_without_lse_no_grad.default",
    )
    assert ops_of(graphs[0]) == [*names]


def test_compiled_it_refuses_gradients_and_wrong_arguments(stub, compiled):
    call = compiled(lambda q, k, v: stub.op(q, k, v, 0.1)[0], dynamic=True)
    q, k, v = qkv()
    for tensors, message in (
        ((q, k.half(), v), "k is not bfloat16"),
        ((q[:, :, :3], k, v), r"heads = \w+ must be a multiple of kv_heads = \w+"),
        ((q.requires_grad_(), k, v), "requires a gradient"),
    ):
        with pytest.raises(Exception, match=message):
            call(*tensors)
    with torch.no_grad():
        call(q, k, v)


def test_it_exports_with_dynamic_sizes_under_its_own_name(stub):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return stub.op(q, k, v, 0.1)

    batch, queries, keys = (torch.export.Dim(name) for name in ("batch", "queries", "keys"))
    shapes = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys})
    exported = torch.export.export(Model(), qkv(), dynamic_shapes=shapes)
    assert ops_of(exported) == [f"fagen.{SLUG}.default"]
    tensors = qkv(3, 30, 200)
    assert torch.equal(exported.module()(*tensors)[0], stub.op(*tensors, 0.1)[0])


# ---- loading ------------------------------------------------------------------------------------


def test_loading_twice_or_from_many_threads_gives_the_same_op(binary):
    ops = []
    threads = [Thread(target=lambda: ops.append(op.load(binary))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ops) == 8 and all(call is ops[0] for call in ops)


def test_what_cannot_be_loaded_is_refused_with_what_to_do(stub, binary, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    unloaded = "fwd_bf16_d64_full_m64n48"
    for change, error, message in (
        (
            dict(source_hash="f" * 16),
            FagenError,
            f"{SLUG}: this process has loaded source {HASH[:12]}",
        ),
        (
            dict(binding=None, slug=unloaded),
            BuildError,
            "without its torch binding: build it again where torch",
        ),
        (dict(binding=broken, slug=unloaded), BuildError, r"broken\.so does not load"),
    ):
        with pytest.raises(error, match=message):
            op.load(Binary(**vars(binary) | change))


# ---- the C interface ----------------------------------------------------------------------------


def test_a_kernel_says_what_it_is(stub):
    plan = stub.plan
    assert info_of(stub.binary.library, SLUG) == KernelInfo(
        plan.shared_bytes, plan.threads, plan.launch_registers, SLUG, HASH
    )


def test_the_c_interface_refuses_what_it_cannot_do(stub_op):
    out, lse = torch.empty(2, 70, 4, 32, dtype=torch.bfloat16), torch.empty(2, 4, 70)
    of_outputs = "(batch = 2, seqlen_q = 70, heads = 4, 32)"
    for slug, wrong in (
        (
            SLUG,
            {
                "k is not bfloat16, which this kernel takes": dict(k=qkv()[1].half()),
                f"out has shape (2, 70, 4, 16); it must be {of_outputs}": dict(out=out[..., :16]),
                "out is not bfloat16": dict(out=out.half()),
                "out is not on the device of q": dict(out=out.to("meta")),
                "lse is not float32": dict(lse=lse.bfloat16()),
                "out is missing": dict(out=None),
                "q is missing": dict(q=None),
                "scale is missing": dict(scale=None),
                "it takes no lsee; it takes q, k, v, scale, out, lse": dict(lsee=lse),
            },
        ),
        (
            COLUMNS,
            {
                "q_descale is missing; this kernel has scales by block of 32 rows": dict(
                    q_descale=None
                ),
                "out is not bfloat16": dict(out=out.half()),
            },
        ),
    ):
        plan, library = stub_op(slug).plan, stub_op(slug).binary.library
        named = arguments(plan) | dict(out=out, lse=lse)
        for do in (c_interface.bind, c_interface.call):
            with pytest.raises(DeviceError, match="q is on cpu; the kernel runs on a Hopper GPU"):
                do(plan, library, **named)
        for message, change in wrong.items():
            with pytest.raises(ValueError) as refusal:
                c_interface.bind(plan, library, **named | change)
            assert str(refusal.value).startswith(f"fagen::{slug}: {message}")


class FakeDriver:
    """The part of a GPU's driver that a C program needs, in the memory of the CPU."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def allocate(self, content: bytes) -> int:
        memory = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8).clone()
        self.held[memory.data_ptr()] = memory
        return memory.data_ptr()

    def take(self, pointer: int, size: int) -> bytes:
        return self.held[pointer].numpy().tobytes()[:size]

    def do(self, name: str, *arguments: object) -> None:
        assert name == "cuCtxSynchronize"


@pytest.mark.parametrize(
    ("slug", "dtype"),
    [
        (SLUG, "bf16"),
        (COLUMNS, "e4m3-bf16-columns-32"),
        (ROWS, "e4m3-fp16-rows-0"),
        ("fwd_fp16_d64v32_window_m64n64", "fp16"),
    ],
)
def test_the_c_program_of_the_gpu_tests_passes_what_the_binding_does(stub_op, slug, dtype):
    stub = stub_op(slug)
    library = ctypes.CDLL(str(stub.binary.library))
    library[f"fagen_{slug}_message"].restype = ctypes.c_char_p
    with pytest.raises(SystemExit, match="outputs are no mean"):  # the stub writes none
        c_caller.call(FakeDriver(), library, slug, dtype, True, 64, 32, 2, 70, 100, 4, 2)
    library.noted_call.restype = ctypes.c_void_p
    struct = c_interface.struct_of(stub.plan.signature)
    noted = fields_of(struct.from_buffer_copy(struct.from_address(library.noted_call())))
    sizes = dict(batch=2, heads=4, kv_heads=2, seqlen_q=70, seqlen_k=100)
    tensors = stub.plan.signature.tensors
    named = {
        tensor.name: torch.ones([dim.extent.at(sizes) for dim in tensor.dims]).to(
            getattr(torch, tensor.dtype.torch)
        )
        for tensor in tensors
        if tensor.present
    }
    named["scale"] = 64**-0.5
    if stub.plan.mask.given:
        named |= {"window_left": 100 // 3, "window_right": 0}
    own = fields_of(c_interface.arguments(stub.plan, named, checked(stub.plan, named)))
    pointers = {tensor.name for tensor in tensors}
    for name, value in own.items():
        if name in pointers:
            assert (noted[name] is None) == (value is None)
        else:
            assert noted[name] == value


# ---- a kernel that was really compiled ----------------------------------------------------------


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_fp16_d128_causal_m128n128",  # one of the spread that the build's tests compile
        "fwd_e4m3_d128_full_m192n96_s3_sblock",  # transposed V, three stages
        "fwd_e4m3_d128_causal_m128n128_vrows_sblock",  # all four warps of the producer have work
    ],
)
def test_a_compiled_kernel_loads_and_is_what_was_planned(built, slug):
    compiled = built(slug)
    if "fp16" in slug:
        q = torch.randn(1, 150, 4, 128).half()
        tensors = (q, q[:, :130, :2], q[:, :130, 2:], 0.1)
        expected = emulate(compiled.plan, *tensors)
    else:
        tensors = tuple(arguments(compiled.plan).values())
        expected = emulate_fp8(compiled.plan, *tensors)
    assert all(map(torch.equal, op.load(compiled.binary)(*tensors), expected))
    info = info_of(compiled.binary.library, slug)
    assert (info.slug, info.source_hash) == (slug, compiled.source.hash)
    assert (info.shared_bytes, info.threads) == (compiled.plan.shared_bytes, compiled.plan.threads)
