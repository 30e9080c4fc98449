"""The backend whose device is this process's own memory; it runs everywhere, tests first.

Why: all flows of a session can be watched without an accelerator. A copy is carried out by whoever
waits for it first: from memory to memory another thread gains nothing.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import numpy as np

from shmcache.bounds import bounded, instance
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.session.backend import (
    BlockSpec,
    DType,
    HostAllocation,
    HostArray,
    HostCopy,
)

T = TypeVar("T")

_GRANULE_BYTES: Final = 64

CopyHook = Callable[[CacheTier, CacheBlockId], None]


def _unhindered(to: CacheTier, block_id: CacheBlockId) -> None:
    """The hook of a backend that has none."""


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


class NumpyBackend:
    """Arrays of numpy (see the module).

    `on_copy(to, block_id)` is called before each copy to `CacheTier.HOST` or `CacheTier.DEVICE`, by
    the thread that carries it out and without any lock of the session: tests wait or raise in it.
    `reads_host=True` lets attention read host copies where they lie.
    """

    def __init__(self, *, reads_host: bool = False, on_copy: CopyHook = _unhindered) -> None:
        self._reads_host = reads_host
        self._on_copy = on_copy

    @property
    def reads_host(self) -> bool:
        """Whether a lease of a host copy promotes nothing."""
        return self._reads_host

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

    def copy_to_host(
        self,
        block_id: CacheBlockId,
        operation_id: int,
        arrays: tuple[HostArray, ...],
        host: HostCopy,
    ) -> NumpyHostCopy:
        """Prepare the copy; `wait` carries it out."""

        def copy() -> HostCopy:
            self._on_copy(CacheTier.HOST, block_id)
            for target, source in zip(host.arrays, arrays, strict=True):
                np.copyto(target, source, casting="no")
            return host

        return NumpyHostCopy(block_id, operation_id, copy)

    def copy_to_device(
        self, block_id: CacheBlockId, host: HostCopy
    ) -> _Once[tuple[HostArray, ...]]:
        """Prepare the copy; `wait` carries it out."""

        def copy() -> tuple[HostArray, ...]:
            self._on_copy(CacheTier.DEVICE, block_id)
            return tuple(array.copy() for array in host.arrays)

        return _Once(copy)


class _Once(Generic[T]):
    """A call that the first waiter makes and all get the answer of.

    An exception that only ends the waiting thread (Ctrl-C) leaves the call to the next waiter.
    An error is raised as a copy: a raised one keeps the frames that it came through, and with them
    the arrays, as long as it is kept itself.
    """

    __slots__ = ("_answer", "_call", "_lock")

    def __init__(self, call: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._call: Callable[[], T] | None = call
        self._answer: T | Exception | None = None

    def wait(self) -> T:
        """The answer, or the error again."""
        with self._lock:
            if self._call is not None:
                try:
                    self._answer = self._call()
                except Exception as error:  # noqa: BLE001 (all who wait are told)
                    traceback.clear_frames(error.__traceback__)
                    self._answer = error.with_traceback(None)
                self._call = None  # and with it the source arrays
            answer: Any = self._answer
        if isinstance(answer, Exception):
            raise copy.copy(answer)
        return answer  # type: ignore[no-any-return]


class NumpyHostCopy(_Once[HostCopy]):
    """A copy to the host (`HostCopyOperation`)."""

    __slots__ = ("block_id", "operation_id")

    def __init__(
        self, block_id: CacheBlockId, operation_id: int, call: Callable[[], HostCopy]
    ) -> None:
        super().__init__(call)
        self.block_id = block_id
        self.operation_id = operation_id
