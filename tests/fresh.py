"""Modules as they are in a new process."""

from types import ModuleType

import pytest

from fagen.runtime.once import Once

# What modules of fagen.runtime keep of the calls before: all of it or none, since one such table
# answers for another.
_KEPT = (
    *("_ready", "_served", "_suited", "_called", "_tables"),
    *("_differentiable", "_gradients"),
)


def forget(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let modules know of no kernel, until what was patched is as before."""
    for module in modules:
        kept = [name for name in _KEPT if hasattr(module, name)]
        assert kept, f"{module.__name__} keeps nothing"
        for name in kept:
            cache = getattr(module, name)
            if isinstance(cache, Once):  # what makes its values may be patched
                make = getattr(module, cache.make.__name__)
                patch.setattr(module, name, Once(make))
            else:
                patch.setattr(module, name, {})
