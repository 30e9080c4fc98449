"""gunicorn with the example of docs/examples: every way in which it starts and ends processes.

Each runs with the hooks and without: they may make things faster, and nothing right.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import httpx
import pytest

import shmcache as sc
from shmcache.workloads.serving import serving_pool_sizes
from shmcache.workloads.weights import tiny_model
from tests.integrations.servers import (
    QUESTIONS,
    Load,
    Server,
    assert_nothing_held,
    expected_digests,
    gunicorn,
    owners_of,
)
from tests.support import process_state, wait_until

pytestmark = pytest.mark.watchdog(240)

HOOKS = pytest.mark.parametrize(
    "hooks", [True, pytest.param(False, marks=pytest.mark.ci)], ids=["hooks", "no hooks"]
)
CI_SECONDS = 30.0  # of load, with hooks and without


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def two_workers(server: Server, but: AbstractSet[int] = frozenset()) -> list[int]:
    """Both workers, when both have attached and none of `but` is among them."""

    def ready() -> bool:
        for question in QUESTIONS[:4]:  # without hooks a worker attaches when it is asked
            server.ask(question)
        found = server.workers()
        return len(found) == 2 and not but & set(found)

    wait_until(ready, "two workers have the pool")
    return server.workers()


def epoch(pool: str) -> object:
    with sc.CacheResidencyPool.observe(pool) as observer:
        return observer.id


@HOOKS
def test_workers_share_what_they_compute(pool_name: str, folder: Path, hooks: bool) -> None:
    """And the answers have the bits that they have without a pool; the pool stays for the next."""
    digests = expected_digests(pool_name)
    with gunicorn(pool_name, folder, hooks=hooks) as server:
        two_workers(server)
        said = [server.ask(question) for question in QUESTIONS]
        assert [one["digest"] for one in said] == list(digests.values())
        assert all(server.ask(question)["known_tokens"] >= 64 for question in QUESTIONS)
        metrics = httpx.get(server.url + "/metrics").text
        assert f'shmcache_up{{pool="{pool_name}"}} 1.0' in metrics
        for bad in (b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "x", "tokens_max": 99999}'):
            assert httpx.post(server.url + "/generate", content=bad).status_code == 400
        assert httpx.get(server.url + "/nothing").status_code == 404
        assert server.end() == 0
    assert_nothing_held(pool_name)
    with gunicorn(pool_name, folder, hooks=hooks) as server:
        assert server.ask(QUESTIONS[5])["known_tokens"] >= 64
        assert server.end() == 0


@pytest.mark.ci
@HOOKS
@pytest.mark.parametrize("preload", [True, False], ids=["preload", "no preload"])
def test_a_reload_keeps_the_pool(pool_name: str, folder: Path, hooks: bool, preload: bool) -> None:
    """HUP: new workers before the old ones end."""
    with gunicorn(pool_name, folder, hooks=hooks, conf=f"preload_app = {preload}\n") as server:
        before, born = set(two_workers(server)), epoch(pool_name)
        server.process.send_signal(signal.SIGHUP)
        after = two_workers(server, but=before)
        wait_until(lambda: set(owners_of(pool_name)) == set(after), "the old ones have left")
        assert epoch(pool_name) == born
        assert server.ask(QUESTIONS[0])["known_tokens"] >= 64
        assert server.end() == 0
    assert_nothing_held(pool_name)


def newer_arbiter(server: Server, pid_file: Path) -> int:
    """USR2, and the process that it started once that serves."""
    server.process.send_signal(signal.SIGUSR2)
    newer = Path(f"{pid_file}.2")
    wait_until(lambda: newer.exists() and newer.read_text().strip(), "a newer arbiter is there")
    return int(newer.read_text())


@pytest.mark.ci
@HOOKS
def test_an_upgrade_has_two_arbiters_on_one_pool(pool_name: str, folder: Path, hooks: bool) -> None:
    """USR2: the older one's end takes neither the pool nor the newer one's watch with it; the last
    one removes the pool, as it was told to."""
    pid_file = folder / "pid"
    conf = f"pidfile = {str(pid_file)!r}\n"
    if hooks:
        conf += "from shmcache.integrations import gunicorn_hooks\n"
        conf += "gunicorn_hooks.remove_on_exit()\n"
    with gunicorn(pool_name, folder, hooks=hooks, conf=conf) as server:
        old, born = set(two_workers(server)), epoch(pool_name)
        newer = newer_arbiter(server, pid_file)
        assert server.end(signal.SIGTERM) == 0
        wait_until(lambda: not old & set(owners_of(pool_name)), "the old workers have left")
        assert server.ask(QUESTIONS[0])["known_tokens"] >= 64
        assert epoch(pool_name) == born
        [victim, *_] = owners_of(pool_name)
        os.kill(victim, signal.SIGKILL)
        if hooks:  # the newer arbiter watches: nobody has to ask
            wait_until(lambda: victim not in owners_of(pool_name), "the dead one is reclaimed")
        assert server.ask(QUESTIONS[1])["known_tokens"] >= 64
        os.kill(newer, signal.SIGTERM)
        wait_until(lambda: process_state(newer) in ("", "Z"), "the newer arbiter has ended")
    if hooks:
        with pytest.raises(sc.SegmentError.NotFound):
            sc.CacheResidencyPool.observe(pool_name)
    else:
        assert_nothing_held(pool_name)


@pytest.mark.ci
@HOOKS
def test_recycled_workers_leave_nothing(pool_name: str, folder: Path, hooks: bool) -> None:
    """max_requests: a worker that has answered its share ends, another begins."""
    with gunicorn(pool_name, folder, hooks=hooks, conf="max_requests = 3\n") as server:
        pids = {server.ask(random.choice(QUESTIONS))["pid"] for _ in range(40)}
        assert len(pids) >= 8
        assert len(owners_of(pool_name)) <= 4
        assert server.end() == 0
    assert_nothing_held(pool_name)


@pytest.mark.ci
@HOOKS
@pytest.mark.parametrize("way", ["waits", "is stopped"])
def test_a_worker_over_its_time(pool_name: str, folder: Path, hooks: bool, way: str) -> None:
    """SIGABRT ends one that waits in the pool, as it ends Python; a stopped one gets SIGKILL."""
    with gunicorn(pool_name, folder, hooks=hooks, conf="timeout = 2\n") as server:
        before = two_workers(server)
        if way == "waits":
            threading.Thread(target=lost, args=(server.url + "/wait",)).start()
        else:
            os.kill(before[0], signal.SIGSTOP)
        wait_until(lambda: len(set(before) & set(server.workers())) == 1, "one was ended")
        two_workers(server)
        signalled = "was sent SIGKILL!" in server.said()
        assert signalled == (way == "is stopped"), server.said()
        assert server.end() == 0
    assert_nothing_held(pool_name)


def lost(url: str) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.post(url, timeout=60).raise_for_status()


@pytest.mark.ci
@HOOKS
def test_a_killed_arbiter(pool_name: str, folder: Path, hooks: bool) -> None:
    """Nobody runs a hook. Its workers see it and end; the next arbiter starts warm."""
    with gunicorn(pool_name, folder, hooks=hooks, conf="timeout = 4\n") as server:
        two_workers(server)
        server.end(signal.SIGKILL)
        wait_until(lambda: "alive" not in owners_of(pool_name).values(), "its workers have ended")
    with gunicorn(pool_name, folder, hooks=hooks) as server:
        assert server.ask(QUESTIONS[3])["known_tokens"] >= 64
        assert server.end() == 0
    assert_nothing_held(pool_name)


@pytest.mark.ci
@HOOKS
def test_under_load_with_kills(pool_name: str, folder: Path, hooks: bool, seed: int) -> None:
    """SIGKILL of random workers, and of the arbiter: who is killed loses a request, nobody else."""
    dice = random.Random(seed)
    kills = 0
    servers: list[Server] = []
    stop = threading.Event()
    with gunicorn(pool_name, folder, hooks=hooks, conf="workers = 3\n") as server:
        servers.append(server)
        with Load(lambda: servers[-1].url, expected_digests(pool_name), seed) as load:
            until = CI_SECONDS
            while not stop.wait(pause := dice.uniform(0.3, 1.2)):
                until -= pause
                if until < 0:
                    break
                if victims := server.workers():
                    os.kill(dice.choice(victims), signal.SIGKILL)
                    kills += 1
        assert kills > 10
        assert load.outcomes["right"] > 100, load.outcomes
        assert load.known_tokens > 0
        assert set(load.outcomes) <= {"right", "lost"}, load.outcomes
        assert load.outcomes["lost"] <= kills, (kills, load.outcomes)
        server.end(signal.SIGKILL)
    with gunicorn(pool_name, folder, hooks=hooks) as server:
        said = [server.ask(question)["known_tokens"] for question in QUESTIONS]
        assert sum(said) > 0
        assert server.end() == 0
    assert_nothing_held(pool_name)


@pytest.fixture
def other_pool(pool_name: str) -> Iterator[None]:
    """A pool of that name, of other sizes."""
    limits, options = serving_pool_sizes(
        tiny_model().shape, servers=1, tokens_max=64, arena_bytes=1 << 20
    )
    with sc.CacheResidencyPool.create(pool_name, limits, **options):
        yield


@pytest.mark.usefixtures("other_pool")
def test_a_pool_of_other_sizes_stops_the_start(pool_name: str, folder: Path) -> None:
    """Rather than serving with another pool than was asked for; the log says what is wrong."""
    with (
        pytest.raises(AssertionError, match="limits"),
        gunicorn(pool_name, folder),
    ):
        pass
