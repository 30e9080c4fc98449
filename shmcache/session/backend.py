"""What an engine supplies to a session: arrays on its device, and copies to and from the host.

Why: a session decides where blocks live; only the engine knows what an array is, how many bytes a
copy needs and when it is done. Host memory is the session's (`HostMemory`): a backend copies into
arrays it is given, so that the same backend works with private memory and with a shared arena.

Shapes: [batch, heads, tokens, width], or [batch, tokens, width] where heads share a latent. Tokens
are always the last axis but one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shmcache.policy.identity import CacheBlockId

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

HostArray: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]


class ArraySpec(NamedTuple):
    """One array of a block: everything but its bytes. `name` is what files call it."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


class BlockSpec(NamedTuple):
    """The arrays of one block."""

    arrays: tuple[ArraySpec, ...]

    @property
    def tokens(self) -> int:
        """How many tokens each array has."""
        return self.arrays[0].shape[-2]

    @property
    def logical_bytes(self) -> int:
        """Bytes of all elements, without what an allocator adds."""
        return sum(array.nbytes for array in self.arrays)


class HostAllocation:
    """A piece of host memory, by identity; it may hold the copies of several blocks.

    Units: `capacity_bytes` is what it occupies, `charge_bytes` what of that the session must
    publish as its usage: 0 where the pool itself has charged it.
    """

    __slots__ = ("__weakref__", "capacity_bytes", "charge_bytes")

    def __init__(self, capacity_bytes: int, charge_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.charge_bytes = charge_bytes


class HostCopy(NamedTuple):
    """A block in host memory: one array per array of its spec. Dropping the last one frees it.

    Units: `transfer_bytes` is what moving this copy holds of the transfer axis.
    """

    arrays: tuple[HostArray, ...]
    allocation: HostAllocation
    transfer_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """What the memory that it lies in occupies."""
        return self.allocation.capacity_bytes


class HostMemory(Protocol):
    """Where host copies lie.

    Contract: called under the session's lock, so nothing here may wait. `bound` comes first and is
    no less than what `allocate` then occupies anew. Unless `admits`, it is reserved in between.
    """

    @property
    def admits(self) -> bool:
        """Whether `allocate` itself is the admission, and the pool charges what it gives."""

    @property
    def pool_evicts(self) -> bool:
        """Whether a full host axis of the pool is no trouble, because it makes room when asked."""

    def bound(self, id: CacheBlockId, spec: BlockSpec) -> int:
        """Bytes that a copy of this block may need beyond what is allocated already."""

    def transfer_bytes(self, spec: BlockSpec) -> int:
        """What moving a copy holds of the transfer axis."""

    def allocate(self, id: CacheBlockId, spec: BlockSpec) -> HostCopy:
        """Room for a copy, contents undefined.

        Errors: `CachePoolError.BudgetExceeded` of the host axis where it `admits`; whatever
        allocators raise. Nothing is then occupied.
        """


class HostCopyOperation(Protocol):
    """A copy from device to host under way (`CacheHostDemotionOperation`)."""

    @property
    def block_id(self) -> CacheBlockId:
        """The block."""

    @property
    def operation_id(self) -> int:
        """The number the session gave it."""

    def wait(self) -> HostCopy:
        """Block until the copy is done; the same answer for all who wait.

        Contract: afterwards the operation holds no device array.
        Errors: what made the copy fail.
        """


class DeviceCopyOperation(Protocol[A_co]):
    """A copy from host to device under way."""

    def wait(self) -> tuple[A_co, ...]:
        """Block until the arrays may be used. Errors: what made the copy fail."""


class CacheBackend(Protocol[A]):
    """An engine's memory. Methods are called by several threads, never two on one array."""

    @property
    def reads_host(self) -> bool:
        """Whether attention can read host arrays in place: a lease then promotes nothing."""

    def describe(self, array: A) -> tuple[tuple[int, ...], DType]:
        """Shape and element type. Errors: TypeError for what is no array of this backend."""

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> A:
        """An array on the device, contents undefined. Under the session's lock."""

    def write(self, target: A, start: int, source: A) -> None:
        """Copy all tokens of `source` into `target`, from token `start` on."""

    def view(self, array: A, start: int, stop: int) -> A:
        """The tokens from `start` up to `stop`, without a copy."""

    def host_view(self, array: HostArray) -> A:
        """A host array as attention reads it; only where `reads_host`."""

    def copy_to_host(
        self, block_id: CacheBlockId, operation_id: int, arrays: tuple[A, ...], host: HostCopy
    ) -> HostCopyOperation:
        """Start the copy. Under the session's lock: it must not wait."""

    def copy_to_device(self, block_id: CacheBlockId, host: HostCopy) -> DeviceCopyOperation[A]:
        """Start the copy. Under the session's lock: it must not wait."""
