"""What the kernel says about this process, for the last three fields of a report."""

from __future__ import annotations

import contextlib
import resource
import sys
from typing import Final

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
