"""Read the shapes of a space: sizes of calls, and how much each counts."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fagen.problem import HIDDEN, TOKENS, Sizes
from fagen.schedule.faults import Fault

SEQLENS = (512, 1_024, 2_048, 4_096, 8_192, 16_384)
MAX_SIZE = 1 << 20  # of a batch, of heads, of a sequence


class Strict(BaseModel):
    """A table that has its keys and no others, of their types."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(Strict):
    """Sizes in a space file, and how much they count; what is left out makes them standard ones."""

    seqlen: int = Field(ge=1, le=MAX_SIZE)
    seqlen_k: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    batch: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    kv_heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    weight: float = Field(default=1.0, gt=0)

    def sizes(self, head_dim: int) -> Sizes:
        """Fill in what was left out: 16,384 tokens in all, a hidden size of 2048."""
        heads = self.heads or max(1, HIDDEN // head_dim)
        return Sizes(
            batch=self.batch or max(1, TOKENS // self.seqlen),
            heads=heads,
            kv_heads=self.kv_heads or heads,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen_k or self.seqlen,
        )


def missing_sizes(shapes: Any, keys: Sequence[str]) -> Iterator[Fault]:
    """Yield which of these keys the shapes of a file do not say."""
    for number, shape in enumerate(shapes if isinstance(shapes, list) else ()):
        for key in keys if isinstance(shape, dict) else ():
            if key not in shape:
                yield ("shapes", str(number), key), "is missing"
