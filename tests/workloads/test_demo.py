"""The demo counts each turn once, survives kills, and finds what is planted in an unsound pool."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shmcache import (
    CacheResidencyPool,
    CacheSession,
    NumpyBackend,
    PagedCacheOptions,
    SegmentError,
    segment_path,
)
from shmcache.workloads.demo import run_demo
from shmcache.workloads.demo_books import DemoOptions, DemoProgress, DemoReport
from shmcache.workloads.doc_chats import DOCS, conversations, doc_pages
from shmcache.workloads.session_store import SessionStore, cache_identity, prefix_sharing
from shmcache.workloads.weights import tiny_model
from tests.support import wait_until

BLOCK = 32
CHATS: dict[str, int] = {"seed": 3, "conversations": 4, "turns": 2, "pages": 2, "page_tokens": 300}


def demo(
    name: str, on_progress: Callable[[DemoProgress], None] = lambda _: None, **changed: Any
) -> DemoReport:
    options: dict[str, Any] = {
        **CHATS,
        "model": "tiny",
        "cache": Path(),
        "docs": DOCS,
        "workers": 3,
        "answer_tokens": 6,
        "block_tokens": BLOCK,
        "arena_bytes": 1 << 24,
        "kills": 0,
        **changed,
    }
    return run_demo(DemoOptions(name=name, **options), on_progress)


def prompts() -> list[list[int]]:
    """How the conversations begin."""
    talks = conversations(
        doc_pages(DOCS),
        tiny_model().tokenizer,
        seed=CHATS["seed"],
        count=CHATS["conversations"],
        turns=CHATS["turns"],
        pages_max=CHATS["pages"],
        page_tokens=CHATS["page_tokens"],
    )
    return [talk.tokens for talk in talks]


def test_a_killed_workers_turn_goes_on_and_is_counted_once(pool_name: str) -> None:
    report = demo(pool_name, kills=1)
    assert report.ok, report
    total, rows = report.total, report.workers
    assert total.requests == total.checked == sum(row.requests for row in rows) == 8
    assert total.tokens_saved == sum(row.tokens_saved for row in rows) > 0
    assert total.tokens_computed == sum(row.tokens_computed for row in rows) > 0
    assert total.hit_rate == pytest.approx(
        total.tokens_saved / (total.tokens_saved + total.tokens_computed), abs=1e-3
    )
    assert 8 <= total.generated <= 48
    assert (total.different, total.kills, len(report.kills), len(rows)) == (0, 1, 1, 3)
    (kill,) = report.kills
    assert rows[kill.worker].kills == 1
    assert kill.reclaim_ms > 0
    assert report.redone == (kill.prompt_tokens is not None)
    assert (kill.found_tokens is None) == (kill.prompt_tokens is None)
    assert not segment_path(pool_name).exists()


def test_one_worker_finds_all_that_it_has_seen(pool_name: str) -> None:
    """Exact, because nothing runs at once: each turn's full blocks but the last are known."""
    report = demo(pool_name, workers=1, conversations=1, turns=3, check_every=2)
    assert report.ok, report
    assert report.total.requests == 3
    assert report.total.checked == 2
    saved = report.total.tokens_saved
    assert saved % BLOCK == 0
    assert saved >= 2 * (len(prompts()[0]) // BLOCK) * BLOCK


@pytest.mark.parametrize("workers", [1, 3])
def test_the_seed_decides_what_is_asked_and_the_answers(pool_name: str, workers: int) -> None:
    first, second = (demo(pool_name, workers=workers, check_every=0) for _ in range(2))
    for report in (first, second):
        assert report.ok, report
        assert (report.total.checked, report.total.first_token_ratio) == (0, None)
    prompt_tokens = [r.total.tokens_saved + r.total.tokens_computed for r in (first, second)]
    assert prompt_tokens[0] == prompt_tokens[1]
    assert first.total.generated == second.total.generated
    if workers == 1:
        assert first.total.tokens_saved == second.total.tokens_saved


@pytest.mark.ci
@pytest.mark.watchdog(600)
@pytest.mark.parametrize("run", range(4))
def test_kills_at_random_moments(pool_name: str, run: int) -> None:
    """Five a run, wherever the victim is: between two instructions of anything."""
    report = demo(pool_name, seed=run, conversations=10, turns=2, page_tokens=1500, kills=5)
    assert report.ok, report
    assert report.total.requests == report.total.checked == 20
    assert len(report.kills) == 5
    assert report.redone > 0


def test_a_warm_restart_finds_everything(pool_name: str) -> None:
    """G7: the first run's workers have gone in order, its blocks have not."""
    cold = demo(pool_name, keep=True)
    warm = demo(pool_name)
    assert cold.ok, cold
    assert warm.ok, warm
    assert segment_path(pool_name).exists()  # whoever finds a pool leaves it
    CacheResidencyPool.destroy(pool_name)
    assert warm.total.tokens_computed <= warm.total.requests * BLOCK < cold.total.tokens_computed


def test_all_workers_are_killed_and_the_next_run_hits(pool_name: str) -> None:
    def kill(at: DemoProgress) -> None:
        if at.requests:
            for child in psutil.Process().children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    killed = demo(pool_name, kill, keep=True, conversations=40)
    assert any("ended with -9" in text for text in killed.violations)
    warm = demo(pool_name, conversations=4)
    assert warm.ok, warm
    first_page = len(prompts()[0]) // BLOCK * BLOCK
    assert warm.total.tokens_saved >= warm.total.requests * first_page // 2
    CacheResidencyPool.destroy(pool_name)


# What is planted is found ------------------------------------------------------------------------


def test_one_wrong_bit_is_found(pool_name: str) -> None:
    """Mutant: somebody writes into a published block."""
    assert demo(pool_name, keep=True).ok
    model, prompt = tiny_model(), prompts()[0]
    with (
        CacheResidencyPool.attach(pool_name) as pool,
        CacheSession(
            pool,
            model=cache_identity(model, BLOCK),
            options=PagedCacheOptions(BLOCK, 1 << 20, 0, 1),
            backend=NumpyBackend(reads_host=True),
            sharing=prefix_sharing(model, BLOCK),
        ) as session,
    ):
        assert SessionStore(session, model.shape).match(prompt) > BLOCK
        with session.lease(session.blocks(2)[0]) as lease:
            content = lease.arrays[1].tobytes()
    with segment_path(pool_name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
        at = raw.find(content)
        assert at > 0
        raw[at + 2] ^= 1 << 7  # of the exponent
    report = demo(pool_name)
    assert report.total.different > 0
    assert not report.violations
    assert not report.ok
    CacheResidencyPool.destroy(pool_name)


def test_an_error_in_a_worker_is_a_violation(pool_name: str) -> None:
    """Mutant: the pool ends under the workers."""

    def end(at: DemoProgress) -> None:
        with contextlib.suppress(SegmentError.NotFound):  # the second time
            CacheResidencyPool.destroy(pool_name, force=True)

    report = demo(pool_name, end, conversations=40)
    assert any("Retired" in text or "NotFound" in text for text in report.violations)
    assert not segment_path(pool_name).exists()


def test_an_exception_of_the_callback_ends_the_run(pool_name: str) -> None:
    """Which is how Ctrl-C ends it; the fixtures look for what is left."""

    def interrupt(at: DemoProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo(pool_name, interrupt)
    assert not segment_path(pool_name).exists()


def test_whoever_has_the_pool_already_is_an_owner_that_is_left(pool_name: str) -> None:
    demo(pool_name, keep=True)
    with CacheResidencyPool.attach(pool_name) as pool:
        report = demo(pool_name)
        assert report.violations == ("1 owners are left",)
        wait_until(lambda: len(pool.owners()) == 1, "the workers have left")
    CacheResidencyPool.destroy(pool_name)


def test_more_kills_than_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="8 kills need more than 8 requests"):
        demo("never-made", kills=8)
