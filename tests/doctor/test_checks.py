"""Each check on hosts made for it: a healthy one, and each way in which it is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shmcache import SegmentError
from shmcache.doctor import (
    CHECKS,
    ROOM_CHECKS,
    CheckStatus,
    Host,
    HostTrials,
    SegmentSight,
    ShmRoom,
    examine_host,
)
from shmcache.doctor.kernel import libc
from tests.doctor.hosts import BIG, GIB, MIB, MadeUp

OK, NOTE, WARN, FAIL = CheckStatus
MOUNTS, MEMORY = "proc/self/mountinfo", "proc/meminfo"
STATUS, LIMITS = "proc/self/status", "proc/self/limits"
NO_ROBUST = SegmentError.Refused("robust_mutex", "EOWNERDEAD", "nothing")


@pytest.fixture
def host(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path)


def test_a_healthy_host_is_ok_in_everything(host: MadeUp) -> None:
    examined = examine_host(host.host(needs_bytes=40 * GIB))
    assert [(c.name, c.found) for c in examined.checks if c.status is not OK] == []
    assert [check.name for check in examined.checks] == list(CHECKS)
    assert all(check.found and not check.advice for check in examined.checks)
    assert examined.ok


def test_a_host_that_shows_nothing_breaks_no_check(tmp_path: Path) -> None:
    examined = examine_host(Host(tmp_path, shm=BIG, trials=HostTrials(), uid=1000))
    failed = {check.name for check in examined.checks if check.status is FAIL}
    assert failed == {"proc", "shm_permissions"}
    assert not examined.ok


def test_without_dev_shm_there_is_no_room_to_speak_of(tmp_path: Path) -> None:
    examined = examine_host(Host(tmp_path, trials=HostTrials()), ROOM_CHECKS)
    assert [check.name for check in examined.checks if check.status is FAIL] == ["shm_room"]
    assert Host(tmp_path).supply.shm_bytes is None


# ---- files that say something else: check, file, what stands there, what else, status ----------

CHANGES: tuple[tuple[str, str, str, str, CheckStatus, str], ...] = (
    ("kernel", "proc/sys/kernel/osrelease", "6.12.1", "6.8.0-45-generic", NOTE, "6.9"),
    ("kernel", "proc/sys/kernel/osrelease", "6.12.1", "5.2.0", WARN, "5.3"),
    ("kernel", "proc/sys/kernel/osrelease", "6.12.1", "3.10.0-1160.el7", FAIL, "5.3"),
    ("kernel", "proc/sys/kernel/osrelease", "6.12.1", "strange", NOTE, "5.3"),
    ("seccomp", STATUS, "Seccomp:\t0", "Seccomp:\t2", OK, ""),
    ("time_namespace", "proc/self/timens_offsets", "    0   ", "   -5   ", NOTE, "this one"),
    ("proc", MOUNTS, "- proc proc rw", "- proc proc rw,hidepid=invisible", WARN, "hidepid=0"),
    ("proc", MOUNTS, "- proc proc rw", "- proc proc rw,hidepid=2", WARN, "hidepid=0"),
    ("proc", MOUNTS, "- proc proc rw", "- proc proc rw,hidepid=0", OK, ""),
    ("proc", "proc/sys/kernel/random/boot_id", "5b1f6b0c-5c0e-4b9e-9d2b-0a4b5d0f2c11", "", FAIL,
     "subset=pid"),
    ("remove_ipc", "etc/systemd/logind.conf", "RemoveIPC=no", "#RemoveIPC=no", WARN, "logind.conf"),
    ("remove_ipc", "etc/systemd/logind.conf", "RemoveIPC=no", "removeipc=Yes", WARN, "logind.conf"),
    ("remove_ipc", "etc/systemd/logind.conf", "RemoveIPC=no", "RemoveIPC=0", OK, ""),
    ("remove_ipc", "etc/systemd/logind.conf", "[Login]", "nonsense", WARN, "logind.conf"),
    ("shm_mount", MOUNTS, "/dev/shm rw,nosuid", "/dev/shm ro,nosuid", FAIL, "remount,rw"),
    ("shm_mount", MOUNTS, "- tmpfs tmpfs rw,size", "- tmpfs tmpfs ro,size", FAIL, "remount,rw"),
    ("shm_mount", MOUNTS, "/dev/shm rw,nosuid", "/elsewhere rw", FAIL, "tmpfs at /dev/shm"),
    ("shm_mount", MOUNTS, "tmpfs tmpfs", "overlay none", FAIL, "tmpfs at /dev/shm"),
    ("shm_mount", MOUNTS, "tmpfs tmpfs", "ramfs none", WARN, "a ramfs has no size"),
    ("swap", MEMORY, "SwapTotal:              0 kB", "SwapTotal:  8388608 kB", NOTE, "noswap"),
    ("overcommit", "proc/sys/vm/overcommit_memory", "0", "2", WARN, "overcommit_ratio"),
    ("overcommit", "proc/sys/vm/overcommit_memory", "0", "1", OK, ""),
    ("thp", "sys/kernel/mm/transparent_hugepage/shmem_enabled", "[advise] never",
     "advise [never]", NOTE, "huge=advise"),
    ("thp", "sys/kernel/mm/transparent_hugepage/shmem_enabled", "[advise]", "advise", NOTE, ""),
    ("hugetlb", MEMORY, "HugePages_Free:        0", "HugePages_Free:      512", OK, ""),
    ("mappings", "proc/sys/vm/max_map_count", "65530", "100", WARN, "max_map_count"),
    ("open_files", LIMITS, "files            1024 ", "files             128 ", WARN, "ulimit -n"),
    ("open_files", LIMITS, "files            1024 ", "files            unlimited ", OK, ""),
    ("address_space", LIMITS, "address space         unlimited", "address space         99999999 ",
     WARN, "ulimit -v"),
    ("file_size", LIMITS, "file size             unlimited", "file size             99999999 ",
     WARN, "ulimit -f"),
    ("locked_memory", LIMITS, "locked memory         unlimited",
     "locked memory         8388608 ", NOTE, "ulimit -l"),
    ("memory", MEMORY, "MemAvailable:   125829120 kB", "MemAvailable: 5000 kB", WARN, "end what"),
    ("memory", MEMORY, "MemAvailable", "Mem", NOTE, "/dev/shm only"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "file", "old", "new", "status", "advice"),
    CHANGES,
    ids=[f"{change[0]}-{number}" for number, change in enumerate(CHANGES)],
)
def test_one_file_says_something_else(
    host: MadeUp, check: str, file: str, old: str, new: str, status: CheckStatus, advice: str
) -> None:
    assert host.status(check) is OK
    host.change(file, old, new)
    verdict = host.check(check)
    assert verdict.status is status, verdict
    assert advice in verdict.advice
    assert bool(verdict.advice) == bool(advice)


# ---- room: what is there against what is needed --------------------------------------------------


@pytest.mark.parametrize(
    ("shm", "needs", "status", "words"),
    [
        (BIG, 0, OK, "60 GiB free of 64 GiB"),
        (BIG, 60 * GIB, OK, "60 GiB free"),
        (BIG, 60 * GIB + 1, FAIL, "are needed"),
        (ShmRoom(64 * MIB, 64 * MIB, 1000), 0, WARN, "what containers have unasked"),
        (ShmRoom(64 * MIB, 64 * MIB, 1000), MIB, OK, "64 MiB"),
        (ShmRoom(64 * GIB, 2 * GIB, 1000), 0, WARN, "2 GiB free of 64 GiB"),
        (ShmRoom(64 * GIB, 60 * GIB, 3), 0, FAIL, "room for 3 files"),
        (ShmRoom(0, 0, 0), 0, OK, "no size"),
        (ShmRoom(0, 0, 0), GIB, OK, "no size"),
    ],
)
def test_the_room_in_dev_shm(
    host: MadeUp, shm: ShmRoom, needs: int, status: CheckStatus, words: str
) -> None:
    verdict = host.check("shm_room", shm=shm, needs_bytes=needs)
    assert verdict.status is status
    assert words in verdict.found


def test_a_file_system_without_a_size_is_no_bound(host: MadeUp) -> None:
    assert host.host(shm=ShmRoom(0, 0, 0)).room.tmpfs_free_bytes is None


def test_the_memory_limit(host: MadeUp) -> None:
    assert host.status("cgroup") is OK
    host.write("sys/fs/cgroup/app/memory.max", str(8 * GIB))
    host.write("sys/fs/cgroup/app/memory.current", str(GIB))
    verdict = host.check("cgroup")
    assert verdict.status is NOTE
    assert "7 GiB left below" in verdict.found
    assert verdict.found.endswith("sys/fs/cgroup/app/memory.max")
    assert host.status("cgroup", needs_bytes=7 * GIB) is NOTE
    assert host.status("cgroup", needs_bytes=7 * GIB + 1) is FAIL


@pytest.mark.parametrize(
    ("check", "file", "old", "new", "most"),
    [
        ("memory", MEMORY, "SwapFree", "SwapFree", 120 * GIB),
        ("overcommit", "proc/sys/vm/overcommit_memory", "0", "2", 54 * GIB),
        ("file_size", LIMITS, "file size             unlimited",
         f"file size             {9 * GIB} ", 9 * GIB),
        ("address_space", LIMITS, "address space         unlimited",
         f"address space         {9 * GIB} ", 9 * GIB // 2),
    ],
)  # fmt: skip
def test_a_pool_that_does_not_fit_a_bound(
    host: MadeUp, check: str, file: str, old: str, new: str, most: int
) -> None:
    host.change(file, old, new)
    assert host.status(check, needs_bytes=most) is not FAIL
    verdict = host.check(check, needs_bytes=most + 1)
    assert verdict.status is FAIL
    assert verdict.advice


def test_the_supply_in_numbers(host: MadeUp) -> None:
    host.change(MEMORY, "HugePages_Free:        0", "HugePages_Free:        3")
    host.change(LIMITS, "file size             unlimited", "file size             4096 ")
    supply = host.host().supply
    assert supply.memory_available_bytes == 120 * GIB
    assert (supply.shm_bytes, supply.shm_free_bytes) == (64 * GIB, 60 * GIB)
    assert (supply.cgroup_free_bytes, supply.cgroup_file) == (None, "")
    assert (supply.huge_page_bytes, supply.huge_pages_free_bytes) == (2 * MIB, 6 * MIB)
    assert (supply.open_files, supply.file_bytes, supply.locked_bytes) == (1024, 4096, None)
    assert supply.shmem_huge == "advise"


# ---- namespaces, logins --------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["pid", "time"])
def test_children_in_another_namespace(host: MadeUp, namespace: str) -> None:
    """What `unshare` without a fork leaves: this process is in one, what it forks in another."""
    host.link(f"proc/self/ns/{namespace}_for_children", f"{namespace}:[5]")
    verdict = host.check(f"{namespace}_namespace")
    assert verdict.status is FAIL
    assert "fork once more" in verdict.advice


def test_a_container(host: MadeUp) -> None:
    for name in ("pid", "pid_for_children"):
        host.link(f"proc/self/ns/{name}", "pid:[4026532252]")
    verdict = host.check("pid_namespace")
    assert verdict.status is NOTE
    assert "shareProcessNamespace" in verdict.advice


def test_proc_of_another_namespace(host: MadeUp) -> None:
    (host.root / "proc/self").rename(host.root / "proc/8")
    host.link("proc/self", "8")
    verdict = host.check("proc")
    assert verdict.status is FAIL
    assert "another PID namespace" in verdict.found


def test_hidepid_is_no_matter_to_root(host: MadeUp) -> None:
    host.change(MOUNTS, "- proc proc rw", "- proc proc rw,hidepid=2")
    assert host.status("proc", uid=0) is OK


def test_a_process_that_is_not_dumpable(host: MadeUp) -> None:
    assert host.status("proc", trials=HostTrials(proc_owned=False)) is WARN


def test_remove_ipc_concerns_ordinary_users_of_systemd(host: MadeUp) -> None:
    (host.root / "etc/systemd/logind.conf").unlink()
    assert host.status("remove_ipc") is WARN
    assert host.status("remove_ipc", uid=0) is OK
    assert host.status("remove_ipc", uid=999) is OK
    (host.root / "run/systemd/system").rmdir()
    assert host.status("remove_ipc") is OK


def test_remove_ipc_of_drop_ins(host: MadeUp) -> None:
    """The last by name counts, before the main file; of two with one name /etc's does."""
    host.change("etc/systemd/logind.conf", "no", "yes")
    host.write("usr/lib/systemd/logind.conf.d/50-a.conf", "[Login]\nRemoveIPC=no\n")
    assert host.status("remove_ipc") is OK
    host.write("etc/systemd/logind.conf.d/60-b.conf", "[Login]\nRemoveIPC=yes\n")
    assert host.status("remove_ipc") is WARN
    host.write("run/systemd/logind.conf.d/70-c.conf", "[Login]\nKillUserProcesses=no\n")
    assert host.status("remove_ipc") is WARN
    host.write("etc/systemd/logind.conf.d/50-a.conf", "[Login]\nRemoveIPC=yes\n")
    (host.root / "etc/systemd/logind.conf.d/60-b.conf").unlink()
    assert host.status("remove_ipc") is WARN


# ---- what was tried ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "trials", "status", "words"),
    [
        ("pidfd", HostTrials(pidfd="ENOSYS"), WARN, "ENOSYS"),
        ("pidfs", HostTrials(pidfd="ENOSYS"), NOTE, "no pidfds"),
        ("pidfs", HostTrials(pidfd_has_inode=False), NOTE, "no inodes"),
        ("memfd", HostTrials(memfd="EPERM"), WARN, "EPERM"),
        ("robust_mutex", HostTrials(named_pool=NO_ROBUST), FAIL, "not reported"),
        ("robust_mutex", HostTrials(anonymous_pool=NO_ROBUST), FAIL, "not reported"),
        (
            "robust_mutex",
            HostTrials(named_pool=NO_ROBUST, anonymous_pool=SegmentError.NotFound("x")),
            FAIL,
            "not reported",
        ),
        (
            "robust_mutex",
            HostTrials(
                named_pool=SegmentError.NotFound("x"), anonymous_pool=SegmentError.NotFound("x")
            ),
            WARN,
            "could not be tried",
        ),
        ("named_pool", HostTrials(named_pool=SegmentError.NoSpace(2, 1, "knob")), FAIL, "1 B"),
        ("anonymous_pool", HostTrials(anonymous_pool=SegmentError.Corrupt("x")), WARN, "x"),
    ],
)
def test_what_a_trial_found(
    host: MadeUp, check: str, trials: HostTrials, status: CheckStatus, words: str
) -> None:
    verdict = host.check(check, trials=trials)
    assert verdict.status is status
    assert words in verdict.found
    assert verdict.advice


def test_a_filter_that_refuses_our_calls(host: MadeUp) -> None:
    host.change(STATUS, "Seccomp:\t0", "Seccomp:\t2")
    verdict = host.check("seccomp", trials=HostTrials(pidfd="EPERM"))
    assert verdict.status is NOTE
    assert "pidfd_open" in verdict.advice


@pytest.mark.parametrize(
    ("version", "status"),
    [("glibc 2.36", OK), ("glibc 2.29", FAIL), ("glibc", OK), ("musl 1.2", WARN), ("", WARN)],
)
def test_the_c_library(host: MadeUp, version: str, status: CheckStatus) -> None:
    assert libc(host.host(), version).status is status


def sight(name: str, state: str = "active", **more: Any) -> SegmentSight:
    return SegmentSight(name, state, **more)


@pytest.mark.parametrize(
    ("sights", "status", "words"),
    [
        ((sight("a"), sight("b")), OK, "usable pools: 2"),
        ((sight("a"), sight("b", dead_owners=1)), NOTE, "of: b"),
        ((sight("a", "refused", check="boot_id"),), WARN, "a (boot_id)"),
        ((sight("a", "foreign"), sight("b", "retired")), WARN, "a (foreign), b (retired)"),
        (tuple(sight(f"p{n}", "refused", check="size") for n in range(9)), WARN, "and 6 more"),
        ((sight("a", "refused", check="size"), sight("b", "poisoned")), FAIL, "poisoned: b"),
        ((sight("a\n\x1b[2J", "foreign"),), WARN, "a??[2J (foreign)"),
    ],
)
def test_segments(
    host: MadeUp, sights: tuple[SegmentSight, ...], status: CheckStatus, words: str
) -> None:
    verdict = host.check("segments", trials=HostTrials(segments=sights))
    assert verdict.status is status
    assert words in verdict.found


# ---- files in /dev/shm ---------------------------------------------------------------------------


def test_who_may_put_something_there(host: MadeUp) -> None:
    shm = host.root / "dev/shm"
    shm.chmod(0o777)
    verdict = host.check("shm_permissions")
    assert verdict.status is NOTE
    assert "chmod 1777 /dev/shm" in verdict.advice
    shm.rmdir()
    assert host.status("shm_permissions") is FAIL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_not_writable(host: MadeUp) -> None:
    (host.root / "dev/shm").chmod(0o555)
    assert host.status("shm_permissions") is FAIL


def test_leftovers_and_strangers(host: MadeUp) -> None:
    shm = host.root / "dev/shm"
    (shm / ".shmcache-new.77.0123456789abcdef.llm").touch()
    (shm / "shmcache.llm").write_bytes(bytes(50_000))
    (shm / "folder").mkdir()
    assert host.status("strangers") is OK
    assert host.status("leftovers") is NOTE
    (shm / "psm_1234").write_bytes(bytes(200_000))
    (shm / "small").write_bytes(bytes(5_000))
    assert host.status("strangers") is OK
    verdict = host.check("strangers", shm=ShmRoom(MIB, MIB, 100))
    assert verdict.status is WARN
    assert "in files of other programs: " in verdict.found
    assert verdict.found.endswith("psm_1234, small")
