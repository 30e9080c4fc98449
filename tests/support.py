"""What tests share: independent worker processes, and waiting for a condition.

`Worker` is an ordinary Python process that shares nothing with the test but two pipes. The test
tells it what to run, one named step at a time, and may stop, continue or kill it at any moment:

    def attach(name):
        global pool
        pool = shmcache.CacheResidencyPool.attach(name)

    with Worker("import shmcache", attach) as worker:
        worker.call("attach(name)", name=pool_name)     # returns when done
        worker.begin("pool.reserve(usage, timeout=60)") # does not wait
        worker.stop()                                   # SIGSTOP, returns when it has stopped
        worker.cont()
        worker.finish()                                 # waits for what `begin` began
        worker.kill()                                   # SIGKILL, returns when it is dead

Code that runs in the worker may announce points inside a step with `tell("half-way")`; the test
waits for them with `worker.expect("half-way")`. Answers are JSON (`repr` where JSON cannot), never
pickle: a test must not depend on classes of the process it may have to kill.
"""

import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
SHM = Path("/dev/shm")
PATIENCE_S = 60.0  # for anything that must happen; reached only by a bug
POLL_S = 0.005


def wait_until(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Poll `condition` until it is true; fail naming `what` after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(POLL_S)


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat (R, S, D, T, Z, ...); "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class WorkerError(Exception):
    """An exception raised inside a worker: `kind` is its qualified name, `text` its message."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class WorkerDied(Exception):
    """The worker ended while an answer was expected; `code` as in `subprocess` (-9: SIGKILL)."""

    def __init__(self, code: int) -> None:
        super().__init__(f"worker ended with {code}")
        self.code = code


class Worker:
    """One independent process; see the module's text. `code`: sources, or functions to define.

    Functions are sent as source, so they may use only names that the worker has.
    Death: leaving the `with` block kills the worker and every process of its session.
    """

    def __init__(
        self, *code: str | Callable[..., object], env: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._answers = self._process.stdout.fileno()
        self._unread = b""
        self.pid = self._process.pid
        self._death = os.pidfd_open(self.pid)
        try:
            for part in code:
                self.call(
                    textwrap.dedent(part if isinstance(part, str) else inspect.getsource(part))
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self, name: str) -> Any:
        """Run the worker's function `name` without arguments and return its answer."""
        return self.call(f"{name}()")

    def call(self, code: str, *, limit_s: float = PATIENCE_S, **names: object) -> Any:
        """Run an expression (returns its value) or statements; `names` become globals there."""
        self.begin(code, **names)
        return self.finish(limit_s=limit_s)

    def begin(self, code: str, **names: object) -> None:
        """Start `code` without waiting; `finish` or `kill` must follow."""
        line = json.dumps({"code": code, "names": names}).encode() + b"\n"
        try:
            self._requests.write(line)
            self._requests.flush()
        except BrokenPipeError:
            raise WorkerDied(self._process.wait(PATIENCE_S)) from None

    def answered(self) -> bool:
        """Whether `finish` would find an answer now."""
        return bool(select.select([self._answers], [], [], 0)[0])

    def finish(self, *, limit_s: float = PATIENCE_S) -> Any:
        """Wait for what `begin` started; its value, or `WorkerError` with what it raised."""
        answer = self._answer(limit_s)
        assert "told" not in answer, f"the worker told {answer['told']!r}; `expect` it first"
        if "raised" in answer:
            raise WorkerError(answer["raised"], answer["text"])
        return answer["value"]

    def expect(self, name: str, *, limit_s: float = PATIENCE_S) -> Any:
        """Wait until the running code calls `tell(name, value=None)`; returns the value."""
        answer = self._answer(limit_s)
        assert answer.get("told") == name, f"expected to be told {name!r}, got {answer}"
        return answer["value"]

    def stop(self) -> None:
        """SIGSTOP; returns when the kernel shows the process as stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(self.pid) in "Tt", f"worker {self.pid} stops")

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal that ends it, wait for the end, and return the exit code."""
        self._process.send_signal(number)
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """Kill the worker and its session; idempotent."""
        # The group outlives its leader, but may be used as an address only while it has members.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._death >= 0:
            os.close(self._death)
            self._death = -1

    def _answer(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            assert left > 0, f"worker {self.pid} gave no answer within {limit_s:g} s"
            # End of file is no proof of death (a forked child holds the pipe open); the pidfd is.
            ready, _, _ = select.select([self._answers, self._death], [], [], left)
            if self._answers in ready and (more := os.read(self._answers, 1 << 16)):
                self._unread += more
            elif ready:
                raise WorkerDied(self._process.wait(PATIENCE_S))
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


# Runs in the worker. The protocol has descriptors of its own, so that what `print` or C code writes
# to 1 reaches the test's log.
_LOOP = """
import ast, json, os, sys, traceback

_requests = os.fdopen(os.dup(0), "rb")
_answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)

def _send(**answer):
    line = json.dumps(answer, default=repr).encode() + b"\\n"
    while line:
        line = line[os.write(_answers, line):]

def tell(name, value=None):
    _send(told=name, value=value)

def _run(code):
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<step>", "exec"), globals())
    if last is not None:
        return eval(compile(ast.Expression(last.value), "<step>", "eval"), globals())

for _line in _requests:
    _request = json.loads(_line)
    globals().update(_request["names"])
    try:
        _value = _run(_request["code"])
    except BaseException as error:
        traceback.print_exc()
        _send(raised=type(error).__qualname__, text=str(error))
    else:
        _send(value=_value)
    _value = None
"""
