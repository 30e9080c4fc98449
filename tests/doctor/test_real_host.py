"""The checks on real hosts that are not well: namespaces, mounts, limits, filters of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from shmcache import CachePoolLimits, CacheResidencyPool, segment_path
from shmcache.doctor import CheckStatus, Host, examine_host, try_host
from tests.pool.raw import Segment
from tests.process import kernel
from tests.process.conftest import needs_filters, needs_mounts, needs_namespaces
from tests.process.test_hosts import limited, memory_limit
from tests.support import SHM, Worker, process_state, wait_until

MIB = 1 << 20
NOBODY = 65534
LIMITS = CachePoolLimits(1000, 0, 1000, 0)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
needs_time = pytest.mark.skipif(
    not kernel.can_unshare(kernel.NEW_TIME),
    reason="this user may not make time namespaces (needs root)",
)

DOCTOR = """
from shmcache.doctor import Host, examine_host
def checks(needs=0):
    return {c.name: [c.status.value, c.found] for c in examine_host(Host(needs_bytes=needs)).checks}
"""


@pytest.fixture
def patient() -> Iterator[Worker]:
    """A process that changes its own circumstances and asks the doctor."""
    with Worker("import os, resource; from tests.process import kernel", DOCTOR) as worker:
        yield worker


def failing(checks: dict[str, Any]) -> list[str]:
    """Checks that fail; other tests may damage their pools at the same time."""
    failed = [name for name, (status, _) in checks.items() if status == "fail"]
    return [name for name in failed if name != "segments"]


def test_this_host_can_have_pools() -> None:
    """The tests run here, so nothing fails; what the doctor made is gone."""
    before = set(os.listdir(SHM))
    examined = examine_host()
    failed = failing({check.name: (check.status.value, check.found) for check in examined.checks})
    assert failed == []
    by_name = {check.name: check for check in examined.checks}
    for name in ("robust_mutex", "named_pool", "shm_permissions"):
        assert by_name[name].status is CheckStatus.OK
    assert not [name for name in set(os.listdir(SHM)) - before if "doctor" in name]


# ---- /dev/shm ------------------------------------------------------------------------------------


@needs_mounts
def test_the_dev_shm_of_a_container(patient: Worker) -> None:
    patient.call("kernel.enter_mount_namespace(); kernel.mount('tmpfs', '/dev/shm', 'size=64m')")
    checks = patient.call("checks()")
    assert checks["shm_room"] == ["warn", "64 MiB free of 64 MiB, what containers have unasked"]
    assert failing(checks) == []
    assert patient.call("checks(65 << 20)")["shm_room"][0] == "fail"
    assert patient.call("checks(63 << 20)")["shm_room"][0] == "ok"


@needs_mounts
def test_a_full_and_a_read_only_dev_shm(patient: Worker) -> None:
    patient.call("kernel.enter_mount_namespace(); kernel.mount('tmpfs', '/dev/shm', 'size=2m')")
    patient.call("file = open('/dev/shm/psm_x', 'wb'); file.write(bytes(2 << 20)); file.close()")
    checks = patient.call("checks()")
    assert failing(checks) == ["named_pool"]
    assert checks["strangers"] == ["warn", "2 MiB in files of other programs: psm_x"]
    patient.call("kernel.mount('tmpfs', '/dev/shm', 'ro')")
    checks = patient.call("checks()")
    assert {"shm_mount", "named_pool"} <= set(failing(checks))
    assert "read-only" in checks["shm_mount"][1]


@needs_mounts
def test_a_dev_shm_on_a_disk(patient: Worker) -> None:
    """A bind mount of another file system: what is under /tmp or, at worst, of the root."""
    patient.call("kernel.enter_mount_namespace()")
    patient.call("import ctypes; libc = ctypes.CDLL(None); libc.umount2(b'/dev/shm', 2)")
    for _ in range(3):  # several may lie on each other
        patient.call("libc.umount2(b'/dev/shm', 2)")
    checks = patient.call("checks()")
    filesystem = checks["shm_mount"][1]
    if " tmpfs " in filesystem:
        pytest.skip("what lies under /dev/shm here is a tmpfs as well")
    assert checks["shm_mount"][0] == ("warn" if "ramfs" in filesystem else "fail")


@needs_mounts
@needs_root
def test_another_users_dev_shm(patient: Worker) -> None:
    patient.call("kernel.enter_mount_namespace(); kernel.mount('tmpfs', '/dev/shm', 'mode=755')")
    patient.call("os.setgroups([]); os.setgid(nobody); os.setuid(nobody)", nobody=NOBODY)
    checks = patient.call("checks()")
    assert checks["shm_permissions"] == ["fail", "mode 755, of user 0, not writable for user 65534"]
    assert "named_pool" in failing(checks)


# ---- namespaces and /proc ------------------------------------------------------------------------


@needs_namespaces
def test_a_pid_namespace(patient: Worker, pool_name: str) -> None:
    with CacheResidencyPool.create(pool_name, LIMITS):
        patient.call("kernel.enter_pid_namespace()")
        checks = patient.call("checks()")
        assert checks["segments"][0] == "warn"
        seen = patient.call(
            "[s.check for s in Host().trials.segments if s.name == name]", name=pool_name
        )
        assert seen == ["pid_namespace"]
        assert checks["pid_namespace"][0] == "note"
    assert failing(checks) == []
    CacheResidencyPool.destroy(pool_name)


@needs_namespaces
def test_a_process_between_two_pid_namespaces(patient: Worker) -> None:
    """After unshare, before the fork: its children would be refused."""
    patient.call("import ctypes; ctypes.CDLL(None).unshare(kernel.NEW_PIDS)")
    assert "pid_namespace" in failing(patient.call("checks()"))


@needs_namespaces
def test_the_proc_of_another_namespace(patient: Worker) -> None:
    """A container that was given the host's /proc."""
    patient.call("""
import ctypes
kernel.enter_mount_namespace()
ctypes.CDLL(None).unshare(kernel.NEW_PIDS)
kernel._go_on_as_child()
""")
    checks = patient.call("checks()")
    assert "proc" in failing(checks)
    assert checks["proc"][1] == "/proc belongs to another PID namespace"


@needs_time
def test_a_time_namespace(patient: Worker) -> None:
    patient.call("kernel.enter_time_namespace(1000)")
    assert patient.call("checks()")["time_namespace"][0] == "note"


@needs_mounts
def test_no_proc(patient: Worker) -> None:
    patient.call("kernel.hide_processes()")
    assert "proc" in failing(patient.call("checks()"))


@needs_mounts
@needs_root
def test_hidden_processes_and_a_process_that_changed_its_user(patient: Worker) -> None:
    """What drops its privileges without an exec is not dumpable: its /proc files stay root's."""
    patient.call("kernel.enter_mount_namespace()")
    change = "os.setgroups([]); os.setgid(nobody); os.setuid(nobody)"
    with Worker("import os", DOCTOR) as other:
        other.call(change, nobody=NOBODY)
        assert other.call("checks()")["proc"] == [
            "warn",
            "this process is not dumpable: /proc/self is root's",
        ]
    patient.call("kernel.mount('proc', '/proc', 'hidepid=2')")
    found = patient.call("checks()")["proc"]
    assert found[0] == "ok"
    assert "not for root" in found[1]
    patient.call(change, nobody=NOBODY)
    assert patient.call("checks()")["proc"][0] == "warn"


# ---- limits and filters --------------------------------------------------------------------------


def test_limits_of_a_process(patient: Worker) -> None:
    """Each is the worker's own; the pool that does not fit is named before it is a signal."""
    patient.call("""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
""")
    checks = patient.call("checks()")
    assert checks["open_files"] == ["warn", "100 descriptors"]
    assert checks["file_size"] == ["warn", "64 MiB a file"]
    assert checks["address_space"] == ["warn", "8 GiB of addresses for a process"]
    assert checks["locked_memory"] == ["note", "4 KiB may be locked"]
    assert failing(checks) == []
    checks = patient.call("checks(5 << 30)")
    assert {"file_size", "address_space"} <= set(failing(checks))


def test_a_file_limit_below_the_smallest_pool(patient: Worker) -> None:
    patient.call("""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
""")
    checks = patient.call("checks()")
    assert failing(checks) == ["named_pool"]
    assert "EFBIG" in checks["named_pool"][1]


def test_a_memory_limit(pool_name: str) -> None:
    with (
        memory_limit(64 * MIB) as group,
        limited(group, pool_name) as worker,
    ):
        worker.call(DOCTOR)
        found = worker.call("checks()")["cgroup"]
        assert found[0] == "note"
        assert found[1].endswith("memory.limit_in_bytes")
        assert worker.call("checks(80 << 20)")["cgroup"][0] == "fail"


@needs_filters
@pytest.mark.parametrize("answer", ["ERRNO_REFUSED", "ERRNO_UNKNOWN_CALL"])
def test_a_security_profile(patient: Worker, answer: str) -> None:
    patient.call(f"kernel.refuse_calls(kernel.{answer}, 'pidfd_open', 'memfd_create')")
    checks = patient.call("checks()")
    errno_name = "EPERM" if answer == "ERRNO_REFUSED" else "ENOSYS"
    assert checks["pidfd"] == ["warn", f"pidfd_open answers {errno_name}"]
    assert checks["memfd"] == ["warn", f"memfd_create answers {errno_name}"]
    assert checks["seccomp"] == ["note", "a filter, which refuses calls of ours"]
    assert (checks["named_pool"][0], checks["anonymous_pool"][0]) == ("ok", "warn")
    assert checks["robust_mutex"][0] == "ok"
    assert failing(checks) == []


# ---- segments ------------------------------------------------------------------------------------


def segments(name: str) -> tuple[str, str]:
    """The state and the check of the segment of this name."""
    sight = next(sight for sight in try_host().segments if sight.name == name)
    return sight.state, sight.check


def test_a_pool_from_its_birth_to_its_end(pool_name: str) -> None:
    with CacheResidencyPool.create(pool_name, LIMITS):
        assert segments(pool_name) == ("active", "")
        with Worker("import shmcache as sc") as worker:
            worker.call("pool = sc.CacheResidencyPool.attach(name)", name=pool_name)
            worker.kill()
            wait_until(lambda: process_state(worker.pid) in ("", "Z"), "the worker is dead")
        sight = next(sight for sight in try_host().segments if sight.name == pool_name)
        assert sight.dead_owners == 1
    with Segment(segment_path(pool_name)) as raw:
        raw.damage_total()
    with CacheResidencyPool.observe(pool_name) as pool:
        assert not pool.verify().ok
    assert segments(pool_name) == ("poisoned", "")
    assert examine_host(Host(), ["segments"]).checks[0].status is CheckStatus.FAIL
    CacheResidencyPool.destroy(pool_name, force=True)


def test_files_that_are_no_pools(pool_name: str) -> None:
    path = segment_path(pool_name)
    path.write_bytes(b"something else")
    assert segments(pool_name)[0] == "refused"
    odd = path.with_name(f"{path.name} with spaces")
    path.rename(odd)
    assert segments(odd.name.removeprefix("shmcache."))[0] == "foreign"
    odd.unlink()
