"""What is made once in a process, whoever asks first: another thread, or torch.compile's trace."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


class Once(dict[Key, Value]):
    """A cache whose values are made once each, whichever thread asks first; the others wait for it.

    What is there is read as of any dict, without a lock: `cache.get(key) or cache.made(key)`. By
    `lock` one value is made at a time, of all caches that share it.
    """

    def __init__(
        self, make: Callable[..., Value], lock: AbstractContextManager[Any] | None = None
    ) -> None:
        super().__init__()
        self.make = make
        self._lock = lock
        self._making: dict[Key, AbstractContextManager[Any]] = {}

    def made(self, key: Key, *more: Any) -> Value:
        """Return the value of a key, by `make(key, *more)` where there is none yet.

        What that raises reaches who asked; the next one tries again.
        """
        with self._lock or self._making.setdefault(key, RLock()):
            if key not in self:
                self[key] = self.make(key, *more)
        return self[key]


def untraced(function: Function) -> Function:
    """Have torch.compile call a function as it is while it traces, and keep what it returns.

    Arguments and results are numbers, words, dtypes and devices, or tuples of these. What it
    readies is so outside of the graph, in which nothing of it is left. What it raises is a
    ValueError of the same words there, which torch takes for the caller's: what is not to be one
    graph runs untraced, and raises it as it is.
    """

    def tried(*args: Any, **named: Any) -> tuple[Any, str | None]:
        try:
            return function(*args, **named), None
        except Exception as error:
            return None, str(error)

    # as torch.compiler.assume_constant_result does; importing that takes more than a second
    tried._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not is_dynamo_compiling():
            return function(*args, **named)
        result, refusal = tried(*args, **named)
        if refusal is not None:
            raise ValueError(refusal)
        return result

    return cast(Function, call)
