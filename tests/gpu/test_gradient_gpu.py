"""Gradients of fagen.attention on a Hopper GPU, as training asks for them."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fagen
from fagen import registry
from fagen.kinds.backward.oracle import gradients
from fagen.measure.inputs import cell_of, inputs
from fagen.measure.verification import contender_of
from fagen.problem import Sizes
from fagen.runtime import backward
from fagen.vocab import MASKS
from tests.attention_helpers import torch_asks
from tests.fresh import orders_of_gradients
from tests.gpu.helpers import graph_of_passes
from tests.training import WRAPS, losses, mean_gradient, process_group, shared_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::fagen.UntunedWarning")]

SCALE = 128**-0.5
REPEATED = 1_000
# several tiles to an SM; a call takes a millisecond or two, at the widest heads
SEVERAL_TILES = Sizes(2, 8, 4, 2_700, 2_900)
IN_ORDER = [
    path.stem
    for path in registry.schedules("backward")
    if registry.read(path).values()["deterministic"]
]


def qkv(batch: int, seqlen: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    dice = torch.Generator("cuda").manual_seed(seqlen)
    shapes = [(batch, seqlen, heads, 128) for heads in (8, 2, 2)]
    made = (torch.randn(shape, generator=dice, device="cuda").to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in made]


def near_fp64(tensors: list[Tensor], dout: Tensor) -> bool:
    given = (x.detach() for x in tensors)
    exact = gradients(dout, *given, mask=MASKS["causal"], scale=SCALE)[2:]
    return all(
        float((x.grad.double() - y).abs().max()) < 0.03 * (1 + float(y.abs().max()))
        for x, y in zip(tensors, exact, strict=True)
        if x.grad is not None
    )


class Load:
    """Products on a stream of its own, of several sizes by turns: no call finds the same beside it.

    So many are always enqueued that it does not run dry between two calls.
    """

    AHEAD = 12

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.factors = [torch.randn(n, n, device="cuda") for n in (512, 1_024, 2_048)]
        self.stream.wait_stream(torch.cuda.current_stream())
        self.products: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # they begin, and end
        self.ended = 0

    def go_on(self) -> None:
        """Enqueue as many as have ended."""
        while self.ended < len(self.products) and self.products[self.ended][1].query():
            self.ended += 1
        with torch.cuda.stream(self.stream):
            while len(self.products) < self.ended + self.AHEAD:
                factor = self.factors[len(self.products) % len(self.factors)]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                factor @ factor
                end.record()
                self.products.append((begin, end))

    def milliseconds(self) -> float:
        """How long any of them was under way, once all have ended."""
        return sum(begin.elapsed_time(end) for begin, end in self.products)


@pytest.mark.parametrize("slug", IN_ORDER)
def test_gradients_in_order_have_the_same_bits_beside_another_streams_load(built_together, slug):
    built = built_together(IN_ORDER)(slug)
    contender = contender_of(built.plan)
    given = contender.arguments(built.plan, *inputs(cell_of(built.plan, SEVERAL_TILES)))
    first, again = (contender.outputs(built.plan, given) for _ in range(2))
    contender.launch(built.plan, built.binary.library, given, first)()
    enqueue = contender.launch(built.plan, built.binary.library, given, again)
    differ = torch.zeros((), device="cuda", dtype=torch.int64)
    load = Load()
    load.go_on()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATED):
        load.go_on()
        enqueue()
        for x, y in zip(first, again, strict=True):
            differ += (x.view(torch.int16) != y.view(torch.int16)).sum()
            y.zero_()
    end.record()
    torch.cuda.synchronize()
    assert int(differ) == 0
    assert load.milliseconds() > 0.5 * begin.elapsed_time(end), "the load ran beside few of them"


def test_compiled_with_open_batch_and_length_it_is_one_graph():
    fagen.prepare(dtype="bf16", head_dim=128, causal=True, device="cuda", gradient=True)
    graphs = []

    def counted(module, examples):
        graphs.append(module)
        return module.forward

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fagen.attention(q, k, v, causal=True).float().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counted)
    for batch, seqlen in ((3, 300), (4, 500), (5, 77)):  # unlike any number of heads
        tensors = qkv(batch, seqlen)
        compiled(*tensors).backward()
        assert near_fp64(tensors, torch.ones_like(tensors[0]))
    assert len(graphs) == 1


def test_inductor_compiles_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # Triton's own files
    fagen.prepare(dtype="bf16", head_dim=128, causal=True, device="cuda", gradient=True)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (fagen.attention(q, k, v, causal=True).float() * 2).sum()

    tensors = qkv(2, 256)
    loss(*tensors).backward()
    assert near_fp64(tensors, torch.full_like(tensors[0], 2))


def test_forward_and_backward_replay_in_a_cuda_graph():
    tensors = qkv(2, 300)
    dout = torch.randn_like(tensors[0])

    def step():
        fagen.attention(*tensors, causal=True).backward(dout)

    graph = graph_of_passes(step, tensors)
    for seed in range(3):
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.randn_like(tensor) * (1 + seed))
        graph.replay()
        assert near_fp64(tensors, dout)


def test_an_activation_may_be_computed_again():
    once, again = qkv(2, 500), qkv(2, 500)
    with torch_asks():
        fagen.attention(*once, causal=True).sum().backward()
        checkpoint(fagen.attention, *again, causal=True, use_reentrant=False).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_that_asks_for_it_has_the_same_bits_each_time(nothing_is_ready, packed, compiled):
    at = [torch.tensor([0, 1_300, 3_000], dtype=torch.int32, device="cuda")] if packed else []
    of, how = (fagen.attention_varlen if packed else fagen.attention), dict(causal=True)
    tensors = [x.detach() for x in qkv(2, 1_500)]
    tensors = [(x.flatten(0, 1) if packed else x).requires_grad_() for x in tensors]

    def attend(*given: Tensor) -> Tensor:
        return of(*given, *at, **how, deterministic=True)

    attend(*tensors)  # what torch traces is not readied
    torch._dynamo.reset()
    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    results = []
    for _ in range(20):
        out = call(*tensors)
        results.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    assert orders_of_gradients() == {True}
    for again in results[1:]:
        assert all(map(torch.equal, results[0], again))


@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_tensors_in_fp32_have_gradients_in_fp32(compiled):
    torch._dynamo.reset()
    tensors = qkv(2, 300)
    dout = torch.randn_like(tensors[0])
    fagen.attention(*tensors, causal=True).backward(dout)
    call = torch.compile(fagen.attention, fullgraph=True, backend="aot_eager")
    for dtypes in ([torch.float32] * 3, [torch.float32, torch.bfloat16, torch.bfloat16]):
        mixed = [
            x.detach().to(dtype).requires_grad_() for x, dtype in zip(tensors, dtypes, strict=True)
        ]
        with torch.autocast("cuda", torch.bfloat16):
            out = (call if compiled else fagen.attention)(*mixed, causal=True)
        out.backward(dout)
        assert [x.grad.dtype for x in mixed] == dtypes
        assert near_fp64(mixed, dout)
        for x, of in zip(mixed[1:], tensors[1:], strict=True):
            assert torch.equal(x.grad, of.grad.to(x.dtype))


def test_opcheck():
    tensors = qkv(2, 130)
    fagen.attention(*tensors)
    slug = fagen.prepare(dtype="bf16", head_dim=128, seqlen=130, rows=2_080, gradient=True)
    op = getattr(torch.ops.fagen, f"{slug}_with_grad").default
    checked = torch.library.opcheck(op, (*tensors, SCALE))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_layer_trains_under_a_wrapper_and_autocast(tmp_path, wrap):
    from torch.distributed.fsdp import fully_shard

    wrappers = {"ddp": torch.nn.parallel.DistributedDataParallel, "fsdp2": fully_shard}
    with process_group("nccl", tmp_path):
        found = losses(wrappers[wrap], 128, "cuda")
    assert found[-1] < 0.85 * found[0]


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two ranks over NCCL need a GPU each, and fewer are here"
)
def test_two_ranks_have_the_mean_of_both_parts_gradients(tmp_path):
    expected = mean_gradient(128, "cuda")  # which builds the kernels that both ranks load
    shared = shared_gradients(128, "cuda", tmp_path)
    for wrap in WRAPS:
        for found in shared[wrap]:  # dq is a sum in any order, and is rounded to bf16
            torch.testing.assert_close(
                found, expected, rtol=0, atol=0.02 * float(expected.abs().max())
            )


def test_calls_past_the_dispatcher_are_those_of_the_ops() -> None:
    leaves = qkv(2, 300)
    dout = torch.randn_like(leaves[0])

    def both() -> list[Tensor]:
        how = dict(causal=True, return_lse=True, deterministic=True)
        out, lse = fagen.attention(*leaves, **how)  # type: ignore[arg-type, misc]
        with torch.no_grad():
            alone = fagen.attention(*leaves, causal=True)
        return [out, lse, alone, *torch.autograd.grad((out, lse), leaves, (dout, lse.detach()))]

    first = both()  # by Python; from the second on all is known
    both()
    assert backward.SOONER.attend is not None
    assert backward.SOONER.attend(*leaves, True, None, True, True) is not None
    with torch.profiler.profile() as profile:
        by_ops = both()
    names = {event.name for event in profile.events()}
    assert "fagen::attention_with_grad" in names and any("fagen::bwd" in name for name in names)
    assert all(map(torch.equal, both(), by_ops)) and all(map(torch.equal, first, by_ops))
    q, k, v = leaves
    with pytest.raises(ValueError, match=r"k has shape .*; it must be \(batch = 2"):
        fagen.attention(q, k[:1], v, causal=True)
    with pytest.raises(ValueError, match="k is not bfloat16"):
        fagen.attention(q, k.half(), v, causal=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(fagen.attention(q, k.float(), v, causal=True), first[0])
    again = torch.autograd.grad(checkpoint(fagen.attention, *leaves, use_reentrant=False), q, dout)
    out = fagen.attention(*leaves)
    assert torch.equal(
        torch.autograd.grad(out, v, dout)[0],
        torch.autograd.grad(fagen.attention(*leaves), v, dout)[0],
    )
    assert again[0].isfinite().all()
