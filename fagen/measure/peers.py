"""Every implementation of attention that fagen is timed beside, as a function that binds inputs.

`bind(problem, q, k, v)` takes q, k, v stored (B, S, H, D) and returns a Call that computes
attention, allocates its output and returns it as (B, Sq, H, Dv). It raises DeviceError, in words,
where the implementation cannot do the problem or is not installed.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen import op
from fagen.build import Binary
from fagen.errors import DeviceError
from fagen.measure.shapes import Problem, softmax_scale
from fagen.measure.timing import Call

Bind = Callable[[Problem, Tensor, Tensor, Tensor], Call]


@dataclass(frozen=True)
class Implementation:
    """A name for the rows, and how to call it; `schedule` is the slug of a fagen kernel."""

    name: str
    bind: Bind
    schedule: str | None = None


def ours(binary: Binary) -> Implementation:
    """The kernel in `binary`, called as its torch op."""
    kernel = op.load(binary)

    def bind(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
        scale = softmax_scale(problem.head_dim)
        return Call(lambda: kernel(q, k, v, scale)[0])

    return Implementation("fagen", bind, binary.slug)


def peer(name: str) -> Implementation:
    """One of PEERS by name; DeviceError, with what there is, for any other."""
    if name not in PEERS:
        raise DeviceError(f"no implementation is called {name!r}; there are {', '.join(PEERS)}")
    return Implementation(name, PEERS[name])


def installed(name: str) -> bool:
    """Whether a peer can be called here at all: all come with torch but fa3."""
    if name != "fa3":
        return name in PEERS
    try:
        importlib.import_module("flash_attn_interface")
    except Exception:  # an extension built for another torch fails in ways of its own
        return False
    return True


def _sdpa(backend: SDPBackend) -> Bind:
    def bind(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
        _refuse_ragged_causal(problem, "torch aligns the causal mask to the top left")
        # views, as targets are stated for tensors stored (B, S, H, D)
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        causal, grouped = problem.causal, problem.shape.heads != problem.shape.kv_heads

        def run() -> Tensor:
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=grouped
            )
            return out.transpose(1, 2)

        return _tried(Call(run, lambda: sdpa_kernel(backend)), f"torch's {backend.name}")

    return bind


def _flex(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    shape = problem.shape
    mask = None
    if problem.causal:
        shift = shape.seqlen_k - shape.seqlen_q

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i + shift >= j

        mask = flex.create_block_mask(
            visible, None, None, shape.seqlen_q, shape.seqlen_k, device=q.device
        )
    torch._dynamo.reset()  # one graph per problem: else the eighth one falls back to eager
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = shape.heads != shape.kv_heads

    def run() -> Tensor:
        out = compiled(query, key, value, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return _tried(Call(run), "FlexAttention")


def _fa3(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if not installed("fa3"):
        raise DeviceError("flash_attn_interface (FlashAttention-3) is not installed")
    flash = importlib.import_module("flash_attn_interface").flash_attn_func
    causal = problem.causal

    def run() -> Tensor:
        out = flash(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return _tried(Call(run), "FlashAttention-3")


def _tried(call: Call, who: str) -> Call:
    """`call` once, so that a refusal comes here and in words, not amid the timing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call.once()
        except Exception as error:  # each implementation refuses in its own class
            said = [str(warning.message) for warning in caught] + [str(error)]
            reason = " ".join(said[0].split())[:200]
            raise DeviceError(f"{who} refuses: {reason}") from error
    return call


def _refuse_ragged_causal(problem: Problem, why: str) -> None:
    shape = problem.shape
    if problem.causal and shape.seqlen_q != shape.seqlen_k:
        raise DeviceError(f"{why}: not comparable at {shape}")


PEERS: dict[str, Bind] = {
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "fa3": _fa3,
    "flex": _flex,
}
