"""Ctrl-C while a command line is still imported: it ends at once, without a traceback.

Imported before anything else by what is run as a program, and by nothing else.
"""

import os
import signal

INTERRUPTED = 130  # what a shell says of a program ended by Ctrl-C


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)  # nothing is open yet, and modules may be half made


def as_exceptions() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again, which a command ends with in its own way."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# one that is ignored, as by a shell in the background, stays so
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
