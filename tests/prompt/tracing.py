"""Run something in a child and kill it before its n-th system call, with ptrace.

Imported by workers of the tests: the tracer must be the thread that forks, and what it forks must
not be the test run. `n` counts from 0; the kill comes instead of the call.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_TRACE_ME, _SYSCALL, _SET_OPTIONS = 0, 24, 0x4200
_KILL_WITH_TRACER, _MARK_SYSCALLS = 0x00100000, 1
_MARKED_TRAP = signal.SIGTRAP | 0x80

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def can_trace() -> bool:
    """Whether this process may trace a child of its own."""
    try:
        killed_before(0, lambda: None)
    except OSError:
        return False
    return True


def killed_before(nth: int, work: Callable[[], object]) -> bool:
    """Whether the child was killed; False when `work` ended before it made that many calls."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _ptrace(_TRACE_ME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        raise OSError(1, "ptrace is not permitted")
    _ptrace(_SET_OPTIONS, pid, _KILL_WITH_TRACER | _MARK_SYSCALLS)
    entries, inside, number = 0, False, 0
    while True:
        _ptrace(_SYSCALL, pid, number)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the child's work failed"
            return False
        assert os.WIFSTOPPED(status), f"the child ended with {status}"
        number = os.WSTOPSIG(status)
        if number != _MARKED_TRAP:
            continue  # a signal of its own: deliver it
        number, inside = 0, not inside
        if inside:
            entries += 1
            if entries > nth:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return True
