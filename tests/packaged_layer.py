"""A layer goes through AOTInductor into a package, which is loaded and gives what the layer does.

    python packaged_layer.py {with|without} {cpu|cuda} PACKAGE

Without fagen it tells whether torch can do so at all where it runs.
"""

import sys

import torch

from fagen.flash_attn_interface import flash_attn_func


class Layer(torch.nn.Module):
    """Two projections with attention between them, or with sums and products alone."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.qkv, self.out = torch.nn.Linear(128, 384), torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take x (B, S, 128), and return as much."""
        q, k, v = (y.unflatten(-1, (2, 64)) for y in self.qkv(x).chunk(3, -1))
        mixed = flash_attn_func(q, k, v, causal=True) if self.attends else q + k * v
        assert isinstance(mixed, torch.Tensor)
        out: torch.Tensor = self.out(mixed.flatten(-2))
        return out


def main(which: str, device: str, package: str) -> None:
    """Make the package, load it and compare."""
    layer = Layer(which == "with").to(device, torch.bfloat16)
    x = torch.randn(2, 70, 128, device=device, dtype=torch.bfloat16)
    exported = torch.export.export(layer, (x,))  # the first call there is
    torch._inductor.aoti_compile_and_package(exported, package_path=package)
    output = torch._inductor.aoti_load_package(package)(x)
    torch.testing.assert_close(output, layer(x), rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    main(*sys.argv[1:])
