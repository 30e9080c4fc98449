"""Figures of the engine alone, from engine.c, compiled beside the benchmark that asks for them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import msgspec

_HERE = Path(__file__).parent
_CORE = _HERE.parents[1] / "shmcache" / "core"


def engine_figures() -> dict[str, float]:
    """Nanoseconds by name; see engine.c."""
    sources = [path for path in sorted(_CORE.glob("*.c")) if path.name != "redo.c"]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "engine"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", f"-I{_CORE}", "-Wl,-z,now", "-pthread"]
        subprocess.run(
            ["cc", *flags, _HERE / "engine.c", *sources, "-o", program],
            check=True,
        )
        printed = subprocess.run([program], check=True, capture_output=True).stdout
    return msgspec.json.decode(printed, type=dict[str, float])
