"""`shmcache top`: what a frame says and fits into, and a terminal that is given back as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shmcache as sc
from shmcache.cli.frame import COLUMNS_MIN, LINES_MIN, ORDERS, View, frame, short
from shmcache.cli.main import main
from tests.support import Worker, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = sc.CachePoolLimits(1 << 30, 8 << 20, 1 << 20, 0)
LEAVES_SCREEN, SHOWS_CURSOR = "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=8 << 20) as made:
        for size in (100, 5000, 70_000):
            made.allocate(size).publish(size.to_bytes(32, "big")).lease.release()
        yield made


@pytest.fixture(scope="module")
def crowd() -> sc.PoolSnapshot:
    """A snapshot with more of everything than fits."""
    with sc.CacheResidencyPool(LIMITS, arena_bytes=8 << 20) as pool:
        pool.allocate(100).publish(bytes(32))
        taken = pool.snapshot()
    (owner,), arena = taken.owners, taken.arena
    assert arena is not None
    rows = tuple(msgspec.structs.replace(owner, slot=n, nonce=f"{n:016x}") for n in range(99))
    managers = tuple(sc.ManagerSnapshot(f"{n:016x}", n, owner.usage) for n in range(99))
    classes = tuple(
        msgspec.structs.replace(arena.classes[0], block_bytes=1 << n) for n in range(40)
    )
    sizes = tuple(1 << n % 40 for n in range(20_000))
    arena = msgspec.structs.replace(
        arena, classes=classes, slabs=20_000, slab_block_bytes=sizes, slab_used_blocks=sizes
    )
    return msgspec.structs.replace(taken, owners=rows, managers=managers, arena=arena)


def said(view: View, columns: int = 80, lines: int = 24) -> str:
    return "\n".join(line.plain for line in frame(view, columns, lines))


# ---- a frame -------------------------------------------------------------------------------------


@given(columns=st.integers(1, 300), lines=st.integers(1, 120), order=st.sampled_from(ORDERS))
def test_a_frame_fits_whatever_there_is(
    crowd: sc.PoolSnapshot, columns: int, lines: int, order: str
) -> None:
    drawn = frame(View("llm", crowd, crowd, order=order), columns, lines)
    assert len(drawn) == lines
    assert max(line.cell_len for line in drawn) <= columns
    if columns >= COLUMNS_MIN and lines >= LINES_MIN + 8:
        text = "\n".join(line.plain for line in drawn)
        for part in ("device", "disk", "hits", "arena", "CLASS", "SLOT", "MANAGER"):
            assert part in text


def test_what_has_no_room_is_counted(crowd: sc.PoolSnapshot) -> None:
    text = said(View("llm", crowd))
    shown = sum(line.startswith("  ") and " alive " in line for line in text.splitlines())
    assert f"and {99 - shown} more" in text


def test_figures_are_the_snapshot_s(pool: sc.CacheResidencyPool) -> None:
    with pool.reserve(sc.CachePoolUsage(device_bytes=3 << 20)):
        taken = pool.snapshot()
    text = said(View(pool.name, taken))
    assert f"{pool.name}  active  1 owner, 0 managers, 1 reservations" in text
    device = next(line for line in text.splitlines() if line.startswith("device"))
    assert "3.0M of  1.0G  peak  3.0M" in device
    assert taken.arena is not None
    assert f"in {taken.arena.used_blocks} blocks, 3 of 4 slabs" in text
    assert {"a", "b", "c", "·"} == set(text.splitlines()[7])


def test_rates_are_of_the_time_between_two_looks(pool: sc.CacheResidencyPool) -> None:
    before = pool.snapshot()
    for _ in range(50):
        lease = pool.lookup((100).to_bytes(32, "big"))
        assert lease is not None
        lease.release()
    taken = msgspec.structs.replace(pool.snapshot(), taken_ns=before.taken_ns + 2_000_000_000)
    text = said(View(pool.name, taken, before))
    assert "hits 25/s  misses 0/s  hit rate 100.0%" in text
    other = msgspec.structs.replace(before, pool_id="0" * 16)
    assert "hits -" in said(View(pool.name, taken, other)), "another epoch counts anew"


def test_the_dead_come_first_and_are_called_dead(pool: sc.CacheResidencyPool) -> None:
    with Worker("import shmcache as sc") as worker:
        worker.call("pool = sc.CacheResidencyPool.attach(name)\npool.report()", name=pool.name)
        worker.kill()
        rows = said(View(pool.name, pool.snapshot())).splitlines()
    head = next(n for n, line in enumerate(rows) if line.startswith("SLOT     PID"))
    assert rows[head + 1].split()[1:3] == [str(worker.pid), "dead"]
    assert rows[head + 2].split()[1:3] == [str(os.getpid()), "alive"]


def test_a_pool_that_cannot_be_looked_at_has_no_figures() -> None:
    text = said(View("llm", None, state="poisoned", message="why"))
    assert text.startswith("llm  poisoned\nwhy\n")
    assert "device" not in text


def test_a_pool_that_lost_its_name_is_not_active(pool: sc.CacheResidencyPool) -> None:
    sc.segment_path(pool.name).unlink()
    assert f"{pool.name}  retired" in said(View(pool.name, pool.snapshot()))


@given(st.integers(0, 2**64 - 1))
def test_short_sizes_are_short_and_right(number: int) -> None:
    text = short(number)
    assert len(text) <= 5
    unit = "BKMGTPE".index(text[-1]) if text[-1].isalpha() else 0
    value = float(text.rstrip("KMGTPE")) * 1024**unit
    assert abs(value - number) <= 0.051 * number


# ---- the command ---------------------------------------------------------------------------------


def test_once_prints_a_frame_and_ends(pool: sc.CacheResidencyPool) -> None:
    result = CliRunner().invoke(main, ["top", pool.name, "--once"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{pool.name}  active")
    assert "\x1b" not in result.stdout
    assert "hits 0/s" in result.stdout


def test_without_a_terminal_or_a_pool_it_refuses(pool: sc.CacheResidencyPool) -> None:
    assert CliRunner().invoke(main, ["top", pool.name]).exit_code == 2
    result = CliRunner().invoke(main, ["top", "no-such-pool", "--once"])
    assert (result.exit_code, result.stdout) == (1, "")


def plain(text: str) -> str:
    """Without colours and movements: digits among letters may have a colour of their own."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class Terminal:
    """`shmcache top` on a terminal of its own."""

    def __init__(self, name: str, columns: int) -> None:
        self.ours, self._theirs = pty.openpty()
        self.resize(columns, 24)
        self.before = termios.tcgetattr(self._theirs)
        command = [sys.executable, "-m", "shmcache.cli.main", "top", name, "--interval", "0.1"]
        # Runners that test in parallel set COLUMNS, which says more than the terminal.
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=inherited | {"TERM": "xterm"},
        )
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, size)

    def shows(self, what: str) -> None:
        """Wait until it is written, from now on."""
        self.text = ""

        def seen() -> bool:
            while select.select([self.ours], [], [], 0.02)[0]:
                self.text += os.read(self.ours, 65536).decode(errors="replace")
                if what in plain(self.text):
                    return True
            return what in plain(self.text)

        wait_until(seen, f"the screen shows {what!r}")

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def ended(self) -> int:
        """Its exit code, with all it wrote read and its terminal looked at."""
        code = self.process.wait(60)
        while select.select([self.ours], [], [], 0.1)[0]:
            self.text += os.read(self.ours, 65536).decode(errors="replace")
        assert LEAVES_SCREEN in self.text
        assert SHOWS_CURSOR in self.text
        assert termios.tcgetattr(self._theirs) == self.before
        return code


@contextlib.contextmanager
def terminal(name: str, columns: int = 80) -> Iterator[Terminal]:
    made = Terminal(name, columns)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.ours)
        os.close(made._theirs)


def test_keys_sort_reclaim_and_quit(pool: sc.CacheResidencyPool) -> None:
    with Worker("import shmcache as sc") as worker, terminal(pool.name) as screen:
        worker.call("pool = sc.CacheResidencyPool.attach(name)\npool.report()", name=pool.name)
        screen.shows("2 owners")
        worker.kill()
        screen.shows("dead")
        screen.type("s")
        screen.shows("order: charges")
        screen.type("r")
        screen.shows(f"gave back what {worker.pid} held")
        screen.shows("1 owner")
        screen.type("q")
        assert screen.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_the_terminal_back(
    pool: sc.CacheResidencyPool, number: signal.Signals
) -> None:
    with terminal(pool.name) as screen:
        screen.shows("active")
        screen.process.send_signal(number)
        assert screen.ended() == 0


def test_it_follows_the_name_and_the_size(pool: sc.CacheResidencyPool) -> None:
    with terminal(pool.name, columns=160) as screen:
        screen.shows(f"{pool.id:016x}")
        sc.CacheResidencyPool.destroy(pool.name, force=True)
        screen.shows("absent")
        assert "device" not in screen.text.partition("absent")[2]
        with sc.CacheResidencyPool.create(pool.name, LIMITS, arena_bytes=0) as second:
            screen.shows(f"{second.id:016x}")
            screen.resize(40, 10)
            screen.process.send_signal(signal.SIGWINCH)
            screen.shows("too small")
            screen.type("q")
            assert screen.ended() == 0
