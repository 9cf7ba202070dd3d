"""The command line: its help, its refusals, its streams and its exit codes."""

import json
import re
import sys

import click
import pytest
from click.testing import CliRunner

import cli
from fagen import flow, registry
from fagen.commandline.console import DefaultCommand
from fagen.process import run
from tests.cli_helpers import ALL, QUANTIZER, ROOT, SLUG, fagen


def commands(group: click.Group = cli.main, *above: str) -> dict[tuple[str, ...], click.Command]:
    every = {}
    for name, command in group.commands.items():
        every[*above, name] = command
        if isinstance(command, click.Group):
            every |= commands(command, *above, name)
    return every


# ---- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_has_help_with_examples_that_name_real_commands_and_options(path):
    answer = fagen(*path, "-h")
    assert answer.exit_code == 0
    assert answer.output == fagen(*path, "--help").output
    reports = not isinstance(commands()[path], click.Group) and path != ("schema",)
    assert ("--json" in answer.output) >= reports  # a schema is JSON in any case
    examples = re.findall(r"^ +fagen (.+)", answer.output.partition("Examples:")[2], re.M)
    assert examples, f"fagen {' '.join(path)} shows no example"
    for example in examples:
        words = re.split(r" [|>] ", example)[0].split()
        named = tuple(words[:2])
        command = commands()[named if named in commands() else named[:1]]
        if isinstance(command, DefaultCommand):
            command = next(iter(command.commands.values()))
        options = {
            option for param in command.params for option in param.opts + param.secondary_opts
        }
        assert {word for word in words if word.startswith("-")} <= options


def test_the_commands_are_listed_in_the_order_of_the_flow():
    listed = re.findall(r"^  (\w+)  ", fagen("-h").output.partition("Commands:")[2], re.M)
    assert listed[:4] == ["check", "generate", "build", "verify"]


def test_cli_py_and_the_module_are_the_same_program():
    output, other = (
        run([sys.executable, *words, "--version"], cwd=ROOT).stdout
        for words in (["cli.py"], ["-m", "fagen"])
    )
    assert output == other and output.startswith("fagen, version ")


# ---- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", [SLUG, QUANTIZER])
def test_a_path_a_slug_and_standard_input_name_the_same_schedule(slug):
    path = registry.committed_file(slug)
    by_path, by_slug = fagen("check", path), fagen("check", slug)
    by_input = fagen("check", "-", input=path.read_text())
    assert by_path.exit_code == 0
    assert by_path.output == by_slug.output == by_input.output
    assert by_path.output.startswith(f"{slug} fits\n")
    assert registry.plan(registry.from_slug(slug)).ledger in by_path.output
    without_file = "fwd_bf16_d72_full_m64n48"
    assert without_file not in ALL
    assert fagen("check", without_file).output.startswith(f"{without_file} fits")


def test_check_explains_itself():
    assert "so block_n <= " in fagen("check", "--explain", SLUG).output
    plain, explained = fagen("check", QUANTIZER), fagen("check", "--explain", QUANTIZER)
    assert plain.output in explained.output and len(explained.output) > len(plain.output)


def test_check_in_json_has_the_ledgers_with_their_sums_and_an_explanation():
    record = json.loads(fagen("check", "--json", SLUG).output)
    assert record["schedule"] == SLUG
    assert record["shared"]["total"] == sum(row["amount"] for row in record["shared"]["rows"])
    assert record["keys"]["block_n"] == 128
    explained = json.loads(fagen("check", "--json", "--explain", SLUG).stdout)
    assert explained == record | {"explanation": registry.plan_of(SLUG).explained()}


WRONG = {
    "nothing": b"",
    "no TOML": b"[attention\nhead_dim = 128",
    "no text": b"\xff\xfe\x00\x80",
    "other types": b'attention = 3\ntile = [1, 2]\npipeline = "x"\n',
    "other values": b"[attention]\nhead_dim = -1\ndtype = 7\nmask = []\n[tile]\nblock_m = nan\n",
    "a NUL": b'[attention]\ndtype = "\\u0000"\n',
    "a deep list": b"a = " + b"[" * 900 + b"]" * 900,
    "huge": b"# " + b"x" * 100_000,
    "an unknown kind": b'kind = "sideways"\n',
    "a kind that is a list": b"kind = []\n",
    "a kind that is a table": b"[kind]\nforward = true\n",
    "another kind's table": b'kind = "quantize"\n[attention]\nhead_dim = 64\n',
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_malformed_schedule_is_refused_on_stderr_with_its_name_and_exit_code_1(content, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    for word, name in ((path, path), ("-", "stdin")):
        answer = fagen("check", word, input=content)
        assert (answer.exit_code, answer.stdout) == (1, "")
        assert answer.stderr.startswith(f"{name}:")


@pytest.mark.parametrize(
    "word",
    [
        *("nowhere.toml", "schedules", ".", "", "fwd", "a\0b.toml", "/"),
        *("quant_", "dispatch", "fwd_\0", "fwd_" + "x" * 5_000, "\x1b[2J"),
    ],
)
def test_what_is_no_schedule_at_all_is_refused_too(word):
    answer = fagen("check", word)
    assert answer.exit_code == 1
    assert answer.stderr and not answer.stderr.startswith(":"), "it names something"


def test_a_refusal_in_json_is_an_object_on_stdout_and_words_on_stderr():
    answer = fagen("check", "--json", "fwd_bf16_d256_full_m128n96")
    record = json.loads(answer.stdout)
    assert answer.exit_code == record["exit_code"] == 1
    assert record["error"] == "OverBudget"
    assert record["message"] == answer.stderr.rstrip("\n")
    assert "fits with block_n = " in record["message"]


@pytest.mark.parametrize(
    "words",
    [
        "check --json",
        f"check --json=yes {SLUG} more",
        f"check --jsn --json {SLUG}",
        "--nonsense check --json",
        "frobnicate --json",
        f"bench --json --shape 1,2 {SLUG}",
        "cache prune --json --keep many",
        "generate --json",
        "search run --json",
        "schema --kind sideways --json",
    ],
)
def test_a_usage_error_in_json_is_an_object_too(words):
    answer = fagen(*words.split())
    record = json.loads(answer.stdout)
    assert answer.exit_code == record["exit_code"] == 2
    assert record["message"] == answer.stderr.rstrip("\n") != ""
    plain = fagen(*re.sub("--json(=yes)?", "", words).split())
    assert plain.exit_code == 2 and plain.stdout == ""
    assert "Usage: " in plain.stderr


def test_text_from_outside_is_escaped_where_a_terminal_would_obey_it(tmp_path):
    path = tmp_path / "a\x1b[31m.toml"
    path.write_text(
        '"a\\u001b[31m\\nb" = "\\u0007"\n[attention]\n"x\\u0000" = 1\nhead_dim = "\\u009b"\n'
    )
    answers = [fagen("check", path), fagen("check", "-", input=path.read_bytes())]
    answers += [fagen("check", tmp_path / "b\x07.toml"), fagen("check", "fwd_\x1b[2J")]
    assert all(answer.exit_code == 1 for answer in answers)
    answers += [fagen("list", "\x1b[2J"), fagen("\x1b[2J"), fagen("list", "--\x1b[2J")]
    answers += [fagen("check", "--json", SLUG, "\x1b[2J"), fagen("search", "report", "\x1b[2J")]
    for answer in answers:
        assert all(line.isprintable() for line in answer.stderr.splitlines())


# ---- streams and ends ----------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error():
    shell = f"{sys.executable} cli.py generate {SLUG} | head -n 1"
    answer = run(["sh", "-c", shell], cwd=ROOT)
    assert answer.stdout.startswith("// ")
    assert answer.stderr == ""


def test_an_interruption_ends_at_once_and_a_fault_of_fagens_own_without_a_traceback(monkeypatch):
    for error, code, stderr in (
        (KeyboardInterrupt(), 130, r"\s*"),
        (KeyError("absent"), 70, r"(.|\n)*KeyError(.|\n)*--debug(.|\n)*"),
    ):

        def fail(schedule, error=error):
            raise error

        monkeypatch.setattr(flow, "rendered", fail)
        answer = fagen("generate", SLUG)
        assert (answer.exit_code, answer.stdout) == (code, "")
        assert re.fullmatch(stderr, answer.stderr)
    with pytest.raises(KeyError):
        CliRunner().invoke(cli.main, ["--debug", "generate", SLUG], catch_exceptions=False)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    answer = fagen("generate", SLUG, "-o", tmp_path / "file")
    assert answer.exit_code == 1
    assert str(tmp_path / "file") in answer.stderr


def test_what_needs_no_torch_runs_without_and_what_does_says_so():
    code = """if True:
        import sys; sys.modules["torch"] = None; import cli
        for words in sys.argv[1:]:
            try:
                cli.main(words.split(), prog_name="fagen")
            except SystemExit as end:
                print("ended with", end.code)
    """
    words = (f"check {SLUG}", f"generate {SLUG}", "schema", "list", f"bench {SLUG}")
    answer = run([sys.executable, "-c", code, *words], cwd=ROOT)
    assert re.findall("^ended with (.*)$", answer.stdout, re.M) == ["0", "0", "0", "0", "3"]
    assert answer.stderr == "torch is not installed: python -m pip install torch\n"


def test_a_shell_completes_commands_and_slugs():
    variables = {"_FAGEN_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    words = f"fagen check {SLUG[:-2]}"
    answer = run(
        [sys.executable, "-m", "fagen"], cwd=ROOT, env={**variables, "COMP_WORDS": words}
    ).stdout
    assert f"plain,{SLUG}" in answer.splitlines()
