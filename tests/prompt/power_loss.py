"""What may be on a disk after a power loss, from the system calls that were made.

`recording(root)` notes every call of this process that changes something below `root`. `states`
tells what a crash right after the n-th of them may leave: what an fsync made durable, and of the
rest any part. The model is harsher than file systems are: writes to one file and entries of one
directory persist in any order, an entry only by an fsync of its directory. A rename is one change.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

# A file's bytes, or a directory's entries, sorted.
Tree: TypeAlias = "bytes | tuple[tuple[str, Tree], ...]"


class Change(NamedTuple):
    """One recorded call. `path` and `target` are relative to the root."""

    call: str
    path: str
    target: str = ""
    data: bytes = b""


@contextlib.contextmanager
def recording(root: Path) -> Iterator[list[Change]]:
    """Note the calls of `os` that change files below `root`, in order."""
    noted: list[Change] = []
    patched: list[tuple[str, Any]] = []

    def place(path: Any, directory: int | None = None) -> str:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif directory is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
        return os.path.relpath(path, root)

    def patch(name: str, note: Callable[..., Change | None]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            change = note(*arguments, **more)
            result = real(*arguments, **more)
            if name == "write" and change:
                change = change._replace(data=change.data[:result])
            if change and not change.path.startswith(".."):
                noted.append(change)
            return result

        patched.append((name, real))
        setattr(os, name, call)

    def opened(path: Any, flags: int, *rest: Any, dir_fd: int | None = None) -> Change | None:
        where = place(path, dir_fd)
        if flags & os.O_CREAT and not (root / where).exists():
            return Change("create", where)
        return Change("cut", where) if flags & os.O_TRUNC else None

    patch("open", opened)
    patch("mkdir", lambda path, *rest, dir_fd=None: Change("mkdir", place(path, dir_fd)))
    patch("write", lambda file, data: Change("write", place(file), data=bytes(data)))
    patch("fsync", lambda file: Change("sync", place(file)))
    patch("rename", lambda a, b: Change("rename", place(a), place(b)))
    patch("unlink", lambda path, dir_fd=None: Change("remove", place(path, dir_fd)))
    patch("rmdir", lambda path, dir_fd=None: Change("remove", place(path, dir_fd)))
    try:
        yield noted
    finally:
        for name, real in patched:
            setattr(os, name, real)


# The model ----------------------------------------------------------------------------------------


class Node:
    """A file or directory, by identity: names may change. `entries` is None for a file."""

    def __init__(self, *, is_directory: bool) -> None:
        self.entries: dict[str, Node] | None = {} if is_directory else None


class Effect(NamedTuple):
    """One change of one node, durable once that node is synced.

    `add` and `remove` are entries; `moved_from` is the other directory of a rename.
    """

    node: Node
    add: tuple[str, Node] | None = None
    remove: str | None = None
    moved_from: tuple[Node, str] | None = None
    data: bytes | None = None
    offset: int = 0


class Disk:
    """Applies changes one after the other, and remembers which effects are durable."""

    def __init__(self) -> None:
        self.root = Node(is_directory=True)
        self.effects: list[Effect] = []
        self.durable: set[int] = set()
        self._sizes: dict[Node, int] = {}

    def apply(self, change: Change) -> None:
        """Take one recorded call."""
        getattr(self, f"_{change.call}")(change)

    def _find(self, path: str) -> Node:
        node = self.root
        for part in Path(path).parts:
            assert node.entries is not None
            node = node.entries[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def _enter(self, path: str, made: Node) -> None:
        parent, name = self._parent(path)
        assert parent.entries is not None
        parent.entries[name] = made
        self.effects.append(Effect(parent, add=(name, made)))

    def _create(self, change: Change) -> None:
        self._enter(change.path, Node(is_directory=False))

    def _mkdir(self, change: Change) -> None:
        self._enter(change.path, Node(is_directory=True))

    def _cut(self, change: Change) -> None:
        raise AssertionError("a publication writes over nothing that matters")

    def _write(self, change: Change) -> None:
        node = self._find(change.path)
        offset = self._sizes.get(node, 0)
        self._sizes[node] = offset + len(change.data)
        self.effects.append(Effect(node, data=change.data, offset=offset))

    def _rename(self, change: Change) -> None:
        (old, name), (new, target) = self._parent(change.path), self._parent(change.target)
        assert old.entries is not None
        assert new.entries is not None
        moved = new.entries[target] = old.entries.pop(name)
        self.effects.append(Effect(new, add=(target, moved), moved_from=(old, name)))

    def _remove(self, change: Change) -> None:
        parent, name = self._parent(change.path)
        assert parent.entries is not None
        del parent.entries[name]
        self.effects.append(Effect(parent, remove=name))

    def _sync(self, change: Change) -> None:
        node = self._find(change.path)
        self.durable |= {k for k, effect in enumerate(self.effects) if effect.node is node}

    def pending(self) -> list[int]:
        """Effects that a crash may lose."""
        return [k for k in range(len(self.effects)) if k not in self.durable]

    def left(self, kept: set[int]) -> Tree:
        """The tree of the durable effects and the kept ones."""
        contents: dict[Node, bytearray] = {}
        entries: dict[Node, dict[str, Node]] = {}
        for k, effect in enumerate(self.effects):
            if k not in self.durable and k not in kept:
                continue
            if effect.data is not None:
                content = contents.setdefault(effect.node, bytearray())
                content.extend(bytes(max(0, effect.offset - len(content))))  # a lost write is zeros
                content[effect.offset : effect.offset + len(effect.data)] = effect.data
            names = entries.setdefault(effect.node, {})
            if effect.moved_from:
                entries.setdefault(effect.moved_from[0], {}).pop(effect.moved_from[1], None)
            if effect.add:
                names[effect.add[0]] = effect.add[1]
            if effect.remove:
                names.pop(effect.remove, None)

        def tree(node: Node) -> Tree:
            if node.entries is None:
                return bytes(contents.get(node, b""))
            return tuple(sorted((name, tree(one)) for name, one in entries.get(node, {}).items()))

        return tree(self.root)


def states(disk: Disk, rng: random.Random, samples: int = 6) -> Iterator[Tree]:
    """What a crash now may leave: nothing pending, all, all but one, only one, random parts."""
    pending = disk.pending()
    whole = set(pending)
    yield disk.left(set())
    yield disk.left(whole)
    for one in pending:
        yield disk.left(whole - {one})
        yield disk.left({one})
    for _ in range(samples):
        yield disk.left({one for one in pending if rng.random() < 0.5})


def write_tree(path: Path, tree: Tree) -> None:
    """Make a state real."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inner in tree:
        write_tree(path / name, inner)


def read_tree(path: Path) -> Tree:
    """The state of a real directory."""
    if path.is_file():
        return path.read_bytes()
    return tuple(sorted((one.name, read_tree(one)) for one in path.iterdir()))


def crash_points(
    changes: list[Change], rng: random.Random, skipped: int = 0
) -> Iterator[tuple[int, set[Tree]]]:
    """After each change from `skipped` on: its number, and all states that a crash may leave."""
    disk = Disk()
    for number in itertools.count():
        if number >= skipped:
            yield number, set(states(disk, rng))
        if number == len(changes):
            return
        disk.apply(changes[number])
