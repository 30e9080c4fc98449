"""The curve of all sizes against a simulation per size, the engine, and published numbers."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.hit_curve import HitCurve, engine_hit_rate, hit_curve, private_curves
from shmcache.workloads.traces import open_trace
from tests.support import ROOT

TRACES = ROOT.parent / "shared" / "data" / "traces"
CHATS = [
    request.block_ids
    for request in conversation_trace(ConversationOptions(seed=3, conversations=60))
]


def lru_hits(prompts: Sequence[Sequence[int]], blocks: int) -> int:
    """As slow and plain as can be: the prefix that is there, then all touched from the end."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for ids in prompts:
        prefixes = [tuple(ids[: end + 1]) for end in range(len(ids))]
        hits += sum(1 for _ in itertools.takewhile(cache.__contains__, prefixes))
        for prefix in reversed(prefixes):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


prompts_of_few_ids = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=25)


@given(prompts_of_few_ids, st.integers(0, 30))
def test_every_size_is_as_simulated(prompts: list[list[int]], blocks: int) -> None:
    curve = hit_curve(prompts)
    assert curve.hits(blocks) == lru_hits(prompts, blocks)
    assert curve.references == sum(map(len, prompts))
    distinct = {tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))}
    assert curve.blocks == len(distinct)
    assert curve.hits(curve.blocks) == curve.hits(10**9) == curve.references - len(distinct)


@given(prompts_of_few_ids, st.integers(1, 4), st.integers(0, 12))
def test_private_caches_are_curves_of_their_own(
    prompts: list[list[int]], workers: int, blocks: int
) -> None:
    curves = private_curves(prompts, workers)
    for worker, curve in enumerate(curves):
        assert curve.hits(blocks) == lru_hits(prompts[worker::workers], blocks)


@given(prompts_of_few_ids, st.floats(0.01, 1.0))
def test_the_size_for_a_rate_is_the_smallest(prompts: list[list[int]], rate: float) -> None:
    curve = hit_curve(prompts)
    blocks = curve.blocks_for(rate)
    if not curve.references:
        return
    if blocks is None:
        assert curve.ideal_rate < rate
    else:
        assert curve.rate(blocks) >= rate - 1e-9
        assert blocks == 0 or curve.rate(blocks - 1) < rate


@pytest.mark.parametrize("blocks", [0, 10, 60, 150, 100_000])
def test_the_engine_finds_exactly_what_the_curve_says(blocks: int) -> None:
    """From the longest request on: a longer one keeps its beginning, and a block may differ."""
    curve, blocks = hit_curve(CHATS), blocks + max(map(len, CHATS))
    assert engine_hit_rate(CHATS, blocks, "lru") == pytest.approx(curve.rate(blocks), abs=1e-12)


def test_other_policies_are_simulated_by_the_engine() -> None:
    curve = hit_curve(CHATS)
    rate = engine_hit_rate(CHATS, 60, "adaptive")
    assert 0 < rate < curve.ideal_rate
    assert rate != curve.rate(60)


def test_nothing_at_all() -> None:
    for curve in (hit_curve([]), hit_curve([[], []])):
        assert (curve.blocks, curve.rate(5), curve.ideal_rate) == (0, 0.0, 0.0)
    assert engine_hit_rate([], 5, "lru") == 0.0


@pytest.mark.parametrize("trace", ["mooncake_conversation", "mooncake_synthetic"])
def test_recorded_traffic_has_the_published_hits(trace: str) -> None:
    if not TRACES.exists():
        pytest.skip("the recorded traces are not beside this checkout")
    known = json.loads((TRACES / "reference.json").read_text())["traces"][trace]
    with open_trace(TRACES / f"{trace}.jsonl.gz") as reader:
        prompts = [request.block_ids for request in reader]
    curve, private = hit_curve(prompts), private_curves(prompts, 4)
    assert (curve.references, curve.blocks) == (known["block_refs"], known["unique_blocks"])
    for row in known["capacity_sweep"]:
        blocks = row["capacity_blocks"]
        assert curve.hits(blocks) == row["lru_hits"]
        assert sum(part.hits(blocks // 4) for part in private) == row["private4_hits"]
    check_first(hit_curve(prompts[:1000]), known["first_1000"])


def check_first(curve: HitCurve, known: dict[str, list[dict[str, int]]]) -> None:
    """The curve of a trace's beginning."""
    for row in known["capacity_sweep"]:
        assert curve.hits(row["capacity_blocks"]) == row["lru_hits"]
