"""What a session refuses: its options, and what it does with blocks (contract/residency.md)."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, TypeAlias

from shmcache.errors.base import ContractError, variant
from shmcache.errors.io import CacheIoWorkerError
from shmcache.errors.lifecycle import CacheLifecycleError
from shmcache.errors.policy import CachePolicyError
from shmcache.errors.pool import CachePoolError
from shmcache.errors.prompt import PromptCacheError
from shmcache.errors.storage import CacheStorageError


class CacheResidencyConfigurationError(ContractError):
    """Options that contradict themselves, or the pool they are to be used with."""

    InvalidOptions: TypeAlias = "_ConfigurationInvalidOptions"
    Pool: TypeAlias = "_ConfigurationPool"


@variant("the cache options are invalid: {code}")
class _ConfigurationInvalidOptions(CacheResidencyConfigurationError):
    code: str
    message: str = field(default="", compare=False)


@variant("{error}", cause="error")
class _ConfigurationPool(CacheResidencyConfigurationError):
    error: CachePoolError


class CacheResidencyError(ContractError):
    """What a session raises. A call that raises has put back what it had begun.

    Contract: `BudgetExceeded` speaks of this session's budget, `Pool` of what all sessions share.
    `Pool`, `Lifecycle`, `Storage`, `IoExecution`, `Policy` and `PromptCache` carry the error of the
    piece that refused; it is also the `__cause__`.
    """

    Pool: TypeAlias = "_ResidencyPool"
    Lifecycle: TypeAlias = "_ResidencyLifecycle"
    Storage: TypeAlias = "_ResidencyStorage"
    IoExecution: TypeAlias = "_ResidencyIoExecution"
    Policy: TypeAlias = "_ResidencyPolicy"
    PromptCache: TypeAlias = "_ResidencyPromptCache"
    InvalidOptions: TypeAlias = "_ResidencyInvalidOptions"
    InvalidTokenRange: TypeAlias = "_ResidencyInvalidTokenRange"
    ArrayMismatch: TypeAlias = "_ResidencyArrayMismatch"
    MissingResidentArrays: TypeAlias = "_ResidencyMissingResidentArrays"
    BudgetExceeded: TypeAlias = "_ResidencyBudgetExceeded"
    LiveDiskRequired: TypeAlias = "_ResidencyLiveDiskRequired"
    ManagerPoisoned: TypeAlias = "_ResidencyManagerPoisoned"
    DiskOperationCancelled: TypeAlias = "_ResidencyDiskOperationCancelled"
    Runtime: TypeAlias = "_ResidencyRuntime"
    Io: TypeAlias = "_ResidencyIo"


@variant("{error}", cause="error")
class _ResidencyPool(CacheResidencyError):
    error: CachePoolError


@variant("{error}", cause="error")
class _ResidencyLifecycle(CacheResidencyError):
    error: CacheLifecycleError


@variant("{error}", cause="error")
class _ResidencyStorage(CacheResidencyError):
    error: CacheStorageError


@variant("{error}", cause="error")
class _ResidencyIoExecution(CacheResidencyError):
    error: CacheIoWorkerError


@variant("{error}", cause="error")
class _ResidencyPolicy(CacheResidencyError):
    error: CachePolicyError


@variant("{error}", cause="error")
class _ResidencyPromptCache(CacheResidencyError):
    error: PromptCacheError


@variant("the session cannot work with these options: {message}")
class _ResidencyInvalidOptions(CacheResidencyError):
    message: str


@variant("no block can cover the tokens from {start} up to {end}")
class _ResidencyInvalidTokenRange(CacheResidencyError):
    start: int
    end: int


@variant("arrays do not fit the layer or the block: {message}")
class _ResidencyArrayMismatch(CacheResidencyError):
    message: str


@variant("the arrays of {id} are not on the device")
class _ResidencyMissingResidentArrays(CacheResidencyError):
    """`id` is a `CacheBlockId`."""

    id: Any


@variant(
    "the session's {tier} tier would hold {required} bytes, its budget is {budget}",
    hint="release leases or shorten the cache, or give the session a larger budget",
)
class _ResidencyBudgetExceeded(CacheResidencyError):
    """`tier` is a `CacheTier`."""

    tier: Any
    required: int
    budget: int


@variant(
    "the host tier holds {required} bytes of {budget} and nothing may go to disk",
    hint="enable the live disk (with_live_disk), or give the session a larger host budget",
)
class _ResidencyLiveDiskRequired(CacheResidencyError):
    required: int
    budget: int


@variant(
    "the session's books are unusable, a change was cut short and could not be recounted",
    hint="close the session and start a new one",
)
class _ResidencyManagerPoisoned(CacheResidencyError):
    pass


@variant("the cache changed: work of generation {generation} was cancelled", hint="ask again")
class _ResidencyDiskOperationCancelled(CacheResidencyError):
    generation: int


@variant("{message}")
class _ResidencyRuntime(CacheResidencyError):
    """A copy or a background write failed; the block is where it was."""

    message: str


@variant("{action} failed for {path}: {source}", cause="source")
class _ResidencyIo(CacheResidencyError):
    """`action` is `create_live_directory` or `unlink_live_block`."""

    action: str
    path: Path
    source: Exception
