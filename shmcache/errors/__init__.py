"""Every exception of the package: one family per base class, one nested subclass per condition.

Why: a caller catches `CachePoolError.BudgetExceeded` and reads `error.required`; one import finds
every family, and each family's conditions stand together in the file of its subject.

Not here: `TypeError` and `ValueError` for arguments outside their domain (bounds.py).
"""

from shmcache.errors.base import ContractError, size_text
from shmcache.errors.dump import DumpError
from shmcache.errors.io import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.errors.lifecycle import CacheLifecycleError
from shmcache.errors.persistence import (
    LiveCachePublicationError,
    PromptCachePersistenceError,
)
from shmcache.errors.policy import CachePolicyError, LayerScheduleError
from shmcache.errors.pool import CachePoolError
from shmcache.errors.prompt import PromptCacheError
from shmcache.errors.residency import CacheResidencyConfigurationError, CacheResidencyError
from shmcache.errors.segment import RefusedCheck, SegmentError
from shmcache.errors.storage import CacheStorageError
from shmcache.errors.trace import TraceError
from shmcache.errors.workloads import WorkloadError

__all__ = [
    "CacheIoExecutionStateError",
    "CacheIoWorkerError",
    "CacheLifecycleError",
    "CachePolicyError",
    "CachePoolError",
    "CacheResidencyConfigurationError",
    "CacheResidencyError",
    "CacheStorageError",
    "ContractError",
    "DumpError",
    "LayerScheduleError",
    "LiveCachePublicationError",
    "PromptCacheError",
    "PromptCachePersistenceError",
    "RefusedCheck",
    "SegmentError",
    "TraceError",
    "WorkloadError",
    "size_text",
]
