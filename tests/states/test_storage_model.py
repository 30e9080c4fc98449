"""Random lives of a storage against a naive model, whose phase is nothing but its filled slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmcache.errors import CacheStorageError
from shmcache.states.storage import (
    TRANSITIONS,
    CacheIoOperationKey,
    CacheIoOperationKind,
    CacheStoragePhase,
)
from tests.states.storages import (
    FOREIGN,
    READ,
    WRITE,
    Demotion,
    Io,
    P,
    Promotion,
    Storage,
    X,
    check_slots,
    slots,
)

if TYPE_CHECKING:
    from collections.abc import Callable

blocks = st.sampled_from([X, X, X, X, FOREIGN])
numbers = st.sampled_from([310, 310, 310, 311])
keys = st.builds(
    CacheIoOperationKey, st.integers(1, 2), blocks, st.sampled_from(CacheIoOperationKind)
)
# What a call is given; "key" is drawn from `keys` and the pending operation's.
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "demotion": st.builds(Demotion, numbers, blocks),
    "number": numbers,
    "io": st.builds(Io, keys),
    "resource": st.builds(object),
}
CALLS = {
    "begin_host_demotion": ("demotion",),
    "finish_host_demotion": ("number", "resource"),
    "fail_host_demotion": ("number",),
    "release_device_to_disk": (),
    "release_host_to_disk": (),
    "begin_write": ("io",),
    "finish_write": ("key", "resource"),
    "begin_read": ("io",),
    "finish_read": ("key", "resource"),
    "fail_io": ("key",),
    "fail_io_if_matches": ("key",),
    "io_matches": ("key",),
}
SLOTS = ("device", "host", "backing", "demotion", "io")


def outcome(call: Callable[..., Any], *arguments: object) -> Any:
    """The answer, or the refusal."""
    try:
        return call(*arguments)
    except CacheStorageError as error:
        return error


class Model:
    """Five slots; None is empty. Every method is its row of the contract's table of transitions."""

    def __init__(self, **filled: object) -> None:
        self.slots: dict[str, Any] = dict.fromkeys(SLOTS) | filled

    @property
    def phase(self) -> CacheStoragePhase:
        filled = {name for name, value in self.slots.items() if value is not None}
        if "device" in filled:
            return P.DEMOTING_TO_HOST if "demotion" in filled else P.DEVICE
        if "host" in filled:
            if "io" in filled:
                return P.HOST_WRITING
            return P.HOST_BACKED if "backing" in filled else P.HOST_UNBACKED
        return P.DISK_READING if "io" in filled else P.DISK_READY

    def need(self, ok: bool, error: CacheStorageError) -> None:
        if not ok:
            raise error

    def need_phase(self, *phases: CacheStoragePhase) -> None:
        self.need(self.phase in phases, CacheStorageError.InvalidPhase(phases[0], self.phase))

    def need_block(self, id: object) -> None:
        self.need(id == X, CacheStorageError.BlockMismatch(X, id))

    def take(self, *names: str) -> tuple[Any, ...]:
        taken = tuple(self.slots[name] for name in names)
        self.slots |= dict.fromkeys(names)
        return taken

    def begin_host_demotion(self, operation: Demotion) -> None:
        self.need_phase(P.DEVICE)
        self.need_block(operation.block_id)
        self.need(self.slots["backing"] is None, CacheStorageError.BackingAlreadyExists())
        self.slots["demotion"] = operation

    def need_demotion(self, number: int) -> None:
        self.need_phase(P.DEMOTING_TO_HOST)
        pending = self.slots["demotion"].operation_id
        self.need(pending == number, CacheStorageError.HostDemotionMismatch(pending, number))

    def finish_host_demotion(self, number: int, host: object) -> object:
        self.need_demotion(number)
        self.slots["host"] = host
        return self.take("device", "demotion")

    def fail_host_demotion(self, number: int) -> object:
        self.need_demotion(number)
        return self.take("demotion")[0]

    def release_device_to_disk(self) -> object:
        self.need_phase(P.DEVICE)
        self.need(self.slots["backing"] is not None, CacheStorageError.BackingRequired())
        return self.take("device")[0]

    def release_host_to_disk(self) -> object:
        self.need_phase(P.HOST_BACKED)
        return self.take("host")[0]

    def begin_io(self, phase: CacheStoragePhase, kind: CacheIoOperationKind, io: Io) -> None:
        self.need_phase(phase)
        self.need_block(io.key.id)
        self.need(io.key.kind is kind, CacheStorageError.IoKindMismatch(kind, io.key.kind))
        self.slots["io"] = io

    def begin_write(self, io: Io) -> None:
        self.begin_io(P.HOST_UNBACKED, WRITE, io)

    def begin_read(self, io: Io) -> None:
        self.begin_io(P.DISK_READY, READ, io)

    def need_key(self, key: CacheIoOperationKey) -> None:
        pending = self.slots["io"].key
        self.need(pending == key, CacheStorageError.IoMismatch(pending, key))

    def finish_write(self, key: CacheIoOperationKey, backing: object) -> object:
        self.need_phase(P.HOST_WRITING)
        self.need_key(key)
        self.slots["backing"] = backing
        return self.take("host", "io")

    def finish_read(self, key: CacheIoOperationKey, host: object) -> object:
        self.need_phase(P.DISK_READING)
        self.need_key(key)
        self.slots["host"] = host
        return self.take("io")[0]

    def fail_io(self, key: CacheIoOperationKey) -> object:
        self.need(self.slots["io"] is not None, CacheStorageError.IoNotPending(self.phase))
        self.need_key(key)
        return self.take("io")[0]

    def io_matches(self, key: CacheIoOperationKey) -> bool:
        return self.slots["io"] is not None and self.slots["io"].key == key

    def fail_io_if_matches(self, key: CacheIoOperationKey) -> bool:
        matches = self.io_matches(key)
        if matches:
            self.take("io")
        return matches

    def promote_host(self, device: object) -> tuple[CacheStoragePhase, object]:
        self.need_phase(P.HOST_UNBACKED, P.HOST_BACKED)
        source = self.phase
        self.slots["device"] = device
        return source, self.take("host")[0]

    def restore_host(self, source: CacheStoragePhase, host: object) -> object:
        self.need_phase(P.DEVICE)
        expected = P.HOST_UNBACKED if self.slots["backing"] is None else P.HOST_BACKED
        self.need(source is expected, CacheStorageError.InvalidPhase(expected, source))
        self.slots["host"] = host
        return self.take("device")[0]


class Lives(RuleBasedStateMachine):
    """Every call is made on both; answers, refusals and all slots must be the same objects.

    There is one rule, which draws the call: of several rules hypothesis would switch most off in
    each life, and lives would go nowhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.promotions: list[tuple[Promotion, tuple[CacheStoragePhase, object] | None]] = []

    @initialize(where=st.sampled_from(["device", "host", "disk"]), backed=st.booleans())
    def make(self, where: str, backed: bool) -> None:
        resource, file = object(), object() if backed else None
        if where == "disk":
            self.real, self.model = Storage.disk(X, resource), Model(backing=resource)
        elif where == "device":
            self.real = Storage.device(X, resource, file)
            self.model = Model(device=resource, backing=file)
        else:
            self.real = Storage.host(X, resource, file)
            self.model = Model(host=resource, backing=file)

    def both(self, call: str, *arguments: object) -> None:
        """Refused alike, or answered with the same objects."""
        expected = outcome(getattr(self.model, call), *arguments)
        answer = outcome(getattr(self.real, call), *arguments)
        if isinstance(expected, CacheStorageError):
            assert answer == expected
            return
        parts = answer if isinstance(expected, tuple) else (answer,)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        assert [id(part) for part in parts] == [id(part) for part in wanted]

    def likely_key(self) -> st.SearchStrategy[CacheIoOperationKey]:
        """Mostly that of the pending operation."""
        io = self.model.slots["io"]
        return keys if io is None else st.just(io.key) | keys

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        legal = [row.event for row in TRANSITIONS if row.source is self.model.phase]
        anything = [*CALLS, "promote_host", "restore_host"]
        call = data.draw(st.sampled_from(legal) | st.sampled_from(anything))
        if call in CALLS:
            kinds = CALLS[call]
            drawn = [data.draw(self.likely_key() if k == "key" else DRAWN[k]) for k in kinds]
            self.both(call, *drawn)
        elif call == "promote_host":
            self.promote_host()
        else:
            self.restore_host()

    def promote_host(self) -> None:
        device = object()
        expected = outcome(self.model.promote_host, device)
        promotion = outcome(self.real.promote_host, device)
        if isinstance(expected, CacheStorageError):
            assert promotion == expected
            return
        source, host = expected
        assert (promotion.source, promotion.id) == (source, X)
        assert promotion.host is host
        self.promotions.append((promotion, expected))

    def restore_host(self) -> None:
        """The newest two promotions: one that may stand, one that is too late or spent."""
        for position in range(len(self.promotions))[-2:]:
            promotion, kept = self.promotions[position]
            if kept is None:
                with pytest.raises(RuntimeError):
                    self.real.restore_host(promotion)
                continue
            expected = outcome(self.model.restore_host, *kept)
            device = outcome(self.real.restore_host, promotion)
            if isinstance(expected, CacheStorageError):
                assert device == expected
                assert promotion.host is kept[1]
            else:
                assert device is expected
                assert promotion.host is None
                self.promotions[position] = (promotion, None)

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "real"):
            assert self.real.phase is self.model.phase
            assert [id(v) for v in slots(self.real)] == [id(v) for v in self.model.slots.values()]
            check_slots(self.real)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40)
