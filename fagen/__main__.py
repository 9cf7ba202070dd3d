"""The console entry: arguments in, an exit code out; runs cli.py wherever it lies."""

import fagen.interrupts  # noqa: F401, I001 - first: what follows takes a moment

import runpy

from fagen.paths import locate


def main() -> None:
    """Run cli.py as a program."""
    runpy.run_path(str(locate("cli.py")), run_name="__main__")


if __name__ == "__main__":
    main()
