"""Pool names on a command line, and the argument that every command begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shmcache import bounds

if TYPE_CHECKING:
    _StrParam = click.ParamType[str]
else:
    _StrParam = click.ParamType  # subscriptable only in the newest releases of click


class _PoolName(_StrParam):
    name = "name"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        try:
            return bounds.pool_name(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


POOL_NAME = _PoolName()

pool_argument = click.argument("name", metavar="NAME", type=POOL_NAME)
optional_pool_argument = click.argument("name", metavar="[NAME]", type=POOL_NAME, required=False)


def hex_id(number: int) -> str:
    """A pool id or a nonce: many JSON readers would round a number of 64 bits."""
    return f"{number:016x}"
