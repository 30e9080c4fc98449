"""Every exception of the package: one family per base class, one nested subclass per condition.

Why: a caller catches `CachePoolError.BudgetExceeded` and reads `error.required`, a test compares
whole errors, a worker sends one through a pipe. So an error is a value: its payload fields are
attributes, constructor parameters and `args`, in the order of the table; equality and hash follow
class and payload; pickle keeps all of it.

A family is a list of names and a few lines per condition:

    class CacheThingError(ContractError):
        Missing: TypeAlias = "_ThingMissing"  # the name users write; replaced by the class

    @variant("no thing has the id {id}", hint="store it first")
    class _ThingMissing(CacheThingError):
        id: int

The alias lets a type checker take `CacheThingError.Missing` for a class and for a type, although a
class body cannot name itself. Payload types of higher layers are written as a builtin base or
`Any`, because this file imports nothing of ours.
"""

from __future__ import annotations

import errno
import string
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast, dataclass_transform

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size_text(size_bytes: int, *, exact: bool = False) -> str:
    """`1.5 GiB`. One decimal at most; `exact` adds the byte count where that decimal lies."""
    unit, scale = 0, 1
    while unit + 1 < len(_SIZE_UNITS) and _tenths(size_bytes, scale) >= 10240:
        unit, scale = unit + 1, scale << 10
    whole, tenth = divmod(_tenths(size_bytes, scale), 10)
    text = f"{whole}.{tenth} {_SIZE_UNITS[unit]}" if tenth else f"{whole} {_SIZE_UNITS[unit]}"
    if exact and (whole * 10 + tenth) * scale != size_bytes * 10:
        return f"{text} ({size_bytes} bytes)"
    return text


def _tenths(size_bytes: int, scale: int) -> int:
    return (size_bytes * 10 + scale // 2) // scale


class _Text(string.Formatter):
    """Templates may say `{needed:size}`; an enum shows its serialised spelling."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":
            return size_text(value, exact=True)
        shown = value.value if isinstance(value, Enum) else value
        return str(super().format_field(shown, format_spec))


_TEXT = _Text()


class ContractError(Exception):
    """Base of all families. Catch it to catch whatever this package raises on purpose.

    Only variants are raised: a family has no payload that would say what happened.
    """

    _payload: ClassVar[tuple[str, ...]] = ()
    _prose: ClassVar[tuple[str, ...]] = ()
    _text: ClassVar[str] = ""
    _hint: ClassVar[str] = ""
    _cause: ClassVar[str] = ""

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__qualname__} is a family, raise one of its variants")

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, name) for name in self._payload)
        if self._cause:
            self.__cause__ = getattr(self, self._cause)

    @property
    def hint(self) -> str:
        """What to do next, or an empty string."""
        return _TEXT.format(self._hint, **vars(self))

    def __str__(self) -> str:
        prose = [vars(self)[name] for name in self._prose]
        parts = [_TEXT.format(self._text, **vars(self)), *prose, self.hint]
        return ": ".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(map(repr, self.args))})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, ContractError)
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def _identity(self) -> tuple[object, ...]:
        compared = (name for name in self._payload if name not in self._prose)
        return tuple(_comparable(getattr(self, name)) for name in compared)


def _comparable(value: object) -> object:
    """Foreign exceptions compare by identity, which no pickle survives: take their kind instead."""
    if isinstance(value, BaseException) and not isinstance(value, ContractError):
        return type(value), getattr(value, "errno", None)
    return value


_Variant = TypeVar("_Variant", bound=ContractError)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def variant(
    text: str, *, hint: str = "", cause: str = ""
) -> Callable[[type[_Variant]], type[_Variant]]:
    """Make the class a variant of its base: its annotations are the payload.

    `text` is one factual line and `hint` says what to do next; together they name every payload
    field (checked here, once). A `message` of free wording is declared `field(default="",
    compare=False)`: shown after the text, no part of equality. `cause` names the payload field
    that is also `__cause__`.
    """

    def declare(cls: type[_Variant]) -> type[_Variant]:
        family = cls.__bases__[0]
        names = [name for name, value in vars(family).items() if value == cls.__name__]
        if len(names) != 1:
            raise TypeError(f"{family.__name__} does not list {cls.__name__}")
        cls.__doc__ = cls.__doc__ or f"{text}."
        made = dataclass(eq=False, repr=False)(cls)
        payload = fields(cast("Any", made))
        made._payload = tuple(f.name for f in payload)
        made._prose = tuple(f.name for f in payload if not f.compare)
        made._text, made._hint, made._cause = text, hint, cause
        shown = {name for _, name, _, _ in _TEXT.parse(text + hint)}
        if unnamed := set(made._payload) - set(made._prose) - shown:
            raise TypeError(f"the text of {cls.__name__} does not name {sorted(unnamed)}")
        made.__name__ = names[0]
        made.__qualname__ = f"{family.__qualname__}.{names[0]}"
        setattr(family, names[0], made)
        return made

    return declare


# Pool accounting ----------------------------------------------------------------------------------


class CachePoolError(ContractError):
    """A refusal of the pool's accounting. Nothing has changed when one is raised.

    `Poisoned` says that a validation of the segment failed; every later call raises it too.
    """

    InvalidLimits: TypeAlias = "_PoolInvalidLimits"
    DuplicateManager: TypeAlias = "_PoolDuplicateManager"
    UnknownManager: TypeAlias = "_PoolUnknownManager"
    BudgetExceeded: TypeAlias = "_PoolBudgetExceeded"
    AccountingOverflow: TypeAlias = "_PoolAccountingOverflow"
    Poisoned: TypeAlias = "_PoolPoisoned"


@variant("the pool limits are invalid: {code}")
class _PoolInvalidLimits(CachePoolError):
    """`code` is `device_bytes_zero` or `transfer_in_flight_bytes_zero`."""

    code: str
    message: str = field(default="", compare=False)


@variant("manager {manager} is already registered", hint="pass None to be given a free id")
class _PoolDuplicateManager(CachePoolError):
    manager: int


@variant("manager {manager} is not registered", hint="register it, and keep its membership alive")
class _PoolUnknownManager(CachePoolError):
    manager: int


@variant(
    "the {resource} axis would hold {required} bytes, its limit is {budget}",
    hint="release or wait (timeout=), or create the pool with a larger limit",
)
class _PoolBudgetExceeded(CachePoolError):
    """`resource` is a `CachePoolResource`."""

    resource: Enum
    required: int
    budget: int


@variant("a sum of {operation} does not fit 64 bits")
class _PoolAccountingOverflow(CachePoolError):
    """`operation` is `manager_publication`, `admission_validation` or `temporary_admission`."""

    operation: str


@variant(
    "the pool is poisoned, its accounting failed validation",
    hint="run `shmcache verify`, then start a new epoch: destroy and create it",
)
class _PoolPoisoned(CachePoolError):
    pass


# The segment and this host ------------------------------------------------------------------------

RefusedCheck: TypeAlias = Literal[
    "owner_uid",
    "mode",
    "file_type",
    "size",
    "magic",
    "version",
    "abi",
    "boot_id",
    "pid_namespace",
    "time_namespace",
    "checksum",
    "limits",
    "geometry",
    "robust_mutex",
    "name",
]

_RECREATE = "destroy it (`shmcache destroy`) and create it again"
_REFUSED_HINTS: dict[str, str] = {
    "owner_uid": "run as the user who created it, or choose another pool name",
    "mode": "another user could write to it: restore the mode with chmod, or recreate it",
    "file_type": "something else has this name: remove it, or choose another pool name",
    "size": f"the file was cut or overwritten: {_RECREATE}",
    "magic": "this file is no pool of shmcache: choose another pool name",
    "version": f"use one release of shmcache in all workers, or {_RECREATE}",
    "abi": f"use one build of shmcache on one kind of machine, or {_RECREATE}",
    "boot_id": f"it comes from before the last boot: {_RECREATE}",
    "pid_namespace": "share one PID namespace between all workers (shareProcessNamespace, --pid)",
    "time_namespace": "share one time namespace between all workers",
    "checksum": f"its header is damaged: {_RECREATE}",
    "limits": "ask for the limits it was created with, or attach without naming any",
    "geometry": "ask for the sizes it was created with, or attach without naming any",
    "robust_mutex": "this libc or kernel cannot recover a lock whose holder was killed",
    "name": "the file says it belongs to another pool: do not rename or copy segments",
}

_ERRNO_HINTS: dict[str, str] = {
    "EACCES": "check the mode and the owner of the segment and of /dev/shm",
    "EPERM": "a security profile or a missing capability forbids this call",
    "EMFILE": "raise the open file limit of this process (ulimit -n)",
    "ENFILE": "raise fs.file-max on this host",
    "ENOMEM": "raise vm.max_map_count or the address space limit (ulimit -v)",
    "ENOSPC": "raise the size of /dev/shm (--shm-size) or lower host_bytes",
    "ENOSYS": "this kernel is too old, or a security profile hides the call",
    "EROFS": "mount /dev/shm writable",
}


class SegmentError(ContractError):
    """What the shared segment can refuse beside accounting: names, files, room, tables, locks."""

    Exists: TypeAlias = "_SegmentExists"
    NotFound: TypeAlias = "_SegmentNotFound"
    Refused: TypeAlias = "_SegmentRefused"
    NoSpace: TypeAlias = "_SegmentNoSpace"
    OwnersFull: TypeAlias = "_SegmentOwnersFull"
    TableFull: TypeAlias = "_SegmentTableFull"
    LockHeld: TypeAlias = "_SegmentLockHeld"
    Retired: TypeAlias = "_SegmentRetired"
    Corrupt: TypeAlias = "_SegmentCorrupt"
    ArenaFull: TypeAlias = "_SegmentArenaFull"
    InUse: TypeAlias = "_SegmentInUse"
    Closed: TypeAlias = "_SegmentClosed"
    HostError: TypeAlias = "_SegmentHostError"


@variant("a pool named {name!r} exists", hint="attach to it, or destroy it first")
class _SegmentExists(SegmentError):
    name: str


@variant("no pool is named {name!r}", hint="create it first; `shmcache list` shows what exists")
class _SegmentNotFound(SegmentError):
    name: str


@variant("the segment failed the check {check}: expected {expected}, found {actual}")
class _SegmentRefused(SegmentError):
    check: RefusedCheck
    expected: object
    actual: object

    @property
    def hint(self) -> str:
        return _REFUSED_HINTS.get(self.check, "")


@variant(
    "the pool needs {needed:size}, {available:size} can be had",
    hint="raise {knob} or lower host_bytes",
)
class _SegmentNoSpace(SegmentError):
    """`knob` is what an operator turns: a cgroup file, or the option that sizes /dev/shm."""

    needed: int
    available: int
    knob: str


@variant(
    "all {owners_max} owner slots are taken by live processes",
    hint="attach fewer processes, or create the pool with a larger owners_max",
)
class _SegmentOwnersFull(SegmentError):
    owners_max: int


@variant(
    "all {capacity} rows of the {table} table are taken",
    hint="release some, or create the pool with a larger {table}_max",
)
class _SegmentTableFull(SegmentError):
    """`table` is `managers`, `reservations` or `blocks`."""

    table: str
    capacity: int


@variant(
    "process {pid} (state {state}) has held the lock of the pool for {waited_ns} ns",
    hint="continue it if it is stopped (kill -CONT {pid}); a live holder is never robbed",
)
class _SegmentLockHeld(SegmentError):
    """`state` is the letter of /proc/PID/stat, or `unknown`."""

    pid: int
    state: str
    waited_ns: int


@variant("this epoch of pool {name!r} has been retired", hint="close this handle and attach again")
class _SegmentRetired(SegmentError):
    name: str


@variant("the segment is damaged: {what}", hint=f"no byte of it was used; {_RECREATE}")
class _SegmentCorrupt(SegmentError):
    what: str


@variant(
    "no room for a block of {needed:size} in the arena; held, as (pid, bytes): {holders}",
    hint="release leases, or create the pool with more arena_bytes",
)
class _SegmentArenaFull(SegmentError):
    """`holders` lists (pid, bytes) of the owners whose blocks cannot be evicted, largest first."""

    needed: int
    holders: tuple[tuple[int, int], ...]


@variant(
    "other live processes are attached: {owners}",
    hint="stop them first, or force; forced, they keep the old memory and miss the new pool",
)
class _SegmentInUse(SegmentError):
    """`owners` lists pids."""

    owners: tuple[int, ...]


@variant("this handle of pool {name!r} is closed", hint="attach again")
class _SegmentClosed(SegmentError):
    name: str


@variant("{call} failed with {errno_name}")
class _SegmentHostError(SegmentError):
    """A system call failed in a way that no other variant describes."""

    call: str
    errno_name: str

    @classmethod
    def of(cls, call: str, error: OSError) -> SegmentError.HostError:
        number = error.errno or 0
        return cls(call, errno.errorcode.get(number, f"errno {number}"))

    @property
    def hint(self) -> str:
        return _ERRNO_HINTS.get(self.errno_name, "")
