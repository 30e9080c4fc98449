"""What the physical side of one block refuses: a call in the wrong phase, a stale completion."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

from shmcache.errors.base import ContractError, variant


class CacheStorageError(ContractError):
    """A refusal of `CacheBlockStorage`. Nothing has changed, and what was passed is the caller's.

    `expected` is always the storage's side and `actual` the caller's.
    """

    BlockMismatch: TypeAlias = "_StorageBlockMismatch"
    InvalidPhase: TypeAlias = "_StorageInvalidPhase"
    IoNotPending: TypeAlias = "_StorageIoNotPending"
    BackingAlreadyExists: TypeAlias = "_StorageBackingAlreadyExists"
    BackingRequired: TypeAlias = "_StorageBackingRequired"
    HostDemotionMismatch: TypeAlias = "_StorageHostDemotionMismatch"
    IoMismatch: TypeAlias = "_StorageIoMismatch"
    IoKindMismatch: TypeAlias = "_StorageIoKindMismatch"


@variant("this is the storage of block {expected}, not of {actual}")
class _StorageBlockMismatch(CacheStorageError):
    """Both are a `CacheBlockId`."""

    expected: Any
    actual: Any


@variant("the call needs the phase {expected}, not {actual}")
class _StorageInvalidPhase(CacheStorageError):
    """Both are a `CacheStoragePhase`."""

    expected: Enum
    actual: Enum


@variant("no read or write is pending in the phase {actual}")
class _StorageIoNotPending(CacheStorageError):
    """`actual` is a `CacheStoragePhase`."""

    actual: Enum


@variant("the block has a durable backing", hint="release it to disk instead of demoting it")
class _StorageBackingAlreadyExists(CacheStorageError):
    pass


@variant("the block has no durable backing", hint="demote it to the host and write it first")
class _StorageBackingRequired(CacheStorageError):
    pass


@variant("demotion {expected} is pending, not {actual}")
class _StorageHostDemotionMismatch(CacheStorageError):
    expected: int
    actual: int


@variant("the pending operation is {expected}, not {actual}")
class _StorageIoMismatch(CacheStorageError):
    """Both are a `CacheIoOperationKey`."""

    expected: Any
    actual: Any


@variant("the call takes a {expected} operation, not a {actual}")
class _StorageIoKindMismatch(CacheStorageError):
    """Both are a `CacheIoOperationKind`."""

    expected: Enum
    actual: Enum
