"""Write into the README and the guide pages what fagen really prints; `--check` only compares.

Filled in, wherever they stand in a page:

    ```console            each line "$ fagen …" is run, and what it prints is put below it
    <!-- file: PATH -->   the block below is that file
    <!-- kernel: SLUG --> the block below is that kernel's source, from its first line to its last
    <!-- commands -->     … <!-- end -->   a table of the commands
    <!-- keys: KIND -->   … <!-- end -->   a table of the keys of a kind's schedules
    <!-- results -->      … <!-- end -->   the newest committed benchmark
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cli  # noqa: E402 - it lies beside the package
from fagen import flow, registry  # noqa: E402
from fagen.measure.rows import geomeans, read_rows  # noqa: E402
from fagen.schedule import Code  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def filled(page: str) -> str:
    """Return a page with everything in it that is filled in made anew."""
    page = re.sub(r"^(```console\n)(.*?)^```$", _console, page, flags=re.M | re.S)
    block = r"(?P<head>^<!-- {}: (?P<name>\S+) -->\n+```\w+\n)(?P<body>.*?)^```$"
    page = re.sub(block.format("file"), _file, page, flags=re.M | re.S)
    page = re.sub(block.format("kernel"), _kernel, page, flags=re.M | re.S)
    for name, make in {"commands": _commands, "results": _results}.items():
        page = _between(page, name, make)
    for kind in registry.ENTRIES:
        page = _between(page, f"keys: {kind}", partial(_keys, kind))
    return page


def _console(found: re.Match[str]) -> str:
    asked = [line for line in found[2].splitlines() if line.startswith("$ ")]
    return found[1] + "\n".join(f"{line}\n{_printed(line)}" for line in asked) + "```"


@cache
def _printed(line: str) -> str:
    program, *words = shlex.split(line.removeprefix("$ "))
    assert program == "fagen", f"only fagen is run for a page: {line}"
    with chdir(ROOT):
        result = CliRunner().invoke(cli.main, words, prog_name="fagen")
    return "".join(f"{said.rstrip()}\n" for said in result.output.splitlines())


def _file(found: re.Match[str]) -> str:
    return f"{found['head']}{(ROOT / found['name']).read_text(encoding='utf-8')}```"


def _kernel(found: re.Match[str]) -> str:
    """Cut the excerpts out again: parts are parted by a line of //  …, each has two ends."""
    lines = _source(found["name"]).splitlines()
    excerpts = []
    for part in found["body"].split("\n// …\n"):
        first, last = part.strip("\n").splitlines()[0], part.strip("\n").splitlines()[-1]
        try:
            begin = lines.index(first)
            end = lines.index(last, begin + 1)
        except ValueError as error:
            raise ValueError(f"{found['name']}: {error}; choose another part of it") from error
        excerpts.append("\n".join(lines[begin : end + 1]))
    return found["head"] + "\n// …\n".join(excerpts) + "\n```"


@cache
def _source(slug: str) -> str:
    return flow.rendered(registry.from_slug(slug)).kernel


def _between(page: str, name: str, make: Callable[[], Iterator[str]]) -> str:
    span = rf"(^<!-- {name} -->\n).*?(^<!-- end -->$)"
    return re.sub(
        span, lambda m: m[1] + "\n".join(["", *make(), "", m[2]]), page, flags=re.M | re.S
    )


def _commands() -> Iterator[str]:
    yield "| command | |"
    yield "|---|---|"
    for name, command in cli.main.commands.items():
        group = isinstance(command, click.Group)
        for parts in _under(name, command) if group else [(name, command)]:
            yield f"| `fagen {parts[0]}` | {parts[1].get_short_help_str(200)} |"


def _under(name: str, group: Any) -> list[tuple[str, Any]]:
    return [(f"{name} {inner}", command) for inner, command in group.commands.items()]


def _keys(kind: str) -> Iterator[str]:
    of = registry.kind(kind).schedule
    schema = of.json_schema()
    codes = {code.key: code for code in of.keys.slug.codes}
    yield "| table | key | values | default | in a slug | |"
    yield "|---|---|---|---|---|---|"
    for table in of.keys.tables:
        section = schema["$defs"][table.capitalize()]
        for key, rule in section["properties"].items():
            default = f"`{_toml(rule['default'])}`" if "default" in rule else "derived"
            if key in section.get("required", ()):
                default = "required"
            slug = _code(codes[key]) if key in codes else "always"
            told = rule["description"].replace("|", "\\|")
            yield f"| `[{table}]` | `{key}` | {_values(rule)} | {default} | {slug} | {told} |"


def _code(code: Code) -> str:
    words = code.words.values() if code.words else (f"{code.letters}…",)
    return ", ".join(f"`{word}`" for word in words)


def _values(rule: dict[str, Any]) -> str:
    if "enum" in rule:
        return ", ".join(f"`{_toml(word)}`" for word in rule["enum"])
    if rule["type"] == "boolean":
        return "`true`, `false`"
    if rule["minimum"] == rule["maximum"]:
        return str(rule["minimum"])
    step = rule.get("multipleOf", 1)
    return f"{rule['minimum']} … {rule['maximum']}" + (f" by {step}" if step != 1 else "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _results() -> Iterator[str]:
    """Tell of the newest results: geomeans, and where every figure and the plots are."""
    runs = sorted(
        (path for path in (ROOT / "benchmarks" / "results").glob("*-????-??-??.json")),
        key=lambda path: path.stem[-10:],
    )
    if not runs:
        yield "No run is committed yet."
        return
    newest = runs[-1]
    card, date = newest.stem[:-11], newest.stem[-10:]
    table = newest.with_suffix(".md").relative_to(ROOT)
    yield f"Card {card}, {date}; every cell is in [{table}]({table}), every figure in"
    yield f"[{newest.name}]({newest.relative_to(ROOT)})."
    yield ""
    yield geomeans(read_rows(newest)).rstrip()
    for plot in sorted(newest.parent.glob(f"{newest.stem}-*.svg")):
        name = " ".join(plot.stem.removeprefix(newest.stem).split("-")).strip()
        yield ""
        yield f"![{name}: TFLOP/s against sequence length]({plot.relative_to(ROOT)})"


def main(check: bool) -> int:
    """Fill every page, or with `check` say which are stale; the exit code."""
    stale = []
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'stale, run `make docs`' if check else 'filled'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
