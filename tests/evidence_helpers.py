"""Evidence that is made up, and a folder that stands in for generated/."""

from pathlib import Path
from typing import Any

import pytest

from fagen.evidence import FLAGS, Evidence
from fagen.paths import locate
from fagen.records import ShapeError, Speed

FORM = "fwd_fp16_d128_causal_m128n128"  # which is committed as text
SLUG = "fwd_fp16_d128_full_m128n128"  # which is not
GOOD = ShapeError(1, 128, 128, 2, 2, 1.235e-4, 1e-4, 1.1e-3, 3e-7, 1e-3)
SPEED = Speed("sustained", 4, 4096, 16, 600.0, 0.01, 1700, 500.0)


def evidence_of(slug: str = SLUG, **changes: Any) -> Evidence:
    """Evidence of a kernel that nobody ran, on a card that one might have."""
    fields: dict[str, Any] = dict(
        slug=slug,
        device="a" * 64,
        launcher="e" * 64,
        constants="c" * 64,
        machine_code="b" * 64,
        flags=FLAGS,
        cutlass="4.2.0",
        compiler="13.0.88",
        card="NVIDIA H200",
        driver="580.159.03",
        torch="2.11.0+cu130",
        date="2026-01-31",
        yardstick="cuDNN",
        errors=(GOOD,),
        speeds=(SPEED,),
    )
    return Evidence(**fields | changes)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a folder taken for generated/."""

    def located(name: str) -> Path:
        return folder if name == "generated" else locate(name)

    for module in ("audit", "store"):
        monkeypatch.setattr(f"fagen.evidence.{module}.locate", located)
    return folder
