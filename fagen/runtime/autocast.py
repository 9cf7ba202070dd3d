"""q, k and v of whatever dtypes in, what torch.autocast makes of them out.

torch's own attention casts under autocast before it looks at dtypes. Here three tensors of one
16-bit dtype are taken as they are, so that such a call does not pay for the question; what would be
refused otherwise is cast as torch does.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

QKV = ("q", "k", "v")

# as remedies end, beside "q.to(torch.bfloat16) converts it"
ALSO = ", and so does torch.autocast around the call"

_TAKEN = (torch.float16, torch.bfloat16)
_CAST = (torch.float32, *_TAKEN)  # float64 torch leaves alone


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three in autocast's dtype, or as they are where it casts nothing that is needed.

    It casts where it is on for the device of q, to 16 bits, and the three are in fp32, or in
    several dtypes of 16 and 32 bits. Gradients come back in their own.
    """
    return _casted(q, k, v) or (q, k, v)


def again(
    function: Callable[..., Any], given: Mapping[str, Any], refusal: ValueError
) -> dict[str, Any]:
    """Return the arguments of a call of `function` that was refused, as autocast has them.

    `given` are those by name, and there may be more. Raises what the call was refused by where
    autocast would have changed nothing.
    """
    tensors = [given[name] for name in QKV]
    casted = _casted(*tensors)
    if casted is None:
        _refuse(tensors, refusal)
    names = (name for name in function.__annotations__ if name != "return")
    return {name: given[name] for name in names} | dict(zip(QKV, casted, strict=True))


def _refuse(tensors: list[Any], refusal: ValueError) -> NoReturn:
    """Raise what was refused; of one in fp32 beside others it says that autocast is a way out."""
    said = str(refusal)
    fp32 = (isinstance(x, Tensor) and x.dtype is torch.float32 for x in tensors)
    if said.endswith("converts it") and any(fp32):
        raise ValueError(said + ALSO) from None
    raise refusal


def _casted(*tensors: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    if not all(isinstance(x, Tensor) and x.dtype in _CAST for x in tensors):
        return None
    q, k, v = tensors
    if q.dtype in _TAKEN and q.dtype == k.dtype == v.dtype:
        return None
    place = q.device.type
    # others have no autocast, or no kernels
    if place not in ("cpu", "cuda") or not torch.is_autocast_enabled(place):
        return None
    dtype = torch.get_autocast_dtype(place)
    return (q.to(dtype), k.to(dtype), v.to(dtype)) if dtype in _TAKEN else None
