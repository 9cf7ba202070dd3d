"""Every committed schedule: its file, its slug, its Plan and its text, in one walk over them."""

import re

import pytest

from fagen import registry
from fagen.render import BINDING, HASH_WORD, render, source_hash, token_hash, written
from tests.committed import Committed


def test_a_file_is_called_what_its_fields_say_and_lies_where_it_is_looked_for(committed: Committed):
    files = {path: kind for kind in registry.ENTRIES for path in registry.schedules(kind)}
    schedules = {registry.committed_file(slug): s for slug, s in committed.schedules.items()}
    assert {path: schedule.kind for path, schedule in schedules.items()} == files
    assert [*committed.schedules] == [path.stem for path in files]


def test_a_file_begins_with_its_schema_and_a_reason(committed: Committed):
    for slug in committed.schedules:
        schema, reason, *_ = registry.committed_file(slug).read_text().splitlines()
        assert schema == "#:schema schedule.schema.json", slug
        assert reason.startswith("# ") and len(reason) > 40, slug


def test_a_slug_is_read_back(committed: Committed):
    for slug, schedule in committed.schedules.items():
        assert registry.from_slug(slug) == schedule, slug


def test_every_schedule_fits(committed: Committed):
    for slug, plan in committed.plans.items():
        assert (plan.slug, plan.kind) == (slug, committed.schedules[slug].kind)


def test_every_schedule_renders_under_its_own_name(committed: Committed):
    for slug, kernel in committed.kernels.items():
        name = re.compile(rf"\bfagen_{slug}\b")
        assert name.search(kernel), slug
        assert name.search(written(BINDING, plan=committed.plans[slug])), slug
        assert kernel.count(HASH_WORD) == 1, slug


def test_no_two_schedules_are_one_kernel(committed: Committed):
    assert len({*committed.hashes.values()}) == len(committed.hashes)


@pytest.mark.parametrize("kind", registry.ENTRIES)
def test_a_kernel_is_what_the_walk_has_of_it_laid_out(committed: Committed, kind: str):
    slug = registry.schedules(kind)[0].stem
    source = render(committed.plans[slug])
    assert source.hashes == committed.hashes[slug]
    assert source.hash == source_hash(committed.plans[slug]) == token_hash(committed.kernels[slug])
    assert f'"{source.hash}"' in source.kernel
