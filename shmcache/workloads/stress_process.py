"""A child process of a stress run: started afresh, killed through its pidfd, always reaped.

Why         Workers must be strangers to each other, as in production: a new interpreter each,
            never a fork. And what ends a child must be this run's own decision, or a finding.
Contract    A child runs until `dismiss` closes its standard input (which also happens when the
            launcher dies), or until `kill`. Signals of the terminal do not reach it.
Death       A killed launcher leaves no child, whose standard input closes, and no file: what a
            child writes to standard error has no name.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from shmcache.workloads.stress_worker import READY

_WORDS_MAX = 300


class StressProcess:
    """One child running `python -m shmcache.workloads.MODULE ARGUMENTS`.

    It inherits no descriptor but `inherited`, under the same number.
    """

    def __init__(self, module: str, arguments: tuple[str, ...], inherited: int | None) -> None:
        command = [sys.executable, "-P", "-m", f"shmcache.workloads.{module}", *arguments]
        self._errors = os.memfd_create("stress-errors")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=() if inherited is None else (inherited,),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def wait_ready(self) -> bool:
        """Whether it says that it works; False when it ended instead."""
        assert self._process.stdout is not None
        return self._process.stdout.readline() == READY

    def dismiss(self) -> None:
        """Ask it to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """SIGKILL; a process that has just ended by itself is left alone."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def died(self, limit_s: float) -> bool:
        """Whether the kernel reports its death within the limit."""
        return bool(select.select([self.pidfd], [], [], limit_s)[0])

    def reap(self) -> int:
        """Wait for its end, free what it cost, and return the code as `subprocess` has it."""
        code = self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            os.close(self._errors)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def last_words(self) -> str:
        """The last line that it wrote to standard error; not after `reap`."""
        written = os.pread(self._errors, os.fstat(self._errors).st_size, 0)
        lines = written.decode(errors="replace").strip().splitlines()
        return lines[-1][:_WORDS_MAX] if lines else "no message"
