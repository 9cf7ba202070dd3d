"""Which kernel serves a call, as `fagen pick` and fagen.pick say it: what attention takes."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen
from fagen import evidence, registry
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import Row
from fagen.errors import ScheduleError
from fagen.paths import locate
from fagen.process import run
from fagen.render import Hashes
from fagen.search.declared import parse_space
from fagen.search.space import survey
from tests import cli_helpers
from tests.attention_helpers import FEW, FEWER, LONG, MANY, fill, picked
from tests.fresh import asked_for, without_kernels

CARD, OTHER = "NVIDIA H200", "NVIDIA H100"
PLAIN = "fwd_fp16_d64_full_m128n128"
CALL: dict[str, Any] = {
    "dtype": "bf16",
    "head_dim": 96,
    "heads": 48,
    "kv_heads": 6,
    "seqlen": 6_144,
}
WORDS = [word for key, value in CALL.items() for word in (f"--{key.replace('_', '-')}", value)]


@pytest.fixture
def tables(
    schedules_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Where fagen's own table lies and where a user's does, in folders that are empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    fill(schedules_folder, PLAIN)
    own, users = schedules_folder, tmp_path / "config" / "fagen"
    users.mkdir(parents=True)
    return own / dispatch_table.NAME, users / dispatch_table.NAME


def taken(monkeypatch: pytest.MonkeyPatch, batch: int, queries: int, keys: int) -> str:
    """The slug of the kernel that fagen.attention asks for, none of which is then run."""
    with monkeypatch.context() as patch:
        without_kernels(patch)
        q, k = torch.empty(batch, queries, 4, 64).half(), torch.empty(batch, keys, 2, 64).half()
        fagen.attention(q, k, k)
        (slug,) = asked_for()
    return slug or PLAIN


OWN_ROWS = [Row(CARD, FEWER, rows_to=400), Row(CARD, LONG, 0, 300), Row(CARD, MANY, 301)]
USERS_ROWS = [Row(CARD, FEW, 200, 250), Row(CARD, FEW, rows_to=100)]


@pytest.mark.parametrize("own", [[], OWN_ROWS])
@pytest.mark.parametrize("users", [[], USERS_ROWS])
def test_what_is_picked_is_what_attention_takes_and_the_row_says_so(
    tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, own: list[Row], users: list[Row]
) -> None:
    for path, rows in zip(tables, (own, users), strict=True):
        dispatch_table.update(path, rows)
    reasons = set()
    for batch, queries, keys in [
        (b, q, k) for b in (1, 2) for q in (20, 25, 26, 90, 500) for k in (199, 200, 251, 300, 301)
    ]:
        choice = fagen.pick(
            dtype=torch.float16, head_dim=64, batch=batch, heads=4, kv_heads=2,
            seqlen=queries, seqlen_k=keys,
        )  # fmt: skip
        assert choice.slug == taken(monkeypatch, batch, queries, keys)
        reasons.add(choice.slug)
        if choice.row is None:
            assert choice.slug == PLAIN and "plainest committed" in choice.why
            continue
        where, _, line = choice.row.where.rpartition(":")
        text = Path(where).read_text().splitlines()[int(line) :]
        assert choice.why.startswith(f"{where}:{line}, for ")
        assert f'slug = "{choice.slug}"' in text[: text.index("") if "" in text else None]
        assert choice.row.card == CARD or not own
    assert reasons == {*([FEWER, LONG, MANY] if own else [PLAIN]), *([FEW] if users else [])}


def test_a_row_of_another_card_says_that_it_stands_in(tables: tuple[Path, Path]) -> None:
    dispatch_table.update(tables[0], OWN_ROWS)
    how: dict[str, Any] = {"dtype": "fp16", "head_dim": 64, "seqlen": 5_000}
    assert fagen.pick(**how, card=CARD).why.endswith(", for 301 keys and more on NVIDIA H200")
    assert fagen.pick(**how, card=OTHER).why.endswith("; NVIDIA H100 has no rows of its own")
    dispatch_table.update(tables[1], [*USERS_ROWS, Row(OTHER, LONG)])
    other = fagen.pick(**how, card=OTHER)
    assert other.slug == LONG and other.why == f"{tables[1]}:4, for any number of keys on {OTHER}"


def test_the_predicted_time_is_that_of_the_search_and_makes_the_tflops() -> None:
    choice = fagen.pick(causal=True, **CALL)
    # half of a square of scores, each 96 multiplications and additions in each of two GEMMs
    operations = 48 * 6_144 * 6_144 / 2 * 96 * 2 * 2
    assert choice.predicted_tflops * 1e12 * choice.predicted_seconds == pytest.approx(operations)
    assert 300 < choice.predicted_tflops < 989  # what tensor cores do at most
    text = '[attention]\ndtype = "bf16"\nhead_dim = 96\nmask = "causal"\n[tile]\nblock_m = 192\n'
    text += "block_n = 112\n[[shapes]]\nseqlen = 6144\nbatch = 1\nheads = 48\nkv_heads = 6\n"
    space = parse_space(text)
    points = survey(space, space.targets()[0])
    predicted = {points.schedule(point).slug: point.seconds for point in points.points}
    assert predicted[choice.slug] == (choice.predicted_seconds,)


def test_the_command_says_what_python_does_and_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import cli; cli.main()"
    result = run(
        [sys.executable, "-c", code, "pick", "--causal", *map(str, WORDS), "--json"],
        cwd=cli_helpers.ROOT,
    )
    data = json.loads(result.stdout)
    choice = fagen.pick(causal=True, **CALL)
    assert data == json.loads(json.dumps(choice.record(), default=str))
    table = (locate("schedules") / "dispatch.toml").read_text().splitlines()
    where, _, line = data["row"].rpartition(":")
    assert Path(where) == locate("schedules") / "dispatch.toml"
    assert f'slug = "{data["slug"]}"' in table[int(line) : int(line) + 9]
    printed = cli_helpers.fagen("pick", "--causal", *WORDS).output
    assert printed == f"{choice}\n"
    for words in (data["slug"], data["row"], f"fagen search {data['slug']} --minutes 10 --write"):
        assert words in printed


def test_measured_speeds_are_those_of_the_evidence_unless_it_is_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slug = "fwd_fp16_d128_causal_m128n128_nointer"
    how: dict[str, Any] = {"dtype": "fp16", "head_dim": 128, "causal": True, "seqlen": 1_000}
    monkeypatch.setattr("fagen.dispatch.select.flattened", lambda *_: (Row(CARD, slug),))
    ran = evidence.read(slug)
    tflops = [speed.tflops for speed in ran.speeds] if ran else []
    assert tflops and [speed.tflops for speed in fagen.pick(**how).evidence.speeds] == tflops
    assert f"{tflops[0]:.0f} TFLOP/s" in str(fagen.pick(**how))
    monkeypatch.setattr("fagen.dispatch.pick.hashes", lambda _: Hashes("of another source", "", ""))
    assert fagen.pick(**how).evidence is None
    assert fagen.pick(**how).record()["measured"] is None


def test_a_problem_without_a_schedule_has_a_derived_one_in_no_file() -> None:
    choice = fagen.pick(dtype="fp16", head_dim=24, head_dim_v=40, seqlen=300)
    assert choice.derived and choice.row is None and choice.file is None
    assert choice.slug == picked(dtype="fp16", head_dim=24, head_dim_v=40, seqlen=300).slug
    assert "derived" in choice.why and f"fagen search {choice.slug} " in choice.search


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"kv_heads": 3}, "kv_heads = 3 does not divide heads = 32"),
        ({"seqlen": 0}, "seqlen is 0; it must be from 1 to 16,777,216"),
        ({"batch": -1}, "batch is -1"),
        ({"heads": 0}, "heads is 0"),
        (
            {"head_dim": 20},
            "^head_dim is 20; in fp16 it must be a multiple of 8 from 16 to 256: fi",
        ),
        ({"head_dim": 20, "kind": "backward"}, "^head_dim is 20; .* with zeros to 24"),
        ({"head_dim": 8, "kind": "decode"}, "^head_dim is 8; .* with zeros to 16"),
        ({"head_dim": -64}, "^head_dim is -64; .* from 16 to 256$"),
        ({"head_dim_v": 264}, "^head_dim_v is 264; .* from 16 to 256$"),
        ({"dtype": "e4m3", "head_dim": 24}, "^head_dim is 24; in e4m3 it must be a multiple of 16"),
        ({"v_layout": "rows"}, "go with e4m3; dtype is fp16"),
        ({"dtype": torch.float32}, "no kernel computes float32.*; one takes fp16, bf16, e4m3"),
        ({"dtype": "e4m3", "scale_rows": 48}, "scale_rows is 48; it must be one of 0, 32, 64, 128"),
        ({"dtype": "e4m3", "out_dtype": "fp32"}, "out_dtype is 'fp32'"),
        ({"kind": "decode", "lengths": "varlen"}, "decoding reads each sequence's length anyway"),
        ({"lengths": "ragged"}, "lengths is 'ragged'; it must be one of equal, varlen"),
        ({"kind": "backward", "dtype": "e4m3"}, "backward pass; fp16 and bf16 have gradients"),
    ],
)
def test_what_no_call_can_be_is_refused(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        fagen.pick(**{"dtype": "fp16", "head_dim": 64, **call})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"head_dim": "128"}, "head_dim is of type str; it must be a whole number"),
        ({"head_dim": None}, "head_dim is of type NoneType; it must be a whole number"),
        ({"head_dim_v": 64.0}, "head_dim_v is of type float; it must be a whole number or None"),
        ({"heads": 1.5}, "heads is of type float; it must be a whole number or None"),
        ({"causal": "no"}, "causal is of type str; it must be True or False"),
        ({"card": 200}, "card is of type int; it must be a word"),
    ],
)
def test_what_is_of_another_type_is_refused_as_prepare_does(
    call: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"dtype": "fp16", "head_dim": 64, **call}
    with pytest.raises(TypeError, match=f"^pick: {message}$"):
        fagen.pick(**arguments)
    if not arguments.keys() & {"heads", "card"}:
        with pytest.raises(TypeError, match=f"^prepare: {message}$"):
            fagen.prepare(**arguments, device="cpu")


def test_numbers_of_numpy_will_do() -> None:
    numpy = pytest.importorskip("numpy")
    arguments = {"head_dim": numpy.int64(64), "causal": numpy.True_, "heads": numpy.int32(4)}
    plain = {"head_dim": 64, "causal": True, "heads": 4}
    choice, expected = (fagen.pick(dtype="fp16", **call) for call in (arguments, plain))
    assert choice.slug == expected.slug and choice.sizes == expected.sizes


# ---- decoding, and varlen sequences --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning")
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (40, 40)])
@pytest.mark.parametrize(("head_dim", "batch"), [(128, 1), (128, 64), (96, 9), (256, 300)])
def test_what_is_picked_to_decode_is_what_such_calls_take(
    queries: int, heads: int, kv_heads: int, head_dim: int, batch: int
) -> None:
    problem: dict[str, Any] = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads}
    problem |= {"dtype": "bf16", "batch": batch, "causal": False}
    choice = fagen.pick(**problem, seqlen=queries, seqlen_k=9_000, kind="decode")
    assert choice.slug == fagen.prepare_decode(**problem, queries=queries, device="cpu")
    assert choice.derived == (not registry.committed_file(choice.slug).exists())
    assert "by rule" in choice.why and choice.search and choice.predicted_seconds


def test_a_row_of_a_users_table_is_picked_to_decode(tables: tuple[Path, Path]) -> None:
    slug = "dec_fp16_d64_causal_r8n128_s4"
    dispatch_table.update(tables[1], [Row(CARD, slug, group_rows=8)])
    choice = fagen.pick(dtype="fp16", head_dim=64, kind="decode", heads=32, kv_heads=8)
    assert choice.slug == slug and "decoding of 8 rows to a KV head" in choice.why


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("head_dim", [128, 96])
def test_what_is_picked_of_packed_sequences_is_what_such_calls_take(
    head_dim: int, gradient: bool
) -> None:
    problem: dict[str, Any] = {"dtype": "fp16", "head_dim": head_dim, "causal": True}
    choice = fagen.pick(**problem, lengths="varlen", kind="backward" if gradient else "forward")
    assert "_varlen" in choice.slug and choice.derived == (head_dim == 96)
    assert choice.search.startswith(f"fagen search {choice.slug} --minutes")
    if not gradient:
        assert choice.slug == prepared(**problem)


def prepared(**problem: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fagen.UntunedWarning)
        return fagen.prepare_varlen(**problem, device="cpu")
