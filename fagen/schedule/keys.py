"""Declare every key of a schedule: its section, its values, its default, the rules between keys."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from fagen.arch import SM90
from fagen.vocab import DTYPES, MASKS, ORDERS, OUTPUTS, P_HOMES, PRODUCERS, SUMS, SWIZZLES


@dataclass(frozen=True)
class _OneOf:
    """The words that a key may have: those of a vocabulary table."""

    words: Iterable[str]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.literal_schema(list(self.words))


def _derived(description: str, **limits: Any) -> Any:
    """Declare a key whose default other keys decide (DERIVED); its own default is never seen."""
    return Field(default=None, description=description, **limits)


def _registers(description: str) -> Any:
    return _derived(
        description,
        ge=SM90.setmaxnreg_min,
        le=SM90.setmaxnreg_max,
        multiple_of=SM90.register_quantum,
    )


class Section(BaseModel):
    """A table of a schedule: strict, frozen, and without keys of a user's own making."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


# one wgmma takes all columns of V; rows of 8 columns keep the 16-byte steps that TMA needs
_HEAD_DIM: dict[str, Any] = {"ge": 16, "le": SM90.wgmma_n_max, "multiple_of": 8}


class Attention(Section):
    """What is computed."""

    head_dim: int = Field(description="columns of Q and K", **_HEAD_DIM)
    head_dim_v: int = _derived("columns of V and O; head_dim if left out", **_HEAD_DIM)
    dtype: Annotated[str, _OneOf(DTYPES)] = Field(description="of Q, K, V and O")
    mask: Annotated[str, _OneOf(MASKS)] = Field(description="which keys a query sees")


class Tile(Section):
    """What one thread block holds at a time."""

    block_m: int = Field(
        ge=SM90.wgmma_m,
        le=3 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="query rows per thread block",
    )
    block_n: int = Field(ge=16, le=SM90.wgmma_n_max, multiple_of=16, description="keys per step")


class Pipeline(Section):
    """How loads run ahead of the arithmetic."""

    stages: int = Field(default=2, ge=2, le=8, description="depth of the K and V rings")
    q_stages: int = Field(
        default=1, ge=1, le=2, description="buffers of Q; with 2 the next tile's is there early"
    )
    output: Annotated[str, _OneOf(OUTPUTS)] = Field(
        default="own",
        description='"own": O leaves through a buffer of its own; "v_space": through V\'s',
    )


class Warps(Section):
    """Who does what in a thread block."""

    producer: Annotated[str, _OneOf(PRODUCERS)] = Field(
        default="warp",
        description='"warp": a specialised TMA producer; "none": consumers load for themselves',
    )
    consumers: int = _derived("consumer warpgroups; block_m / 64 if left out", ge=1, le=3)
    producer_registers: int = _registers("setmaxnreg of the producer; derived if left out")
    consumer_registers: int = _registers("setmaxnreg of the consumers; derived if left out")


class Overlap(Section):
    """What runs under what."""

    inter_warpgroup: bool = _derived(
        "ping-pong: one warpgroup's softmax under the other's GEMMs; "
        "true if left out, where there are a producer warp and two consumers or more"
    )
    intra_warpgroup: bool = Field(
        default=True, description="the next QKᵀ issued before this block's softmax"
    )


class Softmax(Section):
    """How scores become probabilities."""

    p: Annotated[str, _OneOf(P_HOMES)] = Field(
        default="registers", description="from where P reaches the second GEMM"
    )
    sum: Annotated[str, _OneOf(SUMS)] = Field(
        default="threads",
        description='who adds up the rows of P; "tensor": the second GEMM, by a column of ones '
        "beside V",
    )
    rescale_threshold: float = Field(
        default=0.0,
        ge=0,
        le=15,  # P grows to 2 to this power; one more would leave fp16's range
        multiple_of=0.125,
        description="log2 units; > 0 keeps a row's old maximum while it is close enough",
    )


class Grid(Section):
    """How thread blocks take tiles."""

    order: Annotated[str, _OneOf(ORDERS)] = _derived(
        "persistent, lpt (longest first) or single; what suits the mask if left out"
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


# ---- what the declarations above say, by key ----------------------------------------------------

TABLES: Mapping[str, type[Section]] = {
    "attention": Attention,
    "tile": Tile,
    "pipeline": Pipeline,
    "warps": Warps,
    "overlap": Overlap,
    "softmax": Softmax,
    "grid": Grid,
    "build": Build,
}
SECTIONS = {key: name for name, table in TABLES.items() for key in table.model_fields}
_FIELDS = {key: TABLES[name].model_fields[key] for key, name in SECTIONS.items()}
REQUIRED = frozenset(key for key, field in _FIELDS.items() if field.is_required())

# Keys whose default follows from others, in an order that works.  A slug leaves such a key out
# where it has that value, and still reads back: what it follows from is in the slug.
DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "head_dim_v": lambda keys: keys["head_dim"],
    "consumers": lambda keys: keys["block_m"] // SM90.wgmma_m,
    # three consumers use up the register file exactly; a producer beside fewer has what it needs
    "producer_registers": lambda keys: _registers_of(keys)[0],
    "consumer_registers": lambda keys: _registers_of(keys)[1],
    "inter_warpgroup": lambda keys: keys["consumers"] > 1 and keys["producer"] == "warp",
    "order": lambda keys: MASKS[keys["mask"]].order,
}


def _registers_of(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread, where a schedule does not say."""
    if keys["producer"] != "warp":
        return 0, 0
    if keys["consumers"] > 2:
        return 32, 160
    return 40, 232  # the producer spills with 24


def _one_slab(columns: int, dtype: str) -> bool:
    """Whether so many columns, filled up, are one swizzle wide: ones must be one step from them."""
    row = DTYPES[dtype]
    return -(-columns // row.pad) * row.pad * row.bytes in {swizzle.bytes for swizzle in SWIZZLES}


def default(key: str, values: Mapping[str, Any]) -> Any:
    """Return what a key is where it is left out and the others have these values."""
    return DERIVED[key](values) if key in DERIVED else _FIELDS[key].default


def rules(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each rule between keys that is broken."""
    rows = SM90.wgmma_m * keys["consumers"]
    if keys["block_m"] != rows:
        yield (
            "consumers",
            f"{keys['consumers']} does not go with block_m = {keys['block_m']}: a warpgroup takes "
            f"{SM90.wgmma_m} rows; use block_m = {rows}, or consumers = "
            f"{keys['block_m'] // SM90.wgmma_m}",
        )
    if keys["inter_warpgroup"] and keys["consumers"] < 2:
        yield (
            "inter_warpgroup",
            "true needs two warpgroups that take turns; use block_m = 128, or leave it out",
        )
    if keys["cluster"] > 1:
        mask = MASKS[keys["mask"]]
        for key, wanted in (("producer", "warp"), ("order", mask.order)):
            if keys[key] not in (wanted, default(key, keys)):
                yield "cluster", f'2 needs {key} = "{wanted}"; use cluster = 1'
        if mask.causal and not keys["intra_warpgroup"]:
            yield "cluster", "2 with a causal mask needs intra_warpgroup = true; use cluster = 1"
        passed = -(-keys["block_m"] // keys["block_n"])
        if mask.causal and passed > keys["stages"]:
            # the shorter tile of a pair passes them while the longer one still holds every buffer
            yield (
                "cluster",
                f"2 with a causal mask needs a stage for each of the {passed} blocks that the "
                f"longer tile of a pair sees beyond the shorter one, and there are "
                f"{keys['stages']}; use stages = {passed}, or cluster = 1",
            )
    if keys["sum"] == "tensor" and not _one_slab(keys["head_dim_v"], keys["dtype"]):
        yield (
            "sum",
            f'"tensor" needs V in one slab of shared memory, as with head_dim_v = 64; it is '
            f'{keys["head_dim_v"]} here: use sum = "threads"',
        )
    if keys["sum"] == "tensor" and keys["dtype"] == "bf16":
        yield (
            "sum",
            '"tensor" adds P up after it is rounded, which in bf16 puts the log-sum-exp of a row '
            'that sees two or three keys off by 1.3e-3, and 1e-3 is promised: use sum = "threads"',
        )
    if keys["producer"] == "none":
        for key in ("producer_registers", "consumer_registers"):
            if keys[key]:
                yield (
                    key,
                    'has no meaning with producer = "none": no warp gives registers away; '
                    "leave it out",
                )
