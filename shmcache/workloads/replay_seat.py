"""One worker of a replay as its coordinator sees it: starting, free, at work on a request, dead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from shmcache.workloads.children import READY, ChildProcess
from shmcache.workloads.replay_worker import WorkerAnswer, WorkerRequest, WorkerSettings

PATIENCE_S: Final = 60.0  # for a child to die or leave: reached only by a bug

_CHUNK_BYTES: Final = 1 << 16


class Seat:
    """A worker process and the request it is at work on.

    Contract: at most one request at a time, so that an answer needs no matching, and a death costs
    one request. Nothing here waits but `give`, for as long as the worker takes to read.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        told = msgspec.json.encode(settings).decode()
        self.settings = settings
        self.child = ChildProcess("replay_worker", (told,), settings.counters)
        self.request: WorkerRequest | None = None
        self.killed = False
        self._ready = False
        self._unread = b""
        self._decoder = msgspec.json.Decoder(WorkerAnswer)
        os.set_blocking(self.child.stdout.fileno(), False)

    @property
    def free(self) -> bool:
        """Whether it has started and has nothing to do."""
        return self._ready and self.request is None and not self.killed

    @property
    def attached(self) -> bool:
        """Whether it has started, and has not been killed."""
        return self._ready and not self.killed

    def give(self, request: WorkerRequest) -> None:
        """Hand over a request; if the worker is dead, its death will be noticed."""
        self.request = request
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(msgspec.json.encode(request) + b"\n")
            self.child.stdin.flush()

    def answers(self) -> Iterator[WorkerAnswer]:
        """What it has answered since the last look; the request is no longer its own.

        After its death this is all that it ever said.
        """
        while chunk := self._chunk():
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            for line in lines:
                if line + b"\n" == READY:
                    self._ready = True
                else:
                    self.request = None
                    yield self._decoder.decode(line)

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        self.child.kill()

    def _chunk(self) -> bytes:
        try:
            return os.read(self.child.stdout.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return b""
