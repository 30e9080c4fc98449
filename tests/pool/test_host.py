"""Room on this host: the decision on plain values, the reading on made-up /proc and cgroups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shmcache.errors import SegmentError
from shmcache.pool.host import (
    HOST_KNOB,
    TMPFS_KNOB,
    HostRoom,
    read_host_room,
    require_room,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_MOUNTS = """\
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
25 24 0:23 / /dev/shm rw,relatime shared:1 master:2 - tmpfs tmpfs rw,size=24684092k
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
37 31 0:34 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
"""


class Host:
    """A made-up host under one folder: `proc` files and cgroup directories as the kernel shows."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.cgroup = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def own(self, cgroup: str, *mounts: str) -> None:
        (self.proc / "self" / "cgroup").write_text(cgroup)
        text = OTHER_MOUNTS + "".join(f"{mount}\n" for mount in mounts)
        (self.proc / "self" / "mountinfo").write_text(text)

    def group(self, path: str, files: Mapping[str, object]) -> str:
        directory = self.cgroup / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_text(f"{content}\n")
        return str(directory)

    def v2(self, path: str, limit: object, usage: int = 0, inactive_file: int = 0) -> str:
        stat = f"anon 5\nfile 77\ninactive_file {inactive_file}\nactive_file 66"
        files = {"memory.max": limit, "memory.current": usage, "memory.stat": stat}
        return self.group(path, files) + "/memory.max"

    def v1(self, path: str, limit: int, usage: int = 0, inactive_file: int = 0) -> str:
        stat = f"cache 5\ninactive_file 9\ntotal_inactive_file {inactive_file}"
        files = {
            "memory.limit_in_bytes": limit,
            "memory.usage_in_bytes": usage,
            "memory.stat": stat,
        }
        return self.group(f"memory/{path}", files) + "/memory.limit_in_bytes"

    def room(self) -> HostRoom:
        return read_host_room(self.cgroup, proc_root=self.proc, cgroup_root=self.cgroup)

    def limit(self) -> tuple[int | None, str]:
        room = self.room()
        return room.memory_limit_free_bytes, room.memory_limit_knob


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# The decision -------------------------------------------------------------------------------------

CGROUP_FILE = "/sys/fs/cgroup/memory.max"


@pytest.mark.parametrize(
    ("room", "available", "knob"),
    [
        (HostRoom(64, 100, CGROUP_FILE, 100), 64, TMPFS_KNOB),
        (HostRoom(100, 64, CGROUP_FILE, 100), 64, CGROUP_FILE),
        (HostRoom(100, 100, CGROUP_FILE, 64), 64, HOST_KNOB),
        (HostRoom(None, 64, CGROUP_FILE, None), 64, CGROUP_FILE),
        (HostRoom(64, 64, CGROUP_FILE, 64), 64, TMPFS_KNOB),
        (HostRoom(tmpfs_free_bytes=64), 64, TMPFS_KNOB),
    ],
)
def test_the_tightest_bound_refuses_and_names_its_knob(
    room: HostRoom, available: int, knob: str
) -> None:
    require_room(available, room)
    with pytest.raises(SegmentError.NoSpace) as caught:
        require_room(available + 1, room)
    assert caught.value == SegmentError.NoSpace(available + 1, available, knob)


def test_nothing_known_refuses_nothing() -> None:
    assert HostRoom().tightest() is None
    require_room(1 << 60, HostRoom())


def test_no_room_at_all_still_admits_nothing_asked() -> None:
    require_room(0, HostRoom(0, 0, CGROUP_FILE, 0))
    with pytest.raises(SegmentError.NoSpace):
        require_room(1, HostRoom(0))


# cgroup v2 ----------------------------------------------------------------------------------------


def test_v2_own_limit_minus_usage(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    knob = host.v2("app", 4 * GIB, usage=GIB)
    assert host.limit() == (3 * GIB, knob)


def test_v2_page_cache_the_kernel_drops_first_is_free(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.v2("app", 4 * GIB, usage=4 * GIB, inactive_file=3 * GIB)
    assert host.limit()[0] == 3 * GIB


def test_v2_max_is_no_limit(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.v2("app", "max", usage=GIB)
    assert host.limit() == (None, "")


def test_v2_a_parent_may_be_tighter_than_the_own_group(host: Host) -> None:
    host.own("0::/kube/pod/app\n", V2_MOUNT.format(root="/"))
    host.v2("kube/pod/app", 8 * GIB, usage=GIB)
    pod = host.v2("kube/pod", 8 * GIB, usage=7 * GIB)
    host.v2("kube", "max", usage=30 * GIB)
    assert host.limit() == (GIB, pod)


def test_v2_the_limit_of_the_mount_point_counts(host: Host) -> None:
    """In a cgroup namespace the own group is "/" and the mount point is its directory."""
    host.own("0::/\n", V2_MOUNT.format(root="/"))
    assert host.limit() == (None, "")
    knob = host.v2("", 2 * GIB, usage=GIB)
    assert host.limit() == (GIB, knob)


def test_v2_an_unrelated_group_does_not_count(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.v2("app/child", 1)
    host.v2("other", 1)
    knob = host.v2("app", GIB)
    assert host.limit() == (GIB, knob)


def test_v2_used_above_the_limit_is_no_room_and_not_negative(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.v2("app", GIB, usage=2 * GIB)
    assert host.limit()[0] == 0


def test_v2_more_page_cache_than_usage_is_not_more_than_the_limit(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.v2("app", GIB, usage=5, inactive_file=9)
    assert host.limit()[0] == GIB


def test_v2_a_limit_without_readable_usage_is_still_a_limit(host: Host) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.group("app", {"memory.max": GIB})
    assert host.limit()[0] == GIB


def test_v2_mount_shows_only_the_tree_below_its_root(host: Host) -> None:
    """A container without a cgroup namespace: full path in /proc, its own group as mount root."""
    host.own("0::/docker/abc/worker\n", V2_MOUNT.format(root="/docker/abc"))
    host.v2("worker", 3 * GIB)
    knob = host.v2("", 2 * GIB)
    assert host.limit() == (2 * GIB, knob)


@pytest.mark.parametrize(
    ("path", "root"),
    [("/../other", "/"), ("/docker/abc", "/docker/abcdef"), ("/", "/../.."), ("/a", "/a/b")],
)
def test_v2_a_group_outside_of_the_mount_falls_back_to_the_mount(
    host: Host, path: str, root: str
) -> None:
    host.own(f"0::{path}\n", V2_MOUNT.format(root=root))
    host.v2("../other", 1)  # outside of the mount: not ours to read
    knob = host.v2("", GIB)
    assert host.limit() == (GIB, knob)


def test_v2_path_with_a_colon(host: Host) -> None:
    host.own("0::/a:b/app\n", V2_MOUNT.format(root="/"))
    knob = host.v2("a:b/app", GIB)
    assert host.limit() == (GIB, knob)


def test_a_mount_elsewhere_is_followed_with_its_escapes(host: Host, tmp_path: Path) -> None:
    elsewhere = tmp_path / "c group"
    (elsewhere / "app").mkdir(parents=True)
    (elsewhere / "app" / "memory.max").write_text("4096\n")
    point = str(elsewhere).replace(" ", r"\040")
    host.own("0::/app\n", f"30 23 0:26 / {point} rw - cgroup2 cgroup2 rw")
    assert host.limit() == (4096, f"{elsewhere}/app/memory.max")


# cgroup v1 and hybrid hosts -----------------------------------------------------------------------

V1_UNLIMITED = 9223372036854771712


def test_v1_walks_up_the_memory_hierarchy(host: Host) -> None:
    host.own("5:cpu:/x\n4:memory:/kube/app\n0::/\n", V1_MOUNT.format(root="/"))
    host.v1("kube/app", 8 * GIB, usage=GIB)
    knob = host.v1("kube", 4 * GIB, usage=3 * GIB, inactive_file=GIB)
    host.v1("", V1_UNLIMITED, usage=30 * GIB)
    assert host.limit() == (2 * GIB, knob)


def test_v1_the_largest_number_is_no_limit(host: Host) -> None:
    host.own("4:memory:/app\n", V1_MOUNT.format(root="/"))
    host.v1("app", V1_UNLIMITED, usage=GIB)
    assert host.limit() == (None, "")


def test_v1_memory_mounted_together_with_another_controller(host: Host) -> None:
    mount = V1_MOUNT.format(root="/").replace("rw,memory", "rw,cpu,memory")
    host.own("4:cpu,memory:/app\n", mount)
    knob = host.v1("app", GIB)
    assert host.limit() == (GIB, knob)


def test_v1_container_without_a_cgroup_namespace(host: Host) -> None:
    host.own("4:memory:/docker/abc\n", V1_MOUNT.format(root="/docker/abc"))
    knob = host.v1("", GIB)
    assert host.limit() == (GIB, knob)


def test_hybrid_takes_the_hierarchy_that_has_the_controller(host: Host) -> None:
    unified = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    host.own("4:memory:/app\n1:name=systemd:/app\n0::/app\n", V1_MOUNT.format(root="/"), unified)
    host.group("unified/app", {"cgroup.procs": 1})
    knob = host.v1("app", 2 * GIB, usage=GIB)
    assert host.limit() == (GIB, knob)


def test_hybrid_with_limits_in_both_takes_the_tighter(host: Host) -> None:
    unified = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    host.own("4:memory:/app\n0::/app\n", V1_MOUNT.format(root="/"), unified)
    host.v1("app", 2 * GIB)
    knob = host.v2("unified/app", GIB)
    assert host.limit() == (GIB, knob)


# What cannot be read ------------------------------------------------------------------------------


def test_a_host_without_proc_and_cgroups_has_only_the_file_system(tmp_path: Path) -> None:
    room = read_host_room(tmp_path, proc_root=tmp_path / "no", cgroup_root=tmp_path / "none")
    assert room == HostRoom(tmpfs_free_bytes=room.tmpfs_free_bytes)
    assert room.tmpfs_free_bytes is not None


@pytest.mark.parametrize(
    "text", ["", "\n", "nonsense", "0:", ":::::", "0::", "0::/a\0b", "4:memory"]
)
def test_odd_lines_of_proc_cgroup(host: Host, text: str) -> None:
    host.own(
        text, V2_MOUNT.format(root="/"), "x", "1 2 3 - cgroup2", "- -", "a b c d e f - cgroup2"
    )
    knob = host.v2("", GIB)
    assert host.limit() == (GIB, knob)


@pytest.mark.parametrize("text", ["", "lots", "-1", "1.5", "12 34", "٣", "9" * 30])
def test_an_odd_limit_is_no_limit(host: Host, text: str) -> None:
    host.own("0::/app\n", V2_MOUNT.format(root="/"))
    host.v2("app", text)
    assert host.limit() == (None, "")


def test_a_descriptor_is_as_good_as_a_path(host: Host) -> None:
    memfd = os.memfd_create("shmcache-test-room")
    try:
        room = read_host_room(memfd, proc_root=host.proc, cgroup_root=host.cgroup)
    finally:
        os.close(memfd)
    assert room.tmpfs_free_bytes is None  # the kernel's own mount has no size


def test_a_path_that_does_not_exist_is_no_bare_os_error(tmp_path: Path) -> None:
    with pytest.raises(SegmentError.HostError) as caught:
        read_host_room(tmp_path / "no")
    assert caught.value == SegmentError.HostError("statvfs", "ENOENT")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


# The host's memory, and this real host ------------------------------------------------------------


@pytest.mark.parametrize(
    ("meminfo", "free_bytes"),
    [
        ("MemTotal: 99 kB\nMemAvailable:    7 kB\nSwapFree:   3 kB\n", 10 << 10),
        ("MemAvailable: 7 kB\n", 7 << 10),
        ("SwapFree: 3 kB\n", None),
        ("MemAvailable: lots kB\n", None),
        ("", None),
    ],
)
def test_free_memory_of_the_host(host: Host, meminfo: str, free_bytes: int | None) -> None:
    (host.proc / "meminfo").write_text(meminfo)
    assert host.room().host_free_bytes == free_bytes


def test_this_host() -> None:
    room = read_host_room("/dev/shm")
    assert room.tmpfs_free_bytes is not None
    assert room.tmpfs_free_bytes >= 0
    assert room.host_free_bytes is not None
    assert room.host_free_bytes > 0
    require_room(0, room)
    with pytest.raises(SegmentError.NoSpace) as caught:
        require_room(1 << 62, room)
    assert (caught.value.available, caught.value.knob) == room.tightest()
