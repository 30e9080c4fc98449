"""Checks of what is in /dev/shm, and of who may put something there."""

from __future__ import annotations

import os
import stat
from typing import Final

from shmcache import bounds
from shmcache.doctor.host import SHM, CheckStatus, Host, Verdict
from shmcache.errors import size_text

_LEFTOVER_PREFIX: Final = ".shmcache-new."
_SHOWN: Final = 3  # names in a finding

_OK, _NOTE, _WARN, _FAIL = CheckStatus


def shm_permissions(host: Host) -> Verdict:
    """Everybody may make files there, and only their owner remove them."""
    path = host.path(SHM)
    try:
        status = path.stat()
    except OSError as error:
        return Verdict(_FAIL, f"{SHM}: {error.strerror}", "mount a tmpfs there, with mode=1777")
    mode = stat.S_IMODE(status.st_mode)
    found = f"mode {mode:o}, of user {status.st_uid}"
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return Verdict(_FAIL, f"{found}, not writable for user {host.uid}", f"chmod 1777 {SHM}")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        found += ": whoever writes there may remove a pool's name"
        return Verdict(_NOTE, found, f"chmod 1777 {SHM}, unless all are one user's (emptyDir)")
    return Verdict(_OK, f"{found}; files of pools have the mode they were made with, not the umask")


def segments(host: Host) -> Verdict:
    """Files with a pool's name, usable or not."""
    sights = host.trials.segments
    poisoned = [sight.name for sight in sights if sight.state == "poisoned"]
    if poisoned:
        advice = "shmcache verify NAME, then shmcache destroy --force NAME and create"
        return Verdict(_FAIL, f"poisoned: {_names(poisoned)}", advice)
    refused = [sight for sight in sights if sight.state in ("refused", "foreign", "retired")]
    if refused:
        said = _names([f"{one.name} ({one.check or one.state})" for one in refused])
        advice = "shmcache list says why; create replaces leftovers of this user"
        return Verdict(_WARN, f"not usable here: {said}", advice)
    dead = [sight.name for sight in sights if sight.dead_owners]
    if dead:
        advice = "shmcache reclaim NAME; run shmcache supervise NAME"
        return Verdict(_NOTE, f"dead processes hold something of: {_names(dead)}", advice)
    return Verdict(_OK, f"usable pools: {len(sights)}")


def leftovers(host: Host) -> Verdict:
    """Files of creators: of one at work, or of one that was killed."""
    found = [path.name for path in host.path(SHM).glob(f"{_LEFTOVER_PREFIX}*")]
    if not found:
        return Verdict(_OK, "no pool in the making")
    advice = "the next create removes what its creator has left"
    return Verdict(_NOTE, f"{len(found)} in the making, or left half-made", advice)


def strangers(host: Host) -> Verdict:
    """What other programs keep in /dev/shm: it is room that pools do not have."""
    sizes = {}
    for entry in _entries(host):
        if not entry.name.startswith((bounds.SEGMENT_PREFIX, _LEFTOVER_PREFIX)):
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_blocks * 512
    total = sum(sizes.values())
    if not sizes:
        return Verdict(_OK, "nothing of other programs")
    found = f"{size_text(total)} in files of other programs"
    if host.shm is None or total < host.shm.size_bytes // 10:
        return Verdict(_OK, found)
    largest = sorted(sizes, key=lambda name: -sizes[name])
    return Verdict(_WARN, f"{found}: {_names(largest)}", "see who made them, and remove them")


def _entries(host: Host) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(host.path(SHM)) as entries:
            return [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN]) + more
    return "".join(c if c.isprintable() else "?" for c in shown)
