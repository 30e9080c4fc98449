"""Other stores of blocks, for arena.py: LMDB on tmpfs, redis and memcached over unix sockets.

A peer is measured where its Python package and its server are installed (`pip install lmdb redis
pymemcache`, packages redis-server and memcached); where not, its rows are absent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MEMORY_MIB = 1024  # of a server; the largest working set and its copies
_START_S = 10


class Peer(NamedTuple):
    """Where blocks can be put and got, by name."""

    name: str
    put: Callable[[bytes, Any], object]
    get: Callable[[bytes], Any]  # an array over what was put


@contextlib.contextmanager
def peers(value_bytes: int) -> Iterator[list[Peer]]:
    """All peers that this machine has, started, for values of that size; stopped at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="peer-"))
        )
        found = []
        if _have("lmdb"):
            found.append(stack.enter_context(_lmdb(folder)))
        if _have("redis", "redis-server"):
            found.append(stack.enter_context(_redis(folder)))
        if _have("pymemcache", "memcached"):
            found.append(stack.enter_context(_memcached(folder, value_bytes)))
        yield found


def _have(package: str, program: str | None = None) -> bool:
    there = importlib.util.find_spec(package) is not None
    return there and (program is None or shutil.which(program) is not None)


@contextlib.contextmanager
def _lmdb(folder: Path) -> Iterator[Peer]:
    """Without syncs; a get is an array over the map, of a transaction that ended."""
    lmdb = importlib.import_module("lmdb")
    environment = lmdb.open(
        str(folder), map_size=_MEMORY_MIB << 20, sync=False, metasync=False, writemap=True
    )

    def put(key: bytes, value: Any) -> None:
        with environment.begin(write=True) as transaction:
            transaction.put(key, value)

    def get(key: bytes) -> Any:
        with environment.begin(buffers=True) as transaction:
            return np.frombuffer(transaction.get(key), np.uint8)

    with contextlib.closing(environment):
        yield Peer("LMDB", put, get)


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[Peer]:
    socket = folder / "redis.sock"
    options = f"--port 0 --unixsocket {socket} --save '' --appendonly no --dir {folder}"
    limit = f"--maxmemory {_MEMORY_MIB}mb --maxmemory-policy allkeys-lru"
    with _server(f"redis-server {options} {limit}", socket):
        client = importlib.import_module("redis").Redis(unix_socket_path=str(socket))
        with contextlib.closing(client):
            get = client.get
            yield Peer("redis", client.set, lambda key: np.frombuffer(get(key), np.uint8))


@contextlib.contextmanager
def _memcached(folder: Path, value_bytes: int) -> Iterator[Peer]:
    socket = folder / "memcached.sock"
    largest = max(1 << 20, 2 * value_bytes)
    with _server(f"memcached -u root -s {socket} -m {_MEMORY_MIB} -I {largest}", socket):
        client = importlib.import_module("pymemcache").Client(str(socket))
        with contextlib.closing(client):

            def put(key: bytes, value: Any) -> None:
                client.set(key.hex(), bytes(value), noreply=False)

            def get(key: bytes) -> Any:
                return np.frombuffer(client.get(key.hex()), np.uint8)

            yield Peer("memcached", put, get)


@contextlib.contextmanager
def _server(command: str, socket: Path) -> Iterator[None]:
    """The server while it is needed; it can be asked once its socket is there."""
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], **quiet) as server:
        try:
            until = time.monotonic() + _START_S
            while not socket.exists():
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"did not start: {command}")
                time.sleep(0.01)
            yield
        finally:
            server.terminate()
