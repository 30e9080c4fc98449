"""One frame of `shmcache top`: from two snapshots and a size to lines of text. Pure.

Contract    Exactly as many lines as there is room for, none longer than the width. Everything fits
            into 80 columns and 24 lines; what there is no room for is counted. Without colours it
            says the same: states are words, classes letters.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rich.text import Text

from shmcache import ArenaSnapshot, OwnerSnapshot, PoolSnapshot

ORDERS: Final = ("slot", "charges", "leased", "hits")
COLUMNS_MIN, LINES_MIN = 60, 16

_AXES: Final = ("device", "host", "transfer_in_flight", "disk")
_COLOURS: Final = ("cyan", "magenta", "green", "blue", "yellow", "bright_cyan", "bright_magenta")
_STANDING_STYLES: Final = {"alive": "green", "dead": "bold red"}
_STATE_STYLES: Final = {"active": "bold green"}
_UNITS: Final = "BKMGTPE"
_KEYS: Final = "s sort  r reclaim  q quit"


class View(NamedTuple):
    """What is to be seen: a snapshot and the one before it, or why there is none."""

    name: str
    taken: PoolSnapshot | None
    before: PoolSnapshot | None = None
    state: str = "active"
    message: str = ""
    order: str = "slot"

    @property
    def seconds(self) -> float:
        """Between the two snapshots; 0 when they are not of one epoch."""
        if self.taken is None or self.before is None or self.taken.pool_id != self.before.pool_id:
            return 0.0
        return max(self.taken.taken_ns - self.before.taken_ns, 0) / 1e9


def frame(view: View, columns: int, lines: int) -> list[Text]:
    """The lines of a frame."""
    if columns < COLUMNS_MIN or lines < LINES_MIN:
        found = [Text(f"the terminal is too small: {COLUMNS_MIN} x {LINES_MIN} at least")]
    elif view.taken is None:
        found = [_heading(view), Text(view.message, style="red")]
    else:
        found = _figures(view, view.taken, columns, lines - 1)
    found = found[: lines - 1] + [Text()] * (lines - 1 - len(found))
    found.append(_footer(view))
    for line in found:
        line.no_wrap = True
        line.truncate(columns, overflow="ellipsis")
    return found[-lines:]


def short(number: float) -> str:
    """A size or a count in at most five characters: 661M, 1.5G."""
    unit = 0
    while number >= 999.5 and unit + 1 < len(_UNITS):
        number, unit = number / 1024, unit + 1
    digits = 1 if unit and number < 99.95 else 0
    return f"{number:.{digits}f}{_UNITS[unit] if unit else ''}"


# ---- parts ---------------------------------------------------------------------------------------


def _figures(view: View, taken: PoolSnapshot, columns: int, lines: int) -> list[Text]:
    found = [_heading(view), *(_axis(name, taken, columns) for name in _AXES)]
    tables: list[list[Text]] = []
    if taken.arena is not None:
        found += [_rates(view, taken.arena), _arena(taken.arena)]
        found += _slabs(taken.arena, columns, max(2, (lines - 20) // 3))
        tables.append(_classes(taken.arena))
    tables.append(_owners(view, taken))
    tables.append(_managers(taken))
    return found + _fitted(tables, lines - len(found))


def _heading(view: View) -> Text:
    state = view.state
    if view.taken is not None and not view.taken.named:
        state = "retired"  # nobody finds it by its name any more
    text = Text.assemble((f"{view.name}  ", "bold"), (state, _STATE_STYLES.get(state, "bold red")))
    if view.taken is not None:
        owners, managers = len(view.taken.owners), len(view.taken.managers)
        counts = f"{owners} {_many('owner', owners)}, {managers} {_many('manager', managers)}"
        text.append(f"  {counts}, {view.taken.reservations} reservations", "dim")
        text.append(f"  epoch {view.taken.pool_id}", "dim")
    return text


def _axis(name: str, taken: PoolSnapshot, columns: int) -> Text:
    level = getattr(taken.axes, name)
    words = f" {short(level.current_bytes):>5} of {short(level.limit_bytes):>5}"
    words += f"  peak {short(level.peak_bytes):>5}"
    width = max(columns - 10 - len(words) - 2, 10)
    most = max(level.limit_bytes, level.current_bytes, 1)
    full, peak = (min(n * width // most, width) for n in (level.current_bytes, level.peak_bytes))
    over = level.current_bytes > level.limit_bytes
    style = "red" if over else "yellow" if level.current_bytes * 20 > most * 19 else "cyan"
    bar = ["█"] * full + ["·"] * (width - full)
    if level.peak_bytes and full <= peak:
        bar[min(peak, width - 1)] = "│"
    text = Text(f"{name.partition('_')[0]:9}[")
    text.append("".join(bar), style)
    return text.append("]").append(words)


def _rates(view: View, arena: ArenaSnapshot) -> Text:
    before = view.before.arena if view.before is not None else None
    if before is None or not view.seconds:
        return Text("hits -  misses -  hit rate -  stored -  evicted -", "dim")
    rates = {
        what: max(getattr(arena, what) - getattr(before, what), 0) / view.seconds
        for what in ("hits", "misses", "stored", "evicted")
    }
    shown = {what: f"{what} {rate:,.0f}/s" for what, rate in rates.items()}
    hit_rate = _percent(rates["hits"], rates["misses"])
    words = (shown["hits"], shown["misses"], f"hit rate {hit_rate}", shown["stored"])
    return Text("  ".join((*words, shown["evicted"])), "bold")


def _percent(hits: float, misses: float, digits: int = 1) -> str:
    return f"{100 * hits / (hits + misses):.{digits}f}%" if hits + misses else "-"


def _arena(arena: ArenaSnapshot) -> Text:
    text = Text(
        f"arena {short(arena.used_bytes)} of {short(arena.arena_bytes)} in {arena.used_blocks:,} "
        f"blocks, {arena.slabs_used} of {arena.slabs} slabs"
    )
    if arena.draining_slab is not None:
        text.append(f"  draining slab {arena.draining_slab}", "yellow")
    if arena.bad_checksums:
        text.append(f"  {arena.bad_checksums} bad checksums", "bold red")
    return text


def _letters(arena: ArenaSnapshot) -> dict[int, tuple[str, str]]:
    """Size of a block -> the letter and the colour of its class."""
    sizes = sorted({kind.block_bytes for kind in arena.classes})
    return {
        size: (string.ascii_letters[k % 52], _COLOURS[k % len(_COLOURS)])
        for k, size in enumerate(sizes)
    }


def _slabs(arena: ArenaSnapshot, columns: int, rows_max: int) -> list[Text]:
    """A cell for each slab, or for as many as must share one; dim when less than half full."""
    letters = _letters(arena)
    share = max(1, -(-arena.slabs // (columns * rows_max)))
    found: list[Text] = []
    for number, start in enumerate(range(0, arena.slabs, share)):
        if number % columns == 0:
            found.append(Text())
        found[-1].append(*_cell(arena, letters, range(start, min(start + share, arena.slabs))))
    return found


def _cell(
    arena: ArenaSnapshot, letters: dict[int, tuple[str, str]], slabs: range
) -> tuple[str, str]:
    if arena.draining_slab in slabs:
        return "!", "bold black on yellow"
    sizes = arena.slab_block_bytes[slabs.start : slabs.stop]
    size = max(sizes, key=sizes.count)
    if size not in letters:
        return "·", "dim"
    letter, colour = letters[size]
    room = max(arena.slab_bytes // size, 1) * sizes.count(size)
    used = sum(arena.slab_used_blocks[k] for k in slabs if arena.slab_block_bytes[k] == size)
    return letter, colour if 2 * used >= room else f"dim {colour}"


def _fitted(tables: Sequence[list[Text]], lines: int) -> list[Text]:
    """Heads and rows of all tables in so many lines; each in turn gets one more."""
    shown = [0] * len(tables)
    while lines > 0 and any(n < len(table) for n, table in zip(shown, tables, strict=True)):
        for k, table in enumerate(tables):
            if shown[k] < len(table) and lines > 0:
                shown[k] += 1
                lines -= 1
    found: list[Text] = []
    for n, table in zip(shown, tables, strict=True):
        found += table[:n]
        if 0 < n < len(table):
            found[-1] = Text(f"  and {len(table) - n + 1} more", "dim") if n > 1 else table[0]
    return found


def _head(text: str) -> Text:
    return Text(text, "reverse")


def _classes(arena: ArenaSnapshot) -> list[Text]:
    letters = _letters(arena)
    found = [_head("CLASS  block  slabs   used  published  leased  evictable  doomed  protected")]
    for kind in sorted(arena.classes, key=lambda kind: kind.block_bytes):
        letter, colour = letters[kind.block_bytes]
        line = Text(f"{letter:5}", f"bold {colour}")
        line.append(
            f"  {short(kind.block_bytes):>5}  {kind.slabs:5}  {kind.used:5}  {kind.published:9}  "
            f"{kind.leased:6}  {kind.evictable:9}  ",
            "default not bold",
        )
        line.append(f"{kind.doomed:6}", "yellow" if kind.doomed else "default not bold")
        found.append(line.append(f"  {kind.protected:9}", "default not bold"))
    return found


def _owners(view: View, taken: PoolSnapshot) -> list[Text]:
    found = [
        _head("SLOT     PID STATE    device   host   xfer   disk leased   own  hits/s  hit COMMAND")
    ]
    rates = _hits_per_second(view, taken)
    for owner in _sorted(taken.owners, rates, view.order):
        standing = owner.standing
        style = _STANDING_STYLES.get(standing, "yellow")
        line = Text(f"{owner.slot:4} {owner.pid:7} ", "" if standing == "alive" else style)
        line.append(f"{standing:8}", style)
        sizes = [getattr(owner.usage, f"{axis}_bytes") for axis in _AXES]
        line.append("".join(f"{short(size):>7}" for size in sizes))
        line.append(f"{short(owner.leased_bytes):>7}{short(owner.private_bytes):>6}")
        hit_rate = _percent(owner.hits, owner.misses, digits=0)
        line.append(f" {rates.get(owner.nonce, 0):7,.0f}{hit_rate:>5}")
        found.append(line.append(f" {owner.command or '-'}"))
    return found


def _hits_per_second(view: View, taken: PoolSnapshot) -> dict[str, float]:
    if view.before is None or not view.seconds:
        return {}
    before = {owner.nonce: owner.hits for owner in view.before.owners}
    return {
        owner.nonce: max(owner.hits - before.get(owner.nonce, owner.hits), 0) / view.seconds
        for owner in taken.owners
    }


def _sorted(
    owners: Iterable[OwnerSnapshot], rates: dict[str, float], order: str
) -> list[OwnerSnapshot]:
    """The dead and the draining first: they are what somebody must see."""

    def key(owner: OwnerSnapshot) -> tuple[bool, float, int]:
        amount: dict[str, float] = {
            "charges": sum(getattr(owner.usage, f"{axis}_bytes") for axis in _AXES),
            "leased": owner.leased_bytes + owner.private_bytes,
            "hits": rates.get(owner.nonce, 0),
        }
        return owner.standing == "alive", -amount.get(order, 0), owner.slot

    return sorted(owners, key=key)


def _managers(taken: PoolSnapshot) -> list[Text]:
    found = [_head("SLOT          MANAGER  device   host   xfer   disk")]
    standing = {owner.slot: owner.standing for owner in taken.owners}
    for manager in sorted(taken.managers, key=lambda row: (row.slot, row.manager)):
        sizes = [getattr(manager.usage, f"{axis}_bytes") for axis in _AXES]
        style = "" if standing.get(manager.slot) == "alive" else "red"
        line = f"{manager.slot:4} {manager.manager:>16} "
        found.append(Text(line + "".join(f"{short(size):>7}" for size in sizes), style))
    return found


def _footer(view: View) -> Text:
    text = Text(f"{_KEYS}  order: {view.order}", "dim")
    if view.taken is not None and view.message:
        text.append(f"  {view.message}", "not dim yellow")
    return text


def _many(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
