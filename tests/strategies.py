"""Random schedules of each kind that keep the rules, whether they fit or not: for properties."""

from hypothesis import strategies as st

from fagen.kinds.backward.rules import DQ_BY, KEPT, PARTITIONS
from fagen.kinds.combine.keys import Schedule as Combining
from fagen.kinds.decode.keys import Schedule as Decoding
from fagen.kinds.decode.rules import DEALT
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.quantize.keys import Schedule as Quantizer
from fagen.vocab import (
    LAYOUTS,
    MAXIMA,
    PARTIALS,
    PLAIN_MASKS,
    QUANTIZED_SCALES,
    SCALE_ROWS,
    SIXTEEN_BITS,
    V_SCALES,
)

ONE_SLAB = (16, 24, 32, 56, 64)  # head dims that fill up to 16, 32 or 64 columns: one swizzle wide


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a schedule; each optional key is left out about half of the time."""
    consumers = draw(st.integers(1, 4))
    producer = draw(st.sampled_from(["warp", "none"]))
    keys = {
        "head_dim": draw(st.integers(2, 32)) * 8,
        "dtype": draw(st.sampled_from(["fp16", "bf16"])),
        "mask": draw(st.sampled_from(["full", "causal"])),
        "block_m": 64 * consumers,
        "block_n": draw(st.integers(1, 16)) * 16,
    }
    optional = {
        "head_dim_v": st.integers(2, 32).map(lambda n: n * 8),
        "stages": st.integers(2, 8),
        "q_stages": st.integers(1, 2),
        "producer": st.just(producer),
        "inter_warpgroup": st.booleans() if consumers > 1 else st.just(False),
        "intra_warpgroup": st.booleans(),
        "rescale_threshold": st.integers(0, 120).map(lambda n: n / 8),
        "order": st.sampled_from(["persistent", "lpt"]),
        "max_spill_bytes": st.integers(0, 4096),
    }
    registers = st.integers(3, 32).map(lambda n: n * 8)
    keys |= draw(st.fixed_dictionaries({}, optional=optional))
    keys |= draw(outputs(keys))
    if keys.get("head_dim_v", keys["head_dim"]) in ONE_SLAB and keys["dtype"] == "fp16":
        sums = st.sampled_from(["threads", "tensor"])
        keys |= draw(st.fixed_dictionaries({}, optional={"sum": sums}))
    if keys.get("rescale_threshold", 0) > 0 or keys.get("sum") == "tensor":
        keys["maximum"] = "online"
    else:
        keys |= draw(st.fixed_dictionaries({}, optional={"maximum": st.sampled_from(MAXIMA)}))
    if keys.get("sum") != "tensor":
        keys |= draw(promotions())
    if keys.get("producer") != "none":
        names = ("producer_registers", "consumer_registers")
        keys |= draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, registers)))
    full = keys["mask"] == "full"
    passed = -(-keys["block_m"] // keys["block_n"])  # by a causal pair's shorter tile
    steps = full or (keys.get("intra_warpgroup", True) and passed <= keys.get("stages", 2))
    order = "persistent" if full else "lpt"
    if steps and keys.get("producer") != "none" and keys.get("order", order) == order:
        keys |= draw(st.fixed_dictionaries({}, optional={"cluster": st.integers(1, 2)}))
    return Schedule.make(**keys)


@st.composite
def fp8_schedules(draw: st.DrawFn) -> Schedule:
    """Draw a schedule of e4m3; each optional key is left out about half of the time."""
    scales = draw(st.sampled_from([None, "head", "block"]))
    rows = draw(st.sampled_from([None, *SCALE_ROWS])) if scales == "block" else None
    consumers = draw(st.integers(1, 4))
    block_n = draw(st.integers(1, 8)) * 32
    maximum = draw(st.sampled_from(MAXIMA))
    threshold = draw(st.integers(0, 70)) / 8 if maximum == "online" else 0.0
    most = 8.75 - threshold
    keys = {
        "head_dim": draw(st.integers(1, 16)) * 16,
        "dtype": "e4m3",
        "mask": draw(st.sampled_from(["full", "causal"])),
        "block_m": 64 * consumers,
        "block_n": block_n,
        "maximum": maximum,
        "rescale_threshold": threshold,
    }
    if scales:
        keys |= {"scales": scales}
    if rows:
        keys |= {"scale_rows": rows}
    optional = {
        "head_dim_v": st.integers(1, 16).map(lambda n: n * 16),
        "out_dtype": st.sampled_from(["bf16", "fp16"]),
        "v_layout": st.sampled_from(["rows", "columns"]),
        "p_offset": st.integers(0, min(64, int(8 * most))).map(lambda n: n / 8),
        **({"v_scales": st.sampled_from(V_SCALES)} if scales == "block" else {}),
        "stages": st.integers(2, 8),
        "q_stages": st.integers(1, 2),
        "intra_warpgroup": st.booleans(),
        "order": st.sampled_from(["persistent", "lpt"]),
    }
    keys |= draw(st.fixed_dictionaries({}, optional=optional)) | draw(promotions())
    return Schedule.make(**keys | draw(outputs(keys)))


@st.composite
def promotions(draw: st.DrawFn) -> dict[str, object]:
    """Draw whether sums are promoted, after how many blocks, and where to."""
    keys = draw(st.fixed_dictionaries({}, optional={"promote": st.integers(0, 64)}))
    if keys.get("promote"):
        homes = st.sampled_from(["registers", "shared"])
        keys |= draw(st.fixed_dictionaries({}, optional={"totals": homes}))
    return keys


WIDER = {104: 128, 136: 160, 168: 192, 176: 192, 200: 224, 208: 224, 232: 256, 240: 256}


def columns(head_dim, dtype):
    """Columns of shared memory: a few more in 16 bits where that makes slabs of 64 or 128 bytes."""
    if dtype == "e4m3":
        return -(-head_dim // 32) * 32
    return WIDER.get(head_dim, -(-head_dim // 16) * 16)


def outputs(keys):
    """Ways out for O, in halves only where columns fill up to 128 or 256: two slabs or four."""
    filled = columns(keys.get("head_dim_v", keys["head_dim"]), keys["dtype"])
    possible = ["reuse_v", "own", *(["half"] if filled in (128, 256) else [])]
    return st.fixed_dictionaries({}, optional={"output": st.sampled_from(possible)})


@st.composite
def quantizers(draw: st.DrawFn) -> Quantizer:
    """Draw a schedule of a quantiser; each optional key is left out about half of the time."""
    keys = {
        "head_dim": draw(st.integers(1, 16)) * 16,
        "dtype": draw(st.sampled_from(["fp16", "bf16"])),
    }
    optional = {
        "rotary": st.sampled_from(
            ["none", "pairs", *(["halves"] if keys["head_dim"] % 64 == 0 else [])]
        ),
        "rotate": st.booleans(),
        "center": st.booleans(),
        "scales": st.sampled_from(QUANTIZED_SCALES),
        "layout": st.sampled_from(["rows", "columns"]),
    }
    keys |= draw(st.fixed_dictionaries({}, optional=optional))
    if keys.get("scales") == "column":
        keys["rotate"] = False
    if keys.get("rotary", "none") != "none":
        keys["center"] = False
        keys["scales"] = "head" if keys.get("scales") == "column" else keys.get("scales", "block")
    if keys.get("scales", "block") == "block":
        rows = {"scale_rows": st.sampled_from(SCALE_ROWS)}
        keys |= draw(st.fixed_dictionaries({}, optional=rows))
    return Quantizer.make(**keys)


HEAD_DIMS = st.integers(2, 32).map(lambda n: n * 8)


def backward_keys() -> st.SearchStrategy[dict[str, object]]:
    """Draw keys of the backward pass that keep every rule but those between them."""
    required = {
        "dtype": st.sampled_from(sorted(SIXTEEN_BITS)),
        "head_dim": HEAD_DIMS,
        "mask": st.sampled_from(sorted(PLAIN_MASKS)),
        "block_m": st.sampled_from([64, 80, 96, 112, 128]),
        "block_n": st.sampled_from([64, 128, 192]),
    }
    optional = {
        "head_dim_v": HEAD_DIMS,
        "stages": st.integers(1, 4),
        "do_stages": st.integers(1, 4),
        "ds_stages": st.integers(1, 2),
        "partition": st.sampled_from(PARTITIONS),
        "dq_by": st.sampled_from(DQ_BY),
        "dq_slices": st.integers(1, 2),
        "intra_warpgroup": st.booleans(),
        "under_dp": st.booleans(),
        "kept": st.sampled_from(KEPT),
    }
    return st.fixed_dictionaries(required, optional=optional)


def decoding() -> st.SearchStrategy[Decoding]:
    """Draw a schedule of decoding that keeps the rules, whether or not it fits."""
    required = {
        "dtype": st.sampled_from(sorted(SIXTEEN_BITS)),
        "head_dim": HEAD_DIMS,
        "mask": st.sampled_from(sorted(PLAIN_MASKS)),
        "rows": st.integers(1, 8).map(lambda n: n * 8),
        "block_n": st.sampled_from([64, 128]),
    }
    optional = {
        "head_dim_v": HEAD_DIMS,
        "num_splits": st.integers(1, 128),
        "stages": st.integers(3, 24),
        "q_stages": st.integers(1, 2),
        "speculate": st.booleans(),
        "by": st.sampled_from(sorted(DEALT)),
        "blocks": st.integers(1, 4),
    }
    keys = st.fixed_dictionaries(required, optional=optional)
    return keys.map(lambda keys: Decoding.make(**keys))


def combining() -> st.SearchStrategy[Combining]:
    """Draw a schedule of combining."""
    return st.builds(
        Combining.make,
        dtype=st.sampled_from(sorted(PARTIALS)),
        head_dim=st.integers(1, 64).map(lambda n: n * 8),
        out_dtype=st.sampled_from(sorted(PARTIALS)),
        layout=st.sampled_from(LAYOUTS),
    )
