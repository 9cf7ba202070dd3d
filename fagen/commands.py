"""Commands that only look: which kernel serves a call, what a schedule may say."""

from typing import Any

import click

from fagen import registry
from fagen.console import JSON, answer, as_text
from fagen.vocab import DTYPES, OUT_DTYPES, V_LAYOUTS


@click.command()
@click.option("--dtype", type=click.Choice(list(DTYPES)), required=True, help="Of q, k and v.")
@click.option("--head-dim", type=int, required=True, help="Of q and k.")
@click.option("--head-dim-v", type=int, help="Of v, where it has its own.")
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--heads", type=int, help="Of q; else those of hidden size 2048.")
@click.option("--kv-heads", type=int, help="Of k and v; else as many.")
@click.option("--seqlen", type=int, default=4_096, show_default=True, help="Queries.")
@click.option("--seqlen-k", type=int, help="Keys; else as many.")
@click.option("--v-layout", type=click.Choice(V_LAYOUTS), help="Of e4m3; else rows.")
@click.option("--scale-rows", type=int, help="Of e4m3: that share a scale; else 0, all of a head.")
@click.option("--out-dtype", type=click.Choice(list(OUT_DTYPES)), help="Of e4m3; else bf16.")
@click.option("--card", default="", help="A GPU's name; else the one that the tables name first.")
@JSON
def pick(as_json: bool, **call: Any) -> None:
    """Say which kernel serves a call of fagen.attention, why, and how fast it is.

    No GPU is asked. The time is predicted; what was measured was so at the sizes that are shown.

    \b
    Examples:
      fagen pick --dtype bf16 --head-dim 128 --causal --seqlen 8192
      fagen pick --dtype bf16 --head-dim 96 --causal --heads 48 --kv-heads 6 --seqlen 6144
      fagen pick --dtype e4m3 --head-dim 128 --v-layout columns --scale-rows 64 --json
    """
    from fagen.picking import pick as picked

    found = picked(**call)
    answer(as_json, found.record(), [str(found)])


@click.command()
@click.option(
    "--kind",
    "name",
    type=click.Choice(list(registry.ENTRIES)),
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
    click.echo(as_text(registry.kind(name).schedule.json_schema()))
