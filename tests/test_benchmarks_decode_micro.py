"""benchmarks/decode_micro.py without a GPU: what is predicted, processes that end, the page."""

import json
import shutil

import pytest

from tests.benchmark_helpers import refused_without_a_gpu

READ = {
    "row": 0, "what": "33 MB, hd128", "mb": 33.5544, "in_flight_kb": 16, "unit": "GB/s",
    "value": 1_234.5,
}  # fmt: skip


@pytest.fixture
def micro(script):
    return script("decode_micro")


@pytest.fixture
def program(tmp_path):
    """A program in the place of a binary: lines of shell, which have the file and a number."""

    def made(*lines):
        path = tmp_path / "program"
        helpers = """row() { echo "{\\"row\\": $1, \\"what\\": \\"r$1\\", $2}" >> "$rows"; }
begun() { row $1 '"begun": true'; }
found() { begun $1; row $1 "\\"value\\": $2"; }"""
        path.write_text("\n".join(["#!/bin/sh", "rows=$1 first=$2", helpers, *lines]) + "\n")
        path.chmod(0o755)
        return path

    return made


def said(rows):
    return {row["row"]: row.get("value", row.get("error")) for row in rows}


# ---- what a model says ---------------------------------------------------------------------------


def test_every_source_is_a_program_and_the_other_way_round(micro):
    assert {path.stem for path in micro.SOURCES.glob("*.cu")} == set(micro.PROGRAMS)


@pytest.mark.parametrize(
    "program, row, predicted",
    [
        # 16 KB in flight of 132 multiprocessors every microsecond, and what a launch adds
        ("read", READ, f"{33.5544e3 / (3.5 + 33.5544e3 / (16 * 1024 * 132 / 1e3)):.0f}"),
        # far above the ceiling
        ("read", READ | {"mb": 1e6, "in_flight_kb": 192}, "4600"),
        ("clusters", {"what": "clusters of 8 at 75 KB", "size": 8, "kb": 75}, "≤ 49"),
        ("clusters", {"what": "clusters of 16 at 220 KB", "size": 16, "kb": 220}, "≤ 8"),
        ("wgmma", {"what": "m64n8k16, A from shared memory, 1 warpgroup(s)"}, "18"),
        ("wgmma", {"what": "m64n8k16, A from registers, 1 warpgroup(s)"}, "4"),
        ("wgmma", {"what": "m64n64k16, A from shared memory, 2 warpgroup(s)"}, "32"),
        ("wgmma", {"what": "m64n8k16, A from shared memory, eight and their wait, 1"}, "> 144"),
        ("launch", {"what": "plain, alone, eager"}, "3"),
        ("launch", {"what": "plain, 75 KB, alone, eager"}, ""),
        ("combine", {"what": "second launch, 8 splits"}, "1–2"),
        ("combine", {"what": "second launch with PDL, triggered first, 8 splits"}, "< 1–2"),
        ("convert", {"what": "ld.shared.v4, 4 warps"}, "128"),
        ("convert", {"what": "ld.shared.v4, PRMT and cvt, 4 warps"}, "20 wanted"),
        ("vote", {"what": "barrier.red.and"}, ""),
    ],
)
def test_what_is_predicted_of_a_row(micro, program, row, predicted):
    assert micro.PROGRAMS[program].predicted(row) == predicted


# ---- processes that end --------------------------------------------------------------------------


def test_rows_of_a_program_that_ends_well(micro, program):
    assert said(micro.measured(program("found 0 1.5", "found 1 2"))) == {0: 1.5, 1: 2}


def test_behind_a_process_that_loses_its_context_another_goes_on(micro, program):
    lost = program(
        "[ $first = 0 ] && { found 0 1; begun 1; echo unspecified launch failure >&2; exit 3; }",
        "found $first 7",
    )
    assert said(micro.measured(lost)) == {0: 1, 1: "unspecified launch failure", 2: 7}


def test_what_a_program_says_of_a_row_itself_stays(micro, program):
    failed = program('[ $first = 0 ] && { row 0 \'"error": "wrong"\'; exit 3; }', "found 1 7")
    assert said(micro.measured(failed)) == {0: "wrong", 1: 7}


def test_a_row_that_hangs_is_said_and_the_next_is_measured(micro, program):
    hanging = program("[ $first = 0 ] && { found 0 1; begun 1; sleep 60; }", "found 2 7")
    assert said(micro.measured(hanging, 0.5)) == {0: 1, 1: "did not finish in 0.5 s", 2: 7}


def test_a_program_that_hangs_in_every_row_gets_twice_the_limit(micro, program):
    found = micro.measured(program("begun $first; sleep 60"), 0.5)
    assert 2 <= len(found) <= 4
    assert found[-1]["error"] == "left out after 1 s"
    assert all("did not finish" in row["error"] for row in found[:-1])


def test_a_program_that_cannot_begin_is_one_row(micro, program):
    (row,) = micro.measured(program("echo no device >&2; exit 2"))
    assert row == {"row": 0, "what": "all that was to follow", "error": "no device"}


def test_half_a_line_is_no_row(micro, program):
    cut = "[ $first = 0 ] && { found 0 1; printf '{\"row\": 1' >> $rows; exit 3; }"
    assert said(micro.measured(program(cut, "found 1 2"))) == {0: 1, 1: 2}


# ---- what is said --------------------------------------------------------------------------------


@pytest.fixture
def timed(micro, made_up_gpu, monkeypatch, tmp_path):
    """decode_micro.py where reading gives one row, voting fails, and converting is not compiled."""
    rows = {
        "read": [READ],
        "vote": [{"row": 0, "what": "barrier", "unit": "clocks", "error": "lost | context\n719"}],
    }

    def compiled(name):
        refused = name == "convert"
        return (None, "error: no such instruction") if refused else (tmp_path / name, "")

    monkeypatch.setattr(micro, "_compiled", compiled)
    monkeypatch.setattr(micro, "measured", lambda binary, limit: rows[binary.name])
    return micro


def table_of(page, program):
    """Cells of a program's table, without its head."""
    text = page.partition(f"({program}.cu):\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()][2:]


def test_a_page_has_what_was_predicted_beside_what_was_measured(timed, tmp_path, capsys):
    assert timed.main(["--only", "read", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-decode-micro.json")
    page = path.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out
    predicted = timed.PROGRAMS["read"].predicted(READ)
    assert table_of(page, "read") == [["33 MB, hd128", "GB/s", predicted, "1234"]]
    assert json.loads(path.read_text())["rows"] == [{"program": "read", **READ}]
    path.with_suffix(".md").unlink()
    assert timed.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page


def test_what_fails_stands_in_its_row_and_the_others_are_measured(timed, tmp_path, capsys):
    asked = ["--only", "convert", "--only", "vote", "--only", "read"]
    assert timed.main([*asked, "--out", str(tmp_path)]) == 6
    (path,) = tmp_path.glob("nvidia-h200-*-decode-micro.json")
    page = path.with_suffix(".md").read_text()
    assert table_of(page, "vote") == [["barrier", "clocks", "–", "lost / context 719"]]
    assert table_of(page, "convert") == [["all that was to follow", "", "–", "not compiled"]]
    assert "- error: no such instruction: convert" in page
    assert len(table_of(page, "read")) == 1


def test_without_a_gpu_it_says_what_does_not_compile(timed, capsys):
    assert timed.main(["--compile", "--only", "read"]) == 0
    assert timed.main(["--compile", "--only", "read", "--only", "convert"]) == 4
    assert "convert: error: no such instruction" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--only", "nothing"], ["--limit", "0"], ["--limit", "inf"]])
def test_arguments_that_make_no_sense_are_refused(micro, asked, capsys):
    with pytest.raises(SystemExit) as refused:
        micro.main(asked)
    assert refused.value.code == 2


def test_without_a_hopper_gpu_it_says_so_and_writes_nothing(micro, tmp_path, capsys):
    assert refused_without_a_gpu(micro, tmp_path, capsys)


def test_a_program_compiles_and_says_that_there_is_no_gpu(micro, monkeypatch, tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    binary, remark = micro._compiled("clusters")
    assert binary and not remark
    (row,) = micro.measured(binary)
    assert row["what"] == "all that was to follow" and row["error"].startswith("the first kernel")


def test_a_program_that_does_not_compile_is_told_in_the_compiler_s_words(
    micro, monkeypatch, tmp_path
):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(micro, "SOURCES", tmp_path)
    (tmp_path / "micro.cuh").touch()
    (tmp_path / "vote.cu").write_text("int main() { return nonsense; }\n")
    binary, remark = micro._compiled("vote")
    assert binary is None and "nonsense" in remark and "\n" not in remark
