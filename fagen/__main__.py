"""The console entry: arguments in, an exit code out; runs cli.py wherever it lies."""

from fagen.interrupts import leave_at_once

leave_at_once()

import runpy  # noqa: E402 - what is imported from here on takes a moment

from fagen.paths import locate  # noqa: E402


def main() -> None:
    """Run cli.py as a program."""
    runpy.run_path(str(locate("cli.py")), run_name="__main__")


if __name__ == "__main__":
    main()
