"""Checks of namespaces, /proc and logins: what keeps processes of one pool apart."""

from __future__ import annotations

import configparser
import re
from typing import Final

from shmcache.doctor.host import CheckStatus, Host, Verdict

_ONE_NAMESPACE: Final = "share it between all workers: --pid=container:NAME, shareProcessNamespace"
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # of every kernel
_SYSTEM_UID_MAX: Final = 999  # what systemd takes for system users
# As logind reads them, the later ones first.
_LOGIND: Final = (
    "etc/systemd/logind.conf.d",
    "run/systemd/logind.conf.d",
    "usr/lib/systemd/logind.conf.d",
)

_OK, _NOTE, _WARN, _FAIL = CheckStatus


def pid_namespace(host: Host) -> Verdict:
    """A pool's processes are known by their pids, which mean something in one namespace only."""
    mine, childs = host.link("proc/self/ns/pid"), host.link("proc/self/ns/pid_for_children")
    if mine != childs and childs is not None:
        found = "children of this process are in another PID namespace"
        return Verdict(_FAIL, found, "fork once more before you attach (unshare --fork)")
    if mine not in (None, _FIRST_PID_NAMESPACE):
        return Verdict(_NOTE, f"one of a container, {mine}", _ONE_NAMESPACE)
    return Verdict(_OK, mine or "not known")


def time_namespace(host: Host) -> Verdict:
    """Start times are compared, so all must count from the same moment."""
    mine, childs = host.link("proc/self/ns/time"), host.link("proc/self/ns/time_for_children")
    if mine != childs and childs is not None:
        found = "children of this process are in another time namespace"
        return Verdict(_FAIL, found, "fork once more before you attach (unshare --fork)")
    offsets = re.findall(r"-?[0-9]+", host.read("proc/self/timens_offsets"))
    if any(int(offset) for offset in offsets):
        return Verdict(_NOTE, f"one with offsets, {mine}", "all workers must be in this one")
    return Verdict(_OK, mine or "this kernel has none")


def proc(host: Host) -> Verdict:
    """What is read there: this host's boot, and the stat and maps of owners."""
    mount = host.mount_of("/proc")
    if not host.status:
        return Verdict(_FAIL, "/proc cannot be read", "mount it: mount -t proc proc /proc")
    if not host.read("proc/sys/kernel/random/boot_id"):
        advice = "mount /proc without subset=pid: pools compare the id of the boot"
        return Verdict(_FAIL, "/proc has no boot_id", advice)
    if host.link("proc/self") not in (None, str(host.pid)):
        advice = "mount the /proc of this PID namespace: mount -t proc proc /proc"
        return Verdict(_FAIL, "/proc belongs to another PID namespace", advice)
    hidden = (mount.option("hidepid") if mount else None) or "0"
    if hidden not in ("0", "off"):
        found = f"/proc is mounted with hidepid={hidden}"
        if host.uid == 0:
            return Verdict(_OK, f"{found}, not for root")
        advice = "with --mode 660 owners of other users stay unknown: use gid= or hidepid=0"
        return Verdict(_WARN, found, advice)
    if not host.trials.proc_owned:
        advice = "without setuid, setgid and file capabilities others can see that it executes"
        return Verdict(_WARN, "this process is not dumpable: /proc/self is root's", advice)
    return Verdict(_OK, "readable")


def remove_ipc(host: Host) -> Verdict:
    """logind deletes a user's files in /dev/shm when their last session ends."""
    if not host.path("run/systemd/system").is_dir():
        return Verdict(_OK, "no systemd here")
    if host.uid <= _SYSTEM_UID_MAX:
        return Verdict(_OK, f"user {host.uid} is a system user, whose files stay")
    if not _removes_ipc(host):
        return Verdict(_OK, "RemoveIPC=no")
    advice = "RemoveIPC=no in /etc/systemd/logind.conf, or run workers as a system user"
    return Verdict(_WARN, "RemoveIPC=yes: pools go with the last login", advice)


def _removes_ipc(host: Host) -> bool:
    """The setting: of the drop-ins the last by name, before the main file; yes without any."""
    dropins: dict[str, str] = {}
    for folder in _LOGIND:
        for file in host.path(folder).glob("*.conf"):
            dropins.setdefault(file.name, f"{folder}/{file.name}")
    texts = [host.read(dropins[name]) for name in sorted(dropins, reverse=True)]
    for text in (*texts, host.read("etc/systemd/logind.conf")):
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        try:
            parser.read_string(text)
            setting = parser.get("Login", "RemoveIPC", fallback=None)
        except configparser.Error:
            continue
        if setting is not None:
            return setting.lower() not in ("no", "false", "off", "0", "n", "f")
    return True
