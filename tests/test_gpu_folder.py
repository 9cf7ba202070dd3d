"""The tests of tests/gpu, which run on a GPU alone, name modules and schedules that there are."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from fagen import registry

MODULES = sorted(path.stem for path in (Path(__file__).parent / "gpu").glob("*.py"))
PREFIXES = tuple(entry.prefix for entry in registry.ENTRIES.values())


def slugs_in(value: object) -> Iterator[str]:
    """Yield the slugs in a module's name or in what it holds."""
    if isinstance(value, str) and value.startswith(PREFIXES) and "{" not in value:
        yield value
    elif isinstance(value, dict):
        yield from slugs_in((*value, *value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from slugs_in(item)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_imported_and_its_slugs_are_those_of_schedules_that_fit(name: str) -> None:
    for slug in set(slugs_in(vars(import_module(f"tests.gpu.{name}")))):
        assert registry.plan_of(slug).slug == slug
