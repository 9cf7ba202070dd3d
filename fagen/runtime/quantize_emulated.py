"""A quantiser's slug and CPU tensors in, what its kernel would make of them out, as a torch op."""

from functools import cache

import torch
from torch import Tensor

from fagen.kinds.quantize import reference
from fagen.runtime import op
from fagen.runtime.quantize_checks import plan_of, refuse_arguments, traced_outputs


def _emulated(
    x: Tensor,
    seed: int,
    descale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slug: str,
) -> tuple[Tensor, Tensor]:
    of = plan_of(slug)
    refuse_arguments(of, x, descale, cos, sin)
    with torch.no_grad():
        spread = descale
        if descale is not None:
            spread = descale.reshape((1, 1, 1) if descale.dim() == 0 else (*descale.shape, 1))
        rotary = None if cos is None or sin is None else (cos, sin)
        values, found = reference.quantize(of, x, seed, spread, rotary)
    if descale is not None:
        return values, x.new_empty(0, dtype=torch.float32)
    if of.by_block:
        return values, found
    if not of.by_tensor:
        return values, found[..., 0].contiguous()
    least = found.new_full((1,), of.least / of.largest)  # of a tensor without a number
    return values, torch.cat((found.flatten(), least)).amax()


def _fake_emulated(
    x: Tensor,
    seed: int,
    descale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slug: str,
) -> tuple[Tensor, Tensor]:
    return traced_outputs(plan_of(slug), x, descale, cos, sin)


@cache
def emulation(slug: str) -> op.Op:
    """Return what is called as the op of this slug, on CPU tensors; ValueError for a gradient."""

    def emulated(
        x: Tensor,
        seed: int,
        descale: Tensor | None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        needed = [t.requires_grad for t in (x, descale, cos, sin) if t is not None]
        if any(needed) and torch.is_grad_enabled():
            named = "x or descale" if cos is None else "x, descale, cos or sin"
            raise ValueError(
                f"fagen::{slug}: {named} requires a gradient, which rounding to e4m3 has not; "
                "call it under torch.no_grad()"
            )
        return torch.ops.fagen.quantized(  # type: ignore[no-any-return]
            x, seed, descale, cos, sin, slug
        )

    return emulated


_ops = torch.library.Library("fagen", "FRAGMENT")
_ops.define(
    "quantized(Tensor x, int seed, Tensor? descale, Tensor? cos, Tensor? sin, str slug)"
    " -> (Tensor values, Tensor descale)"
)
_ops.impl("quantized", _emulated, "CPU")
torch.library.register_fake("fagen::quantized", _fake_emulated, lib=_ops)
