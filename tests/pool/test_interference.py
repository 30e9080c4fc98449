"""What others do to a pool in the middle of a call: the collector, sweepers, removers."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator

import pytest

from shmcache import (
    CachePoolUsage,
    CacheResidencyPool,
    SegmentError,
)
from shmcache.pool import names
from shmcache.pool.names import SHM_DIRECTORY, TEMPORARY_PREFIX, segment_path
from tests.pool.named import ATTACH, ONE, create
from tests.pool.test_leftovers import OWN_TMPFS
from tests.support import Worker


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with create(pool_name) as pool:
        yield pool


# ---- the collector -------------------------------------------------------------------------------


class Closer:
    """A cycle that closes a pool when the collector finds it."""

    def __init__(self, pool: CacheResidencyPool) -> None:
        self._pool = pool
        self._cycle = self

    def __del__(self) -> None:
        self._pool.close()


@pytest.mark.parametrize("call", ["owners", "_owner_rows", "sweep", "_find_dead", "_held_rows"])
def test_the_collector_may_close_the_pool_inside_a_call(
    pool: CacheResidencyPool, call: str
) -> None:
    """Rows became Python objects while the engine was still being asked, then about nothing."""
    method: Callable[[], object] = getattr(pool, call)
    others = [CacheResidencyPool.attach(pool.name) for _ in range(5)]
    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    kept = [(k,) * size for k in range(3000) for size in range(1, 12)]  # freed tuples, used up
    Closer(pool)
    gc.set_threshold(1, 1, 1)
    try:
        gc.enable()
        method()  # the next object that can be part of a cycle is made in here
    except SegmentError.Closed:
        assert pool.closed
    finally:
        gc.set_threshold(*before)
    assert len(kept) == 33000
    for other in others:
        other.close()


# ---- other sweepers ------------------------------------------------------------------------------


def dead_owner_of(pool: CacheResidencyPool, host_bytes: int) -> None:
    with Worker(ATTACH) as worker:
        worker.call("attach(name)", name=pool.name)
        worker.call("token = pool.reserve(CachePoolUsage(host_bytes=size))", size=host_bytes)
        worker.kill()


def test_a_sweep_tells_only_what_it_gave_back_itself(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sweeper is faster, and a new owner takes the slot: its usage is not "given back"."""
    dead_owner_of(pool, 3)
    found = pool._find_dead()
    (faster,) = pool.sweep()
    assert (faster.entries, faster.usage) == (1, CachePoolUsage(host_bytes=3))
    with CacheResidencyPool.attach(pool.name) as newcomer, newcomer.reserve(ONE):
        monkeypatch.setattr(CacheResidencyPool, "_find_dead", lambda _: found)
        assert newcomer.owners()[1].slot == faster.slot
        assert pool.sweep() == ()
        assert pool.report().current_host_bytes == 1


def test_a_dead_owner_without_anything_is_told_too(pool: CacheResidencyPool) -> None:
    with Worker(ATTACH) as worker:
        worker.call("attach(name)", name=pool.name)
        worker.kill()
    (swept,) = pool.sweep()
    assert (swept.entries, swept.usage) == (0, CachePoolUsage())


# ---- removers ------------------------------------------------------------------------------------


def test_destroy_waits_for_who_looks_at_the_file(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create that looks whether the file is a leftover holds the name lock for an instant."""
    create(pool_name).close()
    looking = [os.open(segment_path(pool_name), os.O_RDWR)]
    assert names.lock_name(looking[0])

    def look_no_longer(_: float) -> None:
        os.close(looking.pop())

    monkeypatch.setattr(time, "sleep", look_no_longer)
    CacheResidencyPool.destroy(pool_name)
    assert not segment_path(pool_name).exists()
    assert not looking


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_an_orphan_of_another_member_of_the_group_hinders_nobody(pool_name: str) -> None:
    """They can open and lock it; /dev/shm is sticky, so only its owner can remove it."""
    orphan = SHM_DIRECTORY / f"{TEMPORARY_PREFIX}1.{pool_name}"
    orphan.touch(0o600)
    orphan.chmod(0o660)
    try:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.seteuid(65534)
                create(pool_name).close()
                CacheResidencyPool.destroy(pool_name)
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        orphan.unlink(missing_ok=True)  # a create of root's, if there was one, has collected it


@pytest.mark.parametrize("attach", [False, True])
def test_a_pool_that_only_its_creator_has_is_retired_too(pool_name: str, attach: bool) -> None:
    """/proc shows the creator's descriptor under the temporary path, which never exists again."""
    with create(pool_name) as old:
        other = CacheResidencyPool.attach(pool_name) if attach else old
        segment_path(pool_name).unlink()
        with create(pool_name) as new:
            assert (old.state, new.state) == ("retired", "active")
        other.close()


def test_a_pool_with_a_name_is_not_retired_by_a_create(pool: CacheResidencyPool) -> None:
    with pytest.raises(SegmentError.Exists):
        create(pool.name)
    assert names.retire_nameless(pool.name) == 0
    assert pool.state == "active"


def test_a_pool_of_another_dev_shm_is_not_retired(pool_name: str) -> None:
    """Containers of one pod may share processes and not /dev/shm: there the name is another's."""
    with Worker(ATTACH, OWN_TMPFS) as worker:
        if not worker.call("own_tmpfs(6 << 20)"):
            pytest.skip("mounting a tmpfs needs CAP_SYS_ADMIN")
        worker.call("pool = create(name)", name=pool_name)
        worker.call("os.unlink(f'/dev/shm/shmcache.{name}')")
        create(pool_name).close()
        assert worker.call("pool.state") == "active"
