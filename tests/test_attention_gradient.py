"""Gradients of attention, dense and of varlen sequences: what they are, and what is refused."""

import math
from copy import deepcopy
from io import BytesIO
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fagen
from fagen.dispatch.select import buildable
from fagen.errors import UntunedWarning
from fagen.kinds.backward.oracle import gradients
from fagen.problem import Problem
from fagen.registry import plan_of
from fagen.runtime import backward, call, op
from fagen.runtime.attention import ATTENTION
from fagen.vocab import MASKS
from tests.attention_helpers import qkv as attention_tensors
from tests.attention_helpers import torch_asks
from tests.tensors import ints
from tests.training import Layer, losses, process_group
from tests.varlen_helpers import exact_passes, packed

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

SCALE = 0.125


class Call(NamedTuple):
    """A call, leaves for it and, of varlen sequences, offsets; and what its gradients should be."""

    function: Any
    leaves: list[Tensor]
    offsets: list[Tensor]

    def __call__(self, *tensors: Tensor, **how: Any) -> Any:
        return self.function(*(tensors or self.leaves), *self.offsets, **how)

    def exact(self, dout: Tensor, dlse: Tensor | None = None, causal: bool = False) -> Any:
        if self.offsets:
            return exact_passes(self.leaves, self.offsets, dout, dlse, causal=causal)[2:]
        mask = MASKS["causal" if causal else "full"]
        tensors = (x.detach() for x in self.leaves)
        return gradients(dout, *tensors, mask=mask, scale=SCALE, dlse=dlse)[2:]

    def check(self, *douts: Tensor, causal: bool = False) -> None:
        """Hold that the gradients in the leaves are right."""
        for leaf, expected in zip(self.leaves, self.exact(*douts, causal=causal), strict=True):
            assert near(leaf.grad, expected)


def dense(queries: int = 70, keys: int = 90) -> Call:
    leaves = [x.requires_grad_() for x in attention_tensors(queries=queries, keys=keys)]
    return Call(fagen.attention, leaves, [])


def sequences(*lengths: tuple[int, int], **how: Any) -> Call:
    *tensors, at_q, at_k = packed(**how | ({"lengths": lengths} if lengths else {}))
    return Call(fagen.attention_varlen, [x.requires_grad_() for x in tensors], [at_q, at_k])


@pytest.fixture(params=[dense, sequences])
def door(request):
    """A call of each function that has gradients."""
    return request.param()


def near(results, expected):
    assert results is not None and results.is_contiguous()
    close = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[results.dtype]
    largest = float(expected.abs().max()) if expected.numel() else 0
    return bool(((results.double() - expected).abs() <= close * (1 + largest)).all())


# ---- what they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((dense, dict(queries=n, keys=m)) for n, m in ((70, 90), (90, 70), (1, 1), (200, 33))),
        *((sequences, dict(dtype=dtype, gap=2)) for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_they_are_those_of_attention(make, how, causal):
    door = make(**how)
    out, lse = door(causal=causal, return_lse=True)
    blind = lse == -math.inf  # rows that see no key
    dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill(blind, 0)
    torch.autograd.backward((out, lse.masked_fill(blind, 0)), (dout, dlse))
    door.check(dout, dlse, causal=causal)


@pytest.mark.parametrize("which", range(3))
def test_only_what_is_asked_for_has_one(door, which):
    for i, leaf in enumerate(door.leaves):
        leaf.requires_grad_(i == which)
    out = door(causal=True)
    out.backward(torch.ones_like(out))
    assert near(door.leaves[which].grad, door.exact(torch.ones_like(out), causal=True)[which])
    assert [x.grad is None for x in door.leaves] == [i != which for i in range(3)]


@pytest.mark.parametrize(
    "total",
    [
        lambda out: out.sum(),  # a gradient whose strides are all 0
        lambda out: (out.transpose(-3, -2).contiguous() * 1.0).sum(),
        lambda out: out[..., 1:].sum() + out[..., :1].sum(),
        lambda out: torch.nn.functional.pad(out, (3, 0))[..., 3:].sum(),
    ],
)
def test_a_gradient_of_the_output_may_lie_anyhow(door, total):
    out = door()
    total(out).backward()
    door.check(torch.ones_like(out))


def test_what_kernels_cannot_read_in_whole_pieces_is_copied():
    storage = torch.zeros(2 * 3 * 4 * 16 + 8, dtype=torch.bfloat16)
    for offset, step, kept in ((0, 1, True), (8, 1, True), (1, 1, False), (0, 2, False)):
        laid = storage[offset:].as_strided((2, 3, 4, 16 // step), (192, 64, 16, step), offset)
        results = backward._laid_out(laid)
        assert (results is laid) == kept and torch.equal(results, laid)
        assert results.storage_offset() % 8 == 0 and results.stride(-1) == 1


def test_the_log_sum_exp_alone_has_some(door):
    out, lse = door(return_lse=True)
    finite = lse.masked_fill(lse == -math.inf, 0)
    finite.sum().backward()
    door.check(torch.zeros_like(out), (lse > -math.inf).float())


@pytest.mark.parametrize(
    "door",
    [
        *(dense(*sizes) for sizes in ((5, 0), (0, 5))),
        *(sequences(*lengths) for lengths in (((0, 0),), ((0, 5),), ((4, 0),), ((0, 0),) * 2)),
    ],
)
def test_where_there_is_nothing_to_do_there_are_zeros(door):
    door().sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in door.leaves)


def test_v_may_have_a_head_dim_of_its_own():
    door = sequences(head_dim=40, head_dim_v=24)
    words = "gradients of .*varlen: bwd_fp16_d40v24_full_.*_varlen"
    with pytest.warns(UntunedWarning, match=words):
        out = door()
    out.backward(torch.ones_like(out))
    door.check(torch.ones_like(out))


def test_keys_that_are_not_used_have_zeros_whatever_they_hold():
    door, used = sequences(), [5, 3, 20, 0, 0, 32]
    unused = torch.ones(len(door.leaves[1]), dtype=torch.bool)
    for begin, count in zip(door.offsets[1].tolist()[:-1], used, strict=True):
        unused[begin : begin + count] = False
    clean = [door.leaves[0], *(x.detach().clone() for x in door.leaves[1:])]
    for x, y in zip(door.leaves[1:], clean[1:], strict=True):
        x.data[unused], y[unused] = math.nan, 0
    out = door(seqused_k=ints(*used), causal=True)
    out.sum().backward()
    expected = exact_passes(clean, door.offsets, torch.ones_like(out), causal=True, used_k=used)[2:]
    assert all(near(x.grad, gradient) for x, gradient in zip(door.leaves, expected, strict=True))
    assert not any(x.grad[unused].any() for x in door.leaves[1:])


def test_a_neighbours_nan_does_not_leak_and_rows_of_none_get_zeros():
    clean = sequences((33, 40), (9, 9), (20, 70), gap=4)
    clean(causal=True).sum().backward()
    places = [slice(int(at[1]), int(at[2])) for at in clean.offsets]
    places.append(places[1])
    poisoned = []
    for x, place in zip(clean.leaves, places, strict=True):
        surrounded = torch.full_like(x, math.nan)
        surrounded[place] = x.detach()[place]
        poisoned.append(surrounded.requires_grad_())
    out = clean(*poisoned, causal=True)
    out.backward(torch.ones_like(out))
    for a, b, place in zip(poisoned, clean.leaves, places, strict=True):
        assert torch.equal(a.grad[place], b.grad[place]) and b.grad[place].any()
        assert not a.grad[:4].any() and not a.grad[-4:].any()


# ---- torch's own ways ---------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_trains_as_its_module_does(fresh_dynamo, strict):
    fagen.prepare(dtype="bf16", head_dim=64, causal=True, device="cpu", gradient=True)
    layer, x = Layer(64).bfloat16(), torch.randn(2, 70, 128).bfloat16()
    eager, before = deepcopy(layer), layer.qkv.weight.detach().clone()
    exported = torch.export.export(layer, (x,), strict=strict)
    file = BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    programs = exported.module(), torch.export.load(file).module()
    results = []
    for module in (eager, *programs):
        (weight,) = module.parameters()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        assert weight.grad is not None and not torch.equal(weight, before)
        results.append((weight.grad, weight.detach()))
    for gradient, weight in results[1:]:
        assert torch.equal(gradient, results[0][0]) and torch.equal(weight, results[0][1])


def test_an_activation_may_be_computed_again(door):
    again = checkpoint(door.function, *door.leaves, *door.offsets, use_reentrant=False)
    both = (torch.autograd.grad(out.sum(), door.leaves) for out in (door(), again))
    assert all(map(torch.equal, *both))


def test_a_tensor_that_was_changed_meanwhile_is_noticed(door):
    q, k, v = door.leaves
    keys = k * 1
    for changed in (keys, *door.offsets[:1]):
        out = door(q, keys, v)
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_layer_trains_under_ddp_and_autocast(tmp_path):
    with process_group("gloo", tmp_path):
        results = losses(torch.nn.parallel.DistributedDataParallel, 64, "cpu")
    assert results[-1] < 0.85 * results[0]


def test_opcheck_of_dense_tensors():
    door = dense()
    door()
    (kernel,) = ATTENTION.known.values()
    with_grad = getattr(torch.ops.fagen, f"{kernel.slug}_with_grad").default
    assert set(torch.library.opcheck(with_grad, (*door.leaves, SCALE)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("used", [None, ints(5, 3, 20, 0, 0, 32)])
def test_opcheck_of_packed_sequences(used):
    door = sequences()
    door()
    with_grad = torch.ops.fagen.fwd_fp16_d64_full_m192n128_varlen_packgqa_q2_with_grad.default
    checked = torch.library.opcheck(with_grad, (*door.leaves, *door.offsets, SCALE, used))
    assert set(checked.values()) == {"SUCCESS"}
    tensors = [x.detach() for x in door.leaves]
    out, lse = with_grad(*tensors, *door.offsets, SCALE, used)
    kernel = op.emulated("bwd_fp16_d64_full_m128n128_varlen_underdp")
    arguments = (torch.ones_like(out), *tensors, *door.offsets, out, lse, SCALE, None, used)
    assert set(torch.library.opcheck(kernel, arguments).values()) == {"SUCCESS"}


# ---- refused ------------------------------------------------------------------------------------


def test_gradients_of_gradients_are_refused(door):
    words = "a gradient, and second derivatives are not supported; leave create_graph=True .*MATH"
    with pytest.raises(ValueError, match=words):
        torch.autograd.grad(door().sum(), door.leaves[0], create_graph=True)


def test_what_gradients_of_gradients_are_referred_to_has_them():
    q, k, v = dense().leaves
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)
    (results,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.autograd.grad(results.float().square().sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("make", [dense, sequences])
def test_head_dims_that_no_kernel_has_are_refused_with_what_to_do(make):
    door = make()
    rows = (8, 1) if door.offsets else (1, 8, 1)
    q, v = (torch.randn(*rows, d).half().requires_grad_() for d in (256, 192))
    shaped = door._replace(offsets=[ints(0, 8)] * len(door.offsets))
    words = r"no kernel computes those of float16, head_dim 256 and 192 \(V\), full, backward pass"
    with pytest.raises(ValueError, match=words), pytest.warns(UntunedWarning):
        shaped(q, q, v)
    with torch.no_grad():
        shaped(q, q, v)


HAS_THEM = r"fagen\.attention\w*, or .*, has gradients by autograd \(backward\(\), .*not by .*func"


@pytest.mark.parametrize(
    "transformed",
    [
        lambda loss, q: torch.func.grad(loss)(q),
        lambda loss, q: torch.func.vjp(loss, q),
        lambda loss, q: torch.func.jacrev(loss)(q),
        lambda loss, q: torch.vmap(loss)(torch.stack((q, q)).requires_grad_()),
    ],
)
def test_torch_func_is_refused_in_favour_of_autograd(door, transformed):
    q, k, v = (x.detach() for x in door.leaves)
    with pytest.raises(ValueError, match=f"a gradient, and this op has no backward: {HAS_THEM}"):
        transformed(lambda t: door(t, k, v).float().sum(), q)


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
def test_a_kernel_of_decoding_that_serves_few_queries_refuses_it_so_too():
    q, k, v = (x.detach() for x in dense(1, 4_096).leaves)
    with pytest.raises(ValueError, match=f"a gradient, and decoding has none: {HAS_THEM}"):
        torch.func.grad(lambda t: fagen.attention(t, k, v).float().sum())(q)


def test_what_has_no_gradients_at_all_names_nobody():
    of_e4m3 = plan_of("fwd_e4m3_d128_full_m128n128_sblock").signature
    assert of_e4m3.gradient_refused.endswith(
        "this op has no backward; call it under torch.no_grad()"
    )


# ---- which kernel -------------------------------------------------------------------------------


def test_gradients_are_deterministic_where_torch_or_a_call_asks_for_that():
    """By a kernel of its own, told when the backward pass runs; on a CPU there is one order."""
    key_of = call.DOORS["gradients"].key_of
    slug, gpu = "fwd_fp16_d64_full_m128n128", torch.device("cuda:0")
    any_order = key_of(slug, gpu, False)
    with torch_asks():
        in_order = key_of(slug, gpu, False)
        on_a_cpu = key_of(slug, torch.device("cpu"), True)
    keys = any_order, in_order, on_a_cpu
    assert [key.problem.deterministic for key in keys] == [False, True, False]
    assert key_of(slug, gpu, True) == in_order
    slugs = [buildable(key.problem).schedules[0].slug for key in (any_order, in_order)]
    assert slugs == ["bwd_fp16_d64_full_m128n128", "bwd_fp16_d64_full_m128n128_det"]


@pytest.mark.parametrize(
    ("head_dim", "more", "slug", "derived"),
    [
        (64, (), "bwd_bf16_d64_causal_m128n128", False),
        (128, (), "bwd_bf16_d128_causal_m64n128", False),
        (40, (), "bwd_bf16_d40_causal_m128n128", True),
        (128, (False, "varlen"), "bwd_bf16_d128_causal_m64n128_varlen", False),
        (128, (True, "varlen"), "bwd_bf16_d128_causal_m64n128_varlen_det", True),
    ],
)
def test_the_usual_tile_comes_first(head_dim, more, slug, derived):
    problem = Problem("bf16", head_dim, head_dim, "causal", "bf16", "", 0, "backward", *more)
    results = buildable(problem)
    assert (results.schedules[0].slug, results.derived) == (slug, derived)
    assert head_dim != 40 or len(results.schedules) > 1
