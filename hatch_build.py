"""What a wheel has of generated/: not its kernels, but a line of evidence for each.

fagen.evidence reads the lines where there is no generated/. In a checkout, and so where it is
installed as editable, there is.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = "fagen/shipped"
LEDGER, UNVERIFIED = "ledger.jsonl", "unverified.toml"
_HASH = re.compile(rb'"([0-9a-f]{64})"')


class Shipped(BuildHookInterface):
    """Puts the lines into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write them to where hatchling takes them from."""
        if version == "editable":
            return
        self.made = Path(tempfile.mkdtemp())
        generated = Path(self.root, "generated")
        with (self.made / LEDGER).open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines(generated))
        build_data["force_include"][str(self.made / LEDGER)] = f"{SHIPPED}/{LEDGER}"
        if (generated / UNVERIFIED).exists():
            target = f"{SHIPPED}/{UNVERIFIED}"
            build_data["force_include"][str(generated / UNVERIFIED)] = target

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what initialize wrote."""
        if version != "editable":
            shutil.rmtree(self.made)


def lines(generated: Path) -> Iterator[str]:
    """Yield JSON for each kernel with evidence: its evidence, and the hash of its source there."""
    for path in sorted(generated.glob("*/*/*.json")):
        kernel = path.with_suffix(".cu")
        hashes = _HASH.findall(kernel.read_bytes()) if kernel.exists() else []
        rendered = hashes[-1].decode() if hashes else None
        found = json.loads(path.read_bytes())
        yield json.dumps({"slug": path.stem, "rendered": rendered, "evidence": found})
