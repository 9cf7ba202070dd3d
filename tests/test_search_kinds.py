"""Searches of every kind as they run: replayed from a recording, and over a GPU that is made up."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

import fagen as package
from fagen import search
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST, Row
from fagen.kinds.decode.space import SPACE as DECODE_SPACE
from fagen.problem import Sizes, VarlenSizes
from fagen.registry import read
from fagen.search.report.table import _beside
from fagen.search.results import told
from fagen.search.store import Store
from fagen.search.tasks import Time
from tests.cli_helpers import fagen
from tests.fresh import forget
from tests.made_up_gpu import plugged_in
from tests.recordings import AtOnce, record, toml
from tests.recordings import space as space_of
from tests.test_backward_search import FORWARD
from tests.test_backward_search import TEXT as BACKWARD
from tests.test_decode_search import TARGET as DECODE_TARGET
from tests.test_decode_search import TEXT as DECODE
from tests.test_varlen_search import HEAD, values
from tests.test_varlen_search import TARGET as VARLEN_TARGET
from tests.test_varlen_search import TEXT as VARLEN

VARLEN_BACKWARD = toml(
    backward={"dtype": "fp16", "head_dim": 64, "mask": "full", "lengths": "varlen"},
    tile={"block_m": 64, "block_n": [64, 128]},
    shapes=[{"seqlen": 512, "batch": 2}],
)
# what a recording has, by what is searched in it: texts, kernels of each target, targets, the least
# rank correlation, and what the page calls them
KINDS = {
    "backward": (
        ((FORWARD, 20), (BACKWARD, 30)),
        ("bwd_fp16_d64_full", "bwd_fp16_d64_causal"),
        0.4,
        "fp16, head dim 64, causal, backward",
    ),
    "varlen": (
        ((VARLEN, 40),),
        ("fp16_d64_causal_varlen",),
        0.5,
        "fp16, head dim 64, causal, varlen sequences",
    ),
    "varlen backward": (
        ((VARLEN_BACKWARD, 20),),
        ("bwd_fp16_d64_full_varlen",),
        -1.0,
        "fp16, head dim 64, full, backward, varlen sequences",
    ),
    "decode": (
        ((DECODE, 40),),
        ("dec_fp16_d64_causal",),
        0.5,
        "fp16, head dim 64, causal, decode",
    ),
}


class Recorded:
    """A recorded search of a kind, and what a replay of it finds."""

    def __init__(self, name, folder):
        self.name = name
        texts, self.targets, self.correlation, self.title = KINDS[name]
        self.path, self.replayed = folder / "recorded.sqlite", folder / "replayed.sqlite"
        for self.text, kernels in texts:
            record(self.path, kernels=kernels, text=self.text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "LocalExecutor", AtOnce)
            search.search([space_of(self.text)], self.replayed, recorded=self.path)
        self.best = {result.target.name: result for result in search.found(self.path)}
        self.found = search.found(self.replayed)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Recordings of all kinds."""
    return {name: Recorded(name, tmp_path_factory.mktemp("recorded")) for name in KINDS}


@pytest.fixture(params=KINDS)
def recorded(request, every):
    return every[request.param]


# ---- replayed -----------------------------------------------------------------------------------


def test_a_replay_finds_the_fastest_of_its_own_kind(recorded):
    assert [result.target.name for result in recorded.found] == [*recorded.targets]
    for result in recorded.found:
        name = result.target.name
        begins = name.removesuffix("_varlen")
        assert all(
            f"_{begins}_" in f"_{slug}" or slug.startswith(begins) for slug in result.marks.slugs()
        )
        assert all(("_varlen" in slug) == result.target.varlen for slug in result.marks.slugs())
        best = recorded.best[name].lead
        assert result.lead and best and result.lead.slug == best.slug
        assert result.correlation is not None and result.correlation > recorded.correlation
        peer = result.target.peer
        assert result.over_peer and peer.name not in result.marks.slugs()
        line = next(line for line in told(result) if f"{result.lead.slug}: " in line)
        assert f"× {peer.title}" in line
        record_of_it = search.record(result)
        assert record_of_it[f"over_{peer.name}"] == result.over_peer
        json.dumps(record_of_it, allow_nan=False)


def test_what_was_found_is_written_where_calls_read_it(recorded, tmp_path):
    folder = tmp_path / "mine"
    store = tmp_path / "found.sqlite"
    store.write_bytes(recorded.replayed.read_bytes())
    answer = fagen("search", "report", store, "--write", folder)
    assert answer.exit_code == 0, answer.output
    rows = dispatch_table.table_at(folder / "dispatch.toml")
    assert rows and {row.slug for result in recorded.found for row in result.rows()} == {
        row.slug for row in rows
    }
    kind = recorded.found[0].kind
    for row in rows:
        assert row.problem.kind == kind and row.by.startswith("fagen search")
        assert read(folder / kind / f"{row.slug}.toml").slug == row.slug
    page = store.with_suffix(".html").read_text()
    peer = recorded.found[0].target.peer.title
    assert recorded.title in page and f"÷ {peer}" in page
    assert ("cuDNN" in page) == (peer == "cuDNN")
    if not recorded.found[0].by_groups:
        for mask in {row.problem.mask for row in rows}:  # no number of keys is left out
            own = [row for row in rows if row.problem.mask == mask and not row.for_few_rows]
            assert own[0].keys_from == 0 and own[-1].keys_to == MOST
            assert all(after.keys_from == before.keys_to + 1 for before, after in pairwise(own))
        assert not recorded.found[0].target.varlen or len(rows) == 1


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["bwd_fp16_d128_full_m64n128"], "bwd_fp16_d128_full"),
        (["spaces/dec_fp16_d128.toml"], "dec_fp16_d128_causal"),
        (["spaces/fwd_fp16_d128_varlen.toml"], "fp16_d128_causal_varlen"),
    ],
)
def test_a_dry_run_says_what_is_refused_and_predicted(words, target, monkeypatch):
    monkeypatch.chdir(package.paths.locate("cli.py").parent)
    answer = fagen("search", *words, "--dry-run")
    assert answer.exit_code == 0, answer.output
    assert re.search(rf"{target}: [\d,]+ points, \d+ fit\n", answer.output)
    assert "refused: shared memory of a thread block" in answer.output
    assert re.search(rf" µs  (fwd_)?{target.removesuffix('_varlen')}_", answer.output)


def test_the_command_replays_and_says_what_is_ahead(every, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    space = tmp_path / "space.toml"
    space.write_text(BACKWARD)
    words = ["--replay", every["backward"].path, "--store", tmp_path / "found.sqlite"]
    answer = fagen("search", space, *words, "--write", tmp_path / "mine")
    assert answer.exit_code == 0, answer.output
    assert "bwd_fp16_d64_causal on NVIDIA H200" in answer.output and "× cuDNN" in answer.output
    assert (tmp_path / "mine" / "dispatch.toml").exists()


# ---- of decoding, by rows of a group ------------------------------------------------------------


def test_of_each_group_of_rows_that_is_written_which_is_fastest_there(every):
    (best,), (result,) = every["decode"].best.values(), every["decode"].found
    for (group, most, slug), size in zip(best.groups(), best.sizes, strict=True):
        alike = [
            other
            for other in best.marks.slugs()
            if all(values(other)[key] == values(slug)[key] for key in DECODE_SPACE.promised)
        ]
        assert math.isinf(most) and group == 4 * size.seqlen_q if group > 8 else group == 8
        assert slug == min(alike, key=lambda other: best.marks.at(other, size, "brief"))
    lines = "\n".join(told(result))
    for row in result.rows():
        assert (
            row.group_rows in (8, 16) and row.rows_to == MOST
        )  # one query of four heads, and four
        assert row.problem == replace(DECODE_TARGET, v_layout="", scale_rows=0)
        # bits are those of calls without a table
        assert {values(row.slug)[key] for key in ("num_splits", "block_n")} == {16, 128}
        assert f"{row.group_rows} rows to a KV head: {row.slug}" in lines


# ---- of varlen sequences ------------------------------------------------------------------------


def test_sizes_come_back_from_a_store_as_they_were(every):
    declared = space_of(VARLEN).sizes(VARLEN_TARGET)
    with Store(every["varlen"].path, read_only=True) as store:
        assert {row.time.size for row in store.timed()} == {*declared}
    (result,) = every["varlen"].best.values()
    assert result.sizes == declared
    assert result.marks.weights == pytest.approx((0.25, 0.5, 0.25))


def test_calls_take_the_row_of_packed_sequences_then(every, tmp_path, monkeypatch):
    search.write(every["varlen"].found, tmp_path / "config" / "fagen")
    (row,) = dispatch_table.table_at(tmp_path / "config" / "fagen" / "dispatch.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget(monkeypatch)
    for _ in range(2):
        slug = package.prepare_varlen(dtype="fp16", head_dim=64, causal=True, device="cpu")
        assert slug == row.slug
    assert package.pick(dtype="fp16", head_dim=64, causal=True, lengths="varlen").slug == row.slug


def test_what_is_faster_at_some_lengths_is_told_and_gets_no_row(every):
    (result,) = search.found(every["varlen"].path)
    lead, marks = result.lead.slug, result.marks
    other = next(slug for slug in marks.slugs() if slug != lead)
    for number in range(2):
        for regime in ("brief", "long"):
            for slug in (lead, other):
                for at, size in enumerate(result.sizes):
                    seconds = 0.5 if (slug == other) == (at == 2) else 1.0
                    marks.add(Time(slug, size, regime, number, seconds, 1.0))
    assert result.lead.slug == lead and result.best_at(result.sizes[2], lead) == other
    assert [row.slug for row in result.rows()] == [lead] and not result.few()
    lines = [line for line in told(result) if "one row is for all lengths" in line]
    assert lines == [
        f"  at {result.sizes[2]} {other} is faster by 100.0%; one row is for all lengths"
    ]


def test_a_row_of_fagens_table_is_judged_by_the_leader_of_all_lengths(every):
    (result,) = every["varlen"].best.values()
    lead, second = result.lead.slug, str(result.lead.second)
    row_of = partial(Row, result.card)
    assert _beside(result, row_of(lead), ()) == (True, "the same", "")
    same, comparison, than = _beside(result, row_of(second), ())
    assert same is False and than == lead
    assert re.fullmatch(r"at .+ it takes -?[\d.]+% longer than", comparison)
    untimed = _beside(result, row_of("fwd_fp16_d64_causal_m64n16_varlen"), ())
    assert untimed == (False, "not timed here; instead", lead)


def test_a_page_of_both_names_each_ones_peer(every, tmp_path):
    path = tmp_path / "both.sqlite"
    path.write_bytes(every["varlen"].path.read_bytes())
    dense = HEAD.replace('lengths = "varlen"\n', "") + "[[shapes]]\nseqlen = 4096\n"
    record(path, kernels=5, text=dense)
    page = search.report.page(path)
    assert "÷ the peer" in page and "× FlashAttention-2's" in page and "× cuDNN's" in page
    assert '<div class="name soft">lengths</div>' in page and "4 x 4096" in page
    names = [result.target.name for result in search.found(path)]
    assert names == ["fp16_d64_causal", "fp16_d64_causal_varlen"]


# ---- over a made-up GPU -------------------------------------------------------------------------

HEADS = {"heads": 4, "kv_heads": 2}
SMALL_DECODE = toml(
    decode={"dtype": "fp16", "head_dim": 64, "mask": "causal"},
    tile={"rows": [8, 16], "block_n": 128},
    split={"num_splits": 4, "by": ["round_robin", "stream_k"]},
    pipeline={"stages": 4, "q_stages": 2},
    softmax={"speculate": True},
    grid={"blocks": 2},
    search={"long_runs": False},
    shapes=[
        {"batch": 1, **HEADS, "seqlen": 1, "seqlen_k": 130},
        {"batch": 2, **HEADS, "seqlen": 3, "seqlen_k": 40},
    ],
)
SMALL_VARLEN = VARLEN.partition("[tile]")[0] + toml(
    tile={"block_m": [64, 128], "block_n": 64},
    pipeline={"stages": 2, "q_stages": 1, "output": "own"},
    warps={"producer": "warp"},
    overlap={"inter_warpgroup": False, "intra_warpgroup": True},
    grid={"cluster": 1, "order": "dynamic"},
    search={"long_runs": False},
    shapes=[
        {"seqlens": [70, 3, 64], **HEADS},
        {"seqlens": {"from": 1, "to": 9}, "batch": 40, "heads": 2},
    ],
)
RUNS = {  # a space, a kernel of it that is wrong, others that are right, sizes of the quick check
    "decode": (
        SMALL_DECODE,
        "dec_fp16_d64_causal_r16n128_c4_s4",
        {"dec_fp16_d64_causal_r8n128_c4_s4"},
        Sizes(2, 4, 2, 1, 70),
    ),
    "varlen": (
        SMALL_VARLEN,
        "fwd_fp16_d64_causal_m128n64_varlen_nointer",
        {"fwd_fp16_d64_causal_m64n64_varlen"},
        VarlenSizes.of(((70, 90), (0, 3), (5, 5)), 2, 1),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_search_compiles_checks_and_times_real_schedules(name, tmp_path, monkeypatch):
    """All but compiler and clock: kernels are emulated, and one of them is wrong."""
    text, bad, expected, sizes = RUNS[name]
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    with plugged_in(monkeypatch, torch=True) as gpu:
        gpu.checks(bad, sizes)
        gpu.wrong[bad] = lambda tensors: tensors["out"].add_(0.5)
        work = gpu.work()
        monkeypatch.setattr(search, "LocalExecutor", lambda real, **_: AtOnce(work))
        search.search([space_of(text)], tmp_path / "found.sqlite")
    (result,) = search.found(tmp_path / "found.sqlite")
    assert set(result.wrong) == {bad} and result.wrong[bad].startswith("error ")
    # what such calls get today is timed too
    assert set(result.marks.slugs()) > expected
    assert result.lead and result.over_peer == pytest.approx(1)
