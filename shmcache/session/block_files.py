"""The bytes of a block as a file: written once, read back only if every byte is what was written.

Why: a file can be shortened, replaced or rot between two moments of one session, and a wrong byte
would be a wrong answer without an error. What a file must be (header, length, digest) is kept in
memory, so that nothing found in it is believed.

Contract: a live file is a shard with the arrays of one block (prompt/live.py); it is never replaced
and not synced to the disk, because it dies with the session. Shards of prompt caches are read the
same way.

Death: see prompt/live.py, pool/live_files.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shmcache.policy.identity import CacheBlockId
from shmcache.prompt.dtypes import DTYPES
from shmcache.prompt.live import write_live_block
from shmcache.prompt.shard import read_shard_into
from shmcache.session.backend import BlockSpec, HostArray
from shmcache.session.records import BlockFile


def write_block(
    directory: Path, id: CacheBlockId, spec: BlockSpec, arrays: Sequence[HostArray]
) -> BlockFile:
    """Publish the block under a name of its own; a failure leaves nothing.

    Errors: those of `write_live_block`.
    """
    return BlockFile(*write_live_block(directory, id, _named(spec, arrays)))


def read_block(file: BlockFile, spec: BlockSpec, arrays: Sequence[HostArray]) -> None:
    """Fill the arrays from the file.

    Errors: those of `read_shard_into`: the file is not what was written, the arrays hold rubbish.
    """
    targets = _named(spec, arrays)
    for name, stored in file.arrays.items():
        if name not in targets:  # beside keys alone a prompt cache has a second array, of width 1
            targets[name] = np.empty(stored.shape, DTYPES[stored.dtype].numpy)
    read_shard_into(file.path, file.arrays, file.payload_sha256, targets)


def _named(spec: BlockSpec, arrays: Sequence[HostArray]) -> dict[str, HostArray]:
    """The arrays by what files call them."""
    return {array.name: data for array, data in zip(spec.arrays, arrays, strict=True)}
