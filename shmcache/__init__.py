"""One shared-memory pool of cache memory for every inference worker of a host.

Start at `CacheResidencyPool`; docs/architecture.md tells how the pieces fit.
"""

from typing import TYPE_CHECKING

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
    CacheResidencyConfigurationError,
    CacheResidencyError,
    CacheStorageError,
    ContractError,
    DumpError,
    LayerScheduleError,
    LiveCachePublicationError,
    PromptCacheError,
    PromptCachePersistenceError,
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
    prompt_cache_layout_fields,
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
from shmcache.pool.admission import Admission
from shmcache.pool.arena import (
    ArenaClass,
    ArenaHolding,
    ArenaReport,
    BlockStat,
    PublishResult,
)
from shmcache.pool.dump import DumpHeader, PoolDump, read_dump
from shmcache.pool.host import HostRoom, read_host_room
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
from shmcache.pool.snapshot import (
    SNAPSHOT_VERSION,
    ArenaSnapshot,
    AxesSnapshot,
    AxisSnapshot,
    ManagerSnapshot,
    OwnerSnapshot,
    PoolSnapshot,
    snapshot_schema,
)
from shmcache.pool.supervisor import Supervisor, SupervisorEvent, SupervisorEventKind
from shmcache.pool.values import (
    CachePoolLimits,
    CachePoolReport,
    CachePoolResource,
    CachePoolUsage,
)
from shmcache.pool.watching import PoolWatcher
from shmcache.prompt.generations import (
    PromptCacheGeneration,
    PromptCacheGenerationKind,
    prompt_cache_generations,
    prune_prompt_cache,
)
from shmcache.prompt.header import MAX_PROMPT_CACHE_SHARD_HEADER_BYTES
from shmcache.prompt.live import LiveCacheBlockPublication
from shmcache.prompt.paths import (
    PROMPT_CACHE_CURRENT_FILE,
    PROMPT_CACHE_GENERATIONS_DIRECTORY,
    prompt_cache_rank_path,
    resolve_prompt_cache_root,
    safe_prompt_cache_shard_path,
)
from shmcache.prompt.producing import write_block_shard, write_state_shard
from shmcache.prompt.publication import PromptCachePublication
from shmcache.prompt.reading import (
    PromptCacheReader,
    inspect_prompt_cache,
    validate_prompt_cache_manifest,
    verify_prompt_cache,
)
from shmcache.prompt.reversible import ReversiblePromptCachePublication
from shmcache.prompt.shard import finalize_prompt_cache_shard, hash_prompt_cache_shard_payload
from shmcache.session.arena_memory import ArenaHostMemory
from shmcache.session.backend import CacheBackend
from shmcache.session.numpy_backend import NumpyBackend, PrivateHostMemory
from shmcache.session.options import CacheResidencyPolicy, LiveCacheDiskPolicy, PagedCacheOptions
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.reading import CacheBlockLease
from shmcache.session.scans import CachePiece
from shmcache.session.session import CacheSession
from shmcache.session.sharing import CacheSharingReport
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
    ProcessSample,
)

if TYPE_CHECKING:
    from shmcache.session.torch_backend import TorchBackend as TorchBackend

__all__ = [
    "CACHE_RESIDENCY_LAYER_REPORT_LIMIT",
    "MAX_PROMPT_CACHE_SHARD_HEADER_BYTES",
    "PROMPT_CACHE_CURRENT_FILE",
    "PROMPT_CACHE_GENERATIONS_DIRECTORY",
    "PROMPT_CACHE_SCHEMA_VERSION",
    "SNAPSHOT_VERSION",
    "Admission",
    "ArenaClass",
    "ArenaHolding",
    "ArenaHostMemory",
    "ArenaReport",
    "ArenaSnapshot",
    "AttentionPolicy",
    "AxesSnapshot",
    "AxisSnapshot",
    "Block",
    "BlockStat",
    "CacheBackend",
    "CacheBlockId",
    "CacheBlockLease",
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
    "CachePiece",
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
    "CacheResidencyConfigurationError",
    "CacheResidencyError",
    "CacheResidencyPolicy",
    "CacheResidencyPool",
    "CacheResidencyReport",
    "CacheResidencyTelemetry",
    "CacheResidencyTotals",
    "CacheSession",
    "CacheSharingReport",
    "CacheStorageError",
    "CacheStoragePhase",
    "CacheTier",
    "Claim",
    "ContractError",
    "DumpError",
    "DumpHeader",
    "HostRoom",
    "LayerCachePolicy",
    "LayerRange",
    "LayerSchedule",
    "LayerScheduleError",
    "Lease",
    "LeaseRun",
    "LiveCacheBlockPublication",
    "LiveCacheDiskPolicy",
    "LiveCachePublicationError",
    "ManagerSnapshot",
    "MutableCacheTail",
    "MutableStateResidency",
    "NumpyBackend",
    "OwnerRecord",
    "OwnerSnapshot",
    "OwnerVerdict",
    "PagedCacheOptions",
    "PoolDump",
    "PoolSnapshot",
    "PoolWatcher",
    "PoolingStateComponent",
    "PrefixKeys",
    "PrefixSharing",
    "PrivateHostMemory",
    "ProcessSample",
    "PromptCacheBlock",
    "PromptCacheDescriptor",
    "PromptCacheError",
    "PromptCacheGeneration",
    "PromptCacheGenerationKind",
    "PromptCacheManifest",
    "PromptCacheModelIdentity",
    "PromptCacheOptions",
    "PromptCachePersistenceError",
    "PromptCachePublication",
    "PromptCacheReader",
    "PromptCacheStateSegment",
    "PromptCacheStateTensor",
    "PromptCacheTopology",
    "PublishResult",
    "ReclaimedOwner",
    "ReversiblePromptCachePublication",
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
    "finalize_prompt_cache_shard",
    "hash_prompt_cache_shard_payload",
    "inspect_prompt_cache",
    "prompt_cache_generations",
    "prompt_cache_layout_fields",
    "prompt_cache_rank_path",
    "prompt_cache_token_fingerprint",
    "prune_prompt_cache",
    "read_dump",
    "read_host_room",
    "resolve_prompt_cache_root",
    "safe_prompt_cache_shard_path",
    "segment_names",
    "segment_path",
    "snapshot_schema",
    "validate_prompt_cache_manifest",
    "validate_prompt_cache_model_identity",
    "verify_prompt_cache",
    "write_block_shard",
    "write_state_shard",
]


def __getattr__(name: str) -> object:
    """`TorchBackend`, which needs torch. Errors: ImportError with the command that brings it."""
    if name == "TorchBackend":
        from shmcache.session.torch_backend import TorchBackend

        return TorchBackend
    raise AttributeError(f"module 'shmcache' has no attribute {name!r}")
