"""The command line: words come in, fagen is called, an answer goes out."""

if __name__ == "__main__":  # first, since what follows takes a moment
    from fagen.interrupts import leave_at_once

    leave_at_once()

from fagen.commandline import main

if __name__ == "__main__":
    main(prog_name="fagen")
