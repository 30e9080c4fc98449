"""What the kernel offers and Python does not: namespaces, mounts, filters of system calls.

Most of it changes the calling process for good, so it is called inside a `Worker`:

    with Worker("from tests.process import kernel", "kernel.enter_pid_namespace()") as worker:
        assert worker.call("import os; os.getpid()") == 1

Source: unshare(2), pid_namespaces(7), time_namespaces(7), seccomp(2), proc(5).
"""

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from pathlib import Path

from tests.support import process_state

NEW_MOUNTS, NEW_PIDS, NEW_TIME = 0x00020000, 0x20000000, 0x00000080

_MS_PRIVATE, _MS_REC = 1 << 18, 1 << 14
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38

# Per machine: the architecture as audit(7) names it, and numbers of system calls.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "exit": {"x86_64": 60, "aarch64": 93},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "renameat2": {"x86_64": 316, "aarch64": 276},
    "statx": {"x86_64": 332, "aarch64": 291},
    "pidfd_open": {"x86_64": 434, "aarch64": 434},
    "openat2": {"x86_64": 437, "aarch64": 437},
    "futex_waitv": {"x86_64": 449, "aarch64": 449},
}
_MACHINE = platform.machine()

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


# ---- namespaces --------------------------------------------------------------------------------


@functools.cache
def can_unshare(*flags: int) -> bool:
    """Whether this user may make such namespaces here."""
    child = os.fork()
    if child == 0:
        try:
            for flag in flags:
                _call("unshare", flag)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def enter_mount_namespace() -> None:
    """Mounts made from here on are seen by this process and its children only."""
    _call("unshare", NEW_MOUNTS)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def mount(kind: str, path: str, options: str = "") -> None:
    """Mount a file system of this kind over `path`."""
    _call("mount", kind.encode(), path.encode(), kind.encode(), 0, options.encode())


def enter_pid_namespace() -> None:
    """Go on as process 1 of a new pid namespace with its own /proc; the old process waits."""
    enter_mount_namespace()
    _call("unshare", NEW_PIDS)
    _go_on_as_child()
    mount("proc", "/proc")


def enter_time_namespace(ahead_s: int) -> None:
    """Go on in a child whose monotonic and boot clocks are ahead; the old process waits."""
    _call("unshare", NEW_TIME)
    offsets = f"monotonic {ahead_s} 0\nboottime {ahead_s} 0\n"
    Path("/proc/self/timens_offsets").write_text(offsets)
    _go_on_as_child()


def _go_on_as_child() -> None:
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def fork_with_pid(pid: int) -> int:
    """`os.fork` whose child gets this free pid; alone in a pid namespace, or lucky."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    return os.fork()


# ---- what a process may ask --------------------------------------------------------------------


def refuse_calls(number: int, *names: str) -> None:
    """From here on these system calls of this process answer with that errno."""
    nr_at, arch_at = 0, 4  # offsets in struct seccomp_data
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | number
    program = [
        (load, 0, 0, arch_at),
        (jump_if_equal, 1, 0, _ARCHITECTURES[_MACHINE]),
        (give, 0, 0, allow),
        (load, 0, 0, nr_at),
    ]
    for name in names:
        program += [(jump_if_equal, 0, 1, _CALLS[name][_MACHINE]), (give, 0, 0, refuse)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header), 0, 0)


def can_refuse_calls() -> bool:
    """Whether `refuse_calls` knows this machine."""
    return sys.platform == "linux" and _MACHINE in _ARCHITECTURES


def hide_processes() -> None:
    """Cover /proc by an empty directory: nothing can be read about any process."""
    enter_mount_namespace()
    mount("tmpfs", "/proc")


def end_this_thread() -> None:
    """End the calling thread only, without a word to Python; the process goes on."""
    _libc.syscall(_CALLS["exit"][_MACHINE], 0)


# ---- looking at others -------------------------------------------------------------------------


def waits_in_futex(pid: int) -> bool:
    """Whether the process's leader sleeps on a lock or a counter in shared memory."""
    channel = Path(f"/proc/{pid}/wchan").read_text()
    return "futex" in channel or (channel == "0" and process_state(pid) == "S")


def trace(pid: int) -> None:
    """Stop another process as a debugger does; it stays so until `untrace` or our end."""
    _call("ptrace", 16, pid, None, None)
    os.waitpid(pid, 0)


def untrace(pid: int) -> None:
    """Let go of a traced process."""
    _call("ptrace", 17, pid, None, None)


ERRNO_REFUSED, ERRNO_UNKNOWN_CALL = errno.EPERM, errno.ENOSYS
