"""Commands beside the flow: lists, which kernel serves a call, schemas, simulation, vendoring."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fagen import registry
from fagen.console import (
    ALL,
    ANY_SCHEDULES,
    JSON,
    SCHEDULES,
    Unread,
    Word,
    answer,
    as_text,
    chosen,
    each,
    say,
)
from fagen.errors import FagenError
from fagen.toml_lines import printable
from fagen.vocab import (
    DTYPES,
    FORWARD,
    LENGTHS,
    MASKS,
    OUT_DTYPES,
    PASSES,
    V_LAYOUTS,
    VENDOR_FORMATS,
)

if TYPE_CHECKING:
    from fagen.schedule import Schedule

    Schedules = tuple[Schedule, ...]
    AnySchedules = tuple[Schedule | Unread, ...]


@click.command()
@click.option("--dtype", type=Word(list(DTYPES)), required=True, help="Of q, k and v.")
@click.option("--head-dim", type=int, required=True, help="Of q and k.")
@click.option("--head-dim-v", type=int, help="Of v, where it has its own.")
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--heads", type=int, help="Of q; else those of hidden size 2048.")
@click.option("--kv-heads", type=int, help="Of k and v; else as many.")
@click.option("--seqlen", type=int, help="Queries; else 4096, to decode 1.")
@click.option("--seqlen-k", type=int, help="Keys; else as many, to decode 4096.")
@click.option("--v-layout", type=Word(V_LAYOUTS), help="Of e4m3; else rows.")
@click.option("--scale-rows", type=int, help="Of e4m3: that share a scale; else 0, all of a head.")
@click.option("--out-dtype", type=Word(list(OUT_DTYPES)), help="Of e4m3; else bf16.")
@click.option(
    "--pass",
    "kind",
    type=Word(tuple(PASSES)),
    default=FORWARD,
    show_default=True,
    help="Backward: the kernel of its gradients; decode: that of fagen.attention_decode.",
)
@click.option(
    "--lengths",
    type=Word(LENGTHS),
    default=LENGTHS[0],
    show_default=True,
    help="Of sequences; varlen: the kernel of fagen.attention_varlen.",
)
@click.option(
    "--deterministic", is_flag=True, help="Of gradients, where the call or torch asks for it."
)
@click.option("--card", default="", help="A GPU's name; else the one that the tables name first.")
@JSON
def pick(as_json: bool, **call: Any) -> None:
    """Say which kernel serves a call of fagen.attention, why, and how fast it is.

    No GPU is asked. The time is predicted; what was measured was so at the sizes that are shown.

    \b
    Examples:
      fagen pick --dtype bf16 --head-dim 128 --causal --seqlen 8192
      fagen pick --dtype bf16 --head-dim 96 --causal --heads 48 --kv-heads 6 --seqlen 6144
      fagen pick --dtype bf16 --head-dim 128 --causal --seqlen 8192 --pass backward
      fagen pick --dtype bf16 --head-dim 128 --heads 32 --kv-heads 8 --batch 4 --pass decode
      fagen pick --dtype e4m3 --head-dim 128 --v-layout columns --scale-rows 64 --json
    """
    from fagen.picking import pick as picked

    found = picked(**call)
    answer(as_json, found.record(), [str(found)])


@click.command("list")
@click.option("--kind", type=Word(list(registry.ENTRIES)), help="Of kernel.")
@click.option("--dtype", type=Word(list(DTYPES)))
@click.option("--head-dim", type=int, help="Of Q and K.")
@click.option("--mask", type=Word(list(MASKS)))
@click.option(
    "--verified/--unverified", default=None, help="With evidence of this very source, or without."
)
@JSON
def list_(
    kind: str | None,
    dtype: str | None,
    head_dim: int | None,
    mask: str | None,
    verified: bool | None,
    as_json: bool,
) -> None:
    """List the committed schedules and their evidence, and those of your own dispatch table.

    All of them, or those that are as the options say.

    \b
    Examples:
      fagen list
      fagen list --kind forward --dtype bf16 --head-dim 128 --verified
    """
    from fagen import report

    wanted = {"dtype": dtype, "head_dim": head_dim, "mask": mask}
    said = {name: str(value) for name, value in wanted.items() if value is not None}

    def is_meant(schedule: "Schedule") -> bool:
        columns = schedule.columns()
        return (
            kind in (None, schedule.kind)
            and all(columns[name] == value for name, value in said.items())
            and verified in (None, report.is_verified(schedule))
        )

    meant = tuple(filter(is_meant, chosen((), every=True)))
    listed, wrong = each("looking at", meant, report.listed)
    listed += report.listed_of_users(is_meant)
    none = ["no schedule is so"] if kind or said or verified is not None else []
    answer(as_json, listed, report.columns(listed) if listed else none, wrong)


@click.command()
@click.option(
    "--kind",
    "name",
    type=Word(list(registry.ENTRIES)),
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


@click.command()
@SCHEDULES
@ALL
@click.option(
    "--seeds", type=click.IntRange(1, 10_000), default=2, show_default=True, help="Runs of each."
)
@JSON
def simulate(schedules: "Schedules", every: bool, seeds: int, as_json: bool) -> None:
    """Run kernels' own text on a CPU, and check it against fp64.

    Thread by thread, at a few small sizes, with copies and products happening at random times: a
    wait that is missing shows sooner or later, and a kernel that hangs is told with who waits for
    what. Needs g++ and torch, no GPU. Of kernels of attention, of its gradients and of decoding;
    what a GPU makes of them, and how fast, `fagen verify` says.

    \b
    Examples:
      fagen simulate fwd_fp16_d128_causal_m128n128
      fagen simulate my.toml --seeds 20
    """
    from fagen import flow, simulator

    def run(schedule: "Schedule") -> dict[str, Any]:
        plan = registry.plan(schedule)
        runs = simulator.check(plan, flow.rendered(schedule).kernel, seeds=seeds, progress=say)
        return {"schedule": plan.slug, "runs": runs}

    made, wrong = each("simulating", chosen(schedules, every), run)
    told = (f"{one['schedule']}: {one['runs']} runs, all right" for one in made)
    answer(as_json, made, told, wrong)


@click.command()
@ANY_SCHEDULES
@click.option("--manifest", type=click.Path(path_type=Path), help="Names and schedules: TOML.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="The folder.",
)
@click.option("--name", help="Of library, header and functions; else fagen_kernels.")
@click.option("--format", "form", type=Word(VENDOR_FORMATS), help="What kind of folder; source.")
@click.option("--with-cutlass", is_flag=True, help="The CUTLASS headers that are needed as well.")
@click.option("--force", is_flag=True, help="Overwrite what was edited since it was written.")
@JSON
def vendor(
    schedules: "AnySchedules",
    manifest: Path | None,
    output: Path,
    name: str | None,
    form: str | None,
    with_cutlass: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write kernels as a folder that builds in any tree, without fagen.

    Into it go the kernels, a C header, a dispatcher, CMake files, a test program and a README; with
    --format torch or jax also a Python package that pip builds, with --format hf-kernel what
    Hugging Face's kernels loads instead. Beside a kernel of attention that of its gradients makes
    the package's calls differentiable. The same command again updates the folder. Files that were
    edited since are left as they are, and are named; the exit code is 1 if they would have changed.

    \b
    Examples:
      fagen vendor fwd_bf16_d128_causal_m128n128 -o third_party/attention
      fagen vendor my.toml other.toml -o attention --name my_attention --with-cutlass
      fagen vendor my.toml -o attention --name my_attention --format torch
      fagen vendor dec_fp16_d128_causal_r8n64 dec_fp16_d128_causal_r16n64 -o decoding
      fagen vendor --manifest vendor.toml -o attention
    """
    from fagen import vendor as vendoring

    if bool(schedules) == bool(manifest):
        raise click.UsageError("name SCHEDULES, or a file of them by --manifest")
    if manifest:
        if name or form or with_cutlass:
            raise click.UsageError("--name, --format and --with-cutlass stand in the manifest")
        asked = vendoring.read(manifest)
    else:
        named, unread = each("", schedules, lambda schedule: schedule)
        if unread:
            raise unread
        asked = vendoring.asked(
            name or "fagen_kernels", named, form or VENDOR_FORMATS[0], with_cutlass
        )
    written = vendoring.vendor(asked, output, force=force)
    wrong = FagenError(written.fault) if written.fault else None
    counts = {"new": written.new, "updated": written.updated, "removed": written.removed}
    told = [f"{what} {path}" for what, paths in counts.items() for path in paths]
    told += [f"edited {path}, left as it is" for path in written.edited]
    changed = sum(map(len, counts.values()))
    told.append(f"{printable(str(output))}: {changed} files changed, {len(written.unchanged)} not")
    if written.unverified:
        told.append(
            f"NEVER VERIFIED: {', '.join(written.unverified)}: it is not on record that exactly "
            "this source ever ran; `fagen verify SLUG` tries it on a Hopper GPU, and so does the "
            "folder's own test"
        )
    answer(as_json, asdict(written), told, wrong)
