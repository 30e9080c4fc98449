"""What the pool's accounting refuses (contract/pool.md section 10)."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class CachePoolError(ContractError):
    """A refusal of the pool's accounting. Nothing has changed when one is raised.

    `Poisoned` says that a validation of the segment failed; every later call raises it too.
    """

    InvalidLimits: TypeAlias = "_PoolInvalidLimits"
    DuplicateManager: TypeAlias = "_PoolDuplicateManager"
    UnknownManager: TypeAlias = "_PoolUnknownManager"
    BudgetExceeded: TypeAlias = "_PoolBudgetExceeded"
    AccountingOverflow: TypeAlias = "_PoolAccountingOverflow"
    Poisoned: TypeAlias = "_PoolPoisoned"


@variant(
    "the pool limits are invalid: {code}",
    hint="device_bytes and transfer_in_flight_bytes must be at least 1; the others may be 0",
)
class _PoolInvalidLimits(CachePoolError):
    """`code` is `device_bytes_zero` or `transfer_in_flight_bytes_zero`."""

    code: str
    message: str = field(default="", compare=False)


@variant("manager {manager} is already registered", hint="pass None to be given a free id")
class _PoolDuplicateManager(CachePoolError):
    manager: int


@variant("manager {manager} is not registered", hint="register it, and keep its membership alive")
class _PoolUnknownManager(CachePoolError):
    manager: int


@variant(
    "the {resource} axis would hold {required} bytes, its limit is {budget}",
    hint="release or wait (timeout=), or create the pool with a larger limit",
)
class _PoolBudgetExceeded(CachePoolError):
    """`resource` is a `CachePoolResource`."""

    resource: Enum
    required: int
    budget: int


@variant("a sum of {operation} does not fit 64 bits")
class _PoolAccountingOverflow(CachePoolError):
    """`operation` is `manager_publication`, `admission_validation` or `temporary_admission`."""

    operation: str


@variant(
    "the pool is poisoned, its accounting failed validation",
    hint="run `shmcache verify`, then start a new epoch: destroy and create it",
)
class _PoolPoisoned(CachePoolError):
    pass
