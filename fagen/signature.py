"""What a call of a kernel takes and gives, declared once.

From a Signature come the C struct and its ctypes twin, the checks in Python and in C++ with the
same words, the torch binding with its schema, the fake kernels, and the table in the docs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from fagen.statuses import ALIGNMENT, NO_KERNEL, Status, statuses
from fagen.vocab import Dtype

MAX_SIZE = 1 << 30  # of any dimension, where a signature says no less

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Extent:
    """How long a dimension is: `number`, or a named size in blocks of `per`, times `times`.

    ⌈name / per⌉ · times + more + plus: Extent("seqlen") is the size itself, Extent("seqlen",
    per=64) its blocks of 64, Extent("seqlen", per=16, times=16) the size rounded up to a multiple
    of 16, Extent("batch", plus=1) where each sequence begins and the last one ends, a minus is
    allowed; Extent("total", per=64, more="batch") has room for the blocks of each sequence.
    """

    name: str = ""
    number: int = 1
    per: int = 1
    times: int = 1
    plus: int = 0
    more: str = ""  # another named size, that is added

    @property
    def plain(self) -> bool:
        """Whether it is a named size as it is, which a tensor can tell."""
        return bool(self.name) and self.per == self.times == 1 and not (self.plus or self.more)

    def at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how much that is; sizes may be torch's symbols."""
        if not self.name:
            return self.number
        blocks = (sizes[self.name] + self.per - 1) // self.per * self.times
        return blocks + (sizes[self.more] if self.more else 0) + self.plus

    def __str__(self) -> str:
        if not self.name:
            return f"{self.number}"
        blocks = self.name if self.per == 1 else f"ceil({self.name} / {self.per})"
        text = blocks if self.times == 1 else f"{blocks} · {self.times}"
        text += f" + {self.more}" if self.more else ""
        return f"{text} {self.added}" if self.plus else text

    @property
    def added(self) -> str:
        """What is added, with its sign: '+ 1', '- 1'."""
        return f"{'-' if self.plus < 0 else '+'} {abs(self.plus)}"


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor, and the word for its stride in the C struct.

    One without a word is contiguous: its stride is 1. With `broadcast` a size of 1 serves for all,
    and its stride is passed as 0.
    """

    extent: Extent
    stride: str = ""
    broadcast: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor of a call.

    access: "in"; "out", which the binding allocates; or "made", which is taken if it is given, and
    else an output. A tensor that is not `present` is in the struct, null, and in no op.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: Dtype
    note: str  # what it holds, for the header and the docs
    access: str = "in"
    present: bool = True
    optional: bool = False  # an input that may be None
    group: str = ""  # optional tensors of one group are given together or not at all
    refused: str = ""  # why it cannot be given, though ops of its kind have it
    missing: str = ""  # why it must be given, though the op's schema lets it be left out
    aligned: bool = True  # base pointer and strides are multiples of ALIGNMENT bytes
    max_stride: int = 0  # in elements; 0: any
    conversion: str = ""  # how to come to the dtype; "" for {name}.to(dtype)
    omittable: bool = False  # an output that the op `<slug>_without_<name>` does not make
    if_empty: float | None = None  # what an output holds where there is nothing to compute
    all_strides: tuple[str, ...] = ()  # where other kernels of the kind have more than its dims

    @property
    def given(self) -> bool:
        """Whether it is an argument of the op."""
        return self.present and self.access != "out"

    @property
    def returned(self) -> bool:
        """Whether the op returns it."""
        return self.present and self.access != "in"

    @property
    def result(self) -> str:
        """Its name among the results: none may have the name of an argument."""
        return f"found_{self.name}" if self.made else self.name

    @property
    def made(self) -> bool:
        """Whether it is an output unless it is given."""
        return self.access == "made"

    @property
    def told_by(self) -> str:
        """The field of the C struct that says whether it is given."""
        return f"{self.name}{'_given' * self.made}"

    @property
    def may_be_none(self) -> bool:
        """Whether the op's schema lets it be left out."""
        return self.optional or self.made or bool(self.missing)

    @cached_property
    def strides(self) -> tuple[str, ...]:
        """The words for its strides, in the order of the C struct: the same for any layout."""
        return self.all_strides or tuple(sorted(dim.stride for dim in self.dims if dim.stride))

    @property
    def rank(self) -> int:
        """How many dimensions it has."""
        return len(self.dims)

    @property
    def step(self) -> int:
        """What strides are multiples of, in elements."""
        return ALIGNMENT // self.dtype.bytes if self.aligned else 1

    @property
    def remedy(self) -> str:
        """How to come to its dtype, in words."""
        words = self.conversion or "{name}.to(torch.{dtype}) converts it"
        return words.format(name=self.name, dtype=self.dtype.torch)

    @property
    def shape(self) -> str:
        """Its dimensions in words."""
        dims = [f"{dim.extent}{' or 1' if dim.broadcast else ''}" for dim in self.dims]
        return f"({', '.join(dims)})"


@dataclass(frozen=True)
class Scalar:
    """A number of a call; `words` > 0: random words that the binding draws from a seed.

    The words are SplitMix64's numbers, the lower half of each first, as uint32.
    """

    name: str
    type: str  # "float" | "int"
    note: str
    default: float | int | None = None
    field: str = ""  # in the C struct; name if left out
    words: int = 0
    positive: bool = False  # and finite, as a float32
    most: float | None = None  # that one that is positive may be, a float32
    least: int | None = None  # that one may be; `most` is said too then
    present: bool = True

    @property
    def demand(self) -> str:
        """What one that is `positive`, or has a least, must be, in words."""
        if self.least is not None:
            return f"from {self.least} to {self.most:.0f}"
        demand = "finite and above 0 as a float32" if self.type == "float" else "above 0"
        return f"{demand}, and {self.limit}" if self.limit else demand

    @property
    def demands(self) -> bool:
        """Whether not every number will do."""
        return self.positive or self.least is not None

    @property
    def rule(self) -> str:
        """The same behind what it is, in the C struct."""
        if self.least is not None:
            return f"; {self.demand}"
        return "; finite and positive" * self.positive + f", {self.limit}" * bool(self.limit)

    @property
    def limit(self) -> str:
        """The most that one may be, in words; "" without such a limit."""
        return "" if self.most is None else f"{self.most:g} at most"

    @property
    def in_struct(self) -> str:
        """Its name in the C struct."""
        return self.field or self.name


def random_words(seed: int, words: int) -> tuple[int, ...]:
    """Return the words of a scalar that has some, as the torch binding draws them."""
    drawn: list[int] = []
    state = seed & _MASK
    while len(drawn) < words:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
        drawn += [mixed & 0xFFFF_FFFF, mixed >> 32]
    return tuple(drawn[:words])


@dataclass(frozen=True)
class Size:
    """A named size, and the most that it may be."""

    name: str
    most: int = MAX_SIZE


@dataclass(frozen=True)
class Multiple:
    """A rule across arguments: `size` is a multiple of size `by` (none of none)."""

    size: str
    by: str


@dataclass(frozen=True)
class Limit:
    """A rule across sizes: there are fewer than 2^30 of what these factors multiply to.

    Where there are none the launcher alone can tell how many there are.
    """

    name: str  # of what is counted, in words
    factors: tuple[Extent, ...] = ()

    def allows(self, sizes: Mapping[str, Any]) -> bool:
        """Whether sizes keep to it; torch's symbols do, until they have values."""
        counts = [factor.at(sizes) for factor in self.factors]
        return not all(isinstance(count, int) for count in counts) or math.prod(counts) < MAX_SIZE

    def __str__(self) -> str:
        return " · ".join(map(str, self.factors))


@dataclass(frozen=True)
class Signature:
    """All of a call.

    `sizes` are told by the first input that has one as it is; the first input's device is that of
    all. `order` names inputs and scalars as the op takes them, what it leaves out comes after them
    as it is declared; from `keyword_from` on they are given by name.
    """

    kind: str
    version: int  # of the struct: rises with every change of it
    sizes: tuple[Size, ...]
    tensors: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    order: tuple[str, ...]
    rules: tuple[Multiple, ...] = ()
    limits: tuple[Limit, ...] = ()
    keyword_from: str = ""
    no_gradient: str = "there is no backward yet"
    instead: str = "call it under torch.no_grad()"  # what a caller of the op may do then
    gradients_by: str = ""  # the call around this op that has them by autograd, if there is one
    form: str = ""  # of the struct, in words, where a kind's calls are of several

    @property
    def struct(self) -> str:
        """The name of the C struct."""
        words = (self.kind, *self.form.split())
        return f"Fagen{''.join(word.capitalize() for word in words)}Args"

    @property
    def guard(self) -> str:
        """The macro that says that the struct is there, in this version."""
        words = (self.kind, *self.form.split())
        return f"FAGEN_{'_'.join(words).upper()}_ARGS"

    @property
    def alignment(self) -> int:
        """Of the workspace, aligned tensors and their strides, in bytes."""
        return ALIGNMENT

    @property
    def no_kernel(self) -> int:
        """The status of a vendored folder where none of its kernels computes a call."""
        return NO_KERNEL

    @cached_property
    def refusals(self) -> int:
        """How many statuses there are that the arguments alone tell."""
        return next(i for i, status in enumerate(self.statuses) if status.name == "not hopper")

    @cached_property
    def statuses(self) -> tuple[Status, ...]:
        """How a call of the C function ends."""
        return statuses((self,))

    @property
    def counts(self) -> tuple[Limit, ...]:
        """The limits that the sizes alone tell."""
        return tuple(limit for limit in self.limits if limit.factors)

    @cached_property
    def too_many(self) -> str:
        """What is said of a call of as many things as a limit forbids."""
        return next(status.message for status in self.statuses if status.name == "too many")

    @cached_property
    def most(self) -> Mapping[str, int]:
        """The most that each named size may be."""
        return {size.name: size.most for size in self.sizes}

    @cached_property
    def sizes_by_most(self) -> Mapping[int, tuple[Size, ...]]:
        """The named sizes by the most that they may be."""
        limits = dict.fromkeys(size.most for size in self.sizes)
        return {most: tuple(size for size in self.sizes if size.most == most) for most in limits}

    @cached_property
    def groups(self) -> Mapping[str, tuple[Tensor, ...]]:
        """The tensors that are given together or not at all, by the name of their group."""
        named = dict.fromkeys(tensor.group for tensor in self.inputs if tensor.group)
        return {g: tuple(t for t in self.inputs if t.group == g) for g in named}

    @property
    def made_groups(self) -> tuple[tuple[Tensor, ...], ...]:
        """Those of them that are found where they are not given."""
        return tuple(tensors for tensors in self.groups.values() if tensors[0].made)

    @property
    def is_viewed(self) -> bool:
        """Whether C++ can call the binding past torch's dispatcher."""
        takes_scale = [scalar.type for scalar in self.numbers] == ["float"]
        return takes_scale and all(
            tensor.access == "out" and tensor.if_empty is None for tensor in self.outputs
        )

    @property
    def leader(self) -> Tensor:
        """The input whose device is that of all."""
        return self.inputs[0]

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the op takes, in the order in which they are declared."""
        return tuple(tensor for tensor in self.tensors if tensor.given)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the op returns."""
        return tuple(tensor for tensor in self.tensors if tensor.returned)

    @cached_property
    def omittable(self) -> tuple[Tensor, ...]:
        """The output that a variant of the op leaves out, if there is one: the last."""
        return tuple(tensor for tensor in self.outputs if tensor.omittable)

    @cached_property
    def numbers(self) -> tuple[Scalar, ...]:
        """The scalars that the op takes."""
        return tuple(scalar for scalar in self.scalars if scalar.present)

    @cached_property
    def arguments(self) -> tuple[Tensor | Scalar, ...]:
        """What the op takes, in its order."""
        declared: dict[str, Tensor | Scalar] = {tensor.name: tensor for tensor in self.inputs}
        declared |= {scalar.name: scalar for scalar in self.numbers}
        names = dict.fromkeys((*self.order, *declared))
        return tuple(declared[name] for name in names if name in declared)

    @cached_property
    def positional(self) -> tuple[Tensor | Scalar, ...]:
        """Those of them that need no name."""
        return tuple(takewhile(lambda argument: argument.name != self.keyword_from, self.arguments))

    @cached_property
    def told(self) -> tuple[tuple[str, str, int], ...]:
        """Each named size, with the input, and its dimension, that tells it."""
        tellers: dict[str, tuple[str, str, int]] = {}
        for tensor in self.inputs:
            for place, dim in enumerate(tensor.dims):
                if dim.extent.plain:
                    tellers.setdefault(dim.extent.name, (dim.extent.name, tensor.name, place))
        return tuple(tellers.values())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by name."""
        return next(tensor for tensor in self.tensors if tensor.name == name)

    @property
    def gradient_refused(self) -> str:
        """Why a call is refused where one of its tensors requires a gradient."""
        *some, last = [tensor.name for tensor in self.inputs]
        names = f"{', '.join(some)} or {last}" if some else last
        sentence = f"{names} requires a gradient, and {self.no_gradient}"
        if self.gradients_by:
            sentence += (
                f": {self.gradients_by}, or a vendored package's function, has gradients by "
                "autograd (backward(), torch.autograd.grad), and not by transforms of torch.func, "
                "torch.vmap or torch.jit"
            )
        return f"{sentence}; {self.instead}"

    @property
    def asked(self) -> str:
        """The op's arguments as torch's schema language has them."""
        return ", ".join(self._asked(self.arguments))

    @property
    def asked_by_place(self) -> str:
        """All of them, each by its place too where torch lets them: names take time to look up."""
        parts = [*self._asked(self.arguments)]
        named = parts[parts.index("*") :] if "*" in parts else []
        if all("=" in part for part in named[1:]):
            parts = [part for part in parts if part != "*"]
        return ", ".join(parts)

    @property
    def asked_in_order(self) -> str:
        """The same of those that need no name: torch gives no gradients of others."""
        return ", ".join(self._asked(self.positional))

    def _asked(self, arguments: Iterable[Tensor | Scalar]) -> Iterator[str]:
        for argument in arguments:
            if argument.name == self.keyword_from:
                yield "*"
            if isinstance(argument, Tensor):
                none = argument.may_be_none
                yield f"Tensor{'?' if none else ''} {argument.name}{'=None' if none else ''}"
            else:
                default = "" if argument.default is None else f"={argument.default}"
                # one that has ends is traced as a symbol: a graph is for all that it may be
                word = argument.type if argument.least is None else f"Sym{argument.type.title()}"
                yield f"{word} {argument.name}{default}"

    @property
    def returns(self) -> str:
        """The op's results as torch's schema language has them."""
        return self._returns(self.outputs)

    @property
    def returns_kept(self) -> str:
        """Those of the variant that leaves one out."""
        return self._returns(self.kept)

    @cached_property
    def kept(self) -> tuple[Tensor, ...]:
        """The outputs of the variant that leaves one out."""
        return tuple(tensor for tensor in self.outputs if not tensor.omittable)

    @staticmethod
    def _returns(kept: tuple[Tensor, ...]) -> str:
        results = [f"Tensor {tensor.result}" for tensor in kept]
        return results[0] if len(results) == 1 else f"({', '.join(results)})"
