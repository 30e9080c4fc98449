"""Random lives of a lifecycle against a naive model, which sorts everything from the text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmcache.bounds import U64_MAX, USIZE_MAX
from shmcache.errors import CacheLifecycleError
from shmcache.states.lifecycle import CacheBlockLifecycle, CacheEvictionPolicy, MutableCacheTail
from tests.states.blocks import identity_order, ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmcache.policy.identity import CacheBlockId

    Draw = Callable[[st.SearchStrategy[Any]], Any]

layers = st.integers(0, 2)
tails = st.builds(MutableCacheTail, st.integers(0, 9), st.integers(-1, 40))
windows = st.integers(0, 3) | st.just(USIZE_MAX)
policies = st.sampled_from(CacheEvictionPolicy)


# What a step may do; the more often a name stands here, the more often it is drawn.
CALLS = """
    insert insert insert acquire acquire acquire release release remove replace replace
    choose choose choose set_tail restore_tail clear approach_a_bound
""".split()


class Model:
    """Records are plain dictionaries. A refusal is returned before anything is written."""

    def __init__(self) -> None:
        self.clock = 0
        self.blocks: dict[CacheBlockId, dict[str, Any]] = {}
        self.tails: dict[int, MutableCacheTail] = {}

    def add(self, id: CacheBlockId, protected: bool) -> None:
        self.clock += 1
        self.blocks[id] = {"leases": 0, "count": 0, "last": self.clock, "protected": protected}

    def insert(self, id: CacheBlockId, protected: bool) -> object:
        if id in self.blocks:
            return CacheLifecycleError.DuplicateBlock(id)
        if self.clock == U64_MAX:
            return CacheLifecycleError.AccessClockOverflow()
        self.add(id, protected)
        return None

    def remove(self, id: CacheBlockId) -> object:
        if id not in self.blocks:
            return CacheLifecycleError.MissingBlock(id)
        if self.blocks[id]["leases"] > 0:
            return CacheLifecycleError.BlockLeased(id)
        self.blocks.pop(id)
        return None

    def acquire(self, id: CacheBlockId) -> object:
        if id not in self.blocks:
            return CacheLifecycleError.MissingBlock(id)
        block = self.blocks[id]
        if block["leases"] == USIZE_MAX:
            return CacheLifecycleError.LeaseOverflow(id)
        if self.clock == U64_MAX:
            return CacheLifecycleError.AccessClockOverflow()
        self.clock += 1
        block["last"] = self.clock
        block["leases"] += 1
        if block["count"] < U64_MAX:
            block["count"] += 1
        return None

    def release(self, id: CacheBlockId) -> object:
        if id not in self.blocks:
            return CacheLifecycleError.MissingBlock(id)
        if self.blocks[id]["leases"] == 0:
            return CacheLifecycleError.LeaseUnderflow(id)
        self.blocks[id]["leases"] -= 1
        return None

    def replace(
        self,
        removals: list[tuple[CacheBlockId, int]],
        replacement: tuple[CacheBlockId, bool] | None,
        layer: int,
        tail: MutableCacheTail,
    ) -> object:
        removed = [id for id, _ in removals]
        if any(removed.count(id) > 1 for id in removed):
            return CacheLifecycleError.DuplicateRemoval()
        for id, expected in removals:
            if id not in self.blocks:
                return CacheLifecycleError.MissingBlock(id)
            actual = self.blocks[id]["leases"]
            if actual != expected:
                return CacheLifecycleError.UnexpectedLeaseCount(id, expected, actual)
        if replacement:
            if replacement[0] in self.blocks.keys() - set(removed):
                return CacheLifecycleError.DuplicateBlock(replacement[0])
            if self.clock == U64_MAX:
                return CacheLifecycleError.AccessClockOverflow()
        self.blocks = {id: b for id, b in self.blocks.items() if id not in removed}
        if replacement:
            self.add(*replacement)
        self.tails[layer] = tail
        return None

    def first_leased(self) -> CacheBlockId | None:
        leased = [id for id, block in self.blocks.items() if block["leases"] > 0]
        return sorted(leased, key=identity_order)[0] if leased else None

    def clear(self) -> object:
        leased = self.first_leased()
        if leased is not None:
            return CacheLifecycleError.BlockLeased(leased)
        self.blocks, self.tails = {}, {}
        return None

    def victim(
        self,
        candidates: list[CacheBlockId],
        required: CacheBlockId | None,
        window: int,
        policy: CacheEvictionPolicy,
    ) -> object:
        merged = sorted(set(candidates), key=identity_order)
        for id in merged:
            if id not in self.blocks:
                return CacheLifecycleError.MissingBlock(id)

        def key(id: CacheBlockId) -> tuple[Any, ...]:
            block = self.blocks[id]
            if policy is CacheEvictionPolicy.LEAST_RECENTLY_USED:
                return block["last"], block["count"], identity_order(id)
            return block["count"], block["last"], identity_order(id)

        recent = recent_blocks(merged, window)
        eligible = [
            id
            for id in merged
            if self.blocks[id]["leases"] == 0
            and not self.blocks[id]["protected"]
            and id != required
            and id not in recent
        ]
        return sorted(eligible, key=key)[0] if eligible else None

    def counts(self, candidates: list[CacheBlockId], window: int) -> object:
        rest = []
        for id in candidates:
            if id not in self.blocks:
                return CacheLifecycleError.MissingBlock(id)
            if not self.blocks[id]["protected"] and id not in rest:
                rest.append(id)
        kept = [id.global_layer for id in recent_blocks(rest, window)]
        return [(layer, kept.count(layer)) for layer in sorted(set(kept))]


def recent_blocks(ids: list[CacheBlockId], window: int) -> list[CacheBlockId]:
    found = []
    for layer in {id.global_layer for id in ids}:
        group = [id for id in ids if id.global_layer == layer]
        group.sort(key=lambda id: (id.start, identity_order(id)), reverse=True)
        found += group[: min(window, len(group))]
    return found


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except CacheLifecycleError as error:
        return error


class Lives(RuleBasedStateMachine):
    """Every call is made on both; answers, refusals and the complete state must agree.

    There is one rule, which draws the call: of several rules hypothesis would switch most off in
    each life, and lives would go nowhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.real = CacheBlockLifecycle()
        self.model = Model()

    @rule(data=st.data(), call=st.sampled_from(CALLS))
    def step(self, data: st.DataObject, call: str) -> None:
        getattr(self, call)(data.draw)

    def both(self, real: Callable[[], object], model: object) -> None:
        assert outcome(real) == model

    def likely(self) -> st.SearchStrategy[CacheBlockId]:
        """Mostly registered blocks."""
        known = sorted(self.model.blocks, key=identity_order)
        return st.sampled_from(known) | st.sampled_from(known) | ids if known else ids

    def insert(self, draw: Draw) -> None:
        for id in draw(st.lists(ids, min_size=1, max_size=4)):
            protected = draw(st.booleans())
            self.both(partial(self.real.insert, id, protected), self.model.insert(id, protected))

    def remove(self, draw: Draw) -> None:
        id = draw(self.likely())
        self.both(lambda: self.real.remove(id), self.model.remove(id))

    def acquire(self, draw: Draw) -> None:
        id = draw(self.likely())
        self.both(lambda: self.real.acquire(id), self.model.acquire(id))

    def release(self, draw: Draw) -> None:
        id = draw(self.likely())
        self.both(lambda: self.real.release(id), self.model.release(id))

    def replace(self, draw: Draw) -> None:
        removals = []
        for id in draw(st.lists(self.likely(), max_size=3)):
            leases = self.model.blocks.get(id, {"leases": 0})["leases"]
            removals.append((id, draw(st.sampled_from([leases, leases, leases, 0, 1]))))
        anything = self.likely()
        new = st.sampled_from([id for id, _ in removals]) | anything if removals else anything
        added = draw(st.none() | st.tuples(new, st.booleans()))
        arguments = (removals, added, draw(layers), draw(tails))
        self.both(lambda: self.real.replace(*arguments), self.model.replace(*arguments))

    def set_tail(self, draw: Draw) -> None:
        layer, tail = draw(layers), draw(tails)
        self.both(lambda: self.real.set_tail(layer, tail), self.model.tails.get(layer))
        self.model.tails[layer] = tail

    def restore_tail(self, draw: Draw) -> None:
        layer, tail = draw(layers), draw(st.none() | tails)
        self.real.restore_tail(layer, tail)
        self.model.tails.pop(layer, None)
        if tail is not None:
            self.model.tails[layer] = tail

    def clear(self, draw: Draw) -> None:
        self.both(self.real.clear, self.model.clear())

    def choose(self, draw: Draw) -> None:
        candidates = draw(st.just([*self.model.blocks]) | st.lists(self.likely()))
        required, window = draw(st.none() | self.likely()), draw(windows)
        arguments = (candidates, required, window, draw(policies))
        self.both(lambda: self.real.eviction_candidate(*arguments), self.model.victim(*arguments))
        counts = self.model.counts(candidates, window)
        self.both(
            lambda: list(self.real.recent_protection_counts(candidates, window).items()), counts
        )

    def approach_a_bound(self, draw: Draw) -> None:
        """The clock's end comes late in a life: beyond it no block is added."""
        left = draw(st.integers(0, 3))
        if draw(st.booleans()) and len(self.model.blocks) > 8:
            self.real._access_clock = self.model.clock = max(self.model.clock, U64_MAX - left)
        id, name = draw(self.likely()), draw(st.sampled_from(["leases", "access_count"]))
        if id in self.model.blocks:
            self.model.blocks[id][name.removeprefix("access_")] = U64_MAX - left
            setattr(self.real._blocks[id], name, U64_MAX - left)

    @invariant()
    def same_state(self) -> None:
        real = {
            id: (r.leases, r.access_count, r.last_access, r.protected_prefix)
            for id, r in self.real._blocks.items()
        }
        assert real == {id: tuple(block.values()) for id, block in self.model.blocks.items()}
        assert self.real._access_clock == self.model.clock
        assert self.real.tails() == sorted(self.model.tails.items(), key=lambda item: item[0])
        assert self.real.first_leased() == self.model.first_leased()

    @invariant()
    def accesses_are_distinct_and_past(self) -> None:
        accesses = [record.last_access for record in self.real._blocks.values()]
        assert len(set(accesses)) == len(accesses)
        assert all(access <= self.real._access_clock for access in accesses)

    @invariant()
    def queries_agree(self) -> None:
        for id, block in self.model.blocks.items():
            assert self.real.lease_count(id) == block["leases"]
            assert self.real.is_leased(id) == (block["leases"] > 0)
            assert self.real.is_protected_prefix(id) == block["protected"]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(ids), policies)
def test_order_of_candidates_does_not_matter(
    candidates: list[CacheBlockId], policy: CacheEvictionPolicy
) -> None:
    lifecycle = CacheBlockLifecycle()
    for id in dict.fromkeys(candidates):
        lifecycle.insert(id, False)
    first = lifecycle.eviction_candidate(candidates, None, 1, policy)
    assert lifecycle.eviction_candidate(candidates[::-1], None, 1, policy) == first
    assert lifecycle.eviction_candidate(set(candidates), None, 1, policy) == first


@given(st.integers(0, U64_MAX), st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_tail_comes_back(size: int, end: int) -> None:
    tail = MutableCacheTail(size, end)
    for encode, decode in (
        (msgspec.json.encode, msgspec.json.decode),
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
    ):
        assert decode(encode(tail), type=MutableCacheTail) == tail
