"""attention(q, k, v, …): tensors in, attention out, by the kernel that `schedules/` has for them.

Which one that is, its dispatch table says for each card and number of keys, or a user's own table.
A kernel is built at its first use, or ahead of time by prepare(…). On CPU tensors its schedule is
emulated, and nothing is built.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fagen import op
from fagen.arch import SM90
from fagen.build import build
from fagen.dispatch_table import rows_for
from fagen.errors import DeviceError, FagenError, ScheduleError
from fagen.paths import locate
from fagen.plan import plan
from fagen.render import render
from fagen.schedule import Schedule, read_schedule
from fagen.vocab import DTYPES, MASKS

Choice = str | Path | Schedule | None  # a file, a slug, or the thing itself
Kind = tuple[torch.device, torch.dtype, int, int, bool]
Key = tuple[torch.device, torch.dtype, int, int, bool, Choice]

# Slugs that measurements put before others of the same problem.
PREFERRED: tuple[str, ...] = ()

NOT_READY = "the kernel is not ready: call fagen.prepare(…) for this problem and device first; "

# What has been readied in this process. A call finds its kernel here or takes the long way once.
_ready: dict[Key, op.Op] = {}
# For each kind of call the slugs by the largest number of keys they are for; None: no table has it.
_ranges: dict[Kind, tuple[tuple[float, str | None], ...]] = {}
_readying = threading.Lock()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: Choice = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale · q kᵀ) v, with a causal mask aligned to the bottom right if asked.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in fp16 or bf16 on one Hopper GPU, or on
    the CPU, where the schedule is emulated; H a multiple of Hk. Any strides that are multiples of
    16 bytes will do, with the last dimension contiguous. scale is 1/√D if left out.

    Returns out (B, Sq, H, Dv), and with return_lse also the log-sum-exp (B, H, Sq) in fp32, natural
    logarithm: zeros and minus infinity for a row that sees no key.

    The kernel is that of `schedule` (a file's path, a slug or a Schedule), else the one that a
    dispatch table has for this card, dtype, head dims, mask and number of keys, else the one that
    `schedules/` has; its first use builds it. Under torch.compile and
    CUDA graph capture it must have been readied by prepare().

    Raises ValueError for a wrong argument, also where a gradient would be needed; ScheduleError
    where no schedule fits, with the list of what exists; DeviceError where the GPU is no Hopper;
    ToolchainError and BuildError where the kernel cannot be built; FagenError where it is not ready
    and cannot be built now.
    """
    if q.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q has {q.dim()} dimensions and v has {v.dim()}; both must have 4: "
            "(batch, seqlen, heads, head_dim)"
        )
    if schedule is None:
        kind = (q.device, q.dtype, q.shape[3], v.shape[3], causal)
        ranges = _ranges.get(kind) or _find_ranges(kind)
        schedule = ranges[0][1] if len(ranges) == 1 else _at(ranges, v.shape[1])
    key = (q.device, q.dtype, q.shape[3], v.shape[3], causal, schedule)
    kernel = _ready.get(key) or _make_ready(key)
    out, lse = kernel(q, k, v, q.shape[3] ** -0.5 if scale is None else scale)
    return (out, lse) if return_lse else out


def prepare(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    seqlen: int | None = None,
    schedule: Choice = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> str:
    """Ready the kernel that attention(…) would use for such tensors; return its slug.

    It is the one for `seqlen` keys. If that is left out and the dispatch table has several kernels
    by their numbers of keys, all are readied, and the slug is that for the most.

    dtype is torch's or a schedule's word for it. On `device`, by default the current GPU, the
    kernel is built, loaded and run once on a single key, after which calls can be captured; on a
    CPU, the default where there is no GPU, there is nothing to build. `progress` is called with a
    line before what takes long.  Raises as attention does.
    """
    kind = _kind(dtype, head_dim, head_dim_v, causal, device)
    place = kind[0]
    choices: list[Choice] = [schedule]
    if schedule is None:
        ranges = _ranges.get(kind) or _find_ranges(kind)
        listed = [slug for _, slug in ranges] if seqlen is None else [_at(ranges, seqlen)]
        choices = list(dict.fromkeys(listed))
    for choice in choices:
        kernel = _make_ready((*kind, choice), progress)
        if place.type == "cuda":
            q = torch.zeros(1, 1, 1, head_dim, dtype=kind[1], device=place)
            with torch.no_grad():
                kernel(q, q, q.new_zeros(1, 1, 1, kind[3]), 1.0)
    return _choose(Problem(*kind[1:]), choices[-1]).slug


def picked(
    *,
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    seqlen: int,
    device: torch.device | str | None = None,
) -> Schedule:
    """Return the schedule that attention(…) would take for such tensors and `seqlen` keys.

    Arguments as of prepare(…); nothing is built.  Raises ValueError for an unknown dtype,
    ScheduleError where no schedule fits.
    """
    kind = _kind(dtype, head_dim, head_dim_v, causal, device)
    return _choose(Problem(*kind[1:]), _at(_ranges.get(kind) or _find_ranges(kind), seqlen))


def _kind(
    dtype: torch.dtype | str,
    head_dim: int,
    head_dim_v: int | None,
    causal: bool,
    device: torch.device | str | None,
) -> Kind:
    """The kind of call that prepare(…) means by these arguments."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place, _torch_dtype(dtype), head_dim, head_dim_v or head_dim, causal


def _at(ranges: tuple[tuple[float, str | None], ...], keys: int) -> str | None:
    """The slug for so many keys."""
    for most, slug in ranges:
        if keys <= most:
            return slug
    return ranges[-1][1]


def _find_ranges(kind: Kind) -> tuple[tuple[float, str | None], ...]:
    """Look a kind of call up in the dispatch tables.  Raises ScheduleError where one is wrong."""
    if torch.compiler.is_compiling():
        raise FagenError(NOT_READY + "it cannot be built while torch.compile traces the call")
    device, dtype, head_dim, head_dim_v, causal = kind
    names = {getattr(torch, row.torch): row.name for row in DTYPES.values()}
    mask = next(row.name for row in MASKS.values() if row.causal == causal)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    rows = rows_for(names.get(dtype, ""), head_dim, head_dim_v, mask, card, own=locate("schedules"))
    _ranges[kind] = tuple((row.most, row.slug) for row in rows) or ((math.inf, None),)
    return _ranges[kind]


def _make_ready(key: Key, progress: Callable[[str], None] | None = None) -> op.Op:
    """The long way to a kernel: choose, build, load.  Raises as attention does."""
    if torch.compiler.is_compiling():
        raise FagenError(NOT_READY + "it cannot be built while torch.compile traces the call")
    device, dtype, head_dim, head_dim_v, causal, choice = key
    with _readying:
        if key in _ready:
            return _ready[key]
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(
                f"q is on {device}; a kernel runs on a Hopper GPU, or on a CPU emulated"
            )
        chosen = _choose(Problem(dtype, head_dim, head_dim_v, causal), choice)
        if device.type == "cpu":
            kernel = _emulation(chosen.slug)
        else:
            _refuse_other_than_hopper(device)
            kernel = _built(chosen, progress)
        _ready[key] = kernel
        return kernel


_kernels: dict[str, op.Op] = {}


def _built(schedule: Schedule, progress: Callable[[str], None] | None) -> op.Op:
    slug = schedule.slug
    if slug not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            raise FagenError(NOT_READY + f"{slug} cannot be built while a CUDA graph is captured")
        planned = plan(schedule)
        _kernels[slug] = op.load(build(render(planned), planned, binding=True, progress=progress))
    return _kernels[slug]


@cache
def _emulation(slug: str) -> op.Op:
    def emulated(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError(
                f"fagen::{slug}: q, k or v requires a gradient, and there is no backward yet; "
                "call it under torch.no_grad()"
            )
        return torch.ops.fagen.emulated(q, k, v, scale, slug)  # type: ignore[no-any-return]

    return emulated


def _refuse_other_than_hopper(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found != SM90.capability:
        raise DeviceError(
            f"{device} is a {torch.cuda.get_device_name(device)} of compute capability "
            f"{found[0]}.{found[1]}, and kernels are machine code for Hopper (9.0); tensors on the "
            "CPU have their schedule emulated"
        )


# ---- which schedule -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What is to be computed, apart from sizes that any kernel takes."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    causal: bool

    def __str__(self) -> str:
        columns = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            columns += f" and {self.head_dim_v} (V)"
        mask = "causal" if self.causal else "full"
        return f"{str(self.dtype).removeprefix('torch.')}, head_dim {columns}, {mask}"


def _problem(schedule: Schedule) -> Problem:
    asked = schedule.attention
    return Problem(
        getattr(torch, DTYPES[asked.dtype].torch),
        asked.head_dim,
        asked.head_dim_v,
        MASKS[asked.mask].causal,
    )


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {name: row.torch for row in DTYPES.values() for name in (row.name, row.torch)}
    if dtype not in names:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(names)}")
    return getattr(torch, names[dtype])


def _choose(problem: Problem, choice: Choice) -> Schedule:
    if choice is None:
        return _best(problem)
    schedule = _read(choice)
    if _problem(schedule) != problem:
        raise ScheduleError(
            f"{schedule.slug} computes {_problem(schedule)}; the call asks for {problem}"
        )
    return schedule


def _read(choice: str | Path | Schedule) -> Schedule:
    if isinstance(choice, Schedule):
        return choice
    if isinstance(choice, str) and not choice.endswith(".toml"):
        return Schedule.from_slug(choice)
    return read_schedule(choice)


def _best(problem: Problem) -> Schedule:
    there = _schedules()
    fitting = [schedule for schedule in there if _problem(schedule) == problem]
    if not fitting:
        raise ScheduleError(
            f"no schedule computes {problem}; in {locate('schedules')} there are:\n"
            + "\n".join(f"  {schedule.slug}" for schedule in there)
            + "\nwrite one for it and pass schedule=<its path>"
        )
    return min(fitting, key=_rank)


def _rank(schedule: Schedule) -> tuple[int, int, str]:
    """Those that PREFERRED names, then the one with the fewest keys away from their defaults."""
    slug = schedule.slug
    place = PREFERRED.index(slug) if slug in PREFERRED else len(PREFERRED)
    return place, len(schedule.settings()), slug


@cache
def _schedules() -> tuple[Schedule, ...]:
    return tuple(read_schedule(path) for path in sorted(locate("schedules").glob("fwd_*.toml")))
