"""The simulator's headers, compiled once for all kernels: else they are a quarter of each build."""

import hashlib
import shutil
import tempfile
import time
from pathlib import Path

from fagen import process, simulator
from fagen.toolchain import find_gxx

DAY = 86_400  # seconds


def headers(folder: Path) -> Path:
    """A folder with the headers and what g++ makes of them; clang++ finds them alone there."""
    gxx, version = find_gxx()
    sources = sorted(simulator._HEADERS.glob("*.hpp"))
    flags = (*simulator._FLAGS, *simulator._OF_GXX)
    parts = (*(path.read_text() for path in sources), *flags, str(gxx), version)
    place = folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():  # of headers as they were
        if other.stat().st_mtime < time.time() - DAY:
            shutil.rmtree(other, ignore_errors=True)
    making = Path(tempfile.mkdtemp(dir=folder))
    for path in sources:
        shutil.copy(path, making)
    if not version.startswith("clang"):
        command = [gxx, *flags, "-x", "c++-header", "gpu.hpp", "-o", "gpu.hpp.gch"]
        compiled = process.run(command, cwd=making)
        assert compiled.returncode == 0, compiled.stderr
    try:
        making.rename(place)
    except OSError:  # another process was as quick
        shutil.rmtree(making)
    return place
