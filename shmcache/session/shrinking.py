"""Shorter: truncation, what a window has left behind, one block, everything.

Why: speculation is taken back, windows slide, conversations end. Whatever is dropped, nobody may be
reading it, nothing that is under way may bring it back, and its file goes with it.

Contract: contract/residency.md B7. Called with the order lock, without the session's lock. An error
before the new generation has changed nothing.
"""

from __future__ import annotations

from shmcache.errors import CacheResidencyError
from shmcache.policy.identity import CacheBlockId
from shmcache.session.core import SessionCore
from shmcache.session.disk import remove_files
from shmcache.session.generations import Generations, Retiring
from shmcache.session.layers import Layer
from shmcache.session.reading import CacheBlockLease, Reader
from shmcache.session.records import BlockFile, BlockRecord, Tail
from shmcache.states.lifecycle import MutableCacheTail
from shmcache.states.storage import CacheBlockStorage


class Shrinking:
    """See the module."""

    def __init__(self, core: SessionCore, generations: Generations, reader: Reader) -> None:
        self._core = core
        self._generations = generations
        self._reader = reader

    # Truncation -----------------------------------------------------------------------------------

    def truncate(self, layer: Layer, end: int) -> None:
        """Forget the layer's tokens from `end` on.

        Errors: InvalidTokenRange; Lifecycle(UnexpectedLeaseCount) when somebody reads what would
        go; those of a lease, for a block that `end` lies within.
        """
        core, number = self._core, layer.global_layer
        with core.lock:
            core.check_open()
            books = core.lifecycle.tail(number)
            position = 0 if books is None else books.end
            if not 0 <= end <= position:
                raise CacheResidencyError.InvalidTokenRange(end, position)
            if end == position:
                return
            tail = core.tails.get(number)
            if tail is not None and tail.start <= end:
                self._cut_tail(layer, tail, end)
                core.publish()
                return
            crossing = self._crossing(layer, end)
        if crossing is None:
            self._replace(layer, end, None, None)
        else:
            with self._reader.lease(crossing) as lease:
                self._replace(layer, end, lease, self._shortened(layer, crossing, lease, end))

    def _cut_tail(self, layer: Layer, tail: Tail, end: int) -> None:
        core, number = self._core, layer.global_layer
        shorter = tail.filled(end - tail.start)
        if shorter.tokens:
            core.tails[number] = shorter
        else:
            del core.tails[number]
        core.set_tail(number, shorter.books())

    def _crossing(self, layer: Layer, end: int) -> CacheBlockId | None:
        """The block that `end` lies within; with the lock held."""
        for id in self._core.layer_ids(layer.global_layer):
            if id.start < end < id.end:
                return id
        return None

    def _shortened(
        self, layer: Layer, id: CacheBlockId, lease: CacheBlockLease, end: int
    ) -> BlockRecord:
        """A new block of the tokens that stay, copied: the old arrays go as a whole."""
        core = self._core
        tokens = end - id.start
        spec = layer.spec(core.layer_specs[layer.global_layer], tokens)
        arrays = []
        for each, source in zip(spec.arrays, lease.arrays, strict=True):
            target = core.backend.allocate(each.shape, each.dtype)
            core.backend.write(target, 0, core.backend.view(source, 0, tokens))
            arrays.append(target)
        shorter = core.layers.block_id(layer, id.start, end)
        return BlockRecord(shorter, spec, CacheBlockStorage.device(shorter, tuple(arrays)))

    def _replace(
        self, layer: Layer, end: int, lease: CacheBlockLease | None, record: BlockRecord | None
    ) -> None:
        core, number = self._core, layer.global_layer
        with core.lock:
            core.raise_background_error()
            affected = [
                id
                for id in core.layer_ids(number)
                if id.representation is layer.representation and id.end > end
            ]
            crossing = None if lease is None else lease.id
            if [id for id in affected if id.start < end] != [crossing] * (record is not None):
                raise CacheResidencyError.Runtime("the block at the cut has changed meanwhile")
            removals = [(id, 1 if id == crossing else 0) for id in affected]
            tail = MutableCacheTail(0, end)
            if record is None:
                core.replace(removals, None, number, tail)
            else:
                core.add(record)
                try:
                    protected = core.layers.is_prefix(end)
                    core.replace(removals, (record.id, protected), number, tail)
                except CacheResidencyError:
                    core.drop(record)
                    raise
                core.changed(record)
                core.telemetry.report.block_seals += 1
            retiring = self._generations.advance()
            files = self._forget(affected)
            core.tails.pop(number, None)
            core.ledger.set_tail(number, 0)
            if lease is not None:
                lease.consume()
            core.publish()
        self._end(retiring, files)

    # Blocks ---------------------------------------------------------------------------------------

    def discard(self, layer: Layer, visible_start: int) -> int:
        """Drop the blocks before `visible_start` that nothing keeps; how many.

        Kept are the prefix, what is leased, what was imported.
        """
        core = self._core
        with core.lock:
            core.check_open()
            gone = [
                id
                for id in core.layer_ids(layer.global_layer)
                if id.representation is layer.representation
                and id.end <= visible_start
                and not core.layers.is_prefix(id.end)
                and not core.lifecycle.is_leased(id)
                and not core.records[id].imported
            ]
            if not gone:
                return 0
            retiring = self._generations.advance()
            for id in gone:
                core.lifecycle.remove(id)
            files = self._forget(gone)
            core.telemetry.report.discarded_sliding_blocks += len(gone)
            core.publish()
        self._end(retiring, files)
        return len(gone)

    def remove(self, id: CacheBlockId) -> None:
        """Drop one block. Errors: Lifecycle(MissingBlock, BlockLeased)."""
        core = self._core
        with core.lock:
            core.check_open()
            core.check_removable(id)
            retiring = self._generations.advance()
            core.lifecycle.remove(id)
            files = self._forget([id])
            core.publish()
        self._end(retiring, files)

    def clear(self) -> None:
        """Drop everything; counters and peaks stay. Errors: Lifecycle(BlockLeased)."""
        core = self._core
        with core.lock:
            core.check_open()
            core.clear_lifecycle()
            retiring = self._generations.advance()
            files = self._forget(list(core.records))
            for layer in core.tails:
                core.ledger.set_tail(layer, 0)
            core.tails.clear()
            core.layer_specs.clear()
            if core.shared is not None:
                core.shared.clear()
            core.publish()
        self._end(retiring, files)

    # Inside ---------------------------------------------------------------------------------------

    def _forget(self, ids: list[CacheBlockId]) -> list[BlockFile]:
        """The blocks leave the maps; the files that are now nobody's."""
        records = [self._core.forget(id) for id in ids]
        files = (record.storage.backing for record in records)
        return [file for file in files if file is not None]

    def _end(self, retiring: Retiring, files: list[BlockFile]) -> None:
        """Files and old operations, without the lock. Errors: the first, after all was done."""
        try:
            remove_files(files)
        finally:
            self._generations.retire(retiring)
