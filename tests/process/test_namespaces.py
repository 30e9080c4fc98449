"""Containers: processes that share /dev/shm, but not the numbers that processes are known by.

Why: a robust lock stores thread ids and a verdict needs pids; both mean something in one namespace
only. The main process of every container is number 1: a mix-up is the rule there, no accident.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import CachePoolUsage, CacheResidencyPool
from tests.process import kernel
from tests.process.conftest import needs_namespaces
from tests.process.scenes import LIMITS, OWNER
from tests.support import Worker, process_state, wait_until

SETUP = (
    OWNER
    + """
limits = shmcache.CachePoolLimits(1000, 0, 1000, 1000)
Pool = shmcache.CacheResidencyPool
def attempt(action):
    'What it returns, or the kind of its refusal and the failed check.'
    try:
        return action()
    except shmcache.ContractError as error:
        return [type(error).__qualname__, getattr(error, "check", None)]
def start(name):
    global home
    home = Pool.open_or_create(name, limits)
    return "started"
"""
)
REFUSED = ["SegmentError.Refused", "pid_namespace"]

pytestmark = needs_namespaces


@pytest.fixture
def container() -> Iterator[Worker]:
    """Process 1 of another pid namespace, on the same /dev/shm."""
    with Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as worker:
        worker.call(SETUP)
        yield worker


# What a program may do in a container with a pool of another one, and what it is told.
FOREIGN_CALLS = {
    "attach": ("Pool.attach(name)", REFUSED),
    "observe": ("Pool.observe(name)", REFUSED),
    "open_or_create": ("Pool.open_or_create(name, limits)", REFUSED),
    "create": ("Pool.create(name, limits)", ["SegmentError.Exists", None]),
    "destroy": ("Pool.destroy(name)", REFUSED),
}


@pytest.mark.parametrize(("call", "answer"), FOREIGN_CALLS.values(), ids=FOREIGN_CALLS)
def test_c11_c48_another_container_is_refused(
    pool: CacheResidencyPool, path: Path, container: Worker, call: str, answer: list[str | None]
) -> None:
    """By name of the check; the file in use is neither unlinked nor changed."""
    with pool.reserve(CachePoolUsage(5)), path.open("rb") as file:
        before, inode, content = pool.report(), path.stat().st_ino, file.read()
        assert container.call(f"attempt(lambda: {call})", name=pool.name) == answer
        file.seek(0)
        assert file.read() == content
        assert path.stat().st_ino == inode
        assert pool.report() == before
        assert pool.verify().ok


def test_c38_an_owners_pid_in_another_container(
    pool: CacheResidencyPool, container: Worker
) -> None:
    """Refused under the same number as a live owner; and killed in the middle of being refused."""
    with Worker(OWNER) as owner:
        owner.call("attach(name)", name=pool.name)
        before, pids = pool.report(), [record.pid for record in pool.owners()]
        assert container.call(
            """
kid = kernel.fork_with_pid(pid)
if kid == 0:
    said = attempt(lambda: Pool.attach(name))
    os._exit(42 if said == refused and os.getpid() == pid else 1)
kid, os.waitstatus_to_exitcode(os.waitpid(kid, 0)[1])
""",
            name=pool.name,
            pid=owner.pid,
            refused=REFUSED,
        ) == [owner.pid, 42]
        container.begin("while True: attempt(lambda: Pool.attach(name))")
        for _ in range(50):  # while it is busy being refused
            with pool.reserve(CachePoolUsage(1)):
                pool.sweep()
        container.close()
        after = pool.report()
        assert after.current_device_bytes == before.current_device_bytes
        assert [record.pid for record in pool.owners()] == pids
        assert owner.call("token.release(), pool.report().current_device_bytes")[1] == 0


def test_c37_process_one_of_two_namespaces(pool_name: str) -> None:
    """The judge's number 1 is not the owner's number 1: each sees its own pool only."""
    with (
        Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as first,
        Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as second,
    ):
        for container in (first, second):
            container.call(SETUP)
            assert container.call("os.getpid()") == 1
        first.call("home = Pool.create(name, limits); attach(name)", name=pool_name)
        assert second.call("attempt(lambda: Pool.attach(name))", name=pool_name) == REFUSED
        assert second.call("attempt(lambda: Pool.create(name, limits))")[0] == "SegmentError.Exists"
        assert first.call("pool.report().current_device_bytes, len(pool.owners())") == [10, 2]


# ---- a container that starts again -------------------------------------------------------------


def starts(container: Worker, name: str) -> None:
    """Start the container's program, once its predecessor is wholly gone."""
    call = "attempt(lambda: start(name))"
    wait_until(lambda: container.call(call, name=name) == "started", "the container starts", 10)


def test_c55_a_restarted_container_starts_with_the_same_pids(pool_name: str) -> None:
    """/dev/shm outlives the container; its pool can never be used again, and is not in the way."""
    for _ in range(3):
        with Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as one:
            one.call(SETUP)
            starts(one, pool_name)
            assert one.call("os.getpid(), home.report().current_device_bytes") == [1, 0]
            assert one.call("[owner.pid for owner in home.owners()]") == [1]
            one.call("""
there, here = os.pipe()
for pid in (7, 8, 9):
    if kernel.fork_with_pid(pid) == 0:
        attach(name)
        os.write(here, b".")
        signal.pause()
    os.read(there, 1)
""")
            assert one.call("sorted(owner.pid for owner in home.owners())") == [1, 7, 8, 9]
            assert one.call("home.report().current_device_bytes") == 30
        found = [entry for entry in Path("/dev/shm").iterdir() if pool_name in entry.name]
        assert len(found) == 1


def test_c48_two_containers_do_not_take_turns(pool_name: str) -> None:
    """The second may not start under the first one's name while the first lives, only after it."""
    with (
        Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as first,
        Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as second,
    ):
        for container in (first, second):
            container.call(SETUP)
        starts(first, pool_name)
        assert second.call("attempt(lambda: start(name))", name=pool_name) == REFUSED
        assert first.call("home.report().managers") == 0
        first.close()
        starts(second, pool_name)


# ---- time namespaces ---------------------------------------------------------------------------


needs_time = pytest.mark.skipif(
    not kernel.can_unshare(kernel.NEW_TIME), reason="this user may not make time namespaces"
)


@needs_time
def test_another_time_namespace_is_refused(pool: CacheResidencyPool) -> None:
    """Start times are shifted there: every live owner would look like another process."""
    with Worker(OWNER) as owner, Worker("from tests.process import kernel") as traveller:
        owner.call("attach(name)", name=pool.name)
        before = pool.report()
        traveller.call("kernel.enter_time_namespace(100_000)")
        traveller.call(SETUP)
        for call in ("Pool.attach(name)", "Pool.observe(name)", "Pool.destroy(name)"):
            said = traveller.call(f"attempt(lambda: {call})", name=pool.name)
            assert said == ["SegmentError.Refused", "time_namespace"]
        assert pool.report() == before
        assert pool.sweep() == ()


@needs_time
def test_a_pool_made_in_another_time_namespace_is_refused(pool_name: str) -> None:
    """The other way round."""
    with Worker("from tests.process import kernel") as traveller:
        traveller.call("kernel.enter_time_namespace(100_000)")
        traveller.call(SETUP)
        traveller.call("home = Pool.create(name, limits)", name=pool_name)
        with pytest.raises(Exception, match="time_namespace"):
            CacheResidencyPool.attach(pool_name)
        with pytest.raises(Exception, match="exists"):
            CacheResidencyPool.create(pool_name, LIMITS)
        assert traveller.call("home.report().managers") == 0


# ---- one namespace, seen through a foreign /proc -----------------------------------------------


def test_the_proc_of_another_namespace_shows_others(pool_name: str) -> None:
    """A container without a /proc of its own: what stands there under an owner's pid is not it."""
    with Worker("from tests.process import kernel") as judge:
        judge.call("kernel.enter_mount_namespace(); kernel._call('unshare', kernel.NEW_PIDS)")
        judge.call("kernel._go_on_as_child()")
        judge.call(SETUP)
        judge.call("from tests.support import Worker, process_state, wait_until")
        judge.call("home = Pool.create(name, limits)", name=pool_name)
        judge.call("""
kid = os.fork()
if kid == 0:
    attach(name)
    while True:
        signal.pause()
wait_until(lambda: home.report().current_device_bytes, "the child attaches")
""")
        assert judge.call("[o.verdict.value for o in home.owners() if o.pid == kid]") == ["alive"]
        assert judge.call("home.sweep()") == []
        judge.call("os.kill(kid, 9); os.waitpid(kid, 0)")
        assert judge.call("[o.pid for o in home.sweep()]") == [judge.call("kid")]
        assert judge.call("home.report().current_device_bytes") == 0


def test_a_dead_container_leaves_no_zombie(container: Worker) -> None:
    """Of this file itself: killing the worker ends its namespace and all in it."""
    container.call("[os.fork() or signal.pause() for _ in range(3)]")
    container.close()
    wait_until(lambda: process_state(container.pid) == "", "the container ends")
