"""Every implementation of attention that fagen is timed beside, as a function that binds inputs.

`bind(cell, q, k, v)` takes q, k, v stored (B, S, H, D) and returns a Call that computes
attention, allocates its output and returns it as (B, Sq, H, Dv). It raises DeviceError, in words,
where the implementation cannot do the cell or is not installed. Of a cell of gradients the Call
computes dq, dk and dv, as q, k and v are, of a forward pass that was run before the clock runs.
Varlen sequences come as one, (1, total, H, D), with their lengths in the cell's sizes, and their
output is (total, H, Dv).

A problem of e4m3 comes in fp16, and peers compute it in that, but for cudnn-e4m3; what is in e4m3
quantises before the clock runs. What that costs is an implementation of its own, `quantise`.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from fagen.build import Binary
from fagen.e4m3 import E4M3, rounded
from fagen.errors import DeviceError
from fagen.kind import Plan
from fagen.measure.gradients import (
    Attended,
    attended,
    attended_varlen,
    output_gradient,
    varlen_lengths,
)
from fagen.measure.inputs import softmax_scale
from fagen.measure.rows import DETERMINISTIC, PREARRANGED, QUANTISE
from fagen.measure.timing import Call
from fagen.measure.verification import contender_of
from fagen.problem import Cell, Problem
from fagen.runtime import op
from fagen.runtime.quantize import quantize
from fagen.vocab import MASKS, PASSES

CUDNN_E4M3 = "cudnn-e4m3"
Bind = Callable[[Cell, Tensor, Tensor, Tensor], Call]


@dataclass(frozen=True)
class Implementation:
    """A name for the rows, and how to call it; `schedule` is the slug of a fagen kernel.

    What a `charged` call takes beyond the `credited` one is added to its time. One that does not
    judge computes something else than attention, or scales its output: none is compared with it.
    """

    name: str
    bind: Bind
    schedule: str | None = None
    charged: Bind | None = None
    credited: Bind | None = None
    judges: bool = True

    @property
    def label(self) -> str:
        """What tells it from all others of a cell."""
        return self.schedule or self.name


def ours(binary: Binary) -> Implementation:
    """The kernel in `binary`, called as its torch op.

    One whose sums have a fixed order, where others' have none, has a name of its own. One that
    takes transposed V is another implementation, and charged with what it costs to
    quantise V that way instead of row-major.
    """
    kernel = op.load(binary)
    plan = binary.plan
    contender = contender_of(plan)

    def bind(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        arguments = contender.arguments(plan, q, k, v)
        if problem.varlen:
            return Call(lambda: _unpacked(contender.compared(kernel(*arguments)), len(q)))
        return Call(lambda: contender.compared(kernel(*arguments)))

    problem = Problem.of(plan.schedule)
    if problem.v_layout != "columns":
        name = DETERMINISTIC if problem.deterministic else "fagen"
        return Implementation(name, bind, binary.slug)
    columns, rows = (_quantised_v(plan, layout) for layout in ("columns", "rows"))
    return Implementation(PREARRANGED, bind, binary.slug, charged=columns, credited=rows)


def _unpacked(output: Any, batch: int) -> Any:
    """What a call gave of so many sequences of one length that were packed: (B, S, H, D)."""
    if isinstance(output, tuple):
        return tuple(_unpacked(tensor, batch) for tensor in output)
    return output.unflatten(0, (batch, -1))


def _quantised_v(plan: Plan, layout: str) -> Bind:
    values = plan.schedule.values()
    keys = {"scales": values["v_scales"]}
    if values["v_scales"] == "block":
        keys["scale_rows"] = values["scale_rows"]

    def bind(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return Call(lambda: quantize(v, layout=layout, **keys).values)

    return bind


def peer(name: str) -> Implementation:
    """One of PEERS by name; DeviceError, with what there is, for any other."""
    if name not in PEERS:
        raise DeviceError(f"no implementation is called {name!r}; there are {', '.join(PEERS)}")

    def bind(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        gradients = PASSES[cell.problem.kind].gradients
        if cell.sizes.varlen:
            if name not in VARLEN:
                raise DeviceError("it is not timed over varlen sequences")
            return (VARLEN_GRADIENTS if gradients else VARLEN)[name](cell, q, k, v)
        if not gradients:
            return PEERS[name](cell, q, k, v)
        if name not in GRADIENTS:
            raise DeviceError("its backward pass is not timed")
        return GRADIENTS[name](cell, q, k, v)

    return Implementation(name, bind, judges=name not in (QUANTISE, CUDNN_E4M3))


def installed(name: str) -> bool:
    """Whether a peer can be called here at all: most come with torch."""
    if name not in _PACKAGES:
        return name in PEERS
    try:
        package = importlib.import_module(_PACKAGES[name])
    except Exception:  # an extension built for another torch fails in ways of its own
        return False
    # fagen is no peer of itself, which may be installed by that name
    return not package.__name__.startswith("fagen.")


def is_causal(cell: Cell) -> bool:
    """Whether a cell's mask is what peers call causal, or none at all.

    Raises DeviceError where it is another, which they do not have.
    """
    if cell.problem.variant:
        raise DeviceError(f"it has no {' and no '.join(cell.problem.variant_words)}")
    if cell.problem.mask not in ("full", "causal"):
        raise DeviceError(f"it has no mask like {cell.problem.mask}")
    return cell.problem.mask == "causal"


def ragged_causal(cell: Cell) -> bool:
    """Whether it matters to which corner a causal mask is aligned.  Raises as is_causal does."""
    return is_causal(cell) and not cell.sizes.square


def _cudnn(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if ragged_causal(cell):
        raise DeviceError("torch aligns cuDNN's causal mask to the top left")
    return _sdpa(SDPBackend.CUDNN_ATTENTION, cell, q, k, v)


def _fa2(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    mask = None
    if ragged_causal(cell):
        with warnings.catch_warnings():  # of rows that see no key, which are not compared
            warnings.simplefilter("ignore")
            mask = causal_lower_right(cell.sizes.seqlen_q, cell.sizes.seqlen_k)
    return _sdpa(SDPBackend.FLASH_ATTENTION, cell, q, k, v, mask)


def _fa2_varlen(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """FlashAttention-2 over varlen sequences."""
    attend = _varlen_pass(cell, q, k, v)
    return tried(Call(lambda: attend().out), "torch's FLASH_ATTENTION")


def _fa2_varlen_gradients(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Its backward pass, by itself."""
    forward = _varlen_pass(cell, q, k, v)
    return _taken_back(forward, output_gradient(q, v)[0], "torch's FLASH_ATTENTION")


def _varlen_pass(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Attended]:
    query, key, value = (tensor[0] for tensor in (q, k, v))
    lengths, causal = varlen_lengths(cell.sizes, q.device), is_causal(cell)
    return lambda: attended_varlen(query, key, value, lengths, causal=causal)


def _taken_back(forward: Callable[[], Attended], dout: Tensor, who: str) -> Call:
    """The backward pass of a forward pass, by itself."""
    attended = tried(Call(forward), f"{who}, called without autograd,").once()
    return tried(Call(lambda: attended.backward(dout)), f"the backward pass of {who}")


def _efficient(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if ragged_causal(cell):
        raise DeviceError("torch aligns its causal mask to the top left")
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, cell, q, k, v)


def _sdpa(
    backend: SDPBackend,
    cell: Cell,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
) -> Call:
    # views, as targets are stated for tensors stored (B, S, H, D)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    causal = is_causal(cell) and mask is None
    grouped = cell.sizes.heads != cell.sizes.kv_heads

    def run() -> Tensor:
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    name = backend.name.removesuffix("_ATTENTION").lower()
    return tried(Call(run, lambda: sdpa_kernel(backend)), f"torch's {backend.name}", name)


def _gradients(forward: Bind, backend: str) -> Bind:
    """The backward pass of one of torch's backends, by itself."""

    def bind(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        # refuses what torch does, by rules of its own where a gradient will be asked for
        forward(cell, *(x.detach().requires_grad_() for x in (q, k, v)))

        def attend() -> Attended:
            return attended(backend, q, k, v, causal=is_causal(cell))

        return _taken_back(attend, output_gradient(q, v), f"torch's {backend}")

    return bind


def _flex(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    lengths = cell.sizes.seqlen_q, cell.sizes.seqlen_k
    row = MASKS[cell.problem.mask]
    mask = None
    if row.by_row:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            first, last = row.keys(i, *lengths)
            return (j >= first) & (j < last)

        mask = flex.create_block_mask(visible, None, None, *lengths, device=q.device)
    torch._dynamo.reset()  # one graph per cell: else the eighth one falls back to eager
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = cell.sizes.heads != cell.sizes.kv_heads

    def run() -> Tensor:
        out = compiled(query, key, value, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return tried(Call(run), "FlexAttention")


def _fa3(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if not installed("fa3"):
        raise DeviceError("flash_attn_interface (FlashAttention-3) is not installed")
    flash = importlib.import_module("flash_attn_interface").flash_attn_func
    causal = is_causal(cell)

    def run() -> Tensor:
        out = flash(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return tried(Call(run), "FlashAttention-3")


def _cudnn_e4m3(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """cuDNN's own e4m3, a scale per tensor, output in e4m3: through its frontend."""
    if not installed(CUDNN_E4M3):
        raise DeviceError("cudnn (nvidia-cudnn-frontend) is not installed")
    if ragged_causal(cell):
        raise DeviceError("its causal mask is aligned to the top left")
    cudnn = importlib.import_module("cudnn")
    quantised = [rounded(x, "tensor") for x in (q, k, v)]
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32)

    def described(x: Tensor, kind: Any) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)

    # P lies in [0, 1]: this takes it to the top of e4m3's range, as fagen's p_offset does
    p_scale = torch.full((1, 1, 1, 1), 256.0, device=q.device)
    unit = torch.ones(1, 1, 1, 1, device=q.device)
    inputs = {name: x.values.transpose(1, 2) for name, x in zip("qkv", quantised, strict=True)}
    factors = {
        f"descale_{name}": x.descale[0, 0].view(1, 1, 1, 1).contiguous()
        for name, x in zip("qkv", quantised, strict=True)
    }
    # the output has V's size: its scale is V's
    factors |= {"descale_s": 1 / p_scale, "scale_s": p_scale, "scale_o": 1 / factors["descale_v"]}
    graph_tensors = {name: described(x, e4m3) for name, x in inputs.items()}
    graph_tensors |= {name: described(x, fp32) for name, x in factors.items()}
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        **graph_tensors,
        is_inference=True,
        attn_scale=softmax_scale(cell.problem.head_dim),
        use_causal_mask=is_causal(cell),
    )
    size = cell.sizes
    sizes = (size.batch, size.seqlen_q, size.heads, cell.problem.head_dim_v)
    strides = torch.empty(sizes, device="meta").transpose(1, 2).stride()
    out.set_output(True).set_dim([sizes[0], sizes[2], sizes[1], sizes[3]])
    out.set_stride(list(strides)).set_data_type(e4m3)
    for largest in (amax_s, amax_o):
        largest.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        largest.set_data_type(fp32)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except Exception as error:  # each step refuses in a class of its own
        raise DeviceError(f"cuDNN refuses e4m3: {reason([str(error)], '')}") from error
    workspace = torch.empty(graph.get_workspace_size(), device=q.device, dtype=torch.uint8)
    tensors = {graph_tensors[name]: x for name, x in (inputs | factors).items()}
    tensors |= {amax_s: unit.clone(), amax_o: unit.clone()}
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)

    def run() -> Tensor:
        result = torch.empty(sizes, device=q.device, dtype=E4M3)
        graph.execute({**tensors, out: result.transpose(1, 2)}, workspace, handle=handle)
        return result

    return tried(Call(run), "cuDNN")


def _quantise_all(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """What it costs to quantise Q, K and V as fagen.attention_fp8 does, but V row-major."""

    def run() -> Tensor:
        quantize(q, rotate=True)
        quantize(k, rotate=True, center=True)
        return quantize(v, scales="column", center=True).values

    return tried(Call(run), "fagen.quantize")


def tried(call: Call, who: str, name: str = "") -> Call:
    """`call` once, so that a refusal comes here and in words, not amid the timing.

    Raises DeviceError; `name` is what torch calls the backend where it says why it is not used.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call.once()
        except Exception as error:  # each implementation refuses in its own class
            messages = [str(warning.message) for warning in caught] + [str(error)]
            raise DeviceError(f"{who} refuses: {reason(messages, name)}") from error
    return call


def reason(messages: Sequence[str], name: str) -> str:
    """What torch says against one backend: the line below its heading, else the first line.

    It goes through all backends, each under "<name> attention kernel not used because:".
    """
    lines = [" ".join(re.sub(r"\(Triggered internally.*", "", line).split()) for line in messages]
    heading = f"{name} attention kernel not used"
    for line, below in pairwise(lines):
        if name and line.lower().startswith(heading):
            return below[:200].rstrip(".")
    return lines[0][:200].rstrip(".")


PEERS: dict[str, Bind] = {
    "cudnn": _cudnn,
    "fa2": _fa2,
    "efficient": _efficient,
    "fa3": _fa3,
    "flex": _flex,
    CUDNN_E4M3: _cudnn_e4m3,
    QUANTISE: _quantise_all,
}
GRADIENTS: dict[str, Bind] = {
    "cudnn": _gradients(_cudnn, "cudnn"),
    "fa2": _gradients(_fa2, "flash"),
}
VARLEN: dict[str, Bind] = {"fa2": _fa2_varlen}
VARLEN_GRADIENTS: dict[str, Bind] = {"fa2": _fa2_varlen_gradients}
_PACKAGES = {"fa3": "flash_attn_interface", CUDNN_E4M3: "cudnn"}
