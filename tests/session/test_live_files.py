"""Blocks as files: damage, failures, queues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmcache import CachePoolLimits, CacheResidencyPool
from shmcache.errors import CacheResidencyError
from shmcache.states.storage import CacheStoragePhase as Phase
from tests.session.rig import (
    Files,
    axes,
    content,
    elsewhere,
    file_of,
    grow,
    left_in,
    make,
    on_disk,
    published,
    tokens,
)
from tests.support import wait_until

pytestmark = pytest.mark.usefixtures("engine")

Runtime = CacheResidencyError.Runtime


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def lead_elsewhere(path: Path) -> None:
    twin = path.with_name("twin")
    path.rename(twin)
    path.symlink_to(twin)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lead_elsewhere])
def test_a_damaged_file_is_an_error_and_never_a_wrong_tensor(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with make(disk=(tmp_path, 320)) as session:
        first, second = on_disk(session, 2)
        damage(file_of(session, first).path)
        for _ in range(2):
            with pytest.raises(Runtime, match="could not be read"):
                session.lease(first)
        assert session.phase(first) is Phase.DISK_READY
        assert published(session) == axes(session.pool.report()) == (0, 0, 0, 64)
        assert session.report().failures == 2
        with session.lease(second) as lease:
            assert lease.arrays[0][0, 0, 0, 0] == 4
        session.truncate(0, 0)
        (tmp_path / "twin").unlink(missing_ok=True)


@pytest.mark.parametrize("number", [28, 5])
def test_a_write_that_fails_leaves_no_file(tmp_path: Path, files: Files, number: int) -> None:
    files.fail("write", number=number)
    with make(disk=(tmp_path, 320)) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        with pytest.raises(Runtime, match="injected"):
            session.demote(first)
        session.rebalance()  # who waited was told: nobody else is
        assert session.phase(first) is Phase.HOST_UNBACKED
        assert axes(session.pool.report()) == (0, 40, 0, 0)
        assert left_in(tmp_path) == []
        files.fail()
        session.demote(first)  # the key of the failed write is free again
        assert content(session) == [0, 1, 2, 3]


def test_a_folder_that_cannot_be_written_to_leaves_no_file(tmp_path: Path) -> None:
    with make(disk=(tmp_path / "live", 320)) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        shutil.rmtree(tmp_path / "live")
        with pytest.raises(Runtime, match="No such file"):
            session.demote(first)
        assert axes(session.pool.report()) == (0, 40, 0, 0)


def test_the_folder_must_be_possible(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheResidencyError.Io) as caught:
        make(disk=(tmp_path / "file" / "below", 320))
    assert caught.value.action == "create_live_directory"


def test_a_full_queue_delays_and_is_counted(tmp_path: Path, files: Files) -> None:
    files.shut()
    with make(device=1 << 10, disk=(tmp_path, 640), queue=1) as session:
        grow(session, 12)
        blocks = session.blocks()
        for id in blocks:
            session.demote(id)
        with (
            elsewhere(lambda: session.demote(blocks[0])),
            elsewhere(lambda: session.demote(blocks[1])),
        ):
            assert files.writing.wait(60)
            wait_until(lambda: session.report().in_flight_write_blocks == 2, "one is queued")
            with elsewhere(lambda: session.demote(blocks[2])):
                wait_until(lambda: session.report().in_flight_write_blocks == 3, "one waits")
                files.open()
        report = session.report()
        assert report.queue_peak_occupancy == 1
        assert report.queue_capacity == 1
        assert report.peak_in_flight_write_bytes == 120
        assert len(left_in(tmp_path)) == 3


def test_live_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with make(disk=(tmp_path, 320)) as session:
        (first,) = on_disk(session)
        arrays = load_file(file_of(session, first).path)
        assert sorted(arrays) == ["keys", "values"]
        assert np.array_equal(arrays["keys"], tokens(0, 4))
        assert np.array_equal(arrays["values"], -tokens(0, 4))


def test_files_that_a_close_cannot_delete_stay_charged(
    tmp_path: Path, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the session's name, until the process has left and somebody has deleted them."""
    limits = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 1 << 20)
    with CacheResidencyPool.create(pool_name, limits, arena_bytes=0) as pool:
        session = make(disk=(tmp_path, 320), pool=CacheResidencyPool.attach(pool_name))
        worker = session.pool
        on_disk(session, 2)
        with monkeypatch.context() as patch:

            def refuse(path: Path, **options: object) -> None:
                raise PermissionError(1, "injected")

            patch.setattr(os, "unlink", refuse)
            with pytest.raises(CacheResidencyError.Io):
                session.close()
            assert pool.report().current_disk_bytes == 64
            assert axes(pool.report())[:3] == (0, 0, 0)
            session.close()  # idempotent
            assert pool.report().current_disk_bytes == 64
            worker.close()
            assert pool.report().current_disk_bytes == 64
        pool.sweep()
        assert pool.report().current_disk_bytes == 0
        assert not left_in(tmp_path)
        assert pool.verify().ok
