"""A worker that fights for a pool: random operations of one session, every token checked.

Run by threads of a test and, through `enter`, by independent processes. Copies and files are slow
or fail at random. A refusal is fine; a wrong token, or a book that does not add up, is not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmcache.errors import CacheResidencyError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.pool.pool import CacheResidencyPool
from shmcache.session import block_files, disk
from shmcache.session.arena_memory import ArenaHostMemory
from shmcache.session.numpy_backend import NumpyBackend, PrivateHostMemory
from shmcache.session.options import PagedCacheOptions
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.session import CacheSession
from tests.session.rig import grow, tiny

LAYERS = 3
HOST = 1200  # three blocks of the arena, of three layers each


class Trouble:
    """Random delays and failures, from one seed; see `calm`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._never = threading.Event()
        self.chance = 0.05

    def calm(self) -> None:
        self.chance = 0.0

    def copy(self, to: CacheTier, block_id: CacheBlockId) -> None:
        self.strike(RuntimeError("the copy engine failed"))

    def file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.strike(OSError(self._random.choice((5, 28)), "injected"))
            return real(*arguments)

        return call

    def strike(self, error: Exception) -> None:
        if self._random.random() < 4 * self.chance:
            self._never.wait(self._random.random() * 0.002)
        if self._random.random() < self.chance:
            raise type(error)(*error.args)


def open_session(
    pool: CacheResidencyPool,
    folder: Path,
    trouble: Trouble,
    *,
    device: int,
    host: int,
    sharing: PrefixSharing | None = None,
) -> CacheSession:
    """Its host copies lie in the arena, if the pool has one."""
    options = PagedCacheOptions(4, device, host, 1).with_live_disk(folder, 2000, 2)
    model = tiny(LAYERS, sink_tokens=4)
    arena = pool.geometry().arena_bytes > 0
    return CacheSession(
        pool,
        model=model,
        options=options,
        backend=NumpyBackend(on_copy=trouble.copy),
        memory=ArenaHostMemory.for_model(pool, model) if arena else PrivateHostMemory(20),
        sharing=sharing,
    )


def shared(chance: random.Random) -> PrefixSharing:
    """Any way to publish, also with a tight cap."""
    return PrefixSharing(
        checkpoint_fingerprint="the fight",
        dtype="float16",
        publish=chance.choice(("on_seal", "on_seal", "on_demote")),
        leased_bytes_max=chance.choice((None, 1600)),
    )


def trouble_with_files(trouble: Trouble) -> Callable[[], None]:
    """Returns what ends it."""
    disk.write_block = trouble.file(block_files.write_block)  # type: ignore[attr-defined]
    disk.read_block = trouble.file(block_files.read_block)  # type: ignore[attr-defined]

    def restore() -> None:
        disk.write_block = block_files.write_block  # type: ignore[attr-defined]
        disk.read_block = block_files.read_block  # type: ignore[attr-defined]

    return restore


def check(id: CacheBlockId, arrays: tuple[Any, ...]) -> None:
    """Each element tells its layer and position."""
    values = [position + 128 * id.global_layer for position in range(id.start, id.end)]
    assert arrays[0][0, 0, :, 1].tolist() == values, (id, arrays[0])
    assert arrays[1][0, 0, :, 0].tolist() == [-value for value in values], id


def write_steps(session: CacheSession, chance: random.Random, steps: int) -> int:
    """Grow and shrink; how many steps went through."""
    done = 0
    for _ in range(steps):
        layer = chance.randrange(LAYERS)
        try:
            if session.position(layer) > 100 or chance.random() < 0.1:
                session.truncate(layer, chance.randrange(session.position(layer) + 1))
            elif chance.random() < (0.02 if session._core.shared is None else 0.1):
                session.clear()
                session.match(range(chance.randrange(100)), timeout=0.01)
            else:
                name_tokens(session)
                grow(session, chance.randrange(1, 9), layer=layer)
            done += 1
        except CacheResidencyError:
            continue
    return done


def name_tokens(session: CacheSession) -> None:
    """The id of a token is its position: all sessions of a fight have the same text."""
    sharing = session._core.shared
    if sharing is not None:
        session.feed(range(120))


def read_steps(session: CacheSession, chance: random.Random, steps: int) -> int:
    """Lease at random, hold some; how many leases were read."""
    done = 0
    for _ in range(steps):
        blocks = session.blocks()
        try:
            if blocks:
                with session.lease(chance.choice(blocks)) as lease:
                    check(lease.id, lease.arrays)
                    done += 1
        except CacheResidencyError:
            continue
    return done


def fight(
    pool: CacheResidencyPool, folder: Path, seed: int, steps: int, share: bool
) -> tuple[int, int, int]:
    """One process's part: a session with a writer and a reader, then an orderly end; steps done,
    and tokens adopted from others.
    """
    trouble, chance = Trouble(seed), random.Random(seed)
    restore = trouble_with_files(trouble)
    try:
        sharing = shared(chance) if share else None
        with open_session(pool, folder, trouble, device=600, host=HOST, sharing=sharing) as session:
            read = write = 0
            for _ in range(steps):
                write += write_steps(session, chance, 1)
                read += read_steps(session, chance, 1)
            trouble.calm()
            for layer in range(LAYERS):
                try:
                    for piece in session.scan(layer):
                        assert piece.arrays[0][0, 0, 0, 0] == piece.start + 128 * layer
                except CacheResidencyError:
                    continue  # others hold what it would need
            return write, read, session.sharing_report().matched_tokens
    finally:
        restore()


def enter(name: str, folder: str, seed: int, steps: int, share: bool) -> list[int]:
    """The same in a process of its own, on a named pool."""
    with CacheResidencyPool.attach(name) as pool:
        return list(fight(pool, Path(folder), seed, steps, share))
