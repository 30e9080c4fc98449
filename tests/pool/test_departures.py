"""Handles that go without having been able to say goodbye, and names that stay behind.

Goal: G5 where the process lives on. Each was a charge, or a name, lost for as long as it did.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import threading
from pathlib import Path

import pytest

import shmcache as sc
from shmcache.pool import names
from shmcache.pool.names import segment_path
from tests.support import Worker, wait_until

LIMITS = sc.CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 1 << 20)
ONE = sc.CachePoolUsage(device_bytes=1 << 20)

HOLD_LOCK = """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
def lock(path):
    global segment
    segment = mmap.mmap(os.open(path, os.O_RDWR), 8192)
    mutex = ctypes.addressof(ctypes.c_char.from_buffer(segment)) + 4096
    libc.pthread_mutex_lock(ctypes.c_void_p(mutex))
def unlock():
    mutex = ctypes.addressof(ctypes.c_char.from_buffer(segment)) + 4096
    libc.pthread_mutex_unlock(ctypes.c_void_p(mutex))
"""

SECOND = """
import gc
import shmcache as sc
def begin(name):
    global keep, second, token
    keep, second = sc.CacheResidencyPool.attach(name), sc.CacheResidencyPool.attach(name)
    token = second.reserve(sc.CachePoolUsage(device_bytes=1 << 20))
def drop():
    global second, token
    del second, token
    gc.collect()
"""


def test_a_handle_dropped_while_the_lock_was_taken_holds_nothing(pool_name: str) -> None:
    """Its process maps the segment through another handle: the slot itself says it departed."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0)
    with Worker(SECOND) as worker, Worker(HOLD_LOCK) as holder:
        worker.call("begin(name)", name=pool_name)
        holder.call("lock(path)", path=str(segment_path(pool_name)))
        worker.call("drop()")
        holder.call("unlock()")
        pool.reserve(ONE).release()  # a refusal sweeps first, and finds that nobody holds it
        assert [owner.verdict.value for owner in pool.owners()] == ["alive", "alive"]
    pool.close()


def test_a_raw_forked_child_is_not_its_parent(pool_name: str) -> None:
    """A fork without handlers copies the list of handles: they are the parent's all the same."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0)
    fork = ctypes.CDLL(None).syscall
    child = fork(57 if os.uname().machine == "x86_64" else 1079)
    if child == 0:
        code = 1
        try:
            sc.CacheResidencyPool.destroy(pool_name)
        except sc.SegmentError.InUse:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.state == "active"
    pool.close()


def test_a_remover_killed_half_way_leaves_no_wedged_name(pool_name: str) -> None:
    """Retired, still named, still used by somebody idle: the next one replaces it."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0)
    child = os.fork()
    if child == 0:
        kill_me = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        names.remove_name = lambda *_: kill_me()  # type: ignore[assignment]
        with contextlib.suppress(BaseException):
            sc.CacheResidencyPool.destroy(pool_name, force=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert pool.state == "retired"
    with sc.CacheResidencyPool.open_or_create(pool_name, LIMITS, arena_bytes=0) as fresh:
        assert fresh.state == "active"
    pool.close()


class Interrupted(Exception):
    """What a signal handler raises in the middle of a release."""


def test_an_interrupted_release_keeps_its_room_in_the_queue(pool_name: str) -> None:
    """A token counts until its release is through: what is reserved meanwhile gets its own room."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0)
    byte = sc.CachePoolUsage(device_bytes=1)
    tokens = [pool.reserve(byte) for _ in range(16)]  # as many as the queue has room for at first
    path = str(segment_path(pool_name))
    with Worker(HOLD_LOCK) as holder:

        def handler(*_: object) -> None:
            holder.call("unlock()")
            tokens.append(pool.reserve(byte))
            raise Interrupted

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            holder.call("lock(path)", path=path)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Interrupted):
                tokens[0].release()
        finally:
            signal.signal(signal.SIGUSR1, before)
        holder.call("lock(path)", path=path)
        del tokens[:]
        holder.call("unlock()")
    pool.reserve(byte).release()
    assert pool.report().current_device_bytes == 0
    pool.close()


@pytest.mark.parametrize("make", ["reserve", "register_manager"])
def test_no_memory_for_a_token_means_no_charge(make: str) -> None:
    """The token is made before the admission: a MemoryError has changed nothing."""
    testcapi = pytest.importorskip("_testcapi", reason="this Python has no allocator hooks")
    pool = sc.CacheResidencyPool(LIMITS)
    argument = {"reserve": sc.CachePoolUsage(device_bytes=7), "register_manager": 5}[make]
    call = getattr(pool, make)
    call(argument).release()
    failures = 0
    for allocation in range(12):
        testcapi.set_nomemory(allocation, allocation + 1)
        try:
            token = call(argument)
        except MemoryError:
            failures += 1
        else:
            token.release()
        finally:
            testcapi.remove_mem_hooks()
        report = pool.report()
        assert (report.current_device_bytes, report.managers) == (0, 0), allocation
    assert failures > 0
    pool.close()


def test_a_supervisor_outlives_the_loss_of_its_descriptors(pool_name: str) -> None:
    """Daemonising libraries close everything; the pool must stay watched."""
    code = """
import os, time
import shmcache as sc
def watch(name):
    global pool, supervisor
    pool = sc.CacheResidencyPool.observe(name)
    supervisor = sc.Supervisor(pool).__enter__()
def close_everything():
    keep = {0, 1, 2}
    for fd in range(3, 64):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "pipe" not in target and "/dev/null" not in target:
            os.close(fd)
def alive():
    return supervisor._thread.is_alive()
"""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0)
    with Worker(code) as watcher, Worker(SECOND) as victim:
        watcher.call("watch(name)", name=pool_name)
        watcher.call("close_everything()")
        victim.call("begin(name)", name=pool_name)
        victim.kill()
        wait_until(lambda: pool.report().current_device_bytes == 0, "the death to be noticed")
        assert watcher.call("alive()")
    pool.close()


def test_a_directory_of_the_name_is_a_typed_error(pool_name: str) -> None:
    """Not even a forced destroy shows a bare OSError."""
    path: Path = segment_path(pool_name)
    path.mkdir()
    try:
        with pytest.raises(sc.SegmentError):
            sc.CacheResidencyPool.destroy(pool_name, force=True)
        with pytest.raises(sc.SegmentError):
            sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0)
    finally:
        path.rmdir()
