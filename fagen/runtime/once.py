"""What is made once in a process, whoever asks first: another thread."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


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
