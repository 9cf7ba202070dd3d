"""What compute-sanitizer says of kernels: which findings are known to be harmless, and all others.

The files in tests/sanitizer_said are what it said of kernels on an H200 or H100.
"""

import os
from pathlib import Path

import pytest

from fagen import registry
from fagen.render import render
from tests.gpu.sanitizer import (
    HINT_TO_STOP,
    O_AFTER_THE_LAST_WAIT,
    P_READ_BY_ALL_LANES,
    SCALES_READ_BY_ALL_LANES,
    TILE_READ_BY_ALL_LANES,
    TILE_WRITTEN_BY_ANY_LANE,
    fault,
    findings,
)
from tests.gpu.test_memory import OTHER_FORMS, ROOT, SIZES, TOOLS, form_of, python_path, sizes_of

FOUND = 9
SAID = {path.stem: path.read_text() for path in Path(__file__).parent.glob("sanitizer_said/*.txt")}
HARMLESS = {
    "synccheck": (O_AFTER_THE_LAST_WAIT,),
    "racecheck": TILE_READ_BY_ALL_LANES,
    "racecheck_scales": (*TILE_READ_BY_ALL_LANES, *SCALES_READ_BY_ALL_LANES),
    "racecheck_p": P_READ_BY_ALL_LANES,
    "racecheck_hint": HINT_TO_STOP,
    "racecheck_tile": TILE_WRITTEN_BY_ANY_LANE,
}
ALL = (
    O_AFTER_THE_LAST_WAIT,
    *TILE_READ_BY_ALL_LANES,
    *SCALES_READ_BY_ALL_LANES,
    *P_READ_BY_ALL_LANES,
    *HINT_TO_STOP,
    *TILE_WRITTEN_BY_ANY_LANE,
)
CLEAN = """========= COMPUTE-SANITIZER
fwd_fp16_d128_causal_m128n128 1,1,1,1,1: as it should be
========= ERROR SUMMARY: 0 errors
"""


def tool_of(name: str) -> str:
    return name.partition("_")[0]


def changed(name: str, *changes: tuple[str, str], count: int = -1) -> str:
    text = SAID[name]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, count)
    return text


def test_findings_are_read_one_by_one():
    results = findings(SAID["synccheck"], "synccheck")
    assert len(results) == 4
    assert {first for first, *_ in results} == {"Barrier error detected. Missing wait."}
    assert results[1][2] == "by thread (256,0,0) in block (0,0,0)"
    results = findings(SAID["racecheck"], "racecheck")
    assert [len(finding) for finding in results] == [2, 3]
    results = findings(SAID["racecheck_scales"], "racecheck")
    assert [len(finding) for finding in results] == [3, 5, 4, 6, 6]
    assert findings(CLEAN, "synccheck") == ()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_known_to_be_harmless_is_let_pass_where_it_may_be(name):
    text, tool = SAID[name], tool_of(name)
    assert fault(text, tool, FOUND, HARMLESS[name]) is None
    assert fault(text, tool, FOUND)  # not of any kernel
    assert fault(text, tool, FOUND, [x for x in ALL if x not in HARMLESS[name]])


@pytest.mark.parametrize("race", ["TileScheduler::next", "Descales::write"])
def test_one_race_that_is_none_does_not_excuse_another(race):
    excused = [harmless for harmless in ALL if race in harmless.first + harmless.following]
    wrong = fault(SAID["racecheck_scales"], "racecheck", FOUND, excused)
    assert wrong and race not in wrong and "Race reported" in wrong


def test_either_side_of_a_race_may_be_named_first():
    first, *others = findings(SAID["racecheck_scales"], "racecheck")[0]
    writer = first.removeprefix("Error: Race reported between ")
    for reader in others:
        reader, hazards = reader.removeprefix("and ").rsplit(" [", 1)
        turned = (f"Error: Race reported between {reader}", f"and {writer} [{hazards}")
        assert any(excuse.matches(turned) for excuse in SCALES_READ_BY_ALL_LANES)


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
        ("_kernel::TileScheduler::next(", "_kernel::Descales::write("),
    ),
    "writers on both sides": ("racecheck", ("Read access", "Write access")),
    "another access beside": ("racecheck", ("and Write access", "and Read access")),
    "scales that are read elsewhere": (
        "racecheck_scales", ("_kernel::Consumer::read_scales(", "_kernel::Consumer::store(")
    ),
    "scales that another writes": (
        "racecheck_scales",
        ("_kernel::Descales::write(", "_kernel::TileScheduler::next("),
    ),
    "scales that two write": ("racecheck_scales", ("and Read access", "and Write access")),
    "P that is written elsewhere": (
        "racecheck_p", ("ValueConsumer::step<(bool)0>(", "ValueConsumer::run(")
    ),
    "P that is read elsewhere": ("racecheck_p", ("KeyConsumer::step(", "KeyConsumer::run(")),
    "scales that are written while others write": (
        "racecheck_scales",
        ("Read access at fagen_fwd_e4m3_d80v48_causal_m64n32_vrows_sblock_sr32_kernel::Consumer::"
         "read_scales()", "Write access at fagen_fwd_e4m3_d80v48_causal_m64n32_vrows_sblock_sr32_"
         "kernel::Descales::write(float &) const"),
    ),
    "a tile of varlen sequences that another writes": (
        "racecheck_tile", ("_kernel::TileFinder::find(", "_kernel::Turns::give(")
    ),
    "that others read": ("racecheck_tile", ("_kernel::Consumer::", "_kernel::Loader::")),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("count", [1, -1], ids=["once", "everywhere"])
def test_any_other_finding_fails(other, count):
    name, change = OTHERS[other]
    assert fault(changed(name, change, count=count), tool_of(name), FOUND, ALL)


def test_the_last_of_several_accesses_fails_too():
    text = SAID["racecheck"]
    at = text.rindex("TileScheduler::next")
    text = text[:at] + text[at:].replace("TileScheduler::next", "Descales::write", 1)
    assert fault(text, "racecheck", FOUND, ALL)


def test_findings_that_are_counted_but_not_shown_fail():
    for tool, few, more in (("synccheck", "4 errors", "5 errors"), ("racecheck", "2 h", "3 h")):
        assert fault(changed(tool, (few, more)), tool, FOUND, ALL)


def test_a_program_whose_numbers_are_wrong_fails_beside_what_is_harmless():
    wrong = changed("racecheck", (
        "========= RACECHECK", "========= Target application returned an error\n========= RACECHECK"
    ))  # fmt: skip
    assert fault(wrong, "racecheck", FOUND, ALL)
    wrong = changed("synccheck", ("cuCtxSynchronize: CUDA error 719", "outputs are no mean"))
    assert fault(wrong, "synccheck", FOUND, ALL)


def test_a_program_that_did_not_start_fails():
    text = "========= COMPUTE-SANITIZER\n========= Error: Target application terminated before\n"
    assert fault(text, "memcheck", 255)


def text_of(slug: str) -> str:
    return render(registry.plan_of(slug)).kernel


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_bf16_d192v128_causal_m128n128_reusev_onlinemax",
        "fwd_bf16_d128_causal_m128n96_s3_q2_reusev",
    ],
)
def test_the_one_barrier_that_a_consumer_arrives_at_while_it_stores_is_o_empty(slug):
    text = text_of(slug)
    stores = text[text.index("void write(const Tile& tile") :].split("\n};\n")[0]
    arrivals = [line.strip() for line in stores.splitlines() if ".arrive(" in line]
    assert arrivals == ["shared.o_empty.arrive();"]


def test_the_shared_memory_that_passes_tiles_on_is_read_and_released_in_this_order():
    text = text_of("fwd_fp16_d128_causal_m128n128")
    read = text[text.index("bool next(const Params&, Tile& tile)") :].split("return")[0]
    steps = ["tile_full[stage].wait", "tile = shared.tiles", "__syncwarp", "tile_empty[stage].arr"]
    assert [read.index(step) for step in steps] == sorted(read.index(step) for step in steps)
    write = text[text.index("bool next(Tile& tile)") :].split("return")[0]
    steps = ["tile_empty[stage].wait", "shared.tiles[stage] = tile", "tile_full[stage].arrive"]
    assert [write.index(step) for step in steps] == sorted(write.index(step) for step in steps)


@pytest.mark.parametrize(
    "slug", ["fwd_e4m3_d80v48_causal_m64n32_vrows_sblock_sr32", "fwd_e4m3_d64_full_m128n64_sblock"]
)
def test_the_scales_of_a_block_are_read_before_k_is_released_and_written_after(slug):
    text = text_of(slug)
    read = text[text.index("void read_scales()") :].split("}\n\n")[0]
    steps = ["key_scales[g] = shared.scales[k.stage]", "__syncwarp"]
    assert [read.index(step) for step in steps] == sorted(read.index(step) for step in steps)
    finish = text[text.index("void finish_qk(") :].split("}\n\n")[0]
    assert finish.index("read_scales();") < finish.index("release_k();")
    assert "release(shared.k_empty[k.stage]);" in text.split("void release_k()")[1].split("}")[0]
    write = text[text.index("void write(const Tile& tile") :].split("advance")[0]
    steps = ["k_empty[k.stage].wait", "__syncwarp", "shared.scales[k.stage]", "k_full[k.stage].arr"]
    assert [write.index(step) for step in steps] == sorted(write.index(step) for step in steps)


@pytest.mark.parametrize(
    "slug",
    ["bwd_fp16_d256_causal_m64n64_dss1_intra_c2", "bwd_bf16_d256_full_m64n64_varlen_dss1_intra_c2"],
)
def test_p_is_written_and_read_between_its_barriers(slug):
    text = text_of(slug)
    arrive = text.split("void arrive(Barrier& barrier) {")[1].split("}")[0]
    assert arrive.index("__syncwarp();") < arrive.index("barrier.arrive();")
    written = ("p_empty[ds().stage].wait", "] = {p[i]", "arrive(shared.p_full[ds().stage])")
    taken = ("p_full[ds().stage].wait", "= from[", "fence_operand(p);")
    given_back = ("take_p(p", "arrive(shared.p_empty[ds().stage])")
    for steps in (written, taken, given_back):
        last = text.index(steps[-1], text.index(steps[0]))
        function = text[text.rindex("void ", 0, last) : last + len(steps[-1])]
        places = [function.index(step) for step in steps]
        assert places == sorted(places)


def test_every_form_of_the_backward_pass_is_looked_at():
    committed = {path.stem for path in registry.schedules("backward")}
    assert set(map(form_of, committed)) <= set(map(form_of, (*SIZES, *OTHER_FORMS)))


@pytest.mark.parametrize("slug", [*SIZES, *OTHER_FORMS])
def test_a_call_under_the_sanitizers_has_all_sizes_that_its_tensors_name(slug):
    plan = registry.plan_of(slug)
    named = {dim.extent.name for tensor in plan.signature.inputs for dim in tensor.dims} - {""}
    for tool in TOOLS:
        assert named == {word.split("=")[0] for word in sizes_of(plan, tool)}


def test_a_program_under_the_sanitizer_finds_what_this_process_does(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/one", "/other"]))
    assert python_path()["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/one", "/other"]
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == {"PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
