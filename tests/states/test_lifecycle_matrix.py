"""Every state of a block against every call on it: the next state, or a refusal and no change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shmcache.bounds import U64_MAX, USIZE_MAX
from shmcache.errors import CacheLifecycleError
from shmcache.states.lifecycle import CacheBlockLifecycle, MutableCacheTail
from tests.states.blocks import block
from tests.states.test_lifecycle import refused

X, OTHER = block(4, 64, 96), block(4, 96, 128)
TAIL = MutableCacheTail(8, 97)

Call = Callable[[CacheBlockLifecycle], object]
CALLS: dict[str, Call] = {
    "insert": lambda x: x.insert(X, True),
    "remove": lambda x: x.remove(X),
    "acquire": lambda x: x.acquire(X),
    "release": lambda x: x.release(X),
    "replace expecting 0": lambda x: x.replace([(X, 0)], None, 4, TAIL),
    "replace expecting 1": lambda x: x.replace([(X, 1)], None, 4, TAIL),
    "replace by itself": lambda x: x.replace([(X, 1)], (X, True), 4, TAIL),
    "replace other by it": lambda x: x.replace([(OTHER, 0)], (X, True), 4, TAIL),
    "replace by other": lambda x: x.replace([(X, 0)], (OTHER, True), 4, TAIL),
    "clear": lambda x: x.clear(),
    "is_protected_prefix": lambda x: x.is_protected_prefix(X),
    "set_tail": lambda x: x.set_tail(4, TAIL),
}

# The columns: leases of X ("-" is not registered, "max" the bound); then the same at the clock's
# end. A cell: leases of X afterwards, or the refusal.
MISSING, FULL = "MissingBlock", "AccessClockOverflow"
EXISTS, LEASED = "DuplicateBlock", "BlockLeased"
WRONG, OVER, UNDER = "UnexpectedLeaseCount", "LeaseOverflow", "LeaseUnderflow"
STATES = ("-", "0", "1", "2", "max")
MATRIX = {
    "insert": ("0", EXISTS, EXISTS, EXISTS, EXISTS),
    "remove": (MISSING, "-", LEASED, LEASED, LEASED),
    "acquire": (MISSING, "1", "2", "3", OVER),
    "release": (MISSING, UNDER, "0", "1", "max-1"),
    "replace expecting 0": (MISSING, "-", WRONG, WRONG, WRONG),
    "replace expecting 1": (MISSING, WRONG, "-", WRONG, WRONG),
    "replace by itself": (MISSING, WRONG, "0", WRONG, WRONG),
    "replace other by it": ("0", EXISTS, EXISTS, EXISTS, EXISTS),
    "replace by other": (MISSING, EXISTS, WRONG, WRONG, WRONG),
    "clear": ("-", "-", LEASED, LEASED, LEASED),
    "is_protected_prefix": (MISSING, "0", "1", "2", "max"),
    "set_tail": ("-", "0", "1", "2", "max"),
}
AT_THE_CLOCKS_END = {
    **MATRIX,
    "insert": (FULL, EXISTS, EXISTS, EXISTS, EXISTS),
    "acquire": (MISSING, FULL, FULL, FULL, OVER),
    "replace by itself": (MISSING, WRONG, FULL, WRONG, WRONG),
    "replace other by it": (FULL, EXISTS, EXISTS, EXISTS, EXISTS),
}
TICKS = {"insert", "acquire", "replace by itself", "replace other by it"}
CELLS = [
    (clock, state, call, cell)
    for clock, matrix in ((7, MATRIX), (U64_MAX, AT_THE_CLOCKS_END))
    for call, row in matrix.items()
    for state, cell in zip(STATES, row, strict=True)
]


def leases_of(text: str) -> int:
    return {"max": USIZE_MAX, "max-1": USIZE_MAX - 1}.get(text) or int(text)


def error_of(cell: str, state: str, call: str) -> CacheLifecycleError:
    if cell == WRONG:
        expected = 0 if call in ("replace expecting 0", "replace by other") else 1
        return CacheLifecycleError.UnexpectedLeaseCount(X, expected, leases_of(state))
    if cell == FULL:
        return CacheLifecycleError.AccessClockOverflow()
    named = OTHER if call == "replace by other" and cell == EXISTS else X
    error: CacheLifecycleError = getattr(CacheLifecycleError, cell)(named)
    return error


@pytest.mark.parametrize(("clock", "state", "call", "cell"), CELLS)
def test_cell(clock: int, state: str, call: str, cell: str) -> None:
    lifecycle = CacheBlockLifecycle()
    lifecycle.insert(OTHER, False)
    if state != "-":
        lifecycle.insert(X, False)
        lifecycle._blocks[X].leases = leases_of(state)
    lifecycle._access_clock = clock
    if hasattr(CacheLifecycleError, cell):
        refused(lifecycle, error_of(cell, state, call), lambda: CALLS[call](lifecycle))
        return
    CALLS[call](lifecycle)
    if cell == "-":
        assert X not in lifecycle._blocks
    else:
        assert lifecycle.lease_count(X) == leases_of(cell)
    assert lifecycle._access_clock == clock + (call in TICKS)
    assert (lifecycle.tail(4) == TAIL) == (call.startswith("replace") or call == "set_tail")
