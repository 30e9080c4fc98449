"""The worker of tests/support.py does what tests rely on: answers, errors, points, death."""

import os
import signal
from pathlib import Path

import pytest

from tests.support import Worker, WorkerDied, WorkerError, process_state, wait_until


def _double(value: int) -> int:
    return value * 2


def test_answers_expressions_statements_and_functions() -> None:
    with Worker("import os", _double) as worker:
        assert worker.call("os.getpid()") == worker.pid
        assert worker.call("x = 20\nx += 1") is None
        assert worker.call("x = _double(y)\nx", y=21) == 42
        assert worker.call("{'bytes': b'1'}") == {"bytes": "b'1'"}
        assert worker.call("print('to the log'); 'é' * 300_000") == "é" * 300_000


def test_raises_what_was_raised_there() -> None:
    with Worker("class Outer:\n class Inner(Exception): pass") as worker:
        with pytest.raises(WorkerError) as caught:
            worker.call("raise Outer.Inner('why')")
        assert (caught.value.kind, caught.value.text) == ("Outer.Inner", "why")
        assert worker.call("1") == 1


def test_points_inside_a_step() -> None:
    with Worker("import sys") as worker:
        worker.begin("tell('one', 1); tell('two'); 3")
        assert worker.expect("one") == 1
        assert worker.expect("two") is None
        assert worker.finish() == 3


def test_death_is_noticed_even_if_a_forked_child_holds_the_pipe() -> None:
    with Worker("import os, signal") as worker:
        worker.begin("if os.fork():\n os.kill(os.getpid(), 9)\nelse:\n signal.pause()")
        with pytest.raises(WorkerDied) as caught:
            worker.finish()
        assert caught.value.code == -signal.SIGKILL


def test_stop_continue_and_kill() -> None:
    with Worker("import signal") as worker:
        worker.stop()
        assert process_state(worker.pid) == "T"
        worker.cont()
        assert worker.call("1 + 1") == 2
        worker.begin("signal.pause()")
        assert worker.kill() == -signal.SIGKILL
        with pytest.raises(WorkerDied):
            worker.call("1")


def test_closing_kills_the_whole_session(tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    with Worker("import os, signal") as worker:
        code = "if not os.fork():\n open(path, 'w').write(str(os.getpid()))\n signal.pause()"
        worker.call(code, path=str(note))
        wait_until(lambda: note.exists() and note.read_text(), "grandchild starts")
        grandchild = int(note.read_text())
        os.kill(grandchild, 0)
    wait_until(lambda: process_state(grandchild) in ("", "Z"), "grandchild dies")
