"""Pools in workers of multiprocessing, concurrent.futures and torch's DataLoader."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

import shmcache as sc
from shmcache.integrations import worker_pool
from shmcache.integrations.mp_workers import PoolName, current_pool, join_pool
from shmcache.integrations.worker_pool import leave_current_pool, use_pool_here
from tests.integrations import mp_tasks
from tests.pool import raw
from tests.support import PATIENCE_S, ROOT, wait_until

LIMITS = sc.CachePoolLimits(1, 1 << 20, 1, 0)
WHOLE = sc.CachePoolUsage(host_bytes=1 << 20)
KEY = b"k" * 32
# Each spawned process imports everything again: a second and more, of which CI has enough.
METHODS = (
    "fork",
    pytest.param("spawn", marks=pytest.mark.ci),
    pytest.param("forkserver", marks=pytest.mark.ci),
)
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module", autouse=True)
def helpers_of_multiprocessing() -> None:
    """They stay for the life of the process that first needs them."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    """With one block, and nothing told to this process."""
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=64 << 10) as pool:
        block = pool.allocate(5)
        block.memoryview()[:] = b"block"
        block.publish(KEY)
        del block
        yield pool
    use_pool_here(None)
    leave_current_pool()


@contextlib.contextmanager
def executor_of(
    pool: sc.CacheResidencyPool, method: str = "fork", workers: int = 2
) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=join_pool,
        initargs=(PoolName.of(pool) if pool.name else pool,),
    ) as executor:
        yield executor


def charged(pool: sc.CacheResidencyPool) -> int:
    """Host bytes beside the arena's."""
    return pool.report().current_host_bytes - pool.arena_report().used_bytes


# ---- what crosses --------------------------------------------------------------------------------


def test_a_name_is_pickled_and_a_pool_is_not(pool: sc.CacheResidencyPool) -> None:
    name = PoolName.of(pool)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(name, protocol)) == name
    with pytest.raises(TypeError, match=r"send its name.*workers\.md"):
        pickle.dumps(pool)
    with pytest.raises(ValueError, match="name"):
        PoolName("a/b")
    with sc.CacheResidencyPool(LIMITS) as anonymous:
        with pytest.raises(TypeError, match="without a name"):
            PoolName.of(anonymous)
        with pytest.raises(TypeError, match="fork after it was made"):
            pickle.dumps(anonymous)


def test_a_process_has_one_handle_of_a_name(pool: sc.CacheResidencyPool) -> None:
    name = PoolName.of(pool)
    assert name.pool() is name.pool() is PoolName(pool.name).pool()
    join_pool(name)
    assert current_pool() is name.pool()
    assert current_pool() is not pool
    name.pool().close()
    assert name.pool().report() == pool.report()
    sc.CacheResidencyPool.destroy(pool.name, force=True)
    with pytest.raises(sc.SegmentError.NotFound):
        name.pool()
    with pytest.raises(sc.SegmentError.NotFound):
        join_pool(PoolName(pool.name))
    with sc.CacheResidencyPool.create(pool.name, LIMITS) as successor:
        assert name.pool().id == successor.id  # by name, as promised


# ---- executors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_executor(pool: sc.CacheResidencyPool, method: str) -> None:
    """Each worker attaches once, and leaves with the executor's end: nobody has to sweep."""
    with executor_of(pool, method) as executor:
        answers = list(executor.map(mp_tasks.read, [KEY] * 20))
        answers += [executor.submit(mp_tasks.read_by_name, PoolName.of(pool), KEY).result()]
        assert {data for *_, data in answers} == {b"block"}
        workers = {pid for pid, _, _ in answers}
        assert len({(pid, handle) for pid, handle, _ in answers}) == len(workers)
        attached = [owner.pid for owner in pool.owners()]
        assert len(attached) == len(set(attached)) <= 3
        assert set(attached) >= workers
    assert [owner.pid for owner in pool.owners()] == [os.getpid()]
    assert pool.verify().ok


def test_without_the_finalizer_a_worker_would_stay_until_a_sweep(
    pool: sc.CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above: `atexit` is not run in these processes."""
    if sys.version_info >= (3, 13):
        pytest.skip("this Python runs atexit in children of multiprocessing")
    monkeypatch.setattr(worker_pool, "_leave_at_exit", lambda: None)
    with executor_of(pool) as executor:
        executor.submit(mp_tasks.read, KEY).result()
    assert len(pool.owners()) > 1
    pool.sweep()
    assert len(pool.owners()) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_worker_breaks_the_executor_and_leaves_nothing(
    pool: sc.CacheResidencyPool, method: str
) -> None:
    with executor_of(pool, method, workers=1) as executor:
        pids = {executor.submit(mp_tasks.keep, 1000).result() for _ in range(4)}
        waiting: Future[int] = executor.submit(mp_tasks.wait_for_room, 1 << 20)
        with raw.Segment(pool.fileno()) as segment:
            wait_until(lambda: segment.waiters() == 1, "the worker waits")
        assert charged(pool) == 4000
        os.kill(pids.pop(), signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            waiting.result(PATIENCE_S)
    # The refusal sweeps: nothing of the dead is a reason to refuse. The block is evicted for it.
    pool.reserve(WHOLE, timeout=PATIENCE_S).release()
    assert charged(pool) == 0
    assert len(pool.owners()) == 1
    assert pool.verify().ok


def test_an_anonymous_pool_reaches_forked_workers() -> None:
    with sc.CacheResidencyPool(LIMITS, arena_bytes=64 << 10) as pool:
        with executor_of(pool) as executor:
            executor.submit(mp_tasks.keep, 7).result()
            assert charged(pool) == 7
        assert charged(pool) == 0
        with pytest.raises(TypeError, match="fork after it was made"), executor_of(pool, "spawn"):
            pickle.dumps(pool)


def test_an_initializer_that_finds_no_pool_breaks_the_executor(pool_name: str) -> None:
    with (
        ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("fork"),
            initializer=join_pool,
            initargs=(PoolName(pool_name),),
        ) as executor,
        pytest.raises(BrokenProcessPool),
    ):
        executor.submit(mp_tasks.read, KEY).result(PATIENCE_S)


def test_a_worker_forks(pool: sc.CacheResidencyPool) -> None:
    with executor_of(pool, workers=1) as executor:
        before, within, after = executor.submit(mp_tasks.fork_and_use).result()
    base = pool.arena_report().used_bytes & 0xFF
    assert (before & 0xFF, within, after & 0xFF) == (base + 1, base + 2, base + 1)
    assert charged(pool) == 0


# ---- multiprocessing -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_workers_that_are_recycled(pool: sc.CacheResidencyPool, method: str) -> None:
    context = multiprocessing.get_context(method)
    workers = context.Pool(2, join_pool, (PoolName.of(pool),), maxtasksperchild=1)
    try:
        pids = set(workers.map(mp_tasks.keep, [10] * 6, chunksize=1))
        assert len(pids) == 6
        workers.close()
        workers.join()
    finally:
        workers.terminate()
        workers.join()
    assert [owner.pid for owner in pool.owners()] == [os.getpid()]
    assert charged(pool) == 0
    assert pool.report().managers == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_process(pool: sc.CacheResidencyPool, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=mp_tasks.main, args=(PoolName.of(pool), KEY))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert [owner.pid for owner in pool.owners()] == [os.getpid()]
    process.close()


def killed(process: Any) -> None:
    process.kill()


def terminated(process: Any) -> None:
    process.terminate()


@pytest.mark.parametrize("end", [killed, terminated])
def test_a_process_that_does_not_end_by_itself(
    pool: sc.CacheResidencyPool, end: Callable[[Any], None]
) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=mp_tasks.linger, args=(PoolName.of(pool),)
    )
    process.start()
    wait_until(lambda: charged(pool) == 1, "it is charged")
    end(process)
    process.join(PATIENCE_S)
    pool.sweep()
    assert charged(pool) == 0
    assert len(pool.owners()) == 1
    process.close()


# ---- whole programs ------------------------------------------------------------------------------


def program(script: str, *arguments: str, pool: str) -> subprocess.CompletedProcess[str]:
    """Run by itself: what the resource tracker says at the end is in its stderr."""
    return subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "POOL": pool, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_example_of_an_executor(pool_name: str, method: str) -> None:
    done = program(str(EXAMPLES / "pool_executor.py"), method, pool=pool_name)
    assert (done.returncode, done.stderr) == (0, "")
    answers, blocks, owners = done.stdout.splitlines()
    assert answers.startswith("60 answers, ")
    assert 20 <= int(answers.split()[2]) <= 60  # two may meet before either has published
    assert (blocks, owners) == ("320 KiB of blocks", "owners now: 1")


@pytest.mark.parametrize("method", METHODS)
def test_the_example_of_a_data_loader(pool_name: str, method: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    done = program(str(EXAMPLES / "data_loader.py"), method, pool=pool_name)
    assert done.returncode == 0, done.stderr
    assert "shmcache" not in done.stderr  # a loader's own semaphores are the tracker's concern
    assert done.stdout.splitlines() == [
        "epoch 0: 8 batches of (8, 128, 32)",
        "epoch 1: 8 batches of (8, 128, 32)",
        "owners: 3, leased: 0 bytes",
        "owners now: 1",
    ]


TRACKED = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, shared_memory  # noqa
from shmcache.integrations.mp_workers import PoolName, join_pool
from tests.integrations import mp_tasks

if __name__ == "__main__":
    name = PoolName(sys.argv[1])
    theirs = shared_memory.SharedMemory(create=True, size=4096)
    with ProcessPoolExecutor(2, get_context("spawn"), join_pool, (name,)) as executor:
        print(executor.submit(mp_tasks.keep, 1).result() > 0)
    theirs.close()
    theirs.unlink()
    shared_memory.SharedMemory(name=sys.argv[1] + "-left", create=True, size=4096)
"""


def test_the_resource_tracker_knows_nothing_of_pools_c01_c04(
    pool: sc.CacheResidencyPool, tmp_path: Any
) -> None:
    """A program that also uses segments of the standard library, and leaks one of those."""
    script = tmp_path / "tracked.py"
    script.write_text(TRACKED)
    done = program(str(script), pool.name, pool=pool.name)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "1 leaked shared_memory objects" in done.stderr  # theirs, as it must
    assert "shmcache" not in done.stderr
    with sc.CacheResidencyPool.attach(pool.name) as again:
        assert again.id == pool.id
        assert again.contains(KEY)
    assert len(pool.owners()) == 1
