"""Fork: a child is a stranger that happens to know the pool; its parent notices nothing of it.

Why: gunicorn, data loaders, daemons and shells all fork processes that hold handles and tokens, and
in most of them nobody wrote the line of code that would tell the pool.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool
from tests.process.conftest import needs_namespaces
from tests.process.scenes import FORKS, slots
from tests.support import Worker, wait_until

# ---- what a child inherits ---------------------------------------------------------------------

INERT = {
    "nothing": "None",
    "release": "token.release(), membership.release(), token.released",
    "with": "token.__exit__(None, None, None)",
    "finalizers": "globals().pop('token'), globals().pop('membership'), gc.collect()",
    "close": "pool.close()",
    "collect the pool": "[globals().pop(n) for n in ('token', 'membership', 'pool')], gc.collect()",
    "close and use": "pool.close() or token.release()",
}


@pytest.mark.parametrize("action", INERT.values(), ids=INERT)
def test_c37_inherited_tokens_are_inert(
    pool: CacheResidencyPool, parent: Worker, action: str
) -> None:
    """Whatever a child does to its parent's tokens and handle, the parent has them still."""
    before, owners = pool.report(), slots(pool)
    parent.call(f"child(lambda: ({action}))")
    assert pool.report() == before
    assert slots(pool) == owners
    assert parent.call("token.released") is False
    parent.call("token.release()")
    assert pool.report().current_device_bytes == 0
    assert pool.verify().ok


def test_inherited_tokens_cannot_be_published(pool: CacheResidencyPool, parent: Worker) -> None:
    """A usage error, before anything happens."""
    before = pool.report()
    said = parent.call("child(lambda: pool.publish_and_release(1, U(1), token))")
    assert said.startswith("ValueError: the reservation belongs to the process")
    assert pool.report() == before


# A whole program, because only one that ends as programs do shows what its end does. The parent
# compares what the pool says before and after.
ENDS = """
import os, sys, threading, shmcache
pool = shmcache.CacheResidencyPool.attach(sys.argv[1])
tokens = [pool.reserve(shmcache.CachePoolUsage(10)), pool.register_manager(None)]
before = pool.report(), [owner.pid for owner in pool.owners()]
def end():
    {ending}
def fork():
    global child
    child = os.fork()
    if child == 0:
        end()
{how}
if child:
    assert os.waitpid(child, 0)[1] == {status}, "the child ended otherwise"
    assert (pool.report(), [owner.pid for owner in pool.owners()]) == before, "the pool changed"
    print("unchanged")
"""
ENDINGS = {
    "falls off the end": ("pass", "fork()", 0),
    "sys.exit": ("sys.exit(3)", "fork()", 3 << 8),
    "an exception": ("1 / 0", "fork()", 1 << 8),
    "os._exit": ("os._exit(0)", "fork()", 0),
    "abort": ("os.abort()", "fork()", signal.SIGABRT),
    "in a thread": ("pass", "t = threading.Thread(target=fork); t.start(); t.join()", 0),
}


@pytest.mark.parametrize(("ending", "how", "status"), ENDINGS.values(), ids=ENDINGS)
def test_c37_a_childs_end_is_its_own(
    pool: CacheResidencyPool, ending: str, how: str, status: int
) -> None:
    """The whole shutdown of an interpreter that inherited a handle changes nothing for others."""
    program = ENDS.format(ending=ending, how=how, status=int(status))
    done = run_program(program, pool.name)
    assert done == "unchanged\n"
    assert slots(pool) == set()  # the parent left by itself


def run_program(program: str, *words: str) -> str:
    """Run a Python program to its end in a Worker's child; its output."""
    code = "import subprocess; subprocess.run([sys.executable, '-c', program, *words], "
    with Worker("import sys") as worker:
        return str(
            worker.call(
                f"{code} stdout=subprocess.PIPE, text=True, check=True).stdout",
                program=program,
                words=words,
            )
        )


@needs_namespaces
def test_c37_a_child_with_the_same_pid(pool_name: str) -> None:
    """Process 1 whose child is process 1 of another namespace: pids tell nothing, the page does."""
    with Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as parent:
        parent.call(FORKS)
        parent.call("limits = shmcache.CachePoolLimits(1000, 0, 1000, 1000)")
        parent.call("shmcache.CacheResidencyPool.create(name, limits)", name=pool_name)
        parent.call("attach(name)")
        before = parent.call("repr(pool.report())")
        parent.call("kernel._call('unshare', kernel.NEW_PIDS)")
        assert parent.call("""
def strange():
    token.release()
    return os.getpid(), attempt(lambda: pool.reserve(U(1))), pool.close()
child(strange)
""") == [1, "SegmentError.Refused", None]
        assert parent.call("os.getpid()") == 1
        assert parent.call("repr(pool.report())") == before


# ---- a child that uses the pool ----------------------------------------------------------------


def test_a_child_attaches_by_using(pool: CacheResidencyPool, parent: Worker) -> None:
    """It is an owner of its own; what it leaves behind by `_exit` is swept, its parent's is not."""
    device, pids, pid = parent.call("""
def use():
    global kept
    kept = pool.reserve(U(5))
    return device(), pids(), os.getpid()
child(use)
""")
    assert device == 15
    assert set(pids) == {os.getpid(), parent.pid, pid}
    assert slots(pool) == {parent.pid, pid}
    assert [owner.pid for owner in pool.sweep()] == [pid]
    assert pool.report().current_device_bytes == 10


def test_a_grandchild_attaches_by_using(pool: CacheResidencyPool, parent: Worker) -> None:
    """Three generations are three owners."""
    assert (
        parent.call("""
def down(depth):
    kept = pool.reserve(U(1))
    return len(pids()) if depth == 0 else child(lambda: down(depth - 1))
down(2)
""")
        == len({os.getpid(), parent.pid}) + 2
    )
    assert len(pool.sweep()) == 2
    assert pool.report().current_device_bytes == 10
    assert pool.verify().ok


def test_a_family_of_depth_three(pool: CacheResidencyPool, parent: Worker) -> None:
    """Each of 39 descendants is admitted, reads and gives back."""
    assert (
        parent.call("""
def family(depth):
    with pool.reserve(U(1)):
        device()
    return 1 + sum(child(lambda: family(depth - 1)) for _ in range(3)) if depth else 1
family(3)
""")
        == 40
    )
    pool.sweep()
    assert slots(pool) == {parent.pid}
    assert pool.report().current_device_bytes == 10
    assert pool.verify().ok


def test_a_child_of_a_raw_fork(pool: CacheResidencyPool, parent: Worker) -> None:
    """Without any at-fork handler the wiped page still tells; and the parent can still be proved
    dead although the child holds copies of all its descriptors."""
    before = pool.report()
    assert (
        parent.call("""
import ctypes
raw = ctypes.CDLL(None)._Fork
def use():
    token.release()
    kept = pool.reserve(U(5))
    pool.sweep()
    return device()
child(use, raw)
""")
        == 15
    )
    pool.sweep()
    assert pool.report().current_device_bytes == before.current_device_bytes
    parent.call("raw() or signal.pause()")
    parent.kill()
    assert [owner.pid for owner in pool.sweep()] == [parent.pid]
    assert pool.report().current_device_bytes == 0


def test_spawned_programs_inherit_no_descriptor(
    pool: CacheResidencyPool, parent: Worker, path: Path
) -> None:
    """Not even with close_fds=False: a lock held by a stranger would hide an execve."""
    pid = parent.call("""
import subprocess
stranger = subprocess.Popen(["sleep", "1000"], close_fds=False)
stranger.pid
""")
    comm = Path(f"/proc/{pid}/comm")
    wait_until(lambda: comm.read_text() == "sleep\n", "the stranger is another program")
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the new program's own, while it starts
            links.append(os.readlink(fd))
    assert links
    assert str(path) not in links
