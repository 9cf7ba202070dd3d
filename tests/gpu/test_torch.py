"""Every committed kernel as a torch op on a GPU: streams, graphs, compilers, devices, refusals."""

import pytest
import torch

import fagen
from fagen.kinds.forward.verify.dense import shape_error
from fagen.measure.inputs import inputs, softmax_scale
from tests.gpu.helpers import by_threads, graph_of, same, spoil

pytestmark = pytest.mark.gpu

SLEEP = 50_000_000  # GPU clock cycles: some 25 ms, long enough to lose any race


def called(kernel, *sizes, seed=0):
    """Inputs for the op at these sizes, and what the kernel gives for them, synchronised."""
    case = kernel.cell(*sizes)
    arguments = (*inputs(case, seed=seed), softmax_scale(case.problem.head_dim))
    expected = kernel.poisoned(*arguments)
    torch.cuda.synchronize()
    return (*arguments, *kernel.numbers(*arguments[:2])), expected


def test_the_op_gives_what_the_c_function_gives(kernel):
    arguments, expected = called(kernel, 2, 300, 333, 4, 2)
    assert same(kernel.op(*arguments), expected)


def test_the_op_passes_torchs_own_checks(kernel):
    arguments, _ = called(kernel, 1, 70, 90, 2, 1)
    torch.library.opcheck(kernel.op, arguments)


def test_another_stream_is_waited_for_and_used(kernel):
    arguments, expected = called(kernel, 2, 300, 333, 4, 2)
    late = [torch.zeros_like(tensor) for tensor in arguments[:3]]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP)  # on the default stream the kernel would read zeros now
        for tensor, values in zip(late, arguments[:3], strict=True):
            tensor.copy_(values)
        found = kernel.op(*late, *arguments[3:])
        torch.cuda.current_stream().synchronize()
    assert same(found, expected)


def test_a_cuda_graph_replays_with_new_numbers(kernel):
    (q, k, v, *numbers), _ = called(kernel, 2, 300, 333, 4, 2)
    graph, results = graph_of(lambda: kernel.op(q, k, v, *numbers))
    for seed in (1, 2):
        (q2, k2, v2, *_), expected = called(kernel, 2, 300, 333, 4, 2, seed=seed)
        for tensor, values in ((q, q2), (k, k2), (v, v2)):
            tensor.copy_(values)
        spoil(*results)
        graph.replay()
        assert same(results, expected)


def test_a_compiled_function_gives_the_same_bits(kernel):
    arguments, expected = called(kernel, 2, 300, 333, 4, 2)
    torch._dynamo.reset()
    compiled = torch.compile(kernel.op, fullgraph=True, backend="aot_eager")
    assert same(compiled(*arguments), expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_compiles_the_op_between_other_work(one_kernel, dynamic):
    kernel_op = one_kernel.op

    def block(q, k, v, scale):
        out, lse = kernel_op(q * 2, k, v + 1, scale)
        return out * 3, lse

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for sizes in ((2, 300, 333, 4, 2), (1, 128, 200, 4, 4)):
        arguments, _ = called(one_kernel, *sizes)
        assert same(compiled(*arguments), block(*arguments))


def test_two_threads_may_call_at_once(one_kernel):
    arguments, expected = called(one_kernel, 2, 300, 333, 4, 2)
    op, found = one_kernel.op, []

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                result = op(*arguments)
            torch.cuda.current_stream().synchronize()
            found.append(result)

    by_threads(work, 4)
    assert len(found) == 4 and all(same(result, expected) for result in found)


def test_every_device_computes_the_same_whichever_is_current(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    arguments, expected = called(kernel, 2, 300, 333, 4, 2)
    for index in range(1, torch.cuda.device_count()):
        there = [tensor.to(f"cuda:{index}") for tensor in arguments[:3]]
        found = kernel.op(*there, *arguments[3:])  # device 0 is current
        assert all(tensor.device.index == index for tensor in found)
        assert same([tensor.to("cuda:0") for tensor in found], expected)
        with torch.cuda.device(index):
            found = kernel.op(*arguments)  # and here the other way round
        assert same(found, expected)


@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 7, 2, 2), (2, 0, 7, 2, 2), (2, 5, 0, 2, 2), (0, 0, 0, 2, 1)],
    ids=["no batch", "no query", "no key", "nothing"],
)
def test_empty_tensors_give_zeros_and_minus_infinity_or_nothing(kernel, sizes):
    case = kernel.cell(*sizes)
    q, k, v = inputs(case)
    out, lse = kernel.op(q, k, v, 1.0, *kernel.numbers(q, k))
    torch.cuda.synchronize()
    batch, seqlen_q, _, heads, _ = sizes
    assert out.shape == (batch, seqlen_q, heads, case.problem.head_dim_v)
    assert lse.shape == (batch, heads, seqlen_q)
    assert bool((out == 0).all())
    assert bool((lse == float("-inf")).all())


def test_a_gpu_call_that_needs_a_gradient_is_refused(one_kernel):
    (q, k, v, scale), _ = called(one_kernel, 1, 64, 64, 2, 2)
    with pytest.raises(ValueError, match="requires a gradient"):
        one_kernel.op(q.requires_grad_(), k, v, scale)
    with torch.no_grad():
        one_kernel.op(q, k, v, scale)


def test_wrong_tensors_are_refused_before_the_gpu_sees_them(one_kernel):
    (q, k, v, scale), expected = called(one_kernel, 1, 64, 64, 2, 2)
    twice = k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)
    wrong = {
        "k is not on the device of q": (q, k.cpu(), v.cpu(), scale),
        "v has shape": (q, k, v[..., :-8], scale),
        r"k has shape \(2, 64, 2, \d+\); it must be \(batch = 1": (q, *twice, scale),
        "q is not float16": (q.float(), k, v, scale),
        "q has stride": (q.transpose(1, 3).contiguous().transpose(1, 3), k, v, scale),
        "scale is": (q, k, v, -1.0),
    }
    for said, arguments in wrong.items():
        with pytest.raises(ValueError, match=said):
            one_kernel.op(*arguments)
    misplaced = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view_as(q)
    with pytest.raises(ValueError, match="16 bytes"):
        one_kernel.op(misplaced, k, v, scale)
    assert same(one_kernel.op(q, k, v, scale), expected)


def test_attention_picks_a_kernel_for_the_tensors_and_is_right(kernel):
    case = kernel.cell(2, 200, 300, 4, 2)

    mask = kernel.plan.mask

    def attention(q, k, v, scale):
        how = dict(zip(mask.given, kernel.numbers(q, k), strict=True))
        if mask.given:
            how = {"window": (how["window_left"], how["window_right"])}
        return fagen.attention(q, k, v, causal=mask.causal, scale=scale, return_lse=True, **how)

    error = shape_error(case, attention, *inputs(case))
    assert error.ok, error
