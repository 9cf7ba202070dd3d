"""benchmarks/peers.py without a GPU: its calls, its yardstick, what it writes."""

import json

import pytest


@pytest.fixture
def peers(script):
    return script("peers")


def test_calls_of_the_csv_have_a_peer_or_are_said_to_have_none(peers):
    figures = list(peers.figures())
    assert len(figures) == 254
    assert sum(not figure.csv_us for figure in figures) == 4
    for figure in figures:
        call = figure.call
        assert bool(call.lengths) == (call.kind in (*peers.OF_LENGTHS, peers.DECODE_MIXED))
        assert not call.lengths or len(call.lengths) == call.batch


def test_packed_lengths_are_read(peers):
    assert list(peers.unpacked("3 5*2 7")) == [3, 5, 5, 7]


def test_drawn_calls_are_the_same_for_a_seed_and_of_all_kinds(peers):
    some, again, others = (list(peers.drawn(60, seed)) for seed in (1, 1, 2))
    assert some == again != others
    assert {figure.call.kind for figure in some} == set(peers.KINDS)


@pytest.mark.parametrize(
    ("csv_us", "us", "value"),
    [
        # half the time of before, which was 0.8 of the best peer
        ({"fagen": 10.0, "fa3": 8.0, "cudnn": 9.0}, {"fagen": [5.0], "before": [10.0]}, 1.6),
        # FlashAttention-3 on a card that is half as fast as that of the csv
        ({"fagen": 10.0, "fa3": 2.0, "cudnn": 3.0}, {"fagen": [5.0], "cudnn": [6.0]}, 0.8),
        ({}, {"fagen": [5.0], "before": [4.0], "cudnn": [6.0]}, 1.2),
    ],
)
def test_the_yardstick_is_of_the_csv_where_before_was_timed_and_else_of_who_was(
    peers, csv_us, us, value
):
    call = next(peers.figures()).call
    assert peers.Figure(call, csv_us, us).values == pytest.approx([value])


def test_who_is_below_in_every_repeat_is_behind(peers):
    assert peers.is_behind({"values": [0.95, 0.98, 0.985]})
    assert not peers.is_behind({"values": [0.95, 0.995, 0.90]})


def test_a_run_is_written_and_read_back(peers, tmp_path):
    figures = [figure for figure in peers.figures() if figure.csv_us][:3]
    for at, figure in enumerate(figures):
        figure.us = {"fagen": [10.0] * 3, "before": [10.0] * 3, "cudnn": [9.0 + at] * 3}
    about = {"card": "NVIDIA H100", "driver": "1", "cuda": "13", "torch": "2", "cudnn": "9"}
    about |= {"date": "2026-11-27", "before": "old", "notes": {}, "random": 0, "seed": 0}
    run = peers.Run(tmp_path, "card-peers", about, rows=[figure.row() for figure in figures])
    run.save()
    peers.page(peers.Run.read(tmp_path / "card-peers.json"))
    page = (tmp_path / "card-peers.md").read_text()
    for figure in figures:
        assert figure.call.shape in page
    assert json.loads((tmp_path / "card-peers.json").read_text())["rows"][0]["values"]
