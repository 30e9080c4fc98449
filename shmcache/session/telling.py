"""What a session tells to every process that looks at the pool (telemetry/shared.py)."""

from __future__ import annotations

from typing import Final

from shmcache._core import Telling
from shmcache.pool.pool import CacheResidencyPool
from shmcache.session.ledger import Sums
from shmcache.telemetry import CacheResidencyReport
from shmcache.telemetry.shared import SESSIONS, TOLD_COUNTERS, TOLD_GAUGES

_DEVICE: Final = TOLD_GAUGES.index("current_device_bytes")
_HOST: Final = TOLD_GAUGES.index("current_host_bytes")
_DISK: Final = TOLD_GAUGES.index("current_disk_bytes")
_WRITE: Final = TOLD_GAUGES.index("in_flight_write_bytes")
_DEMOTION: Final = TOLD_GAUGES.index("in_flight_host_demotion_bytes")


def telling(pool: CacheResidencyPool, report: CacheResidencyReport) -> Telling:
    """Of a session that begins."""
    made = Telling(pool, report, TOLD_COUNTERS, TOLD_GAUGES)
    made.stand_all()
    made.stand(SESSIONS, 1)
    return made


def tell_levels(telling: Telling, sums: Sums) -> None:
    """What is published, and what was counted on the way there."""
    telling.count()
    telling.stand(_DEVICE, sums.device)
    telling.stand(_HOST, sums.host)
    telling.stand(_DISK, sums.disk + sums.imported)
    telling.stand(_WRITE, sums.write)
    telling.stand(_DEMOTION, sums.demotion)
