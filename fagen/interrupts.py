"""Ctrl-C while a command line is still imported: it ends at once, without a traceback."""

import os
import signal

INTERRUPTED = 130  # what a shell says of a program ended by Ctrl-C


def leave_at_once() -> None:
    """Until all is imported Ctrl-C ends the program; asked by what is run as one, before all else.

    Where it is ignored, as by a shell in the background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def as_exceptions() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again, which a command ends with in its own way."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)  # nothing is open yet, and modules may be half made
