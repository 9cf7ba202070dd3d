"""Which kernel fagen.attention picks: by dispatch tables, and where there is none."""

from pathlib import Path

import pytest
import torch

import fagen
from fagen.dispatch import select
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import OPEN_KEYS, Row
from fagen.errors import ScheduleError
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.plan import plan
from fagen.problem import Problem
from fagen.runtime import call
from tests.attention_helpers import FEW, FEWER, LONG, MANY, QUERY_ROWS, computed, fill, picked, qkv
from tests.fresh import asked_for

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


def test_what_is_picked_is_the_usual_choice_where_no_table_names_another(
    schedules_folder: Path,
) -> None:
    plain = "fwd_fp16_d64_full_m128n128"
    fill(schedules_folder, plain)
    odd = (schedules_folder / "forward" / "0.toml").read_text() + "[pipeline]\nstages = 3\n"
    (schedules_folder / "forward" / ".toml").write_text(odd)  # the first of the two by name
    assert len(select.committed("forward")) == 2
    assert picked(dtype="fp16", head_dim=64, seqlen=512).slug == plain
    assert fagen.prepare(dtype="fp16", head_dim=64) == plain
    other = picked(dtype="fp16", head_dim=96, seqlen=512)  # of which there is none
    assert other == derived_schedules(Problem("fp16", 96, 96, "full"))[0]


@pytest.mark.parametrize(
    "problem", [("bf16", 40, 24, "causal"), ("e4m3", 160, 256, "full", None, "columns", 0)]
)
def test_each_derived_schedule_leaves_more_registers_than_those_before(problem: tuple) -> None:
    schedules = derived_schedules(Problem(*problem))
    ledgers = [plan(schedule).ledgers.registers for schedule in schedules]
    free = [ledger.limit - ledger.total for ledger in ledgers]
    assert len(free) >= 3 and free == sorted(set(free))
    assert free[-1] >= 40  # nothing spills with so many to spare


def test_a_dispatch_table_names_the_kernel_by_the_number_of_keys(schedules_folder: Path) -> None:
    few, many = "fwd_fp16_d64_full_m64n16", "fwd_fp16_d64_full_m64n64"
    other = "fwd_fp16_d64_full_m128n128"
    fill(schedules_folder, few, many, other)
    rows = [Row("NVIDIA H200", few, 0, 89), Row("NVIDIA H200", many, 90)]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)
    assert fagen.prepare(dtype="fp16", head_dim=64) == many
    assert picked(dtype=torch.float16, head_dim=64, seqlen=90).slug == many
    q, k, v = qkv()
    for keys, slug in ((90, many), (89, few), (1, few)):
        assert fagen.prepare(dtype="fp16", head_dim=64, seqlen=keys, device="cpu") == slug
        tensors = q, k[:, :keys], v[:, :keys]
        assert torch.equal(fagen.attention(*tensors), computed(slug, *tensors))
    assert not torch.equal(fagen.attention(q, k, v, schedule=other), fagen.attention(q, k, v))


@pytest.fixture
def users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's table would lie; schedules_folder is for fagen's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "fagen").mkdir()
    return tmp_path / "fagen" / dispatch_table.NAME


def test_a_bounded_row_of_a_user_serves_its_calls_and_leaves_the_others(
    schedules_folder: Path, users_table: Path
) -> None:
    fill(schedules_folder, "fwd_fp16_d64_full_m128n128")
    q, k, v = qkv()

    def served(keys: int) -> set[str]:
        out = fagen.attention(q, k[:, :keys], v[:, :keys])
        usual = FEW, MANY, "fwd_fp16_d64_full_m128n128"
        outputs = {slug: computed(slug, q, k[:, :keys], v[:, :keys]) for slug in usual}
        return {slug for slug, expected in outputs.items() if torch.equal(out, expected)}

    dispatch_table.update(users_table, [Row("NVIDIA H200", MANY, 90, 150)])
    assert served(150) == {MANY}
    assert served(151) == served(89) == {"fwd_fp16_d64_full_m128n128"}
    assert fagen.prepare(dtype="fp16", head_dim=64, device="cpu") == "fwd_fp16_d64_full_m128n128"
    assert asked_for() == {None, MANY}
    dispatch_table.update(schedules_folder / dispatch_table.NAME, [Row("NVIDIA H200", FEW)])
    call.reset()
    assert served(150) == {MANY}
    assert served(151) == served(89) == {FEW}


def test_a_users_table_that_cannot_be_read_is_refused_with_its_line(users_table: Path) -> None:
    users_table.write_bytes(b'[[kernel]]\n"\\u001b]0;x\\u0007" = 1\n')
    with pytest.raises(ScheduleError, match=rf"^{users_table}:2: .* is not one of card") as refusal:
        fagen.attention(*qkv())
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("size", ["keys_to", "keys_from", "rows_to"])
def test_the_largest_size_that_a_table_can_say_serves_calls(
    schedules_folder: Path, users_table: Path, size: str, fresh_dynamo: None
) -> None:
    fill(schedules_folder, "fwd_fp16_d64_full_m128n128")
    users_table.write_bytes(
        f"""\ufeff[[kernel]]\r\ncard = "\U0001f600"\r\n
        slug = "{MANY}"\r\n{size} = {2**63 - 1}\r\n""".encode()
    )
    slug = "fwd_fp16_d64_full_m128n128" if size == "keys_from" else MANY
    q, k, v = qkv()
    assert torch.equal(fagen.attention(q, k, v), computed(slug, q, k, v))
    fagen.prepare(dtype="fp16", head_dim=64, device="cpu")
    for dynamic in (False, True):
        compiled = torch.compile(fagen.attention, backend="eager", dynamic=dynamic)
        assert compiled(q, k, v).shape == q.shape


@pytest.fixture
def by_rows(schedules_folder: Path) -> None:
    """A table for calls with the rows of qkv(), with fewer, and by keys with more."""
    fill(schedules_folder, "fwd_fp16_d64_full_m128n128", "fwd_fp16_d64_causal_m128n128")
    rows = [
        Row("NVIDIA H200", FEW, rows_to=QUERY_ROWS),
        Row("NVIDIA H200", FEWER, rows_to=100),
        Row("NVIDIA H200", MANY, 0, 9_999),
        Row("NVIDIA H200", LONG, 10_000),
    ]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)


def test_few_query_rows_have_their_own_kernel_whatever_the_keys(
    by_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "surely", None)  # which a call of known sizes has no need of
    q, k, v = qkv()
    more = torch.cat([q, q[:, :1]], 1)
    for queries, slug in ((q, FEW), (q[:, :13], FEW), (q[:, :12], FEWER), (more, MANY)):
        for keys in (90, 40):
            tensors = queries, k[:, :keys], v[:, :keys]
            assert torch.equal(fagen.attention(*tensors), computed(slug, *tensors)), slug
    # batch, heads and queries count alike
    grouped = q[:1, :2].repeat(1, 1, 20, 1), k[:1], v[:1]
    assert torch.equal(fagen.attention(*grouped), computed(FEW, *grouped))
    assert asked_for() == {FEW, FEWER, MANY}


def test_rows_from_very_many_keys_go_before_those_for_few_query_rows(
    schedules_folder: Path,
) -> None:
    rows = [
        Row("NVIDIA H200", FEW, rows_to=QUERY_ROWS),
        Row("NVIDIA H200", MANY, 0, OPEN_KEYS),
        Row("NVIDIA H200", LONG, OPEN_KEYS + 1),
    ]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)
    assert fagen.prepare(dtype="fp16", head_dim=64, device="cpu", rows=1) == LONG
    assert asked_for() == {FEW, LONG}
    for keys, slug in ((OPEN_KEYS, FEW), (OPEN_KEYS + 1, LONG)):
        sizes = dict(seqlen=keys, rows=1)
        assert picked(dtype="fp16", head_dim=64, device="cpu", **sizes).slug == slug  # type: ignore[arg-type]
    q, k, v = (x[:1, :, :1] for x in qkv(queries=1, keys=OPEN_KEYS + 1))
    assert torch.equal(fagen.attention(q, k, v), computed(LONG, q, k, v))
    fewer = q, k[:, :300], v[:, :300]
    assert torch.equal(fagen.attention(*fewer), computed(FEW, *fewer))


@pytest.mark.parametrize(
    ("sizes", "slug", "readied"),
    [
        ({}, LONG, {FEW, FEWER, MANY, LONG}),
        (dict(seqlen=90), MANY, {FEW, FEWER, MANY}),
        (dict(seqlen=90, rows=QUERY_ROWS), FEW, {FEW}),
        (dict(seqlen=10_000, rows=100), FEWER, {FEWER}),
        (dict(seqlen=90, rows=QUERY_ROWS + 1), MANY, {MANY}),
        (dict(rows=0), FEWER, {FEWER}),
        (dict(rows=QUERY_ROWS + 1), LONG, {MANY, LONG}),
    ],
)
def test_prepare_readies_every_kernel_that_the_sizes_leave_open(
    by_rows: None, sizes: dict[str, int], slug: str, readied: set[str]
) -> None:
    assert fagen.prepare(dtype="fp16", head_dim=64, device="cpu", **sizes) == slug  # type: ignore[arg-type]
    assert asked_for() == readied
    sizes = {"seqlen": 10_000} | sizes
    assert picked(dtype="fp16", head_dim=64, device="cpu", **sizes).slug == slug  # type: ignore[arg-type]


def test_the_slug_is_that_for_the_most_keys_also_where_fewer_share_it(
    schedules_folder: Path,
) -> None:
    rows = [
        Row("NVIDIA H200", slug, *keys)
        for slug, *keys in ((MANY, 0, 89), (FEW, 90, 999), (MANY, 1_000))
    ]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)
    assert fagen.prepare(dtype="fp16", head_dim=64, device="cpu") == MANY
    assert asked_for() == {FEW, MANY}


def test_no_call_but_the_first_looks_at_a_disk(
    schedules_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slug = "fwd_fp16_d64_full_m64n16"
    fill(schedules_folder, slug)
    rows = [Row("NVIDIA H200", slug)]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, rows)
    q, k, v = qkv()
    first = fagen.attention(q, k, v)
    for name in ("select", "buildable"):
        monkeypatch.setattr(call, name, None)
    assert torch.equal(fagen.attention(q, k, v), first)


def test_the_folder_is_read_once(schedules_folder: Path) -> None:
    fill(schedules_folder, "fwd_fp16_d64_full_m64n64", "fwd_fp16_d64_causal_m64n64")
    fagen.attention(*qkv())
    for file in schedules_folder.rglob("*.toml"):
        file.write_text("no schedule any more")
    fagen.attention(*qkv(), causal=True)
