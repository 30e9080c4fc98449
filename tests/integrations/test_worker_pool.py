"""The pool of a server's workers: who tells of it, who opens it, what a keeper mends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import shmcache as sc
from shmcache.integrations.worker_pool import (
    ENVIRONMENT,
    PoolKeeper,
    PoolSettings,
    current_pool,
    leave_current_pool,
    pool_settings,
    use_pool,
)
from tests.integrations.servers import owners_of
from tests.pool import raw
from tests.support import Worker, wait_until

LIMITS = sc.CachePoolLimits(1 << 20, 4 << 20, 1 << 20, 0)
KEY = bytes(32)


@pytest.fixture
def settings(pool_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolSettings]:
    monkeypatch.setenv(ENVIRONMENT, "")
    yield use_pool(pool_name, LIMITS, arena_bytes=1 << 20, watermarks=(0.05, 0.1))
    leave_current_pool()


def test_what_was_told_is_what_is_read(settings: PoolSettings) -> None:
    read = pool_settings()
    assert (read.name, read.limits) == (settings.name, LIMITS)
    assert read.options == {"arena_bytes": 1 << 20, "watermarks": [0.05, 0.1]}
    assert current_pool().geometry().limits == LIMITS


def test_nobody_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(LookupError, match="use_pool"):
        current_pool()
    monkeypatch.setenv(ENVIRONMENT, '{"name": 1}')
    with pytest.raises(ValueError, match=ENVIRONMENT):
        current_pool()


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [("a/b", {}, ValueError), ("a", {"prefault": object()}, TypeError)],
)
def test_what_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, object], error: type[Exception]
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "before")
    with pytest.raises(error):
        use_pool(name, LIMITS, **options)
    assert os.environ[ENVIRONMENT] == "before"


def test_a_pool_of_other_sizes_is_refused(settings: PoolSettings) -> None:
    with (
        sc.CacheResidencyPool.create(settings.name, LIMITS, arena_bytes=2 << 20),
        pytest.raises(sc.SegmentError.Refused),
    ):
        current_pool()


def test_one_handle_until_the_pool_ends(settings: PoolSettings) -> None:
    first = current_pool()
    assert current_pool() is first
    sc.CacheResidencyPool.destroy(settings.name, force=True)
    second = current_pool()
    assert second is not first
    assert (first.closed, second.state) == (True, "active")
    second.close()
    assert current_pool().state == "active"
    leave_current_pool()
    assert owners_of(settings.name) == {}
    leave_current_pool()  # once more is nothing


def test_a_forked_child_is_an_owner_of_its_own(settings: PoolSettings) -> None:
    current_pool().allocate(64).publish(KEY).lease.release()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            lease = current_pool().lookup(KEY)
            os.write(writer, b"%d" % (lease is not None))
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"1"
        assert set(owners_of(settings.name)) == {os.getpid(), child}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    current_pool().sweep()
    assert set(owners_of(settings.name)) == {os.getpid()}


@pytest.fixture
def keeper(settings: PoolSettings) -> Iterator[PoolKeeper]:
    keeper = PoolKeeper(settings)
    keeper.start()
    yield keeper
    keeper.stop()
    keeper.stop()  # once more is nothing


def holder(name: str) -> Worker:
    """A process that holds a charge and a block."""
    worker = Worker("import shmcache as sc")
    worker.call("pool = sc.CacheResidencyPool.attach(name)", name=name)
    worker.call("held = pool.allocate(64), pool.reserve(sc.CachePoolUsage(device_bytes=1))")
    return worker


@pytest.mark.usefixtures("keeper")
def test_a_keeper_gives_back_what_the_dead_held(settings: PoolSettings) -> None:
    assert owners_of(settings.name) == {}  # it takes no slot
    with holder(settings.name) as worker:
        worker.kill()
        wait_until(lambda: owners_of(settings.name) == {}, "the dead one is reclaimed")


@pytest.mark.usefixtures("keeper")
def test_a_keeper_makes_a_removed_pool_again(settings: PoolSettings) -> None:
    """And watches that one."""
    sc.CacheResidencyPool.destroy(settings.name, force=True)
    wait_until(lambda: settings.name in sc.segment_names(), "the pool is there again")
    with holder(settings.name) as worker:
        worker.kill()
        wait_until(lambda: owners_of(settings.name) == {}, "the dead one is reclaimed")


def test_a_keeper_replaces_a_poisoned_pool(settings: PoolSettings) -> None:
    poison(settings)
    with pytest.raises(sc.CachePoolError.Poisoned):
        PoolKeeper(settings, on_poison="report").start()
    keeper = PoolKeeper(settings)
    keeper.start()
    try:
        wait_until(lambda: usable(settings.name), "an empty epoch took its place")
    finally:
        keeper.stop()
    assert current_pool().verify().ok


def poison(settings: PoolSettings) -> None:
    with settings.open() as pool, raw.Segment(pool.fileno()) as damaged:
        damaged.damage_total()
        assert not pool.verify().ok


def usable(name: str) -> bool:
    try:
        with sc.CacheResidencyPool.observe(name) as observer:
            return observer.state == "active"
    except sc.SegmentError:
        return False


def test_a_child_does_not_stop_its_parents_keeper(
    settings: PoolSettings, keeper: PoolKeeper
) -> None:
    if (child := os.fork()) == 0:
        keeper.sweep_soon()
        keeper.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with holder(settings.name) as worker:
        worker.kill()
        wait_until(lambda: owners_of(settings.name) == {}, "the dead one is reclaimed")
