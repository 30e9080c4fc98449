"""Owners in every state a process can be in, and judges that look at them with more or less sight.

Why: a verdict must be right whatever the kernel lets the judge ask. A judge is an independent
process that observes the pool; what is taken from it is what containers, old kernels and security
profiles take away.

Contract: imported by tests and by workers; nothing here knows pytest.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import shmcache
from shmcache.pool.names import segment_path
from tests.process import kernel
from tests.support import Worker

LIMITS = shmcache.CachePoolLimits(1000, 0, 1000, 1000)

OWNER = """
import os, shmcache, signal, threading
from shmcache import CachePoolUsage as U
from tests.process import kernel
def attach(name):
    global pool, token, membership
    pool = shmcache.CacheResidencyPool.attach(name)
    token = pool.reserve(U(10))
    membership = pool.register_manager(None)
    pool.update_manager(membership.manager, U(disk_bytes=7))
def foreign_descriptors():
    'All but the three standard ones and the two that this worker is driven by.'
    mine = {0, 1, 2, _answers, _requests.fileno()}
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd not in mine]
def close_descriptors():
    'As a daemon does. What is read from pipes on the same numbers afterwards is always ready.'
    global pipes
    taken = foreign_descriptors()
    for fd in taken:
        try:
            os.close(fd)
        except OSError:
            pass  # of the directory that was just listed
    pipes = [fd for _ in taken for fd in os.pipe()]
    for fd in pipes[1::2]:
        os.write(fd, b".")
def fork_and_stay():
    if os.fork() == 0:
        while True:
            signal.pause()
"""

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

# What is taken from a judge after it has opened the pool.
JUDGES = {
    "sees all": [],
    "no pidfds: refused": ["kernel.refuse_calls(kernel.ERRNO_REFUSED, 'pidfd_open')"],
    "no pidfds: unknown": ["kernel.refuse_calls(kernel.ERRNO_UNKNOWN_CALL, 'pidfd_open')"],
    "no /proc": ["kernel.hide_processes()"],
    "neither": [
        "kernel.hide_processes()",
        "kernel.refuse_calls(kernel.ERRNO_REFUSED, 'pidfd_open')",
    ],
}


@contextlib.contextmanager
def court(name: str) -> Iterator[dict[str, Worker]]:
    """Judges of the pool by what they are called in JUDGES, as far as this user may blind them."""
    with contextlib.ExitStack() as stack:
        judges = {}
        for title, blinders in JUDGES.items():
            if "hide" in str(blinders) and not kernel.can_unshare(kernel.NEW_MOUNTS):
                continue
            if "refuse" in str(blinders) and not kernel.can_refuse_calls():
                continue
            judge = stack.enter_context(
                Worker("import shmcache", "from tests.process import kernel")
            )
            judge.call("pool = shmcache.CacheResidencyPool.observe(name)", name=name)
            judge.call("\n".join(blinders))
            judges[title] = judge
        yield judges


def verdicts(judges: dict[str, Worker], pid: int) -> dict[str, str]:
    """What each judge says about the owner with this pid."""
    code = "[owner.verdict.value for owner in pool.owners() if owner.pid == pid]"
    found = {}
    for title, judge in judges.items():
        (found[title],) = judge.call(code, pid=pid)
    return found


def slots(pool: shmcache.CacheResidencyPool) -> set[int]:
    """Pids in the owner table, the test's own left out; looking does not sweep."""
    return {owner.pid for owner in pool.owners()} - {os.getpid()}


def waiter_flags(path: Path) -> int:
    """The flags of the owners that wait for capacity: sixteen words of the gate."""
    with path.open("rb") as segment:
        segment.seek(4096 + 192)
        return int.from_bytes(segment.read(128), "little")


def probe_verdict(probe: str, path: Path, pid: int) -> str:
    """What a probe's engine says about the owner with this pid."""
    done = subprocess.run([probe, "judge", str(path)], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    (verdict,) = [row[2] for row in rows if row[1:2] == [str(pid)]]
    return verdict


# ---- scenes for a pid namespace of their own: called there, in process 1 -----------------------


def reused_by_a_process(name: str, *probes: str) -> dict[str, str]:
    """The verdicts on an owner whose pid is by now a stranger's; of judges, then of probes."""
    with shmcache.CacheResidencyPool.create(name, LIMITS) as pool, court(name) as judges:
        with Worker(OWNER) as owner:
            owner.call("attach(name)", name=name)
            owner.kill()
        with _stranger(owner.pid):
            found = verdicts(judges, owner.pid)
            path = segment_path(name)
            found |= {probe: probe_verdict(probe, path, owner.pid) for probe in probes}
            assert [dead.pid for dead in pool.sweep()] == [owner.pid]
        assert pool.report().current_device_bytes == 0
    shmcache.CacheResidencyPool.destroy(name)
    return found


@contextlib.contextmanager
def _stranger(pid: int) -> Iterator[None]:
    """A process with this pid and no interest in the pool."""
    death, life = os.pipe()
    child = kernel.fork_with_pid(pid)
    if child == 0:
        os.close(life)
        os.read(death, 1)
        os._exit(0)
    try:
        assert child == pid, f"the kernel gave {child}, not {pid}"
        yield
    finally:
        os.close(life)
        os.close(death)
        os.waitpid(child, 0)


def reused_by_a_thread(name: str) -> dict[str, str]:
    """The verdicts on an owner whose pid is by now the number of a thread of this process."""
    with shmcache.CacheResidencyPool.create(name, LIMITS) as pool, court(name) as judges:
        with Worker(OWNER) as owner:
            owner.call("attach(name)", name=name)
            owner.kill()
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(owner.pid - 1))
        thread.start()
        try:
            assert thread.native_id == owner.pid
            found = verdicts(judges, owner.pid)
            assert [dead.pid for dead in pool.sweep()] == [owner.pid]
        finally:
            done.set()
            thread.join()
    shmcache.CacheResidencyPool.destroy(name)
    return found
