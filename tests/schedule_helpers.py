"""The kinds of kernels, and a plain schedule of attention, as keys and as the text of its file."""

from fagen.registry import ENTRIES

KINDS = tuple(ENTRIES)
PLAIN = dict(head_dim=128, dtype="fp16", mask="causal", block_m=128, block_n=128)
TEXT = """\
[attention]
head_dim = 128
dtype = "fp16"
mask = "causal"
[tile]
block_m = 128
block_n = 128
"""
