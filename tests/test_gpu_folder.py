"""The tests of tests/gpu, which run on a GPU alone, name modules and schedules that there are."""

from importlib import import_module
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parent / "gpu").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_imported_and_its_slugs_are_those_of_schedules(name: str) -> None:
    module = import_module(f"tests.gpu.{name}")
    for test in (one for one in dir(module) if one.startswith("test_the_slugs_here_are_those")):
        getattr(module, test)()
