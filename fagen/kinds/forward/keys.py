"""Declare every key of a schedule of attention: its section, its values, its default."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from fagen.arch import SM90
from fagen.kinds.forward.rules import DERIVED, FORMER, SLUG, consumers, rules
from fagen.schedule import Keys, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.vocab import (
    DTYPES,
    KERNEL_SCALES,
    LENGTHS,
    MASKS,
    MAXIMA,
    ORDERS,
    OUT_DTYPES,
    OUTPUTS,
    PRODUCERS,
    SCALE_ROWS,
    SCALE_ROWS_DEFAULT,
    SUMS,
    TOTALS,
    V_LAYOUTS,
    V_SCALES,
)


def _registers(description: str) -> Any:
    return derived(
        description,
        ge=SM90.setmaxnreg_min,
        le=SM90.setmaxnreg_max,
        multiple_of=SM90.register_quantum,
    )


# one wgmma takes all columns of V; rows of 8 columns keep the 16-byte steps that TMA needs
_HEAD_DIM: dict[str, Any] = {"ge": 16, "le": SM90.wgmma_n_max, "multiple_of": 8}


class Attention(Section):
    """What is computed."""

    head_dim: int = Field(description="columns of Q and K", **_HEAD_DIM)
    head_dim_v: int = derived("columns of V and O; head_dim if left out", **_HEAD_DIM)
    dtype: Annotated[str, OneOf(DTYPES)] = Field(
        description="of Q, K and V; with e4m3 each has scales, and [fp8] says more"
    )
    out_dtype: Annotated[str, OneOf(OUT_DTYPES)] = derived(
        "of O; if left out that of Q, K and V, and bf16 where these are e4m3"
    )
    mask: Annotated[str, OneOf(MASKS)] = Field(description="which keys a query sees")
    lengths: Annotated[str, OneOf(LENGTHS)] = Field(
        default="equal",
        description='"equal": all sequences are of one length; "varlen": each has its own, their '
        "rows lie one after the other, and where each begins is read on the GPU",
    )


class Tile(Section):
    """What one thread block holds at a time."""

    block_m: int = Field(
        ge=SM90.wgmma_m,
        le=4 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="query rows per thread block",
    )
    block_n: int = Field(ge=16, le=SM90.wgmma_n_max, multiple_of=16, description="keys per step")


class Split(Section):
    """How the keys of a sequence are parted."""

    chunks: int = Field(
        default=1,
        ge=1,
        le=128,
        description="that a sequence's keys are cut into, at most: equally long ones, in whole "
        "blocks of keys, by its own length alone; of more than one, each is a tile's work of its "
        "own, and a second kernel merges them",
    )


class Pipeline(Section):
    """How loads run ahead of the arithmetic."""

    stages: int = Field(default=2, ge=2, le=8, description="depth of the K and V rings")
    q_stages: int = Field(
        default=1, ge=1, le=2, description="buffers of Q; with 2 the next tile's is loaded early"
    )
    output: Annotated[str, OneOf(OUTPUTS)] = Field(
        default="own",
        description='through which shared memory O is stored: "own", a buffer of its own; '
        '"halves", one of half its size, one half after the other; "v_space", that of V',
    )


class Warps(Section):
    """Who does what in a thread block."""

    producer: Annotated[str, OneOf(PRODUCERS)] = Field(
        default="warp",
        description='"warp": a specialised TMA producer; "none": consumers load for themselves',
    )
    producer_registers: int = _registers("setmaxnreg of the producer; derived if left out")
    consumer_registers: int = _registers("setmaxnreg of the consumers; derived if left out")


class Overlap(Section):
    """What runs under what."""

    inter_warpgroup: bool = derived(
        "ping-pong: one warpgroup's softmax under the other's GEMMs; "
        "true if left out, where there are a producer warp and two consumers or more"
    )
    intra_warpgroup: bool = Field(
        default=True, description="a block's QKᵀ is issued with the PV of the block before"
    )


class Softmax(Section):
    """How scores become probabilities."""

    sum: Annotated[str, OneOf(SUMS)] = Field(
        default="threads",
        description='who adds up the rows of P; "tensor": the PV GEMM, by a column of ones beside '
        'V; needs maximum = "each"',
    )
    maximum: Annotated[str, OneOf(MAXIMA)] = derived(
        '"lazy": exponentials are relative to the row max so far, which is raised only where that '
        'makes P or its sums too large; "each": the row max is updated in each block, before the '
        "exponentials; each in e4m3, lazy elsewhere"
    )
    rescale_threshold: float = Field(
        default=0.0,
        ge=0,
        le=15,  # P grows to 2 to this power; one more would leave fp16's range
        multiple_of=0.125,
        description="log2 units; > 0 keeps the old row max while it is close enough; needs "
        'maximum = "each"',
    )
    promote: int = Field(
        default=0,
        ge=0,
        le=64,
        description="blocks of keys after which sums of PV are added to an fp32 accumulator of "
        "their own, since the tensor cores cut sums off, in e4m3 to 14 bits; 0: never",
    )
    promote_columns: int = Field(
        default=0,
        ge=0,
        le=SM90.wgmma_n_max,
        multiple_of=SM90.wgmma_n_step,
        description="with promote = 1 in e4m3: columns of PV that are added up at a time, and then "
        "to O, which is the fp32 accumulator: that takes registers for so many columns beside O; "
        "0: all at once",
    )
    totals: Annotated[str, OneOf(TOTALS)] = derived(
        "where that accumulator is, with promote: in registers, or in shared memory, which leaves "
        "the tile its registers; registers if left out"
    )


class Fp8(Section):
    """Keys of e4m3 alone: its scales, the layout of V, and the range of P."""

    v_layout: Annotated[str, OneOf(V_LAYOUTS)] = derived(
        '"columns": V is transposed, in the key order of P, as fagen.quantize writes it; '
        '"rows": row-major, and the producer transposes it; columns if left out, and rows with '
        'lengths = "varlen"'
    )
    scales: Annotated[str, OneOf(KERNEL_SCALES)] = derived(
        "what shares a scale of Q and of K: a head of a batch, or a block of its rows; head if "
        "left out"
    )
    scale_rows: Annotated[int, OneOf(SCALE_ROWS)] = derived(
        f'rows that share a scale, with scales = "block"; {SCALE_ROWS_DEFAULT} if left out'
    )
    v_scales: Annotated[str, OneOf(V_SCALES)] = derived(
        "what shares a scale of V: a column of a head, or a block of scale_rows keys, which enters "
        "the exponents, so that outliers in one column cost the others their bits; column if left "
        "out"
    )
    p_offset: float = derived(
        "log2 units; P is computed 2 to this power larger, and what is then below 2^-10 is lost; "
        "if left out 8, or what is left of e4m3's range beside rescale_threshold, in whole",
        ge=0,
        le=8,
        multiple_of=0.125,
    )


class Grid(Section):
    """How thread blocks take tiles."""

    order: Annotated[str, OneOf(ORDERS)] = derived(
        "persistent; lpt (longest first); or dynamic, the same to whoever comes free, by a counter "
        "in the workspace; what suits the mask if left out"
    )
    cluster: int = Field(
        default=1,
        ge=1,
        le=2,
        description="thread blocks that share K and V by multicast",
    )


class Build(Section):
    """What the compiler may do."""

    max_spill_bytes: int = Field(
        default=0, ge=0, le=4096, description="bytes per thread that may spill to local memory"
    )


class Schedule(AnySchedule):
    """What attention is computed and how one multiprocessor is used; every key has its value."""

    kind: ClassVar[str] = "forward"

    attention: Attention
    tile: Tile
    split: Split = Split()
    pipeline: Pipeline = Pipeline()
    warps: Warps = Warps()
    overlap: Overlap = Overlap()
    softmax: Softmax = Softmax()
    fp8: Fp8 = Fp8()
    grid: Grid = Grid()
    build: Build = Build()

    keys: ClassVar[Keys] = Keys(
        tables={
            "attention": Attention,
            "tile": Tile,
            "split": Split,
            "pipeline": Pipeline,
            "warps": Warps,
            "overlap": Overlap,
            "softmax": Softmax,
            "fp8": Fp8,
            "grid": Grid,
            "build": Build,
        },
        derived=DERIVED,
        rules=rules,
        slug=SLUG,
        former=FORMER,
    )

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return consumers(self.values())

    def columns(self) -> dict[str, str]:
        """Return what a list of schedules shows of this one."""
        asked, tile = self.attention, self.tile
        own_v = "" if asked.head_dim_v == asked.head_dim else f"/{asked.head_dim_v}"
        return {
            "dtype": asked.dtype,
            "head_dim": f"{asked.head_dim}{own_v}",
            "mask": asked.mask,
            "tile": f"{tile.block_m}x{tile.block_n}",
        }
