"""A made-up host: a folder as the checks see it, healthy until a test changes a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shmcache.doctor import CheckStatus, Host, HostTrials, ShmRoom, Verdict
from shmcache.doctor.examination import CHECKS

GIB = 1 << 30
MIB = 1 << 20
BIG = ShmRoom(64 * GIB, 60 * GIB, 1_000_000)

_MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:22 / /proc rw,nosuid - proc proc rw
24 22 0:23 / /dev rw,nosuid - devtmpfs udev rw,size=100k
25 24 0:24 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=67108864k
30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
"""
_MEMORY = """\
MemTotal:       134217728 kB
MemAvailable:   125829120 kB
SwapTotal:              0 kB
SwapFree:               0 kB
CommitLimit:     67108864 kB
Committed_AS:    10485760 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
_LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max file size             unlimited            unlimited            bytes
Max locked memory         unlimited            unlimited            bytes
Max address space         unlimited            unlimited            bytes
Max open files            1024                 1048576              files
"""
_STATUS = "Name:\tpython\nPid:\t7\nSeccomp:\t0\n"


class MadeUp:
    """The folder, and how the checks are shown it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.write("proc/self/mountinfo", _MOUNTS)
        self.write("proc/meminfo", _MEMORY)
        self.write("proc/self/limits", _LIMITS)
        self.write("proc/self/status", _STATUS)
        self.write("proc/self/cgroup", "0::/app\n")
        self.write("proc/self/timens_offsets", "monotonic           0         0\n")
        self.write("proc/sys/kernel/osrelease", "6.12.1\n")
        self.write("proc/sys/kernel/random/boot_id", "5b1f6b0c-5c0e-4b9e-9d2b-0a4b5d0f2c11\n")
        self.write("proc/sys/vm/overcommit_memory", "0\n")
        self.write("proc/sys/vm/max_map_count", "65530\n")
        self.write(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always within_size [advise] never deny force\n",
        )
        for namespace, number in (("pid", 4026531836), ("time", 4026531834)):
            for name in (namespace, f"{namespace}_for_children"):
                self.link(f"proc/self/ns/{name}", f"{namespace}:[{number}]")
        (folder / "dev/shm").mkdir(parents=True)
        (folder / "dev/shm").chmod(0o1777)
        (folder / "run/systemd/system").mkdir(parents=True)
        self.write("etc/systemd/logind.conf", "[Login]\nRemoveIPC=no\n")

    def write(self, path: str, text: str) -> None:
        """A file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def change(self, path: str, old: str, new: str) -> None:
        """A part of a file, which must be there."""
        text = (self.root / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def link(self, path: str, target: str) -> None:
        """A symbolic link, in the place of one that is there."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        os.symlink(target, link)

    def host(self, **settings: Any) -> Host:
        """What the checks see."""
        shown: dict[str, Any] = {"uid": 1000, "pid": 7, "shm": BIG, "trials": HostTrials()}
        return Host(self.root, **(shown | settings))

    def check(self, name: str, **settings: Any) -> Verdict:
        """One check of the table."""
        return CHECKS[name](self.host(**settings))

    def status(self, name: str, **settings: Any) -> CheckStatus:
        """What it comes to."""
        return self.check(name, **settings).status
