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
from shmcache.policy.identity import (
    CacheBlockId,
    CacheRankIdentity,
    CacheRepresentation,
    CacheTier,
)
from shmcache.pool.names import segment_names, segment_path
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
    "CacheBlockId",
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
    "CacheRankIdentity",
    "CacheRepresentation",
    "CacheResidencyPool",
    "CacheStorageError",
    "CacheStoragePhase",
    "CacheTier",
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
    "segment_names",
    "segment_path",
]
