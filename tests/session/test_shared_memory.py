"""The seams of a shared arena, with a host memory that plays one."""

from __future__ import annotations

import pytest

from shmcache.policy.identity import CacheBlockId
from shmcache.session.backend import BlockSpec, HostAllocation, HostCopy
from shmcache.session.numpy_backend import PrivateHostMemory
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from shmcache.states.storage import CacheStoragePhase as Phase
from tests.session.rig import (
    Session,
    axes,
    backend,
    content,
    grow,
    published,
    tiny,
    tokens,
)

pytestmark = pytest.mark.usefixtures("engine")


class GroupMemory(PrivateHostMemory):
    """All layers of one token range lie in one allocation that the pool charges by itself."""

    def __init__(self) -> None:
        super().__init__(1)
        self.allocations: dict[int, HostAllocation] = {}
        self.shared: dict[CacheBlockId, HostCopy] = {}

    def bound(self, id: CacheBlockId, spec: BlockSpec) -> int:
        return 0 if id.start in self.allocations else 100

    @property
    def admits(self) -> bool:
        return True

    def allocate(self, id: CacheBlockId, spec: BlockSpec) -> HostCopy:
        made = super().allocate(id, spec)
        allocation = self.allocations.setdefault(id.start, HostAllocation(100, 0))
        return HostCopy(made.arrays, allocation, 32)

    def ready(self, id: CacheBlockId) -> HostCopy | None:
        return self.shared.get(id)


def grouped(memory: GroupMemory) -> CacheSession:
    return Session(
        model=tiny(3),
        options=PagedCacheOptions(4, 1 << 10, 200, 1),
        backend=backend(),
        memory=memory,
    )


def test_layers_in_one_allocation_are_counted_once() -> None:
    with grouped(GroupMemory()) as session:
        for layer in range(3):
            grow(session, 4, layer=layer)
        for id in session.blocks():
            session.demote(id)
        core = session._core
        assert core.sums().host == 100
        assert published(session) == (0, 0, 0, 0)
        assert session.report().current_host_bytes == 100
        assert sum(row.stats.current_host_bytes for row in session.report().per_layer) == 100
        first = session.blocks()[0]
        session.remove(first)
        assert core.sums().host == 100
        session.clear()
        assert core.sums().host == 0


def test_a_shared_block_leaves_the_device_for_free() -> None:
    memory = GroupMemory()
    with grouped(memory) as session:
        grow(session, 4)
        first = session.blocks()[0]
        arrays = tokens(0, 4), -tokens(0, 4)
        memory.shared[first] = HostCopy(arrays, HostAllocation(0, 0), 32)
        before = session.pool.report()
        session.demote(first)
        assert session.phase(first) is Phase.HOST_UNBACKED
        after = session.pool.report()
        assert axes(after) == (0, 0, 0, 0)
        assert after.peak_host_bytes == before.peak_host_bytes == 0
        assert session.report().host_demotions == 1
        assert content(session) == [0, 1, 2, 3]
