"""Call a kernel of any kind once, on small tensors with nothing special in them.

    python small_call.py LIBRARY SLUG SIZE=NUMBER ...

Every named size of its signature is given. It is run under compute-sanitizer; what the kernel
computes is checked elsewhere.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from fagen.registry import plan_of
from fagen.runtime.c_interface import call
from fagen.runtime.checks import allocated, checked
from fagen.vocab import INT32


def main() -> None:
    """Call it, and wait until it is done."""
    library, slug, *said = sys.argv[1:]
    plan = plan_of(slug)
    sizes = {name: int(number) for name, number in (word.split("=") for word in said)}
    given: dict[str, Any] = {scalar.name: scalar.default or 1 for scalar in plan.signature.numbers}
    torch.manual_seed(0)
    for tensor in plan.signature.inputs:
        if not (tensor.made or (tensor.optional and tensor.dtype is INT32)):  # all keys count
            shape = [dim.extent.at(sizes) for dim in tensor.dims]
            if tensor.dtype is INT32:  # where sequences begin that all rows are dealt out to
                total = sizes[tensor.name.replace("cu_seqlens", "total")]
                values = torch.linspace(0, total, *shape)
            else:
                values = torch.randn(shape)
            # made on the CPU: no kernel runs but the one that is looked at
            given[tensor.name] = values.to(getattr(torch, tensor.dtype.torch)).cuda()
    outputs = allocated(plan, given, checked(plan, given))
    results = [tensor.result for tensor in plan.signature.outputs]
    call(plan, Path(library), **given, **dict(zip(results, outputs, strict=True)))
    torch.cuda.synchronize()
    print(f"{slug}: done")


if __name__ == "__main__":
    main()
