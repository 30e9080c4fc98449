"""Adopting a published prefix: what other workers computed becomes this session's, without a copy.

Why: a prompt that somebody has answered before needs no prefill. What is adopted are leases, one
per block of a group, whose slices become host copies of the layers.

Contract: the longest prefix that every group can serve is adopted, or none: a group that sees
everything needs all of its blocks, one with a window those that the next token sees and the
protected prefix. What is adopted is as if the session had computed it, discarded what its windows
have left behind, and demoted the rest.

Concurrency: with the order lock. A wait for another worker's claim holds up growth and shrinking of
this session, not its leases.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shmcache.policy.prefix_keys import Tokens, token_ids
from shmcache.pool.waiting import deadline_ns
from shmcache.session.backend import HostCopy
from shmcache.session.core import SessionCore
from shmcache.session.records import LEASED, BlockRecord, Storage
from shmcache.session.shared_groups import NamedBlocks, TokenIds
from shmcache.session.sharing import Sharing
from shmcache.session.slices import Bytes, layer_arrays
from shmcache.states.lifecycle import MutableCacheTail
from shmcache.states.storage import CacheBlockStorage

_Found = dict[int, Bytes]


class _Row(NamedTuple):
    """A row of blocks, the keys of the prefix, and what of it is leased by now."""

    blocks: NamedBlocks
    keys: Sequence[bytes]
    leased: _Found


class Matching:
    """See the module."""

    def __init__(self, core: SessionCore, sharing: Sharing) -> None:
        self._core = core
        self._sharing = sharing

    def match(self, tokens: Tokens, timeout: float | None) -> int:
        """Adopt what is published of the prefix `tokens`; how many tokens the session then has.

        Errors: ValueError when they are not a continuation of what the session knows.
        """
        ids, until_ns = token_ids(tokens), deadline_ns(timeout)
        sharing = self._sharing
        known = sharing.tokens
        if not np.array_equal(ids[: len(known)], known):
            raise ValueError("the tokens to match do not begin with those that the session knows")
        keys = [row.chain(ids) for row in sharing.rows]
        wanted = len(ids) // sharing.block_tokens
        while True:
            position, begun = self._adopt(ids, keys, wanted)
            at = position // sharing.block_tokens
            if begun or at >= wanted:
                return position
            if not sharing.claim(at, keys[sharing.last_group.number], _left_s(until_ns)):
                return position
            if self._adopt(ids, keys, wanted)[0] == position:
                return position  # it has gone again, or this session leases as much as it may

    def _adopt(
        self, ids: TokenIds, keys: Sequence[Sequence[bytes]], wanted: int
    ) -> tuple[int, bool]:
        """Where the session ends then, and whether it is in the middle of something."""
        core, sharing = self._core, self._sharing
        with core.lock:
            core.check_open()
            ends = {core.end_of(layer.global_layer) for layer in core.layers}
            position = min(ends, default=0)
            if len(ends) != 1 or position % sharing.block_tokens or any(core.tails.values()):
                return position, True
            first = position // sharing.block_tokens
            blocks, found = self._find(keys, first, wanted)
            if blocks > first:
                end = blocks * sharing.block_tokens
                sharing.know(ids[: max(end, len(sharing.tokens))])
                self._insert(found, end)
                sharing.matched_blocks += sum(map(len, found))
                sharing.matched_tokens += end - position
                position = end
        return position, False

    def _find(
        self, keys: Sequence[Sequence[bytes]], first: int, wanted: int
    ) -> tuple[int, list[_Found]]:
        """Up to which block the prefix can be adopted, and what each group needs of it, leased."""
        rows = [
            _Row(blocks, names, {}) for blocks, names in zip(self._sharing.rows, keys, strict=True)
        ]
        windows = [row for row in rows if not row.blocks.sees_all]
        blocks = wanted
        for row in rows:
            if row.blocks.sees_all:
                blocks = self._run(row, first, blocks)
        while blocks > first and not all(self._see(row, first, blocks) for row in windows):
            blocks -= 1
            for row in rows:
                row.leased.pop(blocks, None)
        for row in rows:
            for index in row.leased.keys() - set(self._needed(row, first, blocks)):
                del row.leased[index]
        return blocks, [row.leased for row in rows]

    def _run(self, row: _Row, first: int, until: int) -> int:
        """Lease all blocks from `first` on until one is missing, which is returned."""
        for index in range(first, until):
            if not self._lease(row, index):
                return index
        return until

    def _see(self, row: _Row, first: int, blocks: int) -> bool:
        """Lease what a group with a window needs of a prefix; the newest block is missing most."""
        needed = self._needed(row, first, blocks)
        return all(self._lease(row, index) for index in reversed(needed))

    def _lease(self, row: _Row, index: int) -> bool:
        if index not in row.leased:
            block = self._sharing.lease(row.blocks, index, row.keys[index])
            if block is None:
                return False
            row.leased[index] = block
        return True

    def _needed(self, row: _Row, first: int, blocks: int) -> Sequence[int]:
        return row.blocks.needed(first, blocks, self._core.layers.prefix_tokens)

    def _insert(self, found: Sequence[_Found], end: int) -> None:
        """The leased blocks become host copies; every layer ends at `end`."""
        core, size = self._core, self._sharing.block_tokens
        for group, leased in zip(self._sharing.groups, found, strict=False):
            nbytes = group.spec.logical_bytes
            for index in sorted(leased):
                start, stop = index * size, (index + 1) * size
                protected = core.layers.is_prefix(stop)
                slices = layer_arrays(leased[index], len(group.layers), group.spec)
                for layer, arrays in zip(group.layers, slices, strict=True):
                    id = core.layers.block_id(layer, start, stop)
                    storage: Storage = CacheBlockStorage.host(id, HostCopy(arrays, LEASED, nbytes))
                    record = BlockRecord(id, group.spec, storage, logical_bytes=nbytes)
                    core.adopt(record, protected)
            for layer in group.layers:
                number = layer.global_layer
                core.layer_specs.setdefault(number, group.spec)
                core.set_tail(number, MutableCacheTail(0, end))
        states = self._sharing.states
        if states is not None:
            states.block, states.position = found[-1][end // size - 1], end
        core.publish()


def _left_s(until_ns: int) -> float:
    return max(until_ns - time.monotonic_ns(), 0) / 1e9
