"""The name of a kind in, what it says for a search of its schedules out."""

from functools import cache

from fagen import registry
from fagen.errors import ScheduleError
from fagen.kind import load_named
from fagen.kinds.space import Space


@cache
def space_of(kind: str) -> Space:
    """What a kind says for a search.  Raises ScheduleError where it is not searched."""
    if not (name := registry.kind(kind).space):
        searched = ", ".join(name for name in registry.ENTRIES if registry.kind(name).space)
        raise ScheduleError(
            f"schedules of the kind {kind} are not searched; those of {searched} are"
        )
    space: Space = load_named(name)
    return space
