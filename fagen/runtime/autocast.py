"""q, k and v of whatever dtypes in, what torch.autocast makes of them out.

torch's own attention casts under autocast before it looks at dtypes. Here three tensors of one
16-bit dtype are taken as they are; what would be refused otherwise is cast as torch does.
"""

from typing import Any

import torch
from torch import Tensor

# as remedies end, beside "q.to(torch.bfloat16) converts it"
ALSO = ", and so does torch.autocast around the call"

# whether it is on for any device: what each call asks, in a tenth of the time of `cast`
anywhere = torch._C._is_any_autocast_enabled

_TAKEN = (torch.float16, torch.bfloat16)
_CAST = (torch.float32, *_TAKEN)  # float64 torch leaves alone


def cast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Return the three in autocast's dtype, or as they are where it casts nothing that is needed.

    It casts where it is on for the device of q, to 16 bits, and the three are in fp32, or in
    several dtypes of 16 and 32 bits. Gradients come back in their own. What is no tensor stays.
    """
    if not all(isinstance(x, Tensor) and x.dtype in _CAST for x in (q, k, v)):
        return q, k, v
    if q.dtype in _TAKEN and q.dtype == k.dtype == v.dtype:
        return q, k, v
    place = q.device.type
    # others have no autocast, or no kernels
    if place not in ("cpu", "cuda") or not torch.is_autocast_enabled(place):
        return q, k, v
    dtype = torch.get_autocast_dtype(place)
    return (q.to(dtype), k.to(dtype), v.to(dtype)) if dtype in _TAKEN else (q, k, v)
