"""Background I/O: a bounded queue, one thread, and tickets for what it will have done.

Read in this order: worker.py (what a user makes), submission.py and ticket.py (what a user holds),
job.py (a task), completion.py (its result), engine.py (the books that all of them share).
"""

from shmcache.io.completion import STOPPED
from shmcache.io.job import CRASHED
from shmcache.io.submission import CacheIoSubmission, CacheIoSubmissionOutcome
from shmcache.io.ticket import CacheIoTicket
from shmcache.io.worker import CacheIoWorker

__all__ = [
    "CRASHED",
    "STOPPED",
    "CacheIoSubmission",
    "CacheIoSubmissionOutcome",
    "CacheIoTicket",
    "CacheIoWorker",
]
