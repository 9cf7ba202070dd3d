"""What a GPU found of a kernel at one shape: the errors and speeds by which it is judged.

Each kind names one record of errors and one of speeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fagen.decoding import Divisor
from fagen.vocab import COPY, LENGTHS, PEERS


@dataclass(frozen=True)
class ShapeError:
    """The largest errors at one shape against fp64: ours, torch's, and what ours may be.

    Of an e4m3 kernel errors of the output are root mean squares, and in torch's place stands the
    emulated schedule on the same bytes, of whose error ours may be 1.15 times. Where sequences have
    lengths of their own, both are those of all of them together.

    An error that is not a number means that the kernel left or computed something that is not.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    error: float  # max |out - fp64|
    torch_error: float  # the same of torch's MATH backend in the same dtype
    allowed: float  # 2 x torch_error + one unit in the last place at max |fp64|
    lse_error: float  # max |lse - fp64|, in natural-log units
    lse_allowed: float

    @property
    def ok(self) -> bool:
        """Whether both errors are within bounds; what is not a number never is."""
        return self.error <= self.allowed and self.lse_error <= self.lse_allowed

    @property
    def said(self) -> str:
        """The errors, and what the output's may be."""
        return (
            f"error {self.error:.2e}, {self.allowed:.2e} is allowed; "
            f"log-sum-exp {self.lse_error:.1e}"
        )

    @staticmethod
    def told(errors: Sequence["ShapeError"]) -> str:
        """Say which shape came nearest to its bound."""
        worst = max(errors, key=lambda error: error.error / (error.allowed or math.inf))
        return (
            f"nearest to its bound: error {worst.error:.2e} of {worst.allowed:.2e} allowed, "
            f"torch's own {worst.torch_error:.2e}"
        )


@dataclass(frozen=True)
class GradientError:
    """The largest errors of dq, dk and dv at one shape against fp64, and what they may be.

    An error that is not a number means that the kernel left or computed something that is not.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    dq_error: float  # max |dq - fp64|
    dq_allowed: float  # twice torch's in the same dtype, and twice what rounding makes of 0.3 more
    dk_error: float
    dk_allowed: float
    dv_error: float
    dv_allowed: float

    @property
    def ok(self) -> bool:
        """Whether all errors are within bounds; what is not a number never is."""
        return all(
            error <= allowed
            for error, allowed in (
                (self.dq_error, self.dq_allowed),
                (self.dk_error, self.dk_allowed),
                (self.dv_error, self.dv_allowed),
            )
        )

    @property
    def said(self) -> str:
        """The errors, and what they may be."""
        return "  ".join(
            f"{name} {getattr(self, f'{name}_error'):.2e} of {getattr(self, f'{name}_allowed'):.2e}"
            for name in ("dq", "dk", "dv")
        )

    @staticmethod
    def told(errors: Sequence["GradientError"]) -> str:
        """Say how near errors came to their bounds."""
        worst = max(
            getattr(error, f"{name}_error") / (getattr(error, f"{name}_allowed") or math.inf)
            for error in errors
            for name in ("dq", "dk", "dv")
        )
        return f"nearest to its bound: {worst:.2f} of what is allowed"


@dataclass(frozen=True)
class Speed:
    """One regime at the standard shape: TFLOP/s of the kernel, and of cuDNN in the same run."""

    beside: ClassVar[str] = PEERS[LENGTHS[0]].title  # whose speed is the yardstick

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
class RoundingError:
    """How a quantiser's output at one shape differs from its reference's, of the same input.

    The kernel adds up in another order, so a value may fall on the other side of a tie.
    """

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
    def ok(self) -> bool:
        """Whether all is within bounds; what is not a number never is."""
        return (
            self.wrong == 0
            and self.neighbours <= self.allowed
            and self.descale_error <= self.descale_allowed
        )

    @staticmethod
    def told(errors: Sequence["RoundingError"]) -> str:
        """Say at which shape most values fell on the other side of a tie."""
        most = max(errors, key=lambda error: error.neighbours)
        return (
            f"at most {most.neighbours:.1e} of the values round to the reference's neighbour, "
            f"{most.allowed:.0e} allowed"
        )


@dataclass(frozen=True)
class Bandwidth:
    """How fast a quantiser reads and writes at one shape, and a copy of as many bytes."""

    beside: ClassVar[str] = COPY  # whose speed is the yardstick

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

    @property
    def figure(self) -> str:
        """What a list of kernels shows: nothing, since these are no TFLOP/s."""
        return ""

    def in_words(self, yardstick: str) -> str:
        """The bandwidth, and its ratio to a copy's."""
        descales = "descales given" if self.given else "descales found"
        return f"{descales}: {self.gb_per_s:.0f} GB/s, {self.ratio:.2f} of {yardstick}'s"


@dataclass(frozen=True)
class MergeError:
    """The largest errors of combined outputs at one shape against fp64, and against the emulation.

    An error that is not a number means that the kernel left or computed something that is not.
    """

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

    @property
    def ok(self) -> bool:
        """Whether all is within bounds; what is not a number never is."""
        return (
            self.error <= self.allowed
            and self.lse_error <= self.lse_allowed
            and self.differing == 0
        )

    @staticmethod
    def told(errors: Sequence["MergeError"]) -> str:
        """Say which shape came nearest to its bound."""
        worst = max(errors, key=lambda error: error.error / error.allowed)
        return (
            f"the emulation's bits; nearest to its bound: error {worst.error:.1e} of the largest "
            f"partial output, {worst.allowed:.1e} allowed, of {worst.splits} splits"
        )


@dataclass(frozen=True)
class MergeBandwidth:
    """How fast partial outputs are combined at one shape, beside a copy of as many bytes."""

    beside: ClassVar[str] = COPY  # whose speed is the yardstick

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

    @property
    def figure(self) -> str:
        """What a list of kernels shows: nothing, since these are no TFLOP/s."""
        return ""

    def in_words(self, yardstick: str) -> str:
        """The time and the bandwidth, and its ratio to a copy's."""
        return (
            f"{self.splits} splits, {self.megabytes:.1f} MB: {self.microseconds:.1f} us, "
            f"{self.gb_per_s:.0f} GB/s, {self.ratio:.2f} of {yardstick}'s"
        )


@dataclass(frozen=True)
class DecodeError:
    """The largest errors of decoding at one shape against fp64, and what they may be.

    An error that is not a number means that the kernel left or computed something that is not, or
    used a key that no query sees.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    lengths: str  # of the sequences
    error: float  # max |out - fp64|
    torch_error: float  # the same of the formula computed in the same dtype
    allowed: Divisor  # 2 x torch_error + one unit in the last place at max |fp64|
    lse_error: float  # max |lse - fp64|, in natural-log units
    lse_allowed: float
    differing: int  # numbers of a sequence that has others alone, to the bit: none may

    @property
    def ok(self) -> bool:
        """Whether all is within bounds; what is not a number never is."""
        return (
            self.error <= self.allowed
            and self.lse_error <= self.lse_allowed
            and self.differing == 0
        )

    @property
    def said(self) -> str:
        """The errors, and what the output's may be."""
        return (
            f"error {self.error:.2e}, {self.allowed:.2e} is allowed; "
            f"log-sum-exp {self.lse_error:.1e}; {self.differing} numbers differ from those alone"
        )

    @staticmethod
    def told(errors: Sequence["DecodeError"]) -> str:
        """Say which shape came nearest to its bound."""
        worst = max(errors, key=lambda error: error.error / error.allowed)
        return (
            f"nearest to its bound: error {worst.error:.2e} of {worst.allowed:.2e} allowed, the "
            f"formula's own {worst.torch_error:.2e}"
        )


@dataclass(frozen=True)
class DecodeSpeed:
    """How long a call of decoding takes on keys and values out of memory, in a CUDA graph.

    Beside it torch's cuDNN and FlashAttention-2 on the same tensors; None where they cannot.
    """

    beside: ClassVar[str] = PEERS[LENGTHS[0]].title  # whose speed is the yardstick

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
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

    @property
    def figure(self) -> str:
        """What a list of kernels shows: nothing, since these are no TFLOP/s."""
        return ""

    def in_words(self, yardstick: str) -> str:
        """The time and the bandwidth, and how many times as fast as cuDNN that is."""
        beside = f", {self.ratio:.2f} times as fast as {yardstick}" if self.ratio else ""
        return (
            f"{self.batch} x {self.seqlen_k:,} keys, {self.seqlen_q} queries: "
            f"{self.microseconds:.1f} us, {self.gb_per_s:.0f} GB/s{beside}"
        )
