"""What a GPU found of a kernel at one shape: the errors and speeds by which it is judged.

Each kind names one record of errors and one of speeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fagen.decoding import Divisor
from fagen.vocab import COPY, LENGTHS, PEERS


class Errors:
    """Errors of a kernel: fields with bounds, and numbers that have to be 0.

    An error that is not a number means that the kernel left or computed something that is not, or
    used a key that no query sees.
    """

    bounds: ClassVar[Mapping[str, str]] = {"error": "allowed", "lse_error": "lse_allowed"}
    nothing: ClassVar[tuple[str, ...]] = ()  # what has to be 0
    line: ClassVar[str]  # of a record: its errors, and what they may be
    summary: ClassVar[str]  # of the record that came nearest to its bound

    @property
    def ok(self) -> bool:
        """Whether all is within bounds; what is not a number never is."""
        within = (getattr(self, name) <= getattr(self, most) for name, most in self.bounds.items())
        return all(within) and not any(getattr(self, name) for name in self.nothing)

    def __str__(self) -> str:
        return self.line.format(self)

    @property
    def nearness(self) -> float:
        """How near it came to its bound: an output's error over what it may be."""
        return self._share("error")

    def _share(self, name: str) -> float:
        return float(getattr(self, name) / (getattr(self, self.bounds[name]) or math.inf))

    @classmethod
    def worst(cls, errors: "Sequence[Errors]") -> str:
        """Say how near the nearest of some records came to its bound."""
        return cls.summary.format(max(errors, key=lambda record: record.nearness))


class Rate:
    """How fast a kernel is, beside a yardstick."""

    beside: ClassVar[str] = COPY  # whose speed is the yardstick

    @property
    def figure(self) -> str:
        """What a list of kernels shows of a speed: nothing, of what are no TFLOP/s."""
        return ""


@dataclass(frozen=True)
class _Sized:
    """A shape of attention."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class ShapeError(_Sized, Errors):
    """The largest errors at one shape against fp64: ours, torch's, and what ours may be.

    Of an e4m3 kernel errors of the output are root mean squares, and in torch's place stands the
    emulated schedule on the same bytes, of whose error ours may be 1.15 times. Where sequences have
    lengths of their own, both are those of all of them together.
    """

    line: ClassVar[str] = (
        "error {0.error:.2e} (allowed {0.allowed:.2e}, torch {0.torch_error:.2e})  "
        "lse {0.lse_error:.1e}"
    )
    summary: ClassVar[str] = (
        "nearest to its bound: error {0.error:.2e} of {0.allowed:.2e} allowed, "
        "torch's own {0.torch_error:.2e}"
    )

    error: float  # max |out - fp64|
    torch_error: float  # the same of torch's MATH backend in the same dtype
    allowed: float  # 2 x torch_error + one unit in the last place at max |fp64|
    lse_error: float  # max |lse - fp64|, in natural-log units
    lse_allowed: float


@dataclass(frozen=True)
class GradientError(_Sized, Errors):
    """The largest errors of dq, dk and dv at one shape against fp64, and what they may be."""

    bounds: ClassVar[Mapping[str, str]] = {f"{x}_error": f"{x}_allowed" for x in ("dq", "dk", "dv")}
    line: ClassVar[str] = "  ".join(
        f"{x} {{0.{x}_error:.2e}} of {{0.{x}_allowed:.2e}}" for x in ("dq", "dk", "dv")
    )
    summary: ClassVar[str] = "nearest to its bound: {0.nearness:.2f} of what is allowed"

    dq_error: float  # max |dq - fp64|
    dq_allowed: float  # twice torch's in the same dtype, and twice what rounding makes of 0.3 more
    dk_error: float
    dk_allowed: float
    dv_error: float
    dv_allowed: float

    @property
    def nearness(self) -> float:
        """How near the nearest of the three came to its bound."""
        return max(map(self._share, self.bounds))


@dataclass(frozen=True)
class Speed(Rate):
    """One regime at the standard shape: TFLOP/s of the kernel, and of cuDNN in the same run."""

    beside: ClassVar[str] = PEERS[LENGTHS[0]].title

    regime: str
    batch: int
    seqlen: int  # of keys, and of queries but where a kernel splits the keys of a few
    heads: int
    tflops: float
    spread: float
    sm_clock_mhz: int | None
    cudnn_tflops: float | None  # None where cuDNN cannot do these dims

    @property
    def ratio(self) -> float | None:
        """Kernel over cuDNN."""
        return self.tflops / self.cudnn_tflops if self.cudnn_tflops else None

    @property
    def figure(self) -> str:
        """What a list of kernels shows: TFLOP/s, and of runs that are not long, which they are."""
        return f"{self.tflops:.0f}" + ("" if self.regime == "sustained" else f" {self.regime}")

    def in_words(self, yardstick: str) -> str:
        """The speed, and its ratio to cuDNN's, by the name that says in which dtype that is."""
        ratio = f", {self.ratio:.2f} of {yardstick}" if self.ratio else ""
        at = f", at B={self.batch} H={self.heads} S={self.seqlen}"
        return f"{self.regime}: {self.tflops:.0f} TFLOP/s{ratio}{at}"


@dataclass(frozen=True)
class RoundingError(Errors):
    """How a quantiser's output at one shape differs from its reference's, of the same input.

    The kernel adds up in another order, so a value may fall on the other side of a tie.
    """

    bounds: ClassVar[Mapping[str, str]] = {
        "neighbours": "allowed",
        "descale_error": "descale_allowed",
    }
    nothing: ClassVar[tuple[str, ...]] = ("wrong",)
    line: ClassVar[str] = (
        " neighbours {0.neighbours:.1e}  wrong {0.wrong}  descales {0.descale_error:.1e}"
    )
    summary: ClassVar[str] = (
        "at most {0.neighbours:.1e} of the values round to the reference's neighbour, "
        "{0.allowed:.0e} allowed"
    )

    batch: int
    seqlen: int
    heads: int
    given: bool  # whether descales were
    neighbours: float  # the share of values that are a step of e4m3 beside the reference's
    allowed: float  # of them
    wrong: int  # values further away, or left unwritten
    descale_error: float  # the largest, relative; of means, to what becomes 448
    descale_allowed: float

    @property
    def nearness(self) -> float:
        """How many values fell on the other side of a tie."""
        return self.neighbours


@dataclass(frozen=True)
class Bandwidth(Rate):
    """How fast a quantiser reads and writes at one shape, and a copy of as many bytes."""

    batch: int
    seqlen: int
    heads: int
    given: bool  # whether descales and means were; else what is not of a block is found first
    gb_per_s: float  # of bytes moved, each reading of the input counted
    copy_gb_per_s: Divisor

    @property
    def ratio(self) -> float:
        """Kernel over copy."""
        return self.gb_per_s / self.copy_gb_per_s

    def in_words(self, yardstick: str) -> str:
        """The bandwidth, and its ratio to a copy's."""
        descales = "descales given" if self.given else "descales found"
        return f"{descales}: {self.gb_per_s:.0f} GB/s, {self.ratio:.2f} of {yardstick}'s"


@dataclass(frozen=True)
class MergeError(Errors):
    """The largest errors of combined outputs at one shape, against fp64 and the emulation."""

    nothing: ClassVar[tuple[str, ...]] = ("differing",)
    line: ClassVar[str] = (
        "error {0.error:.1e} of {0.allowed:.1e}  lse {0.lse_error:.1e} of {0.lse_allowed:.1e}  "
        "differing {0.differing}"
    )
    summary: ClassVar[str] = (
        "the emulation's bits; nearest to its bound: error {0.error:.1e} of the largest "
        "partial output, {0.allowed:.1e} allowed, of {0.splits} splits"
    )

    batch: int
    seqlen: int
    heads: int
    splits: int
    lses: str  # how they are spread
    error: float  # max |out - fp64| / max |a row's partial outputs|
    allowed: Divisor  # of so many fp32 roundings, and of the output's own
    lse_error: float  # max |lse - fp64| / max(1, |fp64|)
    lse_allowed: float
    differing: int  # numbers that are not the emulation's, to the bit: none may


@dataclass(frozen=True)
class MergeBandwidth(Rate):
    """How fast partial outputs are combined at one shape, beside a copy of as many bytes."""

    batch: int
    seqlen: int
    heads: int
    splits: int
    megabytes: float  # moved: partial outputs and LSEs read, outputs and LSEs written
    microseconds: Divisor
    copy_microseconds: float

    @property
    def gb_per_s(self) -> float:
        """Of bytes that must be moved."""
        return self.megabytes * 1e3 / self.microseconds

    @property
    def ratio(self) -> float:
        """Kernel's bandwidth over the copy's."""
        return self.copy_microseconds / self.microseconds

    def in_words(self, yardstick: str) -> str:
        """The time and the bandwidth, and its ratio to a copy's."""
        return (
            f"{self.splits} splits, {self.megabytes:.1f} MB: {self.microseconds:.1f} us, "
            f"{self.gb_per_s:.0f} GB/s, {self.ratio:.2f} of {yardstick}'s"
        )


@dataclass(frozen=True)
class DecodeError(_Sized, Errors):
    """The largest errors of decoding at one shape against fp64, and what they may be."""

    nothing: ClassVar[tuple[str, ...]] = ("differing",)
    line: ClassVar[str] = (
        "error {0.error:.2e} of {0.allowed:.2e}  lse {0.lse_error:.1e}  differing {0.differing}"
    )
    summary: ClassVar[str] = (
        "nearest to its bound: error {0.error:.2e} of {0.allowed:.2e} allowed, "
        "the formula's own {0.torch_error:.2e}"
    )

    lengths: str  # of the sequences
    error: float  # max |out - fp64|
    torch_error: float  # the same of the formula computed in the same dtype
    allowed: Divisor  # 2 x torch_error + one unit in the last place at max |fp64|
    lse_error: float  # max |lse - fp64|, in natural-log units
    lse_allowed: float
    differing: int  # numbers of a sequence that has others alone, to the bit: none may


@dataclass(frozen=True)
class DecodeSpeed(_Sized, Rate):
    """How long a call of decoding takes on keys and values out of memory, in a CUDA graph.

    Beside it torch's cuDNN and FlashAttention-2 on the same tensors; None where they cannot.
    """

    beside: ClassVar[str] = PEERS[LENGTHS[0]].title

    megabytes: float  # of K and V
    microseconds: Divisor
    spread: float
    cudnn_microseconds: float | None
    fa2_microseconds: float | None

    @property
    def gb_per_s(self) -> float:
        """Of K and V."""
        return self.megabytes * 1e3 / self.microseconds

    @property
    def ratio(self) -> float | None:
        """How many times as fast as cuDNN."""
        return self.cudnn_microseconds / self.microseconds if self.cudnn_microseconds else None

    def in_words(self, yardstick: str) -> str:
        """The time and the bandwidth, and how many times as fast as cuDNN that is."""
        beside = f", {self.ratio:.2f} times as fast as {yardstick}" if self.ratio else ""
        return (
            f"{self.batch} x {self.seqlen_k:,} keys, {self.seqlen_q} queries: "
            f"{self.microseconds:.1f} us, {self.gb_per_s:.0f} GB/s{beside}"
        )
