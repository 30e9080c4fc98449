"""Fork: a child is a stranger that happens to know the pool; its parent notices nothing of it.

Why: gunicorn, data loaders, daemons and shells all fork processes that hold handles and tokens, and
in most of them nobody wrote the line of code that would tell the pool.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import CachePoolUsage, CacheResidencyPool
from tests.process import kernel, scenes
from tests.process.probe import holding
from tests.process.scenes import OWNER
from tests.process.test_liveness import needs_namespaces
from tests.support import Worker, wait_until

# On top of OWNER: children of the worker, and what they answer.
FORKS = (
    OWNER
    + """
import contextlib, gc, json, sys, time
ANSWER = 900
def child(action, fork=os.fork):
    'Run `action` in a forked child; what it returned or raised.'
    there, here = os.pipe()
    pid = fork()
    if pid == 0:
        signal.alarm(30)
        os.dup2(here, ANSWER)
        os.close(here)
        try:
            value = action()
        except BaseException as error:
            value = f"{type(error).__qualname__}: {error}"
        os.write(ANSWER, json.dumps(value, default=repr).encode())
        os._exit(0)
    os.close(here)
    with open(there, "rb") as answer:
        text = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child did not end well"
    return json.loads(text)
def daemon(action):
    'As daemons do: a session, a second fork, all descriptors closed, other files on their numbers.'
    def first():
        os.setsid()
        return child(second)
    def second():
        os.closerange(3, ANSWER)
        files = [os.open(os.devnull, os.O_RDWR) for _ in range(50)]
        value = action()
        return value, {os.readlink(f"/proc/self/fd/{fd}") for fd in files} == {os.devnull}
    return child(first)
def attempt(action):
    'The kind of error that it ends in.'
    try:
        return action()
    except shmcache.ContractError as error:
        return type(error).__qualname__
def device():
    return pool.report().current_device_bytes
def pids():
    return sorted(owner.pid for owner in pool.owners())
"""
)


@pytest.fixture
def parent(pool: CacheResidencyPool) -> Iterator[Worker]:
    """An attached worker that holds 10 device bytes, and knows how to fork."""
    with Worker(FORKS) as worker:
        worker.call("attach(name)", name=pool.name)
        yield worker


def slots(pool: CacheResidencyPool) -> set[int]:
    """Pids in the owner table, the test's own left out; looking does not sweep."""
    return {owner.pid for owner in pool.owners()} - {os.getpid()}


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
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    assert links
    assert str(path) not in links


# ---- forking at a bad moment -------------------------------------------------------------------

ATTACH_AND_FORK = """
def attach_and_detach():
    while not stop:
        shmcache.CacheResidencyPool.attach(pool.name).close()
def one_child():
    signal.alarm(20)
    with shmcache.CacheResidencyPool.attach(pool.name) as mine, mine.reserve(U(1)):
        pass
def forks(count):
    'Exit statuses that are not 0.'
    bad = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                one_child()
                os._exit(0)
            finally:
                os._exit(1)
        bad += [status for status in [os.waitpid(pid, 0)[1]] if status]
    return bad
stop = False
thread = threading.Thread(target=attach_and_detach)
"""


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.ci)])
def test_c02_fork_while_another_thread_attaches(
    pool: CacheResidencyPool, parent: Worker, count: int
) -> None:
    """No lock that a fork can copy in its taken state is needed by the child."""
    parent.call(ATTACH_AND_FORK)
    assert parent.call("thread.start(); bad = forks(count); stop = True; bad", count=count) == []
    parent.call("thread.join()")
    pool.sweep()
    assert slots(pool) == {parent.pid}
    assert pool.report().current_device_bytes == 10
    assert pool.verify().ok


def test_fork_while_threads_use_the_same_handle(pool: CacheResidencyPool, parent: Worker) -> None:
    """Calls in flight in the parent are not in flight in the child, which can even close."""
    parent.call("""
stop = False
def hammer():
    while not stop:
        with pool.reserve(U(1)):
            pool.owners()
threads = [threading.Thread(target=hammer) for _ in range(2)]
def use():
    with pool.reserve(U(1)):
        device()
    pool.close()
    return "closed"
for thread in threads:
    thread.start()
""")
    assert parent.call("[child(use) for _ in range(15)]") == ["closed"] * 15
    parent.call("stop = True\nfor thread in threads:\n thread.join()")
    assert pool.report().current_device_bytes == 10
    assert slots(pool) == {parent.pid}
    assert pool.verify().ok


@pytest.mark.parametrize("use", ["None", "device()"], ids=["at once", "having used the pool"])
def test_fork_in_a_signal_handler_during_a_lock_wait(
    pool: CacheResidencyPool, parent: Worker, probe: Path, path: Path, use: str
) -> None:
    """Parent and child both return to the interrupted call, and both finish it."""
    parent.call(f"""
there, here = os.pipe()
def handler(*_):
    global kid
    kid = os.fork()
    tell("forked") if kid else ({use})
signal.signal(signal.SIGUSR1, handler)
def wait():
    value = device()
    if kid == 0:
        signal.alarm(30)
        with pool.reserve(U(1)):
            pool.close()
        os.write(here, str(value).encode())
        os._exit(0)
    return value, int(os.read(there, 100)), os.waitpid(kid, 0)[1]
""")
    with holding(probe, path) as holder:
        parent.begin("tell('starts'); wait()")
        parent.expect("starts")
        wait_until(lambda: kernel.waits_in_futex(parent.pid), "the parent waits for the lock")
        os.kill(parent.pid, signal.SIGUSR1)
        parent.expect("forked")
        assert holder.say("u") == "u OK"
    assert parent.finish() == [10, 10, 0]
    pool.sweep()
    assert slots(pool) == {parent.pid}
    assert pool.report().current_device_bytes == 10


def test_fork_with_postponed_releases(
    pool: CacheResidencyPool, parent: Worker, probe: Path, path: Path
) -> None:
    """What the parent still has to release is not released by the child, nor forgotten."""
    with holding(probe, path) as holder:
        parent.call("token = None")  # a finalizer that met a taken lock
        holder.send("u")
        assert holder.line() == "u OK"
    assert parent.call("child(device)") == 10
    assert pool.report().current_device_bytes == 10
    assert parent.call("device()") == 0
    assert pool.report().current_device_bytes == 0
    assert pool.verify().ok


def test_fork_while_a_thread_waits_for_capacity(
    pool: CacheResidencyPool, parent: Worker, path: Path
) -> None:
    """The child can wait and be woken by itself; the parent's thread gets its turn."""
    parent.call("""
got = []
def wait():
    got.append(pool.reserve(U(985), timeout=None))
thread = threading.Thread(target=wait)
""")
    with pool.reserve(CachePoolUsage(10)):
        parent.call("thread.start()")
        wait_until(lambda: scenes.waiter_flags(path), "the thread waits")
        said = parent.call("child(lambda: attempt(lambda: pool.reserve(U(985), timeout=0.05)))")
        assert said == "CachePoolError.BudgetExceeded"
    parent.call("thread.join()")
    assert parent.call("[t.usage.device_bytes for t in got]") == [985]
    assert pool.report().current_device_bytes == 995


# ---- daemons -----------------------------------------------------------------------------------


def test_a_daemon_finds_the_pool_by_name(pool: CacheResidencyPool, parent: Worker) -> None:
    """Its descriptors are gone and their numbers are other files, which stay open."""
    said, intact = parent.call(
        "daemon(lambda: (pool.reserve(U(1)).usage.device_bytes, len(pids()), pool.close()))"
    )
    assert said == [1, 3, None]
    assert intact
    assert slots(pool) == {parent.pid}


def test_a_daemon_that_only_ends_closes_nothing_of_others(
    pool: CacheResidencyPool, parent: Worker
) -> None:
    """Closing an inherited handle must not close what has its number by now."""
    said, intact = parent.call("daemon(lambda: (pool.close(), gc.collect(), 'closed')[2])")
    assert (said, intact) == ("closed", True)


def test_a_daemon_is_not_led_into_another_epoch(pool: CacheResidencyPool, parent: Worker) -> None:
    """What has the name by now is not what was inherited: said, not used."""
    before = pool.report()
    CacheResidencyPool.destroy(pool.name, force=True)
    with CacheResidencyPool.create(pool.name, pool.limits) as successor:
        said, intact = parent.call("daemon(lambda: attempt(device))")
        assert (said, intact) == ("SegmentError.Retired", True)
        assert len(successor.owners()) == 1
        assert successor.report().current_device_bytes == 0
    assert before.current_device_bytes == 10


def test_a_daemon_has_lost_an_anonymous_pool(parent: Worker) -> None:
    """Nothing leads back to it; the error says so, and nothing of others is touched."""
    said, intact = parent.call("""
pool = shmcache.CacheResidencyPool(pool.limits)
daemon(lambda: attempt(device))
""")
    assert (said, intact) == ("SegmentError.Closed", True)
