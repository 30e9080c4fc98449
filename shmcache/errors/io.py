"""What background reads and writes refuse: moves of the state machine, and the worker around it."""

from __future__ import annotations

from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class CacheIoExecutionStateError(ContractError):
    """A move that `CacheIoExecutionState` does not allow. Nothing has changed when it is raised."""

    ZeroCapacity: TypeAlias = "_IoZeroCapacity"
    UnknownOperation: TypeAlias = "_IoUnknownOperation"
    InvalidAdmission: TypeAlias = "_IoInvalidAdmission"
    InvalidAdmissionRollback: TypeAlias = "_IoInvalidAdmissionRollback"
    InvalidStart: TypeAlias = "_IoInvalidStart"
    InvalidCompletion: TypeAlias = "_IoInvalidCompletion"
    OperationStillOwned: TypeAlias = "_IoOperationStillOwned"


@variant("the I/O queue must have room for at least one operation")
class _IoZeroCapacity(CacheIoExecutionStateError):
    pass


@variant("no operation has this key", hint="prepare it first; retiring a key forgets it")
class _IoUnknownOperation(CacheIoExecutionStateError):
    pass


@variant("the operation has been admitted before")
class _IoInvalidAdmission(CacheIoExecutionStateError):
    pass


@variant("the operation is not in the queue, so its admission cannot be rolled back")
class _IoInvalidAdmissionRollback(CacheIoExecutionStateError):
    pass


@variant("the operation is not in the queue, so it cannot start")
class _IoInvalidStart(CacheIoExecutionStateError):
    pass


@variant("the operation is not running, so it cannot complete")
class _IoInvalidCompletion(CacheIoExecutionStateError):
    pass


@variant("the operation is queued or running", hint="its key is free once it has left the worker")
class _IoOperationStillOwned(CacheIoExecutionStateError):
    pass


class CacheIoWorkerError(ContractError):
    """What `CacheIoWorker`, its submissions and its tickets raise.

    `Poisoned` says that a change of the worker's books was cut short; every later call raises it
    too. `Cancelled` is not asyncio's: no event loop takes it for its own.
    """

    Poisoned: TypeAlias = "_IoPoisoned"
    OperationFailed: TypeAlias = "_IoOperationFailed"
    Cancelled: TypeAlias = "_IoCancelled"
    Spawn: TypeAlias = "_IoSpawn"
    Execution: TypeAlias = "_IoExecution"


@variant(
    "the books of the I/O worker are poisoned, a change of them was cut short",
    hint="close it and make a new one",
)
class _IoPoisoned(CacheIoWorkerError):
    pass


@variant("the I/O operation failed: {message}")
class _IoOperationFailed(CacheIoWorkerError):
    """`message` is what the task said, or one of the fixed texts of `shmcache.io`."""

    message: str


@variant("the I/O operation of generation {generation} was cancelled")
class _IoCancelled(CacheIoWorkerError):
    generation: int


@variant("the thread {thread_name!r} cannot be started: {source}", cause="source")
class _IoSpawn(CacheIoWorkerError):
    thread_name: str
    source: Exception


@variant("{error}", cause="error")
class _IoExecution(CacheIoWorkerError):
    error: CacheIoExecutionStateError
