"""What compute-sanitizer says of kernels: which findings are known to be harmless, and all others.

The files in tests/sanitizer_said are what it said of kernels on an H200.
"""

import os
from pathlib import Path

import pytest

from fagen import registry
from fagen.render import render
from tests.gpu.sanitizer import O_AFTER_THE_LAST_WAIT, TILE_READ_BY_ALL_LANES, fault, findings
from tests.gpu.test_memory import ROOT, python_path

FOUND = 9
SAID = {path.stem: path.read_text() for path in Path(__file__).parent.glob("sanitizer_said/*.txt")}
HARMLESS = {"synccheck": O_AFTER_THE_LAST_WAIT, "racecheck": TILE_READ_BY_ALL_LANES}
CLEAN = """========= COMPUTE-SANITIZER
fwd_fp16_d128_causal_m128n128 1,1,1,1,1: as it should be
========= ERROR SUMMARY: 0 errors
"""


def changed(tool: str, *changes: tuple[str, str], count: int = -1) -> str:
    said = SAID[tool]
    for old, new in changes:
        assert old in said
        said = said.replace(old, new, count)
    return said


def test_findings_are_read_one_by_one():
    found = findings(SAID["synccheck"], "synccheck")
    assert len(found) == 4
    assert {first for first, *_ in found} == {"Barrier error detected. Missing wait."}
    assert found[1][2] == "by thread (256,0,0) in block (0,0,0)"
    found = findings(SAID["racecheck"], "racecheck")
    assert [len(one) for one in found] == [2, 3]
    assert findings(CLEAN, "synccheck") == ()


@pytest.mark.parametrize("tool", HARMLESS)
def test_what_is_known_to_be_harmless_is_let_pass_where_it_may_be(tool):
    assert fault(SAID[tool], tool, FOUND, HARMLESS.values()) is None
    assert fault(SAID[tool], tool, FOUND)  # not of any kernel
    (other,) = (one for name, one in HARMLESS.items() if name != tool)
    assert fault(SAID[tool], tool, FOUND, [other])


def test_a_run_without_findings_passes_only_if_it_ended_well():
    assert fault(CLEAN, "synccheck", 0) is None
    assert fault(CLEAN, "memcheck", 0) is None
    assert fault(CLEAN, "synccheck", 1)
    assert fault(CLEAN.replace("0 errors", "3 errors"), "synccheck", 0)
    assert fault("no summary", "synccheck", 0)


OTHERS = {
    "a barrier that another function misuses": (
        "synccheck",
        ("_kernel::Consumer::store(", "_kernel::Consumer::mainloop("),
    ),
    "another misuse": ("synccheck", ("Missing wait.", "Divergent thread(s) in block.")),
    "another instruction of that function": (
        "synccheck",
        ("ClusterBarrier::arrive", "ClusterBarrier::wait"),
    ),
    "an arrival deeper in that function": (
        "synccheck",
        ("arrive() const+0xf140 in barrier.h:377", "arrive() const+0xf140 in barrier.h:377\n"
         "=========         Device Frame: fagen_x_kernel::release()+0x1 in x.cu:1"),
    ),
    "another reader": ("racecheck", ("_kernel::Tiles::next(", "_kernel::Consumer::run(")),
    "tiles without keys": ("racecheck", ("_kernel::Tiles::next(", "_kernel::EmptyTiles::next(")),
    "another writer": (
        "racecheck",
        ("_kernel::TileScheduler::next(", "_kernel::ScaleProducer::write("),
    ),
    "writers on both sides": ("racecheck", ("Read access", "Write access")),
    "another access beside": ("racecheck", ("and Write access", "and Read access")),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("count", [1, -1], ids=["once", "everywhere"])
def test_any_other_finding_fails(other, count):
    tool, change = OTHERS[other]
    assert fault(changed(tool, change, count=count), tool, FOUND, HARMLESS.values())


def test_the_last_of_several_accesses_fails_too():
    said = SAID["racecheck"]
    at = said.rindex("TileScheduler::next")
    said = said[:at] + said[at:].replace("TileScheduler::next", "ScaleProducer::write", 1)
    assert fault(said, "racecheck", FOUND, HARMLESS.values())


def test_findings_that_are_counted_but_not_shown_fail():
    for tool, few, more in (("synccheck", "4 errors", "5 errors"), ("racecheck", "2 h", "3 h")):
        assert fault(changed(tool, (few, more)), tool, FOUND, HARMLESS.values())


def test_a_program_whose_numbers_are_wrong_fails_beside_what_is_harmless():
    wrong = changed("racecheck", (
        "========= RACECHECK", "========= Target application returned an error\n========= RACECHECK"
    ))  # fmt: skip
    assert fault(wrong, "racecheck", FOUND, HARMLESS.values())
    wrong = changed("synccheck", ("cuCtxSynchronize: CUDA error 719", "outputs are no mean"))
    assert fault(wrong, "synccheck", FOUND, HARMLESS.values())


def test_a_program_that_did_not_start_fails():
    said = "========= COMPUTE-SANITIZER\n========= Error: Target application terminated before\n"
    assert fault(said, "memcheck", 255)


def text_of(slug: str) -> str:
    return render(registry.plan_of(slug)).kernel


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_bf16_d192v128_causal_m128n128_vspace_eachmax",
        "fwd_bf16_d128_causal_m128n96_s3_q2_vspace",
    ],
)
def test_the_one_barrier_that_a_consumer_arrives_at_while_it_stores_is_o_empty(slug):
    text = text_of(slug)
    store = text[text.index("void store(const Tile& tile") :].split("void run()")[0]
    arrivals = [line.strip() for line in store.splitlines() if ".arrive(" in line]
    assert arrivals == ["shared.o_empty.arrive();"]


def test_the_shared_memory_that_passes_tiles_on_is_read_and_released_in_this_order():
    text = text_of("fwd_fp16_d128_causal_m128n128")
    read = text[text.index("bool next(const Params&, Tile& tile)") :].split("return")[0]
    steps = ["tile_full[stage].wait", "tile = shared.tiles", "__syncwarp", "tile_empty[stage].arr"]
    assert [read.index(step) for step in steps] == sorted(read.index(step) for step in steps)
    write = text[text.index("bool next(Tile& tile)") :].split("return")[0]
    steps = ["tile_empty[stage].wait", "shared.tiles[stage] = tile", "tile_full[stage].arrive"]
    assert [write.index(step) for step in steps] == sorted(write.index(step) for step in steps)


def test_a_program_under_the_sanitizer_finds_what_this_process_does(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/one", "/other"]))
    assert python_path()["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/one", "/other"]
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == {"PYTHONPATH": str(ROOT)}
