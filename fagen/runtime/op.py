"""A Binary goes in, torch.ops.fagen.<slug> comes out; or one call of its C function, unregistered.

`torch.ops.fagen.emulated` and `emulated_fp8` run any schedule on CPU tensors, without a Binary.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.errors import BuildError, FagenError
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.plan import Plan
from fagen.runtime.c_interface import (
    Fp8KernelArgs,
    KernelArgs,
    KernelInfo,
    bind_kernel,
    call_kernel,
    info_of,
    kernel_args,
    kernel_info,
    library_at,
)
from fagen.runtime.checks import plan_of, refuse_arguments

__all__ = [
    "Fp8KernelArgs",
    "KernelArgs",
    "Alone",
    "KernelInfo",
    "Op",
    "alone",
    "bind_kernel",
    "call_kernel",
    "kernel_args",
    "kernel_info",
    "load",
    "plan_of",
    "refuse_arguments",
]

Op = Callable[..., tuple[Tensor, Tensor]]  # of q, k, v, scale, and in e4m3 their descales
Alone = Callable[..., Tensor]  # the same without the log-sum-exp


# ---- the torch op -------------------------------------------------------------------------------

WITHOUT_LSE = "_without_lse"  # an op's name ends so
_loading = threading.Lock()
_loaded: dict[str, tuple[str, Op]] = {}  # slug → hash of its source, op
_alone: dict[Op, Alone] = {}


def load(binary: Binary, outputs: Op | None = None) -> Op:
    """Register `binary` as torch.ops.fagen.<slug>(q, k, v, scale) -> (out, lse) and return the op.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), all on one device, the last dimension
    contiguous, base pointers and other strides multiples of 16 bytes; scale finite and positive, H
    a multiple of Hk. out (B, Sq, H, Dv) in their dtype; lse (B, H, Sq) in fp32, natural logarithm,
    minus infinity beside a zero output for a row that sees no key. On CPU tensors the schedule is
    emulated. The op raises ValueError that names a wrong argument, also where a gradient would be
    needed. From any thread, as often as you like: the second time costs nothing.

    In e4m3 it is fagen.<slug>(q, k, v, scale, q_descale, k_descale, v_descale): what the numbers of
    q, k and v are to be multiplied by, (B, H or Hk, blocks) in fp32, B and H also 1. None is 1
    where scales are not by block. A schedule with V by columns takes v (B, Hk, Dv, Sk to 16).

    Beside it there is fagen.<slug>_without_lse(…) -> out, for `alone`.

    `outputs` makes tensors without numbers of the op's arguments where it is another kind of op:
    see fagen.quantize_op.

    Raises FagenError where this process has another source under the slug, BuildError where there
    is no binding or it does not load.
    """
    with _loading:
        if known := _loaded.get(binary.slug):
            if known[0] != binary.source_hash:
                raise FagenError(
                    f"{binary.slug}: this process has loaded source {known[0][:12]} under that "
                    f"name, so {binary.source_hash[:12]} cannot be another op: use a new process, "
                    "or op.call_kernel, which registers nothing"
                )
            return known[1]
        op = _register(binary, _fakes(binary.slug) if outputs is None else {"": outputs})
        if outputs is None:
            _alone[op] = getattr(torch.ops.fagen, f"{binary.slug}{WITHOUT_LSE}").default
        _loaded[binary.slug] = binary.source_hash, op
        return op


def alone(attend: Op) -> Alone:
    """Return what gives out only: of a loaded kernel an op that takes less of the host's time."""

    def first(*given: Any) -> Tensor:
        return attend(*given)[0]

    return _alone.get(attend, first)


def _fakes(slug: str) -> dict[str, Callable[..., Any]]:
    """What makes outputs without numbers, by the end of an op's name."""
    return {"": partial(_outputs, slug), WITHOUT_LSE: lambda *q, **k: _outputs(slug, *q, **k)[0]}


def _register(binary: Binary, fakes: Mapping[str, Callable[..., Any]]) -> Op:
    if binary.binding is None:
        raise BuildError(
            f"{binary.slug} was built without its torch binding: build it again where torch is "
            "installed"
        )
    try:
        torch.ops.load_library(binary.binding)
    except OSError as error:
        raise BuildError(f"{binary.binding} does not load: {error}") from error
    linked = info_of(binary.binding, binary.slug).source_hash
    if linked != binary.source_hash:  # the loader took a library of the same name for it
        raise BuildError(
            f"{binary.binding} was linked to source {linked[:12]}, not {binary.source_hash[:12]}: "
            "use a new process"
        )
    tell = library_at(binary.binding)[f"fagen_{binary.slug}_refused"]

    def telling(outputs: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return outputs(*arguments, **named)
        except ValueError as refusal:
            tell(str(refusal).encode())  # the op calls this through C, which loses exceptions
            raise

    for end, outputs in fakes.items():
        for name in (f"{binary.slug}{end}", f"{binary.slug}{end}_no_grad"):
            torch.library.register_fake(f"fagen::{name}", partial(telling, outputs), lib=_ops)
    return getattr(torch.ops.fagen, binary.slug).default  # type: ignore[no-any-return]


def _outputs(
    slug: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs without numbers, or refuse: what torch asks while it traces."""
    of = plan_of(slug)
    refuse_arguments(of, q, k, v, scale, q_descale, k_descale, v_descale, have_data=False)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty(
        batch, seqlen_q, heads, of.head_dim_v, dtype=getattr(torch, of.out_dtype.torch)
    )
    return out, q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)


# ---- the emulated ops ---------------------------------------------------------------------------


def _emulate(
    of: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, *descales: Tensor | None
) -> tuple[Tensor, Tensor]:
    refuse_arguments(of, q, k, v, scale, *descales)
    with torch.no_grad():
        if not of.fp8:
            return emulator.emulate(of, q, k, v, scale)
        one = torch.ones(1, 1, 1, device=q.device)
        given = [one if descale is None else descale for descale in descales or (None,) * 3]
        return emulator.emulate_fp8(of, q, k, v, scale, *given)


_ops = torch.library.Library("fagen", "FRAGMENT")
for _name, _descales in (
    ("emulated", ""),
    ("emulated_fp8", "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "),
):
    _ops.define(
        f"{_name}(Tensor q, Tensor k, Tensor v, float scale, {_descales}str slug)"
        " -> (Tensor out, Tensor lse)"
    )
    _ops.impl(_name, lambda *said: _emulate(plan_of(said[-1]), *said[:-1]), "CPU")
    torch.library.register_fake(
        f"fagen::{_name}", lambda *said: _outputs(said[-1], *said[:-1]), lib=_ops
    )
