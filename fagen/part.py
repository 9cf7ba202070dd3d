"""Parts: a kernel has slots, and a part is one way to fill one of them.

A part names its texts, by the seats where they stand in a kernel, and declares what it brings to
the kernel around it: members of shared memory, parameters, tensor maps and constants. A kind's
`parts.py` maps keys of a schedule to parts. Its ledger of shared memory, its head, SharedStorage,
Params, the initialisation of barriers and its launcher are loops over them. fagen.render.cpp writes
these declarations as C++.

Sizes are named as fields of a Plan are, and as constants of a kernel: block_m is kBlockM.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import groupby
from typing import Any

from fagen.arch import SM90
from fagen.schedule import Values


@dataclass(frozen=True)
class Amount:
    """A product of numbers and of sizes by name, divided by others, and a number more."""

    factors: tuple[str | int, ...]
    per: tuple[str | int, ...] = ()
    plus: int = 0

    def at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how much that is: a number, or a formula where sizes are symbols."""
        product: Any = 1
        for factor in self.factors:
            product *= sizes[factor] if isinstance(factor, str) else factor
        for factor in self.per:
            product /= sizes[factor] if isinstance(factor, str) else factor
        return product + self.plus


def amount(*factors: str | int, per: str | int | None = None, plus: int = 0) -> Amount:
    """Return a product, perhaps divided by one size or number."""
    return Amount(factors, () if per is None else (per,), plus)


@dataclass(frozen=True)
class Type:
    """A C++ type by name; `bytes` are a number, a size by name or more, 0 where no ledger asks."""

    name: str
    bytes: int | str | Amount = 0
    pointer: bool = False

    def bytes_at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how many bytes a value takes."""
        size = self.bytes
        return size.at(sizes) if isinstance(size, Amount) else amount(size).at(sizes)


ELEMENT = Type("Element", "element_bytes")
OUT_ELEMENT = Type("OutElement", "out_element_bytes")
FLOAT, FLOAT4 = Type("float", 4), Type("float4", 16)
INT, INT64, BOOL = Type("int", 4), Type("int64_t", 8), Type("bool", 1)
UINT8, UINT32 = Type("uint8_t", 1), Type("uint32_t", 4)
DIVISOR, TENSOR_MAP = Type("FastDivisor"), Type("CUtensorMap")
DESCRIPTOR = Type("cute::SM90::GMMA::LayoutType")


def pointer_to(pointee: Type, *, const: bool = False) -> Type:
    """Return the type of a pointer."""
    return Type(f"{'const ' if const else ''}{pointee.name}*", 8, pointer=True)


# ---- shared memory -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """An array of SharedStorage, or a single value; a `row` of the ledger, with others if shared.

    One that is `aligned` begins at a multiple of what swizzled tiles need.
    """

    name: str
    type: Type
    dims: tuple[Amount, ...] = ()
    row: str = ""
    note: str = ""
    aligned: bool = True

    def bytes_at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how many bytes it takes."""
        total = self.type.bytes_at(sizes)
        for dim in self.dims:
            total *= dim.at(sizes)
        return total


@dataclass(frozen=True)
class Union:
    """Arrays that have the same space one after the other: the row is the larger one's."""

    arrays: tuple[Array, ...]
    row: str
    note: str = ""
    aligned: bool = True

    @property
    def name(self) -> str:
        """The first array's."""
        return self.arrays[0].name

    def bytes_at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how many bytes the largest takes."""
        import sympy

        return sympy.Max(*(array.bytes_at(sizes) for array in self.arrays))


@dataclass(frozen=True)
class Barrier:
    """mbarriers of SharedStorage, and how many arrivals complete a phase of each.

    With `transactions` TMA's bytes are counted too.
    """

    name: str
    dims: tuple[Amount, ...]
    arrivals: Amount
    transactions: bool = False
    row: str = "barriers"
    note: str = ""
    aligned: bool = False

    def bytes_at(self, sizes: Mapping[str, Any]) -> Any:
        """Return how many bytes they take."""
        total: Any = SM90.mbarrier_bytes
        for dim in self.dims:
            total *= dim.at(sizes)
        return total


Member = Array | Union | Barrier


# ---- parameters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """What a caller gives by this name: a field of the C struct."""

    name: str


@dataclass(frozen=True)
class Ratio:
    """One argument divided by another."""

    of: str
    by: str


@dataclass(frozen=True)
class Blocks:
    """How many blocks of a size of the kernel an argument has."""

    of: str
    per: str


@dataclass(frozen=True)
class Divisor:
    """A value that the kernel divides by: a FastDivisor of it."""

    value: "Value"


@dataclass(frozen=True)
class Computed:
    """What the launcher works out of arguments: C++ of members of `a`."""

    text: str


@dataclass(frozen=True)
class Times:
    """An argument, a ratio of two, or what is computed of some, times a number."""

    of: str | Ratio | Computed
    number: float | int


@dataclass(frozen=True)
class Strided:
    """A tensor of the signature: where it begins, and the strides of its dimensions."""

    tensor: str
    pointee: str = "const float"


Value = Argument | Ratio | Blocks | Divisor | Computed | Times | Strided


@dataclass(frozen=True)
class Field:
    """A member of Params; without a `value` its part's texts for the host fill it in."""

    name: str
    type: Type
    value: Value | None = None
    note: str = ""
    dims: tuple[Amount, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a kernel before has put a tensor anew: expressions of the launcher."""

    data: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class TensorMap:
    """A member of Params by which TMA copies boxes of a tensor of the signature.

    Its dimensions are the contiguous one, and those of these strides in their order, as far as the
    tensor has them; boxes are 1 where `box` ends, whose words are
    variables of the launcher. A dimension that is a number is `columns`.
    `swizzle` is a field of the Plan, `elements` the name of a type by its field.
    """

    name: str
    box: tuple[Amount | str, ...]
    swizzle: str
    columns: str = "head_dim"
    elements: tuple[str, str] = ("Element", "dtype")
    dims: tuple[str, ...] = ("seq", "head", "batch")
    promotion: int = 256  # bytes that a miss of the L2 cache fetches
    stand_in: str = ""  # another tensor, whose address serves where this one is empty
    heads_in_row: str = ""  # a variable of the launcher: so many heads are one's columns
    place: "Place | None" = None  # where it is not that of the signature
    of: str = ""  # the tensor, where it has several maps


@dataclass(frozen=True)
class Constant:
    """A constant of the kernel: a field of the Plan, whose name it has if `name` is left out.

    A field of a field has dots, and the last one's name. With a `value` it is worked out of other
    constants.
    """

    field: str
    note: str = ""
    name: str = ""
    type: Type | None = None  # that of the number if left out: int or float
    value: Amount | None = None


@dataclass(frozen=True)
class Alias:
    """Another name of a type: a field of the Plan says which."""

    name: str
    field: str


@dataclass(frozen=True)
class Struct:
    """A struct that members of SharedStorage are of; its note says what it is."""

    name: str
    fields: tuple[Field, ...]
    note: str

    @property
    def type(self) -> Type:
        """It as a type, of as many bytes as its fields, which have no gaps, have together."""
        return Type(self.name, sum(field.type.bytes_at({}) for field in self.fields))


HEADERS = "cuda_runtime.h", "algorithm", "cmath", "cstdint", "initializer_list"  # of all kernels
TMA_HEADERS = (  # of those that copy by TMA and multiply by wgmma
    *("cuda.h", "atomic", "type_traits", "cutlass/arch/barrier.h"),
    *("cute/arch/copy_sm90_tma.hpp", "cute/arch/mma_sm90_desc.hpp"),
)
REGISTERS_HEADER = "cutlass/arch/reg_reconfig.h"  # of those whose roles set their registers


# ---- a kernel's --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One way to fill a slot: its texts by seat, and what it brings to the kernel around it.

    A text is a file of templates/: a `.cuh` as it stands, a `.cuh.j2` rendered with the Plan. What
    a kernel lacks is no text, never an empty function.
    """

    # texts by seat
    about: tuple[str, ...] = ()  # of the comment that the kernel begins with
    head: tuple[str, ...] = ()  # types that SharedStorage and Params are made of
    methods: tuple[str, ...] = ()  # functions of Params
    device: tuple[str, ...] = ()  # functions and structs that several roles use
    loader: tuple[str, ...] = ()  # members of Loader, by which one thread issues TMA copies
    first_loads: tuple[str, ...] = ()  # statements of it: Q of a tile, and K that its S begins with
    finder: tuple[str, ...] = ()  # members of TileFinder, by which a warp makes tiles of numbers
    producer: tuple[str, ...] = ()  # functions of the warps beside the consumers
    rounds: tuple[str, ...] = ()  # how loops over a tile's heads and blocks of rows begin
    softmax: tuple[str, ...] = ()  # members of Softmax, which is in a thread's registers
    consumer: tuple[str, ...] = ()  # members of Consumer
    # statements of consumers on S, which is complete and not yet masked
    scores: tuple[str, ...] = ()
    tile_ends: tuple[str, ...] = ()  # of consumers on a tile that has met all its keys
    # and on a row of it: the inverse of its sum, and its LSE
    row_ends: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()  # that run before the last one, or behind the first
    counters: tuple[str, ...] = ()  # statements of one before, which zero what the last one counts
    entry: tuple[str, ...] = ()  # statements of the kernel before it initialises its barriers
    kernel: tuple[str, ...] = ()  # and before its roles part
    role: tuple[str, ...] = ()  # an if that says what warps beside the consumers do; else the next
    consumer_role: tuple[str, ...] = ()  # a statement that says what consumers do
    exit: tuple[str, ...] = ()  # statements of the kernel behind all roles
    combine: tuple[str, ...] = ()  # of the kernel that combines splits: where a row's begin
    sums: tuple[str, ...] = ()  # what joins its sums
    combined: tuple[str, ...] = ()  # and what becomes of them
    workspace: tuple[str, ...] = ()  # functions of the launcher by which it knows how large that is
    host: tuple[str, ...] = ()  # statements of it that fill Params, and say how large `grid` is
    launches: tuple[str, ...] = ()  # that launch, where they are no plain list of kernels

    # what it declares
    shared: tuple[Member, ...] = ()
    params: tuple[Field, ...] = ()
    maps: tuple[TensorMap, ...] = ()
    constants: tuple[Constant | Alias, ...] = ()
    headers: tuple[str, ...] = ()  # that the kernel includes
    structs: tuple[Struct, ...] = ()
    named_barriers: tuple[str, ...] = ()  # of the hardware


_DECLARATIONS = {"shared", "params", "maps", "constants", "headers", "structs", "named_barriers"}
SEATS = tuple(field.name for field in fields(Part) if field.name not in _DECLARATIONS)


@dataclass(frozen=True, eq=False)  # parts of a kernel are made once for the same keys
class Parts:
    """All parts of a kernel, in the order of its kind's slots.

    In which order SharedStorage and Params have their members, and barriers are initialised, is
    pinned by name: machine code holds offsets. Who is not named comes last.
    """

    parts: tuple[Part, ...]
    sections: tuple[str, ...]  # of a kernel's text, in order: templates that loop over seats
    shared_order: tuple[str, ...] = ()
    params_order: tuple[str, ...] = ()
    initialised: tuple[str, ...] = ()

    def texts(self, seat: str) -> tuple[str, ...]:
        """Return the texts of one of SEATS, each once, in the order of the slots."""
        assert seat in SEATS, seat
        texts = (text for part in self.parts for text in getattr(part, seat))
        return tuple(dict.fromkeys(texts))

    @cached_property
    def headers(self) -> tuple[tuple[str, ...], ...]:
        """The headers that are included: CUDA's, those of C++, those of CUTLASS."""
        names = sorted({header for part in self.parts for header in part.headers})
        cutlass = [name for name in names if "/" in name]
        cuda = [name for name in names if name not in cutlass and name.endswith(".h")]
        cpp = [name for name in names if name not in cutlass and name not in cuda]
        return tuple(tuple(group) for group in (cuda, cpp, cutlass) if group)

    @cached_property
    def constants(self) -> tuple[tuple[Constant | Alias, ...], ...]:
        """The constants and names of types of each part that declares some, each of them once."""
        parts_of: dict[Constant | Alias, int] = {}
        for number, part in enumerate(self.parts):
            for constant in part.constants:
                parts_of.setdefault(constant, number)
        groups = groupby(parts_of, lambda constant: parts_of[constant])
        return tuple(tuple(constants) for _, constants in groups)

    @cached_property
    def structs(self) -> tuple[Struct, ...]:
        """All structs that members of SharedStorage are of."""
        return tuple(struct for part in self.parts for struct in part.structs)

    @cached_property
    def maps(self) -> tuple[TensorMap, ...]:
        """All tensor maps."""
        return tuple(tensor_map for part in self.parts for tensor_map in part.maps)

    @cached_property
    def params(self) -> tuple[Field, ...]:
        """The members of Params but for the tensor maps."""
        return _in_order((f for part in self.parts for f in part.params), self.params_order)

    @property
    def fields(self) -> tuple[Field, ...]:
        """All members of Params: first the tensor maps."""
        maps = (Field(tensor_map.name, TENSOR_MAP) for tensor_map in self.maps)
        return (*maps, *self.params)

    @cached_property
    def shared(self) -> tuple[Member, ...]:
        """The members of SharedStorage."""
        return _in_order((m for part in self.parts for m in part.shared), self.shared_order)

    @cached_property
    def barriers(self) -> tuple[tuple[Barrier, ...], ...]:
        """All mbarriers, those with the same last dimension together."""
        barriers = (member for member in self.shared if isinstance(member, Barrier))
        by_dim: dict[tuple[Amount, ...], list[Barrier]] = {}
        for barrier in _in_order(barriers, self.initialised):
            by_dim.setdefault(barrier.dims[-1:], []).append(barrier)
        return tuple(map(tuple, by_dim.values()))

    @cached_property
    def named_barriers(self) -> tuple[str, ...]:
        """All named barriers, as they are numbered from 1 on."""
        return tuple(name for part in self.parts for name in part.named_barriers)

    @cached_property
    def memory(self) -> "Memory":
        """The members of SharedStorage with their bytes."""
        return _memory(self.shared)


@dataclass(frozen=True, eq=False)
class Memory:
    """The members of SharedStorage; there is one object of the same members, for caches of sums."""

    members: tuple[Member, ...]

    def rows(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows of the ledger of shared memory: bytes by name, before rounding up.

        Who begins at no multiple of its own stands in the row of who is before it.
        """
        rows: list[tuple[dict[str, None], Any]] = []
        for member in self.members:
            names, bytes = {member.row or member.name: None}, member.bytes_at(sizes)
            if rows and not member.aligned:
                above, sum_above = rows.pop()
                names, bytes = above | names, sum_above + bytes
            rows.append((names, bytes))
        return {", ".join(names): bytes for names, bytes in rows}


@cache
def _memory(members: tuple[Member, ...]) -> Memory:
    return Memory(members)


def choices(
    values: Values, keys: Iterable[str], rules: Iterable[Callable[[Values], Any]] = ()
) -> tuple[tuple[str, Any], ...]:
    """Return what parts depend on: values of keys, and what rules make of all, by their names."""
    return (
        *((key, values[key]) for key in keys),
        *((rule.__name__, rule(values)) for rule in rules),
    )


def _in_order(declared: Iterable[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(declared, key=lambda one: places.get(one.name, len(places))))
