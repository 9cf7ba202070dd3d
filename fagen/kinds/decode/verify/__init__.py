"""How the kernels of decoding are proved: errors against fp64, bits alone, and speed beside peers.

The rule: max |out - fp64| may be twice that of the same formula computed in 16 bits, plus one unit
in the last place at the largest output; the log-sum-exp is within 1e-3; a row that sees no key
gives exactly 0 and minus infinity; and each sequence has the bits that it has alone. Workspace and
outputs are filled with NaN beforehand, and so are the keys and values outside of each sequence.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.build import Binary
from fagen.kinds.decode.oracle import attend, spans
from fagen.kinds.decode.pages import gathered, in_pages
from fagen.kinds.decode.plan import Plan
from fagen.kinds.decode.verify.speed import caches, timed
from fagen.kinds.verification import LSE_TOLERANCE, Say, each_timed, hard_scores
from fagen.measure import families
from fagen.measure.inputs import softmax_scale, usual
from fagen.measure.numerics import largest, unit_in_last_place
from fagen.measure.sinks import beside_sinks, usual_sinks
from fagen.measure.verification import Contender, Rule, Run, Verification
from fagen.problem import Cell, Sizes
from fagen.records import DecodeError, DecodeSpeed
from fagen.runtime.c_interface import bind, call

# of keys in pages, in turns: as engines have them, and borders of a box of each kind
PAGE_SIZES = 16, 64, 256, 48, 1, 32, 528, 8, 3, 128

KV_HEADS, USUAL_GROUP, USUAL_PAGE = (
    8,
    4,
    16,
)  # of what is timed; of wider kernels all rows are one query's heads


@dataclass(frozen=True)
class Case:
    """What is decoded: sizes, where sequences end and begin, and how wide scores are spread.

    `used` and `pads` are null where they are not passed; `sigma` is the standard deviation of the
    scores, and with `rises` each key has a larger one than those before it. Of a unified maximum
    heads have these references in turn. Keys in pages have pages of so many.
    """

    sizes: Sizes
    used: tuple[int, ...] | None = None
    pads: tuple[int, ...] | None = None
    sigma: float = 1.0
    rises: bool = False
    per_sequence: bool = True  # each sequence is computed by itself too
    references: tuple[float, ...] = (0.0, 2.0)
    page_size: int = 0

    @property
    def lengths(self) -> str:
        """What is passed of them."""
        if self.used is None and self.pads is None:
            words = ["all"]
        else:
            words = [] if self.used is None else [f"to {_listed(self.used)}"]
            words += [] if self.pads is None else [f"from {_listed(self.pads)}"]
        return " ".join([*words, *([f"pages of {self.page_size}"] if self.page_size else [])])

    def __str__(self) -> str:
        return f"{self.sizes} {self.lengths}{' rising' * self.rises}"


def _listed(numbers: Sequence[int]) -> str:
    words = "/".join(map(str, numbers[:6]))
    return f"{words}/…" if len(numbers) > 6 else words


def small_cases(plan: Plan) -> tuple[Case, ...]:
    """Cases that a simulator can do: the borders of blocks and splits, lengths, groups, queries."""
    return _in_pages(plan, _small_cases(plan))


def _in_pages(plan: Plan, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The same of pages, where a kernel has its keys in some."""
    sizes = (PAGE_SIZES[number % len(PAGE_SIZES)] for number in range(len(cases)))
    return tuple(map(replace_page, cases, sizes)) if plan.paged else cases


def replace_page(case: Case, page_size: int) -> Case:
    """A case of keys in pages of that size."""
    return replace(case, page_size=page_size)


def _small_cases(plan: Plan) -> tuple[Case, ...]:
    n, m = plan.block_n, plan.rows
    return (
        Case(Sizes(1, 1, 1, 1, 1)),
        Case(Sizes(1, 4, 1, 1, 2 * n + 3), sigma=4.0),
        Case(Sizes(3, 3, 1, 2, n + 9), (0, n + 9, n), per_sequence=False),
        Case(Sizes(2, 6, 2, 3, 3 * n), (3 * n - 1, n + 1), (n + 5, 2)),
        Case(Sizes(1, m + 1, 1, 1, n - 1), rises=True),
        Case(Sizes(1, 2, 1, m, n), (m // 2,), sigma=8.0),
        Case(Sizes(1, 2, 2, 2, 0)),
        # two steps of a split, the later with larger scores, beside as many splits as there may be
        Case(
            Sizes(2, 2, 2, 1, n * (plan.num_splits + 1)),
            (n * (plan.num_splits + 1), n * plan.num_splits - 3),
            rises=True,
            sigma=6.0,
            per_sequence=False,
        ),
        # more sequences than a warp has lanes, more units than there are thread blocks
        Case(Sizes(35, 1, 1, 1, 8), tuple(range(-1, 34)), per_sequence=False),
        *(_missed(plan) if plan.fixed else ()),
    )


def _missed(plan: Plan) -> tuple[Case, ...]:
    """Cases whose references are far off, for all heads of a tile, some of them, or few keys."""
    n = plan.block_n
    return (
        Case(Sizes(1, 4, 1, 1, 2 * n + 3), references=(-1e3,)),
        Case(Sizes(2, 4, 2, 2, 2 * n), (2 * n, n - 1), references=(1e3, 0.5, -60.0)),
        Case(Sizes(2, 4, 1, 3, 20 * n), sigma=8.0, references=(-9.0, 12.0, 0.0)),
        Case(Sizes(3, 2, 1, 1, n), (0, 1, n), references=(60.0,)),
        # of few keys rows see none of a split; 3e38 overflows in base 2
        Case(
            Sizes(2, 4, 1, 3, 2 * n), (n + 1, 2), references=(math.inf, math.nan, 3e38, -math.inf)
        ),
    )


def verification_cases(plan: Plan) -> tuple[Case, ...]:
    """What a GPU computes: the same, and all that has caught such kernels out."""
    n, m, num_splits = plan.block_n, plan.rows, plan.num_splits
    long = n * num_splits
    borders = (0, 1, n - 1, n, n + 1, long - 1, long, long + 1, 2 * long, 2 * long + 1)
    return _in_pages(
        plan,
        (
            *_small_cases(plan),
            *(
                Case(Sizes(2, group * 2, 2, queries, 3 * n + 7), (3 * n + 7, 2 * n - 3))
                for group, queries in (
                    *((1, 1), (3, 1), (5, 2), (6, 1), (7, 3), (8, 1), (12, 2), (16, 1), (32, 4)),
                    *((1, 16), (4, 4), (4, 16), (8, 9), (m, 1), (m + 1, 3)),
                )
            ),
            Case(Sizes(len(borders), 8, 2, 2, 2 * long + 1), borders),
            Case(Sizes(len(borders), 8, 2, 1, 2 * long + 9), borders, tuple(range(len(borders)))),
            Case(Sizes(4, 8, 8, 16, 64), (0, 3, 16, 64)),  # more queries than keys
            Case(Sizes(3, 4, 1, 1, 300), (2**31 - 1, -(2**31), 77), (-5, 4, 2**31 - 1)),
            Case(Sizes(2, 8, 2, 1, 4 * long + 3), rises=True, sigma=30.0),
            Case(Sizes(2, 8, 2, 4, 3 * long + 3), sigma=16.0),
            Case(
                Sizes(1_100, 4, 2, 1, 70), tuple(i % 71 for i in range(1_100)), per_sequence=False
            ),
            Case(Sizes(3, 32, 8, 1, 8_192), (8_192, 5_000, 8_191)),
            Case(Sizes(1, 32, 8, 4, 32_768)),
            # more than two splits of the longest for each thread block, and fewer
            Case(Sizes(96, 8, 8, 1, long), tuple(long - i for i in range(96)), per_sequence=False),
            Case(Sizes(40, 8, 8, 1, 4 * long), (4 * long, *(range(1, 40))), per_sequence=False),
        ),
    )


def inputs(plan: Plan, case: Case, seed: int, device: str = "cuda") -> dict[str, Tensor | float]:
    """Return what a call takes, by name: N(0, 1), NaN where no key is."""
    sizes, generator = case.sizes, torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, plan.dtype.torch)

    def normal(seqlen: int, heads: int, columns: int) -> Tensor:
        shape = (sizes.batch, seqlen, heads, columns)
        return torch.randn(shape, generator=generator, device=device)

    q = normal(sizes.seqlen_q, sizes.heads, plan.head_dim) * case.sigma
    k = normal(sizes.seqlen_k, sizes.kv_heads, plan.head_dim)
    v = normal(sizes.seqlen_k, sizes.kv_heads, plan.head_dim_v)
    if case.rises:
        q = q.abs()
        k = k.abs() * torch.linspace(0.1, 1, sizes.seqlen_k, device=device)[:, None, None]
    arguments = {"scale": softmax_scale(plan.head_dim), **_given(plan, q, k)}
    lengths = {
        name: torch.tensor(numbers, dtype=torch.int32, device=device)
        for name, numbers in (("seqused_k", case.used), ("leftpad_k", case.pads))
        if numbers is not None
    }
    intervals = spans(k, lengths.get("seqused_k"), lengths.get("leftpad_k"))
    for number, (first, last) in enumerate(intervals):
        for x in (k, v):
            x[number, :first] = math.nan
            x[number, last:] = math.nan
    if plan.fixed:
        turns = [case.references[head % len(case.references)] for head in range(sizes.heads)]
        arguments["reference"] = torch.tensor(turns, device=device)
    arguments |= {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)} | lengths
    return arguments | (_pages(case, arguments, generator) if plan.paged else {})


def _pages(case: Case, arguments: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """K and V in pages, where they lie, and where sequences end: whole pages have more room."""
    k, v, size, room = arguments["k"], arguments["v"], case.page_size, case.sizes.seqlen_k
    ends = arguments.get("seqused_k", torch.full((len(k),), room, device=k.device)).int()
    ends = ends if room % size == 0 else ends.clamp(max=room)
    return in_pages(k, v, size, ends, generator) | {"seqused_k": ends}


def _given(plan: Plan, q: Tensor, k: Tensor) -> dict[str, Any]:
    """What calls give to mask and score of q (B, Sq, H, D) and k (B, Sk, Hk, D), and sinks."""
    given = usual(plan.mask, len(q), q.shape[1], k.shape[1], q.device) | {**plan.score.usual}
    return given | usual_sinks(plan.sink, q.shape[2], q.device)


def outputs(arguments: dict[str, Tensor | float]) -> dict[str, Tensor]:
    """Return where a call of these arguments writes, full of NaN."""
    q, v = arguments["q"], arguments["v"]
    assert isinstance(q, Tensor) and isinstance(v, Tensor)
    batch, seqlen_q, heads, _ = q.shape
    return {
        "out": q.new_full((batch, seqlen_q, heads, v.shape[3]), math.nan),
        "lse": q.new_full((batch, heads, seqlen_q), math.nan, dtype=torch.float32),
    }


def decode_error(plan: Plan, run: Run, case: Case, seed: int, device: str) -> DecodeError:
    """Run the kernels on a case, and on each of its sequences alone."""
    if plan.paged and not case.page_size:
        case = replace_page(case, USUAL_PAGE)
    call = inputs(plan, case, seed, device)
    results = outputs(call)
    run(**call, **results)
    by_sequence = {
        name: x
        for name, x in call.items()
        if isinstance(x, Tensor) and name not in ("reference", "sinks")
    }
    rows = dict(by_sequence)
    if plan.paged:
        by_sequence = {name: x for name, x in by_sequence.items() if name not in ("k", "v")}
        table = rows.pop("block_table")
        rows |= {name: gathered(rows[name], table, rows["seqused_k"]) for name in ("k", "v")}
    sinks = {name: call[name] for name in call.keys() & {"sinks"}}
    given = {name: call[name] for name in plan.mask.given}
    tensors = {name: x for name, x in rows.items() if name not in given}
    of_call: dict[str, Any] = dict(mask=plan.mask, score=plan.score.as_usual, scale=call["scale"])
    formula = partial(attend, **tensors, **of_call, given=given)
    exact, exact_lse = formula()
    # of keys alone: sinks may be as large as they like
    lse_size = largest(exact_lse.masked_fill(exact_lse == -math.inf, 0))
    dtype = by_sequence["q"].dtype
    rough, _ = beside_sinks(formula(dtype=dtype)[0], exact_lse, **sinks)
    exact, exact_lse = beside_sinks(exact, exact_lse, **sinks)
    torchs = largest(rough.double() - exact)
    none = exact_lse == -math.inf
    # where no key is seen nothing else will do
    off = (results["lse"].double() - exact_lse).masked_fill(none & (results["lse"] == -math.inf), 0)
    differing = 0
    for number in range(case.sizes.batch if case.per_sequence and case.sizes.batch > 1 else 0):
        own = call | {name: x[number : number + 1] for name, x in by_sequence.items()}
        own_results = outputs(own)
        run(**own, **own_results)
        pairs = ((own_results[name][0], results[name][number]) for name in own_results)
        differing += sum(int((own_value != other).sum()) for own_value, other in pairs)
    return DecodeError(
        batch=case.sizes.batch,
        seqlen_q=case.sizes.seqlen_q,
        seqlen_k=case.sizes.seqlen_k,
        heads=case.sizes.heads,
        kv_heads=case.sizes.kv_heads,
        lengths=case.lengths,
        error=largest(results["out"].double() - exact),
        torch_error=torchs,
        allowed=2 * torchs + unit_in_last_place(largest(exact), dtype),
        lse_error=largest(off),
        lse_allowed=LSE_TOLERANCE * max(1.0, lse_size / 100),
        differing=differing,
    )


def hard_errors(
    plan: Plan, run: Run, small: bool, device: str
) -> Iterator[tuple[str, DecodeError]]:
    """Yield the kernels' worst errors of the families of hard scores, at each size."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        arguments = {"q": q, "k": k, "v": v, "scale": scale, **_given(plan, q, k)}
        if plan.fixed:
            arguments["reference"] = torch.linspace(0, 5, q.shape[2], device=q.device)
        arguments |= caches(plan, k, v)
        into = outputs(arguments)
        run(**arguments, **into)
        return into["out"], into["lse"]

    def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        exact = attend(q, k, v, mask=plan.mask, score=plan.score.as_usual, scale=scale)
        return beside_sinks(*exact, **usual_sinks(plan.sink, q.shape[2], q.device))

    sizes = families.SMALL_SIZES if small else families.SIZES
    for label, fields in hard_scores(plan, kernel, exact, sizes, device):
        yield f"{label} all", DecodeError(**fields, lengths="all", differing=0)


RULE = Rule(verification_cases, decode_error, small_cases, hard_errors, columns=65)


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[DecodeSpeed, ...]:
    group = USUAL_GROUP if plan.rows == SM90.wgmma_n_step else plan.rows
    shapes = (
        (Sizes(batch, KV_HEADS * group, KV_HEADS, 1, keys),)
        for batch, keys in ((1, 8_192), (32, 4_096))
    )
    return each_timed(partial(timed, plan, binary.library), shapes, progress)


# ---- beside others -------------------------------------------------------------------------------


def _named(plan: Plan, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What a call takes, by name."""
    names = ("q", "k", "v", *(("reference",) if plan.fixed else ()), "scale", *_more(plan))
    return dict(zip(names, arguments, strict=True))


def _more(plan: Plan) -> tuple[str, ...]:
    """The names of what calls give besides: to mask and score, and sinks."""
    pages = ("block_table", "seqused_k") if plan.paged else ()
    return (*plan.mask.given, *plan.score.given, *(("sinks",) if plan.sink else ()), *pages)


def _arguments(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What the op takes of all keys, in its order."""
    # scores are N(0, 1): a good reference
    more = (torch.zeros(q.shape[2], device=q.device),) if plan.fixed else ()
    given = _given(plan, q, k)
    if plan.paged:
        given |= caches(plan, k, v)
        k, v = given["k"], given["v"]
    return q, k, v, *more, softmax_scale(plan.head_dim), *(given[x] for x in _more(plan))


def _outputs(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Where it writes the output; the log-sum-exp is left out."""
    return (outputs(_named(plan, arguments))["out"],)


def _launch(
    plan: Plan, library: Path, arguments: tuple[Any, ...], into: tuple[Tensor, ...]
) -> Callable[[], None]:
    return bind(plan, library, **_named(plan, arguments), out=into[0])


def _quick(plan: Plan, sizes: Sizes) -> tuple[Sizes, ...]:
    """What goes wrong soonest, and what is like these sizes.

    Borders of blocks and splits, several tiles of rows, more units than there are thread blocks.
    """
    n, m = plan.block_n, plan.rows
    like = replace(
        sizes, batch=min(sizes.batch, 3), seqlen_k=min(sizes.seqlen_k, 2 * n * plan.num_splits)
    )
    return (
        Sizes(3, 8, 2, 1, n * (plan.num_splits + 1) + 3),
        Sizes(2, m + 1, 1, 1, 2 * n + 3),
        Sizes(2, 4, 2, m // 2 + 3, n),
        Sizes(24, 16, 8, 2, 5 * n + 9),
        like,
    )


def _error(plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> DecodeError:
    """Run a built kernel at these sizes, on numbers of its own: each sequence is a bit shorter.

    What lies behind its end is NaN.
    """
    sizes = cell.sizes
    used = tuple(max(0, sizes.seqlen_k - 7 * number) for number in range(sizes.batch))
    run = partial(call, plan, library)
    return decode_error(plan, run, Case(sizes, used, sigma=2.0), len(used), q.device.type)


CONTENDER = Contender(
    arguments=_arguments,
    outputs=_outputs,
    launch=_launch,
    alike=lambda plan: (plan.fixed, plan.sink),
    error=_error,
    rotates=True,
    quick=_quick,
)
VERIFICATION = Verification(lambda plan: RULE, _speeds, CONTENDER)
