"""The verdict on an owner, for each state a process can be in and each judge that may look at it.

Why: a false death gives away memory that a live process is using (G6); a missed one keeps it for
ever (G5). Signal 0, the state letter, start times and file locks are each wrong about some row of
this table; only together they are right, and where they cannot tell nothing is reclaimed.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool
from tests.process import kernel, scenes
from tests.process.conftest import RUN, needs_namespaces
from tests.process.probe import compile_probe
from tests.support import Worker, process_state, wait_until

ALIVE, DEAD, UNKNOWN = "alive", "dead", "unknown"

State = Callable[[Worker], Callable[[], None] | None]  # brings it about; returns what undoes it

# ---- states ------------------------------------------------------------------------------------


def running(owner: Worker) -> None:
    """Nothing done to it."""


def stopped(owner: Worker) -> None:
    owner.stop()


def frozen(owner: Worker) -> Callable[[], None]:
    """By a control group, as container pauses do: it takes no signal, not even SIGKILL."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "cgroup.procs").exists() or not os.access(freezer, os.W_OK):
        pytest.skip("no freezer of control groups version 1 that this user may use")
    group = freezer / f"{RUN}frozen"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(owner.pid))
    (group / "freezer.state").write_text("FROZEN")
    wait_until(lambda: (group / "freezer.state").read_text() == "FROZEN\n", "the owner freezes")

    def thaw() -> None:
        (group / "freezer.state").write_text("THAWED")
        (freezer / "cgroup.procs").write_text(str(owner.pid))
        group.rmdir()

    return thaw


def traced(owner: Worker) -> None:
    kernel.trace(owner.pid)
    assert process_state(owner.pid) == "t"


def in_the_driver(owner: Worker) -> None:
    """State D for as long as it takes: here in a vfork whose child waits for a FIFO."""
    fifo = owner.call(
        "import tempfile; d = tempfile.mkdtemp(); os.mkfifo(d + '/fifo'); d + '/fifo'"
    )
    owner.begin(
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions="
        "[(os.POSIX_SPAWN_OPEN, 3, d + '/fifo', os.O_RDONLY, 0)])"
    )
    wait_until(lambda: process_state(owner.pid) == "D", "the owner waits uninterruptibly")
    Path(fifo).unlink()
    Path(fifo).parent.rmdir()


def leader_ended(owner: Worker) -> None:
    """State Z, but a thread goes on: the group is alive and may use the memory."""
    owner.begin("threading.Thread(target=signal.pause).start(); kernel.end_this_thread()")
    wait_until(lambda: process_state(owner.pid) == "Z", "the leader ends")


def one_descriptor_closed(owner: Worker) -> None:
    """Classic file locks of a process end when it closes any descriptor of the file."""
    owner.call(f"os.close(os.open('/dev/shm/shmcache.{COURT}', os.O_RDWR))")


def all_descriptors_closed(owner: Worker) -> None:
    """Its lock is free, as after an execve; its memory is still the pool's."""
    owner.call("close_descriptors()")


def killed(owner: Worker) -> None:
    """A zombie: its parent does not look."""
    os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: process_state(owner.pid) == "Z", "the owner dies")


def killed_while_stopped(owner: Worker) -> None:
    owner.stop()
    killed(owner)


def reaped(owner: Worker) -> None:
    owner.kill()


def exited(owner: Worker) -> None:
    owner.begin("os._exit(0)")
    wait_until(lambda: process_state(owner.pid) == "Z", "the owner exits")


def survived_by_children(owner: Worker) -> None:
    """Forked children, as of a data loader, hold copies of all its descriptors."""
    for _ in range(4):
        owner.call("fork_and_stay()")
    owner.kill()


def replaced_by_execve(owner: Worker) -> None:
    """Same pid, same start, same pidfd; the pool's user is gone all the same."""
    owner.begin("os.execv('/bin/sleep', ['sleep', '1000'])")
    comm = Path(f"/proc/{owner.pid}/comm")
    wait_until(lambda: comm.read_text() == "sleep\n", "the owner becomes another program")


# What judges answer who see all; who have no pidfds; who have no /proc; who have neither.
TABLE: dict[State, tuple[str, str, str, str]] = {
    running: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    stopped: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    frozen: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    traced: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    in_the_driver: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    leader_ended: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    one_descriptor_closed: (ALIVE, ALIVE, ALIVE, UNKNOWN),
    all_descriptors_closed: (ALIVE, ALIVE, UNKNOWN, UNKNOWN),
    killed: (DEAD, DEAD, DEAD, UNKNOWN),
    killed_while_stopped: (DEAD, DEAD, DEAD, UNKNOWN),
    reaped: (DEAD, DEAD, DEAD, DEAD),
    exited: (DEAD, DEAD, DEAD, UNKNOWN),
    survived_by_children: (DEAD, DEAD, DEAD, DEAD),
    replaced_by_execve: (DEAD, DEAD, UNKNOWN, UNKNOWN),
}
COURT = f"court-{os.getpid()}"  # not one of the names that are removed after each test


def expected(row: tuple[str, str, str, str]) -> dict[str, str]:
    """The row by the titles of the judges."""
    sees_all, no_pidfds, no_proc, neither = row
    return dict(zip(scenes.JUDGES, (sees_all, no_pidfds, no_pidfds, no_proc, neither), strict=True))


@pytest.fixture(scope="module")
def court() -> Iterator[tuple[CacheResidencyPool, dict[str, Worker]]]:
    """A pool and its judges, for the whole table."""
    with CacheResidencyPool.create(COURT, scenes.LIMITS) as pool, scenes.court(COURT) as judges:
        yield pool, judges
    CacheResidencyPool.destroy(COURT)


@pytest.mark.parametrize("state", TABLE, ids=lambda state: state.__name__)
def test_c24_c30_c53_the_table(
    court: tuple[CacheResidencyPool, dict[str, Worker]], state: State
) -> None:
    """Whoever does not prove the death reclaims nothing; whoever does reclaims all of it."""
    pool, judges = court
    row = {title: verdict for title, verdict in expected(TABLE[state]).items() if title in judges}
    before = pool.report()
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(Worker(scenes.OWNER))
        owner.call("attach(name)", name=COURT)
        held = pool.report()
        undo = state(owner)
        if undo is not None:
            stack.callback(undo)
        assert scenes.verdicts(judges, owner.pid) == row
        for title, judge in judges.items():
            if row[title] != DEAD:
                assert judge.call("pool.sweep()") == [], title
        assert pool.report() == held
        if row["sees all"] == DEAD:
            swept = judges["sees all"].call("[(o.pid, o.entries) for o in pool.sweep()]")
            assert swept == [[owner.pid, 2]]
            after = pool.report()
            assert after.managers == before.managers
            assert (after.current_device_bytes, after.current_disk_bytes) == (0, 0)
    pool.sweep()
    assert pool.verify().ok


# ---- a number that names somebody else by now --------------------------------------------------


@pytest.fixture
def own_pids() -> Iterator[Worker]:
    """A worker that is process 1 of a pid namespace, where it may choose pids."""
    with Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as worker:
        worker.call("from tests.process import scenes")
        yield worker


@needs_namespaces
def test_a_pid_reused_by_a_process(
    own_pids: Worker, pool_name: str, probe: Path, tmp_path: Path
) -> None:
    """Dead, whoever has the number now; the mutant that knows pids only believes it alive."""
    mutant = compile_probe(tmp_path / "mutant", "-DSHMC_MUTANT_PID_ONLY")
    programs = [str(probe), str(mutant)]
    found = own_pids.call(
        "scenes.reused_by_a_process(name, *programs)", name=pool_name, programs=programs
    )
    assert found == {
        **expected((DEAD, DEAD, DEAD, UNKNOWN)),
        programs[0]: DEAD,
        programs[1]: ALIVE,
    }


@needs_namespaces
def test_a_pid_reused_by_a_thread(own_pids: Worker, pool_name: str) -> None:
    """Signal 0 reaches it, and /proc shows it; but an owner is always a leader."""
    found = own_pids.call("scenes.reused_by_a_thread(name)", name=pool_name)
    assert found == expected((DEAD, DEAD, DEAD, UNKNOWN))


ATTACH_AGAIN = """
import os, sys, shmcache
pool = shmcache.CacheResidencyPool.attach(sys.argv[1])
pids = [owner.pid for owner in pool.owners()]
print(pids.count(os.getpid()), pool.report().current_device_bytes, file=open(sys.argv[2], "w"))
"""


def test_c55_our_own_pid_with_another_nonce_is_dead(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    """What a program finds of its own pid after its execve is not its own."""
    answer = tmp_path / "answer"
    with Worker(scenes.OWNER) as owner:
        owner.call("attach(name)", name=pool.name)
        words = [sys.executable, "-c", ATTACH_AGAIN, pool.name, str(answer)]
        owner.begin("os.execv(words[0], words)", words=words)
        wait_until(lambda: process_state(owner.pid) == "Z", "the new program ends")
    assert answer.read_text() == "1 0\n"
    assert len(pool.owners()) == 1


@pytest.mark.ci
def test_a_second_copy_of_the_library_in_one_process(
    pool: CacheResidencyPool, plain_lock: Path
) -> None:
    """A vendored build beside the installed one: two owners under one pid, both alive."""
    with Worker(scenes.OWNER) as owner:
        owner.call("attach(name)", name=pool.name)
        owner.call(
            """
import sys
first = {name: sys.modules.pop(name) for name in list(sys.modules) if name[:8] == "shmcache"}
sys.path.insert(0, folder)
import shmcache as second
assert second._core.__file__ != first["shmcache"]._core.__file__
other = second.CacheResidencyPool.attach(name)
""",
            folder=str(plain_lock),
        )
        assert owner.call("len(other.sweep()), len(pool.sweep())") == [0, 0]
        assert [record.pid for record in pool.owners()].count(owner.pid) == 2
        assert pool.report().current_device_bytes == 10
        assert (
            owner.call("other.close(), token.release(), pool.report().current_device_bytes")[2] == 0
        )


# ---- a judge that lost its descriptors ---------------------------------------------------------


def test_a_judge_whose_descriptors_became_other_files(pool: CacheResidencyPool) -> None:
    """It held descriptors of owners; their numbers now name pipes that are ready to be read."""
    with Worker(scenes.OWNER) as judge, Worker(scenes.OWNER) as lives, Worker(scenes.OWNER) as dies:
        for worker in (judge, lives, dies):
            worker.call("attach(name)", name=pool.name)
        assert judge.call("pool.sweep()") == []
        judge.call("close_descriptors()")
        assert judge.call("pool.sweep()") == []
        dies.kill()
        assert judge.call("[owner.pid for owner in pool.sweep()]") == [dies.pid]
        assert pool.report().current_device_bytes == 20
        judge.call("pool.close()")
        assert judge.call("[os.fstat(fd).st_size for fd in pipes] == [0] * len(pipes)")


def test_a_forgotten_descriptor_is_nobody_elses_to_close(pool: CacheResidencyPool) -> None:
    """The pool's own number may name a stranger's file by the time the handle is closed."""
    with Worker(scenes.OWNER) as owner:
        owner.call("attach(name)", name=pool.name)
        owner.call("fd = pool.fileno(); close_descriptors()")
        assert owner.call("fd in pipes")
        assert (
            owner.call("""
try:
    pool.fileno()
    answer = "gave a stranger's descriptor away"
except shmcache.SegmentError.Closed:
    answer = "refused"
answer
""")
            == "refused"
        )
        assert owner.call("pool.report().current_device_bytes") == 10
        owner.call("pool.close()")
        assert owner.call("[os.fstat(fd).st_size for fd in pipes] == [0] * len(pipes)")
    assert pool.report().current_device_bytes == 0
