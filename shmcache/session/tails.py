"""Growth: tokens become a tail, a full tail becomes a block; a refusal leaves everything as it was.

Why: an engine appends to each layer of a step and must be able to try the step again after a
refusal. So an append is one piece for its caller, however many blocks it fills.

Contract: contract/residency.md B3. Called with the order lock, without the session's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmcache.errors import CacheResidencyError
from shmcache.policy.identity import CacheBlockId
from shmcache.session.backend import BlockSpec
from shmcache.session.balance import Balance, Step
from shmcache.session.core import SessionCore
from shmcache.session.layers import Layer, appended_spec, appended_tokens, check_like
from shmcache.session.records import BlockFile, BlockRecord, Tail
from shmcache.session.shrinking import Shrinking
from shmcache.states.lifecycle import MutableCacheTail
from shmcache.states.storage import CacheBlockStorage


class Tails:
    """See the module."""

    def __init__(self, core: SessionCore, balance: Balance, shrinking: Shrinking) -> None:
        self._core = core
        self._balance = balance
        self._shrinking = shrinking

    def append(self, layer: Layer, arrays: Sequence[Any]) -> None:
        """All of the tokens, or none of them.

        Errors: ArrayMismatch; BudgetExceeded, LiveDiskRequired, Pool, Runtime of making room.
        """
        core, number = self._core, layer.global_layer
        known = core.layer_specs.get(number)
        if known is None:
            spec = appended_spec(core.backend, layer, arrays)
            if core.shared is not None:
                core.shared.check(layer, spec)
            core.layer_specs[number] = layer.spec(spec, core.options.block_size_tokens)
            tokens = spec.tokens
        else:
            tokens = appended_tokens(core.backend, layer, arrays, known)
        with core.lock:
            core.check_open()
            tail, books = core.tails.get(number), core.lifecycle.tail(number)
            allocations = core.telemetry.report.tail_allocations
        sealed: list[CacheBlockId] = []
        done = 0
        try:
            while done < tokens:
                done += self._grow(layer, arrays, done, tokens)
                self._seal_if_full(layer, sealed)
        except BaseException:
            self._undo(layer, sealed, tail, books)
            with core.lock:
                core.telemetry.report.tail_allocations = allocations
                if known is None:
                    core.layer_specs.pop(number, None)
            raise

    def import_block(
        self, layer: Layer, start: int, end: int, spec: BlockSpec, file: BlockFile
    ) -> None:
        """A block that exists as a file, right behind what the layer has.

        Errors: InvalidTokenRange when it is elsewhere, or when a tail is in the way.
        """
        core, number = self._core, layer.global_layer
        id = core.layers.block_id(layer, start, end)
        with core.lock:
            core.check_open()
            known = core.layer_specs.get(number)
            if known is not None:
                check_like(layer, spec, known)
            if start != self.position(number) or number in core.tails:
                raise CacheResidencyError.InvalidTokenRange(start, end)
            record = BlockRecord(id, spec, CacheBlockStorage.disk(id, file), imported=True)
            core.insert(record, core.layers.is_prefix(end))
            core.layer_specs.setdefault(number, layer.spec(spec, core.options.block_size_tokens))
            core.set_tail(number, MutableCacheTail(0, end))
            core.publish()

    def position(self, layer: int) -> int:
        """Where the layer's next token goes; with the lock held."""
        return self._core.end_of(layer)

    # One piece ------------------------------------------------------------------------------------

    def _grow(self, layer: Layer, arrays: Sequence[Any], done: int, tokens: int) -> int:
        """Append what fits into the block that is being filled; how many tokens that were."""
        core, number = self._core, layer.global_layer
        tail = core.tails.get(number) or self._new_tail(layer)
        filled = tail.tokens
        count = min(tail.capacity - filled, tokens - done)
        for target, source in zip(tail.arrays, arrays, strict=True):
            core.backend.write(target, filled, core.backend.view(source, done, done + count))
        grown = tail.filled(filled + count)
        with core.lock:
            before = core.set_tail(number, grown.books())
            core.tails[number] = grown
            if before is None or not before.bytes:
                core.telemetry.report.tail_allocations += 1
            step = self._balance.look(None)
        self._balance.go_on(step, None)
        return count

    def _new_tail(self, layer: Layer) -> Tail:
        """An empty buffer from the layer's end to the end of the block that it lies in.

        Blocks end at multiples of the block size also after a truncation left a shorter one: only
        such ranges have names that other sessions know.
        """
        core = self._core
        start, size = self.position(layer.global_layer), core.options.block_size_tokens
        spec = core.layer_specs[layer.global_layer]
        if spec.tokens != size - start % size:
            spec = layer.spec(spec, size - start % size)
        arrays = tuple(core.backend.allocate(each.shape, each.dtype) for each in spec.arrays)
        return Tail(start, 0, spec, arrays, spec.logical_bytes)

    # Sealing --------------------------------------------------------------------------------------

    def _seal_if_full(self, layer: Layer, sealed: list[CacheBlockId]) -> None:
        core, number = self._core, layer.global_layer
        tail = core.tails[number]
        if tail.tokens < tail.capacity:
            return
        id = core.layers.block_id(layer, tail.start, tail.end)
        record = BlockRecord(
            id,
            tail.spec,
            CacheBlockStorage.device(id, tail.arrays),
            logical_bytes=tail.logical_bytes,
        )
        with core.lock:
            core.set_tail(number, MutableCacheTail(0, tail.end))
            step = self._balance.look(None)
            emptied = step is None
            if emptied:
                step = self._insert(record, sealed)
        if not emptied:
            self._balance.go_on(step, None)
            with core.lock:
                step = self._insert(record, sealed)
        if step is not None:
            self._balance.go_on(step, id)
        if core.shared is not None:
            core.shared.sealed(id)
        core.telemetry.report.block_seals += 1  # growth is one at a time, and counts nothing else

    def _insert(self, record: BlockRecord, sealed: list[CacheBlockId]) -> Step | None:
        """With the lock held; what must be done for it."""
        core = self._core
        if record.id not in core.records:
            sealed.append(record.id)
        core.insert(record, core.layers.is_prefix(record.id.end))
        del core.tails[record.id.global_layer]
        return self._balance.look(record.id)

    def _undo(
        self,
        layer: Layer,
        sealed: list[CacheBlockId],
        tail: Tail | None,
        books: MutableCacheTail | None,
    ) -> None:
        """The blocks of a failed append go, newest first; the tail is as it was."""
        core, number = self._core, layer.global_layer
        for id in reversed(sealed):
            if id in core.records:
                self._shrinking.remove(id)
        with core.lock:
            core.restore_tail(number, books)
            if tail is None:
                core.tails.pop(number, None)
            else:
                core.tails[number] = tail
            core.publish()
