"""The old name of dispatch/pick.py, until runtime/ has moved over."""

from fagen.dispatch.pick import LARGEST, LONGEST, Pick, pick, search_command, sizes_of

__all__ = ["LARGEST", "LONGEST", "Pick", "pick", "search_command", "sizes_of"]
