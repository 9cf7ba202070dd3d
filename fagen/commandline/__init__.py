"""The command line: words come in, fagen is called, an answer goes out."""

import click

from fagen import __version__
from fagen.commandline.console import Commands
from fagen.commandline.kernels import bench, build, check, generate, simulate, verify
from fagen.commandline.lists import list_, pick, schema
from fagen.commandline.machine import cache, doctor
from fagen.commandline.searching import search
from fagen.commandline.vendoring import vendor

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="fagen")
@click.option("--debug", is_flag=True, help="Show a traceback where fagen itself is at fault.")
def main(debug: bool) -> None:
    """Generate fused attention kernels for Hopper GPUs from small schedules.

    Kernels of attention, of its gradients and of decoding, and those that quantise tensors for
    attention or combine partial outputs, come out of the same commands.

    A SCHEDULE is the path of a TOML file, the slug of any schedule, or - for standard input.

    \b
    Exit codes: 0 well; 1 a file is wrong or not there, or a schedule over budget; 2 usage;
    3 toolchain missing; 4 build failed; 5 no Hopper GPU; 6 a verification failed.

    \b
    Examples:
      fagen check schedules/forward/fwd_fp16_d128_causal_m128n128.toml
    """


for _command in (  # in the order of the flow
    *(check, generate, build, verify, bench, search, pick),
    *(list_, simulate, vendor, schema, cache, doctor),
):
    main.add_command(_command)
