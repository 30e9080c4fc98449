"""What this host can give to a pool, and what of it makes pools fail.

Read in this order: `host.py` (what is looked at, and how a test shows it another host),
`trials.py` (what can only be tried), one file of checks per subject, `examination.py` (the table).
"""

from shmcache.doctor.examination import CHECKS, ROOM_CHECKS, Examination, HostCheck, examine_host
from shmcache.doctor.host import CheckStatus, Host, HostSupply, Mount, ShmRoom, Verdict
from shmcache.doctor.trials import HostTrials, SegmentSight, try_host

__all__ = [
    "CHECKS",
    "ROOM_CHECKS",
    "CheckStatus",
    "Examination",
    "Host",
    "HostCheck",
    "HostSupply",
    "HostTrials",
    "Mount",
    "SegmentSight",
    "ShmRoom",
    "Verdict",
    "examine_host",
    "try_host",
]
