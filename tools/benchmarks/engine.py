"""Figures of the engine alone, from C programs that are compiled by the benchmark that asks."""

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
    (figures,) = _figures("engine.c", sources, [], runs=1)
    return figures


def longest_holds() -> dict[str, float]:
    """Microseconds by what is done under the lock; see holds.c. The least of three runs: what
    neighbours of this machine add is no part of it."""
    wrap = ["-Wl,--wrap=shmc_lock,--wrap=shmc_unlock"]
    runs = _figures("holds.c", sorted(_CORE.glob("*.c")), wrap, runs=3)
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _figures(
    main: str, sources: list[Path], link: list[str], *, runs: int
) -> list[dict[str, float]]:
    """What the program prints, each time that it runs."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "engine"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", f"-I{_CORE}", "-Wl,-z,now", "-pthread", *link]
        subprocess.run(["cc", *flags, _HERE / main, *sources, "-o", program], check=True)
        return [
            msgspec.json.decode(
                subprocess.run([program], check=True, capture_output=True).stdout,
                type=dict[str, float],
            )
            for _ in range(runs)
        ]
