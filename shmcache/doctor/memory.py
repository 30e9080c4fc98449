"""Checks of memory: where the bytes of a pool come from, and who can take them away."""

from __future__ import annotations

from typing import Final

from shmcache.doctor.host import SHM, CheckStatus, Host, Verdict
from shmcache.errors import size_text

_CONTAINER_SHM_BYTES: Final = 64 << 20  # what Docker and Kubernetes give unasked
_FREE_FILES_MIN: Final = 16
_LITTLE_MEMORY_BYTES: Final = 1 << 30
_MAPS_MIN: Final = 4096

_REMOUNT: Final = "mount -o remount,size=SIZE /dev/shm; Docker --shm-size; Kubernetes emptyDir"
_OK, _NOTE, _WARN, _FAIL = CheckStatus


def shm_mount(host: Host) -> Verdict:
    """What /dev/shm is: pools must be in memory, writable, and gone after a boot."""
    mount = host.mount_of(SHM)
    if mount is None:
        return Verdict(_NOTE, "the mount of /dev/shm is not known", "look at /proc/self/mountinfo")
    where = f"{SHM} is a {mount.filesystem} mounted at {mount.point}"
    if mount.option("ro") is not None:
        return Verdict(_FAIL, f"{where}, read-only", "mount -o remount,rw /dev/shm")
    if mount.filesystem not in ("tmpfs", "ramfs"):
        advice = "mount a tmpfs at /dev/shm: elsewhere pools are written to a disk"
        return Verdict(_FAIL, where, advice)
    if mount.filesystem == "ramfs":
        return Verdict(_WARN, where, "use a tmpfs: a ramfs has no size, and takes all memory")
    huge = mount.option("huge")
    return Verdict(_OK, where + (f", huge pages {huge}" if huge else ""))


def shm_room(host: Host) -> Verdict:
    """Its size and what is free: a pool is allocated whole."""
    if host.shm is None:
        return Verdict(_FAIL, "/dev/shm cannot be looked at", "mount a tmpfs there, mode=1777")
    size, free, files = host.shm
    if not size:
        return Verdict(_OK, "/dev/shm has no size of its own")
    found = f"{size_text(free)} free of {size_text(size)}"
    if free < host.needs_bytes:
        return Verdict(_FAIL, f"{found}, {size_text(host.needs_bytes)} are needed", _REMOUNT)
    if files < _FREE_FILES_MIN:
        return Verdict(_FAIL, f"room for {files} files", "raise nr_inodes= of /dev/shm, or tidy up")
    if size <= _CONTAINER_SHM_BYTES and not host.needs_bytes:
        return Verdict(_WARN, f"{found}, what containers have unasked", _REMOUNT)
    if free < size // 10:
        return Verdict(_WARN, found, "see what is in /dev/shm; shmcache list shows the pools")
    return Verdict(_OK, found)


def cgroup(host: Host) -> Verdict:
    """Memory limits of this process's groups: exceeding one is answered by a kill."""
    free, file = host.room.memory_limit_free_bytes, host.room.memory_limit_knob
    if free is None:
        return Verdict(_OK, "no memory limit")
    found = f"{size_text(free)} left below {file}"
    advice = "create pools where the limit was sized for them: who creates pays"
    if free < host.needs_bytes:
        return Verdict(_FAIL, f"{found}, {size_text(host.needs_bytes)} are needed", advice)
    return Verdict(_NOTE, found, "" if host.needs_bytes else advice)


def memory(host: Host) -> Verdict:
    """What the kernel can find without killing somebody."""
    free = host.room.host_free_bytes
    if free is None:
        return Verdict(_NOTE, "/proc/meminfo cannot be read", "a create looks at /dev/shm only")
    found = f"{size_text(free)} available (MemAvailable + SwapFree)"
    if free < host.needs_bytes:
        advice = "plan a smaller pool, or end what takes the memory"
        return Verdict(_FAIL, f"{found}, {size_text(host.needs_bytes)} are needed", advice)
    if free < _LITTLE_MEMORY_BYTES and not host.needs_bytes:
        return Verdict(_WARN, found, "end what takes the memory before a pool is made")
    return Verdict(_OK, found)


def swap(host: Host) -> Verdict:
    """Pages of a pool go to swap like any other."""
    total, mount = host.memory.get("SwapTotal", 0), host.mount_of(SHM)
    if not total:
        return Verdict(_OK, "no swap")
    if mount is not None and mount.option("noswap") is not None:
        return Verdict(_OK, "swap, but not for /dev/shm")
    advice = "run without swap, or mount -o remount,noswap /dev/shm (Linux 6.4)"
    return Verdict(_NOTE, f"{size_text(total)} of swap, to which pools may go", advice)


def overcommit(host: Host) -> Verdict:
    """With strict accounting shared memory counts as committed."""
    if host.number("proc/sys/vm/overcommit_memory") != 2:
        return Verdict(_OK, "vm.overcommit_memory is not strict")
    left = max(0, host.memory.get("CommitLimit", 0) - host.memory.get("Committed_AS", 0))
    found = f"vm.overcommit_memory is 2, {size_text(left)} are left"
    advice = "raise vm.overcommit_ratio, or set vm.overcommit_memory to 0"
    return Verdict(_FAIL if left < host.needs_bytes else _WARN, found, advice)


def thp(host: Host) -> Verdict:
    """Transparent huge pages of shared memory: of use to large blocks only."""
    setting, mount = host.shmem_huge, host.mount_of(SHM)
    huge = (mount.option("huge") if mount else None) or "never"
    if setting is None:
        return Verdict(_NOTE, "this kernel has no huge pages in shared memory")
    found = f"shmem_enabled is {setting}, /dev/shm has huge={huge}"
    if setting == "deny" or (setting == "never" and huge == "never"):
        advice = "hugepages=thp does nothing here: mount -o remount,huge=advise /dev/shm"
        return Verdict(_NOTE, found, advice)
    return Verdict(_OK, found)


def hugetlb(host: Host) -> Verdict:
    """Reserved huge pages, which only anonymous pools can use."""
    free, page = host.memory.get("HugePages_Free", 0), host.memory.get("Hugepagesize", 0)
    if not free:
        return Verdict(_OK, "no reserved huge pages; hugepages=hugetlb would be refused")
    return Verdict(_OK, f"{free} free pages of {size_text(page)}, for anonymous pools")


def mappings(host: Host) -> Verdict:
    """Each attached process maps a segment a few times."""
    most = host.number("proc/sys/vm/max_map_count")
    if most is not None and most < _MAPS_MIN:
        return Verdict(_WARN, f"vm.max_map_count is {most}", "sysctl vm.max_map_count=65530")
    return Verdict(_OK, "vm.max_map_count is " + (str(most) if most else "not known"))
