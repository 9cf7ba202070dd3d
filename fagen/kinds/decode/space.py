"""What a search of decoding tries, sums up against an SM, and predicts."""

from collections.abc import Mapping
from typing import Any

from fagen.kinds.decode.cost import predictor
from fagen.kinds.decode.defaults import ROWS, num_splits_for
from fagen.kinds.decode.formulae import BUDGET, SUMMED
from fagen.kinds.decode.rules import DEALT
from fagen.kinds.space import Space

_CALLS = (  # batch, queries, keys
    *((1, 1, 1_024), (1, 1, 8_192), (1, 1, 32_768), (8, 1, 8_192), (32, 1, 4_096), (128, 1, 2_048)),
    *((1, 4, 8_192), (32, 4, 4_096)),
)
_GROUP = 4  # heads


def _shape(batch: int, queries: int, keys: int, kv_heads: int = 8) -> Mapping[str, int]:
    heads = {"heads": _GROUP * kv_heads, "kv_heads": kv_heads}
    return {"batch": batch, **heads, "seqlen": queries, "seqlen_k": keys}


def _shapes_like(values: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
    """Return calls of one size of a group, that would get such rows and splits by rule."""
    kv_heads = next((n for n in (8, 4, 1) if num_splits_for(n) == values["num_splits"]), 8)
    queries = 1 if values["rows"] == ROWS[0] else values["rows"] // _GROUP
    return tuple(_shape(batch, queries, keys, kv_heads) for batch, q, keys in _CALLS if q == 1)


SPACE = Space(
    defaults={
        "rows": ROWS,
        "block_n": (64, 128),
        "num_splits": (8, 16, 32, 64),
        "by": tuple(DEALT),
        "stages": tuple(range(3, 13)),
        "q_stages": (1, 2),
        "speculate": (True, False),
        "blocks": (1, 2, 3, 4),
    },
    budget=BUDGET,
    summed_keys=SUMMED,
    predictor=predictor,
    problem_keys=("dtype", "head_dim", "head_dim_v", "mask", "score", "sink", "cache"),
    tile_keys=("rows", "block_n"),
    example={"head_dim": 64, "dtype": "fp16", "mask": "causal", "rows": 8, "block_n": 64},
    # a cache's sizes follow from no others: a file says them, or has these
    shape_keys=("seqlen_k", "batch", "heads", "kv_heads"),
    shapes=tuple(_shape(*call) for call in _CALLS),
    shapes_like=_shapes_like,
    # so that a row of queries has the same bits beside others: by KV heads and head dims alone
    promised=("num_splits", "block_n", "maximum"),
)
