"""What tests that take long are tried on: a few parameters in every run, all under -m long."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(every: Iterable[str], often: Collection[str]) -> list[Any]:
    """All of these once, those that are not tried often marked `long`."""
    return [
        case if case in often else pytest.param(case, marks=pytest.mark.long)
        for case in dict.fromkeys(every)
    ]
