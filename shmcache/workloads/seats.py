"""Workers as their coordinator sees them: starting, free, at work on a request, dead, replaced.

    crew = Crew(seat_of_row, workers)
    try:
        crew.start()
        while crew.sound and ...:
            if (seat := crew.free()): crew.give(seat, request)
            for seat, answer in crew.listen(wait_s): ...
        crew.end()
    finally:
        crew.kill_all()

Why         Runs that kill their workers differ in what a request is, not in how a request is handed
            out, answered once, or found unanswered in the hands of the dead.
Contract    A worker (children.py) is told its settings as its argument, then reads requests and
            writes answers, one JSON object a line, at most one request at a time: an answer needs
            no matching, and a death costs one request. An answer is shorter than a pipe takes at
            once: a killed worker has answered, or has not.
Errors      A worker that does not start, ends by itself or does not leave is a line in
            `violations`, with its last words.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from shmcache.workloads.children import READY, ChildProcess

PATIENCE_S: Final = 60.0  # for a child to start, die or leave: reached only by a bug
PROGRESS_S: Final = 0.2  # between two looks at how far a run is

_CHUNK_BYTES: Final = 1 << 16

S = TypeVar("S", bound=msgspec.Struct)
Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class Seat(Generic[S, Q, A]):
    """A worker process, running `module` in the `row`th place of its crew, and the request it is at
    work on. Nothing here waits but `give`, for as long as the worker takes to read.
    """

    def __init__(
        self,
        module: str,
        row: int,
        settings: S,
        answer: type[A],
        *,
        inherited: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        told = msgspec.json.encode(settings).decode()
        self.row = row
        self.settings = settings
        self.child = ChildProcess(module, (told,), inherited, environment)
        self.request: Q | None = None
        self.killed = False
        self._ready = False
        self._unread = b""
        self._decoder: msgspec.json.Decoder[A] = msgspec.json.Decoder(answer)
        os.set_blocking(self.child.stdout.fileno(), False)

    @property
    def free(self) -> bool:
        """Whether it has started and has nothing to do."""
        return self.attached and self.request is None

    @property
    def attached(self) -> bool:
        """Whether it has started, and has not been killed."""
        return self._ready and not self.killed

    def give(self, request: Q) -> None:
        """Hand over a request; if the worker is dead, its death will be noticed."""
        self.request = request
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(msgspec.json.encode(request) + b"\n")
            self.child.stdin.flush()

    def answers(self) -> Iterator[A]:
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


class Heard(NamedTuple, Generic[S, Q, A]):
    """An answer, or the news that a killed worker is dead: its `request` will not be answered."""

    seat: Seat[S, Q, A]
    answer: A | None


class Crew(Generic[S, Q, A]):
    """The workers of a run (see the module). `hire(row)` starts the worker of a row."""

    def __init__(self, hire: Callable[[int], Seat[S, Q, A]], rows: int) -> None:
        self._hire = hire
        self._rows = rows
        self._selector = selectors.DefaultSelector()
        self._last_row = -1
        self.seats: list[Seat[S, Q, A]] = []
        self.violations: list[str] = []

    @property
    def sound(self) -> bool:
        """Whether nothing was violated so far."""
        return not self.violations

    def start(self, check: Callable[[], object] = lambda: None) -> None:
        """Start all and wait until they are attached; `check` is called meanwhile."""
        for row in range(self._rows):
            self.seats.append(self._seat(row))
        deadline = time.monotonic() + PATIENCE_S
        while not all(seat.attached for seat in self.seats) and self.sound:
            if time.monotonic() > deadline:
                self.violations.append(f"not all workers started within {PATIENCE_S:g} s")
            for _ in self.listen(PROGRESS_S):
                raise AssertionError("an answer without a request")
            check()

    def free(self, row: int | None = None) -> Seat[S, Q, A] | None:
        """Whoever has been free for longest, so that work goes round; or the worker of a row."""
        for step in range(1, self._rows + 1):
            at = (self._last_row + step) % self._rows
            if self.seats[at].free and row in (None, at):
                return self.seats[at]
        return None

    def give(self, seat: Seat[S, Q, A], request: Q) -> None:
        """Hand a request to a free worker."""
        self._last_row = seat.row
        seat.give(request)

    def listen(self, wait_s: float) -> Iterator[Heard[S, Q, A]]:
        """What was answered, and who died; a killed worker is replaced after its news is taken."""
        for seat in {key.data for key, _ in self._selector.select(max(wait_s, 0))}:
            died = seat.child.died(0)  # looked at before the last answers are read
            for answer in seat.answers():
                yield Heard(seat, answer)
            if died:
                yield from self._bury(seat)

    def end(self) -> None:
        """Let all leave in order; a worker that has something to say is heard.

        Contract: not when something was violated, then they are only killed.
        """
        if not self.sound:
            return
        for seat in self.seats:
            seat.child.dismiss()
        for seat in self.seats:
            if not seat.child.died(PATIENCE_S):
                self.violations.append(f"worker {seat.child.pid} did not leave")
                continue
            words = seat.child.last_words()
            if (code := seat.child.reap()) and not seat.killed:
                self.violations.append(f"worker {seat.child.pid} ended with {code}: {words}")

    def kill_all(self) -> None:
        """Leave no child behind, however the run ended."""
        for seat in self.seats:
            seat.child.kill()
        for seat in self.seats:
            seat.child.reap()
        self._selector.close()

    def _seat(self, row: int) -> Seat[S, Q, A]:
        seat = self._hire(row)
        self._selector.register(seat.child.stdout, selectors.EVENT_READ, seat)
        self._selector.register(seat.child.pidfd, selectors.EVENT_READ, seat)
        return seat

    def _bury(self, seat: Seat[S, Q, A]) -> Iterator[Heard[S, Q, Any]]:
        """Replace a killed worker; a worker that ends by itself has something to say."""
        self._selector.unregister(seat.child.stdout)
        self._selector.unregister(seat.child.pidfd)
        words = seat.child.last_words()
        code = seat.child.reap()
        if not seat.killed:
            self.violations.append(f"worker {seat.child.pid} ended with {code}: {words}")
            return
        yield Heard(seat, None)
        self.seats[seat.row] = self._seat(seat.row)
