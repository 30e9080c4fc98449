"""Hosts with little room and little permission: small tmpfs, memory limits, security profiles.

Why: what a container is refused it is refused by a signal, unless the pool asks before it touches
memory; and a call that a profile forbids must not be read as somebody's death.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool, SegmentError, bounds
from shmcache.pool import names
from tests.process.conftest import RUN, needs_filters, needs_mounts, needs_namespaces
from tests.process.scenes import LIMITS, OWNER
from tests.support import Worker, process_state, wait_until

MIB = 1 << 20

SETUP = (
    OWNER
    + """
import mmap
from pathlib import Path
MIB = 1 << 20
def create(mib):
    'The name of the new pool, or the refusal in numbers.'
    global home
    limits = shmcache.CachePoolLimits(1, mib * MIB, 1, 0)
    try:
        home = shmcache.CacheResidencyPool.create(name, limits)
    except shmcache.SegmentError.NoSpace as refusal:
        return [refusal.needed, refusal.available, refusal.knob, str(refusal)]
    return name
def start(mib):
    'As a program does that does not know whether it is the first.'
    global home
    limits = shmcache.CachePoolLimits(1, mib * MIB, 1, 0)
    try:
        home = shmcache.CacheResidencyPool.open_or_create(name, limits)
    except shmcache.SegmentError as refusal:
        return str(refusal)
    return name
def files():
    return sorted(path.name for path in Path("/dev/shm").iterdir())
def fill(path):
    'Write until the file system is full; the bytes written.'
    written = 0
    with open(path, "wb", buffering=0) as file:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    written += file.write(bytes(size))
    return written
def write_arena():
    'Write and read back each page of the arena, as blocks will.'
    size = home.geometry().arena_bytes
    end = home.geometry().segment_bytes
    with mmap.mmap(home.fileno(), end) as memory:
        for offset in range(end - size, end, 4096):
            memory[offset] = offset // 4096 % 251
        return all(memory[at] == at // 4096 % 251 for at in range(end - size, end, 4096))
"""
)


@pytest.fixture
def small_host(pool_name: str) -> Iterator[Worker]:
    """A worker whose /dev/shm has 64 MiB, the size that Docker gives."""
    with Worker("import contextlib; from tests.process import kernel") as worker:
        worker.call("kernel.enter_mount_namespace(); kernel.mount('tmpfs', '/dev/shm', 'size=64m')")
        worker.call(SETUP, name=pool_name)
        yield worker


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A memory control group (version 1) of this size."""
    groups = Path("/sys/fs/cgroup/memory")
    own = next(
        (
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.split(":")[1] == "memory"
        ),
        None,
    )
    parent = groups / (own or "").lstrip("/")
    if own is None or not os.access(parent, os.W_OK):
        pytest.skip("no memory control group of version 1 that this user may use")
    group = parent / f"{RUN}limit"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        procs = group / "cgroup.procs"
        wait_until(lambda: not procs.read_text().strip(), "the group is empty")
        with contextlib.suppress(OSError):
            (group / "memory.force_empty").write_text("0")
        group.rmdir()


@contextlib.contextmanager
def limited(group: Path, name: str, *steps: str) -> Iterator[Worker]:
    """A worker inside the group, which has done `steps` before it entered."""
    with Worker("import contextlib, os; from tests.process import kernel", *steps) as worker:
        # Entered by the worker itself: a namespace's process 1 has another pid outside.
        worker.call("open(procs, 'w').write('0')", procs=str(group / "cgroup.procs"))
        worker.call(SETUP, name=name)
        yield worker


# ---- room --------------------------------------------------------------------------------------


@needs_mounts
def test_c28_more_than_the_tmpfs_has(small_host: Worker) -> None:
    """A message with both numbers and the knob; no page was touched, no file is left."""
    needed, available, knob, text = small_host.call("create(1024)")
    assert needed > 1024 * MIB
    assert available <= 64 * MIB
    assert "--shm-size" in knob
    assert "--shm-size" in text
    assert small_host.step("files") == []
    assert small_host.call("create(32)") == small_host.call("name")


@needs_mounts
def test_c09_a_tmpfs_filled_by_others(small_host: Worker) -> None:
    """Refused while somebody else has the room; afterwards nothing can take it away."""
    assert small_host.call("fill('/dev/shm/foreign')") > 60 * MIB
    needed, available, _, _ = small_host.call("create(32)")
    assert needed > available == 0
    assert small_host.step("files") == ["foreign"]
    small_host.call("os.unlink('/dev/shm/foreign')")
    name = small_host.call("create(32)")
    assert small_host.call("fill('/dev/shm/foreign')") > 20 * MIB
    assert small_host.step("write_arena") is True
    assert small_host.call("home.reserve(U(1)).released") is False
    assert small_host.step("files") == ["foreign", f"shmcache.{name}"]


@needs_mounts
def test_c08_workers_that_start_together_on_a_host_with_room_for_one(small_host: Worker) -> None:
    """One creates, the others attach; nobody takes the room of the one who builds."""
    small_host.call("""
def start_together(count):
    'What open_or_create answered to each, and the names that there are; all are killed then.'
    gate, go = os.pipe()
    there, here = os.pipe()
    pids = []
    for _ in range(count):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(go)
            os.read(gate, 1)
            try:
                pool = shmcache.CacheResidencyPool.open_or_create(name, limits)
                os.write(here, b"attached ")
            except BaseException as error:
                os.write(here, type(error).__qualname__.encode() + b" ")
            signal.pause()
    os.close(go)
    said = b""
    while said.count(b" ") < count:
        said += os.read(there, 1000)
    found = files()
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    for fd in (gate, there, here):
        os.close(fd)
    os.unlink(f"/dev/shm/shmcache.{name}")
    return said.decode().split(), found
limits = shmcache.CachePoolLimits(1, 40 * MIB, 1, 0)
""")
    for _ in range(10):
        said, found = small_host.call("start_together(6)")
        assert said == ["attached"] * 6
        assert found == [f"shmcache.{small_host.call('name')}"]


def test_c08_a_builder_that_is_stopped_or_killed_is_not_waited_for(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn to build is a file with a lock: free when its holder is dead, passed by in time."""
    monkeypatch.setattr(bounds, "LOCK_DEADLINE_NS", 50_000_000)
    gate = names.SHM_DIRECTORY / f"{names.TEMPORARY_PREFIX}{pool_name}"
    gate.touch(0o600)  # a killed builder's
    with CacheResidencyPool.create(pool_name, LIMITS):
        assert not gate.exists()
    CacheResidencyPool.destroy(pool_name)
    fd = os.open(gate, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert names.lock_name(fd)  # a stopped builder's
        with CacheResidencyPool.create(pool_name, LIMITS):
            assert gate.exists()
        with pytest.raises(SegmentError.Exists):
            CacheResidencyPool.create(pool_name, LIMITS)
    finally:
        os.close(fd)
        gate.unlink()
    CacheResidencyPool.destroy(pool_name)


def test_c08_what_is_no_gate_stands_in_nobodys_way(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name is not waited for, however long one would wait for a builder."""
    monkeypatch.setattr(bounds, "LOCK_DEADLINE_NS", 10**12)
    gate = names.SHM_DIRECTORY / f"{names.TEMPORARY_PREFIX}{pool_name}"
    gate.mkdir()
    try:
        with CacheResidencyPool.create(pool_name, LIMITS):
            assert gate.is_dir()
    finally:
        gate.rmdir()


def test_c28_more_than_the_memory_limit(pool_name: str) -> None:
    """posix_fallocate would be killed here: the limit is read before."""
    with memory_limit(64 * MIB) as group, limited(group, pool_name) as worker:
        needed, available, knob, _ = worker.call("create(256)")
        assert needed > 256 * MIB
        assert available < 64 * MIB
        assert knob.endswith("memory.limit_in_bytes")
        assert pool_name not in str(worker.step("files"))
        assert worker.call("create(8)") == pool_name
        assert worker.step("write_arena") is True


@needs_namespaces
def test_c69_a_container_restarts_inside_its_memory_limit(pool_name: str) -> None:
    """The pages of the dead container's pool are still charged to it: they go before new ones."""
    with contextlib.ExitStack() as stack, memory_limit(112 * MIB) as group:
        for _ in range(3):
            with limited(group, pool_name, "kernel.enter_pid_namespace()") as worker:
                wait_until(lambda: worker.call("start(64)") == pool_name, "room is found", 20)
                assert worker.step("write_arena") is True
            # Takes the number of the dead namespace: the next container gets another one, and
            # has to make a new pool. With the same number it would attach to the old one.
            other = stack.enter_context(Worker("from tests.process import kernel"))
            other.call("kernel.enter_pid_namespace()")
        CacheResidencyPool.destroy(pool_name)


# ---- security profiles -------------------------------------------------------------------------

FORBIDDEN = ("pidfd_open", "openat2", "renameat2", "statx", "memfd_create")


@needs_filters
@pytest.mark.parametrize("answer", ["ERRNO_REFUSED", "ERRNO_UNKNOWN_CALL"])
def test_c71_a_profile_that_forbids_calls(pool_name: str, answer: str) -> None:
    """A pool lives through all its life under one; it says so, and errs on the side of life."""
    with Worker("import contextlib; from tests.process import kernel", SETUP) as host:
        host.call(f"kernel.refuse_calls(kernel.{answer}, *names)", names=FORBIDDEN)
        host.call("""
import io, logging, time
log = io.StringIO()
logging.getLogger("shmcache").addHandler(logging.StreamHandler(log))
try:
    shmcache.CacheResidencyPool(shmcache.CachePoolLimits(1, 0, 1, 0))
    anonymous = "made"
except shmcache.SegmentError.HostError as error:
    anonymous = error.call
def worker():
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        attach(name)
        os.write(here, b".")
        signal.pause()
    os.read(there, 1)
    return pid
""")
        assert host.call("anonymous") == "memfd_create"
        host.call("limits = shmcache.CachePoolLimits(1000, 0, 1000, 1000)")
        host.call("home = shmcache.CacheResidencyPool.create(name, limits)", name=pool_name)
        kills, stays = host.call("[worker(), worker()]")
        assert host.call("[o.verdict.value for o in home.owners() if o.pid != os.getpid()]") == [
            "alive",
            "alive",
        ]
        os.kill(kills, 9)
        wait_until(lambda: process_state(kills) == "Z", "the worker dies")
        host.call("""
with shmcache.Supervisor(home):
    deadline = time.monotonic() + 30
    while len(home.owners()) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
""")
        assert host.call("[o.pid for o in home.owners() if o.pid != os.getpid()]") == [stays]
        assert host.call("home.report().current_device_bytes") == 10
        assert host.call("home.verify().ok")
        assert host.call("log.getvalue().count('no pidfd of process')") == 1
        host.call("home.close(); shmcache.CacheResidencyPool.destroy(name, force=True)")
