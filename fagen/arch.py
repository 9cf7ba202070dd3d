"""Hold what one kind of GPU is made of: every hardware number, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_GUIDE = "CUDA C++ Programming Guide, compute capability 9.0"
_PTX = "PTX ISA"
_DRIVER = "CUDA Driver API, tensor maps"
_ADDED = "measured, to the bit: what a wgmma cuts off when it adds its products up"


def _of(value: Any, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Arch:
    """The numbers of one architecture; `source(name)` tells where a number comes from."""

    name: str = "sm_90a"
    capability: tuple[int, int] = (9, 0)

    # bytes of shared memory
    smem_per_block: int = _of(232_448, f"{_GUIDE}: 227 KiB per block, opted in")
    smem_static: int = _of(49_152, f"{_GUIDE}: 48 KiB per block, not opted in")
    smem_per_sm: int = _of(233_472, f"{_GUIDE}: 228 KiB")
    smem_reserved: int = _of(1_024, f"{_GUIDE}: of each block, for the system")
    smem_tile_alignment: int = _of(1_024, f"{_PTX}, wgmma: a 128-byte swizzle repeats in 1,024")
    mbarrier_bytes: int = _of(8, f"{_PTX}, mbarrier")

    # bytes of the L2 cache, in two halves
    l2_bytes: int = _of(50 * 1024 * 1024, "H100 and H200 data sheets: 50 MB")
    l2_sector_bytes: int = _of(32, f"{_GUIDE}: a memory transaction")

    # 32-bit registers
    registers_per_sm: int = _of(65_536, _GUIDE)
    max_registers_per_thread: int = _of(255, _GUIDE)
    register_quantum: int = _of(8, f"{_PTX}, setmaxnreg: a multiple of 8")
    setmaxnreg_min: int = _of(24, f"{_PTX}, setmaxnreg")
    setmaxnreg_max: int = _of(256, f"{_PTX}, setmaxnreg")

    # threads
    warp_threads: int = _of(32, _GUIDE)
    warpgroup_threads: int = _of(128, f"{_PTX}, wgmma: four warps")
    max_threads_per_block: int = _of(1_024, _GUIDE)
    sm_count: int = _of(132, "H100 SXM and H200 data sheets")
    l2_line_bytes: int = _of(128, "measured: additions that begin within one take longer")

    # wgmma
    wgmma_m: int = _of(64, f"{_PTX}, wgmma: rows per warpgroup")
    wgmma_k_bytes: int = _of(32, f"{_PTX}, wgmma: 16 columns of 16 bits")
    wgmma_n_step: int = _of(8, f"{_PTX}, wgmma")
    wgmma_n_full: int = _of(64, "measured: narrower ones take as long, with A in shared memory")
    wgmma_n_max: int = _of(256, f"{_PTX}, wgmma")

    # 8-bit operands
    e4m3_max: float = _of(448.0, f"{_PTX}, cvt.rn.satfinite.e4m3x2: the largest finite number")
    fp8_accumulator_bits: int = _of(13, f"{_ADDED}: fraction of a term, and of the sum")
    # and operands of 16 bits
    aligned_bits: int = _of(25, f"{_ADDED}: fraction of a term")
    accumulator_bits: int = _of(23, f"{_ADDED}: fraction of the sum")

    # speeds of one SM, per clock
    tensor_flops: int = _of(4_096, "measured: wgmma of 16-bit operands; 8-bit ones twice that")
    exponentials: int = _of(16, "measured: ex2.approx, lanes of the MUFU")
    smem_bytes: int = _of(128, f"{_GUIDE}: 32 banks of 4 bytes")
    issued_warps: int = _of(4, f"{_GUIDE}: four schedulers, an instruction each")
    clock_hz: float = _of(1.65e9, "measured: between 1.44 and 1.83 GHz under the power limit")
    launch_seconds: float = _of(3e-6, "measured: from the launch of an empty kernel to its end")

    # the tensor memory accelerator
    tma_alignment: int = _of(16, f"{_DRIVER}: bytes, of addresses and strides")

    def source(self, name: str) -> str:
        """Return where the number called `name` comes from."""
        return next(str(f.metadata["source"]) for f in fields(self) if f.name == name)

    def head_dims(self, element_bytes: int) -> range:
        """Return the columns that kernels take: whole units of TMA, within one wgmma's."""
        step = self.tma_alignment // element_bytes
        return range(self.wgmma_k_bytes // 2, self.wgmma_n_max + 1, step)

    def next_head_dim(self, columns: int, element_bytes: int) -> int | None:
        """Return the fewest columns that kernels take and these can be filled up to."""
        widths = self.head_dims(element_bytes)
        return next((wider for wider in widths if wider >= columns > 0), None)

    def registers_left(self, threads: int) -> int:
        """Return how many registers each of so many threads of an SM may have at most."""
        share = self.registers_per_sm // threads // self.register_quantum * self.register_quantum
        return min(share, self.max_registers_per_thread)

    def registers_of_warps(self, warps: int) -> int:
        """Return how many registers each thread may have at most where an SM holds so many warps.

        They are dealt to its schedulers evenly, and each of these has registers of its own.
        """
        threads = -(-warps // self.issued_warps) * self.warp_threads
        share = self.registers_per_sm // self.issued_warps // threads
        even = share // self.register_quantum * self.register_quantum
        return min(even, self.max_registers_per_thread)

    def warps_resident(self, registers: int) -> int:
        """Return how many warps of so many registers per thread an SM holds.

        Each of its schedulers has registers of its own.
        """
        share = self.registers_per_sm // self.issued_warps
        return share // (registers * self.warp_threads) * self.issued_warps


SM90 = Arch()

# What an operation of a score takes of each element: instructions of the MUFU, and all of them.  A
# model of what nvcc 13.0 makes of fast functions; conversions run beside the MUFU, at its rate.
# tanh.approx.f32 is off by 1.2e-5 of itself at most: of all fp32, on an H100.
SCORE_OPERATIONS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("fma", "*", "abs", "min", "max", "where"), (0, 1)),
    **dict.fromkeys(("<=", "<", "==", "and", "or", "not"), (0, 1)),
    **dict.fromkeys(("tanh", "sqrt", "float"), (1, 1)),
    **dict.fromkeys(("exp", "log", "/"), (1, 2)),
    **dict.fromkeys(("//", "%"), (1, 14)),
    "table": (0, 4),
}
