"""One process that times calls, by fagen's public functions and by torch's backends.

    PYTHONPATH=<tree> python benchmarks/peer_calls.py

A line of JSON comes in for each question, and a line goes out:

    {"call": {…}, "who": ["fagen", "cudnn"]}   makes a call ready: {"ready": […], "refused": {…}, …}
    {"time": "fagen"}                          runs it for a round: {"us": 123.4}

Of a tree of fagen nothing is used but its public functions, so that any can be asked; peers are
torch's own operators, by fagen.measure where that has them. Calls are runs of a CUDA graph, so that
no host is in their times. K and V of a decoding call go round through more memory than the L2 cache
holds.
"""

import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FORWARD, BACKWARD = "forward", "backward"
VARLEN, VARLEN_BACKWARD = "varlen forward", "varlen backward"
DECODE, DECODE_MIXED, E4M3 = "decode, equal lengths", "decode, mixed lengths", "e4m3"
KINDS = (FORWARD, BACKWARD, VARLEN, VARLEN_BACKWARD, DECODE, DECODE_MIXED, E4M3)
GRADIENTS, OF_LENGTHS, DECODING = (
    (BACKWARD, VARLEN_BACKWARD),
    (VARLEN, VARLEN_BACKWARD),
    (DECODE, DECODE_MIXED),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROTATED_BYTES, MOST_BUFFERS = 160 * 10**6, 128  # three times what the L2 cache holds
ROUND_SECONDS, IDLE_SECONDS, MOST_RUNS = 0.006, 0.010, 200
ALLOWED = {"fp16": 1e-2, "bf16": 4e-2}  # of an output, relative to its root mean square


@dataclass(frozen=True)
class PeerCall:
    """What is called: `lengths` are those of varlen sequences, or of the keys that are decoded."""

    kind: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...] = ()

    @classmethod
    def read(cls, values: dict[str, Any]) -> "PeerCall":
        """From what `vars` of one is, through JSON."""
        return cls(**values | {"lengths": tuple(values["lengths"])})

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def shape(self) -> str:
        """In words."""
        if self.kind in OF_LENGTHS:
            sizes = f"{len(self.lengths)} of up to {max(self.lengths)}"
        elif self.seqlen_q == self.seqlen_k:
            sizes = f"{self.batch} × {self.seqlen_q}"
        else:
            sizes = f"{self.batch} × {self.seqlen_q} of {self.seqlen_k}"
        width = (
            f"{self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"{self.head_dim}/{self.head_dim_v}"
        )
        return f"{self.dtype} hd{width} {self.mask} {sizes}, {self.heads}/{self.kv_heads}"


Run = Callable[[], Any]


@dataclass
class Operands:
    """What a call is called with; of decoding, K and V in many buffers."""

    call: PeerCall
    q: Tensor
    pairs: Sequence[tuple[Tensor, Tensor]]
    dout: Tensor
    offsets: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, call: PeerCall) -> "Operands":
        """Random ones, N(0, 1), the same each time."""
        dtype, dice = DTYPES[call.dtype], torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=dice, device="cuda", dtype=dtype)

        lead: tuple[int, ...] = ()
        if call.kind in OF_LENGTHS:
            q_rows = k_rows = sum(call.lengths)
        else:
            q_rows, k_rows, lead = call.seqlen_q, call.seqlen_k, (call.batch,)
        q = normal(*lead, q_rows, call.heads, call.head_dim)
        one = math.prod(lead) * k_rows * call.kv_heads * (call.head_dim + call.head_dim_v) * 2
        buffers = min(MOST_BUFFERS, -(-ROTATED_BYTES // one) + 1) if call.kind in DECODING else 1
        pairs = [
            (
                normal(*lead, k_rows, call.kv_heads, call.head_dim),
                normal(*lead, k_rows, call.kv_heads, call.head_dim_v),
            )
            for _ in range(buffers)
        ]
        made = cls(call, q, pairs, normal(*lead, q_rows, call.heads, call.head_dim_v))
        as_int = {"dtype": torch.int32, "device": "cuda"}
        if call.kind in OF_LENGTHS:
            made.offsets = torch.tensor([0, *accumulate(call.lengths)], **as_int)
        if call.kind == DECODE_MIXED:
            made.lengths = torch.tensor(call.lengths, **as_int)
        return made

    def runs(self, attend: Callable[..., Any]) -> Iterator[Run]:
        """`attend(q, k, v)` with each K and V, or what takes its gradients back, without an end."""
        k, v = self.pairs[0]
        if self.call.kind in GRADIENTS:
            q, k, v = (x.detach().requires_grad_() for x in (self.q, k, v))
            out = attend(q, k, v)
            yield from cycle(
                [lambda: torch.autograd.grad(out, (q, k, v), self.dout, retain_graph=True)]
            )
        yield from cycle([lambda k=k, v=v: attend(self.q, k, v) for k, v in self.pairs])


# ---- fagen ---------------------------------------------------------------------------------------


def fagen(operands: Operands) -> Iterator[Run]:
    """fagen's own function for such a call, with what serves it by default."""
    library: Any = importlib.import_module("fagen")
    call = operands.call
    if call.kind in DECODING:
        return operands.runs(
            lambda q, k, v: library.attention_decode(
                q, k, v, seqused_k=operands.lengths, causal=call.causal
            )
        )
    if call.kind in OF_LENGTHS:
        most = max(call.lengths)
        return operands.runs(
            lambda q, k, v: library.attention_varlen(
                *(q, k, v, operands.offsets),
                max_seqlen_q=most,
                max_seqlen_k=most,
                causal=call.causal,
            )
        )
    if call.kind == E4M3:
        ones = torch.ones((), device="cuda")
        k, v = operands.pairs[0]
        operands.q = operands.q.to(torch.float8_e4m3fn)
        operands.pairs = [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))]
        return operands.runs(
            lambda q, k, v: library.attention(
                q, k, v, causal=call.causal, q_descale=ones, k_descale=ones, v_descale=ones
            )
        )
    return operands.runs(lambda q, k, v: library.attention(q, k, v, causal=call.causal))


# ---- peers ---------------------------------------------------------------------------------------


def cudnn(operands: Operands) -> Iterator[Run]:
    """cuDNN through torch; of e4m3 in 16 bits, of several decoded queries without a mask."""
    call = operands.call
    if call.kind in OF_LENGTHS or operands.lengths is not None:
        raise RuntimeError("it is not timed over lengths")
    if call.causal and call.kind not in DECODING and call.seqlen_q != call.seqlen_k:
        raise RuntimeError("its causal mask is aligned to the top left")
    return _dense("cudnn", operands)


def fa2(operands: Operands) -> Iterator[Run]:
    """FlashAttention-2 through torch."""
    call = operands.call
    if call.head_dim != call.head_dim_v or call.kind == E4M3:
        raise RuntimeError("it does not do that")
    if call.kind in OF_LENGTHS:
        return _fa2_varlen(operands)
    if operands.lengths is not None:
        return _fa2_of_caches(operands)
    if call.causal and call.kind not in DECODING and call.seqlen_q != call.seqlen_k:
        raise RuntimeError("torch's op aligns its causal mask to the top left")
    return _dense("flash", operands)


def _dense(backend: str, operands: Operands) -> Iterator[Run]:
    call, causal = operands.call, operands.call.causal and operands.call.kind not in DECODING
    if call.kind in GRADIENTS:  # called directly: torch's rules for gradients are others
        attended = _measure().attended(backend, operands.q, *operands.pairs[0], causal=causal)
        return cycle([lambda: attended.backward(operands.dout)])
    which = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    grouped = call.heads != call.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(which):
            out = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    return operands.runs(attend)


def _fa2_varlen(operands: Operands) -> Iterator[Run]:
    call, offsets = operands.call, operands.offsets
    lengths = offsets, offsets, max(call.lengths), max(call.lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return _measure().attended_varlen(q, k, v, lengths, causal=call.causal)

    if call.kind not in GRADIENTS:
        return operands.runs(lambda q, k, v: attend(q, k, v).out)
    attended = attend(operands.q, *operands.pairs[0])
    return cycle([lambda: attended.backward(operands.dout)])


def _fa2_of_caches(operands: Operands) -> Iterator[Run]:
    """Of each cache the keys that are used."""
    call = operands.call
    most = call.seqlen_q, call.seqlen_k
    at_q, at_k = (
        torch.arange(0, (call.batch + 1) * n, n, dtype=torch.int32, device="cuda") for n in most
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        how = *(at_q, at_k, *most, 0.0, call.causal), False
        scale, used = call.head_dim**-0.5, operands.lengths
        op = torch.ops.aten._flash_attention_forward
        out: Tensor = op(*packed, *how, scale=scale, seqused_k=used)[0]
        return out

    return operands.runs(attend)


def _measure() -> Any:
    return importlib.import_module("fagen.measure.gradients")


WHO: dict[str, Callable[[Operands], Iterator[Run]]] = {"fagen": fagen, "cudnn": cudnn, "fa2": fa2}


# ---- times ---------------------------------------------------------------------------------------


@dataclass
class Captured:
    """Runs of a call as one graph, with what they read."""

    graph: torch.cuda.CUDAGraph
    number: int  # of runs
    reads: object
    output: Any  # of the first run

    @classmethod
    def of(cls, runs: Iterator[Run], buffers: int) -> "Captured":
        """As many as last a round, each of the buffers as often as the others."""
        output = next(runs)()
        torch.cuda.synchronize()
        lasted, tried = 0.0, 1
        while lasted < 0.002 and tried < MOST_RUNS:
            tried *= 4
            began = time.perf_counter()
            for _ in range(tried):
                next(runs)()
            torch.cuda.synchronize()
            lasted = time.perf_counter() - began
        number = max(1, min(MOST_RUNS, round(ROUND_SECONDS * tried / lasted)))
        number = -(-number // buffers) * buffers
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(number):
                next(runs)()
        graph.replay()
        torch.cuda.synchronize()
        return cls(graph, number, runs, output)

    def microseconds(self) -> float:
        """Of a run, in one replay after a pause."""
        time.sleep(IDLE_SECONDS)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.number


def difference(mine: Any, other: Any) -> float:
    """The worst of outputs, or of gradients: root mean squares of a difference over the other's."""
    several = zip(
        *(x if isinstance(x, tuple | list) else (x,) for x in (mine, other)), strict=False
    )
    worst = 0.0
    for one, judge in several:
        a, b = one.float().flatten(), judge.float().flatten()
        worst = max(worst, float((a - b).norm() / b.norm().clamp(min=1e-20)))
    return worst


def ready(call: PeerCall, who: Sequence[str]) -> tuple[dict[str, Captured], dict[str, str], float]:
    """What runs by name, what was refused and why, and how far outputs lie apart."""
    captured: dict[str, Captured] = {}
    refused: dict[str, str] = {}
    for name in who:
        operands = Operands.of(call)
        try:
            captured[name] = Captured.of(WHO[name](operands), len(operands.pairs))
        except Exception as error:  # of any tree, and of torch
            refused[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            torch.cuda.synchronize()
    # peers see all keys of several queries that are decoded, and e4m3's are in 16 bits
    comparable = call.kind != E4M3 and not (call.kind in DECODING and call.seqlen_q > 1)
    apart = [
        difference(captured["fagen"].output, captured[name].output)
        for name in captured
        if comparable and "fagen" in captured
    ]
    return captured, refused, max(apart, default=0.0)


def main() -> None:
    """Answer questions until there are no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else prints
    captured: dict[str, Captured] = {}
    with torch.cuda.stream(torch.cuda.Stream()):  # gradients are captured where forward ran
        for line in sys.stdin:
            question = json.loads(line)
            if "time" in question:
                answer: dict[str, Any] = {"us": captured[question["time"]].microseconds()}
            else:
                captured.clear()
                torch.cuda.empty_cache()
                call = PeerCall.read({f.name: question["call"][f.name] for f in fields(PeerCall)})
                captured, refused, apart = ready(call, question["who"])
                answer = {"ready": list(captured), "refused": refused, "apart": apart}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
