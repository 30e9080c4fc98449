"""S1, S3: every call in every phase, cell by cell as the contract prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmcache.errors import CacheStorageError
from shmcache.states.storage import TRANSITIONS, CacheBlockStorage, CacheStoragePhase
from tests.states.storages import (
    COLUMNS,
    DEMOTION,
    READING,
    WRITING,
    P,
    Storage,
    check_slots,
    promotion_from,
    slots,
    storage_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# One column for each of COLUMNS. P: InvalidPhase with the row's expected phase. N: IoNotPending.
# Source: InvalidPhase about the promotion's source. The name of a phase: the next one.
MATRIX = """
begin_host_demotion     DEMOTING_TO_HOST BackingAlreadyExists P P P P P P
finish_host_demotion    P P HOST_UNBACKED P P P P P
fail_host_demotion      P P DEVICE P P P P P
release_device_to_disk  BackingRequired DISK_READY P P P P P P
release_host_to_disk    P P P P P DISK_READY P P
begin_write             P P P HOST_WRITING P P P P
finish_write            P P P P DISK_READY P P P
begin_read              P P P P P P DISK_READING P
finish_read             P P P P P P P HOST_BACKED
fail_io                 N N N N HOST_UNBACKED N N DISK_READY
fail_io_if_matches      False False False False HOST_UNBACKED False False DISK_READY
promote_host            P P P DEVICE P DEVICE P P
restore_host:unbacked   HOST_UNBACKED Source P P P P P P
restore_host:backed     Source HOST_BACKED P P P P P P
"""
EXPECTED = {
    "begin_host_demotion": P.DEVICE,
    "finish_host_demotion": P.DEMOTING_TO_HOST,
    "fail_host_demotion": P.DEMOTING_TO_HOST,
    "release_device_to_disk": P.DEVICE,
    "release_host_to_disk": P.HOST_BACKED,
    "begin_write": P.HOST_UNBACKED,
    "finish_write": P.HOST_WRITING,
    "begin_read": P.DISK_READY,
    "finish_read": P.DISK_READING,
    "promote_host": P.HOST_UNBACKED,
    "restore_host": P.DEVICE,
}
SOURCES = {"unbacked": P.HOST_UNBACKED, "backed": P.HOST_BACKED}


CALLS: dict[str, Callable[[Storage], object]] = {
    "begin_host_demotion": lambda s: s.begin_host_demotion(DEMOTION),
    "finish_host_demotion": lambda s: s.finish_host_demotion(310, "h2"),
    "fail_host_demotion": lambda s: s.fail_host_demotion(310),
    "release_device_to_disk": lambda s: s.release_device_to_disk(),
    "release_host_to_disk": lambda s: s.release_host_to_disk(),
    "begin_write": lambda s: s.begin_write(WRITING),
    "finish_write": lambda s: s.finish_write(WRITING.key, "f2"),
    "begin_read": lambda s: s.begin_read(READING),
    "finish_read": lambda s: s.finish_read(READING.key, "h2"),
    "fail_io": lambda s: s.fail_io((s.io or READING).key),
    "fail_io_if_matches": lambda s: s.fail_io_if_matches((s.io or READING).key),
    "promote_host": lambda s: s.promote_host("d2"),
    "restore_host:unbacked": lambda s: s.restore_host(promotion_from(P.HOST_UNBACKED)),
    "restore_host:backed": lambda s: s.restore_host(promotion_from(P.HOST_BACKED)),
}
ROWS = {line.split()[0]: line.split()[1:] for line in MATRIX.strip().splitlines()}
CELLS = [
    (call, column, cell)
    for call, cells in ROWS.items()
    for column, cell in zip(COLUMNS, cells, strict=True)
]


def refusal(call: str, cell: str, storage: Storage) -> CacheStorageError | None:
    """The error of a cell; None where the call is legal."""
    event, _, source = call.partition(":")
    if cell == "P":
        return CacheStorageError.InvalidPhase(EXPECTED[event], storage.phase)
    if cell == "N":
        return CacheStorageError.IoNotPending(storage.phase)
    if cell == "Source":  # here `actual` is the promotion's source
        (other,) = set(SOURCES.values()) - {SOURCES[source]}
        return CacheStorageError.InvalidPhase(other, SOURCES[source])
    if cell == "BackingRequired":
        return CacheStorageError.BackingRequired()
    if cell == "BackingAlreadyExists":
        return CacheStorageError.BackingAlreadyExists()
    return None


@pytest.mark.parametrize(("call", "column", "cell"), CELLS)
def test_s1_s3_cell(call: str, column: str, cell: str) -> None:
    storage = storage_in(column)
    check_slots(storage)
    before, phase = slots(storage), storage.phase
    error = refusal(call, cell, storage)
    if error is not None:
        with pytest.raises(CacheStorageError) as caught:
            CALLS[call](storage)
        assert caught.value == error
    elif cell == "False":
        assert CALLS[call](storage) is False
    else:
        answer = CALLS[call](storage)
        assert storage.phase is CacheStoragePhase[cell]
        assert call != "fail_io_if_matches" or answer is True
        check_slots(storage)
        return
    assert storage.phase is phase
    assert all(now is then for now, then in zip(slots(storage), before, strict=True))


def test_the_table_has_exactly_the_legal_cells() -> None:
    """The rows that are drawn are the cells above, apart from those that make a storage."""
    legal = {
        (storage_in(column).phase, call.partition(":")[0], CacheStoragePhase[cell])
        for call, column, cell in CELLS
        if cell in CacheStoragePhase.__members__ and call != "fail_io_if_matches"
    }
    rows = {(row.source, row.event, row.target) for row in TRANSITIONS if row.source is not None}
    assert rows == legal
    assert len({(row.source, row.event, row.when) for row in TRANSITIONS}) == len(TRANSITIONS)


def test_every_event_of_the_table_is_a_call() -> None:
    for row in TRANSITIONS:
        assert callable(getattr(CacheBlockStorage, row.event))
