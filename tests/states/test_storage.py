"""The storage's worked examples A to H (S2), and what holds for resources (S3 to S10)."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shmcache.bounds import U64_MAX
from shmcache.errors import CacheStorageError
from shmcache.states.storage import CacheBlockStorage, CacheHostPromotion, CacheStoragePhase
from tests.states.storages import (
    COLUMNS,
    DEMOTION,
    FOREIGN,
    READ,
    READING,
    WRITE,
    WRITING,
    Demotion,
    Io,
    P,
    Promotion,
    Storage,
    X,
    check_slots,
    promotion_from,
    read,
    slots,
    storage_in,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def refused(storage: Storage, error: CacheStorageError, call: Callable[[], object]) -> None:
    """`call` raises exactly `error`, and phase and slots stay the same objects (S3)."""
    phase, before = storage.phase, slots(storage)
    with pytest.raises(CacheStorageError) as caught:
        call()
    assert caught.value == error
    assert storage.phase is phase
    assert all(now is then for now, then in zip(slots(storage), before, strict=True))


def at(storage: Storage, phase: CacheStoragePhase, **resources: object) -> None:
    """The storage is in `phase` and holds `resources` by the names of its accessors."""
    assert storage.phase is phase
    assert resources == {name: getattr(storage, name) for name in resources}
    check_slots(storage)


def test_s2_a_demotion_and_wrong_completion() -> None:
    storage = Storage.device(X, "d", None)
    first, second = Demotion(310), Demotion(312)
    storage.begin_host_demotion(first)
    at(storage, P.DEMOTING_TO_HOST)
    stale = CacheStorageError.HostDemotionMismatch(310, 311)
    refused(storage, stale, lambda: storage.finish_host_demotion(311, "h"))
    refused(storage, stale, lambda: storage.fail_host_demotion(311))
    assert storage.device_resource == "d"
    assert storage.fail_host_demotion(310) is first
    at(storage, P.DEVICE, device_resource="d")
    storage.begin_host_demotion(second)
    device, operation = storage.finish_host_demotion(312, "h")
    assert (device, operation) == ("d", second)
    at(storage, P.HOST_UNBACKED, device_resource=None)


def test_s2_b_full_circle() -> None:
    storage = Storage.host(X, "h1", None)
    writing, reading = Io(write(12)), Io(read(12))
    storage.begin_write(writing)
    stale = CacheStorageError.IoMismatch(write(12), write(11))
    refused(storage, stale, lambda: storage.finish_write(write(11), "f"))
    refused(storage, stale, lambda: storage.fail_io(write(11)))
    at(storage, P.HOST_WRITING, host_resource="h1")
    assert storage.finish_write(write(12), "f") == ("h1", writing)
    at(storage, P.DISK_READY)
    storage.begin_read(reading)
    assert storage.finish_read(read(12), "h2") is reading
    at(storage, P.HOST_BACKED)
    promotion = storage.promote_host("d2")
    assert (promotion.id, promotion.source, promotion.host) == (X, P.HOST_BACKED, "h2")
    at(storage, P.DEVICE, backing="f")
    exists = CacheStorageError.BackingAlreadyExists()
    refused(storage, exists, lambda: storage.begin_host_demotion(DEMOTION))
    assert storage.release_device_to_disk() == "d2"
    at(storage, P.DISK_READY)


def test_s2_c_failed_io() -> None:
    storage = Storage.host(X, 7, None)
    writing, reading = Io(write(1)), Io(read(1))
    storage.begin_write(writing)
    assert storage.fail_io(write(1)) is writing
    at(storage, P.HOST_UNBACKED, host_resource=7)
    storage = Storage.disk(X, "f")
    storage.begin_read(reading)
    assert not storage.fail_io_if_matches(read(2))
    at(storage, P.DISK_READING)
    assert storage.fail_io_if_matches(read(1))
    at(storage, P.DISK_READY)
    assert not storage.fail_io_if_matches(read(1))
    none = CacheStorageError.IoNotPending(P.DISK_READY)
    refused(storage, none, lambda: storage.fail_io(read(1)))


def test_s2_d_foreign_block() -> None:
    storage = Storage.host(X, 7, None)
    foreign = CacheStorageError.BlockMismatch(X, FOREIGN)
    refused(storage, foreign, lambda: storage.begin_write(Io(write(1, FOREIGN))))
    refused(storage, foreign, lambda: storage.begin_write(Io(read(1, FOREIGN))))
    kind = CacheStorageError.IoKindMismatch(WRITE, READ)
    refused(storage, kind, lambda: storage.begin_write(Io(read(1))))
    disk = Storage.disk(X, "f")
    phase = CacheStorageError.InvalidPhase(P.HOST_UNBACKED, P.DISK_READY)
    refused(disk, phase, lambda: disk.begin_write(Io(write(1, FOREIGN))))
    refused(disk, foreign, lambda: disk.begin_read(Io(write(1, FOREIGN))))
    kind = CacheStorageError.IoKindMismatch(READ, WRITE)
    refused(disk, kind, lambda: disk.begin_read(Io(write(1))))


def test_s2_d_foreign_demotion() -> None:
    foreign = CacheStorageError.BlockMismatch(X, FOREIGN)
    for backing in (None, "f"):  # the block before the backing
        storage = Storage.device(X, "d", backing)
        begin = storage.begin_host_demotion
        refused(storage, foreign, partial(begin, Demotion(1, FOREIGN)))
    host = Storage.host(X, "h")
    phase = CacheStorageError.InvalidPhase(P.DEVICE, P.HOST_UNBACKED)
    refused(host, phase, lambda: host.begin_host_demotion(Demotion(1, FOREIGN)))


def test_s2_e_promotion_refused_while_writing() -> None:
    for column, actual in (("HOST_WRITING", P.HOST_WRITING), ("DISK_READY", P.DISK_READY)):
        storage = storage_in(column)
        phase = CacheStorageError.InvalidPhase(P.HOST_UNBACKED, actual)
        refused(storage, phase, partial(storage.promote_host, "d"))


def test_s2_f_rollback_once() -> None:
    storage = Storage.host(X, "h", None)
    promotion = storage.promote_host("d")
    assert storage.restore_host(promotion) == "d"
    at(storage, P.HOST_UNBACKED, host_resource="h")
    assert (promotion.host, promotion.id, promotion.source) == (None, X, P.HOST_UNBACKED)
    for other in (storage, Storage.disk(FOREIGN, "f")):  # before any other check
        with pytest.raises(RuntimeError, match="spent"):
            other.restore_host(promotion)


def test_s2_g_rollback_too_late() -> None:
    storage = Storage.host(X, "h", "f")
    promotion = storage.promote_host("d")
    assert storage.release_device_to_disk() == "d"
    phase = CacheStorageError.InvalidPhase(P.DEVICE, P.DISK_READY)
    refused(storage, phase, lambda: storage.restore_host(promotion))
    assert promotion.host == "h"


def test_s2_h_same_key_other_direction() -> None:
    storage = Storage.disk(X, "f")
    storage.begin_read(Io(read(5)))
    assert storage.io_matches(read(5))
    assert not storage.io_matches(write(5))
    phase = CacheStorageError.InvalidPhase(P.HOST_WRITING, P.DISK_READING)
    refused(storage, phase, lambda: storage.finish_write(write(5), "g"))


def test_a_refused_restore_does_not_spend() -> None:
    """Phase, then block, then source."""
    promotion = promotion_from(P.HOST_BACKED)
    foreign_host, foreign = Storage.host(FOREIGN, "h"), Storage.device(FOREIGN, "d")
    phase = CacheStorageError.InvalidPhase(P.DEVICE, P.HOST_UNBACKED)
    refused(foreign_host, phase, lambda: foreign_host.restore_host(promotion))
    block = CacheStorageError.BlockMismatch(FOREIGN, X)
    refused(foreign, block, lambda: foreign.restore_host(promotion))
    unbacked = Storage.device(X, "d")
    source = CacheStorageError.InvalidPhase(P.HOST_UNBACKED, P.HOST_BACKED)
    refused(unbacked, source, lambda: unbacked.restore_host(promotion))
    assert promotion.host == "p"
    assert Storage.device(X, "d", "f").restore_host(promotion) == "d"


def test_a_stale_operation_of_an_equal_key_is_its_own_answer() -> None:
    """Keys compare by value: what is returned is the operation that was pending."""
    storage = Storage.disk(X, "f")
    pending = Io(read(5))
    storage.begin_read(pending)
    assert storage.finish_read(Io(read(5)).key, "h") is pending


# Construction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", COLUMNS)
def test_accessors_agree_with_the_phase(column: str) -> None:
    storage = storage_in(column)
    assert storage.id is X
    assert storage.phase.name.startswith(column.partition(" ")[0])
    check_slots(storage)


def test_only_the_three_constructors_make_a_storage() -> None:
    with pytest.raises(TypeError, match=r"device, \.host or \.disk"):
        CacheBlockStorage()


NONE: Any = None
TAKES_A_RESOURCE: tuple[tuple[str, Callable[[Storage], object]], ...] = (
    ("DEVICE no backing", lambda s: s.begin_host_demotion(NONE)),
    ("DEMOTING", lambda s: s.finish_host_demotion(310, None)),
    ("HOST_UNBACKED", lambda s: s.begin_write(NONE)),
    ("HOST_WRITING", lambda s: s.finish_write(WRITING.key, None)),
    ("DISK_READY", lambda s: s.begin_read(NONE)),
    ("DISK_READING", lambda s: s.finish_read(READING.key, None)),
    ("HOST_BACKED", lambda s: s.promote_host(None)),
    ("DEVICE backed", lambda s: s.restore_host(NONE)),
    ("DEMOTING", lambda s: s.finish_host_demotion(NONE, "h")),
    ("DEMOTING", lambda s: s.fail_host_demotion(NONE)),
    ("HOST_WRITING", lambda s: s.finish_write(NONE, "f")),
    ("DISK_READING", lambda s: s.finish_read(NONE, "h")),
    ("HOST_WRITING", lambda s: s.fail_io(NONE)),
)


@pytest.mark.parametrize(("column", "call"), TAKES_A_RESOURCE)
def test_none_is_no_resource(column: str, call: Callable[[Storage], object]) -> None:
    """In the phase where the call is legal, and before the phase where it is not."""
    for storage in (storage_in(column), storage_in("DISK_READY"), storage_in("DEVICE backed")):
        phase, before = storage.phase, slots(storage)
        with pytest.raises(TypeError):
            call(storage)
        assert storage.phase is phase
        assert all(now is then for now, then in zip(slots(storage), before, strict=True))


def test_none_makes_no_storage() -> None:
    makers: tuple[Callable[[Any, object], Storage], ...] = (
        Storage.device,
        Storage.host,
        Storage.disk,
    )
    for make in makers:
        with pytest.raises(TypeError, match="must not be None"):
            make(X, None)
        with pytest.raises(TypeError, match="id must be a CacheBlockId"):
            make("X", "resource")


def test_an_operation_id_outside_u64_is_refused_first() -> None:
    for storage in (storage_in("DEMOTING"), storage_in("DISK_READY")):
        for value in (-1, U64_MAX + 1):
            with pytest.raises(ValueError, match="operation_id"):
                storage.fail_host_demotion(value)


def test_queries_by_key_never_raise() -> None:
    for column in COLUMNS:
        storage = storage_in(column)
        keys: tuple[Any, ...] = (None, "read", write(99), read(99))
        for key in keys:
            assert not storage.io_matches(key)
            assert not storage.fail_io_if_matches(key)


# Resources ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("falsy", [0, b"", "", (), False])
def test_s4_falsy_resources_are_resources(falsy: object) -> None:
    storage = Storage.device(X, falsy)
    storage.begin_host_demotion(DEMOTION)
    assert storage.finish_host_demotion(310, falsy)[0] is falsy
    storage.begin_write(WRITING)
    assert storage.finish_write(WRITING.key, falsy)[0] is falsy
    storage.begin_read(READING)
    storage.finish_read(READING.key, falsy)
    at(storage, P.HOST_BACKED)
    promotion = storage.promote_host(falsy)
    assert promotion.host is falsy
    refused(
        storage,
        CacheStorageError.BackingAlreadyExists(),
        lambda: storage.begin_host_demotion(DEMOTION),
    )
    assert storage.restore_host(promotion) is falsy
    assert storage.release_host_to_disk() is falsy
    assert storage.backing is falsy
    assert Storage.host(X, "h", falsy).phase is P.HOST_BACKED
    assert Storage.device(X, "d", falsy).release_device_to_disk() == "d"


class Resource:
    """Something whose end can be observed."""


@dataclass(frozen=True)
class LiveDemotion:
    """A demotion whose end can be observed."""

    operation_id: int
    block_id: object = X


@dataclass(frozen=True)
class LiveIo:
    """An operation whose end can be observed."""

    key: object


LiveStorage = CacheBlockStorage[Any, Any, Any, Any, Any]
LEAVES: tuple[tuple[Callable[[], LiveStorage], Callable[[LiveStorage], object]], ...] = (
    (
        lambda: _after(LiveStorage.device(X, Resource()), "begin_host_demotion", LiveDemotion(1)),
        lambda s: s.finish_host_demotion(1, "h"),
    ),
    (
        lambda: _after(LiveStorage.device(X, "d"), "begin_host_demotion", LiveDemotion(1)),
        lambda s: s.fail_host_demotion(1),
    ),
    (
        lambda: LiveStorage.device(X, Resource(), "f"),
        lambda s: s.release_device_to_disk(),
    ),
    (lambda: LiveStorage.host(X, Resource(), "f"), lambda s: s.release_host_to_disk()),
    (
        lambda: _after(LiveStorage.host(X, Resource()), "begin_write", LiveIo(write(1))),
        lambda s: s.finish_write(write(1), "f"),
    ),
    (
        lambda: _after(LiveStorage.disk(X, "f"), "begin_read", LiveIo(read(1))),
        lambda s: s.finish_read(read(1), "h"),
    ),
    (
        lambda: _after(LiveStorage.disk(X, "f"), "begin_read", LiveIo(read(1))),
        lambda s: s.fail_io(read(1)),
    ),
    (lambda: LiveStorage.host(X, Resource()), lambda s: s.promote_host("d")),
    (
        lambda: LiveStorage.device(X, Resource()),
        lambda s: s.restore_host(promotion_from(P.HOST_UNBACKED)),
    ),
)


def _after(storage: LiveStorage, call: str, operation: object) -> LiveStorage:
    getattr(storage, call)(operation)
    return storage


@pytest.mark.parametrize(("make", "leave"), LEAVES)
def test_s5_what_is_returned_is_out_of_the_storage(
    make: Callable[[], LiveStorage], leave: Callable[[LiveStorage], object]
) -> None:
    storage = make()
    live = (Resource, LiveDemotion, LiveIo)
    inside = [weakref.ref(value) for value in slots(storage) if isinstance(value, live)]
    assert inside
    gc.disable()  # by reference counts alone: no cycle holds a buffer until the collector comes
    try:
        answer = leave(storage)
        assert all(reference() is not None for reference in inside)
        del answer
        assert all(reference() is None for reference in inside)
    finally:
        gc.enable()
    assert storage.phase in P


def test_s6_dropping_a_promotion_frees_the_host_resource() -> None:
    storage = LiveStorage.host(X, Resource())
    host = weakref.ref(storage.host_resource)
    promotion = storage.promote_host("d")
    assert promotion.host is host()
    del promotion
    assert host() is None


def test_a_spent_promotion_keeps_nothing() -> None:
    storage = LiveStorage.host(X, Resource(), "f")
    host = weakref.ref(storage.host_resource)
    promotion = storage.promote_host("d")
    storage.restore_host(promotion)
    storage.release_host_to_disk()
    assert host() is None
    assert promotion.host is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_promotion_cannot_be_duplicated(duplicate: Callable[[Promotion], object]) -> None:
    with pytest.raises(TypeError, match="one-of-a-kind"):
        duplicate(promotion_from(P.HOST_BACKED))


@pytest.mark.parametrize("field", ["id", "source", "host"])
def test_a_promotion_is_read_only(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(promotion_from(P.HOST_BACKED), field, None)
    assert CacheHostPromotion.__slots__


def test_s9_any_object_with_the_attributes_is_an_operation() -> None:
    storage = LiveStorage.device(X, "d")
    demotion = SimpleNamespace(block_id=X, operation_id=7, colour="red")
    storage.begin_host_demotion(demotion)
    assert storage.finish_host_demotion(7, "h") == ("d", demotion)
    operation = SimpleNamespace(key=write(3))
    storage.begin_write(operation)
    assert storage.io is operation
    assert storage.finish_write(write(3), "f")[1] is operation


def test_s10_a_copy_is_independent() -> None:
    storage = storage_in("DEMOTING")
    twin = copy.copy(storage)
    storage.finish_host_demotion(310, "h")
    at(twin, P.DEMOTING_TO_HOST, id=X)
    assert twin.device_resource == "d"
    assert twin.host_demotion is DEMOTION
    check_slots(twin)
    twin.fail_host_demotion(310)
    assert (storage.phase, twin.phase) == (P.HOST_UNBACKED, P.DEVICE)
