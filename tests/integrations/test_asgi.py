"""uvicorn with the FastAPI example of docs/examples, and the lifespan alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from pathlib import Path

import httpx
import pytest

import shmcache as sc
from shmcache.integrations.asgi import pool_lifespan
from shmcache.integrations.worker_pool import ENVIRONMENT
from tests.integrations.servers import (
    QUESTIONS,
    Load,
    assert_nothing_held,
    expected_digests,
    owners_of,
    uvicorn,
)
from tests.support import wait_until

LIMITS = sc.CachePoolLimits(1 << 20, 4 << 20, 1 << 20, 0)

pytestmark = pytest.mark.watchdog(240)


def test_workers_share_what_they_compute(pool_name: str, tmp_path: Path) -> None:
    digests = expected_digests(pool_name)
    with uvicorn(pool_name, tmp_path) as server:
        wait_until(lambda: len(owners_of(pool_name)) == 2, "both workers have the pool")
        said = [server.ask(question) for question in QUESTIONS]
        assert [one["digest"] for one in said] == list(digests.values())
        assert {one["owners"] for one in said} == {2}
        assert all(server.ask(question)["known_tokens"] >= 64 for question in QUESTIONS)
        metrics = httpx.get(server.url + "/metrics/").text
        assert f'shmcache_up{{pool="{pool_name}"}} 1.0' in metrics
        assert httpx.post(server.url + "/generate", json={"prompt": 1}).status_code == 400
        assert server.end() in (0, -signal.SIGTERM)
    assert_nothing_held(pool_name)


@pytest.mark.ci
def test_under_load_with_kills(pool_name: str, tmp_path: Path, seed: int) -> None:
    """The others watch: who is killed is reclaimed, and replaced, and nobody's answer is wrong.

    A uvicorn worker serves many connections at once, so one kill may lose each client a request.
    """
    dice, kills, stop = random.Random(seed), 0, threading.Event()
    with uvicorn(pool_name, tmp_path) as server:
        with Load(lambda: server.url, expected_digests(pool_name), seed) as load:
            for _ in range(8):
                stop.wait(dice.uniform(0.5, 1.5))
                wait_until(lambda: len(server.workers()) == 2, "both workers have the pool")
                os.kill(dice.choice(server.workers()), signal.SIGKILL)
                kills += 1
        assert load.outcomes["right"] > 50, load.outcomes
        assert set(load.outcomes) <= {"right", "lost"}, load.outcomes
        assert load.outcomes["lost"] <= 4 * kills, (kills, load.outcomes)
        server.end()
    assert_nothing_held(pool_name)


def test_the_pool_lives_as_long_as_the_application(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")
    lifespan = pool_lifespan(pool_name, LIMITS, arena_bytes=1 << 20)

    async def live() -> None:
        async with lifespan(None) as state:
            assert state["pool"].allocate(64).publish(bytes(32)).created
            assert list(owners_of(pool_name)) == [os.getpid()]

    asyncio.run(live())
    assert owners_of(pool_name) == {}
    with sc.CacheResidencyPool.attach(pool_name) as pool:
        assert pool.contains(bytes(32))
    for bad in ({"name": "x"}, {"limits": LIMITS}, {"arena_bytes": 1}):
        with pytest.raises(TypeError):
            pool_lifespan(**bad)
