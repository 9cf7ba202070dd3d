"""Files with very many faults: the first are told, the others counted, and little time is spent."""

import time
from pathlib import Path

import pytest

import fagen
from fagen import registry, search, vendor
from fagen.dispatch import tables
from fagen.errors import FagenError, ScheduleError
from fagen.evidence import read_excuses
from fagen.schedule.faults import MOST
from fagen.search.recording import read_recording
from fagen.search.shapes import MAX_DRAWN, MAX_SEQUENCES
from tests.cli_helpers import SLUG
from tests.cli_helpers import fagen as command
from tests.evidence_helpers import stand_in

HEAD = '[attention]\ndtype = "fp16"\nmask = "full"\nhead_dim = 64\n'
VARLEN = f'{HEAD}lengths = "varlen"\n'
ONE = "[tile]\nblock_m = 64\nblock_n = 64\n"  # of each, or its points were too many
SECONDS = 2.0  # of a processor, half of them for one that is slow
LINE = 400  # bytes of a message's line


def refused(read, *args) -> str:
    """The words by which something is refused, after little time and not too many of them."""
    began = time.process_time()
    with pytest.raises(FagenError) as refusal:
        read(*args)
    assert time.process_time() - began < SECONDS
    output = str(refusal.value)
    assert len(output) < (MOST + 1) * LINE and all(map(str.isprintable, output.splitlines()))
    return output


def in_a_list(items: str, key: str = "head_dim") -> str:
    return HEAD.replace("head_dim = 64", f"{key} = [\n{items}]")


SPACES = {
    "shapes without a key": (HEAD + "[[shapes]]\n" * 23_000, "and 22,980 more"),
    "shapes with unknown keys": (HEAD + "[[shapes]]\nseqlen = 1\nfoo = 1\n" * 7_500, "7,480 more"),
    "heads that do not divide": (
        HEAD + ONE + "[[shapes]]\nseqlen=1\nheads=1048573\nkv_heads=1048572\n" * 4_800,
        "nearest that does is 1\n",
    ),
    "bad values": (in_a_list("7,\n" * 80_000), "in steps of 8"),
    "bad values of many kinds": (in_a_list("[],\n" * 60_000), "more than 20 of its 60,000 values"),
    "bad words": (in_a_list('"x",\n' * 50_000), "must be"),
    "unknown keys": (HEAD + "".join(f"k{n} = 1\n" for n in range(20_000)), "and 19,980 more"),
    "unknown tables": (HEAD + "".join(f"[k{n}]\n" for n in range(9_000)), "and 8,980 more"),
    "lengths that are drawn": (
        VARLEN + "[[shapes]]\nbatch = 16384\nseqlens = { from = 1, to = 2 }\n" * 900,
        f"shapes.{MAX_DRAWN // MAX_SEQUENCES} draws more lengths",
    ),
    "sequences beyond count": (
        VARLEN + "[[shapes]]\nseqlen = 1\nbatch = 16384\n" * 7_000,
        "times at most",
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_of_very_many_faults_of_a_space_the_first_are_told_and_the_others_counted(name, tmp_path):
    text, words = SPACES[name]
    path = tmp_path / "x.toml"
    path.write_text(text)
    message = refused(search.read_spaces, path)
    assert words in message and message.count("\n") <= MOST
    assert all(line.startswith(str(path)) for line in message.splitlines())
    if name == "unknown tables":
        assert refused(read_recording, path) == message


def test_a_schedule_with_very_many_faults_is_refused_in_a_few_lines(tmp_path):
    text = HEAD + "".join(f"k{n}=1\n" for n in range(1_500))
    message = refused(registry.parse, text)
    assert message.splitlines()[-1] == "schedule: and 1,481 more" and message.count("\n") == MOST
    tables_of = "".join(f"[k{n}]\n" for n in range(1_900))
    assert "and 1,8" in refused(registry.parse, tables_of)
    # in the order of the file, those that are told
    message = [*map(int, (line.split(":")[1] for line in message.splitlines()[1:-1]))]
    assert message == sorted(message)


def test_few_faults_are_all_told():
    message = refused(registry.parse, HEAD + "".join(f"k{n}=1\n" for n in range(MOST - 1)))
    assert message.count("\n") == MOST - 1 and "more" not in message


def test_other_files_stop_at_their_first_fault_in_little_time(tmp_path, monkeypatch):
    table, manifest = tmp_path / "dispatch.toml", tmp_path / "vendor.toml"
    table.write_text(f'[[kernel]]\ncard = "x"\nslug = "{SLUG}"\n' + "[[kernel]]\n" * 11_000)
    assert ":4: [[kernel]] number 2: without card" in refused(tables.table_at, table)
    manifest.write_text('name = "demo"\n[kernels]\n' + "".join(f"k{n}=1\n" for n in range(256)))
    assert ":3: kernels.k0 = 1 is neither" in refused(vendor.read, manifest)
    (tmp_path / "unverified.toml").write_text("".join(f"[k{n}]\n" for n in range(14_000)))
    stand_in(tmp_path, monkeypatch)
    assert "[k0] needs a date" in refused(read_excuses)


@pytest.mark.parametrize("size", [20_000, 4_000_000])
def test_a_text_has_the_size_limit_of_a_file(size):
    message = refused(fagen.parse_schedule, "#" * 99 + "\n" * size)
    assert message == "schedule: longer than 16,384 bytes; this is no schedule"
    spaces = "\N{SNOWMAN}\n" * (size // 4 + 66_000)
    assert "longer than 262,144 bytes" in refused(search.files.parse_spaces, spaces, "x")


def test_arguments_of_another_type_are_named():
    for call, args, message in (
        (fagen.read_schedule, (99,), "read_schedule: path is of type int"),
        (fagen.read_schedule, (None,), "read_schedule: path is of type NoneType"),
        (fagen.read_schedule, (b"x",), "read_schedule: path is of type bytes"),
        (fagen.parse_schedule, (b"x",), "parse_schedule: text is of type bytes"),
        (fagen.parse_schedule, ("", 3), "parse_schedule: where is of type int"),
        (fagen.recording(3).__enter__, (), "recording: path is of type int"),
        (fagen.Schedule.from_slug, (99,), "from_slug: slug is of type int"),
    ):
        with pytest.raises(TypeError, match=message):
            call(*args)
    for name in ("a\0", Path("b\0c")):
        with pytest.raises(FagenError, match="no file is called so"):
            fagen.read_schedule(name)
    with pytest.raises(ScheduleError, match="cannot be read"):
        fagen.read_schedule("nowhere")


@pytest.mark.parametrize(
    "words",
    [
        "search run x.toml --jobs 1025",
        "search run x.toml --jobs 99999999999999999999",
        f"simulate {SLUG} --seeds 10001",
        f"bench {SLUG} --shape 1,1,1,1,{2**30 + 1}",
        "pick --dtype fp16 --head-dim 128 --batch 99999999999999999999",
    ],
)
def test_a_count_has_an_upper_end(words):
    answer = command(*words.split())
    assert answer.exit_code in (1, 2) and "fault" not in answer.stderr, answer.stderr


def test_a_search_takes_so_many_jobs_and_no_more(tmp_path):
    with pytest.raises(FagenError, match="jobs is 100000; it must be from 1 to 1,024"):
        search.search((), tmp_path / "s", jobs=100_000)
