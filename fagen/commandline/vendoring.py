"""The command that writes kernels as a folder for people without fagen."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fagen.commandline import console
from fagen.errors import FagenError
from fagen.toml_lines import printable
from fagen.vocab import VENDOR_FORMATS

if TYPE_CHECKING:
    from fagen.schedule import Schedule


@click.command()
@console.ANY_SCHEDULES
@click.option("--manifest", type=console.PATH, help="Names and schedules: TOML.")
@click.option("-o", "--output", type=console.FOLDER, required=True, help="The folder.")
@click.option("--name", help="Of library, header and functions; else fagen_kernels.")
@click.option(
    "--format", "form", type=console.Word(VENDOR_FORMATS), help="What kind of folder; source."
)
@click.option("--with-cutlass", is_flag=True, help="The CUTLASS headers that are needed as well.")
@click.option("--force", is_flag=True, help="Overwrite what was edited since it was written.")
@console.JSON
def vendor(
    schedules: "tuple[Schedule | console.Unread, ...]",
    manifest: Path | None,
    output: Path,
    name: str | None,
    form: str | None,
    with_cutlass: bool,
    force: bool,
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
        request = vendoring.read(manifest)
    else:
        named, unread = console.each("", schedules, lambda schedule: schedule)
        if unread:
            raise unread
        request = vendoring.asked(
            name or "fagen_kernels", named, form or VENDOR_FORMATS[0], with_cutlass
        )
    written = vendoring.vendor(request, output, force=force)
    wrong = FagenError(written.fault) if written.fault else None
    counts = {"new": written.new, "updated": written.updated, "removed": written.removed}
    lines = [f"{what} {path}" for what, paths in counts.items() for path in paths]
    lines += [f"edited {path}, left as it is" for path in written.edited]
    changed = sum(map(len, counts.values()))
    lines.append(f"{printable(output)}: {changed} files changed, {len(written.unchanged)} not")
    if written.unverified:
        lines.append(
            f"NEVER VERIFIED: {', '.join(written.unverified)}: it is not on record that exactly "
            "this source ever ran; `fagen verify SLUG` tries it on a Hopper GPU, and so does the "
            "folder's own test"
        )
    console.answer(asdict(written), lines, wrong)
