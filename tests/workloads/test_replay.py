"""A replay counts exactly, survives kills, and finds what is planted in an unsound pool."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from shmcache import CacheResidencyPool, SegmentError, segment_names, segment_path
from shmcache.errors import TraceError
from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.replay import run_replay
from shmcache.workloads.replay_books import ReplayOptions, ReplayProgress, ReplayReport
from shmcache.workloads.replay_worker import chain, trace_keys
from shmcache.workloads.traces import TraceRequest, open_trace
from tests.support import ROOT

TRACES = ROOT.parent / "shared" / "data" / "traces"
MOONCAKE = ("mooncake_conversation", "mooncake_synthetic")


def chats(conversations: int = 60) -> list[TraceRequest]:
    return list(conversation_trace(ConversationOptions(seed=5, conversations=conversations)))


def recorded(name: str, limit: int) -> Iterator[TraceRequest]:
    with open_trace(TRACES / f"{name}.jsonl.gz") as reader:
        yield from itertools.islice(reader, limit)


def replay(
    name: str,
    requests: Any,
    on_progress: Callable[[ReplayProgress], None] | None = None,
    **changed: Any,
) -> ReplayReport:
    options = {"seed": 1, "block_bytes": 256, "pool_blocks": 4000, "workers": 3, **changed}
    return run_replay(requests, ReplayOptions(name=name, **options), on_progress)


def ideal_hits(requests: list[TraceRequest]) -> int:
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += sum(number in seen for number in request.block_ids)
        seen.update(request.block_ids)
    return hits


# ---- exactness ---------------------------------------------------------------------------------


def reference(name: str) -> Any:
    if not TRACES.exists():
        pytest.skip("the recorded traces are not beside this checkout")
    return json.loads((TRACES / "reference.json").read_text())["traces"][name]["first_1000"]


def check_lru(pool_name: str, name: str, capacity: int) -> None:
    known = reference(name)
    row = next(r for r in known["capacity_sweep"] if r["capacity_blocks"] == capacity)
    report = replay(
        pool_name, recorded(name, 1000), pool_blocks=capacity, workers=1, eviction="lru"
    )
    assert report.ok, report
    assert report.block_references == known["block_refs"]
    assert report.ideal_hit_rate == pytest.approx(known["ideal_rate"], abs=1e-5)
    assert report.block_hits == row["lru_hits"]
    assert report.evictions == row["lru_evictions"]
    assert report.blocks_left_out == 0


@pytest.mark.parametrize("name", MOONCAKE)
def test_lru_hits_of_recorded_traffic_are_exact(pool_name: str, name: str) -> None:
    check_lru(pool_name, name, 2500)


@pytest.mark.ci
@pytest.mark.parametrize("capacity", [500, 1000, 5000])
@pytest.mark.parametrize("name", MOONCAKE)
def test_lru_hits_are_exact_at_every_capacity(pool_name: str, name: str, capacity: int) -> None:
    check_lru(pool_name, name, capacity)


@pytest.mark.ci
@pytest.mark.parametrize("name", MOONCAKE)
def test_private_pools_have_the_hits_of_private_pools(pool_name: str, name: str) -> None:
    row = next(r for r in reference(name)["capacity_sweep"] if r["capacity_blocks"] == 5000)
    report = replay(
        pool_name,
        recorded(name, 1000),
        pool_blocks=5000,
        workers=4,
        eviction="lru",
        private=True,
    )
    assert report.ok, report
    assert report.block_hits == row["private4_hits"]


def test_a_pool_that_holds_everything_has_the_ideal_hits(pool_name: str) -> None:
    requests = chats()
    report = replay(pool_name, requests, workers=1)
    assert report.ok, report
    assert report.requests == len(requests)
    assert report.block_references == sum(len(request.block_ids) for request in requests)
    assert report.block_hits == ideal_hits(requests)
    assert report.block_hit_rate == report.ideal_hit_rate
    assert report.input_tokens == sum(request.input_tokens for request in requests)
    assert 0 < report.tokens_saved < report.input_tokens
    assert report.evictions == report.blocks_left_out == report.kills == 0
    misses = report.block_references - report.block_hits
    assert report.bytes_stored == misses * 256
    assert report.bytes_served == report.block_hits * 256
    assert not segment_path(pool_name).exists()


def test_partial_blocks_count_for_the_tokens_they_have(pool_name: str) -> None:
    request = TraceRequest(0, 513, 0, (7, 9))
    report = replay(pool_name, [request, request], workers=1)
    assert (report.block_hits, report.tokens_saved) == (2, 513)


def test_ids_of_equal_numbers_after_other_prefixes_are_not_shared(pool_name: str) -> None:
    """In any file: an id is taken for the tokens so far, whatever its producer meant by it."""
    requests = [TraceRequest(0, 1024, 0, ids) for ids in ((1, 2), (3, 2), (1, 2), (3, 4))]
    report = replay(pool_name, requests, workers=1)
    assert report.block_hits == 3
    assert report.block_hit_rate == report.ideal_hit_rate


def test_nothing_to_do(pool_name: str) -> None:
    report = replay(pool_name, [], workers=1)
    assert report.ok, report
    assert (report.requests, report.block_hit_rate, report.ideal_hit_rate) == (0, 0.0, 0.0)
    report = replay(pool_name, [TraceRequest(0, 0, 0, ())], workers=1)
    assert (report.ok, report.requests) == (True, 1)


# ---- many workers, and kills -------------------------------------------------------------------


def test_workers_share_and_are_counted_once(pool_name: str) -> None:
    requests = chats()
    report = replay(pool_name, requests)
    assert report.ok, report
    assert report.requests == len(requests)
    assert report.ideal_hit_rate * 0.8 < report.block_hit_rate <= report.ideal_hit_rate


def test_killed_workers_requests_are_redone_and_counted_once(pool_name: str) -> None:
    requests = chats(150)
    report = replay(pool_name, requests, pool_blocks=300, block_bytes=64 << 10, kill_every_s=0.1)
    assert report.ok, report
    assert report.requests == len(requests)
    assert report.block_references == sum(len(request.block_ids) for request in requests)
    assert report.kills > 0
    assert report.redone > 0
    assert report.block_hit_rate <= report.ideal_hit_rate
    assert not segment_path(pool_name).exists()


def test_a_kill_at_any_request_changes_no_count(pool_name: str) -> None:
    """One worker, so nothing else is at work: the counts are those of a run without a kill.

    Requests of a MiB: the signal is nearly always faster than the answer.
    """
    requests = chats(20)
    changed: dict[str, Any] = {"workers": 1, "block_bytes": 64 << 10, "pool_blocks": 1000}
    undisturbed = replay(pool_name, requests, **changed)
    redone = 0
    for number in (1, 2, len(requests) // 2, len(requests)):
        report = replay(pool_name, requests, kill_after=number, **changed)
        assert report.ok, report
        assert report.kills == 1
        redone += report.redone
        assert report.requests == undisturbed.requests
        assert report.block_hits == undisturbed.block_hits
        assert report.tokens_saved == undisturbed.tokens_saved
    assert redone > 0


def test_private_pools_outlive_their_worker(pool_name: str) -> None:
    """G7: a replaced worker goes on with what the killed one had published."""
    requests = chats(20)
    undisturbed = replay(pool_name, requests, workers=2, private=True)
    report = replay(pool_name, requests, workers=2, private=True, kill_after=len(requests) // 2)
    assert report.ok, report
    assert report.block_hits == undisturbed.block_hits > 0
    assert not segment_path(f"{pool_name}-0").exists()


def test_held_leases_fill_a_small_pool_and_what_fits_is_kept(pool_name: str) -> None:
    """Answers of an hour each: nothing is given back before the run's end, and no byte changes."""
    requests = [
        TraceRequest(0, 4 * 512, 180_000, tuple(range(4 * n, 4 * n + 4))) for n in range(20)
    ]
    report = replay(pool_name, requests, pool_blocks=30, workers=2, speed=1.0)
    assert report.ok, report
    assert report.blocks_left_out == 80 - 30
    assert report.evictions == 0


def test_requests_wait_for_their_time(pool_name: str) -> None:
    """One after the other in time, none before its time: seen in which are handed out."""
    requests = [TraceRequest(0, 512, 0, (1,)), TraceRequest(3_600_000, 512, 0, (2,))]

    def stop(at: ReplayProgress) -> None:
        seen.append(at.requests)
        if len(seen) == 5:
            raise KeyboardInterrupt

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        replay(pool_name, requests, stop, workers=1, speed=1.0)
    assert seen[-1] == 1
    report = replay(pool_name, requests, workers=1, speed=1e9)
    assert report.requests == 2


def test_a_kept_pool_is_sound_and_can_be_attached_to(pool_name: str) -> None:
    report = replay(pool_name, chats(10), keep=True, kill_after=5)
    assert report.ok, report
    with CacheResidencyPool.attach(pool_name) as pool:
        assert pool.verify().ok
        assert pool.report().current_host_bytes > 0
    CacheResidencyPool.destroy(pool_name)


# ---- what is planted is found ------------------------------------------------------------------


def test_a_worker_that_dies_by_itself_is_a_violation(pool_name: str) -> None:
    def kill(at: ReplayProgress) -> None:
        for child in psutil.Process().children():
            if any("replay_worker" in word for word in child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
                return

    endless = itertools.cycle(chats(5))
    report = replay(pool_name, endless, kill)
    assert not report.ok
    assert any("ended with -9" in text for text in report.violations)


def test_an_error_in_a_worker_is_a_violation(pool_name: str) -> None:
    """Mutant: the pool ends under the workers."""

    def end(at: ReplayProgress) -> None:
        with contextlib.suppress(SegmentError.NotFound):  # the second time
            CacheResidencyPool.destroy(pool_name, force=True)

    report = replay(pool_name, itertools.cycle(chats(5)), end)
    assert any("SegmentError.Retired" in text for text in report.violations)
    assert not segment_path(pool_name).exists()


def test_what_nobody_sweeps_is_a_leak(pool_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a sweep that does nothing, in the process that looks at what is left.

    Killed at the last request, a worker is followed by nobody whose attaching would sweep.
    """
    monkeypatch.setattr(CacheResidencyPool, "sweep", lambda self: ())
    owner: list[CacheResidencyPool] = []

    def hold(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
        yield from requests
        pool = CacheResidencyPool.attach(pool_name)
        owner.append(pool)
        blocks.append(pool.allocate(256))

    blocks: list[object] = []
    report = replay(pool_name, hold(chats(5)), workers=1)
    blocks.clear()
    owner.clear()
    assert report.leaked_bytes == 256
    assert "1 owners are left" in report.violations
    assert not report.ok


def test_a_damaged_byte_is_wrong(pool_name: str) -> None:
    """Mutant: somebody writes into published blocks."""
    requests = chats(5)

    def damaging(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
        yield from requests
        key = bytes(chain(trace_keys(), requests[0].block_ids)[0])
        with CacheResidencyPool.attach(pool_name) as pool:
            lease = pool.lookup(key)
            assert lease is not None
            content = bytes(lease.memoryview())
            lease.release()
        with segment_path(pool_name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
            raw[raw.find(content) + 100] ^= 1
        yield requests[0]

    report = replay(pool_name, damaging(requests), workers=1)
    assert report.wrong_bytes >= 2  # when it was leased, and before it was given back
    assert not report.violations
    assert not report.ok


def test_an_exception_of_the_callback_ends_the_run(pool_name: str) -> None:
    """Which is how Ctrl-C ends it; the fixtures look for what is left."""

    def interrupt(at: ReplayProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(pool_name, itertools.cycle(chats(5)), interrupt)
    assert not segment_path(pool_name).exists()


def test_an_error_of_the_trace_ends_the_run(pool_name: str) -> None:
    def broken() -> Iterator[TraceRequest]:
        yield from chats(2)
        raise TraceError.Malformed(3, "planted")

    with pytest.raises(TraceError.Malformed):
        replay(pool_name, broken())
    assert pool_name not in segment_names()


def test_a_pool_of_that_name_is_not_touched(pool_name: str) -> None:
    replay(pool_name, chats(2), keep=True)
    before = segment_path(pool_name).stat()
    with pytest.raises(SegmentError.Exists):
        replay(pool_name, chats(2))
    assert segment_path(pool_name).stat().st_ino == before.st_ino
    CacheResidencyPool.destroy(pool_name)
