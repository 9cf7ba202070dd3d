"""Masks of which a call gives numbers: what rows see by lambdas of ours, never by their texts."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import fagen
from fagen import registry, simulator
from fagen.e4m3 import E4M3, by_columns
from fagen.kind import load_named
from fagen.render import render
from fagen.runtime.checks import allocated, checked

# whether queries at i of m see keys j of n, in sequence b, by what a call gives
SEES: Mapping[str, Callable[..., Any]] = {
    "full": lambda b, i, m, j, n: torch.tensor(True),
    "causal": lambda b, i, m, j, n: j <= i + n - m,
    "window": lambda b, i, m, j, n, window_left, window_right: (
        (-window_left <= j - (i + n - m)) & (j - (i + n - m) <= window_right)
    ),
    "chunked": lambda b, i, m, j, n, chunk: (j <= i + n - m) & (j // chunk == (i + n - m) // chunk),
    "prefix": lambda b, i, m, j, n, prefix: (j <= i + n - m) | (j < int(prefix[b])),
    "causal_by_sequence": lambda b, i, m, j, n, causal_of: (
        (j <= i + n - m) | (int(causal_of[b]) == 0)
    ),
    "document": lambda b, i, m, j, n, first, last: (first[b, i] <= j) & (j < last[b, i]),
}


def seen(mask: str, sizes: tuple[int, int], given: Mapping[str, Any], sequence: int = 0) -> Tensor:
    """Whether a query (rows) sees a key (columns) of a sequence."""
    rows, keys = sizes
    pairs = torch.arange(rows)[:, None], rows, torch.arange(keys), keys
    return torch.as_tensor(SEES[mask](sequence, *pairs, **given)).expand(rows, keys)


# what scaled products (H, Sq, Sk) become, by sequence, head, KV head, query, key, lengths, heads
Scored = Callable[..., Tensor]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    score: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence in fp64: out (Sq, H, Dv) and lse (H, Sq)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = score(scores) if score else scores
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def scored(
    score: Scored, batch: int, heads: int, kv_heads: int, sizes: tuple[int, int], given: Any
) -> Callable[[Tensor], Tensor]:
    """A score by hand, of one sequence."""
    rows, keys = sizes
    h = torch.arange(heads)[:, None, None]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    names = {"b": batch, "h": h, "kv": h // (heads // kv_heads), "i": i, "j": j}
    return lambda s: score(s.cpu(), **names, m=rows, n=keys, heads=heads, **given).to(s.device)


def flex(q: Tensor, k: Tensor, v: Tensor, sees: Any) -> tuple[Tensor, Tensor]:
    """FlexAttention, uncompiled, of tensors (B, S, H, D): out (B, Sq, H, Dv) and lse (B, H, Sq).

    `sees` is told a sequence, a query's position and a key.
    """
    from torch.nn.attention.flex_attention import (  # which takes a second
        create_block_mask,
        flex_attention,
    )

    (batch, rows), keys = q.shape[:2], k.shape[1]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.as_tensor(sees(b, i + keys - rows, j))

    block_mask = create_block_mask(mask_mod, batch, None, rows, keys, device=q.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        out, lse = flex_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            block_mask=block_mask,
            enable_gqa=True,
            return_lse=True,
        )
    return out.transpose(1, 2), lse


def call_of(
    slug: str,
    sizes: tuple[int, ...],
    given: Mapping[str, Any],
    seed: int = 0,
    score: Scored | None = None,
    of_score: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
    changed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Any, dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """A Plan, arguments by name of (batch, heads, kv_heads, queries, keys), and what is right.

    With a score that is given other numbers, q is larger; `changed` makes others of Q and K.
    """
    plan = registry.plan_of(slug)
    batch, heads, kv_heads, rows, keys = sizes
    dice = torch.Generator().manual_seed(seed)
    d, d_v = plan.head_dim, plan.head_dim_v
    of_tensors = (rows, heads, d), (keys, kv_heads, d), (keys, kv_heads, d_v)
    q, k, v = (torch.randn(batch, n, h, c, generator=dice) for n, h, c in of_tensors)
    q, k = changed(q, k) if changed else (q, k)
    descales = plan.dtype.fp8
    dtype = E4M3 if descales else getattr(torch, plan.dtype.torch)
    q, k, v = (x.to(device, dtype) for x in (q * (3 if score else 1), k, v))
    wide = [x.float() for x in (q, k, v)]
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": plan.head_dim**-0.5}
    call |= on(device, {**given, **of_score})
    if descales:
        call |= dict.fromkeys(("q_descale", "k_descale", "v_descale", "v_mean", "k_mean"))
        call["v"] = v if plan.v_rows else by_columns(v)
        if plan.scales.by_block:
            for name, x in (("q", q), ("k", k)):
                blocks = -(-x.shape[1] // plan.scales.rows)
                call[f"{name}_descale"] = torch.ones(batch, x.shape[2], blocks, device=device)
    exact = []
    for number in range(batch):
        visible = seen(plan.mask.name, (rows, keys), given, number).to(device)
        own = scored(score, number, heads, kv_heads, (rows, keys), of_score) if score else None
        exact.append(dense(*(x[number] for x in wide), visible, call["scale"], own))
    return plan, call, exact


def on(device: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a call gives, with its tables on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def emulated(plan: Any, call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What the emulator makes of it."""
    found: tuple[Tensor, Tensor] = load_named(registry.kind(plan.kind).emulate)(plan, **call)
    return found


def simulated(
    plan: Any, call: Mapping[str, Any], kernel: str = "", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """What the kernel's own text makes of it, on the simulated GPU, into outputs full of NaN."""
    results = allocated(plan, call, checked(plan, call))
    for result in results:
        result.fill_(math.nan)
    named = {t.result: x for t, x in zip(plan.signature.outputs, results, strict=True)}
    library = simulator.build(kernel or render(plan).kernel)
    simulator.call(plan, library, seed=seed, **call, named=named)
    out, lse = results
    return out, lse


TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "e4m3": 0.13}


def check(plan: Any, found: tuple[Tensor, Tensor], exact: list[tuple[Tensor, Tensor]]) -> None:
    """Raise AssertionError where something is wrong; a row without keys is zeros and -inf."""
    out, lse = found
    for number, (wanted, log_sum) in enumerate(exact):
        none = log_sum == -math.inf
        assert torch.equal(lse[number] == -math.inf, none)
        assert (out[number].transpose(0, 1)[none] == 0).all()
        assert out[number].isfinite().all()
        error, size = (
            float(x.abs().max()) if x.numel() else 0.0 for x in (out[number] - wanted, wanted)
        )
        assert error <= TOLERANCE[plan.dtype.name] * max(1.0, size / 2), f"{error} of {size}"
        off = (lse[number].double() - log_sum)[~none]
        assert off.numel() == 0 or off.abs().max() < (1e-2 if plan.dtype.fp8 else 1e-3)


def windows(n: int, keys: int) -> Iterator[dict[str, int]]:
    """Widths that matter to blocks of n keys, to the left, to both sides, and open ones."""
    for width in (1, n - 1, n, n + 1, keys + 5):
        yield {"window_left": width - 1, "window_right": 0}
        yield {"window_left": width - 1, "window_right": width // 2}
    yield {"window_left": 1 << 30, "window_right": 3}
    yield {"window_left": 0, "window_right": 1 << 30}


def others(mask: str, sizes: tuple[int, ...], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Numbers that calls of other masks give: ordinary ones, and some that mean nothing."""
    batch, _, _, rows, keys = sizes
    dice = torch.Generator().manual_seed(seed)
    if mask == "chunked":
        yield from ({"chunk": chunk} for chunk in (1, 7, 32, 64, 65, keys + 3, 1 << 24))
    if mask == "prefix":
        for numbers in ([0] * batch, [keys // 2] * batch, [-5, keys + 9, 33][:batch]):
            yield {"prefix": torch.tensor(numbers, dtype=torch.int32)}
    if mask == "causal_by_sequence":
        for numbers in ([1, 0, 1], [0, 1, 0]):
            yield {"causal_of": torch.tensor(numbers[:batch], dtype=torch.int32)}
    if mask == "document":
        for most in (5, 40, keys):
            yield _documents(batch, rows, keys, most, dice)
        # those of which most rows see nothing, and a document far behind another
        first = torch.full((batch, rows), keys // 3, dtype=torch.int32)
        first[:, rows // 2 :] = keys - 3
        last = first.clone()
        last[:, rows // 2 :] = keys + 7
        yield {"first": first, "last": last}


def _documents(
    batch: int, rows: int, keys: int, most: int, dice: torch.Generator
) -> dict[str, Tensor]:
    """Documents of up to so many keys, and of about as many rows."""
    first, last = (torch.zeros(batch, rows, dtype=torch.int32) for _ in range(2))
    for number in range(batch):
        begins = [0]
        while begins[-1] < keys:
            begins.append(begins[-1] + int(torch.randint(1, most + 1, (), generator=dice)))
        ends = torch.tensor(begins[1:]).clamp(max=keys)
        own = torch.linspace(0, len(ends) - 1e-3, max(1, rows))[:rows].long()
        first[number], last[number] = torch.tensor(begins)[own], ends[own]
    return {"first": first, "last": last}


# ---- varlen sequences ----------------------------------------------------------------------------

# of queries and of keys: none of either, more of either, some that fill several tiles
LENGTHS = ((5, 5), (0, 7), (140, 140), (3, 0), (1, 130), (70, 33), (33, 250))
AROUND = 2, 3  # rows of no sequence before and behind


def varlen_call(
    slug: str,
    given: Mapping[str, Any],
    heads: tuple[int, int] = (2, 1),
    score: Scored | None = None,
    of_score: Mapping[str, Any] = MappingProxyType({}),
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    device: str = "cpu",
) -> tuple[Any, dict[str, Any], tuple[Tensor, Tensor]]:
    """A Plan, arguments by name, and what is right: out and lse of all rows.

    Tables by query are of (total_q,), those by sequence of as many as `lengths`. With a score that
    is given other numbers, q is larger.
    """
    plan = registry.plan_of(slug)
    dice = torch.Generator().manual_seed(1)
    before, behind = AROUND
    ends_q = torch.tensor([0, *(m for m, _ in lengths)]).cumsum(0) + before
    ends_k = torch.tensor([0, *(n for _, n in lengths)]).cumsum(0)
    rows, keys = int(ends_q[-1]) + behind, int(ends_k[-1])
    dtype = E4M3 if plan.descales else getattr(torch, plan.dtype.torch)
    q, k, v = (
        torch.randn(n, h, plan.head_dim, generator=dice).to(device, dtype)
        for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    q = (q.float() * (3 if score else 1)).to(dtype)
    scale = plan.head_dim**-0.5
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": scale, "seqused_k": None}
    ends = {"cu_seqlens_q": ends_q.int(), "cu_seqlens_k": ends_k.int()}
    call |= on(device, {**ends, **given, **of_score})
    if plan.descales:
        call |= dict.fromkeys(("q_descale", "k_descale", "v_descale", "v_mean", "k_mean"))
    out = torch.zeros(rows, heads[0], plan.head_dim, dtype=torch.float64, device=device)
    lse = torch.full((heads[0], rows), -math.inf, dtype=torch.float64, device=device)
    by_query = "first" in given
    for number, (m, n) in enumerate(lengths):
        of_q = slice(int(ends_q[number]), int(ends_q[number]) + m)
        of_k = slice(int(ends_k[number]), int(ends_k[number]) + n)
        own = {name: x[of_q][None] for name, x in given.items()} if by_query else given
        visible = seen(plan.mask.name, (m, n), own, 0 if by_query else number).to(device)
        of_sequence = scored(score, number, *heads, (m, n), of_score) if score else None
        wide = (x.float() for x in (q[of_q], k[of_k], v[of_k]))
        found = dense(*wide, visible, scale, of_sequence)
        out[of_q], lse[:, of_q] = found
    return plan, call, (out, lse)


def varlen_numbers(
    mask: str, n: int, lengths: Sequence[tuple[int, int]] = LENGTHS
) -> Iterator[dict[str, Any]]:
    """What calls of varlen sequences give to a mask."""
    most_q, most_k = (max(counts) for counts in zip(*lengths, strict=True))
    if mask == "window":
        yield from list(windows(n, most_k))[::2]
        yield {"window_left": 5, "window_right": 20}
        return
    sizes = (len(lengths), 0, 0, most_q, most_k)
    for given in others(mask, sizes):
        if mask != "document":
            yield {
                name: x if isinstance(x, int) else x.repeat(len(lengths))[: len(lengths)]
                for name, x in given.items()
            }
            continue
        parts = {name: [torch.full((AROUND[0],), 9)] for name in given}
        for number, (m, keys) in enumerate(lengths):
            for name, x in given.items():
                parts[name].append(x[number, :m].clamp(max=keys))
        for name in given:
            parts[name].append(torch.full((AROUND[1],), 7))
        yield {name: torch.cat(x).int() for name, x in parts.items()}


def check_varlen(plan: Any, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """Raise AssertionError where something is wrong, as `check` does."""
    (out, lse), (wanted, log_sum) = found, exact
    check(plan, (out[None], lse[None]), [(wanted, log_sum)])


def compiled_windows(k: Tensor, v: Tensor) -> tuple[Any, list[Any]]:
    """A compiled call of q and a window's width, and the graphs that it has been made into."""
    graphs: list[Any] = []

    def counted(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    call = torch.compile(
        lambda q, width: fagen.attention(q, k, v, causal=True, window=width),
        fullgraph=True,
        backend=counted,
    )
    return call, graphs
