"""One shared-memory pool of cache memory for every inference worker of a host.

Start at `CacheResidencyPool`; docs/architecture.md tells how the pieces fit.
"""

from shmcache._core import CachePoolMembership, CachePoolReservation
from shmcache.errors import (
    CacheLifecycleError,
    CachePoolError,
    CacheStorageError,
    ContractError,
    SegmentError,
)
from shmcache.pool.owners import (
    OwnerRecord,
    OwnerVerdict,
    ReclaimedOwner,
    VerifyProblem,
    VerifyReport,
)
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.segment import SegmentGeometry
from shmcache.pool.supervisor import Supervisor, SupervisorEvent, SupervisorEventKind
from shmcache.pool.values import (
    CachePoolLimits,
    CachePoolReport,
    CachePoolResource,
    CachePoolUsage,
)
from shmcache.states.lifecycle import CacheBlockLifecycle, CacheEvictionPolicy, MutableCacheTail
from shmcache.states.storage import (
    CacheBlockStorage,
    CacheHostDemotionOperation,
    CacheHostPromotion,
    CacheIoOperation,
    CacheIoOperationKey,
    CacheIoOperationKind,
    CacheStoragePhase,
)

__all__ = [
    "CacheBlockLifecycle",
    "CacheBlockStorage",
    "CacheEvictionPolicy",
    "CacheHostDemotionOperation",
    "CacheHostPromotion",
    "CacheIoOperation",
    "CacheIoOperationKey",
    "CacheIoOperationKind",
    "CacheLifecycleError",
    "CachePoolError",
    "CachePoolLimits",
    "CachePoolMembership",
    "CachePoolReport",
    "CachePoolReservation",
    "CachePoolResource",
    "CachePoolUsage",
    "CacheResidencyPool",
    "CacheStorageError",
    "CacheStoragePhase",
    "ContractError",
    "MutableCacheTail",
    "OwnerRecord",
    "OwnerVerdict",
    "ReclaimedOwner",
    "SegmentError",
    "SegmentGeometry",
    "Supervisor",
    "SupervisorEvent",
    "SupervisorEventKind",
    "VerifyProblem",
    "VerifyReport",
]
