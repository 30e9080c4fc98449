"""What a session keeps about a block and about operations that outlive their block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from shmcache.io import CacheIoTicket
from shmcache.policy.identity import CacheBlockId
from shmcache.prompt.header import ShardArray
from shmcache.session.backend import BlockSpec, HostAllocation, HostCopy, HostCopyOperation
from shmcache.states.lifecycle import MutableCacheTail
from shmcache.states.storage import CacheBlockStorage, CacheIoOperationKey


class BlockFile(NamedTuple):
    """A block as a file, and what every byte of it must be: a `StoredShard`, and whose it is.

    Contract: a persistent file belongs to a prompt cache: it is not charged and not deleted.
    """

    path: Path
    arrays: Mapping[str, ShardArray]
    payload_bytes: int
    payload_sha256: str
    persistent: bool = False


Ticket: TypeAlias = "CacheIoTicket[HostCopy | BlockFile]"


class PendingIo(NamedTuple):
    """A read or write in the hands of the disk worker (`CacheIoOperation`)."""

    key: CacheIoOperationKey
    ticket: Ticket


Storage: TypeAlias = (
    "CacheBlockStorage[tuple[Any, ...], HostCopy, BlockFile, HostCopyOperation, PendingIo]"
)


class Pending(NamedTuple):
    """What a copy to the host, or a read, holds until it is done.

    `bound`: host bytes that were reserved for it. `target`: the memory itself, where the pool has
    charged that instead. `transfer`: bytes of the transfer axis that are published.
    """

    bound: int = 0
    transfer: int = 0
    target: HostAllocation | None = None


IDLE = Pending()


LEASED: Final = HostAllocation(0, 0)  # of copies that are leases: the pool has charged the block


class Contribution(NamedTuple):
    """What one block adds to the session's sums; see ledger.py."""

    device: int = 0
    bound: int = 0
    demotion: int = 0
    disk: int = 0
    imported: int = 0
    allocation: HostAllocation | None = None


class BlockRecord:
    """One sealed block. `pending`: what its demotion or read holds of the host."""

    __slots__ = ("counted", "id", "imported", "logical_bytes", "pending", "spec", "storage")

    def __init__(
        self,
        id: CacheBlockId,
        spec: BlockSpec,
        storage: Storage,
        *,
        imported: bool = False,
        logical_bytes: int | None = None,
    ) -> None:
        self.id = id
        self.spec = spec
        self.logical_bytes = spec.logical_bytes if logical_bytes is None else logical_bytes
        self.storage = storage
        self.imported = imported
        self.pending = IDLE
        self.counted = Contribution()


class WriteReservation(NamedTuple):
    """A write whose buffers exist, whatever has become of its block."""

    key: CacheIoOperationKey
    logical_bytes: int
    allocation: HostAllocation
    transfer_bytes: int
    ticket: Ticket


class RetiringDemotion(NamedTuple):
    """A copy to the host that an older generation began; it holds both memories until it ends."""

    operation: HostCopyOperation
    device_bytes: int
    pending: Pending


class RetiringRead(NamedTuple):
    """A read that was cancelled; it holds its buffers until the worker has dropped it."""

    ticket: Ticket
    layer: int
    pending: Pending


class Tail:
    """The unsealed end of one layer: a device buffer of a whole block, filled from the front.

    Why a whole block: a token is then copied once and sealing copies nothing. What is published is
    what is filled. A tail is replaced, never changed; buffers are shared by the tails of one block.
    """

    __slots__ = ("arrays", "capacity", "logical_bytes", "spec", "start", "tokens")

    def __init__(
        self, start: int, tokens: int, spec: BlockSpec, arrays: tuple[Any, ...], logical_bytes: int
    ) -> None:
        self.start = start
        self.tokens = tokens
        self.spec = spec
        self.arrays = arrays
        self.capacity = spec.tokens
        self.logical_bytes = logical_bytes  # of the whole buffer

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.tokens

    def filled(self, tokens: int) -> Tail:
        """The same buffer with so many tokens in it."""
        return Tail(self.start, tokens, self.spec, self.arrays, self.logical_bytes)

    def books(self) -> MutableCacheTail:
        """What the lifecycle knows of it."""
        return MutableCacheTail(self.logical_bytes // self.capacity * self.tokens, self.end)
