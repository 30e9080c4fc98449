"""Ctrl-C between any two bytecodes: the books may be poisoned by it, but nobody waits for ever.

CPython serves signals when a function begins, when a loop turns and when a call has returned, but
not, for example, between taking the lock of a `with` and entering its block. A trace function
raises KeyboardInterrupt at the n-th such point that the package passes on the main thread, for
every n there is. Finalizers are left out: Python swallows what is raised in them.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import shmcache.io
from shmcache.errors import CacheIoWorkerError
from shmcache.io import CacheIoTicket, CacheIoWorker
from tests.io.tasks import Call, Log, Output, Submission, Task, Worker, key, wait_blocked
from tests.support import PATIENCE_S

PACKAGE = Path(shmcache.io.__file__).parent.parent
TRACED = (str(PACKAGE / "io"), str(PACKAGE / "states"))


AFTER = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "RESUME")) or "BACKWARD" in name
)


class Interrupt:
    """Counts the points at which this thread serves signals, and interrupts at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.done: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED) or finalizing(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.seen += self.done.get(frame) in AFTER
            self.done[frame] = frame.f_code.co_code[frame.f_lasti]
            if self.seen == self.at:
                self.at = -1
                self.done.clear()
                raise KeyboardInterrupt
        elif event in ("return", "exception"):  # a call that raises serves none
            self.done.pop(frame, None)
        return self.step


def finalizing(frame: FrameType | None) -> bool:
    while frame:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupted(life: Callable[[], None], at: int) -> bool:
    """Live that life, with an interrupt at the given point; whether it came that far."""
    before, trace = sys.gettrace(), Interrupt(at)
    sys.settrace(trace)
    try:
        life()
    except (KeyboardInterrupt, CacheIoWorkerError):
        pass
    finally:
        sys.settrace(before)
    return trace.at == -1


@pytest.fixture
def without_collector() -> Iterator[None]:
    """The same points in each round: no finalizers in between but those of the life."""
    gc.disable()
    yield
    gc.enable()


class Life:
    """A worker, and everybody who waits for something of it."""

    def __init__(self) -> None:
        self.log = Log()
        self.worker: Worker = CacheIoWorker(1, "test-io", self.log.execute, self.log.discard)
        self.gated = Task("gated", gated=True)
        self.waiting: list[Call[Any]] = []
        self.tickets: list[CacheIoTicket[Output]] = []

    def prepare(self, number: int) -> Submission:
        submission = self.worker.prepare(key(number), Task(number))
        self.tickets.append(submission.ticket)
        self.waiting.append(Call(submission.ticket.wait))
        self.waiting.append(Call(submission.ticket.wait_for_task_resources))
        return submission

    def begin(self) -> None:
        """What is not interrupted."""

    def run(self) -> None:
        """A bit of everything that one thread can do alone."""
        with self.prepare(1) as first:
            self.prepare(1).enqueue()
            first.enqueue()
        second = self.prepare(2)
        second.ticket.cancel()
        second.enqueue()
        self.worker.retire(second.ticket)
        first.ticket.wait(PATIENCE_S)
        first.ticket.wait_for_task_resources(PATIENCE_S)
        self.prepare(3).close()
        self.worker.close()

    def end(self) -> None:
        """Nobody is left waiting, and no key is left to an operation that nobody owns."""
        self.gated.open()
        for call in self.waiting:
            settled(call.result)
        for ticket in self.tickets:
            settled(partial(ticket.wait, PATIENCE_S))
            settled(partial(ticket.wait_for_task_resources, PATIENCE_S))
        for number in range(4):
            try:
                again = self.worker.prepare(key(number), Task("again"))
            except (RuntimeError, CacheIoWorkerError.Poisoned):
                break  # closed, or poisoned
            if again.joined:
                settled(partial(again.ticket.wait, PATIENCE_S))
        self.worker.close()
        assert not self.worker._thread.is_alive()


class CrowdedLife(Life):
    """The queue is full and others are blocked at it."""

    def begin(self) -> None:
        self.worker.prepare(key(0), self.gated).enqueue()
        self.gated.wait_running()
        self.prepare(1).enqueue()
        self.blocked = [self.prepare(number) for number in (2, 3)]
        self.waiting += [Call(submission.enqueue) for submission in self.blocked]
        wait_blocked(self.worker, 2)

    def run(self) -> None:
        self.blocked[0].ticket.cancel()
        self.worker.retire(self.blocked[0].ticket)
        self.tickets[0].cancel()
        self.gated.open()
        self.worker.close()


def settled(call: Callable[[], object]) -> None:
    """It returns or raises one of our errors; it does not hang."""
    try:
        call()
    except CacheIoWorkerError:
        return


@pytest.mark.parametrize("kind", [Life, CrowdedLife])
def test_an_interrupt_at_every_point(kind: type[Life], without_collector: None) -> None:
    at = 0
    reached = True
    while reached:
        at += 1
        life = kind()
        life.begin()
        reached = interrupted(life.run, at)
        life.end()
        assert sys.exc_info() == (None, None, None)  # the trace left the interpreter whole
    assert at > 50
