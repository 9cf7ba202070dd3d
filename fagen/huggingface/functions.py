"""What transformers' mask functions are: closures, known by their code, never by what they do."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Meaning:
    """Which keys a query sees, by their positions in the sequence."""

    causal: bool = False
    # so many keys before its own and behind it; None: all. Nothing is behind under a causal mask
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    # where chunks are counted from, (B); None: from the first token that is no padding
    origin: Tensor | None = field(default=None, compare=False)
    # which sequence of its row each position is of, (B, S); None: one a row
    packed: Tensor | None = field(default=None, compare=False)
    anew: bool = False  # positions count from the beginning of each such sequence
    # which block each position is of, (B, S), as an image's tokens; −1: none. Those of one see each
    # other whatever `causal` says, within `left`
    blocks: Tensor | None = field(default=None, compare=False)

    @property
    def width(self) -> int | None:
        """What a layer calls its window: how many keys, its own among them, to one side."""
        return None if self.left is None else self.left + 1


@dataclass(frozen=True)
class Functions:
    """What transformers' mask functions mean, by those that it has and the code of those it makes.

    A function that is put together otherwise, of this release or another, of a model or of a user,
    is answered by its name.
    """

    plain: dict[Callable[..., Any], Meaning]
    both: Any = None  # the code of what is and-ed
    either: Any = None  # of what is or-ed
    anew: Any = None  # and of positions that count from each sequence's begin
    made: tuple[tuple[Any, Callable[..., Meaning]], ...] = ()  # and by it what others mean

    def read(self, function: Any) -> Meaning | str:
        """Return what a mask function means, or the name of the first in it that is not known."""
        if function in self.plain:
            return self.plain[function]
        code = getattr(function, "__code__", None)
        if code is not None and code is self.both:
            return _all_of([self.read(each) for each in _held(function)["mask_functions"]])
        if code is not None and code is self.either:
            return _either_of([self.read(each) for each in _held(function)["mask_functions"]])
        if code is not None and code is self.anew:
            inner = self.read(_held(function)["mask_function"])
            return inner if isinstance(inner, str) else replace(inner, anew=True)
        for known, meaning in self.made:
            if known is not None and known is code:
                return meaning(**_held(function))
        name = getattr(function, "__qualname__", type(function).__name__)
        return str(name).partition(".<locals>")[0]

    def told(
        self, function: Any, local_size: int | None, may_skip: tuple[bool, bool], config: object
    ) -> Meaning | str:
        """Return what a mask function means while torch traces, where no closure can be read.

        A mask that may be skipped is causal or full but for its window or chunk of local_size,
        which is the one of both that `config` has.
        """
        if local_size is None:
            return self.plain.get(function, "one that is put together of others")
        if may_skip[0] == may_skip[1]:
            return "one that is put together of others"
        window = getattr(config, "sliding_window", None) == local_size
        chunk = getattr(config, "attention_chunk_size", None) == local_size
        if window == chunk:
            return "a window or a chunk, which is open"
        if chunk:
            return Meaning(causal=True, chunk=local_size) if may_skip[0] else "chunks"
        return Meaning(True, local_size - 1) if may_skip[0] else _near(local_size, local_size)


def functions(masks: Any) -> Functions:
    """Return transformers' mask functions; `masks` is its masking_utils."""

    return Functions(
        {
            masks.causal_mask_function: Meaning(causal=True),
            masks.bidirectional_mask_function: Meaning(),
        },
        _code(masks, "and_masks", "mask_functions"),
        _code(masks, "or_masks", "mask_functions"),
        _code(masks, "remap_positions_for_packed_sequence", "mask_function", "position_ids"),
        (
            (
                _code(masks, "sliding_window_overlay", "sliding_window"),
                lambda sliding_window: _near(sliding_window - 1),
            ),
            (
                _code(masks, "sliding_window_bidirectional_overlay", "sliding_window"),
                lambda sliding_window: _near(sliding_window, sliding_window),
            ),
            (
                _code(masks, "chunked_overlay", "chunk_size", "left_padding"),
                lambda chunk_size, left_padding: Meaning(chunk=chunk_size, origin=left_padding),
            ),
            (
                _code(masks, "blockwise_overlay", "block_sequence_ids"),
                lambda block_sequence_ids: Meaning(blocks=block_sequence_ids),
            ),
            (
                _code(masks, "packed_sequence_mask_function", "packed_sequence_mask"),
                lambda packed_sequence_mask: Meaning(packed=packed_sequence_mask),
            ),
        ),
    )


def _code(masks: Any, maker: str, *holds: str) -> Any:
    """The code of what a function makes, where that holds the values of these names and no other.

    None where this release has no such function, or another one.
    """
    make = getattr(masks, maker, None)
    if make is None:
        return None
    arguments = inspect.signature(make).parameters.values()
    made = make(*(1 for each in arguments if each.kind is each.POSITIONAL_OR_KEYWORD))
    code = getattr(made, "__code__", None)
    return code if code is not None and set(code.co_freevars) == set(holds) else None


def _near(left: int, right: int | None = None) -> Meaning:
    return Meaning(left=left, right=right)


def _held(function: Any) -> dict[str, Any]:
    """What a function was made with, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _all_of(parts: list[Meaning | str]) -> Meaning | str:
    """What is seen by all of several."""
    seen = Meaning()
    for part in parts:
        if isinstance(part, str):
            return part
        if (seen.chunk and part.chunk) or (seen.packed is not None and part.packed is not None):
            return "and_masks of two of a kind"
        if part.blocks is not None or seen.blocks is not None:
            either, other = (part, seen) if seen.blocks is None else (seen, part)
            if not either.causal or other not in (Meaning(), Meaning(left=other.left)):
                return "blockwise_overlay"
        seen = Meaning(
            seen.causal or part.causal,
            _least(seen.left, part.left),
            _least(seen.right, part.right),
            seen.chunk or part.chunk,
            part.origin if seen.origin is None else seen.origin,
            part.packed if seen.packed is None else seen.packed,
            seen.anew or part.anew,
            part.blocks if seen.blocks is None else seen.blocks,
        )
    return seen


def _either_of(parts: list[Meaning | str]) -> Meaning | str:
    """What is seen by one of several: causal, or both of a block."""
    for part in parts:
        if isinstance(part, str):
            return part
    blocks = [x.blocks for x in parts if isinstance(x, Meaning) and x.blocks is not None]
    others = [x for x in parts if isinstance(x, Meaning) and x.blocks is None]
    # what is apart in packed sequences is no part of what is compared
    if len(blocks) != 1 or others != [Meaning(causal=True)] or others[0].packed is not None:
        return "or_masks"
    return Meaning(causal=True, blocks=blocks[0])


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)
