"""What a file that shall be the dump of a pool can get wrong."""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class DumpError(ContractError):
    """A dump cannot be written or read. Of what is damaged nothing is used."""

    Unreadable: TypeAlias = "_DumpUnreadable"
    Unwritable: TypeAlias = "_DumpUnwritable"
    Damaged: TypeAlias = "_DumpDamaged"
    Version: TypeAlias = "_DumpVersion"


@variant("the dump {path!r} cannot be read")
class _DumpUnreadable(DumpError):
    path: str
    message: str = field(default="", compare=False)


@variant("the dump {path!r} cannot be written")
class _DumpUnwritable(DumpError):
    path: str
    message: str = field(default="", compare=False)


@variant("{path!r} is no whole dump: {what}", hint="take it again with `shmcache dump`")
class _DumpDamaged(DumpError):
    path: str
    what: str


@variant(
    "the dump has {what} {actual}, this release reads {expected}",
    hint="read it with the release that wrote it",
)
class _DumpVersion(DumpError):
    what: str
    expected: int
    actual: int
