"""The op, with its real binding and a C function in the kernel's place that only notes its call."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.build import Binary
from fagen.errors import BuildError, DeviceError, FagenError
from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.plan import Plan
from fagen.runtime import c_interface, op
from fagen.runtime.backward import _Eager
from fagen.runtime.c_interface import KernelInfo, kernel_info
from fagen.runtime.checks import allocated, checked
from tests.gpu import c_caller
from tests.op_helpers import COLUMNS, ROWS, SLUG, qkv
from tests.stubs import HASH, StubOp, fields_of


@pytest.fixture(scope="module")
def stub(stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op(SLUG)


@pytest.fixture(scope="module")
def the_plan(stub: StubOp) -> Plan:
    return stub.plan


@pytest.fixture(scope="module")
def binary(stub: StubOp) -> Binary:
    return stub.binary


@pytest.fixture(scope="module")
def attend(stub: StubOp) -> op.Op:
    return stub.op


@pytest.fixture(scope="module")
def alone(stub: StubOp) -> op.Op:
    return stub.alone


# ---- what it computes ---------------------------------------------------------------------------


def test_on_cpu_tensors_the_op_is_the_emulated_schedule(attend: op.Op, the_plan: Plan) -> None:
    q, k, v = qkv()
    out, lse = attend(q, k, v, 0.1)
    expected, expected_lse = emulate(the_plan, q, k, v, 0.1)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert out.shape == (2, 70, 4, 32) and out.is_contiguous() and out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 70) and lse.is_contiguous() and lse.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_gives_the_same_and_nothing_to_differentiate(
    attend: op.Op, mode: Callable[[], object]
) -> None:
    with mode():  # type: ignore[attr-defined]
        q, k, v = qkv()
        out, lse = attend(q, k, v, 0.1)
    assert not out.requires_grad and not lse.requires_grad
    assert torch.equal(out, attend(*qkv(), 0.1)[0])


def test_torch_knows_the_kernels_by_their_keys(attend: op.Op, alone: op.Op) -> None:
    for name in (SLUG, f"{SLUG}_without_lse"):
        for key in ("CPU", "CUDA"):
            for below in ("", "_no_grad"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fagen::{name}{below}", key)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fagen::{name}", "Autograd")
    assert attend is getattr(torch.ops.fagen, SLUG).default
    assert alone is getattr(torch.ops.fagen, f"{SLUG}_without_lse").default


def test_without_a_log_sum_exp_out_is_the_same(attend: op.Op, alone: op.Op) -> None:
    for arguments in (qkv(), qkv(1, 0, 5), qkv(2, 3, 0)):
        out = alone(*arguments, 0.1)
        assert torch.equal(out, attend(*arguments, 0.1)[0])
        assert out.is_contiguous() and not out.requires_grad


def test_what_is_no_kernel_gives_its_first_output_alone() -> None:
    assert op.alone(lambda *given: (given[2], given[3]))(0, 1, 2, 3) == 2


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(3))
def test_a_call_that_needs_a_gradient_is_refused(attend: op.Op, alone: op.Op, which: int) -> None:
    leaf = [*qkv()]
    leaf[which].requires_grad_()
    inner = [*qkv()]
    inner[which] = leaf[which] * 1
    for arguments in (leaf, inner):
        for call in (attend, alone):
            with pytest.raises(ValueError, match=f"{SLUG}: q, k or v requires a gradient, and th"):
                call(*arguments, 0.1)
        with torch.no_grad():
            assert not attend(*arguments, 0.1)[0].requires_grad
            assert not alone(*arguments, 0.1).requires_grad
    attend(*(t.detach() for t in inner), 0.1)


def test_a_functional_gradient_is_refused_too(attend: op.Op, alone: op.Op) -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="requires a gradient"):
        torch.func.grad(lambda t: attend(t, k, v, 0.1)[0].float().sum())(q)
    with pytest.raises(ValueError, match="requires a gradient"):
        torch.func.grad(lambda t: alone(t, k, v, 0.1).float().sum())(q)
    # one that does not go through the op is none of its business
    torch.func.grad(lambda t: (t * attend(q, k, v, 0.1)[0].float().sum()).sum())(torch.ones(3))


def test_a_fake_tensor_that_needs_a_gradient_is_refused_as_well(
    attend: op.Op, alone: op.Op
) -> None:
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in qkv())
        with pytest.raises(ValueError, match="requires a gradient"):
            attend(q.requires_grad_(), k, v, 0.1)
        with pytest.raises(ValueError, match="requires a gradient"):
            alone(q, k, v, 0.1)


def test_who_differentiates_a_call_computes_it_below_the_refusal(attend: op.Op) -> None:
    q, k, v = qkv()
    kernel = op.kernel_of(SLUG, "cuda")
    assert kernel.below is not attend
    expected = attend(q, k, v, 0.1)
    found = _Eager.apply(kernel, kernel, False, q.requires_grad_(), k, v, 0.1)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad and not theirs.requires_grad


# ---- torch's machinery --------------------------------------------------------------------------


def test_opcheck_finds_nothing(attend: op.Op, alone: op.Op) -> None:
    for arguments in (qkv(), qkv(1, 0, 5), qkv(2, 3, 0), qkv(1, 1, 1, 1, 1)):
        torch.library.opcheck(attend, (*arguments, 0.1))
        torch.library.opcheck(alone, (*arguments, 0.1))
    q, k, v = qkv()
    torch.library.opcheck(attend, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, 0.1))
    torch.library.opcheck(op.emulated(SLUG), (q, k, v, 0.1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(attend: op.Op, dynamic: bool) -> None:
    torch._dynamo.reset()
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(graph)
        return graph.forward

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k, v, 0.1)[0] + 1

    compiled = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend=backend)
    for shape in ((3, 70, 100), (5, 90, 50), (5, 90, 50)):  # equal sizes would share a symbol
        q, k, v = qkv(*shape)
        assert torch.equal(compiled(q, k, v), twice(q, k, v))
    assert len(seen) == (1 if dynamic else 2)


@contextmanager
def graphs_of_aot() -> Iterator[tuple[Callable[..., object], list[torch.fx.GraphModule]]]:
    from torch._dynamo.backends.common import aot_autograd

    seen: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    yield aot_autograd(fw_compiler=compiler), seen
    torch._dynamo.reset()


def test_functionalised_with_symbolic_shapes_it_is_one_call(attend: op.Op, alone: op.Op) -> None:
    with graphs_of_aot() as (backend, seen):
        compiled = torch.compile(
            lambda q, k, v: attend(q, k, v, 0.1), fullgraph=True, dynamic=True, backend=backend
        )
        q, k, v = qkv()
        assert torch.equal(compiled(q, k, v)[0], attend(q, k, v, 0.1)[0])
    calls = [str(node.target) for node in seen[0].graph.nodes if "fagen" in str(node.target)]
    assert calls == [f"fagen.{SLUG}_no_grad.default"]
    with graphs_of_aot() as (backend, seen):
        compiled = torch.compile(
            lambda q, k, v: alone(q, k, v, 0.1), fullgraph=True, dynamic=True, backend=backend
        )
        assert torch.equal(compiled(q, k, v), alone(q, k, v, 0.1))
    calls = [str(node.target) for node in seen[0].graph.nodes if "fagen" in str(node.target)]
    assert calls == [f"fagen.{SLUG}_without_lse_no_grad.default"]


def test_a_gradient_is_refused_when_compiled(attend: op.Op) -> None:
    with graphs_of_aot() as (backend, _):
        compiled = torch.compile(
            lambda q, k, v: attend(q, k, v, 0.1)[0], fullgraph=True, backend=backend
        )
        q, k, v = qkv()
        with pytest.raises(Exception, match="requires a gradient"):
            compiled(q.requires_grad_(), k, v)
        with torch.no_grad():
            compiled(q, k, v)


def test_a_wrong_argument_is_named_when_compiled(attend: op.Op) -> None:
    with graphs_of_aot() as (backend, _):
        compiled = torch.compile(
            lambda q, k, v: attend(q, k, v, 0.1)[0], fullgraph=True, dynamic=True, backend=backend
        )
        q, k, v = qkv()
        with pytest.raises(Exception, match="k is not bfloat16"):
            compiled(q, k.half(), v)
        with pytest.raises(Exception, match=r"heads = \w+ must be a multiple of kv_heads = \w+"):
            compiled(q[:, :, :3], k, v)


def test_it_exports_with_dynamic_sizes_under_its_own_name(attend: op.Op) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return attend(q, k, v, 0.1)

    batch, queries, keys = (torch.export.Dim(name) for name in ("batch", "queries", "keys"))
    shapes = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys})
    exported = torch.export.export(Model(), qkv(), dynamic_shapes=shapes)
    calls = [str(n.target) for n in exported.graph.nodes if "fagen" in str(n.target)]
    assert calls == [f"fagen.{SLUG}.default"]
    arguments = qkv(3, 30, 200)
    assert torch.equal(exported.module()(*arguments)[0], attend(*arguments, 0.1)[0])


# ---- loading ------------------------------------------------------------------------------------


def test_loading_twice_or_from_many_threads_gives_the_same_op(binary: Binary) -> None:
    found: list[op.Op] = []
    threads = [Thread(target=lambda: found.append(op.load(binary))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(one is found[0] for one in found)


def test_another_source_under_a_loaded_slug_is_refused(attend: op.Op, binary: Binary) -> None:
    other = Binary(**{**vars(binary), "source_hash": "f" * 16})
    with pytest.raises(FagenError, match=f"{SLUG}: this process has loaded source 0123456789ab"):
        op.load(other)


def test_a_binary_without_a_binding_says_what_to_do(binary: Binary) -> None:
    unbound = Binary(**{**vars(binary), "binding": None, "slug": "fwd_bf16_d64_full_m64n48"})
    with pytest.raises(BuildError, match="without its torch binding: build it again where torch"):
        op.load(unbound)


def test_a_binding_that_is_no_library_says_so(binary: Binary, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    unbound = Binary(**{**vars(binary), "binding": broken, "slug": "fwd_bf16_d64_full_m64n48"})
    with pytest.raises(BuildError, match=r"broken\.so does not load"):
        op.load(unbound)


# ---- the C interface ----------------------------------------------------------------------------


def test_the_binding_and_ctypes_pass_the_kernel_the_same_arguments(stub: StubOp) -> None:
    packed = torch.randn(2, 70, 12, 64).bfloat16()
    q, k, v = packed[:, :, :4], packed[:, :50, 4:6], packed[:, :50, 8:10, :32]
    named: dict[str, Any] = dict(q=q, k=k, v=v, scale=0.125)
    sizes = checked(stub.plan, named)
    out, lse = allocated(stub.plan, named, sizes)
    named |= dict(out=out, lse=lse)
    noted = stub.noted(**named)
    assert fields_of(noted) == fields_of(c_interface.arguments(stub.plan, named, sizes))
    assert (noted.q, noted.lse) == (q.data_ptr(), lse.data_ptr())
    assert (noted.q_stride_batch, noted.q_stride_seq, noted.q_stride_head) == (53760, 768, 64)
    assert (noted.out_stride_batch, noted.out_stride_seq, noted.out_stride_head) == (8960, 128, 32)
    assert (noted.lse_stride_batch, noted.lse_stride_head) == (280, 70)
    found = (noted.batch, noted.heads, noted.kv_heads, noted.seqlen_q, noted.seqlen_k)
    assert found == (2, 4, 2, 70, 50) and noted.scale == 0.125
    # what kernels of e4m3 take besides is there, and null
    assert (noted.q_descale, noted.k_descale, noted.v_descale) == (None, None, None)


def test_without_a_log_sum_exp_its_pointer_is_null(stub: StubOp) -> None:
    q, k, v = qkv()
    named: dict[str, Any] = dict(q=q, k=k, v=v, scale=0.125)
    sizes = checked(stub.plan, named)
    out, _ = allocated(stub.plan, named, sizes)
    noted = stub.noted(**named, out=out, lse=None)
    assert fields_of(noted) == fields_of(
        c_interface.arguments(stub.plan, {**named, "out": out}, sizes)
    )
    assert noted.lse is None and noted.out == out.data_ptr()


def test_a_kernel_says_what_it_is(binary: Binary, the_plan: Plan) -> None:
    assert kernel_info(binary) == KernelInfo(
        the_plan.shared_bytes, the_plan.threads, the_plan.launch_registers, SLUG, HASH
    )


def test_the_c_interface_refuses_what_it_cannot_do(the_plan: Plan, binary: Binary) -> None:
    q, k, v = qkv()
    out, lse = torch.empty(2, 70, 4, 32, dtype=torch.bfloat16), torch.empty(2, 4, 70)
    right: dict[str, Any] = dict(q=q, k=k, v=v, scale=0.1, out=out, lse=lse)
    for do in (c_interface.bind, c_interface.call):
        with pytest.raises(DeviceError, match="q is on cpu; the kernel runs on a Hopper GPU"):
            do(the_plan, binary.library, **right)
    wrong: dict[str, dict[str, Any]] = {
        "k is not bfloat16, which this kernel takes": dict(k=k.half()),
        r"out has shape \(2, 70, 4, 16\); it must be \(batch = 2, seqlen_q = 70, heads = 4, 32\)": (
            dict(out=out[..., :16])
        ),
        "out is not bfloat16": dict(out=out.half()),
        "out is not on the device of q": dict(out=out.to("meta")),
        "lse is not float32": dict(lse=lse.bfloat16()),
        "out is missing": dict(out=None),
        "q is missing": dict(q=None),
        "scale is missing": dict(scale=None),
        "it takes no lsee; it takes q, k, v, scale, out, lse": dict(lsee=lse),
    }
    for said, change in wrong.items():
        with pytest.raises(ValueError, match=f"^fagen::{SLUG}: {said}"):
            c_interface.bind(the_plan, binary.library, **right | change)


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
    [(SLUG, "bf16"), (COLUMNS, "e4m3-bf16-columns-32"), (ROWS, "e4m3-fp16-rows-0")],
)
def test_the_c_program_of_the_gpu_tests_passes_what_the_binding_does(
    stub_op: Callable[[str], StubOp], slug: str, dtype: str
) -> None:
    one = stub_op(slug)
    library = ctypes.CDLL(str(one.binary.library))
    library[f"fagen_{slug}_message"].restype = ctypes.c_char_p
    with pytest.raises(SystemExit, match="outputs are no mean"):  # the stub writes none
        c_caller.call(FakeDriver(), library, slug, dtype, 64, 32, 2, 70, 100, 4, 2)
    library.noted_call.restype = ctypes.c_void_p
    struct = c_interface.struct_of(one.plan.signature)
    noted = fields_of(struct.from_buffer_copy(struct.from_address(library.noted_call())))
    sizes = dict(batch=2, heads=4, kv_heads=2, seqlen_q=70, seqlen_k=100)
    named: dict[str, Any] = {
        tensor.name: torch.ones([dim.extent.at(sizes) for dim in tensor.dims]).to(
            getattr(torch, tensor.dtype.torch)
        )
        for tensor in one.plan.signature.tensors
        if tensor.present
    }
    named["scale"] = 64**-0.5
    own = fields_of(c_interface.arguments(one.plan, named, checked(one.plan, named)))
    pointers = {tensor.name for tensor in one.plan.signature.tensors}
    for name, value in own.items():
        assert (
            (noted[name] is None) == (value is None) if name in pointers else noted[name] == value
        )


# ---- a kernel that was really compiled ----------------------------------------------------------


COMPILED = "fwd_fp16_d128_causal_m128n128"  # one of the spread that the build's tests compile


@pytest.fixture(scope="module")
def compiled(built: Callable[[str], Any]) -> Any:
    return built(COMPILED)


def test_a_compiled_kernel_loads_and_is_what_was_planned(compiled: Any) -> None:
    attend = op.load(compiled.binary)
    q = torch.randn(1, 150, 4, 128).half()
    tensors = q, q[:, :130, :2], q[:, :130, 2:]
    out, lse = attend(*tensors, 0.1)
    expected = emulate(compiled.plan, *tensors, 0.1)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    info = kernel_info(compiled.binary)
    assert (info.slug, info.source_hash) == (COMPILED, compiled.source.hash)
    assert (info.shared_bytes, info.threads) == (compiled.plan.shared_bytes, compiled.plan.threads)
