"""Toy kernels, whose signature has one of everything."""

from collections.abc import Callable, Iterator

import pytest

from tests import toy
from tests.stubs import (
    StubOp,
)

TOYS = tuple(toy.SIGNATURES)


@pytest.fixture(scope="module", autouse=True)
def toys_are_a_kind() -> Iterator[None]:
    toy.register()
    yield
    toy.unregister()


@pytest.fixture(scope="module")
def stub(toys_are_a_kind: None, stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op("toy_base")


@pytest.fixture(scope="module")
def biased(toys_are_a_kind: None, stub_op: Callable[[str], StubOp]) -> StubOp:
    """One that takes a tensor more."""
    return stub_op("toy_bias")


@pytest.fixture(scope="module")
def shifted(toys_are_a_kind: None, stub_op: Callable[[str], StubOp]) -> StubOp:
    """One that takes a number more."""
    return stub_op("toy_shift")


@pytest.fixture(params=TOYS)
def any_toy(request: pytest.FixtureRequest, stub_op: Callable[[str], StubOp]) -> StubOp:
    return stub_op(request.param)
