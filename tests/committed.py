"""Every committed schedule: read, planned and rendered once for all tests that walk over them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

from fagen import flow, registry, render
from fagen.render import Source
from fagen.schedule import Schedule


@dataclass(frozen=True)
class Committed:
    """Schedules, Plans and Sources, each by its slug; each is worked out when first asked for."""

    @cached_property
    def schedules(self) -> dict[str, Schedule]:
        return {schedule.slug: schedule for schedule in flow.all_committed()}

    @cached_property
    def plans(self) -> dict[str, Any]:
        return {slug: registry.plan(schedule) for slug, schedule in self.schedules.items()}

    @cached_property
    def sources(self) -> dict[str, Source]:
        """Kernels and bindings, not laid out: clang-format takes twenty times as long as all else.

        Their hashes are of tokens, and those that a layout would have.
        """
        with patch.object(render, "formatted", lambda text: text):
            return {slug: render.render(plan) for slug, plan in self.plans.items()}
