"""Write what parts declare as C++: a filter of the templates, `{{ declared | cpp(plan) }}`."""

from collections.abc import Iterable, Iterator
from functools import singledispatch
from itertools import groupby
from operator import attrgetter
from textwrap import wrap
from typing import Any

from fagen.arch import SM90
from fagen.launch import Launch, Product
from fagen.part import (
    DESCRIPTOR,
    Alias,
    Amount,
    Argument,
    Array,
    Barrier,
    Blocks,
    Computed,
    Constant,
    Divisor,
    Field,
    Ratio,
    Strided,
    Struct,
    TensorMap,
    Times,
    Union,
)
from fagen.signature import Extent, Signature, Tensor

_COLUMNS = 116  # that a line has, indented once


@singledispatch
def cpp(declared: Any, plan: Any) -> str:
    """Return what is declared as C++."""
    raise TypeError(f"{declared!r} is nothing that a part declares")


def constant_name(size: str) -> str:
    """Return what a kernel calls a size: kBlockM of block_m."""
    return "k" + "".join(word.capitalize() for word in size.split("_"))


@cpp.register
def _(amount: Amount, plan: Any) -> str:
    words = [_factor(factor) for factor in amount.factors]
    text = " * ".join(words) + "".join(f" / {_factor(factor)}" for factor in amount.per)
    return f"{text} + {amount.plus}" if amount.plus else text


def _factor(factor: str | int) -> str:
    return str(factor) if isinstance(factor, int) else constant_name(factor)


@cpp.register
def _(constant: Constant, plan: Any) -> str:
    name = constant_name(constant.name or constant.field.rpartition(".")[2])
    if constant.value:
        return _noted(f"constexpr int {name} = {cpp(constant.value, plan)};", constant.note)
    number = attrgetter(constant.field)(plan)
    if constant.type is DESCRIPTOR:
        return f"constexpr auto {name} = {constant.type.name}::{number};"
    of_type = constant.type.name if constant.type else type(number).__name__
    value = f"{number}f" if isinstance(number, float) else f"{number}"
    return _noted(f"constexpr {of_type} {name} = {value};", constant.note)


def _noted(line: str, note: str) -> str:
    """Return a line with a comment: behind it where there is room, else above."""
    if not note or len(line) + len(note) + 4 <= _COLUMNS:
        return f"{line}  // {note}" if note else line
    above = wrap(f"{note[0].upper()}{note[1:]}.", _COLUMNS, initial_indent="// ")
    return "\n// ".join([*above, ""])[:-3] + line


@cpp.register
def _(alias: Alias, plan: Any) -> str:
    return f"using {alias.name} = {attrgetter(alias.field)(plan)};"


@cpp.register
def _(array: Array, plan: Any) -> str:
    return _member(array, array.type.name, plan)


@cpp.register
def _(barrier: Barrier, plan: Any) -> str:
    return _member(barrier, _barrier_type(barrier), plan)


def _barrier_type(barrier: Barrier) -> str:
    return "TransactionBarrier" if barrier.transactions else "Barrier"


def _member(member: Array | Barrier, type_name: str, plan: Any) -> str:
    alignment = f"alignas({SM90.smem_tile_alignment}) " if member.aligned else ""
    dims = "".join(f"[{cpp(dim, plan)}]" for dim in member.dims)
    return _noted(f"{alignment}{type_name} {member.name}{dims};", member.note)


@cpp.register
def _(union: Union, plan: Any) -> str:
    lines = "\n".join(cpp(array, plan) for array in union.arrays)
    return f"union {{  // {union.note}\n{lines}\n}};"


@cpp.register
def _(struct: Struct, plan: Any) -> str:
    note = wrap(struct.note, _COLUMNS, initial_indent="// ", subsequent_indent="// ")
    return "\n".join([*note, f"struct {struct.name} {{", *members(struct.fields), "};"])


def initialised(barriers: tuple[Barrier, ...], plan: Any) -> Iterator[str]:
    """Yield statements that initialise barriers whose last dimension is the same.

    Those that have more dimensions have loops of their own within that of all. Of a row of barriers
    by itself each is named, by what it is of.
    """
    if len(barriers) == 1 and len(barriers[0].dims) == 1:
        (barrier,) = barriers
        name, arrivals = barrier.name.rpartition("_")[2], cpp(barrier.arrivals, plan)
        yield f"for ({_barrier_type(barrier)}& {name} : shared.{barrier.name}) {{"
        yield f"{name}.init({arrivals});"
        yield "}"
        return
    common = min((barrier.dims for barrier in barriers), key=len)
    yield from _loops(common, plan)
    for barrier in barriers:
        own = barrier.dims[: len(barrier.dims) - len(common)]
        at = "".join(f"[{_place(dim)}]" for dim in barrier.dims)
        yield from _loops(own, plan)
        closed = "}" * len(own)
        yield f"shared.{barrier.name}{at}.init({cpp(barrier.arrivals, plan)});{closed}"
    if common:
        yield "}" * len(common)


def _loops(dims: tuple[Amount, ...], plan: Any) -> Iterator[str]:
    for dim in dims:
        place = _place(dim)
        yield f"for (int {place} = 0; {place} < {cpp(dim, plan)}; ++{place}) {{"


def _place(dim: Amount) -> str:
    """Return what counts along a dimension: a stage of kQStages."""
    (size,) = dim.factors
    return str(size).rpartition("_")[2].removesuffix("s")


def members(fields: Iterable[Field]) -> Iterator[str]:
    """Yield the members of a struct: neighbours of one type, and without a note, share a line."""

    def line(place_and_field: tuple[int, Field]) -> tuple[str, int]:
        place, field = place_and_field
        return field.type.name, place if field.note or field.type.pointer else -1

    for (type_name, _), neighbours in groupby(enumerate(fields), line):
        together = [field for _, field in neighbours]
        names = ", ".join(map(_declared, together))
        yield _noted(f"{type_name} {names};", together[0].note)


def _declared(field: Field) -> str:
    return field.name + "".join(f"[{cpp(dim, None)}]" for dim in field.dims)


def filled(field: Field, plan: Any) -> str:
    """Return the value that the launcher fills a member of Params with."""
    text = cpp(field.value, plan)
    return f"static_cast<{field.type.name}>({text})" if field.type.pointer else text


@cpp.register
def _(argument: Argument, plan: Any) -> str:
    return f"a.{argument.name}"


@cpp.register
def _(ratio: Ratio, plan: Any) -> str:
    return f"a.{ratio.of} / a.{ratio.by}"


@cpp.register
def _(blocks: Blocks, plan: Any) -> str:
    return f"int(ceil_div(a.{blocks.of}, {constant_name(blocks.per)}))"


@cpp.register
def _(divisor: Divisor, plan: Any) -> str:
    return f"FastDivisor({cpp(divisor.value, plan)})"


@cpp.register
def _(computed: Computed, plan: Any) -> str:
    return computed.text


@cpp.register
def _(times: Times, plan: Any) -> str:
    factor = Argument(times.of) if isinstance(times.of, str) else times.of
    number = f"{times.number}f" if isinstance(times.number, float) else times.number
    return f"{cpp(factor, plan)} * {number}"


@cpp.register
def _(strided: Strided, plan: Any) -> str:
    name, dims = strided.tensor, plan.signature.tensor(strided.tensor).dims
    strides = "".join(f", a.{name}_stride_{dim.stride}" for dim in dims if dim.stride)
    return f"{{static_cast<{strided.pointee}*>(a.{name}){strides}}}"


# ---- the launcher --------------------------------------------------------------------------------


def counted(of: Extent | Product, sizes: str) -> str:
    """Return how many that is: named sizes are members of `sizes`."""
    if isinstance(of, Product):
        factors = [counted(factor, sizes) for factor in of.factors]
        product = " * ".join([f"int64_t({factors[0]})", *factors[1:]]) if factors else "1"
        blocks = f"ceil_div({product}, {of.per})" if of.per > 1 else product
        return f"{blocks} + {of.plus}" if of.plus else blocks
    if not of.name:
        return f"{of.number}"
    name = f"{sizes}{of.name}"
    blocks = name if of.times == of.per == 1 else f"ceil_div({name}, {of.per})"
    blocks += f" * {of.times}" if of.times > 1 else ""
    more = f" + {sizes}{of.more}" if of.more else ""
    return blocks + more + (f" {of.added}" if of.plus else "")


@cpp.register
def _(tensor_map: TensorMap, plan: Any) -> str:
    name, (element, dtype) = tensor_map.of or tensor_map.name, tensor_map.elements
    dims = plan.signature.tensor(name).dims
    by_stride = {dim.stride: dim.extent for dim in dims}
    strides = [stride for stride in tensor_map.dims if stride in by_stride]
    columns = constant_name(tensor_map.columns)
    extents = [by_stride[stride] for stride in ("", *strides)]
    own = attrgetter(tensor_map.columns)(plan)
    sizes = [columns if extent.number == own else counted(extent, "a.") for extent in extents]
    by = {stride: f"a.{name}_stride_{stride}" for stride in strides}
    if side := tensor_map.heads_in_row:
        sizes = [f"{columns} * {side}", *sizes[1:]]
        head = 1 + strides.index("head")
        sizes[head] += f" / {side}"
        by["head"] += f" * {side}"
    box = [one if isinstance(one, str) else cpp(one, plan) for one in tensor_map.box]
    data = f"a.{name}"
    if tensor_map.stand_in:
        rows = next(e.name for e in extents if e.name and not e.name.endswith("heads"))
        data = f"a.{rows} > 0 ? {data} : a.{tensor_map.stand_in}"
    stepped = list(by.values())
    if tensor_map.place:
        place = tensor_map.place
        data, sizes, stepped = place.data, list(place.sizes), list(place.strides)
    fields = (
        f".data = {data}",
        f".sizes = {{{', '.join(sizes)}}}",
        f".strides = {{{', '.join(stepped)}}}",
        f".box = {{{', '.join([*box, *('1' for _ in sizes[len(box) :])])}}}",
        f".swizzle = {attrgetter(tensor_map.swizzle)(plan).tma}",
        f".type = {attrgetter(dtype)(plan).tma}",
        f".element_bytes = sizeof({element})",
        f".promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_{tensor_map.promotion}B",
    )
    return f"{{{', '.join(fields)}}}"


def described(tensor_map: TensorMap, plan: Any) -> str:
    """Return the call that encodes a tensor map, true if it can; varlen tensors have no batch."""
    place = f"&params.{tensor_map.name}, {tensor_map.name}"
    dims = plan.signature.tensor(tensor_map.of or tensor_map.name).dims
    batched = any(dim.stride in ("batch", "page") for dim in dims)
    if batched:
        return f"describe({place})"
    heads_first = tensor_map.dims[0] == "head"
    return f"describe_varlen{'_heads_first' * heads_first}({place}, kRagged)"


def checked(tensor: Tensor, signature: Signature) -> str:
    """Return the status of a tensor as a call gives it: good where it may be null and is."""
    name = tensor.name
    ends = [counted(dim.extent, "a.") for dim in tensor.dims if not dim.stride]
    dims = (
        f"{{{counted(dim.extent, 'a.')}, a.{name}_stride_{dim.stride}}}"
        for dim in tensor.dims
        if dim.stride
    )
    arguments = (
        f"a.{name}",
        f"{tensor.dtype.bytes}",
        "true" if tensor.aligned else "false",
        f"!a.{name}_given" if tensor.made else "false" if tensor.access == "in" else "true",
        f"{tensor.max_stride or 'kMostStride'}",
        "".join(ends) or "1",
        f"{{{', '.join(dims)}}}",
    )
    together: tuple[Tensor, ...] = (tensor,) if tensor.optional or tensor.omittable else ()
    if tensor.group and not tensor.made:
        together = signature.groups[tensor.group]
    null = " && ".join(f"!a.{other.name}" for other in together)
    return f"{null} ? kOk : " * bool(null) + f"check_tensor({', '.join(arguments)})"


@cpp.register
def _(launch: Launch, plan: Any) -> str:
    """Return a launch's configuration: of what is dealt to SMs, parts work out the grid."""
    x, *others = (counted(of, "a.") for of in (launch.grid.x, launch.grid.y, launch.grid.z))
    blocks = x if launch.overlaps else f"dim3({', '.join((x, *others))})"
    threads = constant_name(launch.threads_as) if launch.threads_as else launch.threads
    shared_bytes = "shared_bytes" if launch.shared_bytes else "0"
    return f"{'grid' if launch.grid.resident else blocks}, {threads}, {shared_bytes}, stream"
