"""Write into the README and the guide what fagen really prints; `--check` only compares.

Filled in, wherever they stand in a page:

    ```console            each line "$ fagen …" is run, and its output is put below it
    <!-- file: PATH -->   the block below is that file
    <!-- kernel: SLUG --> the block below is that kernel's source, from its first line to its last
    <!-- commands -->     … <!-- end -->   a table of the commands
    <!-- variables -->    … <!-- end -->   a table of the environment variables that fagen reads
    <!-- keys: KIND -->   … <!-- end -->   a table of the keys of a kind's schedules
    <!-- signature: SLUG --> … <!-- end -->   the ops of that kernel, their arguments and results
    <!-- masks -->        … <!-- end -->   the masks that have names: texts, and pictures of these
    <!-- families -->     … <!-- end -->   which families of models are served, by families.toml
    <!-- results -->      … <!-- end -->   the newest committed benchmarks, as a picture and tables

The picture is drawn here too, as benchmarks/results/speeds.svg.
"""

import re
import shlex
import sys
import textwrap
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
from benchmarks import headline  # noqa: E402
from benchmarks.headline import CUDNN, FA3, OURS  # noqa: E402
from docs import families  # noqa: E402
from fagen import flow, registry  # noqa: E402
from fagen.expr.pictures import drawn  # noqa: E402
from fagen.expr.words import MASKS  # noqa: E402
from fagen.paths import VARIABLES  # noqa: E402
from fagen.schedule import Code  # noqa: E402
from fagen.signature import Scalar, Signature, Tensor  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def filled(page: str) -> str:
    """Return a page with everything in it that is filled in made anew."""
    page = re.sub(r"^(```console\n)(.*?)^```$", _console, page, flags=re.M | re.S)
    block = r"(?P<head>^<!-- {}: (?P<name>\S+) -->\n+```\w+\n)(?P<body>.*?)^```$"
    page = re.sub(block.format("file"), _file, page, flags=re.M | re.S)
    page = re.sub(block.format("kernel"), _kernel, page, flags=re.M | re.S)
    tables: dict[str, Callable[[], Iterator[str]]] = {
        "commands": _commands,
        "variables": _variables,
        "masks": _masks,
        "families": families.table,
        "results": _results,
    }
    tables |= {f"keys: {kind}": partial(_keys, kind) for kind in registry.ENTRIES}
    for slug in re.findall(r"^<!-- signature: (\S+) -->$", page, re.M):
        signature = registry.plan_of(slug).signature
        tables[f"signature: {slug}"] = partial(signature_table, signature)
    for name, lines in tables.items():
        page = _between(page, name, lines)
    return page


def _console(block: re.Match[str]) -> str:
    commands = [line for line in block[2].splitlines() if line.startswith("$ ")]
    return block[1] + "\n".join(f"{line}\n{_printed(line)}" for line in commands) + "```"


@cache
def _printed(line: str) -> str:
    program, *words = shlex.split(line.removeprefix("$ "))
    assert program == "fagen", f"only fagen is run for a page: {line}"
    with chdir(ROOT):
        result = CliRunner().invoke(cli.main, words, prog_name="fagen")
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


def _file(block: re.Match[str]) -> str:
    return f"{block['head']}{(ROOT / block['name']).read_text(encoding='utf-8')}```"


def _kernel(block: re.Match[str]) -> str:
    """Cut the excerpts out again, each by its first and last line; "// …" separates them."""
    lines = _source(block["name"]).splitlines()
    excerpts = []
    for excerpt in block["body"].split("\n// …\n"):
        first, last = excerpt.strip("\n").splitlines()[0], excerpt.strip("\n").splitlines()[-1]
        begin = lines.index(first)
        end = lines.index(last, begin + 1)
        excerpts.append("\n".join(lines[begin : end + 1]))
    return block["head"] + "\n// …\n".join(excerpts) + "\n```"


@cache
def _source(slug: str) -> str:
    return flow.rendered(registry.from_slug(slug)).kernel


def _between(page: str, name: str, table: Callable[[], Iterator[str]]) -> str:
    span = rf"(^<!-- {name} -->\n).*?(^<!-- end -->$)"
    return re.sub(
        span, lambda m: m[1] + "\n".join(["", *table(), "", m[2]]), page, flags=re.M | re.S
    )


def _commands() -> Iterator[str]:
    yield "| command | |"
    yield "|---|---|"
    for name, command in cli.main.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        for word, one in inner.items():
            yield f"| `fagen {f'{name} {word}'.strip()}` | {one.get_short_help_str(200)} |"


def _masks() -> Iterator[str]:
    yield from ("| mask | text | what a query sees |", "|---|---|---|")
    for word in MASKS.values():
        yield f"| {word.name} | `{word.text}` | {word.is_for} |"
    yield from ("", "Of twelve queries (rows) and keys (columns):", "", "```text")
    pictures = [
        [word.name, *drawn(word.expression, 12, 12, word.example).splitlines()]
        for word in MASKS.values()
        if word.name not in ("full", "causal_by_sequence")
    ]
    for lines in zip(*pictures, strict=True):
        yield "   ".join(f"{line:12}" for line in lines).rstrip()
    yield "```"


def _variables() -> Iterator[str]:
    yield "| variable | |"
    yield "|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items())


def _keys(kind: str) -> Iterator[str]:
    """Describe each key of a kind's schedules; its table is named where there are several."""
    keys = registry.kind(kind).schedule.keys
    codes = {code.key: code for code in keys.slug.codes}
    schema = registry.kind(kind).schedule.json_schema()
    several = len(keys.tables) > 1
    yield f"{'| table ' * several}| key | values | default | in a slug | |"
    yield f"{'|---' * several}|---|---|---|---|---|"
    for table, section in keys.tables.items():
        rules = schema["$defs"][section.__name__]["properties"]
        for key, rule in rules.items():
            default = f"`{_toml(rule['default'])}`" if "default" in rule else "derived"
            if key in keys.required:
                default = "required"
            slug = _code(codes[key], rule) if key in codes else "always"
            meaning = rule["description"].replace("|", "\\|")
            head = f"| `[{table}]` " * several
            yield f"{head}| `{key}` | {_values(rule)} | {default} | {slug} | {meaning} |"


def _code(code: Code, rule: dict[str, Any]) -> str:
    """Return what stands in a slug, but for what calls of this process have added."""
    values = rule.get("enum", code.words)
    words = [word for value, word in code.words.items() if value in values] if code.words else ()
    words = words or (f"{code.letters}…",)
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


def signature_table(signature: Signature) -> Iterator[str]:
    """Describe what the ops of a kernel take and return, its rules and its largest sizes."""
    ops = {"": signature.returns}
    ops |= {f"_without_{tensor.name}": signature.returns_kept for tensor in signature.omittable}
    yield "```"
    for end, returns in ops.items():
        yield f"torch.ops.fagen.<slug>{end}({signature.asked}) -> {returns}"
    yield "```"
    yield ""
    yield "| | shape | dtype | |"
    yield "|---|---|---|---|"
    for one in signature.arguments:
        shape, dtype = ("", one.type) if isinstance(one, Scalar) else (one.shape, one.dtype.torch)
        yield f"| `{one.name}` | {shape} | {dtype} | {'; '.join(_taken(one, signature))} |"
    for tensor in signature.outputs:
        name = f"→ `{tensor.result}`"
        yield f"| {name} | {tensor.shape} | {tensor.dtype.torch} | {'; '.join(_made(tensor))} |"
    yield ""
    limits = [f"`{rule.size}` is a multiple of `{rule.by}`" for rule in signature.rules]
    for most, sizes in signature.sizes_by_most.items():
        limits.append(f"{', '.join(f'`{size.name}`' for size in sizes)}: at most {most:,}")
    limits += [f"{limit.name}: {limit}, fewer than 2^30" for limit in signature.counts]
    yield "; ".join(limits) + "."


def _taken(argument: Tensor | Scalar, signature: Signature) -> Iterator[str]:
    """Say what the shape and dtype of an argument do not."""
    if argument.note:
        yield argument.note
    if isinstance(argument, Scalar):
        if argument.positive:
            yield argument.demand
        return
    if argument.refused:
        yield f"cannot be given: {argument.refused}"
    elif argument.made:
        yield "found and returned where it is not given"
    elif argument.missing:
        yield f"must be given: {argument.missing}"
    if argument.group:
        others = (one.name for one in signature.groups[argument.group] if one is not argument)
        yield f"goes with {', '.join(f'`{name}`' for name in others)}"


def _made(tensor: Tensor) -> Iterator[str]:
    """Say the same of a result."""
    if tensor.note:
        yield tensor.note
    if tensor.made:
        yield f"empty where `{tensor.name}` is given"
    if tensor.omittable:
        yield f"not of `<slug>_without_{tensor.name}`"


def _results() -> Iterator[str]:
    """Show the newest committed speeds: a picture of the grid, and tables of ratios."""
    results = ROOT / "benchmarks" / "results"
    grid = headline.newest(results)
    if grid is None:
        yield "No run is committed yet."
        return
    picture = (results / headline.PICTURE).relative_to(ROOT)
    yield f"![{headline.TITLE}]({picture})"
    yield ""
    fa3 = headline.newest(results, "-fa3", ".csv")
    other = f" {FA3} ran in its own process: {_made_on(fa3)}." if fa3 else ""
    yield _wrapped(
        f"*TFLOP/s by head dim: geometric mean and range over the shapes. {OURS} and {CUDNN} ran "
        f"in one process: {headline.versions(grid)} ({_page(grid)}).{other} Burst: short runs at "
        "full clock. Sustained: long runs at the power limit "
        "([measuring](benchmarks/notes/measuring.md#two-regimes)).*"
    )
    yield ""
    yield from headline.grid_table(results)
    yield ""
    gradients = headline.newest(results, "-backward")
    where = "*Forward: as in the picture"
    if gradients:
        where += f". Gradients: {headline.versions(gradients)} ({_page(gradients)})"
    yield _wrapped(f"{where}.*")
    calls = headline.newest(results, "-peers", card="nvidia-h100")  # as the csv is
    if calls:
        yield ""
        yield from headline.random_table(calls)
        yield ""
        yield _wrapped(
            "*Calls of random sizes, as CUDA graphs. Calls that no peer supports are left out. "
            f"{headline.versions(calls)} ({_page(calls)}). {FA3}, hopper/ at 0251105a, ran beside "
            "fagen 886a461 and these peers the day before ([its rows](benchmarks/peers-h100.csv)); "
            "its times are told by those of fagen 886a461 in both runs, or where it is far behind "
            "by the peers' ([measuring](benchmarks/notes/measuring.md#benchmarks)).*"
        )


def _made_on(path: Path) -> str:
    """The last line of the comment that a file of figures begins with, and a link to the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return f"{comment[-1]} ([all rows]({path.relative_to(ROOT)}))"


def _page(path: Path) -> str:
    return f"[all rows]({path.with_suffix('.md').relative_to(ROOT)})"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def filled_files() -> Iterator[tuple[Path, str]]:
    """Give each file that is filled in, and what is to be in it."""
    for path in PAGES:
        yield path, filled(path.read_text(encoding="utf-8"))
    results = ROOT / "benchmarks" / "results"
    yield results / headline.PICTURE, headline.picture(results)


def main(check: bool) -> int:
    """Fill every file, or with `check` name the stale ones; the exit code."""
    stale = []
    for path, after in filled_files():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if after != before:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'stale, run `make docs`' if check else 'filled'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
