"""One shared-memory pool of cache memory for every inference worker of a host.

Start at `CacheResidencyPool`; docs/architecture.md tells how the pieces fit.
"""

from shmcache._core import (
    Block,
    CachePoolMembership,
    CachePoolReservation,
    Claim,
    Lease,
    LeaseRun,
)
from shmcache.errors import (
    CacheIoExecutionStateError,
    CacheIoWorkerError,
    CacheLifecycleError,
    CachePolicyError,
    CachePoolError,
    CacheStorageError,
    ContractError,
    LayerScheduleError,
    PromptCacheError,
    SegmentError,
)
from shmcache.io import (
    CacheIoSubmission,
    CacheIoSubmissionOutcome,
    CacheIoTicket,
    CacheIoWorker,
)
from shmcache.policy.attention import AttentionPolicy, LayerSchedule
from shmcache.policy.fingerprints import (
    derive_prompt_cache_architecture_fingerprint,
    prompt_cache_token_fingerprint,
)
from shmcache.policy.identity import (
    CacheBlockId,
    CacheRankIdentity,
    CacheRepresentation,
    CacheTier,
)
from shmcache.policy.layer import LayerCachePolicy
from shmcache.policy.manifest import (
    PROMPT_CACHE_SCHEMA_VERSION,
    PromptCacheBlock,
    PromptCacheManifest,
    PromptCacheStateTensor,
)
from shmcache.policy.prefix_keys import PrefixKeys
from shmcache.policy.prompt_identity import (
    PromptCacheDescriptor,
    PromptCacheModelIdentity,
    PromptCacheOptions,
    validate_prompt_cache_model_identity,
)
from shmcache.policy.state import (
    StateComponentPolicy,
    StateComponentRole,
    StateTensorOwner,
    StateTensorPolicy,
)
from shmcache.policy.state_kinds import (
    MutableStateResidency,
    PoolingStateComponent,
    StateResidencyClass,
    StateTensorDimension,
    StateTensorDtype,
    StateTensorPresence,
    StateTensorRole,
)
from shmcache.policy.topology import LayerRange, PromptCacheStateSegment, PromptCacheTopology
from shmcache.pool.arena import (
    ArenaClass,
    ArenaHolding,
    ArenaReport,
    BlockStat,
    PublishResult,
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
    "PROMPT_CACHE_SCHEMA_VERSION",
    "ArenaClass",
    "ArenaHolding",
    "ArenaReport",
    "AttentionPolicy",
    "Block",
    "BlockStat",
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
    "CachePolicyError",
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
    "Claim",
    "ContractError",
    "LayerCachePolicy",
    "LayerRange",
    "LayerSchedule",
    "LayerScheduleError",
    "Lease",
    "LeaseRun",
    "MutableCacheTail",
    "MutableStateResidency",
    "OwnerRecord",
    "OwnerVerdict",
    "PoolingStateComponent",
    "PrefixKeys",
    "PromptCacheBlock",
    "PromptCacheDescriptor",
    "PromptCacheError",
    "PromptCacheManifest",
    "PromptCacheModelIdentity",
    "PromptCacheOptions",
    "PromptCacheStateSegment",
    "PromptCacheStateTensor",
    "PromptCacheTopology",
    "PublishResult",
    "ReclaimedOwner",
    "SegmentError",
    "SegmentGeometry",
    "StateComponentPolicy",
    "StateComponentRole",
    "StateResidencyClass",
    "StateTensorDimension",
    "StateTensorDtype",
    "StateTensorOwner",
    "StateTensorPolicy",
    "StateTensorPresence",
    "StateTensorRole",
    "Supervisor",
    "SupervisorEvent",
    "SupervisorEventKind",
    "VerifyProblem",
    "VerifyReport",
    "derive_prompt_cache_architecture_fingerprint",
    "prompt_cache_token_fingerprint",
    "segment_names",
    "segment_path",
    "validate_prompt_cache_model_identity",
]
