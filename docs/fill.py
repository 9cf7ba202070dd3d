"""Write into the README and the guide pages what fagen really prints; `--check` only compares.

Filled in, wherever they stand in a page:

    ```console            each line "$ fagen …" is run, and what it prints is put below it
    <!-- file: PATH -->   the block below is that file
    <!-- kernel: SLUG --> the block below is that kernel's source, from its first line to its last
    <!-- commands -->     … <!-- end -->   a table of the commands
    <!-- keys: KIND -->   … <!-- end -->   a table of the keys of a kind's schedules
    <!-- signature: SLUG --> … <!-- end -->   the ops of that kernel, and what they take and return
    <!-- results -->      … <!-- end -->   the newest committed benchmarks, as a picture

The picture is drawn here too, as benchmarks/results/speedups.svg.
"""

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cli  # noqa: E402 - it lies beside the package
from benchmarks import speedups  # noqa: E402
from benchmarks.speedups import CUDNN, FA3, Speedup  # noqa: E402
from fagen import flow, registry  # noqa: E402
from fagen.measure.rows import geomean, ratios, read_rows  # noqa: E402
from fagen.schedule import Code  # noqa: E402
from fagen.signature import Scalar, Signature, Tensor  # noqa: E402

REGIMES = {"burst": "short runs", "sustained": "long ones"}  # as the README calls them
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def filled(page: str) -> str:
    """Return a page with everything in it that is filled in made anew."""
    page = re.sub(r"^(```console\n)(.*?)^```$", _console, page, flags=re.M | re.S)
    block = r"(?P<head>^<!-- {}: (?P<name>\S+) -->\n+```\w+\n)(?P<body>.*?)^```$"
    page = re.sub(block.format("file"), _file, page, flags=re.M | re.S)
    page = re.sub(block.format("kernel"), _kernel, page, flags=re.M | re.S)
    page = _between(page, "commands", _commands)
    page = _between(page, "results", _results)
    for kind in registry.ENTRIES:
        page = _between(page, f"keys: {kind}", partial(_keys, kind))
    for slug in re.findall(r"^<!-- signature: (\S+) -->$", page, re.M):
        signature = registry.plan_of(slug).signature
        page = _between(page, f"signature: {slug}", partial(signature_table, signature))
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
        begin = lines.index(first)
        end = lines.index(last, begin + 1)
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
    """Tell each key of a kind's schedules; the table is named where there are several."""
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
            slug = _code(codes[key]) if key in codes else "always"
            told = rule["description"].replace("|", "\\|")
            head = f"| `[{table}]` " * several
            yield f"{head}| `{key}` | {_values(rule)} | {default} | {slug} | {told} |"


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


def signature_table(signature: Signature) -> Iterator[str]:
    """Tell what the ops of a kernel take and return, its rules and its largest sizes."""
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
    told = [f"`{rule.of}` is a multiple of `{rule.by}`" for rule in signature.rules]
    for most, sizes in signature.sizes_by_most.items():
        told.append(f"{', '.join(f'`{size.name}`' for size in sizes)}: at most {most:,}")
    yield "; ".join(told) + "."


def _taken(argument: Tensor | Scalar, signature: Signature) -> Iterator[str]:
    """Tell of an argument what its shape and dtype do not."""
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
    """Tell the same of a result."""
    if tensor.note:
        yield tensor.note
    if tensor.made:
        yield f"empty where `{tensor.name}` is given"
    if tensor.omittable:
        yield f"not of `<slug>_without_{tensor.name}`"


SHAPES = {FA3: "{} random shapes", CUDNN: "the {} of the grid"}
WHERE = {
    FA3: "FlashAttention-3 ran on another H200, beside earlier kernels of fagen, which ran beside "
    "today's here ([how](docs/measuring.md#shapes-that-nobody-tuned-for)).",
    CUDNN: "cuDNN ran in the same process.",
}


def _results() -> Iterator[str]:
    """Show the speedups over each peer as a picture, and say what they are of."""
    results = ROOT / "benchmarks" / "results"
    by_peer = {found[0].peer: (path, found) for path, found in speedups.committed(results)}
    if not by_peer:
        yield "No run is committed yet."
        return
    picture = (results / speedups.PICTURE).relative_to(ROOT)
    yield f"![{speedups.TITLE}, by head dim]({picture})"
    yield ""
    means = "; ".join(_means(path, found) for path, found in by_peer.values())
    told = [f"Speed in [short runs](docs/measuring.md#two-regimes), geometric means: {means}."]
    told += [WHERE[peer] for peer in by_peer]
    yield _wrapped(" ".join(told))
    others = [*_gradients(results), *_decoding(results)]
    if others:
        yield ""
        yield _wrapped(" ".join(others))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _gradients(results: Path) -> Iterator[str]:
    """Say how fast the backward pass was beside cuDNN's, in both regimes."""
    path = speedups.newest(results, "-backward")
    if not path:
        return
    rows = read_rows(path)
    found = {name: tuple(ratios(rows, regime).values()) for regime, name in REGIMES.items()}
    told = " and ".join(
        f"**{geomean(values):.3f}** × in {name} ({min(values):.2f} at least)"
        for name, values in found.items()
        if values
    )
    cells = f"[{max(map(len, found.values()))} cells]({path.with_suffix('.md').relative_to(ROOT)})"
    card = json.loads(path.with_suffix(".run.json").read_text(encoding="utf-8"))["card"]
    yield f"Gradients in fp16 over cuDNN's ({card}): {told}, {cells}."


def _decoding(results: Path) -> Iterator[str]:
    """Say how fast one query of each sequence is decoded beside the better peer."""
    path = speedups.newest(results, "-decode")
    if not path:
        return
    best: dict[tuple[int, int], float] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row["seqlen_q"] == 1 and row["slug"].startswith("dec_fp16_d128_"):
            peer = min(row["cudnn_microseconds"], row["fa2_microseconds"])
            at = row["batch"], row["seqlen_k"]
            best[at] = max(best.get(at, 0.0), peer / row["microseconds"])
    speeds = tuple(best.values())
    yield (
        "One query of each sequence, over the better of cuDNN and FlashAttention-2 in a CUDA graph "
        f"(fp16, head dim 128, 32 heads to 8): **{geomean(speeds):.2f}** × at {len(speeds)} sizes, "
        f"{min(speeds):.2f} at least; at head dim 64, and on another card, there are cells behind "
        "([each](docs/decode.md#is-it-right-and-how-fast))."
    )


def _means(path: Path, found: Sequence[Speedup]) -> str:
    """The geometric mean over a peer and the least, of each dtype, and where each shape is."""
    by_dtype: dict[str, list[float]] = {}
    for one in found:
        by_dtype.setdefault(one.dtype, []).extend(one.ratios)
    peer = found[0].peer
    told = " and ".join(
        f"**{geomean(values):.3f}** × {peer} in {dtype} ({min(values):.3f} at least)"
        for dtype, values in by_dtype.items()
    )
    shapes = SHAPES[peer].format(max(map(len, by_dtype.values())))
    return f"{told} at {shapes} ([each]({path.with_suffix('.md').relative_to(ROOT)}))"


def filled_files() -> Iterator[tuple[Path, str]]:
    """Give each file that is filled in, and what is to be in it."""
    for path in PAGES:
        yield path, filled(path.read_text(encoding="utf-8"))
    results = ROOT / "benchmarks" / "results"
    yield results / speedups.PICTURE, speedups.picture(results)


def main(check: bool) -> int:
    """Fill every file, or with `check` say which are stale; the exit code."""
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
