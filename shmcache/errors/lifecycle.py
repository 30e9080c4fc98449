"""What the logical side of a session's blocks refuses: registration, leases, the access clock."""

from __future__ import annotations

from typing import Any, TypeAlias

from shmcache.errors.base import ContractError, variant


class CacheLifecycleError(ContractError):
    """A refusal of `CacheBlockLifecycle`. Nothing has changed when one is raised.

    `id` is a `CacheBlockId`.
    """

    DuplicateBlock: TypeAlias = "_LifecycleDuplicateBlock"
    MissingBlock: TypeAlias = "_LifecycleMissingBlock"
    DuplicateRemoval: TypeAlias = "_LifecycleDuplicateRemoval"
    BlockLeased: TypeAlias = "_LifecycleBlockLeased"
    UnexpectedLeaseCount: TypeAlias = "_LifecycleUnexpectedLeaseCount"
    LeaseOverflow: TypeAlias = "_LifecycleLeaseOverflow"
    LeaseUnderflow: TypeAlias = "_LifecycleLeaseUnderflow"
    AccessClockOverflow: TypeAlias = "_LifecycleAccessClockOverflow"


@variant("block {id} is already registered")
class _LifecycleDuplicateBlock(CacheLifecycleError):
    id: Any


@variant("block {id} is not registered")
class _LifecycleMissingBlock(CacheLifecycleError):
    id: Any


@variant("the removals name a block twice")
class _LifecycleDuplicateRemoval(CacheLifecycleError):
    pass


@variant("block {id} is leased", hint="release its leases first")
class _LifecycleBlockLeased(CacheLifecycleError):
    id: Any


@variant("block {id} was expected to have {expected} leases, it has {actual}")
class _LifecycleUnexpectedLeaseCount(CacheLifecycleError):
    id: Any
    expected: int
    actual: int


@variant("the lease count of block {id} is at its bound")
class _LifecycleLeaseOverflow(CacheLifecycleError):
    id: Any


@variant("block {id} has no lease to release", hint="a replacement consumes the leases it expects")
class _LifecycleLeaseUnderflow(CacheLifecycleError):
    id: Any


@variant("the access clock is at its bound", hint="close the session and start a new one")
class _LifecycleAccessClockOverflow(CacheLifecycleError):
    pass
