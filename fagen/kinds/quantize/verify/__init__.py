"""A built quantiser in, its Evidence out: how it differs from its reference, and how fast it is.

The rule: a value may be the neighbour of what the reference rounds to, in one of a thousand cases,
since sums inside a rotation are added up in another order; descales agree to 1e-5, and means to as
much of what becomes 448. Where means are taken off, what is left of a block may be the rounding of
its own numbers, as that of a single row is: which bytes and descale that makes says nothing. Such a
block's values times its descale, what its descale makes of 448, and a head's means must then be
within that rounding. Outputs are filled with what is no number beforehand, so that a value that was
not written shows up.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.e4m3 import E4M3, by_columns, hadamard, random_signs, rounded, rows_of
from fagen.kinds.quantize.oracle import quantize
from fagen.kinds.quantize.plan import Plan
from fagen.kinds.verification import Say, beside_a_copy
from fagen.measure.numerics import largest
from fagen.measure.timing import SUSTAINED
from fagen.measure.verification import Rule, Run, Verification
from fagen.problem import HIDDEN
from fagen.records import Bandwidth, RoundingError
from fagen.runtime.c_interface import bind
from fagen.runtime.checks import allocated, checked

NEIGHBOURS = 1e-3  # of the values
DESCALES = 1e-5  # relative
# Of the largest |x| of what shares a mean, times the square root of the columns that are rotated
# together: four units in the last place of fp32. A rotated number is no larger than that product,
# and made in log2 of so many sums, each of which rounds by half a unit of itself, as is its mean.
ROUNDING = 2.0**-21
SEED = 5  # of the rotation
GIVEN = 0.02  # a descale, with which some values are too large
GIVEN_MEAN = 0.5

_NOT_A_NUMBER = 0x7F  # a byte of e4m3
_SIGN = 0x80

# x, the outputs, and what is given of them by name: enqueues the kernel
Kernel = Callable[[Tensor, "Outputs", Mapping[str, Tensor]], None]
Outputs = tuple[Tensor, ...]  # values, descales, and means where the Plan takes them off


@dataclass(frozen=True)
class Size:
    """What a quantiser takes at run time; x is a slice of something wider where it is packed."""

    batch: int
    seqlen: int
    heads: int
    packed: bool = False

    def __str__(self) -> str:
        return f"B={self.batch} S={self.seqlen} H={self.heads}{' packed' * self.packed}"


SIZES = (  # one row, whole blocks and broken ones, many thread blocks, strides of other tensors
    Size(1, 1, 1),
    Size(1, 128, 2),
    Size(2, 127, 3),
    Size(1, 129, 2, packed=True),
    Size(3, 203, 5),
    Size(2, 515, 6, packed=True),
    Size(4, 384, 40),
    Size(1, 4097, 4),
    Size(2, 16, 1024),
)


def arguments(plan: Plan, x: Tensor, into: Outputs, scales: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a call takes by name; cosines and sines are added where the Plan has them."""
    rotary = angles(plan, x)
    named = {} if rotary is None else dict(zip(("cos", "sin"), rotary, strict=True))
    names = [tensor.result for tensor in plan.signature.outputs]
    return dict(x=x, seed=SEED, **dict(zip(names, into, strict=True)), **scales, **named)


@dataclass(frozen=True)
class Case:
    """Numbers of a size, and whether descales and means are given."""

    size: Size
    with_scales: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.size!s:24} {'given' if self.with_scales else 'found'}"


def cases(plan: Plan, sizes: Iterable[Size] = SIZES) -> tuple[Case, ...]:
    """Every size in each way: descales and means of blocks are never given."""
    return tuple(Case(size, way, seed) for seed, size in enumerate(sizes) for way in _ways(plan))


def case_error(plan: Plan, run: Run, case: Case, seed: int, device: str) -> RoundingError:
    """Run the kernel on the numbers of a case, whose own seed these have."""

    def kernel(x: Tensor, into: Outputs, scales: Mapping[str, Tensor]) -> None:
        run(**arguments(plan, x, into, scales))

    x = numbers(plan, case.size, seed=case.seed).to(device)
    return rounding_error(plan, kernel, x, with_scales=case.with_scales)


def numbers(plan: Plan, size: Size, seed: int) -> Tensor:
    """N(0, 1), one of a thousand ten times as large, and heads of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    columns = plan.head_dim * (3 if size.packed else 1)
    shape = (size.batch, size.seqlen, size.heads, columns)
    x = torch.randn(shape, generator=generator)
    x *= 1 + 9 * (torch.rand(shape, generator=generator) < 0.001)
    x *= 1 + torch.arange(size.heads)[:, None] % 5
    x = x.to(getattr(torch, plan.dtype.torch))
    return x[..., plan.head_dim : 2 * plan.head_dim] if size.packed else x


def angles(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines, if the Plan has them: of its own for every row, for all batches alike."""
    if not plan.rotary:
        return None
    places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None]
    turns = places * 0.9 ** torch.arange(plan.angles, device=x.device)
    cos, sin = (t.to(x.dtype).expand(x.shape[0], -1, -1) for t in (turns.cos(), turns.sin()))
    return cos, sin


def rounding_error(plan: Plan, kernel: Kernel, x: Tensor, *, with_scales: bool) -> RoundingError:
    """How the kernel's output for x (B, S, H, D) differs from the reference's."""
    batch, seqlen, heads, _ = x.shape
    into = outputs_for(plan, x)
    into[0].view(torch.uint8).fill_(_NOT_A_NUMBER)
    for output in into[1:]:
        output.fill_(torch.nan)
    fixed = fixed_for(plan, into) if with_scales else {}
    kernel(x, into, fixed)
    named = dict(fixed)
    if "descale" in named and not plan.by_column:
        named["descale"] = named["descale"].reshape(-1)[:1]
    expected = quantize(plan, x, SEED, rotary=angles(plan, x), **named)
    descale = fixed.get("descale", into[1])
    descale = descale.reshape((1, 1, 1) if plan.by_tensor else expected.descale.shape)
    errors = [(descale / expected.descale - 1).abs()]
    ours, theirs = places(into[0]), places(expected.values)
    off = (ours - theirs).abs()
    wrong, neighbours = off > 1, off == 1
    if plan.center:
        rounding = _rounding(plan, x)  # (B, H, 1)
        noise = _left(plan, x, fixed.get("mean")) <= rounding
        noise &= "descale" not in fixed  # a given one is not made of what is left
        top = _beyond(descale * plan.largest, rounding, plan.least)
        errors = [torch.where(noise, top, errors[0])]
        of_noise, step, most = (
            _of_values(plan, part.expand(noise.shape), x) for part in (noise, descale, rounding)
        )
        wrong = torch.where(of_noise, into[0].float().abs() * step > most, wrong)
        neighbours &= ~of_noise
        mean = fixed.get("mean", into[2])
        difference = (mean - expected.mean).abs()  # type: ignore[union-attr]
        usual = difference / (expected.descale.amax(-1, keepdim=True) * plan.largest)
        whole = noise.all(-1, keepdim=True)
        errors.append(torch.where(whole, _beyond(difference, rounding), usual))
    unwritten = (into[0].view(torch.uint8) & _NOT_A_NUMBER) == _NOT_A_NUMBER
    return RoundingError(
        batch=batch,
        seqlen=seqlen,
        heads=heads,
        given=with_scales,
        neighbours=float(neighbours.double().mean()),
        allowed=NEIGHBOURS,
        wrong=int((wrong | unwritten).sum()),
        descale_error=largest(torch.cat([error.flatten() for error in errors])),
        descale_allowed=DESCALES,
    )


def _rounding(plan: Plan, x: Tensor) -> Tensor:
    """What rounding in fp32 may leave of each head less its means, (B, H, 1)."""
    together = plan.hadamard if plan.rotate else 1
    top = x.float().abs().amax((1, 3))[..., None] * (ROUNDING * math.sqrt(together))
    return top.amax().expand_as(top) if plan.by_tensor else top


def _left(plan: Plan, x: Tensor, mean: Tensor | None) -> Tensor:
    """The largest of x less its means, of all that shares a scale, in fp64: as descales are."""
    y = x.double()
    if plan.rotate:
        y = hadamard(y * random_signs(plan.head_dim, SEED).to(x.device), plan.hadamard)
        y *= plan.hadamard**-0.5
    y -= (y.mean(1) if mean is None else mean)[:, None]
    return rounded(y, plan.schedule.quantize.scales, plan.scale_rows).descale * plan.largest


def _beyond(error: Tensor, allowed: Tensor, least: float = 0.0) -> Tensor:
    """Zero where something is within what is allowed, else how many times as large it is."""
    ratio = error / allowed.clamp_min(least)
    return torch.where(ratio <= 1, torch.zeros_like(ratio), ratio)


def _of_values(plan: Plan, by_scale: Tensor, x: Tensor) -> Tensor:
    """What belongs to scales, for each value where the kernel writes it; past the keys zero."""
    if plan.by_column:
        spread = by_scale[:, None]
    else:
        spread = rows_of(by_scale, plan.scale_rows, x.shape[1]).transpose(1, 2)
    spread = spread.expand(x.shape)
    return by_columns(spread) if plan.columns else spread


def outputs_for(plan: Plan, x: Tensor) -> Outputs:
    """Return values, descales and means, without numbers, that the kernel makes of x."""
    named = {"x": x} | dict(zip(("cos", "sin"), angles(plan, x) or (), strict=False))
    return allocated(plan, named, checked(plan, named, have_data=False))


def fixed_for(plan: Plan, into: Outputs) -> dict[str, Tensor]:
    """Descales and means to be given, by name, so that a call reads its input once."""
    fixed = {} if plan.by_block else {"descale": torch.full_like(into[1], GIVEN)}
    return fixed | ({"mean": torch.full_like(into[2], GIVEN_MEAN)} if plan.center else {})


def places(values: Tensor) -> Tensor:
    """Return each e4m3 number's place among all in their order, 0 for both zeros."""
    assert values.dtype == E4M3
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= _SIGN, _SIGN - bits, bits)


def bandwidth(plan: Plan, binary: Binary, with_scales: bool) -> Bandwidth:
    """Time the kernel and a copy of as many bytes, in turn, at a size far beyond the L2 cache."""
    batch, seqlen, heads = 4, 16_384, HIDDEN // plan.head_dim
    dtype = getattr(torch, plan.dtype.torch)
    x = torch.randn(batch, seqlen, heads, plan.head_dim, device="cuda").to(dtype)
    into = outputs_for(plan, x)
    launch = bind(
        plan,
        binary.library,
        **arguments(plan, x, into, fixed_for(plan, into) if with_scales else {}),
    )
    # each is read, again where something was to be found first, and written as a byte
    reads = 1 if with_scales else plan.readings
    moved = x.numel() * (reads * plan.dtype.bytes + 1)
    kernel, copy = beside_a_copy(launch, into[0], moved, SUSTAINED)
    return Bandwidth(
        batch=batch,
        seqlen=seqlen,
        heads=heads,
        given=with_scales,
        gb_per_s=moved / kernel / 1e9,
        copy_gb_per_s=moved / copy / 1e9,
    )


def _ways(plan: Plan) -> tuple[bool, ...]:
    """Whether descales and means are given: those of blocks never are."""
    return (False,) if plan.by_block and not plan.center else (False, True)


RULE = Rule(cases, case_error, noun="shapes", columns=30)


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Bandwidth, ...]:
    return tuple(bandwidth(plan, binary, with_scales) for with_scales in _ways(plan))


VERIFICATION = Verification(lambda plan: RULE, _speeds)
