"""What measuring rests on, without a GPU: FLOPs, shapes, errors, rounds, rows and their table."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from fagen.build.report import NO_DISASSEMBLER, CompilerReport
from fagen.errors import BuildError, DeviceError, FagenError, ToolchainError, VerificationError
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.shapes import verification_sizes
from fagen.kinds.forward.verify.dense import shape_error, torch_math
from fagen.measure import rotating
from fagen.measure.card import Clock, hopper
from fagen.measure.cells import race, speeds
from fagen.measure.inputs import cell_of, inputs, rows_with_keys, softmax_scale
from fagen.measure.numerics import unit_in_last_place
from fagen.measure.peers import PEERS, Implementation, peer, reason
from fagen.measure.rows import Row, geomean, geomeans, means, ratios, read_rows, table, write_rows
from fagen.measure.timing import BURST, SUSTAINED, Call, Timing, orders, repeats, summary
from fagen.measure.verification import machine_code
from fagen.problem import Cell, Problem, Sizes
from fagen.registry import parse as parse_schedule
from fagen.vocab import MASKS, Mask
from tests.made_up_gpu import race_on_a_cpu


def planned(mask="full", dtype="fp16", head_dim=64, head_dim_v=64):
    return plan(
        parse_schedule(
            f'[attention]\nhead_dim = {head_dim}\nhead_dim_v = {head_dim_v}\ndtype = "{dtype}"\n'
            f'mask = "{mask}"\n[tile]\nblock_m = 128\nblock_n = 64\n',
            "test",
        )
    )


def row(implementation="fagen", tflops=500.0, regime="sustained", **changes):
    base = {
        "dtype": "fp16", "head_dim": 128, "head_dim_v": 128, "mask": "full", "batch": 4,
        "seqlen_q": 4096, "seqlen_k": 4096, "heads": 16, "kv_heads": 16,
        "implementation": implementation, "schedule": None, "regime": regime,
        "tflops": tflops, "spread": 0.01, "sm_clock_mhz": 1500,
    }  # fmt: skip
    return Row(**{**base, **changes})


# ---- FLOPs and sizes


def test_flops_are_those_of_the_targets():
    sizes = Sizes(4, 16, 16, 4096, 4096)
    full = Cell(Problem("fp16", 128, 128, "full"), sizes)
    assert full.flops == 4 * 4 * 16 * 4096**2 * 128
    assert Cell(Problem("fp16", 128, 128, "causal"), sizes).flops == full.flops / 2
    assert Cell(Problem("fp16", 192, 128, "full"), sizes).flops == 4 * 4 * 16 * 4096**2 * 160


def test_verification_shapes_surround_the_tile_and_hold_the_known_traps():
    schedule = planned()
    shapes = verification_sizes(schedule)
    queries, keys = {s.seqlen_q for s in shapes}, {s.seqlen_k for s in shapes}
    assert {0, 1, 127, 128, 129} <= queries
    assert {0, 1, 63, 64, 65} <= keys
    assert any(s.seqlen_q > s.seqlen_k > 0 for s in shapes)
    assert any(s.kv_heads == 1 < s.heads for s in shapes)
    assert any(1 < s.kv_heads < s.heads for s in shapes)
    assert any(s.seqlen_k > 4000 for s in shapes)
    tiles = max(s.batch * s.heads * math.ceil(s.seqlen_q / schedule.block_m) for s in shapes)
    assert tiles >= 3 * 132  # three tiles for every SM of an H200
    assert all(s.heads % s.kv_heads == 0 for s in shapes)


def test_inputs_are_repeatable_and_of_the_shapes_that_the_op_takes():
    case = Cell(Problem("bf16", 64, 32, "full"), Sizes(2, 4, 2, 5, 7))
    q, k, v = inputs(case, device="cpu", seed=3)
    assert (q.shape, k.shape, v.shape) == ((2, 5, 4, 64), (2, 7, 2, 64), (2, 7, 2, 32))
    assert q.dtype == torch.bfloat16
    assert torch.equal(q, inputs(case, device="cpu", seed=3)[0])
    assert not torch.equal(q, inputs(case, device="cpu", seed=4)[0])
    assert torch.equal(inputs(case, device="cpu", seed=3, sigma=4.0)[0], 4 * q)


# ---- errors


def test_the_unit_in_the_last_place_is_the_gap_to_the_next_number():
    for value, dtype in [(1.0, torch.float16), (3.9, torch.float16), (0.3, torch.bfloat16)]:
        number = torch.tensor(value, dtype=dtype)
        gap = float(torch.nextafter(number, number.new_tensor(100.0)) - number)
        assert unit_in_last_place(float(number), dtype) == gap
    assert 0 < unit_in_last_place(0.0, torch.float16) < 1e-6


def rows_of(mask, seqlen_q, seqlen_k):
    cell = Cell(Problem("fp16", 64, 64, mask), Sizes(1, 1, 1, seqlen_q, seqlen_k))
    return rows_with_keys(cell).tolist()


def test_rows_with_keys_are_those_whose_last_key_is_not_before_the_first():
    assert rows_of("causal", 5, 5) == [True] * 5
    assert rows_of("causal", 7, 5) == [False] * 2 + [True] * 5
    assert rows_of("full", 7, 5) == [True] * 7
    assert rows_of("full", 7, 0) == rows_of("causal", 7, 0) == [False] * 7
    assert rows_of("causal", 0, 7) == []


def test_rows_with_keys_of_another_mask_may_lie_anywhere(monkeypatch):
    ahead = Mask("ahead", "lpt", lambda row, _, keys: (row + 2, keys), lambda q, k: 0.0, "row + 2")
    monkeypatch.setitem(MASKS, "ahead", ahead)
    assert rows_of("ahead", 7, 5) == [True] * 3 + [False] * 4


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sizes", [Sizes(2, 4, 2, 37, 51), Sizes(1, 2, 2, 51, 37)], ids=str)
def test_torchs_own_attention_agrees_with_fp64_on_rows_that_see_a_key(mask, sizes):
    case = Cell(Problem("fp16", 64, 64, mask), sizes)
    q, k, v = inputs(case, device="cpu")
    exact, _ = reference(q, k, v, mask=mask, scale=0.125)
    ours = torch_math(q, k, v, mask=mask, scale=0.125)
    visible = rows_with_keys(case)
    assert visible.sum() >= 37
    assert (ours - exact)[:, visible].abs().max() < 2e-3


TRAPS = [
    Sizes(1, 1, 1, 1, 1),
    Sizes(2, 4, 2, 33, 70),
    Sizes(2, 2, 1, 90, 33),
    Sizes(2, 2, 2, 9, 0),
    Sizes(2, 2, 2, 0, 9),
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sizes", TRAPS, ids=str)
def test_the_emulated_schedule_is_within_the_bounds_of_a_kernel(dtype, mask, sizes):
    schedule = planned(mask, dtype)
    case = cell_of(schedule, sizes)
    error = shape_error(
        case,
        lambda q, k, v, scale: emulator.emulate(schedule, q, k, v, scale),
        *inputs(case, device="cpu"),
    )
    assert error.ok, error


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("one output off", lambda out, lse: out[0, 0].add_(0.05)),
        ("one output not written", lambda out, lse: out[-1, -1, -1, -1:].fill_(math.nan)),
        ("one log-sum-exp off", lambda out, lse: lse[0, -1, -1:].add_(0.01)),
        ("one log-sum-exp not written", lambda out, lse: lse[0, -1, -1:].fill_(math.nan)),
        ("a masked row not zero", lambda out, lse: out[0, 0].fill_(1e-4)),
        ("a masked row's log-sum-exp finite", lambda out, lse: lse[0, 0, :1].fill_(-1e30)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_wrong_output_is_noticed(what, spoil):
    schedule = planned("causal")
    case = cell_of(schedule, Sizes(1, 2, 2, 90, 33))

    def kernel(q, k, v, scale):
        out, lse = emulator.emulate(schedule, q, k, v, scale)
        spoil(out, lse)
        return out, lse

    assert not shape_error(case, kernel, *inputs(case, device="cpu")).ok


# ---- timing


def test_both_regimes_are_those_of_the_targets():
    assert (SUSTAINED.warm, SUSTAINED.timed, SUSTAINED.rounds) == (0.150, 0.150, 3)
    assert (BURST.idle, BURST.timed, BURST.rounds) == (0.040, 0.006, 5)
    assert repeats(BURST.warm, 1e-4) == 1


def test_each_round_runs_everything_once_in_an_order_of_its_own():
    names = ["a", "b", "c", "d"]
    rounds = orders(names, 8, seed=1)
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    assert rounds == orders(names, 8, seed=1)


@pytest.mark.parametrize("seed", range(20))
def test_of_three_implementations_none_always_comes_after_the_same_one(seed):
    rounds = orders(["a", "b", "c"], 3, seed)
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    after_a = {order[(order.index("a") + 1) % 3] for order in rounds}
    assert after_a == {"b", "c"}
    assert orders(["a", "b"], 4, seed)[0::2] == [orders(["a", "b"], 4, seed)[0]] * 2
    assert orders(["a"], 3, seed) == [["a"]] * 3


def test_calls_repeat_until_they_fill_the_time():
    assert repeats(0.150, 0.001) == 150
    assert repeats(0.006, 0.020) == 1
    assert repeats(0.006, 0.0) > 0


def test_a_timing_is_a_median_and_a_spread():
    assert summary([2.0, 1.0, 4.0], [1500, 1600, 1530]) == Timing(2.0, 1.5, 1530)
    assert summary([1.0], []).sm_clock_mhz is None


def test_a_machine_without_a_hopper_gpu_is_refused_in_words():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match="Hopper"):
        hopper()
    assert Clock().mhz() is None


def test_an_unknown_peer_is_refused_with_those_there_are():
    with pytest.raises(DeviceError, match=", ".join(PEERS)):
        peer("fa9")


HEADINGS = [
    "Memory efficient kernel not used because: (Triggered internally at /pytorch/sdp.cpp:915.)",
    "Memory Efficient attention has been runtime disabled. (Triggered internally at /x.h:552.)",
    "Flash attention kernel not used because: (Triggered internally at /pytorch/sdp.cpp:917.)",
    "Flash needs a   last stride of 1. (Triggered internally at /pytorch/sdp.h:1.)",
    "CuDNN attention kernel not used because: (Triggered internally at /pytorch/sdp.cpp:919.)",
    "head_dim should be no more than 256. (Triggered internally at /pytorch/sdp.h:2.)",
    "No available kernel. Aborting execution.",
]


def test_of_all_that_torch_says_the_reason_is_the_line_about_the_backend_that_was_asked():
    assert reason(HEADINGS, "cudnn") == "head_dim should be no more than 256"
    assert reason(HEADINGS, "flash") == "Flash needs a last stride of 1"
    assert reason(["out of memory"], "cudnn") == reason(["out of memory"], "") == "out of memory"


def test_cudnn_has_no_causal_mask_of_the_bottom_right_and_fa2_has(monkeypatch):
    monkeypatch.setattr("fagen.measure.peers.sdpa_kernel", lambda backend: nullcontext())
    case = Cell(Problem("fp16", 64, 64, "causal"), Sizes(2, 4, 4, 33, 70))
    q, k, v = inputs(case, device="cpu")
    with pytest.raises(DeviceError, match="top left"):
        peer("cudnn").bind(case, q, k, v)
    exact, _ = reference(q, k, v, mask="causal", scale=1 / 8)
    out = peer("fa2").bind(case, q, k, v).once()
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


# ---- a cell, with the clock replaced


@pytest.fixture
def timed(monkeypatch):
    """Race on a CPU."""
    race_on_a_cpu(monkeypatch)


def exact_implementation(name, schedule=None, off=0.0):
    def bind(case, q, k, v):
        mask, scale = case.problem.mask, softmax_scale(case.problem.head_dim)
        return Call(lambda: reference(q, k, v, mask=mask, scale=scale)[0].half() + off)

    return Implementation(name, bind, schedule)


def test_a_cell_gives_a_row_for_everybody_who_can_and_says_why_another_cannot(timed):
    def refuse(case, q, k, v):
        raise DeviceError("no such head dim")

    lines, left_out = [], []
    case = Cell(Problem("fp16", 64, 64, "causal"), Sizes(1, 2, 2, 40, 40))
    rows = race(
        case,
        [
            exact_implementation("fagen", "slug"),
            exact_implementation("cudnn"),
            Implementation("fa2", refuse),
        ],
        progress=lines.append,
        left_out=lambda *who: left_out.append(who),
    )
    assert left_out == [("fa2", "no such head dim")]
    assert [(r.implementation, r.schedule, r.regime) for r in rows] == [
        ("fagen", "slug", "sustained"),
        ("cudnn", None, "sustained"),
        ("fagen", "slug", "burst"),
        ("cudnn", None, "burst"),
    ]
    assert rows[0].tflops == pytest.approx(case.flops / 1e-3 / 1e12)
    assert any("fa2" in line and "no such head dim" in line for line in lines)


def test_a_kernel_that_computes_something_else_is_not_timed(timed):
    case = Cell(Problem("fp16", 64, 64, "full"), Sizes(1, 2, 2, 40, 40))
    wrong = exact_implementation("fagen", "slug", off=0.1)
    with pytest.raises(VerificationError, match="slug differs from cudnn"):
        race(case, [wrong, exact_implementation("cudnn")], progress=None)


def test_what_a_peer_does_with_rows_that_see_no_key_is_its_own_affair(timed):
    def bind(case, q, k, v):
        call = exact_implementation("fa2").bind(case, q, k, v)
        return Call(
            lambda: torch.cat([torch.full_like(q[:, :20], math.nan), call.run()[:, 20:]], 1)
        )

    case = Cell(Problem("fp16", 64, 64, "causal"), Sizes(1, 2, 2, 60, 40))
    fa2, ours = Implementation("fa2", bind), exact_implementation("fagen", "slug")
    assert len(race(case, [ours, fa2], progress=None)) == 4
    with pytest.raises(VerificationError):
        wrong = exact_implementation("fagen", "slug", off=0.1)
        race(case, [wrong, fa2], progress=None)


def test_the_evidence_records_cudnn_of_the_same_regime():
    recorded = speeds((row("fagen", 600.0), row("cudnn", 500.0), row("cudnn", 1.0, "burst")))
    assert [(s.regime, s.tflops, s.cudnn_tflops) for s in recorded] == [("sustained", 600.0, 500.0)]
    assert speeds((row("fagen"),))[0].cudnn_tflops is None


# ---- rows


def test_rows_read_back_as_written_to_four_digits(tmp_path):
    path = tmp_path / "rows.json"
    write_rows(path, [row(tflops=512.3456), row("cudnn", sm_clock_mhz=None)])
    assert read_rows(path) == (row(tflops=512.3), row("cudnn", sm_clock_mhz=None))
    assert path.read_text().startswith('[\n{"dtype": "fp16", "head_dim": 128')


def test_a_row_with_other_fields_is_refused_by_name(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"dtype": "fp16", "speed": 3}]')
    with pytest.raises(FagenError, match="speed"):
        read_rows(path)


def test_a_geomean_is_the_root_of_the_product():
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geomean([]))


def test_ratios_pair_the_same_problem_and_regime_and_take_the_fastest_schedule():
    rows = [
        row("fagen", 450.0, schedule="a"),
        row("fagen", 550.0, schedule="b"),
        row("cudnn", 500.0),
        row("fagen", 700.0, "burst"),
        row("fagen", 100.0, seqlen_q=512, seqlen_k=512),
    ]
    assert list(ratios(rows, "sustained").values()) == [pytest.approx(1.1)]
    assert ratios(rows, "burst") == {}


def test_the_table_shows_each_problem_once_and_the_geomeans_per_head_dim():
    rows = [
        row("fagen", 550.0), row("cudnn", 500.0),
        row("fagen", 660.0, "burst"), row("cudnn", 600.0, "burst"),
        row("fagen", 400.0, head_dim=64, head_dim_v=64),
        row("cudnn", 500.0, head_dim=64, head_dim_v=64),
        row("fa2", 300.0, mask="causal"),
    ]  # fmt: skip
    text = table(rows)
    head = text.splitlines()[0]
    assert "cuDNN sustained" in head and "fagen ÷ cuDNN burst" in head
    body = [line for line in text.splitlines() if line.startswith("|") and "4096" in line]
    assert len(body) == 3
    assert "550 @1500" in text and "660 @" not in text
    means = geomeans(rows).splitlines()
    assert [line.split("|")[2].strip() for line in means if "fp16" in line] == ["64", "128", "all"]
    everything = means[-1]
    assert f"{math.sqrt(1.1 * 0.8):.3f}" in everything and "0.80" in everything


def test_groups_of_any_kind_have_means_and_those_without_the_yardstick_are_left_out():
    some = [row("fagen", 550.0), row("cudnn", 500.0)]
    more = [row("fagen", 300.0, seqlen_q=1), row("fa2", 150.0, seqlen_q=1)]
    groups = {("some",): some, ("more",): more, ("all",): some + more}
    cells = [line.split("|")[1:5] for line in means(["group"], groups).splitlines()[4:]]
    assert [[cell.strip() for cell in line] for line in cells] == [
        ["some", "1", "1.100", "1.10"],
        ["all", "1", "1.100", "1.10"],
    ]
    assert "2.000" in means(["group"], groups, over="fa2")


def test_a_table_of_nothing_says_so_and_one_without_a_yardstick_has_no_ratio():
    assert "nothing" in table([])
    assert "÷" not in table([row("fagen")])


@pytest.mark.parametrize(
    ("note", "error"),
    [(NO_DISASSEMBLER, ToolchainError), ("not read, it is odd", BuildError)],
)
def test_evidence_is_of_machine_code_that_can_be_read(note, error):
    unread = CompilerReport(168, 1, 0, 0, 0, (), machine_note=note)
    with pytest.raises(error, match="a kernel: machine code not read"):
        machine_code(SimpleNamespace(slug="a kernel", report=unread))


def test_an_eager_peer_is_its_own_backend_whenever_it_is_called(monkeypatch):
    torchs, backends = torch.backends.cuda, []

    def attend(*tensors, enable_gqa):
        backends.append((torchs.flash_sdp_enabled(), torchs.cudnn_sdp_enabled()))

    monkeypatch.setattr(rotating.functional, "scaled_dot_product_attention", attend)
    q, kv = torch.zeros(1, 1, 2, 64), torch.zeros(1, 3, 1, 64)
    call = rotating._peer(SDPBackend.FLASH_ATTENTION, q, [(kv, kv)] * 3, eager=True)
    with call.within():
        call.run()
    assert backends == [(True, False)] * 6

    def refuse(*tensors, enable_gqa):
        raise RuntimeError("no such backend")

    monkeypatch.setattr(rotating.functional, "scaled_dot_product_attention", refuse)
    assert rotating._peer(SDPBackend.FLASH_ATTENTION, q, [(kv, kv)], eager=True) is None
