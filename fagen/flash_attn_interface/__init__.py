"""FlashAttention-3's calls in, fagen's answers out, in FlashAttention-3's layout.

Code that imports from `flash_attn_interface` runs with `fagen.flash_attn_interface` instead, or as
it stands after `install()`. Names, order and defaults of arguments are those of FlashAttention-3's
module; what fagen has no kernels for yet raises NotImplementedError, which names the argument.
"""

import sys

from fagen.errors import FagenError
from fagen.flash_attn_interface.calls import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from fagen.flash_attn_interface.kvcache import (
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from fagen.flash_attn_interface.low_level import _flash_attn_backward, _flash_attn_forward

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "flash_attn_combine",
    "_flash_attn_forward",
    "_flash_attn_backward",
    "install",
]

NAME = "flash_attn_interface"  # of FlashAttention-3's module


def install() -> None:
    """Make this module what `import flash_attn_interface` finds in this process.

    Call it before that import, as in a conftest.py. Raises FagenError where FlashAttention-3's own
    is imported already.
    """
    module = sys.modules[__name__]
    if sys.modules.setdefault(NAME, module) is not module:
        raise FagenError(f"{NAME} is imported already, and is not fagen's: call install() before")
