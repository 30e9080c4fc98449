"""One shared-memory pool of cache memory for every inference worker of a host.

Start at `CacheResidencyPool`; docs/architecture.md tells how the pieces fit.
"""

from shmcache._core import CachePoolMembership, CachePoolReservation
from shmcache.errors import (
    CacheIoExecutionStateError,
    CacheIoWorkerError,
    CacheLifecycleError,
    CachePoolError,
    CacheStorageError,
    ContractError,
    SegmentError,
)
from shmcache.io import (
    CacheIoSubmission,
    CacheIoSubmissionOutcome,
    CacheIoTicket,
    CacheIoWorker,
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
from shmcache.states.execution import (
    CacheIoAdmission,
    CacheIoCompletionDisposition,
    CacheIoExecutionState,
    CacheIoPreparation,
    CacheIoStartDisposition,
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
from shmcache.telemetry import (
    CACHE_RESIDENCY_LAYER_REPORT_LIMIT,
    CacheLayerResidencyReport,
    CacheLayerResidencyStats,
    CacheResidencyReport,
    CacheResidencyTelemetry,
    CacheResidencyTotals,
)

__all__ = [
    "CACHE_RESIDENCY_LAYER_REPORT_LIMIT",
    "CacheBlockId",
    "CacheBlockLifecycle",
    "CacheBlockStorage",
    "CacheEvictionPolicy",
    "CacheHostDemotionOperation",
    "CacheHostPromotion",
    "CacheIoAdmission",
    "CacheIoCompletionDisposition",
    "CacheIoExecutionState",
    "CacheIoExecutionStateError",
    "CacheIoOperation",
    "CacheIoOperationKey",
    "CacheIoOperationKind",
    "CacheIoPreparation",
    "CacheIoStartDisposition",
    "CacheIoSubmission",
    "CacheIoSubmissionOutcome",
    "CacheIoTicket",
    "CacheIoWorker",
    "CacheIoWorkerError",
    "CacheLayerResidencyReport",
    "CacheLayerResidencyStats",
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
    "CacheResidencyReport",
    "CacheResidencyTelemetry",
    "CacheResidencyTotals",
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
