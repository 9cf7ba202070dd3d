"""Every committed schedule: read, planned and rendered once for all tests that walk over them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fagen import flow, registry
from fagen.render import Hashes, hashes_of, kernel_text
from fagen.schedule import Schedule


@dataclass(frozen=True)
class Committed:
    """What there is of each schedule, by its slug; worked out when first asked for."""

    @cached_property
    def schedules(self) -> dict[str, Schedule]:
        return {schedule.slug: schedule for schedule in flow.all_committed()}

    @cached_property
    def plans(self) -> dict[str, Any]:
        return {slug: registry.plan(schedule) for slug, schedule in self.schedules.items()}

    @cached_property
    def kernels(self) -> dict[str, str]:
        """Their texts, not laid out: clang-format takes twenty times as long as all else."""
        return {slug: kernel_text(plan) for slug, plan in self.plans.items()}

    @cached_property
    def hashes(self) -> dict[str, Hashes]:
        return {slug: hashes_of(kernel, slug) for slug, kernel in self.kernels.items()}
