"""The op of an e4m3 kernel: its real binding, its descales, V by rows and by columns."""

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.runtime import op
from fagen.build import Binary
from fagen.emulator import emulate_fp8, reference
from fagen.errors import DeviceError
from fagen.kinds.forward.plan import Plan, plan
from fagen.e4m3 import E4M3, Quantized, by_columns, by_rows, rounded
from fagen.schedule import Schedule
from tests.conftest import Built
from tests.stubs import stub_binary, stub_library

# no schedule of the package has these slugs, so no other test loads a kernel of that name
COLUMNS = "fwd_e4m3_d64v32_causal_m64n64_sblock_sr32"
ROWS = "fwd_e4m3_d64v32_full_m64n64_ofp16_vrows"


@dataclass(frozen=True)
class Made:
    plan: Plan
    binary: Binary
    attend: op.Op


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def made(slug: str) -> Made:
        if slug not in known:
            planned = plan(Schedule.from_slug(slug))
            binary = stub_binary(planned, tmp_path_factory.mktemp("binary"))
            known[slug] = Made(planned, binary, op.load(binary))
        return known[slug]

    return made


@pytest.fixture(params=[COLUMNS, ROWS])
def made(request: pytest.FixtureRequest, make: Callable[[str], Made]) -> Made:
    return make(request.param)


@pytest.fixture
def columns(make: Callable[[str], Made]) -> Made:
    return make(COLUMNS)


@pytest.fixture
def rows(make: Callable[[str], Made]) -> Made:
    return make(ROWS)


Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Arguments:
    """Of a call: what it is made of, in the order of the op."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None

    def __iter__(self) -> Iterator[object]:
        return iter(vars(self).values())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(of: Plan, batch: int, seqlen_q: int, seqlen_k: int) -> list[Quantized]:
    made = []
    shapes = ((seqlen_q, 4, of.head_dim), (seqlen_k, 2, of.head_dim), (seqlen_k, 2, of.head_dim_v))
    for seed, (length, heads, width) in enumerate(shapes):
        x = normal(batch, length, heads, width, seed=seed)
        x = x * torch.arange(1, heads + 1)[:, None]  # no two heads have one scale
        made.append(rounded(x, of.schedule.fp8.scales, of.scale_rows))
    return made


def arguments(of: Plan, batch: int = 2, seqlen_q: int = 70, seqlen_k: int = 100) -> Arguments:
    q, k, v = quantised(of, batch, seqlen_q, seqlen_k)
    values = v.values if of.v_rows else by_columns(v.values)
    return Arguments(q.values, k.values, values, 0.1, q.descale, k.descale, v.descale)


# ---- what it computes ---------------------------------------------------------------------------


def test_on_cpu_tensors_the_op_is_the_emulated_schedule(made: Made) -> None:
    given = arguments(made.plan)
    out, lse = made.attend(*given)
    expected, expected_lse = emulate_fp8(made.plan, *given)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(op.alone(made.attend)(*given), expected)
    dtype = getattr(torch, made.plan.out_dtype.torch)
    assert out.shape == (2, 70, 4, 32) and out.is_contiguous() and out.dtype == dtype
    assert lse.shape == (2, 4, 70) and lse.is_contiguous() and lse.dtype == torch.float32


def test_what_it_computes_is_attention_of_what_the_bytes_stand_for(made: Made) -> None:
    of = made.plan
    out, lse = made.attend(*arguments(of))
    real = (x.real(of.scale_rows) for x in quantised(of, 2, 70, 100))
    exact, exact_lse = reference(*real, causal=of.mask.causal, scale=0.1)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
    error = (out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.03  # P's rounding to three bits of mantissa


def test_the_ops_have_the_signatures_that_their_bindings_call(made: Made) -> None:
    descales = ", Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
    for end, outputs in (("", "(Tensor out, Tensor lse)"), ("_without_lse", "Tensor out")):
        for name in (f"{made.plan.slug}{end}", f"{made.plan.slug}{end}_no_grad"):
            schema = str(getattr(torch.ops.fagen, name).default._schema)
            assert schema == (
                f"fagen::{name}(Tensor q, Tensor k, Tensor v, float scale{descales}) -> {outputs}"
            )


def test_without_descales_a_number_is_its_byte(rows: Made) -> None:
    given = arguments(rows.plan)
    one = torch.ones(1, 1, 1)
    without = rows.attend(given.q, given.k, given.v, 0.1)[0]
    assert torch.equal(without, rows.attend(given.q, given.k, given.v, 0.1, one, one, one)[0])
    assert torch.equal(without, rows.attend(given.q, given.k, given.v, 0.1, None, one)[0])
    named = rows.attend(given.q, given.k, given.v, 0.1, v_descale=one * 2)[0]
    torch.testing.assert_close(named, without * 2)


def test_a_descale_for_all_is_one_for_each(made: Made) -> None:
    given = arguments(made.plan)
    spread, small = [], []
    for descale in (given.q_descale, given.k_descale, given.v_descale):
        assert descale is not None
        small.append(descale[:1, :1])
        spread.append(descale[:1, :1].expand(descale.shape).contiguous())
    expected = made.attend(given.q, given.k, given.v, 0.1, *spread)[0]
    assert torch.equal(made.attend(given.q, given.k, given.v, 0.1, *small)[0], expected)
    strided = [descale[:1, :1].expand(descale.shape) for descale in spread]  # strides of 0
    assert torch.equal(made.attend(given.q, given.k, given.v, 0.1, *strided)[0], expected)


def test_no_queries_and_no_keys_are_no_trouble(made: Made) -> None:
    assert made.attend(*arguments(made.plan, seqlen_q=0))[0].shape == (2, 0, 4, 32)
    out, lse = made.attend(*arguments(made.plan, seqlen_k=0))
    assert (out == 0).all() and (lse == -math.inf).all()


# ---- refusals -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused, made from a good one, and what must be said of it."""

    name: str
    slug: str
    change: Callable[[Arguments], dict[str, object]]
    said: str
    needs_data: bool = False


def strided(tensor: Tensor, *strides: int) -> Tensor:
    room = tensor.new_zeros(sum(s * n for s, n in zip(strides, tensor.shape, strict=True)) + 1)
    return room.as_strided(tensor.shape, strides)


WRONG = [
    Wrong(
        "q_dtype",
        ROWS,
        lambda a: dict(q=a.q.half()),
        "q is not float8_e4m3fn, which this kernel takes; fagen.quantize(q) makes it so, with its ",
    ),
    Wrong("k_dtype", COLUMNS, lambda a: dict(k=a.k.to(torch.float8_e5m2)), "k is not float8_e4m3f"),
    Wrong(
        "q_columns",
        COLUMNS,
        lambda a: dict(q=a.q[..., :48]),
        "q has shape (2, 70, 4, 48); this kernel takes (batch, seqlen_q, heads, 64)",
    ),
    Wrong(
        "k_stride",
        ROWS,
        lambda a: dict(k=strided(a.k, 14_400, 144, 68, 1)),
        "k has stride 68 in dimension 2, which must be a multiple of 16 elements (16 bytes); ",
    ),
    Wrong(
        "k_address",
        ROWS,
        lambda a: dict(k=torch.zeros(a.k.numel() + 1).to(a.k.dtype)[1:].view(a.k.shape)),
        "k does not begin at a multiple of 16 bytes; k.clone() does",
        needs_data=True,
    ),
    Wrong(
        "v_by_rows",
        COLUMNS,
        lambda a: dict(v=by_rows(a.v, 100).contiguous()),
        "v has shape (2, 100, 2, 32); this kernel takes (batch, kv_heads, 32, keys)",
    ),
    Wrong(
        "v_rank",
        COLUMNS,
        lambda a: dict(v=a.v[0]),
        "v has shape (2, 32, 112); this kernel takes (batch, kv_heads, 32, keys)",
    ),
    Wrong(
        "v_wide",
        COLUMNS,
        lambda a: dict(v=torch.cat([a.v, a.v], 2)),
        "v has shape (2, 2, 64, 112); this kernel takes (batch, kv_heads, 32, keys)",
    ),
    Wrong(
        "v_not_filled_up",
        COLUMNS,
        lambda a: dict(v=strided(a.v[..., :100], 7168, 3584, 112, 1)),
        "v has shape (2, 2, 32, 100), but k has (2, 100, 2, 64); by columns v must be "
        "(2, 2, 32, 112): its keys are filled up to a multiple of 16",
    ),
    Wrong(
        "v_too_long",
        COLUMNS,
        lambda a: dict(v=torch.cat([a.v, a.v[..., :16]], 3)),
        "v has shape (2, 2, 32, 128), but k has (2, 100, 2, 64); by columns v must be ",
    ),
    Wrong(
        "v_heads",
        COLUMNS,
        lambda a: dict(v=a.v[:, :1]),
        "v has shape (2, 1, 32, 112), but k has (2, 100, 2, 64); by columns v must be ",
    ),
    Wrong(
        "v_batch",
        COLUMNS,
        lambda a: dict(v=a.v[:1]),
        "v has shape (1, 2, 32, 112), but k has (2, 100, 2, 64); by columns v must be ",
    ),
    Wrong(
        "v_row_stride",
        COLUMNS,
        lambda a: dict(v=strided(a.v, 2 * 32 * 120, 32 * 120, 120, 1)),
        "v has stride 120 in dimension 2, which must be a multiple of 16 elements (16 bytes)",
    ),
    Wrong(
        "v_of_columns_for_rows",
        ROWS,
        lambda a: dict(v=by_columns(a.v)),
        "v has shape (2, 2, 32, 112); this kernel takes (batch, seqlen_k, kv_heads, 32)",
    ),
    Wrong(
        "v_keys",
        ROWS,
        lambda a: dict(v=a.v[:, :9]),
        "v has shape (2, 9, 2, 32), but k has (2, 100, 2, 64); all but the last size must be equal",
    ),
    *(
        Wrong(
            f"{name}_missing",
            COLUMNS,
            lambda a, name=name: {name: None},
            f"{name} is missing; this kernel has scales by block of 32 rows",
        )
        for name in ("q_descale", "k_descale", "v_descale")
    ),
    Wrong(
        "descale_of_one_block",
        COLUMNS,
        lambda a: dict(k_descale=a.k_descale[..., :1]),  # type: ignore[index]
        "k_descale has shape (2, 2, 1); it must be (2 or 1, 2 or 1, 4): batch, heads, blocks of "
        "32 rows",
    ),
    Wrong(
        "descale_blocks",
        COLUMNS,
        lambda a: dict(q_descale=torch.ones(2, 4, 2)),
        "q_descale has shape (2, 4, 2); it must be (2 or 1, 4 or 1, 3): batch, heads, blocks of ",
    ),
    Wrong(
        "descale_of_blocks_for_a_head",
        ROWS,
        lambda a: dict(v_descale=torch.ones(2, 2, 4)),
        "v_descale has shape (2, 2, 4); it must be (2 or 1, 2 or 1, 1): batch, heads, one block",
    ),
    Wrong(
        "descale_rank",
        ROWS,
        lambda a: dict(v_descale=torch.ones(2, 2)),
        "v_descale has shape (2, 2); it must be (2 or 1, 2 or 1, 1)",
    ),
    Wrong(
        "descale_batch",
        ROWS,
        lambda a: dict(k_descale=torch.ones(3, 2, 1)),
        "k_descale has shape (3, 2, 1); it must be (2 or 1, 2 or 1, 1)",
    ),
    Wrong(
        "descale_of_kv_heads_for_q",
        ROWS,
        lambda a: dict(q_descale=torch.ones(2, 2, 1)),
        "q_descale has shape (2, 2, 1); it must be (2 or 1, 4 or 1, 1)",
    ),
    Wrong(
        "descale_dtype",
        ROWS,
        lambda a: dict(q_descale=torch.ones(2, 4, 1).double()),
        "q_descale is not float32; q_descale.float() converts it",
    ),
    Wrong(
        "descale_stride",
        COLUMNS,
        lambda a: dict(v_descale=strided(a.v_descale, 16, 8, 2)),  # type: ignore[arg-type]
        "v_descale has stride 2 from block to block, which must be 1; v_descale.contiguous() makes",
    ),
    Wrong("scale", ROWS, lambda a: dict(scale=0.0), "scale is 0; it must be finite and above 0"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(
    make: Callable[[str], Made], wrong: Wrong
) -> None:
    of = make(wrong.slug)
    given = arguments(of.plan)
    given = replace(given, **wrong.change(given))  # type: ignore[arg-type]
    below = getattr(torch.ops.fagen, f"{wrong.slug}_no_grad").default
    calls = [
        lambda: of.attend(*given),  # C++, through Autograd
        lambda: below(*given),  # C++
        lambda: torch.ops.fagen.emulated_fp8(*given, wrong.slug),  # Python
    ]
    said = [refusal(call) for call in calls]
    if not wrong.needs_data:
        with FakeTensorMode() as mode:
            pretended = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
            said += [refusal(lambda: below(*pretended)), refusal(lambda: of.attend(*pretended))]
    assert set(said) == {said[0]}
    assert said[0].startswith(f"fagen::{wrong.slug}: {wrong.said}")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:
        call()
    return str(refused.value)


def test_a_descale_on_another_device_is_refused(rows: Made) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = arguments(rows.plan)
        elsewhere = torch.empty(2, 2, 1, device="meta")
        with pytest.raises(ValueError, match=r"v_descale is not on the device of q; v_descale\.to"):
            op.refuse_arguments(
                rows.plan, given.q, given.k, given.v, 0.1, None, None, elsewhere, have_data=False
            )


def test_a_16_bit_kernel_takes_no_descales() -> None:
    q, one = normal(1, 8, 1, 64).half(), torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match="descales go with e4m3; this kernel takes float16"):
        torch.ops.fagen.emulated_fp8(q, q, q, 0.1, one, None, None, "fwd_fp16_d64_full_m64n64")


@pytest.mark.parametrize("name", ["q", "k", "v", "q_descale", "k_descale", "v_descale"])
def test_a_call_that_needs_a_gradient_is_refused(made: Made, name: str) -> None:
    given = arguments(made.plan)
    getattr(given, name).requires_grad_()
    with pytest.raises(ValueError, match=r"q, k, v or a descale requires a gradient, and there is"):
        made.attend(*given)
    with torch.no_grad():
        assert not made.attend(*given)[0].requires_grad


# ---- torch's machinery --------------------------------------------------------------------------


@pytest.fixture
def comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compares no e4m3, and opcheck compares what went in with what is left of it."""
    allclose = torch.allclose

    def widened(*tensors: Tensor, **options: bool) -> bool:
        return allclose(*(x.float() if x.dtype == E4M3 else x for x in tensors), **options)

    monkeypatch.setattr(torch, "allclose", widened)


@pytest.mark.usefixtures("comparable")
def test_opcheck_finds_nothing(made: Made) -> None:
    for shape in ((2, 70, 100), (1, 0, 5), (2, 3, 0), (1, 1, 1)):
        given = arguments(made.plan, *shape)
        torch.library.opcheck(made.attend, tuple(given))
        torch.library.opcheck(op.alone(made.attend), tuple(given))
        torch.library.opcheck(torch.ops.fagen.emulated_fp8.default, (*given, made.plan.slug))


@pytest.mark.usefixtures("comparable")
def test_opcheck_finds_nothing_without_descales(rows: Made) -> None:
    given = arguments(rows.plan)
    torch.library.opcheck(rows.attend, (given.q, given.k, given.v, 0.1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(made: Made, dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def more(*given: object) -> Tensor:
        return made.attend(*given)[0] + 1

    compiled = torch.compile(more, fullgraph=True, dynamic=dynamic, backend=backend)
    for shape in ((5, 70, 210), (6, 150, 250), (6, 150, 250)):  # equal sizes would share a symbol
        given = tuple(arguments(made.plan, *shape))
        assert torch.equal(compiled(*given), more(*given))
    assert len(graphs) == (1 if dynamic else 2)
    torch._dynamo.reset()


# ---- the C interface ----------------------------------------------------------------------------


def test_the_binding_and_ctypes_tell_the_kernel_the_same(made: Made) -> None:
    of, stub = made.plan, stub_library(made.binary)
    assert stub.args_bytes() == ctypes.sizeof(op.Fp8KernelArgs) == 184 + 3 * 8 + 9 * 8
    given = arguments(of)
    out = torch.empty(2, 70, 4, 32, dtype=getattr(torch, of.out_dtype.torch))
    lse = torch.empty(2, 4, 70)
    assert given.q_descale is not None and given.k_descale is not None
    shared = replace(given, q_descale=given.q_descale[:, :1], k_descale=given.k_descale[:1])
    for case in (given, shared):
        q, k, v, scale, *descales = case
        note = getattr(torch.ops.fagen_test, f"note_{of.slug}")
        note(q, k, v, out, lse, scale, *descales)
        noted = op.Fp8KernelArgs.from_address(stub.noted_call())
        own = op.kernel_args(of, q, k, v, out, lse, scale, *descales)  # type: ignore[arg-type]
        names = [name for name, *_ in (*op.KernelArgs._fields_, *op.Fp8KernelArgs._fields_)]
        assert {name: getattr(noted, name) for name in names} == {
            name: getattr(own, name) for name in names
        }
        assert noted.struct_bytes == ctypes.sizeof(op.Fp8KernelArgs)
        assert noted.v_descale == case.v_descale.data_ptr()  # type: ignore[union-attr]
    # of the second case: q's shared by heads, k's by batches
    blocks = (3, 4) if of.scales_by_block else (1, 1)
    assert (noted.q_descale_stride_batch, noted.q_descale_stride_head) == (4 * blocks[0], 0)
    assert (noted.k_descale_stride_batch, noted.k_descale_stride_head) == (0, blocks[1])
    assert noted.v_descale_stride_block == (1 if of.scales_by_block else 0)
    # a row of the transposed V is one of its columns; keys and heads have changed places
    strides = (noted.v_stride_batch, noted.v_stride_seq, noted.v_stride_head)
    assert strides == ((6400, 64, 32) if of.v_rows else (7168, 112, 3584))
    assert (noted.seqlen_q, noted.seqlen_k) == (70, 100)


def test_descales_that_are_not_given_are_null(rows: Made) -> None:
    q, k, v, scale, *_ = arguments(rows.plan)
    out, lse = torch.empty(2, 70, 4, 32).half(), torch.empty(2, 4, 70)
    getattr(torch.ops.fagen_test, f"note_{ROWS}")(q, k, v, out, lse, scale, None, None, None)
    noted = op.Fp8KernelArgs.from_address(stub_library(rows.binary).noted_call())
    own = op.kernel_args(rows.plan, q, k, v, out, lse, scale)  # type: ignore[arg-type]
    for args in (noted, own):
        assert (args.q_descale, args.k_descale, args.v_descale) == (None, None, None)


def test_the_c_interface_refuses_what_it_cannot_do(columns: Made) -> None:
    q, k, v, scale, *descales = arguments(columns.plan)
    out, lse = torch.empty(2, 70, 4, 32, dtype=torch.bfloat16), torch.empty(2, 4, 70)
    with pytest.raises(DeviceError, match="q is on cpu; the kernel runs on a Hopper GPU"):
        op.call_kernel(columns.binary, q, k, v, out, lse, scale, *descales)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q_descale is missing"):
        op.call_kernel(columns.binary, q, k, v, out, lse, scale)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out is torch\.float16 .*must be torch\.bfloat16"):
        op.call_kernel(columns.binary, q, k, v, out.half(), lse, scale, *descales)  # type: ignore[arg-type]


# ---- a kernel that was really compiled ----------------------------------------------------------

COMPILED = (
    "fwd_e4m3_d128_full_m192n64_s3_sblock_sr64",  # what attention_fp8 takes
    "fwd_e4m3_d128_causal_m128n128_vrows_sblock_sr64",  # all four warps of the producer have work
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
    info = op.kernel_info(compiled.binary)
    assert (info.slug, info.source_hash) == (slug, compiled.source.hash)
    assert (info.shared_bytes, info.threads) == (compiled.plan.shared_bytes, compiled.plan.threads)
