"""The limits of one session, checked before anything exists that would have to obey them.

Why: a session's budgets and those of the pool it joins come from different hands. A contradiction
must be found where the options are written down, with both numbers, whatever the order of calls.

Contract: options are immutable, each `with_*` returns a changed copy. They are equal when all
properties are; two pools are equal when they are the same pool. They hold a live pool, so nothing
here can be pickled or serialised.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

from shmcache.bounds import U64_MAX, i32, instance, u64, usize
from shmcache.errors import CachePoolError, CacheResidencyConfigurationError
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits
from shmcache.states.lifecycle import CacheEvictionPolicy

_Invalid = CacheResidencyConfigurationError.InvalidOptions


class _Live:
    """Holds, or may hold, a pool."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} may hold a live pool: it cannot be pickled")


class LiveCacheDiskPolicy:
    """Whether sealed blocks may go to files: `Disabled()`, or `Enabled(...)`.

    Contract: live files are ephemeral, they die with the session. The variants validate nothing but
    domains; `PagedCacheOptions.with_live_disk` is the way to get them into options.
    """

    __slots__ = ()
    Disabled: ClassVar[type[LiveCacheDiskPolicyDisabled]]
    Enabled: ClassVar[type[LiveCacheDiskPolicyEnabled]]

    def __init__(self) -> None:
        raise TypeError("LiveCacheDiskPolicy is a family, make one of its variants")

    @staticmethod
    def default() -> LiveCacheDiskPolicyDisabled:
        """`Disabled()`."""
        return LiveCacheDiskPolicyDisabled()


@dataclass(frozen=True, slots=True)
class LiveCacheDiskPolicyDisabled(LiveCacheDiskPolicy):
    """Nothing goes to disk."""


@dataclass(frozen=True, slots=True)
class LiveCacheDiskPolicyEnabled(LiveCacheDiskPolicy):
    """Blocks may go to `directory`, which belongs to this cache.

    Units: `budget_bytes` counts logical bytes of live files; `queue_capacity` bounds the reads and
    writes that wait.
    """

    directory: Path
    budget_bytes: int
    queue_capacity: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))
        u64(self.budget_bytes, "budget_bytes")
        usize(self.queue_capacity, "queue_capacity")


LiveCacheDiskPolicy.Disabled = LiveCacheDiskPolicyDisabled
LiveCacheDiskPolicy.Enabled = LiveCacheDiskPolicyEnabled


@dataclass(frozen=True, slots=True)
class PagedCacheOptions(_Live):
    """Limits of one session.

    Units: `block_size_tokens` tokens per sealed block; `device_budget_bytes` logical bytes, tails
    included; `host_budget_bytes` physical bytes, 0 for no host tier; `recent_device_blocks` per
    layer, the newest, which growth never evicts.

    Contract: `full_attention_enabled` tells the engine that attention may read the whole context
    block by block; `retains_discarded_for_persistence` keeps blocks older than a sliding window.

    Errors: `CacheResidencyConfigurationError.InvalidOptions` `block_size_not_positive`,
    `device_budget_zero`, `recent_blocks_zero`, in this order.
    """

    block_size_tokens: int
    device_budget_bytes: int
    host_budget_bytes: int
    recent_device_blocks: int
    eviction_policy: CacheEvictionPolicy = field(
        init=False, default=CacheEvictionPolicy.LEAST_RECENTLY_USED
    )
    full_attention_enabled: bool = field(init=False, default=False)
    retains_discarded_for_persistence: bool = field(init=False, default=False)
    live_disk_policy: LiveCacheDiskPolicyDisabled | LiveCacheDiskPolicyEnabled = field(
        init=False, default=LiveCacheDiskPolicyDisabled()
    )
    process_sampling_enabled: bool = field(init=False, default=False)
    pool: CacheResidencyPool | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        i32(self.block_size_tokens, "block_size_tokens")
        u64(self.device_budget_bytes, "device_budget_bytes")
        u64(self.host_budget_bytes, "host_budget_bytes")
        usize(self.recent_device_blocks, "recent_device_blocks")
        if self.block_size_tokens <= 0:
            raise _Invalid("block_size_not_positive", str(self.block_size_tokens))
        if self.device_budget_bytes == 0:
            raise _Invalid("device_budget_zero")
        if self.recent_device_blocks == 0:
            raise _Invalid("recent_blocks_zero")

    @classmethod
    def new(
        cls,
        block_size_tokens: int,
        device_budget_bytes: int,
        host_budget_bytes: int,
        recent_device_blocks: int,
    ) -> Self:
        return cls(block_size_tokens, device_budget_bytes, host_budget_bytes, recent_device_blocks)

    @property
    def disk_budget_bytes(self) -> int | None:
        """Logical bytes of live files; None while the live disk is disabled."""
        disk = self.live_disk_policy
        return disk.budget_bytes if isinstance(disk, LiveCacheDiskPolicyEnabled) else None

    def with_full_attention(self, enabled: bool) -> Self:
        """Whether attention may read the whole context block by block."""
        return self._with(full_attention_enabled=instance(enabled, bool, "enabled"))

    def with_persistence_retention(self, enabled: bool) -> Self:
        """Whether blocks older than a sliding window are kept."""
        return self._with(retains_discarded_for_persistence=instance(enabled, bool, "enabled"))

    def with_eviction_policy(self, policy: CacheEvictionPolicy) -> Self:
        """Which block leaves a full tier first."""
        return self._with(eviction_policy=instance(policy, CacheEvictionPolicy, "policy"))

    def with_process_sampling(self, enabled: bool) -> Self:
        """Whether reports tell memory and page faults of the process."""
        return self._with(process_sampling_enabled=instance(enabled, bool, "enabled"))

    def with_live_disk(
        self, directory: str | os.PathLike[str], budget_bytes: int, queue_capacity: int
    ) -> Self:
        """Let blocks go to files. Creates nothing.

        Errors: InvalidOptions `disk_budget_zero`, `queue_capacity_zero`, `disk_directory_empty`,
        and `disk_budget_exceeds_pool` when a pool is attached already.
        """
        where = instance(os.fspath(directory), str, "directory")
        policy = LiveCacheDiskPolicyEnabled(Path(where), budget_bytes, queue_capacity)
        if budget_bytes == 0:
            raise _Invalid("disk_budget_zero")
        if queue_capacity == 0:
            raise _Invalid("queue_capacity_zero")
        if not where:
            raise _Invalid("disk_directory_empty")
        changed = self._with(live_disk_policy=policy)
        if self.pool is not None:
            changed._check_disk(self.pool.limits)
        return changed

    def with_pool(self, pool: CacheResidencyPool) -> Self:
        """Join that very pool.

        Errors: InvalidOptions `device_budget_exceeds_pool`, `host_budget_exceeds_pool`,
        `disk_budget_exceeds_pool`; an equal budget is accepted.
        """
        limits = instance(pool, CacheResidencyPool, "pool").limits
        _check_axis("device", self.device_budget_bytes, limits.device_bytes)
        _check_axis("host", self.host_budget_bytes, limits.host_bytes)
        self._check_disk(limits)
        return self._with(pool=pool)

    def create_pool(self) -> CacheResidencyPool:
        """A new anonymous pool, sized for this one session; it is not attached to the options.

        The transfer limit leaves room for a copy that still holds its source while another has its
        reservation.

        Errors: `CacheResidencyConfigurationError.Pool`.
        """
        largest = max(self.device_budget_bytes, self.host_budget_bytes)
        try:
            return CacheResidencyPool(
                CachePoolLimits(
                    device_bytes=self.device_budget_bytes,
                    host_bytes=self.host_budget_bytes,
                    transfer_in_flight_bytes=max(1, min(2 * largest, U64_MAX)),
                    disk_bytes=self.disk_budget_bytes or 0,
                )
            )
        except CachePoolError as error:
            raise CacheResidencyConfigurationError.Pool(error) from error

    def _check_disk(self, limits: CachePoolLimits) -> None:
        _check_axis("disk", self.disk_budget_bytes or 0, limits.disk_bytes)

    def _with(self, **changes: Any) -> Self:
        changed = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(changed, name, changes.get(name, getattr(self, name)))
        return changed


def _check_axis(axis: str, budget: int, limit: int) -> None:
    if budget > limit:
        raise _Invalid(
            f"{axis}_budget_exceeds_pool",
            f"the session's {axis} budget of {budget} bytes is above the pool's limit of {limit}",
        )


class CacheResidencyPolicy:
    """Where a cache lives: `Device()`, all of it in execution memory, or `Paged(options)`."""

    __slots__ = ()
    Device: ClassVar[type[CacheResidencyPolicyDevice]]
    Paged: ClassVar[type[CacheResidencyPolicyPaged]]

    def __init__(self) -> None:
        raise TypeError("CacheResidencyPolicy is a family, make one of its variants")

    @staticmethod
    def default() -> CacheResidencyPolicyDevice:
        """`Device()`."""
        return CacheResidencyPolicyDevice()


@dataclass(frozen=True, slots=True)
class CacheResidencyPolicyDevice(_Live, CacheResidencyPolicy):
    """No pool, no blocks."""


@dataclass(frozen=True, slots=True)
class CacheResidencyPolicyPaged(_Live, CacheResidencyPolicy):
    """Sealed state lives in blocks under finite budgets."""

    options: PagedCacheOptions

    def __post_init__(self) -> None:
        instance(self.options, PagedCacheOptions, "options")


CacheResidencyPolicy.Device = CacheResidencyPolicyDevice
CacheResidencyPolicy.Paged = CacheResidencyPolicyPaged
