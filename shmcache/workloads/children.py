"""The processes of a run: started afresh, killed through a pidfd, always reaped; and their counts.

Why         Workers must be strangers to each other, as in production: a new interpreter each,
            never a fork. And what ends a child must be this run's own decision, or a finding.
Contract    A child says `say_ready` when it works, and runs until `dismiss` closes its standard
            input (which also happens when the launcher dies), or until `kill`. Signals of the
            terminal do not reach it. A killed child's counts stay: all map one file.
Death       A killed launcher leaves no child, whose standard input closes, and no file: what a
            child writes to standard error, and what it counts, has no name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Final, Self

READY: Final = b"ready\n"
_WORDS_MAX: Final = 300
_COUNTER_BYTES: Final = 8


class ChildProcess:
    """One child running `python -m shmcache.workloads.MODULE ARGUMENTS`.

    It inherits no descriptor but `inherited`, under the same number, and our environment, changed
    by `environment`.
    """

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        inherited: int | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-P", "-m", f"shmcache.workloads.{module}", *arguments]
        self._errors = os.memfd_create("child-errors")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=() if inherited is None else (inherited,),
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def wait_ready(self) -> bool:
        """Whether it says that it works; False when it ended instead."""
        return self.stdout.readline() == READY

    def dismiss(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.stdin.close()

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
        self.stdout.close()
        self.dismiss()
        return code

    def last_words(self) -> str:
        """The last line that it wrote to standard error; not after `reap`."""
        written = os.pread(self._errors, os.fstat(self._errors).st_size, 0)
        lines = written.decode(errors="replace").strip().splitlines()
        return lines[-1][:_WORDS_MAX] if lines else "no message"


def when_dismissed(act: Callable[[], object]) -> None:
    """Call `act` once standard input closes: the launcher asks us to stop, or is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()


def say_ready() -> None:
    """Tell the launcher, which may not be listening, that the set-up is done."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, READY)


class Counters:
    """A table of 64-bit counts, a row per worker, which every process of a run maps.

    Concurrency: a row has one writer at a time; anybody may read. Words do not tear.
    """

    def __init__(self, rows: int, columns: int, descriptor: int | None = None) -> None:
        size = rows * columns * _COUNTER_BYTES
        self._owned = descriptor is None
        self.descriptor = os.memfd_create("counters") if descriptor is None else descriptor
        if self._owned:
            os.ftruncate(self.descriptor, size)
        self._words = memoryview(mmap.mmap(self.descriptor, size)).cast("Q")
        self.rows, self.columns = rows, columns

    def row(self, index: int) -> memoryview:
        """The counts of one worker, to be added to."""
        return self._words[index * self.columns : (index + 1) * self.columns]

    def totals(self) -> list[int]:
        """The sum of each column: all workers so far, the killed ones included."""
        return [sum(self._words[column :: self.columns]) for column in range(self.columns)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            os.close(self.descriptor)
