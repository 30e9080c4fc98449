"""A plan against the pool that it describes, made for real; and its curve, drawn."""

from __future__ import annotations

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CacheResidencyPool,
    SegmentError,
    bounds,
    segment_path,
)
from shmcache.errors import WorkloadError
from shmcache.workloads.block_room import BlockRoom
from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.geometries import Geometry, TokenLayers, geometry
from shmcache.workloads.hit_curve import hit_curve
from shmcache.workloads.plan_drawing import text_curve, write_plot
from shmcache.workloads.planning import CapacityPlan, PlanOptions, plan_capacity
from tests.support import ROOT

CHATS = [
    request.block_ids
    for request in conversation_trace(ConversationOptions(seed=5, conversations=80))
]


def model(bytes_per_token: int) -> Geometry:
    return Geometry("made-up", "", (TokenLayers(1, bytes_per_token, number_bytes=1),))


def made(plan: CapacityPlan, name: str) -> CacheResidencyPool:
    """The pool of a plan, by its options."""
    return CacheResidencyPool.create(name, plan.geometry.limits, **plan.pool_options)


# ---- the pool is what was planned ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_token", "options"),
    [
        (256, PlanOptions(requests=3, contexts=(1000, 40))),
        (23_040, PlanOptions(block_tokens=16, contexts=(2000,))),  # 90 pages: no slab of 2 MiB fits
        (70_001, PlanOptions(block_tokens=1, contexts=(333,), policy="lru")),
        (131_072, PlanOptions(block_tokens=32, contexts=(256,), workers=40)),  # above 2 MiB
        (1, PlanOptions(arena_bytes=(1 << 20) + 77, policy="lfu")),
        (5, PlanOptions(block_tokens=7, trace_block_tokens=7, requests=600, contexts=(70,))),
    ],
)
def test_create_makes_exactly_the_planned_bytes_and_blocks(
    pool_name: str, bytes_per_token: int, options: PlanOptions
) -> None:
    plan = plan_capacity(model(bytes_per_token), options)
    with made(plan, pool_name) as pool:
        assert segment_path(pool_name).stat().st_size == plan.segment_bytes
        assert pool.geometry() == plan.geometry
        blocks = [pool.allocate(plan.block_bytes) for _ in range(plan.blocks)]
        assert blocks[0].capacity == plan.place_bytes
        assert pool.arena_report().used_bytes == plan.blocks * plan.place_bytes
        with pytest.raises((SegmentError.ArenaFull, CachePoolError.BudgetExceeded)):
            pool.allocate(plan.block_bytes)
    CacheResidencyPool.destroy(pool_name)


@given(st.integers(1, 5 << 20), st.integers(1, 10_000))
def test_blocks_fill_their_slabs(block_bytes: int, blocks: int) -> None:
    room = BlockRoom(block_bytes).without_waste()
    arena_bytes = room.arena_bytes(blocks)
    assert room.blocks(arena_bytes) >= blocks
    assert arena_bytes == bounds.ARENA_BYTES_MIN or room.blocks(arena_bytes - 1) < blocks
    per_slab = room.slab_bytes // room.place_bytes
    slabs = blocks // per_slab + 1
    # What is lost is less than a page per slab: a slab begins on one.
    assert arena_bytes <= max(blocks * room.place_bytes + 4096 * slabs, bounds.ARENA_BYTES_MIN)


def test_the_geometry_of_a_pool_that_is_not_made() -> None:
    limits = CachePoolLimits(1, 1 << 20, 1, 0)
    geometry_only = CacheResidencyPool.geometry_for(limits, arena_bytes=1 << 20, owners_max=3)
    with CacheResidencyPool(limits, arena_bytes=1 << 20, owners_max=3) as pool:
        assert pool.geometry() == geometry_only
    with pytest.raises(ValueError, match="owners_max"):
        CacheResidencyPool.geometry_for(limits, owners_max=0)


# ---- what decides the size ----------------------------------------------------------------------


def test_requests_in_flight_decide_without_a_trace() -> None:
    plan = plan_capacity(
        geometry("llama-3.1-8b"),
        PlanOptions(requests=8, workers=4, contexts=(8192, 4096, 8192)),
    )
    assert [(c.tokens, c.blocks, c.sequence_bytes) for c in plan.contexts] == [
        (4096, 256, 512 << 20),
        (8192, 512, 1 << 30),
    ]
    assert plan.blocks == plan.in_flight_blocks == 8 * 512
    assert plan.geometry.limits == CachePoolLimits(8 << 30, 8 << 30, 4 << 30, 0)
    assert plan.traffic is None


def test_many_workers_and_requests_get_rows_for_a_reload() -> None:
    plan = plan_capacity(model(1), PlanOptions(workers=100, requests=2000, contexts=(16,)))
    assert (plan.geometry.owners_max, plan.geometry.managers_max) == (202, 4000)


def test_a_window_and_a_state_count_in_the_sequence_not_in_the_block() -> None:
    hybrid = plan_capacity(geometry("jamba-1.5-mini"), PlanOptions(contexts=(4096,)))
    assert hybrid.block_bytes == 16 * 16_384
    assert hybrid.state_bytes == 16_515_072
    assert hybrid.contexts[0].sequence_bytes == 4096 * 16_384 + 16_515_072


def test_a_target_decides_when_it_takes_more() -> None:
    """The smallest pool: one trace block less and the rate is missed."""
    options = PlanOptions(block_tokens=512, contexts=(512,), target_rate=0.7, policy="lru")
    plan = plan_capacity(model(1), options, CHATS)
    curve = hit_curve(CHATS)
    assert plan.traffic is not None
    assert plan.blocks == plan.traffic.target_blocks == curve.blocks_for(0.7)
    assert plan.traffic.reached
    assert plan.traffic.planned.lru_rate == curve.rate(plan.blocks) >= 0.7
    assert curve.rate(plan.blocks - 1) < 0.7


@pytest.mark.parametrize("tokens", [128, 512, 1024])
def test_blocks_of_another_size_than_the_traces(tokens: int) -> None:
    """Smaller: as many per block of the trace, hit and missed together. Larger: every n-th."""
    options = PlanOptions(block_tokens=tokens, contexts=(1,), arena_bytes=4 << 20, policy="lru")
    plan = plan_capacity(model(64), options, CHATS)
    assert plan.traffic is not None
    blocks = plan.blocks
    assert blocks == (4 << 20) // (64 * tokens)
    if tokens == 128:  # an LRU pool of the small blocks, each with an id of its own
        small = [[4 * one + part for one in ids for part in range(4)] for ids in CHATS]
        assert plan.traffic.planned.lru_rate == hit_curve(small).rate(blocks)
    elif tokens == 1024:
        large = [[*ids[1::2], *ids[len(ids) // 2 * 2 :]] for ids in CHATS]
        assert plan.traffic.planned.lru_rate == hit_curve(large).rate(blocks)
    else:
        assert plan.traffic.planned.lru_rate == hit_curve(CHATS).rate(blocks)


def test_a_target_above_the_ideal_is_not_reached() -> None:
    plan = plan_capacity(model(1), PlanOptions(target_rate=0.99, policy="lru"), CHATS)
    assert plan.traffic is not None
    assert plan.traffic.target_blocks is None
    assert not plan.traffic.reached
    assert plan.blocks == plan.in_flight_blocks


def test_a_given_size_overrules_and_says_what_it_reaches() -> None:
    options = PlanOptions(target_rate=0.7, policy="lru", arena_bytes=1 << 20)
    plan = plan_capacity(model(64), options, CHATS)
    assert plan.traffic is not None
    assert plan.blocks == 1024
    assert plan.traffic.target_blocks is not None
    assert plan.traffic.target_blocks > 1024
    assert not plan.traffic.reached


def test_the_curve_rises_to_the_ideal_and_sharing_is_worth_something() -> None:
    plan = plan_capacity(model(64), PlanOptions(workers=4), CHATS)
    assert plan.traffic is not None
    points = plan.traffic.points
    assert len(points) == 8
    assert points[-1].lru_rate == points[-1].policy_rate == plan.traffic.ideal_rate
    for small, large in itertools.pairwise(points):
        assert small.arena_bytes * 2 == large.arena_bytes
        assert small.lru_rate <= large.lru_rate
    assert all(point.private_rate <= point.lru_rate for point in points)
    assert points[4].private_rate < points[4].lru_rate
    assert any(point.policy_rate != point.lru_rate for point in points)


def test_what_is_simulated_is_told() -> None:
    told: list[str] = []
    plan_capacity(model(64), PlanOptions(policy="lfu"), CHATS[:50], told.append)
    assert told
    assert all("lfu" in text for text in told)


def test_a_trace_of_nothing() -> None:
    for prompts in ([], [()]):
        plan = plan_capacity(model(64), PlanOptions(workers=2), prompts)
        assert plan.traffic is not None
        assert plan.traffic.planned.lru_rate == plan.traffic.ideal_rate == 0
        assert list(text_curve(plan.traffic))


# ---- what no pool can be ------------------------------------------------------------------------

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"block_tokens": 0}, "block_tokens"),
    ({"block_tokens": 100}, "divide"),
    ({"contexts": ()}, "length of a request"),
    ({"contexts": (0,)}, "a context"),
    ({"requests": 0}, "requests"),
    ({"workers": 1025}, "workers"),
    ({"target_rate": 1.5}, "hit rate"),
    ({"target_rate": float("nan")}, "hit rate"),
    ({"arena_bytes": 100}, "arena_bytes"),
    ({"policy": "fifo"}, "policy"),
)


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PlanOptions(**options)


@pytest.mark.parametrize(
    ("geometry_", "options", "words"),
    [
        (geometry("mamba2-7b"), PlanOptions(), "nothing per token"),
        (model(1), PlanOptions(target_rate=0.5), "give both"),
        (model(1 << 40), PlanOptions(), "bytes of a block"),
        (model(1), PlanOptions(block_tokens=1, contexts=(1 << 25,)), "blocks"),
        (model(1 << 20), PlanOptions(arena_bytes=1 << 20), "blocks"),
        (model(1 << 30), PlanOptions(contexts=(1 << 20,)), "arena_bytes"),
    ],
)
def test_what_no_pool_can_be(geometry_: Geometry, options: PlanOptions, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_capacity(geometry_, options)


# ---- drawing ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> CapacityPlan:
    """A plan whose model has a name that markup must not be broken by."""
    named = model(64)._replace(name="<a&b>")
    return plan_capacity(named, PlanOptions(workers=4, policy="lru"), CHATS)


def test_the_text_is_a_curve(drawn: CapacityPlan) -> None:
    assert drawn.traffic is not None
    lines = list(text_curve(drawn.traffic))
    assert max(map(len, lines)) <= 79
    rows = [line.partition("│")[2] for line in lines if "│" in line]
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[at]) for row in rows) for at in range(len(rows[0]))]
    assert heights == sorted(heights)
    top = 8 * len(rows) * drawn.traffic.ideal_rate * 10 / int(lines[0].split("0%")[0])
    assert heights[-1] == pytest.approx(top, abs=1)
    assert lines[-1].split()[0] == "1MiB" or lines[-1].split()[0].endswith("iB")


def test_the_svg_has_the_curves_in_its_frame(drawn: CapacityPlan, tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    write_plot(drawn, path)
    root = ElementTree.fromstring(path.read_text())  # our own file
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    lines = root.findall("{*}polyline")
    assert len(lines) == 2
    for line in lines:
        places = [tuple(map(float, at.split(","))) for at in line.attrib["points"].split()]
        assert all(0 < x < width and 0 < y < height for x, y in places)
        assert [x for x, _ in places] == sorted(x for x, _ in places)
        assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    texts = [text.text for text in root.findall("{*}text")]
    assert texts[0] == "<a&b>: hit rate by pool size"
    assert "4 private parts, lru" in texts


def test_the_png_needs_matplotlib_and_says_so(
    drawn: CapacityPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(WorkloadError.PackageMissing, match=r"pip install 'shmcache\[plot\]'"):
        write_plot(drawn, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_the_png_is_one(tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps its fonts open."""
    pytest.importorskip("matplotlib", reason="drawing PNG needs matplotlib (extra `plot`)")
    path, command = tmp_path / "curve.png", [sys.executable, "-m", "shmcache.cli.main", "plan"]
    options = ["smollm2-135m", "--target", "0.5", "--policy", "lru", "--plot", str(path)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["curve", "curve.pdf"])
def test_another_suffix(drawn: CapacityPlan, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        write_plot(drawn, tmp_path / name)


def test_a_plan_without_a_curve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no curve"):
        write_plot(plan_capacity(model(1), PlanOptions()), tmp_path / "curve.svg")
