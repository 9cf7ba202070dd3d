"""Commands that look things up: which kernel serves a call, what is committed, schemas."""

from typing import TYPE_CHECKING, Any

import click

from fagen import registry
from fagen.commandline import console
from fagen.vocab import (
    DTYPES,
    FORWARD,
    LENGTHS,
    MASKS,
    OUT_DTYPES,
    PASSES,
    V_LAYOUTS,
)

if TYPE_CHECKING:
    from fagen.schedule import Schedule

    Schedules = tuple[Schedule, ...]
    AnySchedules = tuple[Schedule | console.Unread, ...]


@click.command()
@click.option("--dtype", type=console.Word(list(DTYPES)), required=True, help="Of q, k and v.")
@click.option("--head-dim", type=int, required=True, help="Of q and k.")
@click.option("--head-dim-v", type=int, help="Of v, where it has its own.")
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--window", type=int, help="Keys that a query sees, its own among them.")
@click.option("--mask", help="A mask by name, or its text; with --causal and --window, all.")
@click.option("--softcap", type=float, help="No score is beyond it.")
@click.option("--score", help="A score by name, or its text.")
@click.option("--sinks", help="The dtype of sinks, where there are some.")
@click.option(
    "--given",
    type=console.Given(),
    multiple=True,
    help="NAME=NUMBER: what the text of a mask or a score is given.",
)
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--heads", type=int, help="Of q; else those of hidden size 2048.")
@click.option("--kv-heads", type=int, help="Of k and v; else as many.")
@click.option("--seqlen", type=int, help="Queries; else 4096, to decode 1.")
@click.option("--seqlen-k", type=int, help="Keys; else as many, to decode 4096.")
@click.option("--v-layout", type=console.Word(V_LAYOUTS), help="Of e4m3; else rows.")
@click.option("--scale-rows", type=int, help="Of e4m3: that share a scale; else 0, all of a head.")
@click.option("--out-dtype", type=console.Word(list(OUT_DTYPES)), help="Of e4m3; else bf16.")
@click.option(
    "--pass",
    "kind",
    type=console.Word(tuple(PASSES)),
    default=FORWARD,
    show_default=True,
    help="Backward: the kernel of its gradients; decode: that of fagen.attention_decode.",
)
@click.option(
    "--lengths",
    type=console.Word(LENGTHS),
    default=LENGTHS[0],
    show_default=True,
    help="Of sequences; varlen: the kernel of fagen.attention_varlen.",
)
@click.option(
    "--deterministic", is_flag=True, help="Of gradients, where the call or torch asks for it."
)
@click.option("--card", default="", help="A GPU's name; else the one that the tables name first.")
@click.option("--toml", is_flag=True, help="Print its schedule, for a file to name or to change.")
@console.JSON
def pick(given: tuple[tuple[str, int | float], ...], toml: bool, **call: Any) -> None:
    """Say which kernel serves a call of fagen.attention, why, and how fast it is.

    No GPU is asked. The time is predicted; what was measured was so at the sizes that are shown.

    \b
    Examples:
      fagen pick --dtype bf16 --head-dim 128 --causal --seqlen 8192
      fagen pick --dtype bf16 --head-dim 96 --causal --heads 48 --kv-heads 6 --seqlen 6144
      fagen pick --dtype bf16 --head-dim 128 --causal --window 1024 --softcap 50 --sinks bf16
      fagen pick --dtype bf16 --head-dim 128 --causal --seqlen 8192 --pass backward
      fagen pick --dtype bf16 --head-dim 128 --heads 32 --kv-heads 8 --batch 4 --pass decode
      fagen pick --dtype e4m3 --head-dim 128 --v-layout columns --scale-rows 64 --json
      fagen pick --dtype bf16 --head-dim 128 --mask 'k_idx <= 2 * q_pos' --toml > mine.toml
    """
    from fagen.dispatch.pick import pick as picked

    try:
        choice = picked(**call, **dict(given))  # type: ignore[arg-type]
    except TypeError as error:  # a name that no text has
        if not given:
            raise
        raise click.UsageError(str(error).partition(": it takes")[0]) from None
    console.answer(choice.record(), [choice.toml.rstrip() if toml else str(choice)])


@click.command("list")
@click.option("--kind", type=console.Word(list(registry.ENTRIES)), help="Of kernel.")
@click.option("--dtype", type=console.Word(list(DTYPES)))
@click.option("--head-dim", type=int, help="Of Q and K.")
@click.option("--mask", type=console.Word(list(MASKS)))
@click.option(
    "--verified/--unverified", default=None, help="With evidence of this very source, or without."
)
@console.JSON
def list_(
    kind: str | None,
    dtype: str | None,
    head_dim: int | None,
    mask: str | None,
    verified: bool | None,
) -> None:
    """List the committed schedules and their evidence, and those of your own dispatch table.

    All of them, or those that are as the options say.

    \b
    Examples:
      fagen list
      fagen list --kind forward --dtype bf16 --head-dim 128 --verified
    """
    from fagen.commandline import report

    options = {"dtype": dtype, "head_dim": head_dim, "mask": mask}
    words = {name: str(value) for name, value in options.items() if value is not None}

    def is_meant(schedule: "Schedule") -> bool:
        columns = schedule.columns()
        return (
            kind in (None, schedule.kind)
            and all(columns[name] == value for name, value in words.items())
            and verified in (None, report.is_verified(schedule))
        )

    schedules = tuple(filter(is_meant, console.chosen((), every=True)))
    listed, wrong = console.each("looking at", schedules, report.listed)
    listed += report.listed_of_users(is_meant)
    none = ["no schedule is so"] if kind or words or verified is not None else []
    console.answer(listed, report.columns(listed) if listed else none, wrong)


@click.command()
@click.option(
    "--kind",
    "name",
    type=console.Word(list(registry.ENTRIES)),
    default=registry.DEFAULT,
    show_default=True,
    help="The kind of kernel.",
)
def schema(name: str) -> None:
    """Print the JSON Schema of a schedule.

    With it an editor completes and checks what is typed.

    \b
    Examples:
      fagen schema > schedule.schema.json
      echo '#:schema schedule.schema.json' > my.toml
      fagen schema --kind quantize
    """
    click.echo(console.as_text(registry.kind(name).schedule.json_schema()))
