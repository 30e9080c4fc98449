"""A forked process that does what it is told with one pool: cheap enough for hypothesis to kill.

The test forks it, sends one JSON line per order and reads one per answer. It attaches by itself, as
an independent worker would; nothing of the parent's pool is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from typing import Any

import shmcache as sc

ANSWER_SECONDS = 30


class Agent:
    """The parent's end."""

    def __init__(self, name: str) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._unread = b""
        self.stopped = False
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            os.close(self._answers)
            _serve(name, orders, answers)
        os.close(orders)
        os.close(answers)

    def __call__(self, order: str, *arguments: Any) -> Any:
        """Give an order and wait for what it returned, or for the name of what it raised."""
        os.write(self._orders, json.dumps([order, *arguments]).encode() + b"\n")
        while b"\n" not in self._unread:
            assert select.select([self._answers], [], [], ANSWER_SECONDS)[0], f"no answer: {order}"
            got = os.read(self._answers, 65536)
            assert got, f"the agent died of {order}"
            self._unread += got
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Stop or continue it."""
        os.kill(self.pid, number)
        self.stopped = number == signal.SIGSTOP

    def kill(self, *, reap: bool) -> None:
        """SIGKILL it, wait until it is dead, and leave a zombie unless told to reap."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if reap:
            self.close()

    def close(self) -> None:
        """Reap it, whatever its state, and give its descriptors back; once."""
        if self._orders < 0:
            return
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._orders)
        os.close(self._answers)
        self._orders = self._answers = -1


def _serve(name: str, orders: int, answers: int) -> None:
    """The child's end; never returns."""
    try:
        hands = _Hands(sc.CacheResidencyPool.attach(name))
        with os.fdopen(orders) as lines:
            for line in lines:
                order, *arguments = json.loads(line)
                try:
                    answer = getattr(hands, order)(*arguments)
                except (sc.CachePoolError, sc.SegmentError) as error:
                    answer = type(error).__name__
                os.write(answers, json.dumps(answer).encode() + b"\n")
    except BaseException as error:  # noqa: BLE001 - the process ends in the next line
        sys.stderr.write(f"agent: {error!r}\n")
    finally:
        os._exit(1)


class _Hands:
    """What an agent can do; tokens stay here, the test names them by a number."""

    def __init__(self, pool: sc.CacheResidencyPool) -> None:
        self._pool = pool
        self._tokens: dict[int, Any] = {}

    def register(self, key: int, manager: int) -> str:
        self._tokens[key] = self._pool.register_manager(manager)
        return "ok"

    def update(self, manager: int, axes: list[int]) -> list[int]:
        return _axes(self._pool.update_manager(manager, sc.CachePoolUsage(*axes)))

    def reserve(self, key: int, axes: list[int]) -> str:
        self._tokens[key] = self._pool.reserve(sc.CachePoolUsage(*axes))
        return "ok"

    def publish_and_release(self, manager: int, axes: list[int], key: int) -> list[int]:
        usage = sc.CachePoolUsage(*axes)
        return _axes(self._pool.publish_and_release(manager, usage, self._tokens.pop(key)))

    def release(self, key: int) -> str:
        self._tokens.pop(key).release()
        return "ok"

    def drop(self, key: int) -> str:
        del self._tokens[key]
        return "ok"

    def sweep(self) -> int:
        return len(self._pool.sweep())

    def fork(self, axes: list[int]) -> int:
        """A child releases every inherited token (inert) and uses the pool as itself."""
        pid = os.fork()
        if pid == 0:
            for token in self._tokens.values():
                token.release()
            try:
                self._pool.reserve(sc.CachePoolUsage(*axes)).release()
            except sc.CachePoolError.BudgetExceeded:
                os._exit(3)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _axes(usage: sc.CachePoolUsage) -> list[int]:
    return [
        usage.device_bytes,
        usage.host_bytes,
        usage.transfer_in_flight_bytes,
        usage.disk_bytes,
    ]
