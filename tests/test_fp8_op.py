"""The op of an e4m3 kernel: its real binding, its descales, both layouts of V."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.errors import DeviceError
from fagen.kinds.forward.emulate import emulate_fp8
from fagen.kinds.forward.reference import reference
from fagen.kinds.forward.verify.fp8 import LSE_TOLERANCE
from fagen.runtime import c_interface, op
from fagen.runtime.c_interface import kernel_info, struct_of
from fagen.runtime.checks import allocated, checked
from tests.conftest import Built
from tests.op_helpers import COLUMNS, ROWS, SLUG, arguments, quantised
from tests.stubs import StubOp, fields_of
from tests.tensors import normal


@pytest.fixture(params=[COLUMNS, ROWS])
def made(request: pytest.FixtureRequest, stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op(request.param)


@pytest.fixture
def columns(stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op(COLUMNS)


@pytest.fixture
def rows(stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op(ROWS)


# ---- what it computes ---------------------------------------------------------------------------


def test_on_cpu_tensors_the_op_is_the_emulated_schedule(made: StubOp) -> None:
    given = arguments(made.plan)
    out, lse = made.op(*given)
    expected, expected_lse = emulate_fp8(made.plan, *given)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(made.alone(*given), expected)
    dtype = getattr(torch, made.plan.out_dtype.torch)
    assert out.shape == (2, 70, 4, 32) and out.is_contiguous() and out.dtype == dtype
    assert lse.shape == (2, 4, 70) and lse.is_contiguous() and lse.dtype == torch.float32


def test_what_it_computes_is_attention_of_what_the_bytes_stand_for(made: StubOp) -> None:
    of = made.plan
    given = arguments(of)
    out, lse = made.op(*given)
    q, k, v = quantised(of, 2, 70, 100)
    assert given.v_mean is not None and given.k_mean is not None
    keys = k.real(of.scale_rows) + given.k_mean[:, None]
    values = v.values.float() * v.descale[:, None] + given.v_mean[:, None]
    real = (q.real(of.scale_rows), keys, values)
    exact, exact_lse = reference(*real, mask=of.mask.name, scale=0.1)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=LSE_TOLERANCE)
    error = (out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.03  # P's rounding to three bits of mantissa


def test_the_ops_have_the_signatures_that_their_bindings_call(made: StubOp) -> None:
    names = ("q_descale", "k_descale", "v_descale", "v_mean", "k_mean")
    descales = "".join(f", Tensor? {name}=None" for name in names)
    for end, outputs in (("", "(Tensor out, Tensor lse)"), ("_without_lse", "Tensor out")):
        for name in (f"{made.plan.slug}{end}", f"{made.plan.slug}{end}_no_grad"):
            schema = str(getattr(torch.ops.fagen, name).default._schema)
            assert schema == (
                f"fagen::{name}(Tensor q, Tensor k, Tensor v, float scale{descales}) -> {outputs}"
            )


def test_without_descales_a_number_is_its_byte(rows: StubOp) -> None:
    given = arguments(rows.plan)
    one = torch.ones(1, 1, 1)
    without = rows.op(given.q, given.k, given.v, 0.1)[0]
    assert torch.equal(without, rows.op(given.q, given.k, given.v, 0.1, one, one, one)[0])
    assert torch.equal(without, rows.op(given.q, given.k, given.v, 0.1, None, one)[0])
    named = rows.op(given.q, given.k, given.v, 0.1, v_descale=one * 2)[0]
    torch.testing.assert_close(named, without * 2)


def test_a_descale_for_all_is_one_for_each(made: StubOp) -> None:
    given = arguments(made.plan)
    spread, small = [], []
    for descale in (given.q_descale, given.k_descale, given.v_descale):
        assert descale is not None
        small.append(descale[:1, :1])
        spread.append(descale[:1, :1].expand(descale.shape).contiguous())
    expected = made.op(given.q, given.k, given.v, 0.1, *spread)[0]
    assert torch.equal(made.op(given.q, given.k, given.v, 0.1, *small)[0], expected)
    strided = [descale[:1, :1].expand(descale.shape) for descale in spread]  # strides of 0
    assert torch.equal(made.op(given.q, given.k, given.v, 0.1, *strided)[0], expected)


def test_no_queries_and_no_keys_are_no_trouble(made: StubOp) -> None:
    assert made.op(*arguments(made.plan, seqlen_q=0))[0].shape == (2, 0, 4, 32)
    out, lse = made.op(*arguments(made.plan, seqlen_k=0))
    assert (out == 0).all() and (lse == -math.inf).all()


# ---- refusals -----------------------------------------------------------------------------------


def test_a_descale_on_another_device_is_refused(rows: StubOp) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = dict(vars(arguments(rows.plan)), v_descale=torch.empty(2, 2, 32, device="meta"))
        with pytest.raises(ValueError, match=r"v_descale is not on the device of q; v_descale\.to"):
            checked(rows.plan, given, have_data=False)


def test_a_16_bit_kernel_takes_no_descales(stub_op: Callable[[str], StubOp]) -> None:
    q, one = normal(1, 8, 1, 64).bfloat16(), torch.ones(1, 1, 1)
    given = (q, q, q[..., :32], 0.1)
    for call in (stub_op(SLUG).op, op.emulated(SLUG)):
        call(*given)
        with pytest.raises(RuntimeError, match="expected at most 4 argument"):
            call(*given, q_descale=one)


@pytest.mark.parametrize("name", ["q", "k", "v", "q_descale", "k_descale", "v_descale", "v_mean"])
def test_a_call_that_needs_a_gradient_is_refused(made: StubOp, name: str) -> None:
    given = arguments(made.plan)
    getattr(given, name).requires_grad_()
    with pytest.raises(ValueError, match=r"v_descale, v_mean or k_mean requires a gradient"):
        made.op(*given)
    with torch.no_grad():
        assert not made.op(*given)[0].requires_grad


# ---- torch's machinery --------------------------------------------------------------------------


@pytest.mark.usefixtures("comparable")
def test_opcheck_finds_nothing(made: StubOp) -> None:
    for shape in ((2, 70, 100), (1, 0, 5), (2, 3, 0), (1, 1, 1)):
        given = arguments(made.plan, *shape)
        torch.library.opcheck(made.op, tuple(given))
        torch.library.opcheck(made.alone, tuple(given))
        torch.library.opcheck(op.emulated(made.slug), tuple(given))


@pytest.mark.usefixtures("comparable")
def test_opcheck_finds_nothing_without_descales(rows: StubOp) -> None:
    given = arguments(rows.plan)
    torch.library.opcheck(rows.op, (given.q, given.k, given.v, 0.1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(made: StubOp, dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def more(*given: object) -> Tensor:
        return made.op(*given)[0] + 1

    compiled = torch.compile(more, fullgraph=True, dynamic=dynamic, backend=backend)
    for shape in ((5, 70, 210), (6, 150, 250), (6, 150, 250)):  # equal sizes would share a symbol
        given = tuple(arguments(made.plan, *shape))
        assert torch.equal(compiled(*given), more(*given))
    assert len(graphs) == (1 if dynamic else 2)
    torch._dynamo.reset()


# ---- the C interface ----------------------------------------------------------------------------


def test_the_binding_and_ctypes_pass_the_kernel_the_same_arguments(
    made: StubOp, stub_op: Callable[[str], StubOp]
) -> None:
    of = made.plan
    # kernels of one kind are called by one struct
    assert struct_of(of.signature)._fields_ == struct_of(stub_op(SLUG).plan.signature)._fields_
    given = arguments(of)
    assert given.q_descale is not None and given.k_descale is not None
    shared = replace(given, q_descale=given.q_descale[:, :1], k_descale=given.k_descale[:1])
    for case in (given, shared):
        named = dict(vars(case))
        sizes = checked(of, named)
        out, lse = allocated(of, named, sizes)
        named |= dict(out=out, lse=lse)
        noted = made.noted(**named)
        assert fields_of(noted) == fields_of(c_interface.arguments(of, named, sizes))
        assert noted.v_descale == named["v_descale"].data_ptr()
    # of the second case: q's shared by heads, k's by batches; blocks are contiguous
    blocks = (3, 4) if of.scales_by_block else (1, 1)
    assert (noted.q_descale_stride_batch, noted.q_descale_stride_head) == (4 * blocks[0], 0)
    assert (noted.k_descale_stride_batch, noted.k_descale_stride_head) == (0, blocks[1])
    of_v = (
        noted.v_descale_stride_batch,
        noted.v_descale_stride_head,
        noted.v_descale_stride_column,
    )
    assert of_v == (64, 32, 1)
    assert (noted.k_mean_stride_batch, noted.k_mean_stride_head) == (0, 64)
    # a row of the transposed V is one of its columns; keys and heads have changed places
    strides = (noted.v_stride_batch, noted.v_stride_seq, noted.v_stride_head)
    assert strides == ((6400, 64, 32) if of.v_rows else (7168, 112, 3584))
    assert (noted.seqlen_q, noted.seqlen_k) == (70, 100)


def test_descales_that_are_not_given_are_null(rows: StubOp) -> None:
    given = arguments(rows.plan)
    named: dict[str, Any] = dict(q=given.q, k=given.k, v=given.v, scale=given.scale)
    sizes = checked(rows.plan, named)
    out, lse = allocated(rows.plan, named, sizes)
    named |= dict(out=out, lse=lse)
    names = ("q_descale", "k_descale", "v_descale", "v_mean", "k_mean")
    noted = rows.noted(**named, **dict.fromkeys(names))
    assert fields_of(noted) == fields_of(c_interface.arguments(rows.plan, named, sizes))
    assert [getattr(noted, name) for name in names] == [None] * 5


def test_the_c_interface_refuses_what_it_cannot_do(columns: StubOp) -> None:
    named = dict(vars(arguments(columns.plan)))
    out, lse = torch.empty(2, 70, 4, 32, dtype=torch.bfloat16), torch.empty(2, 4, 70)
    named |= dict(out=out, lse=lse)
    with pytest.raises(DeviceError, match="q is on cpu; the kernel runs on a Hopper GPU"):
        c_interface.bind(columns.plan, columns.binary.library, **named)
    for change, said in (
        (dict(q_descale=None), "q_descale is missing; this kernel has scales by block of 32 rows"),
        (dict(out=out.half()), "out is not bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            c_interface.bind(columns.plan, columns.binary.library, **named | change)


# ---- a kernel that was really compiled ----------------------------------------------------------


COMPILED = (
    "fwd_e4m3_d128_full_m192n96_s3_sblock",  # transposed V, three stages
    "fwd_e4m3_d128_causal_m128n128_vrows_sblock",  # all four warps of the producer have work
)


@pytest.mark.parametrize("slug", COMPILED)
def test_a_compiled_kernel_loads_and_is_what_was_planned(
    built: Callable[[str], Built], slug: str
) -> None:
    compiled = built(slug)
    attend, given = op.load(compiled.binary), arguments(compiled.plan)
    expected = emulate_fp8(compiled.plan, *given)
    for found, wanted in zip(attend(*given), expected, strict=True):
        assert torch.equal(found, wanted)
    info = kernel_info(compiled.binary)
    assert (info.slug, info.source_hash) == (slug, compiled.source.hash)
    assert (info.shared_bytes, info.threads) == (compiled.plan.shared_bytes, compiled.plan.threads)
