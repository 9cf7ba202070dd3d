"""What a search finds for a recording serves its calls; lengths that no host reads, as it does."""

import json
import math
import random
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fagen
from fagen import flow, search
from fagen.paths import locate
from fagen.problem import Problem, Sizes, VarlenSizes, VarlenTotals, spread
from fagen.registry import from_slug
from fagen.search.files import read_spaces
from fagen.search.kinds import space_of
from fagen.search.recording import text_of
from fagen.search.space import survey
from fagen.search.store import Store
from tests import cli_helpers, tensors
from tests.fresh import forget
from tests.recordings import CARD, AtOnce, record

# ---- searched ------------------------------------------------------------------------------------

Times = dict[Sizes, dict[str, float]]  # the least of each kernel, in seconds


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Times]:
    """Search a space over made-up times of so many kernels, for the user's own table."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    monkeypatch.setattr(flow, "all_committed", lambda: flow.committed("combine"))
    forget(monkeypatch)

    def run(text: str, kernels: int) -> Times:
        space = tmp_path / "mine.toml"
        space.write_text(text)
        store = record(tmp_path / "recorded.sqlite", kernels=kernels, text=text)
        answer = cli_helpers.fagen(
            *("search", "run", space, "--replay", store, "--store", tmp_path / "found.sqlite"),
            *("--write", tmp_path / "fagen"),
        )
        assert answer.exit_code == 0, answer.output
        forget(monkeypatch)
        times: Times = {}
        with Store(store, read_only=True) as recorded:
            for row in recorded.timed():
                if row.source_hash:
                    least = times.setdefault(row.time.size, {})
                    slug, seconds = row.time.slug, row.time.seconds
                    least[slug] = min(seconds, least.get(slug, math.inf))
        return times

    return run


def rows_of(folder: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = tomllib.loads((folder / "dispatch.toml").read_text())["kernel"]
    return rows


def test_what_a_search_finds_for_a_recording_is_what_its_calls_are_then_served_by(
    tmp_path: Path, searched: Callable[[str, int], Times]
) -> None:
    sizes = [
        Sizes(8, 32, 8, 1, 700),  # few query rows
        Sizes(1, 32, 8, 300, 300),
        Sizes(1, 32, 8, 900, 900),
        Sizes(1, 32, 8, 4_000, 4_000),  # many
        Sizes(4, 32, 8, 2_500, 9_000),
        Sizes(1, 32, 8, 16_000, 16_000),
    ]
    problem = Problem("bf16", 64, 64, "causal", None, "", 0)
    text = text_of({problem: {size: 10.0 + at for at, size in enumerate(sizes)}})
    text += "[tile]\nblock_m = [64, 128, 192]\nblock_n = [64, 96, 128]\n"  # which takes less time
    times = searched(text, 60)
    table, named = tmp_path / "fagen" / "dispatch.toml", set()
    for size in sizes:
        how = {"batch": size.batch, "heads": 32, "kv_heads": 8}
        lengths = {"seqlen": size.seqlen_q, "seqlen_k": size.seqlen_k}
        pick = fagen.pick(dtype="bf16", head_dim=64, causal=True, card=CARD[0], **how, **lengths)
        assert pick.row is not None and pick.row.where.startswith(f"{table}:")
        assert pick.file is not None and pick.file.exists()
        # off by the noise of its times, and by what another kernel has to be worth
        assert times[size][pick.slug] <= 1.03 * min(times[size].values()), size
        assert pick.file.parent != tmp_path / "fagen" / "forward" or (
            f"{pick.found}" in str(pick) and "by `fagen search` on NVIDIA H200" in pick.found
        )
        named.add(pick.slug)
    rows = rows_of(tmp_path / "fagen")
    assert {row["slug"] for row in rows} == named
    assert max(row.get("rows_to", 0) for row in rows) == 32 * 900
    listed = json.loads(cli_helpers.fagen("list", "--json").output)
    own = [row for row in listed if row["from"].startswith(f"{table}:")]
    assert [row["schedule"] for row in own] == [row["slug"] for row in rows]
    assert all(row["from"].endswith(" on NVIDIA H200") for row in own)
    assert {row["from"] for row in listed} - {row["from"] for row in own} == {"schedules/"}
    # a call that was not recorded, of more rows than few and of another head dim, is served as ever
    other = fagen.pick(dtype="bf16", head_dim=128, causal=True)
    assert other.row is None or "schedules" in other.row.where


def test_what_it_finds_for_varlen_sequences_serves_calls_of_them(
    tmp_path: Path, searched: Callable[[str, int], Times]
) -> None:
    offsets, path = torch.tensor([0, 30, 35, 35, 60], dtype=torch.int32), tmp_path / "calls.toml"
    with fagen.recording(path):
        for times, named in ((1, {"max_seqlen_q": 30}), (10, {})):
            q, k = (tensors.normal(60 * times, h, 64, dtype=torch.float16) for h in (4, 2))
            fagen.attention_varlen(q, k, k, offsets * times, causal=True, **named)
    tiles = "[tile]\nblock_m = [64, 128]\nblock_n = [64, 96, 128]\n"  # which takes less time
    timed = searched(path.read_text() + tiles, 40)
    (row,) = rows_of(tmp_path / "fagen")
    slug = fagen.prepare_varlen(dtype="fp16", head_dim=64, causal=True, device="cpu")
    assert slug == row["slug"] and "_varlen" in slug
    slugs = set.intersection(*(set(least) for least in timed.values()))
    sums = {slug: sum(math.log(least[slug]) for least in timed.values()) for slug in slugs}
    assert sums[slug] <= min(sums.values()) + len(timed) * 0.03


# ---- the rule for lengths ------------------------------------------------------------------------
def extents() -> list[tuple[int, int, int]]:
    """Tokens, sequences and the longest: all of few tokens, and some of many."""
    triples = [
        (tokens, batch, longest)
        for tokens in range(1, 20)
        for batch in range(1, tokens + 1)
        for longest in range(-(-tokens // batch), tokens - batch + 2)
    ]
    dice = random.Random(0)
    for _ in range(1_000):
        batch = int(2 ** dice.uniform(0, 10))
        tokens = int(batch * 2 ** dice.uniform(0, 10))
        least, most = -(-tokens // batch), tokens - batch + 1
        triples.append((tokens, batch, dice.choice((least, most, dice.randint(least, most)))))
    for tokens in (16_384, 16_385, 2**20 - 1, 2**20):
        least, most = -(-tokens // 16_384), tokens - 16_384 + 1
        near = {least, min(least + 1, most), max(most - 1, least), most}
        triples += [(tokens, 16_384, longest) for longest in near]
    return triples


def test_lengths_that_are_taken_have_the_sum_the_number_and_the_longest():
    for tokens, batch, longest in extents():
        lengths = spread(tokens, batch, longest)
        assert len(lengths) == batch and sum(lengths) == tokens, (tokens, batch, longest)
        assert lengths[0] == max(lengths) == longest and min(lengths) >= 1
        assert lengths == sorted(lengths, reverse=True)
        totals = VarlenTotals(batch, 4, 2, longest, longest, tokens, tokens)
        assert VarlenTotals.of(totals) == totals and [q for q, _ in totals.sequences] == lengths


def test_lengths_that_are_taken_fall_by_one_ratio():
    assert spread(400, 4, 100) == [100] * 4 and spread(403, 4, 400) == [400, 1, 1, 1]
    lengths = spread(65_536, 22, 16_384)
    ratios = [after / before for before, after in pairwise(lengths)]
    assert all(abs(ratio - ratios[0]) < 0.02 for ratio in ratios[:12])


DRAWN: dict[str, Callable[[random.Random], list[int]]] = {
    "octaves": lambda dice: [int(2 ** dice.uniform(4, 14)) for _ in range(22)],
    "even": lambda dice: [dice.randint(1, 2_048) for _ in range(64)],
    "prompts": lambda dice: [
        min(8_192, max(1, int(math.exp(dice.gauss(5.5, 1))))) for _ in range(64)
    ],
    "few long": lambda dice: [
        dice.randint(2_048, 4_096) if dice.random() < 0.1 else dice.randint(8, 64)
        for _ in range(64)
    ],
}


@pytest.mark.parametrize("lengths", DRAWN)
def test_for_these_lengths_nearly_the_same_kernel_is_predicted_best_as_for_the_true_ones(lengths):
    (space,) = read_spaces(locate("cli.py").parent / "spaces/fwd_fp16_d128_varlen.toml")
    predictor = space_of(space.kind).predictor
    dice, more = random.Random(lengths), []
    for target in space.targets():
        surveyed = survey(space, target)
        kernels = [from_slug(surveyed.schedule(point).slug).values() for point in surveyed.points]
        for _ in range(6):
            true = VarlenSizes.of([(n, n) for n in DRAWN[lengths](dice)], 16, 16)
            sizes = VarlenTotals.of(true)
            predict = predictor([true, VarlenSizes.of(sizes.sequences, 16, 16)])
            times = [predict(kernel) for kernel in kernels]
            chosen, _ = min(times, key=lambda time: time[1])
            more.append(chosen / min(time[0] for time in times))
    assert max(more) <= 1.06 and sum(more) / len(more) <= 1.01
