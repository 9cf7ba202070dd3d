"""The laws of parts: what a kernel is made of stays small, plain and in its own place."""

from collections import defaultdict
from pathlib import Path

import pytest
from jinja2 import meta, nodes

from fagen import registry
from fagen.part import Seat
from fagen.paths import locate
from tests import growth
from tests.backward_helpers import SPREAD as BACKWARD
from tests.combine_helpers import SPREAD as COMBINE
from tests.decode_helpers import SPREAD as DECODE
from tests.quantize_helpers import SPREAD as QUANTIZE
from tests.test_templates import parsed

ROOT = locate("templates").parent
TEMPLATES = growth.kernel_templates(ROOT)
TEXTS = [path for path in TEMPLATES if ".cuh" in path.suffixes]
LONG = {"forward/tiles/varlen.cuh.j2": 300}  # lines; of all others:
LINES = 200
FEW = 5  # conditionals

# conditionals of templates, of forward and of all kernels, and branches of forward's parts
MOST = {"forward": 160, "all": 480, "branches": 120}

# How many more folders than one read a choice, summed up over a kind's choices. What reads it in
# another folder is to become a text that parts choose: no more of them are added.
ELSEWHERE = {"forward": 21, "backward": 13, "decode": 0, "quantize": 7, "combine": 0}


# schedules of which no other test's list has one, for what they alone have
MORE = (
    "fwd_fp16_d128_causal_m128n128_lpt",
    "fwd_bf16_d256_causal_m128n64_reusev",
    "fwd_e4m3_d128_full_m128n128_lazymax",
    "fwd_e4m3_d64_causal_m128n128_sblock_vsblock",
    "fwd_fp16_d64_full_m64n64_tensorsum_onlinemax",
    "fwd_bf16_d128_full_m64n128_varlen",
    "quant_fp16_d256_center_sr128",
    "fwd_bf16_d128_causal_m128n128_c2",
    "fwd_e4m3_d128_full_m128n128_t4_sblock",
    "fwd_fp16_d64_full_m64n64_nointra_pm2",
)
# whose first key depends on the row: masks may, and none does yet
OF_NO_MASK = {"attention/combine/seen.cuh.j2", "backward/keys/rising_first.cuh"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "templates").as_posix()


def parts_of(kind: str) -> Path:
    """Return the module that maps a kind's keys to parts, or the package."""
    folder = ROOT / "fagen" / "kinds" / kind
    return next(path for path in (folder / "parts", folder / "parts.py") if path.exists())


def test_there_are_parts():
    assert len(TEXTS) > 100


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_a_text_is_short_and_hardly_chooses(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONG.get(name_of(path), LINES)
    if path.suffix == ".cuh":
        assert not [sign for sign in ("{%", "{#", "{{ ", "plan.") if sign in text]
    else:
        assert path.suffixes[-2:] == [".cuh", ".j2"]
        assert "{%" in text or "{{ " in text, "without Jinja it is a .cuh"
        assert sum(1 for _ in growth.choices(path)) <= FEW


def test_every_text_is_of_a_kernel_that_some_schedule_has(committed):
    """Of those that are committed, those that tests of each kind have, and a few more."""
    plans = [*committed.plans.values()]
    plans += [registry.plan_of(slug) for slug in (*BACKWARD, *COMBINE, *DECODE, *QUANTIZE, *MORE)]
    used = {text for plan in plans for seat in Seat for text in plan.parts.texts(seat)}
    for path in TEMPLATES:
        if path.suffix == ".j2":
            used |= {*filter(None, meta.find_referenced_templates(parsed(name_of(path))))}
    assert {name_of(path) for path in TEXTS} - used == OF_NO_MASK


def test_conditionals_and_branches_are_within_their_budgets():
    counted = {
        "forward": growth.conditionals(ROOT, "forward"),
        "all": growth.conditionals(ROOT),
        "branches": growth.branches(parts_of("forward")),
    }
    assert counted == {name: min(most, counted[name]) for name, most in MOST.items()}


def folders_by_choice(kind: str) -> dict[str, set[str]]:
    """Return in which folders of a kind's templates a choice is made by each field of the Plan."""
    folders = defaultdict(set)
    for path in growth.kernel_templates(ROOT, kind):
        inner = path.relative_to(ROOT / "templates").parts[1:-1]
        for test in growth.choices(path):
            for read in (test, *test.find_all(nodes.Getattr)):
                if (
                    isinstance(read, nodes.Getattr)
                    and isinstance(read.node, nodes.Name)
                    and read.node.name == "plan"
                ):
                    folders[read.attr].add("/".join(inner[:1]))
    return folders


@pytest.mark.parametrize("kind", registry.ENTRIES)
def test_a_choice_is_made_in_one_folder(kind):
    folders = folders_by_choice(kind)
    assert sum(len(where) - 1 for where in folders.values()) <= ELSEWHERE[kind], {
        field: sorted(where) for field, where in folders.items() if len(where) > 1
    }
