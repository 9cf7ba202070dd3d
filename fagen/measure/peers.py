"""Every implementation of attention that fagen is timed beside, as a function that binds inputs.

`bind(problem, q, k, v)` takes q, k, v stored (B, S, H, D) and returns a Call that computes
attention, allocates its output and returns it as (B, Sq, H, Dv). It raises DeviceError, in words,
where the implementation cannot do the problem or is not installed.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

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


def _cudnn(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if problem.ragged_causal:
        raise DeviceError("torch aligns cuDNN's causal mask to the top left")
    return _sdpa(SDPBackend.CUDNN_ATTENTION, problem, q, k, v)


def _fa2(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    mask = None
    if problem.ragged_causal:
        with warnings.catch_warnings():  # of rows that see no key, which are not compared
            warnings.simplefilter("ignore")
            mask = causal_lower_right(problem.shape.seqlen_q, problem.shape.seqlen_k)
    return _sdpa(SDPBackend.FLASH_ATTENTION, problem, q, k, v, mask)


def _sdpa(
    backend: SDPBackend,
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
) -> Call:
    # views, as targets are stated for tensors stored (B, S, H, D)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    causal = problem.causal and mask is None
    grouped = problem.shape.heads != problem.shape.kv_heads

    def run() -> Tensor:
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    name = backend.name.removesuffix("_ATTENTION").lower()
    return tried(Call(run, lambda: sdpa_kernel(backend)), f"torch's {backend.name}", name)


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

    return tried(Call(run), "FlexAttention")


def _fa3(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if not installed("fa3"):
        raise DeviceError("flash_attn_interface (FlashAttention-3) is not installed")
    flash = importlib.import_module("flash_attn_interface").flash_attn_func
    causal = problem.causal

    def run() -> Tensor:
        out = flash(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return tried(Call(run), "FlashAttention-3")


def tried(call: Call, who: str, name: str = "") -> Call:
    """`call` once, so that a refusal comes here and in words, not amid the timing.

    Raises DeviceError; `name` is what torch calls the backend where it says why it is not used.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call.once()
        except Exception as error:  # each implementation refuses in its own class
            said = [str(warning.message) for warning in caught] + [str(error)]
            raise DeviceError(f"{who} refuses: {reason(said, name)}") from error
    return call


def reason(said: Sequence[str], name: str) -> str:
    """What torch says against one backend: the line below its heading, else the first line.

    It goes through all backends, each under "<name> attention kernel not used because:".
    """
    lines = [" ".join(re.sub(r"\(Triggered internally.*", "", line).split()) for line in said]
    heading = f"{name} attention kernel not used"
    for line, below in pairwise(lines):
        if name and line.lower().startswith(heading):
            return below[:200].rstrip(".")
    return lines[0][:200].rstrip(".")


PEERS: dict[str, Bind] = {
    "cudnn": _cudnn,
    "fa2": _fa2,
    "fa3": _fa3,
    "flex": _flex,
}
