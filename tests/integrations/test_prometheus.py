"""Metrics: read by a real parser they are the snapshot's figures; dashboard and rules name them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

import shmcache as sc
from shmcache.integrations.prometheus import BLOCK_STATES, STANDINGS, PoolCollector
from shmcache.integrations.watched import STATES
from tests.pool.raw import Segment
from tests.support import ROOT, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = sc.CachePoolLimits(1 << 20, 4 << 20, 1 << 20, 0)
DASHBOARD = (ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
RULES = (ROOT / "docs" / "alert-rules.yaml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with (
        sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=4 << 20) as made,
        made.register_manager(3),
        made.reserve(sc.CachePoolUsage(device_bytes=5)),
    ):
        lease = made.allocate(100).publish(bytes(32)).lease
        made.lookup(bytes(32))
        made.lookup(bytes([1]) * 32)
        yield made
        lease.release()


@pytest.fixture
def registry(pool_name: str) -> Iterator[CollectorRegistry]:
    collector, registry = PoolCollector(pool_name), CollectorRegistry()
    registry.register(collector)
    yield registry
    collector.close()


def scrape(registry: CollectorRegistry) -> Samples:
    """By name and labels; a sample that is told twice is a mistake."""
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: object) -> float:
    return found[f"shmcache_{name}", frozenset((k, str(v)) for k, v in labels.items())]


def names(found: Samples) -> set[str]:
    return {name for name, _ in found}


def test_the_figures_are_the_snapshot_s(
    pool: sc.CacheResidencyPool, registry: CollectorRegistry
) -> None:
    found, taken = scrape(registry), pool.snapshot()
    name = pool.name
    assert value(found, "up", pool=name) == 1
    for axis, level in taken.axes.items():
        assert value(found, "axis_bytes", pool=name, axis=axis) == level.current_bytes
        assert value(found, "axis_peak_bytes", pool=name, axis=axis) == level.peak_bytes
        assert value(found, "axis_limit_bytes", pool=name, axis=axis) == level.limit_bytes
    assert taken.arena is not None
    for counter in ("hits", "misses"):
        assert value(found, f"{counter}_total", pool=name) == getattr(taken.arena, counter) == 1
    assert value(found, "blocks_stored_total", pool=name) == taken.arena.stored == 1
    assert value(found, "arena_used_bytes", pool=name) == taken.arena.used_bytes
    assert value(found, "class_blocks", pool=name, block_bytes=128, state="leased") == 1
    (owner,) = taken.owners
    assert value(found, "owner_pid", pool=name, slot=owner.slot) == owner.pid
    assert value(found, "owner_bytes", pool=name, slot=owner.slot, axis="device") == 5
    assert value(found, "owner_leased_bytes", pool=name, slot=owner.slot) == 128
    assert value(found, "managers", pool=name) == value(found, "reservations", pool=name) == 1


def test_openmetrics_parses_too(pool: sc.CacheResidencyPool, registry: CollectorRegistry) -> None:
    text = openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    families = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert {"shmcache_up", "shmcache_hits"} <= families


def test_registering_looks_at_no_pool() -> None:
    """Else an application could not start before its pool is there."""
    registry, collector = CollectorRegistry(), PoolCollector("no-such-pool")
    registry.register(collector)
    assert value(scrape(registry), "up", pool="no-such-pool") == 0
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(collector)


def test_the_dead_count_as_dead(pool: sc.CacheResidencyPool, registry: CollectorRegistry) -> None:
    with Worker("import shmcache as sc") as worker:
        worker.call("pool = sc.CacheResidencyPool.attach(name)\npool.report()", name=pool.name)
        worker.kill()
        found = scrape(registry)
        assert value(found, "owners", pool=pool.name, state="alive") == 1
        assert value(found, "owners", pool=pool.name, state="dead") == 1
        slot = next(row.slot for row in pool.owners() if row.pid == worker.pid)
        assert value(found, "owner_alive", pool=pool.name, slot=slot) == 0
    pool.sweep()
    assert value(scrape(registry), "owners", pool=pool.name, state="dead") == 0


def test_an_ended_pool_has_a_state_and_nothing_else(
    pool: sc.CacheResidencyPool, registry: CollectorRegistry
) -> None:
    with Segment(sc.segment_path(pool.name)) as raw:
        raw.damage_total()
        pool.verify()
    found = scrape(registry)
    assert names(found) == {"shmcache_up", "shmcache_pool_state"}
    assert value(found, "pool_state", pool=pool.name, state="poisoned") == 1
    assert sum(found.values()) == 1
    sc.CacheResidencyPool.destroy(pool.name, force=True)
    assert value(scrape(registry), "pool_state", pool=pool.name, state="absent") == 1


def test_labels_are_bounded(pool: sc.CacheResidencyPool, registry: CollectorRegistry) -> None:
    allowed = {
        "axis": {"device", "host", "transfer_in_flight", "disk"},
        "pool": {pool.name},
        "slot": {str(slot) for slot in range(pool.geometry().owners_max)},
        "block_bytes": {str(kind.block_bytes) for kind in pool.arena_report().classes},
        "state": {*STATES, *STANDINGS, *BLOCK_STATES},
    }
    for _, labels in scrape(registry):
        for label, text in labels:
            assert text in allowed[label]


# ---- dashboard, rules and page -------------------------------------------------------------------


def expressions() -> list[str]:
    dashboard: Any = json.loads(DASHBOARD)
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [rule["expr"] for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]
    assert len(targets) > 10
    assert len(rules) > 5
    return [*targets, *rules]


def test_dashboard_and_rules_use_metrics_that_exist_with_labels_that_they_have(
    pool: sc.CacheResidencyPool, registry: CollectorRegistry
) -> None:
    known: dict[str, dict[str, set[str]]] = {}
    for name, labels in scrape(registry):
        for label, text in labels:
            known.setdefault(name, {}).setdefault(label, set()).add(text)
    for text in expressions():
        used = re.findall(r"\b(shmcache_\w+)(?:\{([^}]*)\})?", text)
        assert used, text
        for name, selector in used:
            assert name in known, text
            for label, how, wanted in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
                assert label in known[name], text
                if label != "pool":
                    alternatives = wanted.split("|") if how == "=~" else [wanted]
                    assert set(alternatives) <= known[name][label], text
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", text)
        labels_of_all = set.intersection(*(set(known[name]) for name, _ in used))
        assert set(re.findall(r"\w+", " ".join(grouped))) <= labels_of_all, text


def test_the_page_lists_every_metric(
    pool: sc.CacheResidencyPool, registry: CollectorRegistry
) -> None:
    told = names(scrape(registry))
    assert len(told) > 30
    assert set(re.findall(r"`(shmcache_\w+)`", PAGE)) == told
