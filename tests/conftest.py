"""Fixtures of every test: names that are cleaned up, proof that nothing leaks, a watchdog, seeds.

Every test is checked, unasked, for what it leaves behind: segments in /dev/shm, child processes,
open descriptors. Every test has a watchdog. A test that failed is cleaned up after but not checked:
its traceback keeps objects alive, and a second complaint would hide the first.
"""

import contextlib
import faulthandler
import gc
import itertools
import os
import random
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support import SHM

WATCHDOG_S = 120
WATCHDOG_GRACE_S = 30
RUN = f"test-{os.getpid()}-"  # marks the pools of this run; others may test on the same machine

_numbers = itertools.count()
_passed = pytest.StashKey[bool]()
_stderr = pytest.StashKey[int]()

settings.register_profile(
    "shmcache",
    deadline=None,  # a loaded machine is no failure
    derandomize=False,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shmcache")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr: what the watchdog writes must not end in pytest's capture."""
    config.stash[_stderr] = os.dup(2)


def pytest_collection_finish() -> None:
    """What is imported by now stays for the run: `nothing_left` need not walk it twice per test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let `nothing_left` know whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that hangs, with the stack of each thread, after killing its children.

    Two stages: SIGALRM raises in the main thread; should that thread be stuck in C code that serves
    no signals, faulthandler ends the whole run a little later, from a thread that needs no GIL.
    """
    marker = request.node.get_closest_marker("watchdog")
    limit_s = marker.args[0] if marker else WATCHDOG_S
    stderr = request.config.stash[_stderr]

    def bark(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(stderr)
        _kill_children(set())
        pytest.fail(f"watchdog: not done after {limit_s} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + WATCHDOG_GRACE_S, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def nothing_left(watchdog: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Prove that the test left no segment, child or descriptor; remove what it left."""
    gc.collect()  # what earlier tests left to the collector is not this test's
    segments, children, descriptors = _segments(), _children(), _descriptors()
    yield
    gc.collect()
    left = [f"child {text}" for text in _kill_children(children)]
    left += [f"segment {path}" for path in sorted(_segments() - segments) if _is_ours(path)]
    left += [f"descriptor {text}" for text in sorted(_descriptors() - descriptors)]
    _remove(RUN)
    if left and request.node.stash.get(_passed, False):
        pytest.fail("the test left behind: " + ", ".join(left))


@pytest.fixture
def pool_name() -> Iterator[str]:
    """A pool name nobody else uses; its segments are removed afterwards, whatever happened."""
    name = f"{RUN}{next(_numbers):05}"
    yield name
    _remove(name)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, printed when the test fails; SHMCACHE_TEST_SEED repeats one."""
    value = int(os.environ.get("SHMCACHE_TEST_SEED") or random.SystemRandom().getrandbits(32))
    request.node.add_report_section("call", "seed", f"SHMCACHE_TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Randomness of this test, from `seed`."""
    return random.Random(seed)


def _segments() -> set[Path]:
    return {path for path in SHM.iterdir() if "shmcache." in path.name}


def _remove(name: str) -> None:
    for path in _segments():
        if name in path.name:
            path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """False for another test run's name, and when a process outside this run maps the segment."""
    if named := re.search(r"test-\d+-", path.name):
        return named[0] == RUN
    if "PYTEST_XDIST_WORKER" in os.environ:
        return False  # another worker's, as far as one can tell
    family = _children() | {os.getpid()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if int(pid) not in family and str(path) in Path(f"/proc/{pid}/maps").read_text():
                return False
    return path.exists()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _kill_children(expected: set[int]) -> list[str]:
    """Kill all children but the expected ones; say which they were."""
    killed = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            zombie = child.status() == psutil.STATUS_ZOMBIE
            command = "a zombie" if zombie else " ".join(child.cmdline())
            # multiprocessing keeps these two for the life of the process that first needs them.
            if child.pid in expected or "resource_tracker" in command or "forkserver" in command:
                continue
            killed.append(f"{child.pid} ({command[:100]})")
            child.kill()
            child.wait(10)
    return killed


def _descriptors() -> set[str]:
    """Open descriptors as "number -> target", without the one that lists them."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{entry.name} -> {entry.readlink()}")
    return found
