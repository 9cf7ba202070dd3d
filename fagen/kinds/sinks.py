"""Sinks, one more logit of each row of a head without a value: parts and tensors of calls."""

from fagen.part import Alias, Argument, Field, Part, Type, pointer_to
from fagen.signature import Dim, Extent, Tensor
from fagen.vocab import PARTIALS, Dtype

# a key of schedules, and what slugs say of it
NO_SINK = ""
SINK_KEY = (
    "one more logit of each row of a head, without a value: the dtype in which a call gives them; "
    '"" for none'
)
SINK_WORDS = {NO_SINK: "nosink", **{name: f"sink{name}" for name in PARTIALS}}


def sinks_of_call(dtype: str, *, ahead: bool = False) -> tuple[Part, ...]:
    """Return the part that reads a head's sink, in the dtype in which a call has them, if any.

    It may read `ahead` where the kernel does not begin under the end of the launch before.
    """
    if not dtype:
        return ()
    note = "(heads): one more logit of each row, without a value"
    part = Part(
        headers=(PARTIALS[dtype].header,),
        constants=(Alias("Sink", "sink.cpp"),),
        methods=(f"attention/sinks/sink{'_ahead' * ahead}.cuh",),
        params=(Field("sinks", pointer_to(Type("Sink"), const=True), Argument("sinks"), note),),
    )
    return (part,)


def sinks(dtype: Dtype | None) -> tuple[Tensor, ...]:
    """Return the tensor of a call that has some."""
    if dtype is None:
        return ()
    note = (
        "one more logit of each row of a head, without a value, as scale * q kᵀ is one; "
        "minus infinity: none"
    )
    return (Tensor("sinks", (Dim(Extent("heads")),), dtype, note, aligned=False),)
