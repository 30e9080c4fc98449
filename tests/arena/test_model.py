"""Any order of operations on blocks, by several owners, against a dict of key -> bytes.

Goal: G1, G3, G4 over histories nobody thought of. The dict says what a key may show: its bytes, or
a miss; and which leases and private blocks each owner has. After every step the tables are walked
and the blocks are counted: each is free, private, published or withdrawn, and nothing else.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import shmcache as sc

MIB = 1 << 20
OWNERS = 3
SIZES = (100, 4096, 200_000, 2 * MIB)
numbers = st.integers(1, 25)
owners = st.integers(0, OWNERS - 1)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class ArenaMachine(RuleBasedStateMachine):
    """Three handles on one pool of four slabs."""

    @initialize(policy=st.sampled_from(["lru", "lfu", "adaptive"]), verify=st.booleans())
    def start(self, policy: str, verify: bool) -> None:
        limits = sc.CachePoolLimits(1, 7 * MIB, 1, 0)
        options = {"arena_bytes": 8 * MIB, "blocks_max": 40, "eviction": policy}
        first = sc.CacheResidencyPool(limits, verify="always" if verify else "never", **options)
        self.pools = [first, *(self._again(first) for _ in range(OWNERS - 1))]
        self.stored: dict[int, tuple[int, int]] = {}  # number -> (nbytes, value) last published
        self.leases: list[tuple[int, sc.Lease, int, int]] = []  # owner, lease, nbytes, value
        self.private: list[tuple[int, sc.Block, int, int]] = []
        self.serial = 0

    @staticmethod
    def _again(pool: sc.CacheResidencyPool) -> sc.CacheResidencyPool:
        import os

        return sc.CacheResidencyPool._from(os.dup(pool.fileno()), "")

    # -- what owners do

    @rule(owner=owners, nbytes=st.sampled_from(SIZES))
    def allocate(self, owner: int, nbytes: int) -> None:
        try:
            block = self.pools[owner].allocate(nbytes)
        except (sc.SegmentError.ArenaFull, sc.CachePoolError.BudgetExceeded):
            return
        self.serial += 1
        value = self.serial % 251
        block.array(np.uint8, nbytes)[...] = value
        self.private.append((owner, block, nbytes, value))

    @rule(data=st.data(), number=numbers, parent=st.none() | numbers, protected=st.booleans())
    def publish(
        self, data: st.DataObject, number: int, parent: int | None, protected: bool
    ) -> None:
        if not self.private:
            return
        index = data.draw(st.integers(0, len(self.private) - 1))
        owner, block, nbytes, value = self.private.pop(index)
        of_parent = None if parent is None else key(parent)
        keeps = protected and number % 5 == 0
        lease, created = block.publish(key(number), parent=of_parent, protected=keeps)
        if created:
            self.stored[number] = (nbytes, value)
        self._see(owner, lease, number)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.private:
            index = data.draw(st.integers(0, len(self.private) - 1))
            self.private.pop(index)[1].release()

    @rule(owner=owners, number=numbers)
    def lookup(self, owner: int, number: int) -> None:
        lease = self.pools[owner].lookup(key(number))
        if lease is not None:
            self._see(owner, lease, number)

    @rule(owner=owners, wanted=st.lists(numbers, max_size=6))
    def match(self, owner: int, wanted: list[int]) -> None:
        with self.pools[owner].match([key(number) for number in wanted]) as run:
            for index, number in zip(range(len(run)), wanted, strict=False):
                nbytes, value = self.stored[number]
                assert bytes(run[index]) == bytes([value]) * nbytes

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            index = data.draw(st.integers(0, len(self.leases) - 1))
            self.leases.pop(index)[1].release()

    @rule(owner=owners, number=numbers)
    def invalidate(self, owner: int, number: int) -> None:
        self.pools[owner].invalidate(key(number))
        assert not self.pools[owner].contains(key(number))

    @rule(owner=owners, number=numbers)
    def unprotect(self, owner: int, number: int) -> None:
        self.pools[owner].unprotect(key(number))

    @rule(owner=owners, nbytes=st.integers(1, 4 * MIB))
    def evict(self, owner: int, nbytes: int) -> None:
        self.pools[owner].evict(nbytes)

    @rule(owner=owners)
    def leave_and_come_back(self, owner: int) -> None:
        """A close gives back all of this owner's, and nothing of the others'."""
        other = self.pools[(owner + 1) % OWNERS]
        self.leases = [held for held in self.leases if held[0] != owner]
        self.private = [held for held in self.private if held[0] != owner]
        self.pools[owner].close()
        self.pools[owner] = self._again(other)

    def _see(self, owner: int, lease: sc.Lease, number: int) -> None:
        nbytes, value = self.stored[number]
        self.leases.append((owner, lease, nbytes, value))

    # -- what must hold

    @invariant()
    def leases_show_what_they_showed(self) -> None:
        for _, lease, nbytes, value in getattr(self, "leases", []):
            assert lease.nbytes == nbytes
            view = lease.array(np.uint8, nbytes)
            assert view[0] == view[-1] == value
            assert (view[:: max(nbytes // 64, 1)] == value).all()

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "pools"):
            return
        pool = self.pools[0]
        found = pool.verify()
        assert found.ok, found.problems
        report = pool.arena_report()
        assert report.private_bytes == sum(block.capacity for _, block, _, _ in self.private)
        parts = report.private_bytes + report.published_bytes + report.doomed_bytes
        assert parts == report.used_bytes == pool.report().current_host_bytes <= 7 * MIB
        leased = {(lease.block, lease.generation) for _, lease, _, _ in self.leases}
        assert sum(kind.leased + kind.doomed for kind in report.classes) >= len(leased)

    def teardown(self) -> None:
        for held in getattr(self, "leases", []):
            held[1].release()
        for held in getattr(self, "private", []):
            held[1].release()
        for pool in getattr(self, "pools", []):
            pool.close()


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArena = ArenaMachine.TestCase
