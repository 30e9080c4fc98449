"""Where one block is, and which single operation owns its next step.

Why: a block's arrays move between device, host and file by operations that end later, on other
threads, perhaps after the block was cleared and made again. A backend that kept resources and
operations in its own fields could build a contradiction, or let an old completion end a new
operation. Here neither can be written down.

Contract: `TRANSITIONS` is all that may happen, `CacheStoragePhase` says which slots are filled.
Checks run in a fixed order: the phase, the block or key, the kind, the backing. A call that raises
has changed nothing, and what was passed to it stays the caller's. What is returned is out of the
storage: the caller decides when it is freed. None means "no resource" and every other value is one,
`b""` and `0` too.

Invariants: each transition replaces one immutable value, so that an exception between any two
bytecodes finds the block before or after it.

Concurrency: no lock; the session's lock guards it.

Errors: `CacheStorageError`; None for a resource, or an argument outside its domain, raises
`TypeError` or `ValueError` before anything else is checked.

Not here: accounting, leases (lifecycle.py), and any work: a backend starts copies and files.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, NoReturn, Self, SupportsIndex, TypeVar

from shmcache.bounds import instance, u64
from shmcache.errors import CacheStorageError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.states.storage_values import (
    CacheHostDemotionOperation,
    CacheIoOperation,
    CacheIoOperationKey,
    CacheIoOperationKind,
    CacheStoragePhase,
)
from shmcache.states.tables import Transition

__all__ = [
    "TRANSITIONS",
    "CacheBlockStorage",
    "CacheHostDemotionOperation",
    "CacheHostPromotion",
    "CacheIoOperation",
    "CacheIoOperationKey",
    "CacheIoOperationKind",
    "CacheStoragePhase",
]

D = TypeVar("D")  # device resource
H = TypeVar("H")  # host resource
B = TypeVar("B")  # durable backing
HD = TypeVar("HD", bound=CacheHostDemotionOperation)
IO = TypeVar("IO", bound=CacheIoOperation)
T = TypeVar("T")

_P = CacheStoragePhase
_BACKED: Final = "backed"
_UNBACKED: Final = "not backed"

# Of two sources, a refusal names the first as the expected one.
TRANSITIONS: Final[tuple[Transition[CacheStoragePhase], ...]] = (
    Transition(None, "device", _P.DEVICE),
    Transition(None, "host", _P.HOST_UNBACKED, when=_UNBACKED),
    Transition(None, "host", _P.HOST_BACKED, when=_BACKED),
    Transition(None, "disk", _P.DISK_READY),
    Transition(_P.DEVICE, "begin_host_demotion", _P.DEMOTING_TO_HOST, when=_UNBACKED),
    Transition(_P.DEMOTING_TO_HOST, "finish_host_demotion", _P.HOST_UNBACKED),
    Transition(_P.DEMOTING_TO_HOST, "fail_host_demotion", _P.DEVICE),
    Transition(_P.DEVICE, "release_device_to_disk", _P.DISK_READY, when=_BACKED),
    Transition(_P.HOST_BACKED, "release_host_to_disk", _P.DISK_READY),
    Transition(_P.HOST_UNBACKED, "begin_write", _P.HOST_WRITING),
    Transition(_P.HOST_WRITING, "finish_write", _P.DISK_READY),
    Transition(_P.HOST_WRITING, "fail_io", _P.HOST_UNBACKED),
    Transition(_P.DISK_READY, "begin_read", _P.DISK_READING),
    Transition(_P.DISK_READING, "finish_read", _P.HOST_BACKED),
    Transition(_P.DISK_READING, "fail_io", _P.DISK_READY),
    Transition(_P.HOST_UNBACKED, "promote_host", _P.DEVICE),
    Transition(_P.HOST_BACKED, "promote_host", _P.DEVICE),
    Transition(_P.DEVICE, "restore_host", _P.HOST_UNBACKED, when=_UNBACKED),
    Transition(_P.DEVICE, "restore_host", _P.HOST_BACKED, when=_BACKED),
)

_SOURCES: Final = {
    event: [row.source for row in TRANSITIONS if row.event == event and row.source is not None]
    for event in {row.event for row in TRANSITIONS}
}
_TARGETS: Final = {
    (row.event, row.source, backed): row.target
    for row in TRANSITIONS
    for backed in (False, True)
    if row.when in ("", _BACKED if backed else _UNBACKED) and row.target is not None
}


class _Held(NamedTuple, Generic[D, H, B, HD, IO]):
    """All that a storage holds at one moment."""

    phase: CacheStoragePhase
    device: D | None = None
    host: H | None = None
    backing: B | None = None
    host_demotion: HD | None = None
    io: IO | None = None


class CacheHostPromotion(Generic[H]):
    """The host resource that a promotion replaced, until the promotion is known to stand.

    Contract: dropping it commits, `restore_host` rolls back, once: then it is spent and `host` is
    None. After a restore that was refused it is not spent. It cannot be copied: two would own one
    resource.
    """

    __slots__ = ("_host", "_id", "_source")

    def __init__(self, id: CacheBlockId, source: CacheStoragePhase, host: H) -> None:
        self._id = id
        self._source = source
        self._host: H | None = host

    @property
    def id(self) -> CacheBlockId:
        """The block it belongs to."""
        return self._id

    @property
    def source(self) -> CacheStoragePhase:
        """HOST_UNBACKED or HOST_BACKED: where a roll-back leads."""
        return self._source

    @property
    def host(self) -> H | None:
        """The host resource; None once it was given back to the storage."""
        return self._host

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a CacheHostPromotion is one-of-a-kind: it cannot be copied or pickled")


class CacheBlockStorage(Generic[D, H, B, HD, IO]):
    """The storage of one block; made by `device`, `host` or `disk` (see the module).

    `copy.copy` gives an independent storage that shares the resource objects: what a caller looks
    at after it dropped the lock.
    """

    __slots__ = ("_held", "_id")

    _id: CacheBlockId
    _held: _Held[D, H, B, HD, IO]

    def __init__(self) -> None:
        raise TypeError("use CacheBlockStorage.device, .host or .disk")

    @classmethod
    def device(cls, id: CacheBlockId, device: D, backing: B | None = None) -> Self:
        """A block on the device, perhaps with a backing it once got."""
        return cls._made("device", id, device=_present(device, "device"), backing=backing)

    @classmethod
    def host(cls, id: CacheBlockId, host: H, backing: B | None = None) -> Self:
        """A block on the host: HOST_BACKED with a backing, else HOST_UNBACKED."""
        return cls._made("host", id, host=_present(host, "host"), backing=backing)

    @classmethod
    def disk(cls, id: CacheBlockId, backing: B) -> Self:
        """A block that is only a file."""
        return cls._made("disk", id, backing=_present(backing, "backing"))

    # Looking --------------------------------------------------------------------------------------

    @property
    def id(self) -> CacheBlockId:
        """The block."""
        return self._id

    @property
    def phase(self) -> CacheStoragePhase:
        """Its phase."""
        return self._held.phase

    @property
    def tier(self) -> CacheTier:
        """The tier whose bytes it counts in."""
        return self._held.phase.tier

    @property
    def device_resource(self) -> D | None:
        """The device resource, also while it is being demoted."""
        return self._held.device

    @property
    def host_resource(self) -> H | None:
        """The host resource, also while it is being written."""
        return self._held.host

    @property
    def backing(self) -> B | None:
        """The durable backing. A block that has one keeps it."""
        return self._held.backing

    @property
    def host_demotion(self) -> HD | None:
        """The pending copy from device to host."""
        return self._held.host_demotion

    @property
    def io(self) -> IO | None:
        """The pending read or write."""
        return self._held.io

    def io_matches(self, key: CacheIoOperationKey) -> bool:
        """Whether a read or write is pending and `key` is its key."""
        return self._held.io is not None and self._held.io.key == key

    # Device to host, and release ------------------------------------------------------------------

    def begin_host_demotion(self, operation: HD) -> None:
        """The operation now owns the next step; the device resource stays readable.

        Errors: InvalidPhase, BlockMismatch, BackingAlreadyExists (such a block is released to disk
        instead).
        """
        _present(operation, "operation")
        held = self._held_before("begin_host_demotion")
        self._check_block(operation.block_id)
        if held.backing is not None:
            raise CacheStorageError.BackingAlreadyExists
        self._enter("begin_host_demotion", device=held.device, host_demotion=operation)

    def finish_host_demotion(self, operation_id: int, host: H) -> tuple[D, HD]:
        """Keep the host copy, hand the device resource back. Errors: InvalidPhase,
        HostDemotionMismatch.
        """
        _present(host, "host")
        held, operation = self._pending_demotion("finish_host_demotion", operation_id)
        self._enter("finish_host_demotion", host=host)
        return _filled(held.device), operation

    def fail_host_demotion(self, operation_id: int) -> HD:
        """The copy failed: the block is on the device as before. Errors: InvalidPhase,
        HostDemotionMismatch.
        """
        held, operation = self._pending_demotion("fail_host_demotion", operation_id)
        self._enter("fail_host_demotion", device=held.device)
        return operation

    def release_device_to_disk(self) -> D:
        """Give up the device copy of a backed block. Errors: InvalidPhase, BackingRequired."""
        held = self._held_before("release_device_to_disk")
        if held.backing is None:
            raise CacheStorageError.BackingRequired
        self._enter("release_device_to_disk", backing=held.backing)
        return _filled(held.device)

    def release_host_to_disk(self) -> H:
        """Give up the host copy of a backed block. Errors: InvalidPhase."""
        held = self._held_before("release_host_to_disk")
        self._enter("release_host_to_disk", backing=held.backing)
        return _filled(held.host)

    # Host to disk and back ------------------------------------------------------------------------

    def begin_write(self, operation: IO) -> None:
        """The write now owns the next step; the host resource stays readable.

        Errors: InvalidPhase, BlockMismatch, IoKindMismatch.
        """
        held = self._held_before_io("begin_write", operation, CacheIoOperationKind.WRITE)
        self._enter("begin_write", host=held.host, io=operation)

    def finish_write(self, key: CacheIoOperationKey, backing: B) -> tuple[H, IO]:
        """The file exists: no host copy is left. Errors: InvalidPhase, IoMismatch."""
        _present(backing, "backing")
        held, operation = self._pending_io("finish_write", key)
        self._enter("finish_write", backing=backing)
        return _filled(held.host), operation

    def begin_read(self, operation: IO) -> None:
        """The read now owns the next step. Errors: InvalidPhase, BlockMismatch, IoKindMismatch."""
        held = self._held_before_io("begin_read", operation, CacheIoOperationKind.READ)
        self._enter("begin_read", backing=held.backing, io=operation)

    def finish_read(self, key: CacheIoOperationKey, host: H) -> IO:
        """The block is on the host again, its backing kept. Errors: InvalidPhase, IoMismatch."""
        _present(host, "host")
        held, operation = self._pending_io("finish_read", key)
        self._enter("finish_read", host=host, backing=held.backing)
        return operation

    def fail_io(self, key: CacheIoOperationKey) -> IO:
        """The read or write failed: back to the phase before. Errors: IoNotPending, IoMismatch."""
        held, operation = self._pending_io("fail_io", key)
        self._enter("fail_io", host=held.host, backing=held.backing)
        return operation

    def fail_io_if_matches(self, key: CacheIoOperationKey) -> bool:
        """`fail_io` if that very operation is pending; whether it was. Never raises."""
        if not self.io_matches(key):
            return False
        self.fail_io(key)
        return True

    # Host to device -------------------------------------------------------------------------------

    def promote_host(self, device: D) -> CacheHostPromotion[H]:
        """The device resource takes the place of the host resource; a backing is kept.

        Errors: InvalidPhase, of which HOST_UNBACKED is the expected one.
        """
        _present(device, "device")
        held = self._held_before("promote_host")
        promotion = CacheHostPromotion(self._id, held.phase, _filled(held.host))
        self._enter("promote_host", device=device, backing=held.backing)
        return promotion

    def restore_host(self, promotion: CacheHostPromotion[H]) -> D:
        """Undo `promote_host`: the host resource is back, the device resource is returned.

        Errors: RuntimeError for a spent promotion; InvalidPhase once a demotion began or the device
        copy was released; BlockMismatch; InvalidPhase with both sources if the block has got or
        never had the backing of the promotion's source.
        """
        host = instance(promotion, CacheHostPromotion, "promotion").host
        if host is None:
            raise RuntimeError("the promotion is spent: it was restored before")
        held = self._held_before("restore_host")
        self._check_block(promotion.id)
        source = _TARGETS["restore_host", held.phase, held.backing is not None]
        if promotion.source is not source:
            raise CacheStorageError.InvalidPhase(source, promotion.source)
        self._enter("restore_host", host=host, backing=held.backing)
        promotion._host = None
        return _filled(held.device)

    # Inside ---------------------------------------------------------------------------------------

    @classmethod
    def _made(
        cls,
        event: str,
        id: CacheBlockId,
        *,
        device: D | None = None,
        host: H | None = None,
        backing: B | None = None,
    ) -> Self:
        storage = cls.__new__(cls)
        storage._id = instance(id, CacheBlockId, "id")
        phase = _TARGETS[event, None, backing is not None]
        storage._held = _Held(phase, device, host, backing)
        return storage

    def _held_before(self, event: str) -> _Held[D, H, B, HD, IO]:
        """What is held now, if the phase is a source of `event`."""
        held = self._held
        if held.phase not in _SOURCES[event]:
            if event == "fail_io":
                raise CacheStorageError.IoNotPending(held.phase)
            raise CacheStorageError.InvalidPhase(_SOURCES[event][0], held.phase)
        return held

    def _held_before_io(
        self, event: str, operation: IO, kind: CacheIoOperationKind
    ) -> _Held[D, H, B, HD, IO]:
        _present(operation, "operation")
        held = self._held_before(event)
        self._check_block(operation.key.id)
        if operation.key.kind is not kind:
            raise CacheStorageError.IoKindMismatch(kind, operation.key.kind)
        return held

    def _pending_demotion(self, event: str, operation_id: int) -> tuple[_Held[D, H, B, HD, IO], HD]:
        u64(operation_id, "operation_id")
        held = self._held_before(event)
        operation = _filled(held.host_demotion)
        if operation.operation_id != operation_id:
            raise CacheStorageError.HostDemotionMismatch(operation.operation_id, operation_id)
        return held, operation

    def _pending_io(
        self, event: str, key: CacheIoOperationKey
    ) -> tuple[_Held[D, H, B, HD, IO], IO]:
        instance(key, CacheIoOperationKey, "key")
        held = self._held_before(event)
        operation = _filled(held.io)
        if operation.key != key:
            raise CacheStorageError.IoMismatch(operation.key, key)
        return held, operation

    def _check_block(self, presented: CacheBlockId) -> None:
        if presented != self._id:
            raise CacheStorageError.BlockMismatch(self._id, presented)

    def _enter(
        self,
        event: str,
        *,
        device: D | None = None,
        host: H | None = None,
        backing: B | None = None,
        host_demotion: HD | None = None,
        io: IO | None = None,
    ) -> None:
        """Take the event's row of the table; a slot that is not named is empty afterwards."""
        before = self._held
        phase = _TARGETS[event, before.phase, before.backing is not None]
        self._held = _Held(phase, device, host, backing, host_demotion, io)


def _present(value: T, what: str) -> T:
    if value is None:
        raise TypeError(f"{what} must not be None, which means no resource")
    return value


def _filled(slot: T | None) -> T:
    """A slot that the phase promises to be filled."""
    assert slot is not None
    return slot
