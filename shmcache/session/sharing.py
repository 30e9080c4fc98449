"""Published prefixes: what this session computed, for all; what others computed, without copying.

Why: workers answer the same system prompts and conversations. What one has computed lies in the
arena under the name of its tokens, and every other session leases it instead of computing it again.

Contract: a block is published only if the ids of all its tokens are known, in all layers of its
group alike: after a truncation a layer counts again when it was cut, too. Sharing never fails an
append: what cannot be published is counted and stays private. A copy that is a lease costs the
session no charge; its bytes are bounded by `leased_bytes_max`.

Concurrency: publishing reads blocks under leases of the session, with the order lock, so that
nothing takes them away meanwhile. `ready` is called with the session's lock and never waits.

Death: what was published stays. A claim passes on when its holder dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shmcache._core import Attempt, Block, Claim, Lease
from shmcache.errors import CachePoolError, CacheResidencyError, SegmentError
from shmcache.policy.identity import CacheBlockId
from shmcache.policy.prefix_keys import Tokens, token_ids
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.pool.values import CachePoolUsage
from shmcache.session.backend import BlockSpec, HostCopy, HostCopyOperation
from shmcache.session.core import SessionCore
from shmcache.session.demotions import Demotions
from shmcache.session.fixed_state import shared_states
from shmcache.session.layers import Layer
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.records import LEASED, BlockRecord
from shmcache.session.shared_groups import (
    NamedBlocks,
    SharedGroup,
    TokenIds,
    block_index,
    shared_groups,
)
from shmcache.session.slices import Bytes, class_bytes, slice_arrays
from shmcache.states.storage import CacheStoragePhase

_P = CacheStoragePhase


class CacheSharingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one session has shared so far.

    Units: blocks are those of a group of layers. `refused` counts blocks that could not be
    published, for want of room or because a copy failed; `present` those that were there already.
    """

    published: int = 0
    present: int = 0
    refused: int = 0
    matched_blocks: int = 0
    matched_tokens: int = 0
    leased_bytes: int = 0


class _Place(NamedTuple):
    """Where a layer's slice is."""

    group: SharedGroup
    number: int


class Sharing:
    """See the module. `tokens` are the ids that are known, from position 0 on."""

    def __init__(
        self,
        core: SessionCore,
        demotions: Demotions,
        model: PromptCacheModelIdentity,
        options: PrefixSharing,
    ) -> None:
        geometry = core.pool.geometry()
        if geometry.arena_bytes == 0:
            raise SegmentError.NoArena(core.pool.name or "")
        self._core = core
        self._demotions = demotions
        self.options = options
        self.block_tokens = core.options.block_size_tokens
        self.groups = shared_groups(
            model, core.layers, options, self.block_tokens, geometry.block_bytes_max
        )
        if not self.groups:
            raise ValueError("no layer of this model has attention: there is no prefix to share")
        self._places = {
            layer.global_layer: _Place(group, number)
            for group in self.groups
            for number, layer in enumerate(group.layers)
        }
        # The group whose last layer is the model's last one: when it has a block, all have.
        self.last_group = max(self.groups, key=lambda group: group.layers[-1].global_layer)
        self.states = shared_states(model, options, self.block_tokens, len(self.groups))
        self.rows: list[NamedBlocks] = [*self.groups]
        if self.states is not None:
            self.rows.append(self.states)
        self.tokens: TokenIds = np.empty(0, np.uint32)
        self._stale: dict[int, int] = {}  # layers, and from where on their tokens are others
        self._refused: set[tuple[SharedGroup, int]] = set()
        self._claim: Claim | None = None
        self._claimed: Sequence[bytes] = ()
        self.published = self.present = self.refused = 0
        self.matched_blocks = self.matched_tokens = 0

    # Names ----------------------------------------------------------------------------------------

    def feed(self, tokens: Tokens, start: int) -> None:
        """These are the ids from position `start` on, known ones among them.

        Errors: TypeError, ValueError; nothing has changed.
        """
        ids, known = token_ids(tokens), len(self.tokens)
        if start > known:
            raise ValueError(
                f"the tokens from {known} up to {start} are not known: feed them first"
            )
        self.check_known(np.concatenate((self.tokens[:start], ids)))
        self.know(np.concatenate((self.tokens, ids[known - start :])))

    def check_known(self, tokens: TokenIds) -> None:
        """Errors: ValueError unless these and the known ids agree as far as both go."""
        both = min(len(tokens), len(self.tokens))
        if not np.array_equal(tokens[:both], self.tokens[:both]):
            raise ValueError("these are not the tokens that the session knows")

    def know(self, tokens: TokenIds) -> None:
        """These are the ids from position 0 on; they continue the known ones."""
        for row in self.rows:
            row.keys = row.chain(tokens)
        self.tokens = tokens

    def cut(self, layer: int, before: int, end: int) -> None:
        """A layer was truncated from `before` to `end`: other ids may come there, in all layers.

        A layer that follows others in this has lost only what was stale, and one that had no tokens
        there takes nothing from those that have.
        """
        ends = {
            each.global_layer: self._core.end_of(each.global_layer) for each in self._core.layers
        }
        stale = self._stale.get(layer)
        if before == end and any(other > end for other in ends.values()):
            return
        if stale is not None and stale <= end:
            if stale == end:
                del self._stale[layer]
            return
        self._stale.pop(layer, None)
        for number, other in ends.items():
            if number != layer and other > end:
                self._stale[number] = min(self._stale.get(number, end), end)
        self.tokens = self.tokens[:end]
        if self.states is not None and self.states.position > end:
            self.states.block = None  # of tokens that are no more
        for row in self.rows:
            row.keys = row.keys[: end // self.block_tokens]
        self._refused.clear()
        self.release_claim()

    def clear(self) -> None:
        """The session is empty."""
        self._stale.clear()
        self.tokens = self.tokens[:0]
        for row in self.rows:
            row.keys = []
        if self.states is not None:
            self.states.block = None
        self._refused.clear()
        self.release_claim()

    def check(self, layer: Layer, spec: BlockSpec) -> None:
        """A layer's first tokens must look like what the other workers share.

        Errors: ArrayMismatch.
        """
        expected = self._places[layer.global_layer].group.spec
        for given, wanted in zip(spec.arrays, expected.arrays, strict=True):
            if given.shape[0] != 1 or given.dtype != wanted.dtype:
                raise CacheResidencyError.ArrayMismatch(
                    f"layer {layer.global_layer}: {given.name} has batch {given.shape[0]} of"
                    f" {given.dtype}, sharing needs batch 1 of {wanted.dtype}"
                )

    # Publishing -----------------------------------------------------------------------------------

    def sealed(self, id: CacheBlockId) -> None:
        """A block was sealed; with the order lock, without the session's."""
        if self.options.publish == "on_seal":
            self._share(id)

    def wants(self, id: CacheBlockId) -> bool:
        """Whether a block that must leave the device is to be published first."""
        if self.options.publish != "on_demote":
            return False
        found = self._named(id)
        return found is not None and found not in self._refused and self._whole(*found) is not None

    def demanded(self, id: CacheBlockId) -> None:
        """Publish a block that must leave the device, unless the session grows or shrinks now;
        without the lock. It is tried once.
        """
        with Attempt(self._core.order) as taken:
            try:
                if taken:
                    self._share(id)
            finally:
                with self._core.lock:
                    self._give_up(id)

    def _give_up(self, id: CacheBlockId) -> None:
        found = self._named(id)
        if found is not None:
            self._refused.add(found)

    def _share(self, id: CacheBlockId) -> None:
        core = self._core
        found = self._named(id)
        if found is None:
            return
        group, index = found
        lease = None
        leased: list[BlockRecord] = []
        try:
            with core.lock:
                records = self._whole(group, index)
                if records is None:
                    return
                present = core.pool.contains(group.keys[index])
                if not present:
                    self._hold(records)
                    leased = [*records]  # no call: nothing gets between
            if present:
                self.present += 1
            else:
                lease = self._publish(group, index, records)
        finally:
            if leased:
                with core.lock:
                    try:
                        self._let_go(leased)
                    except BaseException:
                        self._let_go(leased)  # what is left of them
                        raise
        if core.backend.reads_host:
            self._read_shared(group, index, records, lease)

    def _hold(self, records: list[BlockRecord]) -> None:
        """Lease all, or none if a signal handler raises; with the lock held."""
        count = self._core.lifecycle.lease_count
        before = [count(record.id) for record in records]
        try:
            for record in records:
                self._core.acquire(record.id)
        except BaseException:
            for record, held in zip(records, before, strict=True):
                while count(record.id) > held:
                    self._core.lifecycle.release(record.id)
            raise

    def _let_go(self, leased: list[BlockRecord]) -> None:
        """End the leases of `_hold`; with the lock held. If a signal handler raises in the middle,
        the rest are left in the list.
        """
        count, release = self._core.lifecycle.lease_count, self._core.lifecycle.release
        while leased:
            id = leased[-1].id
            before = count(id)
            try:
                release(id)
            except BaseException:
                if count(id) < before:
                    del leased[-1]
                raise
            del leased[-1]
            self._core.victims.touch(id)

    def _publish(self, group: SharedGroup, index: int, records: list[BlockRecord]) -> Lease | None:
        """Copy a block of all layers and publish it; None when that was refused."""
        pool = self._core.pool
        parent = group.keys[index - 1] if index else None
        try:
            with pool.reserve(CachePoolUsage(transfer_in_flight_bytes=group.nbytes)):
                block = pool.allocate(group.nbytes)
                if not self._fill(block, group, records):
                    self.refused += 1
                    return None
            following = self._claim_next(group, index)
            lease, created = block.publish(group.keys[index], parent=parent)
        except (CachePoolError, SegmentError):  # no room
            self.refused += 1
            return None
        if created:
            self.published += 1
        else:
            self.present += 1
        if group is self.last_group:
            self.release_claim()
            self._claim = following
        return lease

    def _fill(self, block: Block, group: SharedGroup, records: list[BlockRecord]) -> bool:
        """Copy every layer's arrays into its slice; whether that was done. Afterwards nothing looks
        at the block.
        """
        core = self._core
        room = np.frombuffer(block.memoryview(), np.uint8)
        with core.lock:
            begun = [
                self._begin(record, slice_arrays(room, number * group.stride, group.spec))
                for number, record in enumerate(records)
            ]
        try:
            for operation in begun:
                if operation is not None:
                    operation.wait()
        except Exception:  # noqa: BLE001 (engines raise what they like)
            return False
        with core.lock:
            for record in records:
                core.count(record.id.global_layer, transfer_bytes=record.logical_bytes)
        return True

    def _begin(self, record: BlockRecord, targets: tuple[Any, ...]) -> HostCopyOperation | None:
        core, storage = self._core, record.storage
        if storage.device_resource is not None:
            host = HostCopy(targets, LEASED, record.logical_bytes)
            number = core.next_operation()
            return core.backend.copy_to_host(record.id, number, storage.device_resource, host)
        assert storage.host_resource is not None
        for target, source in zip(targets, storage.host_resource.arrays, strict=True):
            np.copyto(target, source, casting="no")
        return None

    def _whole(self, group: SharedGroup, index: int) -> list[BlockRecord] | None:
        """The block in all layers of its group, if all can be read now; with the lock held."""
        core, start = self._core, index * self.block_tokens
        end = start + self.block_tokens
        found = []
        for layer in reversed(group.layers):  # engines seal in order: the last one is missing most
            record = core.records.get(core.layers.block_id(layer, start, end))
            if record is None or self._stale.get(layer.global_layer, end) < end:
                return None
            storage = record.storage
            if storage.phase is not _P.DEVICE and storage.host_resource is None:
                return None
            found.append(record)
        return found[::-1]

    def _named(self, id: CacheBlockId) -> tuple[SharedGroup, int] | None:
        """Which block of which group it is, if that has a key."""
        index = block_index(id, self.block_tokens)
        group = self._places[id.global_layer].group
        if index is None or index >= len(group.keys):
            return None
        return group, index

    # Leasing --------------------------------------------------------------------------------------

    @property
    def leased_bytes(self) -> int:
        """Published bytes that this session keeps from being evicted."""
        return sum(row.leased_bytes for row in self.rows)

    def ready(self, record: BlockRecord) -> HostCopy | None:
        """The block as a lease, if it is published; with the lock held."""
        found = self._named(record.id)
        if found is None or self._stale.get(record.id.global_layer, record.id.end) < record.id.end:
            return None
        group, index = found
        block = self.lease(group, index, group.keys[index])
        return None if block is None else self.copy(block, record.id.global_layer)

    def lease(
        self, row: NamedBlocks, index: int, key: bytes, lease: Lease | None = None
    ) -> Bytes | None:
        """A published block's bytes, leased as long as an array of them lives; None for a miss, or
        when the session leases as much as it may. With the lock held.
        """
        held = row.live.get(index)
        if held is not None:
            return held
        most, nbytes = self.options.leased_bytes_max, row.bytes_of(index)
        if most is not None and self.leased_bytes + class_bytes(nbytes) > most:
            return None
        if lease is None:
            lease = self._core.pool.lookup(key)
        if lease is None or lease.nbytes != nbytes:
            return None
        block: Bytes = lease.array(np.uint8, (nbytes,))
        row.live[index] = block
        return block

    def group_of(self, layer: int) -> SharedGroup:
        """The group that a layer's slices are in."""
        return self._places[layer].group

    def copy(self, block: Bytes, layer: int) -> HostCopy:
        """A layer's slice of a leased block."""
        group, number = self._places[layer]
        arrays = slice_arrays(block, number * group.stride, group.spec)
        return HostCopy(arrays, LEASED, group.spec.logical_bytes)

    def _read_shared(
        self, group: SharedGroup, index: int, records: list[BlockRecord], lease: Lease | None
    ) -> None:
        """Attention can read the arena: the copies on the device are of no more use."""
        core = self._core
        with core.lock:
            block = self.lease(group, index, group.keys[index], lease)
            if block is None:
                return
            for record in records:
                storage = record.storage
                if (
                    core.records.get(record.id) is record
                    and storage.phase is _P.DEVICE
                    and storage.backing is None
                    and not core.lifecycle.is_leased(record.id)
                ):
                    self._demotions.take_ready(record, self.copy(block, record.id.global_layer))
            core.publish()

    # Claims ---------------------------------------------------------------------------------------

    def claim(self, index: int, keys: Sequence[bytes], timeout: float | None) -> bool:
        """Ask to be the one who computes the blocks of `keys` from `index` on; `keys` are those of
        `last_group`.

        True when the block is there meanwhile; False when it is this session's to compute, or
        another's who has not done it in time.
        """
        self.release_claim()
        if self.options.publish != "on_seal":
            return False
        answer = self.ask(keys[index], timeout)
        if isinstance(answer, Claim):
            self._claim, self._claimed = answer, keys
        return isinstance(answer, Lease)

    def release_claim(self) -> None:
        """Somebody else may compute what was claimed."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def _claim_next(self, group: SharedGroup, index: int) -> Claim | None:
        """Who waits for a block goes on to wait for the next one, so that is claimed before."""
        if group is not self.last_group or self._claim is None or index + 1 >= len(self._claimed):
            return None
        answer = self.ask(self._claimed[index + 1], 0)
        return answer if isinstance(answer, Claim) else None

    def ask(self, key: bytes, timeout: float | None) -> Lease | Claim | None:
        """A lease, or the claim to make the block, or None while somebody else does."""
        try:
            return self._core.pool.claim(key, timeout=timeout)
        except SegmentError.TableFull:
            return None  # a claim is a courtesy

    # Telling --------------------------------------------------------------------------------------

    def report(self) -> CacheSharingReport:
        """What was shared so far."""
        return CacheSharingReport(
            published=self.published,
            present=self.present,
            refused=self.refused,
            matched_blocks=self.matched_blocks,
            matched_tokens=self.matched_tokens,
            leased_bytes=self.leased_bytes,
        )
