"""A built kernel of combining in, its Evidence out: its errors, its bits, and how fast it is.

The rule: against fp64 an error may be some roundings of fp32 for each split, of the largest partial
output that counts in the row, and the output's own; against the emulation not a bit may differ.
Outputs are filled with what is no number beforehand, and so are partial outputs that do not count.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.kinds.combine.emulate import compute
from fagen.kinds.combine.oracle import combine, counting
from fagen.kinds.combine.plan import Plan
from fagen.kinds.verification import Say, beside_a_copy, each_timed
from fagen.measure.sinks import usual_sinks
from fagen.measure.timing import Regime
from fagen.measure.verification import Rule, Run, Verification
from fagen.records import MergeBandwidth, MergeError
from fagen.runtime.c_interface import bind
from fagen.runtime.checks import allocated, checked

ROUNDING = 2.0**-24  # of fp32, relative
LOOSE = 3  # varlen rows before the first sequence, and behind the last
HEADS = 32
SMALL_SPLITS = 16  # of one token
SIZES = ((1, 64), (2, 64), (8, 64), (8, 512))  # splits, and megabytes that a call moves
REPEATS = 20  # calls in a graph: the host is slower than a small one
# what memory limits draws too little power for the clock to fall: short runs do
BRIEF = Regime("brief", idle=0.0, warm=0.005, timed=0.020, rounds=3)


@dataclass(frozen=True)
class Case:
    """What is combined: sizes, how the LSEs are spread, and whether tensors are slices of others.

    lses: "normal"; "same"; "rising", from split to split; "wide", ±1e4; "large", about 3e8, and
    "small", about -3e8, a few units of fp32 apart; "none" where no split saw
    a key; "some" where half of them, and some rows altogether, saw none. Of varlen rows `batch`
    sequences of any lengths have 0 … splits of them, or a number that means none or all; some rows
    belong to no sequence.
    """

    splits: int
    batch: int
    seqlen: int
    heads: int
    lses: str = "normal"
    sliced: bool = False

    def __str__(self) -> str:
        return (
            f"splits={self.splits} B={self.batch} S={self.seqlen} H={self.heads} "
            f"{self.lses}{' sliced' * self.sliced}"
        )


CASES = (
    Case(1, 1, 1, 1),
    Case(1, 2, 9, 3, "wide", sliced=True),
    Case(2, 3, 5, 7, sliced=True),
    Case(2, 1, 33, 4, "none"),
    Case(3, 2, 17, 5, "some", sliced=True),
    Case(7, 2, 3, 11, "wide"),
    Case(8, 33, 1, 32, "same"),
    Case(9, 5, 7, 3, "rising", sliced=True),
    Case(16, 4, 1, 32, "some"),
    Case(17, 40, 2, 8),
    Case(255, 2, 3, 5, "some"),
    Case(256, 3, 2, 4, "rising"),
    Case(256, 1, 5, 2, "wide", sliced=True),
    Case(4, 20, 67, 6, "some"),
    Case(5, 3, 7, 4, "large"),
    Case(19, 2, 5, 3, "small", sliced=True),
    Case(2, 3000, 1, 3, "some", sliced=True),
)


def inputs(plan: Plan, case: Case, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return what a call takes, by name."""
    generator = torch.Generator(device).manual_seed(seed)
    batch = () if plan.varlen else (case.batch,)
    length = case.batch * case.seqlen + 2 * LOOSE if plan.varlen else case.seqlen
    wide = 2 if case.sliced else 1
    shape = (case.splits, *batch, length, case.heads, wide * plan.head_dim)
    outs = torch.randn(shape, generator=generator, device=device)
    outs *= 1 + 9 * (torch.rand(shape, generator=generator, device=device) < 0.01)
    outs = outs.to(getattr(torch, plan.dtype.torch))[..., -plan.head_dim :]
    lses = _lses(case, (case.splits, *batch, wide * case.heads, length), generator)
    lses = lses[..., -case.heads :, :]
    packing = _packing(case, generator) if plan.varlen else {}
    counted = counting(lses.transpose(-1, -2), **packing) != -math.inf
    outs.masked_fill_(~counted[..., None], math.nan)
    if plan.varlen:  # nor is the LSE of a split looked at that a sequence does not have
        lses.masked_fill_(~counted.transpose(-1, -2) & (lses != -math.inf), math.nan)
    return dict(outs=outs, lses=lses, **usual_sinks(plan.sink, case.heads, device), **packing)


def _lses(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    device = generator.device
    normal = torch.randn(shape, generator=generator, device=device)
    if case.lses == "same":
        return torch.full_like(normal, 3.25)
    if case.lses == "none":
        return torch.full_like(normal, -math.inf)
    if case.lses in ("large", "small"):
        return (3e8 if case.lses == "large" else -3e8) + 32 * (2 * normal).round()
    if case.lses == "wide":
        return normal * 1e4
    if case.lses == "rising":
        steps = torch.arange(case.splits, device=device).reshape(-1, *(1,) * (len(shape) - 1))
        return normal + 0.5 * steps
    if case.lses == "some":
        empty = torch.rand(shape, generator=generator, device=device) < 0.5
        empty |= torch.rand(shape[1:], generator=generator, device=device) < 0.1
        return normal.masked_fill(empty, -math.inf)
    return normal


def _packing(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Split rows into sequences, some empty, each with some splits; at both ends rows are over."""
    draw = partial(torch.randint, generator=generator, device=generator.device, dtype=torch.int32)
    rows = case.batch * case.seqlen
    cu_seqlens = draw(0, rows + 1, (case.batch + 1,)).sort().values
    cu_seqlens[0], cu_seqlens[-1] = 0, rows
    num_splits = draw(-1, case.splits + 2, (case.batch,))
    return dict(num_splits=num_splits, cu_seqlens=cu_seqlens + LOOSE)


def case_error(plan: Plan, run: Run, case: Case, seed: int, device: str) -> MergeError:
    """How the kernel's output differs from fp64, and from the emulation, both on its device."""
    call = inputs(plan, case, seed, device)
    out, lse = (tensor.fill_(math.nan) for tensor in allocated(plan, call, checked(plan, call)))
    run(**call, out=out, lse=lse)
    exact, exact_lse = combine(**call)
    emulated, emulated_lse = compute(plan, **call)
    packing = {name: call[name] for name in call.keys() - {"outs", "lses", "sinks"}}
    counted = counting(call["lses"].transpose(-1, -2), **packing) != -math.inf
    largest = call["outs"].double().masked_fill(~counted[..., None], 0).abs().amax((0, -1))
    error = (out.double() - exact).abs().amax(-1) / largest.clamp_min(2.0**-60)
    # where no split counts both are minus infinity; their difference is no number
    off = (lse.double() - exact_lse).masked_fill((lse == exact_lse) & exact_lse.isinf(), 0)
    largest_lse = exact_lse.abs().nan_to_num(posinf=1).clamp_min(1)
    rounding = torch.finfo(out.dtype).eps / 2 if plan.rounded else 0.0
    allowed = (4 * case.splits + 16) * ROUNDING  # steps: a product, a sum and a weight each
    return MergeError(
        batch=case.batch,
        seqlen=case.seqlen,
        heads=case.heads,
        splits=case.splits,
        lses=case.lses,
        error=float(error.max()),
        allowed=allowed + rounding,
        lse_error=float((off.abs() / largest_lse).max()),
        lse_allowed=allowed,
        differing=int((out != emulated).sum() + (lse != emulated_lse).sum()),
    )


RULE = Rule(lambda plan: CASES, case_error)


# ---- speed --------------------------------------------------------------------------------------


def bandwidth(
    plan: Plan, binary: Binary, splits: int, rows: int, *, uneven: bool = False
) -> MergeBandwidth:
    """Time the kernel and a copy of as many bytes, in turn; rows are tokens of HEADS heads.

    Packed tokens are a sequence each, as in decoding; if `uneven` these have any lengths instead.
    """
    tokens = max(1, rows // HEADS)
    case = Case(splits, tokens, 1, HEADS)
    moved = plan.moved(tokens * HEADS, splits)
    dtype = getattr(torch, plan.dtype.torch)
    batch = (tokens,) if plan.varlen else (tokens, 1)
    numbers = (HEADS, tokens) if plan.varlen else (tokens, HEADS, 1)
    call = dict(
        outs=torch.randn((splits, *batch, HEADS, plan.head_dim), device="cuda").to(dtype),
        lses=torch.randn((splits, *numbers), device="cuda"),
    )
    call |= usual_sinks(plan.sink, HEADS, "cuda")
    if plan.varlen:
        count = torch.int32
        call["num_splits"] = torch.full((tokens,), splits, dtype=count, device="cuda")
        starts = torch.arange(tokens + 1, dtype=count, device="cuda")
        if uneven:
            starts[1:-1] = torch.randint_like(starts[1:-1], tokens + 1).sort().values
        call["cu_seqlens"] = starts
    out, lse = allocated(plan, call, checked(plan, call))
    launch = bind(plan, binary.library, **call, out=out, lse=lse)
    kernel, copy = beside_a_copy(launch, out, moved, BRIEF, REPEATS)
    return MergeBandwidth(
        batch=case.batch,
        seqlen=case.seqlen,
        heads=case.heads,
        splits=splits,
        megabytes=moved / 1e6,
        microseconds=kernel * 1e6,
        copy_microseconds=copy * 1e6,
    )


def _sizes(plan: Plan) -> Iterator[tuple[int, int]]:
    """Splits and rows of what is timed."""
    yield SMALL_SPLITS, HEADS
    for splits, megabytes in SIZES:
        yield splits, megabytes * 2**20 // plan.moved(1, splits)


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[MergeBandwidth, ...]:
    return each_timed(partial(bandwidth, plan, binary), _sizes(plan), progress)


VERIFICATION = Verification(lambda plan: RULE, _speeds)
