"""What the kernel says about processes: of this one, the last three fields of a report."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import Final

import msgspec

from shmcache.telemetry.report import CacheResidencyReport

_MAXRSS_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024


def sample_process(report: CacheResidencyReport) -> None:
    """Write memory and page faults of this process into the report; a failing call writes nothing.

    Units: `process_rss_bytes` is the largest resident size so far, pool pages that this process has
    touched included: over processes it does not add up.
    """
    with contextlib.suppress(OSError):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        report.process_rss_bytes = usage.ru_maxrss * _MAXRSS_UNIT_BYTES
        report.process_minor_page_faults = usage.ru_minflt
        report.process_major_page_faults = usage.ru_majflt


class ProcessSample(msgspec.Struct, frozen=True):
    """One process at one instant.

    Units: `rss_bytes` is what is resident now, pool pages that it has touched included: over
    processes it does not add up. The page faults are those since its start.
    """

    pid: int
    rss_bytes: int
    minor_page_faults: int
    major_page_faults: int


def sample_process_of(pid: int, start_ticks: int = 0) -> ProcessSample | None:
    """Look at another process; None if it has gone, cannot be looked at, or is another one.

    `start_ticks` is field 22 of its /proc/PID/stat, by which a pid that was used again is told; 0
    when that is unknown.
    """
    try:
        # The name, field 2, may hold anything; the fields behind it are numbers.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        minor, major, started, pages = (int(fields[n - 3]) for n in (10, 12, 22, 24))
    except (OSError, ValueError, IndexError):
        return None
    if start_ticks not in (0, started) or fields[0] in b"ZX":
        return None
    return ProcessSample(pid, pages * os.sysconf("SC_PAGE_SIZE"), minor, major)
