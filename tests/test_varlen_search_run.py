"""Search over packed sequences as it runs: how trials go, and a whole one replayed."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as package
from fagen import search
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST, Row
from fagen.errors import DeviceError, VerificationError
from fagen.kinds.backward import operands as backward_operands
from fagen.kinds.backward import varlen_proof
from fagen.kinds.backward.emulate import compute
from fagen.kinds.backward.reference import gradients
from fagen.kinds.forward import operands, varlen_accuracy
from fagen.kinds.forward.emulate import emulate_varlen
from fagen.kinds.forward.reference import reference
from fagen.measure import inputs as measure_inputs
from fagen.measure import rounds
from fagen.measure.gradients import output_gradient
from fagen.measure.peers import peer
from fagen.measure.proof import trial_of
from fagen.measure.rounds import BRIEF, Kernel
from fagen.measure.sequences import quick_sizes
from fagen.measure.timing import Call
from fagen.problem import Cell, PackedSizes, Sizes
from fagen.registry import plan_of, read
from fagen.runtime import varlen
from fagen.search import executor, tasks
from fagen.search.executor import REAL, Work
from fagen.search.report.table import _beside
from fagen.search.results import told
from fagen.search.run import serving
from fagen.search.space import survey
from fagen.search.store import Store
from fagen.search.tasks import GOOD, Compiled
from fagen.vocab import MASKS
from tests.aten import packed_passes_on_a_cpu
from tests.cli_helpers import fagen
from tests.fresh import forget
from tests.recordings import AtOnce, record
from tests.recordings import space as space_of
from tests.test_varlen_search import HEAD, MIXED, TARGET, TEXT

GRADIENTS = """
[backward]
dtype = "fp16"
head_dim = 64
mask = "full"
lengths = "varlen"

[tile]
block_m = 64
block_n = [64, 128]

[[shapes]]
seqlen = 512
batch = 2
"""


# ---- timing -------------------------------------------------------------------------------------

SIZES = PackedSizes.of(MIXED, 4, 2)
CELL = Cell(TARGET, SIZES)
SLUGS = ("fwd_fp16_d64_causal_m64n64_varlen", "fwd_fp16_d64_causal_m128n64_varlen")
BY = "bwd_fp16_d64_causal_m64n64_varlen"


def kernel(slug: str) -> Kernel:
    return Kernel(slug, Path(f"{slug}.so"))


def emulated(of: Any, given: dict[str, Any]) -> None:
    """Compute what a kernel does."""
    if of.kind == "backward":
        for name, made in zip(("q", "k", "v"), gradients_of(of, given), strict=True):
            given[f"d{name}"].copy_(made)
        return
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale", "seqused_k")
    found, sums = emulate_varlen(of, **{name: given.get(name) for name in names})
    given["out"].copy_(found)
    given["lse"].copy_(sums)


def gradients_of(of: Any, given: dict[str, Any]) -> list[Tensor]:
    taken = [one.name for one in of.signature.arguments]
    return [*compute(of, **{name: given.get(name) for name in taken})]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device on which kernels are emulated; some are wrong, and it notes whose turn it was."""

    class Device:
        ran: list[str]
        wrong: dict[str, Callable[[dict[str, Any]], None]]

    made = Device()
    made.ran, made.wrong = [], {}

    def bind(of: Any, library: Path, **given: Any) -> Callable[[], None]:
        assert library == Path(f"{of.slug}.so")

        def launch() -> None:
            made.ran.append(of.slug)
            emulated(of, given)
            made.wrong.get(of.slug, lambda given: None)(given)

        return launch

    def time_round(call: Call, regime: Any, each: float, clock: Any) -> tuple[float, list[int]]:
        call.run()
        return 6e-3, []

    for module in (operands, backward_operands):
        monkeypatch.setattr(module, "bind", bind)
    for module in (varlen_accuracy, varlen_proof):
        monkeypatch.setattr(
            module, "call", lambda of, library, **given: bind(of, library, **given)()
        )
    monkeypatch.setattr(rounds, "time_round", time_round)
    monkeypatch.setattr(rounds, "estimate", lambda call: 1e-3)
    monkeypatch.setattr(rounds, "inputs", partial(measure_inputs.inputs, device="cpu"))
    monkeypatch.setattr(rounds, "_known", {})
    monkeypatch.setattr(rounds, "Clock", lambda: None)
    cached = rounds._inputs, rounds._beside, rounds._expected
    for one in cached:
        one.cache_clear()
    yield made
    for one in cached:
        one.cache_clear()


@pytest.fixture
def flash() -> Iterator[list[str]]:
    with packed_passes_on_a_cpu() as called:
        yield called


def test_trials_are_given_all_sequences_packed_with_the_same_offsets() -> None:
    q, k, v = measure_inputs.inputs(CELL, device="cpu")
    assert q.shape == (1, 465, 4, 64) and k.shape == v.shape == (1, 666, 2, 64)
    of = plan_of(SLUGS[0])
    given = trial_of(of).arguments(of, q, k, v, SIZES)
    assert given[3].tolist() == [0, 300, 305, 400, 401, 465]
    assert given[4].tolist() == [0, 300, 370, 465, 466, 666]
    assert all(at.dtype == torch.int32 and at.is_contiguous() for at in given[3:5])
    into = trial_of(of).outputs(of, given)
    assert [tuple(x.shape) for x in into] == [(465, 4, 64), (4, 465)]
    # beside others of a cell of one length they are of equal ones
    q, k, v = measure_inputs.inputs(Cell(TARGET, Sizes(3, 4, 2, 9, 7)), device="cpu")
    *_, at_q, at_k, _, _ = trial_of(of).arguments(of, q, k, v)
    assert (at_q.tolist(), at_k.tolist()) == ([0, 9, 18, 27], [0, 7, 14, 21])


def test_trials_in_e4m3_have_a_scale_for_each_head() -> None:
    of = plan_of("fwd_e4m3_d64_causal_m64n64_varlen")
    cell = Cell(replace(TARGET, dtype="e4m3"), SIZES)
    given = trial_of(of).arguments(of, *measure_inputs.inputs(cell, device="cpu"), SIZES)
    *_, used = given[:7]
    descales = given[7:]
    assert given[0].dtype == torch.float8_e4m3fn and used is None
    assert [tuple(x.shape) for x in descales[:3]] == [(1, 4, 1), (1, 2, 1), (1, 2, 64)]


def test_kernels_run_beside_the_anchor_and_flashattention_2(device: Any, flash: list[str]) -> None:
    laps = rounds.side_by_side(
        CELL, list(map(kernel, SLUGS)), kernel(SLUGS[0]), regime=BRIEF, repeats=(0, 1)
    )
    assert {lap.name for lap in laps} == {*SLUGS, "fa2"} and len(laps) == 6
    assert flash and {*flash} == {"forward"}
    assert all(lap.seconds == lap.anchor_seconds for lap in laps)


def test_without_flashattention_2_kernels_run_alone(device: Any) -> None:
    laps = rounds.side_by_side(
        CELL, [kernel(SLUGS[1])], kernel(SLUGS[0]), regime=BRIEF, repeats=(0,)
    )
    assert [lap.name for lap in laps] == [SLUGS[1]]


def test_gradients_run_beside_flashattention_2s(device: Any, flash: list[str]) -> None:
    cell = replace(CELL, problem=replace(TARGET, kind="backward"))
    laps = rounds.side_by_side(cell, [kernel(BY)], kernel(BY), regime=BRIEF, repeats=(0,))
    assert {lap.name for lap in laps} == {BY, "fa2"} and {*flash} == {"forward", "backward"}


@pytest.mark.parametrize("mask", MASKS)
def test_flashattention_2_computes_each_sequence_by_itself(flash: list[str], mask: str) -> None:
    cell = Cell(replace(TARGET, mask=mask), SIZES)
    q, k, v = measure_inputs.inputs(cell, device="cpu")
    out = peer("fa2").bind(cell, q, k, v).once()
    by = replace(cell, problem=replace(cell.problem, kind="backward"))
    found = peer("fa2").bind(by, q, k, v).once()
    assert out.shape == (465, 4, 64) and [len(x) for x in found] == [465, 666, 666]
    at_q, at_k = (at.tolist() for at in measure_inputs.offsets(SIZES, "cpu"))
    for (top, bottom), (first, last) in zip(pairwise(at_q), pairwise(at_k), strict=True):
        own = q[:, top:bottom], k[:, first:last], v[:, first:last]
        right, _ = reference(*own, mask=mask, scale=64**-0.5)
        assert (out[top:bottom] - right[0]).abs().max() < 5e-3
        dout = output_gradient(q, v)[:, top:bottom]
        fine = gradients(dout, *own, mask=MASKS[mask], scale=64**-0.5)[2:]
        for one, other, rows in zip(
            found, fine, (slice(top, bottom), *[slice(first, last)] * 2), strict=True
        ):
            assert (one[rows] - other[0]).abs().max() < 2e-2


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flex"])
def test_other_peers_say_that_they_are_not_timed(name: str) -> None:
    given = measure_inputs.inputs(CELL, device="cpu")
    with pytest.raises(DeviceError, match="it is not timed over packed sequences"):
        peer(name).bind(CELL, *given)


def reads_a_neighbour(given: dict[str, Any]) -> None:
    """What leaves NaN of a neighbour in a row."""
    rows = given["out"] if "out" in given and "dq" not in given else given["dq"]
    rows[int(given["cu_seqlens_q"][1]) - 1] = math.nan


def is_off(given: dict[str, Any]) -> None:
    rows = given["out"] if "dq" not in given else given["dk"]
    rows += 0.5


def forgets_rows_behind(given: dict[str, Any]) -> None:
    end = int(given["cu_seqlens_q"][-1])
    (given["lse"][:, end:] if "dq" not in given else given["dq"][end:]).fill_(7)


@pytest.mark.parametrize("wrong", [None, reads_a_neighbour, is_off, forgets_rows_behind])
@pytest.mark.parametrize("slug", [SLUGS[0], BY])
def test_a_right_kernel_passes_the_quick_check_and_a_wrong_one_does_not(
    device: Any, flash: list[str], monkeypatch: pytest.MonkeyPatch, slug: str, wrong: Any
) -> None:
    kind = "backward" if slug == BY else "forward"
    cell = replace(CELL, problem=replace(TARGET, kind=kind))
    few = lambda of, sizes: [PackedSizes.of(((70, 90), (0, 3), (5, 0), (64, 64)), 2, 1)]  # noqa: E731
    of = plan_of(slug)
    trial = replace(trial_of(of), quick=few)
    monkeypatch.setattr(rounds, "trial_of", lambda plan: trial)
    if wrong is None:
        rounds.quick_check(cell, kernel(slug))
        assert len(device.ran) == 2 and flash  # at the small sizes, and beside torch at the cell's
        return
    device.wrong[slug] = wrong
    with pytest.raises(VerificationError, match=r"error .* is allowed|dq nan|dk .* of"):
        rounds.quick_check(cell, kernel(slug))


def test_a_kernel_that_is_wrong_at_the_cells_own_lengths_alone_is_found(
    device: Any, flash: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = replace(trial_of(plan_of(SLUGS[0])), quick=lambda of, sizes: [])
    monkeypatch.setattr(rounds, "trial_of", lambda plan: trial)
    rounds.quick_check(CELL, kernel(SLUGS[0]))
    device.wrong[SLUGS[0]] = is_off
    with pytest.raises(VerificationError, match=r"differs from torch by .* at H=4/2 5 of 1 … 300"):
        rounds.quick_check(CELL, kernel(SLUGS[0]))


@pytest.mark.parametrize("slug", [*SLUGS, "bwd_fp16_d128_causal_m64n128_varlen"])
def test_what_is_checked_is_what_goes_wrong_soonest_and_like_what_is_timed(slug: str) -> None:
    of, long = plan_of(slug), PackedSizes.of([(16_384, 16_384)] * 20, 32, 8)
    around, mixed, tiny, like = quick_sizes(of, long)
    assert {(0, 0), (0, 1), (of.block_m + 1, of.block_n - 1)} <= {*around.sequences}
    assert (0, 0) in mixed.sequences and tiny.batch > 64
    assert (like.heads, like.kv_heads) == (32, 8) and like.total_k <= 8 * 1_024


# ---- a whole search, replayed -------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded search over packed sequences."""
    return record(tmp_path_factory.mktemp("recorded") / "recorded.sqlite", kernels=40, text=TEXT)


@pytest.fixture
def replayed(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a replay of it found."""
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    monkeypatch.setattr(executor, "LocalExecutor", AtOnce)
    store = tmp_path / "found.sqlite"
    search.search([space_of(TEXT)], store, recorded=recorded)
    return store


def test_sizes_come_back_from_a_store_as_they_were(recorded: Path) -> None:
    (declared,) = (space_of(TEXT),)
    with Store(recorded, read_only=True) as store:
        kept = {row.time.size for _, row in store.timed()}
    assert kept == {*declared.sizes(TARGET)}
    (found,) = search.found(recorded)
    assert found.sizes == declared.sizes(TARGET)
    assert found.marks.weights == pytest.approx((0.25, 0.5, 0.25))


def test_a_replay_finds_the_fastest(recorded: Path, replayed: Path) -> None:
    (best,), (one,) = search.found(recorded), search.found(replayed)
    assert one.target == TARGET and all("_varlen" in slug for slug in one.marks.slugs())
    assert one.lead and best.lead and one.lead.slug == best.lead.slug
    assert one.correlation is not None and one.correlation > 0.5
    assert one.over_peer and "fa2" not in one.marks.slugs()
    lines = [*told(one)]
    assert any(f"{one.lead.slug}: " in line and "× FlashAttention-2" in line for line in lines)
    said = search.record(one)
    assert said["over_fa2"] == one.over_peer and "over_cudnn" not in said
    json.dumps(said, allow_nan=False)


def test_what_was_found_is_one_row_which_calls_take_then(
    replayed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "config" / "fagen"
    answer = fagen("search", "report", replayed, "--write", folder)
    assert answer.exit_code == 0, answer.output
    (row,) = dispatch_table.table_at(folder / "dispatch.toml")
    (found,) = search.found(replayed)
    assert found.lead and row.slug == found.lead.slug
    assert (row.keys_from, row.keys_to, row.rows_to) == (0, MOST, MOST)
    assert row.by.startswith("fagen search")
    assert read(folder / "forward" / f"{row.slug}.toml").slug == row.slug
    page = replayed.with_suffix(".html").read_text()
    assert "fp16, head dim 64, causal, packed sequences" in page
    assert "÷ FlashAttention-2" in page and "cuDNN" not in page
    assert "4 x 4096" in page and '<div class="name soft">lengths</div>' in page
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget(monkeypatch, varlen)
    for _ in range(2):
        taken = package.prepare_varlen(dtype="fp16", head_dim=64, causal=True, device="cpu")
        assert taken == row.slug
    assert package.pick(dtype="fp16", head_dim=64, causal=True, lengths="varlen").slug == row.slug


def test_what_is_faster_at_some_lengths_is_told_and_gets_no_row(recorded: Path) -> None:
    (found,) = search.found(recorded)
    assert found.lead
    lead, marks = found.lead.slug, found.marks
    other = next(slug for slug in marks.slugs() if slug != lead)
    for number in range(2):
        for regime in ("brief", "long"):
            for slug in (lead, other):
                for at, size in enumerate(found.sizes):
                    seconds = 0.5 if (slug == other) == (at == 2) else 1.0
                    marks.add(tasks.Time(slug, size, regime, number, seconds, 1.0))
    assert found.lead.slug == lead and found.best_at(found.sizes[2], lead) == other
    assert [row.slug for row in found.rows()] == [lead] and not found.few()
    said = [line for line in told(found) if "one row is for all lengths" in line]
    assert said == [
        f"  at {found.sizes[2]} {other} is faster by 100.0%; one row is for all lengths"
    ]


def test_a_row_of_fagens_table_is_judged_by_the_leader_of_all_lengths(recorded: Path) -> None:
    (found,) = search.found(recorded)
    assert found.lead
    lead, second = found.lead.slug, str(found.lead.second)
    of = partial(Row, found.card)
    assert _beside(found, of(lead)) == (True, "the same", "")
    same, here, than = _beside(found, of(second))
    assert same is False and than == lead
    assert re.fullmatch(r"at .+ it takes -?[\d.]+% longer than", here)
    untimed = _beside(found, of("fwd_fp16_d64_causal_m64n16_varlen"))
    assert untimed == (False, "not timed here; instead", lead)


def test_a_page_of_both_names_each_ones_peer(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "both.sqlite"
    path.write_bytes(recorded.read_bytes())
    dense = HEAD.replace('lengths = "varlen"\n', "") + "[[shapes]]\nseqlen = 4096\n"
    record(path, kernels=5, text=dense)
    page = search.report.page(path)
    assert "÷ the peer" in page and "× FlashAttention-2's" in page and "× cuDNN's" in page
    names = [one.target.name for one in search.found(path)]
    assert names == ["fp16_d64_causal", "fp16_d64_causal_varlen"]


SMALL = (
    TEXT.partition("[tile]")[0]
    + """
[tile]
block_m = [64, 128]
block_n = 64

[pipeline]
stages = 2
q_stages = 1
output = "own"

[warps]
producer = "warp"

[overlap]
inter_warpgroup = false
intra_warpgroup = true

[softmax]

[grid]
cluster = 1
order = "dynamic"

[search]
long_runs = false

[[shapes]]
seqlens = [70, 3, 64]
heads = 4
kv_heads = 2

[[shapes]]
seqlens = { from = 1, to = 9 }
batch = 40
heads = 2
"""
)


def test_a_search_compiles_checks_and_times_real_schedules(
    device: Any, flash: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but compiler and clock: kernels are emulated, and one of them is wrong."""

    def compiled(slug: str) -> Compiled:
        return Compiled(slug, plan_of(slug).slug, "nvcc 13.0", GOOD, library=f"{slug}.so")

    def emulating(recorded: object) -> Work:
        return replace(
            REAL,
            compile=compiled,
            source_hash=lambda slug: slug,
            compiler=lambda: "nvcc 13.0",
            card=lambda index: ("NVIDIA H200", "580.1"),
        )

    few = lambda of, sizes: [PackedSizes.of(((70, 90), (0, 3), (5, 5)), 2, 1)]  # noqa: E731
    trial = trial_of(plan_of(SLUGS[0]))
    monkeypatch.setattr(rounds, "trial_of", lambda plan: replace(trial, quick=few))
    monkeypatch.setattr(rounds, "use_card", lambda index: SimpleCard)
    monkeypatch.setattr(rounds, "card_id", lambda index: "0")
    monkeypatch.setattr(tasks, "_library", lambda made: Path(made.library))
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    monkeypatch.setattr(executor, "LocalExecutor", AtOnce)
    monkeypatch.setattr(search.replay, "work", emulating)
    monkeypatch.setattr(search.replay, "only_recorded", lambda recorded, survey: survey)
    (declared,) = (space_of(SMALL),)
    found = survey(declared, TARGET)
    slugs = {found.schedule(point).slug for point in found.points}
    bad = next(slug for slug in sorted(slugs) if slug not in serving(found, "NVIDIA H200"))
    device.wrong[bad] = is_off
    search.search([declared], tmp_path / "s.sqlite", recorded=Path("stands for it"))
    (result,) = search.found(tmp_path / "s.sqlite")
    assert result.lead and bad in result.wrong and "is allowed" in result.wrong[bad]
    assert slugs - {bad} <= {*result.marks.slugs()} and result.over_peer


class SimpleCard:
    name, driver = "NVIDIA H200", "580.1"


def test_gradients_are_searched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "recorded.sqlite", kernels=20, text=GRADIENTS)
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    monkeypatch.setattr(executor, "LocalExecutor", AtOnce)
    search.search([space_of(GRADIENTS)], tmp_path / "found.sqlite", recorded=path)
    (found,) = search.found(tmp_path / "found.sqlite")
    assert found.target.name == "bwd_fp16_d64_full_varlen" and found.lead
    (row,) = found.rows()
    assert row.problem.kind == "backward" and row.problem.varlen and not row.for_few_rows
