"""The backend whose device is this process's own memory; it runs everywhere, tests first.

Why: all flows of a session can be watched without an accelerator. A copy is carried out by whoever
waits for it first: from memory to memory another thread gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from shmcache.bounds import bounded, instance
from shmcache.policy.identity import CacheBlockId
from shmcache.session.backend import BlockSpec, DType, HostAllocation, HostArray, HostCopy
from shmcache.session.copies import CopyingBackend

_GRANULE_BYTES: Final = 64


class PrivateHostMemory:
    """Host copies in this process's own memory; each array gets whole granules."""

    def __init__(self, granule_bytes: int = _GRANULE_BYTES) -> None:
        self._granule = bounded(granule_bytes, "granule_bytes", 1, 1 << 30)

    @property
    def admits(self) -> bool:
        """The pool knows nothing of this memory but what is reserved and published."""
        return False

    @property
    def pool_evicts(self) -> bool:
        """What is here was admitted, and nobody else may take it."""
        return False

    def bound(self, id: CacheBlockId, spec: BlockSpec) -> int:
        """What `allocate` will take, exactly."""
        return sum(self._rounded(array.nbytes) for array in spec.arrays)

    def transfer_bytes(self, spec: BlockSpec) -> int:
        """Whole buffers move."""
        return sum(self._rounded(array.nbytes) for array in spec.arrays)

    def allocate(self, id: CacheBlockId, spec: BlockSpec) -> HostCopy:
        """One buffer per array."""
        arrays = []
        for array in spec.arrays:
            buffer = np.empty(self._rounded(array.nbytes), np.uint8)
            arrays.append(buffer[: array.nbytes].view(array.dtype).reshape(array.shape))
        capacity = self.bound(id, spec)
        return HostCopy(tuple(arrays), HostAllocation(capacity, capacity), capacity)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule


class NumpyBackend(CopyingBackend[HostArray]):
    """Arrays of numpy (see the module).

    `on_copy(to, block_id)` is called before each copy to `CacheTier.HOST` or `CacheTier.DEVICE`, by
    the thread that carries it out and without any lock of the session: tests wait or raise in it.
    `reads_host=True` lets attention read host copies where they lie.
    """

    def describe(self, array: HostArray) -> tuple[tuple[int, ...], DType]:
        """Shape and element type of an array."""
        instance(array, np.ndarray, "array")
        return array.shape, array.dtype

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> HostArray:
        """An array, contents undefined."""
        return np.empty(shape, dtype)

    def write(self, target: HostArray, start: int, source: HostArray) -> None:
        """Copy tokens."""
        target[..., start : start + source.shape[-2], :] = source

    def view(self, array: HostArray, start: int, stop: int) -> HostArray:
        """Tokens without a copy, read-only."""
        part = array[..., start:stop, :]
        part.flags.writeable = False
        return part

    def host_view(self, array: HostArray) -> HostArray:
        """The array, read-only."""
        return self.view(array, 0, array.shape[-2])

    def _start_to_host(
        self, sources: Sequence[HostArray], targets: Sequence[HostArray]
    ) -> Callable[[], None]:
        def finish() -> None:
            for target, source in zip(targets, sources, strict=True):
                np.copyto(target, source, casting="no")

        return finish

    def _start_to_device(self, sources: Sequence[HostArray]) -> Callable[[], tuple[HostArray, ...]]:
        return lambda: tuple(array.copy() for array in sources)
