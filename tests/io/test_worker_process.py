"""I11 and forks in real processes: the interpreter ends, children do not hang, nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support import PATIENCE_S, ROOT

PRELUDE = """
import atexit, gc, os, signal, sys, threading, time
from shmcache import CacheBlockId, CacheRepresentation
from shmcache.errors import CacheIoWorkerError
from shmcache.io import CacheIoWorker
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind

def key(number):
    id = CacheBlockId(session_id=9, global_layer=number, start=0, end=16,
                      representation=CacheRepresentation.KEY_VALUE)
    return CacheIoOperationKey(21, id, CacheIoOperationKind.WRITE)

def say(text):
    os.write(1, f"{text}\\n".encode())

def run(task):
    return task()

def gated(name):
    def task():
        running.set()
        gate.wait()
        say(name)
        return name
    return task

running, gate = threading.Event(), threading.Event()
worker = CacheIoWorker(4, "test-io", run, lambda output: say(f"discarded {output}"))

def enqueue(number, task):
    submission = worker.prepare(key(number), task)
    submission.enqueue()
    return submission.ticket

def await_main_thread_in(name):
    frame = None
    while frame is None:
        time.sleep(0.001)
        frame = sys._current_frames().get(threading.main_thread().ident)
        while frame and frame.f_code.co_qualname != name:
            frame = frame.f_back

def say_when_blocked():
    await_main_thread_in("Gate.wait")
    say("blocked")
"""


def start(code: str) -> subprocess.Popen[str]:
    """A Python process of its own that runs the prelude and `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def end(process: subprocess.Popen[str], code: int = 0) -> list[str]:
    """The lines it said, once it has ended by itself."""
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    if not code:
        assert errors == ""
    return out.splitlines()


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "del worker",
        "del worker; gc.collect()",
        "sys.exit(0)",
        "worker.itself = worker; del worker",
        "atexit.register(worker.close)",
        "worker.close(); worker.close()",
        # It outlives the main thread, and ends before the worker does.
        "threading.Thread(target=lambda: (threading.main_thread().join(), enqueue(5, int).wait()))"
        ".start()",
    ],
)
def test_i11_the_interpreter_ends(ending: str) -> None:
    """Idle or with a result that nobody asked for."""
    said = end(start(f"enqueue(1, lambda: say('ran')).wait(); enqueue(2, int)\n{ending}"))
    assert said[0] == "ran"


@pytest.mark.parametrize("ending", ["", "del worker, submission", "raise SystemExit"])
def test_i11_what_was_admitted_is_still_executed(ending: str) -> None:
    code = f"""
        for number in range(3):
            submission = worker.prepare(key(number), gated(number))
            submission.enqueue()
        running.wait()
        atexit.register(gate.set)
        {ending}
    """
    assert end(start(code)) == ["0", "1", "2"]


def test_i11_an_exit_with_submitters_and_waiters_that_are_blocked() -> None:
    code = """
        ticket = enqueue(0, gated("ran"))
        running.wait()
        for number in range(1, 5):
            enqueue(number, int)
        blocked = worker.prepare(key(9), int)
        for call in (blocked.enqueue, ticket.wait, ticket.wait_for_task_resources):
            threading.Thread(target=call, daemon=True).start()
        while not worker._engine._blocked:
            time.sleep(0.001)
        atexit.register(gate.set)
    """
    assert end(start(code)) == ["ran"]


def test_i11_an_unhandled_error_ends_it_too() -> None:
    assert end(start("enqueue(1, lambda: say('ran'))\nraise ValueError"), 1) == ["ran"]


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, once it says that its main thread is blocked."""
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("call", ["ticket.wait()", "blocked.enqueue()", "worker.close()"])
def test_ctrl_c_reaches_every_blocked_call(call: str) -> None:
    """The wait is a real one, and still a signal's handler runs in it."""
    code = f"""
        ticket = enqueue(0, gated("ran"))
        running.wait()
        for number in range(1, 5):
            enqueue(number, int)
        blocked = worker.prepare(key(9), int)
        joiner = worker.prepare(key(9), int)
        threading.Thread(target=say_when_blocked).start()
        try:
            {call}
        except KeyboardInterrupt:
            say("interrupted")
        gate.set()
        blocked.close()
        try:
            joiner.ticket.wait()
        except CacheIoWorkerError.Cancelled:
            say("abandoned")
    """
    process = start(code)
    interrupt(process)
    assert sorted(end(process)) == ["abandoned", "interrupted", "ran"]


def test_i11_an_interrupted_close_is_made_up_for_at_exit() -> None:
    """The task ends only when the main thread is in the exit hook, waiting for it."""
    code = """
        def task():
            say_when_blocked()
            await_main_thread_in("_stop_all")
            say("ran")

        enqueue(0, task)
        try:
            worker.close()
        except KeyboardInterrupt:
            say("interrupted")
    """
    process = start(code)
    interrupt(process)
    assert end(process) == ["interrupted", "ran"]


FORK = """
    ticket = enqueue(0, gated("ran"))
    running.wait()
    queued, prepared = enqueue(1, int), worker.prepare(key(2), int)
    joiner = worker.prepare(key(0), int)
    done = worker.prepare(key(3), int)
    done.ticket.cancel()

    def refused(call, *arguments):
        try:
            call(*arguments)
        except RuntimeError as error:
            assert "parent" in str(error), error
            return True

    def child():
        tried = [
            refused(worker.prepare, key(7), int),
            refused(worker.retire, ticket),
            refused(prepared.enqueue),
            refused(joiner.enqueue),
            refused(ticket.wait),
            refused(ticket.wait, 5),
            refused(next, ticket.__await__()),
            refused(ticket.cancel),
            refused(queued.wait_for_task_resources),
        ]
        assert all(tried), tried
        try:
            done.ticket.wait()
        except CacheIoWorkerError.Cancelled:
            say("child: known results are readable")
        worker.close()
        prepared.close()
        joiner.close()
        own = CacheIoWorker(1, "own", run, print)
        submission = own.prepare(key(1), lambda: say("child: own worker"))
        submission.enqueue()
        submission.ticket.wait()
"""
FORKED = """
    if not (pid := os.fork()):
        try:
            child()
        except BaseException as error:
            say(f"child: {error!r}")
        finally:
            del worker, prepared, joiner, ticket
            gc.collect()
            sys.exit(7)
    _, status = os.waitpid(pid, 0)
    say(f"child ended with {os.waitstatus_to_exitcode(status)}")
    gate.set()
    prepared.enqueue()
    assert ticket.wait() == "ran" and queued.wait() == 0 and prepared.ticket.wait() == 0
"""
CHILD_SAID = ["child: known results are readable", "child: own worker", "child ended with 7"]


def test_a_forked_child_neither_hangs_nor_takes_part() -> None:
    assert end(start(FORK + FORKED)) == [*CHILD_SAID, "ran"]


def test_a_child_forked_while_the_lock_was_held() -> None:
    """By a thread that the child does not have: its copy of the lock will never be free."""
    code = """
        held, let_go = threading.Event(), threading.Event()

        def hold():
            with worker._engine._lock:
                held.set()
                let_go.wait()

        threading.Thread(target=hold).start()
        held.wait()
    """
    parent = FORKED.replace("gate.set()", "let_go.set(); gate.set()")
    assert end(start(FORK + textwrap.indent(textwrap.dedent(code), "    ") + parent)) == [
        *CHILD_SAID,
        "ran",
    ]


def test_a_task_that_forks() -> None:
    """In the child only the worker's thread exists; it ends when the task returns."""
    code = """
        def fork():
            if pid := os.fork():
                _, status = os.waitpid(pid, 0)
                return os.waitstatus_to_exitcode(status)
            return None

        assert enqueue(0, fork).wait() == 0
        assert enqueue(1, int).wait() == 0
        say("parent goes on")
    """
    assert end(start(code)) == ["parent goes on"]


def test_children_of_multiprocessing() -> None:
    code = """
        import multiprocessing
        ticket = enqueue(0, gated("ran"))
        running.wait()
        processes = [multiprocessing.get_context("fork").Process(target=gc.collect) for _ in "ab"]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        say([process.exitcode for process in processes])
        gate.set()
    """
    assert end(start(code)) == ["[0, 0]", "ran"]
