"""What sessions tell through the segment: which word of a telemetry row has which number.

Why: whoever watches a host wants one sum over workers that it cannot ask, some of them dead. Each
session adds to the row of its process; the sum over all rows is the pool's.

Contract: the order below is part of the segment's layout; a change raises its version. Counters of
the dead stay, their gauges go. Counters are told with every change of residency and every count
by layer, so the last event of a killed session may be missing. Of the gauges, `sessions` and levels
in bytes are told with every change, the others whenever the session is asked for its report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shmcache.telemetry.report import AdditiveResidency
from shmcache.telemetry.totals import CacheResidencyTotals

_FIELDS: Final = AdditiveResidency.__struct_fields__
_FIRST_COUNTER: Final = _FIELDS.index("host_promotions")
_COUNTERS_MAX: Final = 32  # words before the first gauge

TOLD_GAUGES: Final = _FIELDS[:_FIRST_COUNTER]
TOLD_COUNTERS: Final = _FIELDS[_FIRST_COUNTER:]
SESSIONS: Final = len(TOLD_GAUGES)
"""The gauge behind those of the report: sessions that have not ended."""


def totals_told(words: Sequence[int]) -> CacheResidencyTotals:
    """The sums over all rows, counters first, as a report over all sessions."""
    gauges = words[_COUNTERS_MAX:]
    named = dict(zip(TOLD_COUNTERS, words, strict=False))
    named.update(zip(TOLD_GAUGES, gauges, strict=False))
    return CacheResidencyTotals(**named, sessions=gauges[SESSIONS])
