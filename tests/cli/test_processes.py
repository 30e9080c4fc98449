"""The command as a process: signals, pipes that close, terminals, exit codes the shell sees."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from shmcache import CachePoolLimits, CacheResidencyPool, segment_names, segment_path
from shmcache.pool import supervisor
from tests.pool.raw import Segment
from tests.support import PATIENCE_S, ROOT, Worker, wait_until

COMMAND = (sys.executable, "-m", "shmcache.cli.main")
LIMITS = CachePoolLimits(100, 100, 100, 100)


@pytest.fixture
def pool(pool_name: str) -> str:
    CacheResidencyPool.create(pool_name, LIMITS).close()
    return pool_name


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )


class Running:
    """A command that runs until it is told to stop; its lines are read one by one."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._unread = b""

    def line(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "no line"
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, "the command has ended"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def event(self) -> Any:
        return json.loads(self.line())

    def end(self, number: int = 0) -> tuple[int, str]:
        """Send a signal if one is given; (exit code, what is on stderr)."""
        if number:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors.decode()


@contextmanager
def running(*args: str) -> Iterator[Running]:
    command = Running(*args)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.communicate()


@contextmanager
def attached(name: str) -> Iterator[Worker]:
    """An owner that has reserved 5 device bytes."""
    with Worker("import shmcache as sc") as worker:
        worker.call(
            "pool = sc.CacheResidencyPool.attach(name)\n"
            "token = pool.reserve(sc.CachePoolUsage(device_bytes=5))",
            name=name,
        )
        yield worker


def is_gone(observer: CacheResidencyPool, worker: Worker) -> bool:
    return worker.pid not in {owner.pid for owner in observer.owners()}


# ---- exit codes and pipes ----------------------------------------------------------------------


def test_exit_codes_and_streams(pool: str) -> None:
    done = run("report", pool)
    assert (done.returncode, done.stderr) == (0, "")
    refused = run("report", f"{pool}-gone")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert len(refused.stderr.splitlines()) == 2
    wrong = run("report")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_the_installed_command_is_this_one() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("shmcache"), "--version"], capture_output=True, text=True
    )
    assert found.stdout.startswith("shmcache, version ")


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
@pytest.mark.parametrize(("damaged", "code"), [(False, 0), (True, 1)])
def test_a_reader_that_leaves_changes_nothing(
    pool: str, damaged: bool, code: int, json_flag: tuple[str, ...]
) -> None:
    """`shmcache verify NAME | head -0`: silent, with the exit code of the finding."""
    if damaged:
        with Segment(segment_path(pool)) as raw:
            raw.damage_total()
    assert unread("verify", pool, *json_flag) == (code, b"")


def test_help_that_nobody_reads_is_silent_too() -> None:
    assert unread("--help")[1] == b""
    assert unread("report", "--help")[1] == b""


def unread(*args: str) -> tuple[int, bytes]:
    """(exit code, standard error) of a command whose output has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *args],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_only_a_terminal_gets_colours(pool: str) -> None:
    assert "\x1b" not in run("report", pool).stdout
    master, terminal = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
        subprocess.run(
            [*COMMAND, "report", pool], cwd=ROOT, stdout=terminal, env=environment, check=True
        )
        assert b"\x1b[1m" in os.read(master, 1 << 16)
    finally:
        os.close(master)
        os.close(terminal)


# ---- supervise ---------------------------------------------------------------------------------


def test_supervise_gives_back_and_says_so(pool: str) -> None:
    with attached(pool) as worker, running("supervise", pool, "--json") as command:
        assert command.event()["event"] == "watching"
        worker.kill()
        event = command.event()
        assert event["event"] == "reclaimed"
        [owner] = event["owners"]
        assert (owner["pid"], owner["entries"]) == (worker.pid, 1)
        assert owner["usage"]["device_bytes"] == 5
        with CacheResidencyPool.observe(pool) as observer:
            assert observer.report().current_device_bytes == 0
        assert command.end(signal.SIGTERM) == (0, "")


def test_supervise_tells_people_too_and_stops_at_ctrl_c(pool: str) -> None:
    with attached(pool) as worker, running("supervise", pool) as command:
        assert command.line().startswith(f"watching pool {pool!r}")
        worker.kill()
        assert command.line() == f"process {worker.pid} died; gave back 1 entries: device 5 B"
        assert command.end(signal.SIGINT) == (0, "")


def test_supervise_needs_a_pool(pool_name: str) -> None:
    refused = run("supervise", pool_name)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"shmcache: no pool is named {pool_name!r}\n  `shmcache list`")


def test_supervise_ends_when_the_pool_is_removed(pool: str) -> None:
    with running("supervise", pool, "--json") as command:
        assert command.event()["event"] == "watching"
        CacheResidencyPool.destroy(pool)
        assert command.event()["event"] == "gone"
        assert command.event()["error"] == "SegmentError.Retired"
        assert command.end() == (1, "")


def test_supervise_recreates_a_poisoned_pool_when_told_to(pool: str) -> None:
    with CacheResidencyPool.observe(pool) as old, Segment(segment_path(pool)) as raw:
        raw.damage_total()
        assert not old.verify().ok
        with running("supervise", pool, "--json", "--on-poison=recreate") as command:
            events = [command.event()["event"] for _ in range(3)]
            assert events == ["watching", "poisoned", "recreated"]
            with CacheResidencyPool.observe(pool) as new:
                assert (new.state, old.state) == ("active", "retired")
                assert new.id != old.id
            assert command.end(signal.SIGTERM) == (0, "")


def test_supervise_reports_poison_and_stays(pool: str) -> None:
    with running("supervise", pool, "--json") as command:
        assert command.event()["event"] == "watching"
        with CacheResidencyPool.observe(pool) as observer, Segment(segment_path(pool)) as raw:
            raw.damage_total()
            assert not observer.verify().ok
        assert command.event()["event"] == "poisoned"
        assert command.end(signal.SIGTERM) == (0, "")


def test_supervise_goes_on_when_its_reader_leaves(pool: str) -> None:
    with attached(pool) as worker, running("supervise", pool) as command:
        command.line()
        assert command.process.stdout is not None
        command.process.stdout.close()
        with CacheResidencyPool.observe(pool) as observer, attached(pool) as second:
            for victim in (worker, second):
                victim.kill()
                wait_until(partial(is_gone, observer, victim), "the dead owner's slot is free")
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(PATIENCE_S) == 0


def test_a_signal_may_stop_a_supervisor_between_any_two_calls(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler runs inside whatever the main thread was doing, also with its locks held."""
    monkeypatch.setattr(supervisor, "_SWEEP_SECONDS", 0.001)
    with CacheResidencyPool.observe(pool) as observer, Segment(segment_path(pool)) as raw:
        raw.damage_total()
        assert not observer.verify().ok  # a poisoned pool is where a supervisor waits
        for calls in range(80):
            stop_at_call(supervisor.Supervisor(observer), calls)


def stop_at_call(watching: supervisor.Supervisor, calls: int) -> None:
    """Run it, and stop it as a signal handler would that arrives at its n-th call."""
    left = iter([None] * calls)

    def count(frame: object, event: str, argument: object) -> None:
        if event == "call" and next(left, "now") == "now":
            sys.setprofile(None)
            watching.stop()

    sys.setprofile(count)
    try:
        watching.run()
    finally:
        sys.setprofile(None)


# ---- stress ------------------------------------------------------------------------------------


def test_stress_proves_the_promises_here(pool_name: str) -> None:
    done = run("stress", "--seconds", "0.5", "--workers", "2", "--name", pool_name, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), report
    assert (report["ok"], report["violations"], report["leaked_bytes"]) == (True, [], 0)
    assert report["operations"] > 0
    assert not segment_path(pool_name).exists()


def test_stress_does_not_touch_a_pool_that_exists(pool: str) -> None:
    done = run("stress", "--seconds", "1", "--name", pool)
    assert (done.returncode, done.stdout) == (1, "")
    assert "exists" in done.stderr
    assert CacheResidencyPool.observe(pool).report().limits == LIMITS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_stress_takes_everything_away(pool_name: str, number: int) -> None:
    with running("stress", "--seconds", "300", "--name", pool_name) as command:
        wait_until(lambda: pool_name in segment_names(), "the pool is made")
        with CacheResidencyPool.observe(pool_name) as observer:
            wait_until(lambda: len(observer.owners()) == 4, "its workers have attached")
        family = psutil.Process(command.process.pid).children(recursive=True)
        assert len(family) >= 5
        code, errors = command.end(number)
        assert (code, errors.strip()) == (1, "Aborted!")
        assert pool_name not in segment_names()
        assert not any(child.is_running() for child in family)


def test_children_of_a_killed_stress_end_by_themselves(pool_name: str) -> None:
    with running("stress", "--seconds", "300", "--name", pool_name) as command:
        wait_until(lambda: pool_name in segment_names(), "the pool is made")
        with CacheResidencyPool.observe(pool_name) as observer:
            wait_until(lambda: len(observer.owners()) == 4, "its workers have attached")
            family = psutil.Process(command.process.pid).children(recursive=True)
            command.process.kill()
            wait_until(lambda: not any(c.is_running() for c in family), "its children end")
            wait_until(lambda: observer.sweep() == () == observer.owners(), "nobody is left")
