"""`shmcache doctor`: run shmcache.doctor and show what it found."""

from __future__ import annotations

import click
from rich.table import Table

from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.sizes import SIZE
from shmcache.doctor import CheckStatus, Examination, Host, examine_host


@click.command(cls=Command)
@click.option("--needs", "needs_bytes", type=SIZE, default=0, help="A segment that shall fit.")
@click.option("--strict", is_flag=True, help="Also a warning is exit code 1.")
def doctor(needs_bytes: int, strict: bool) -> Answer:
    """Check whether this host can have pools, and say what to change.

    Run it as the user that the workers have, and started as they are: limits, namespaces and
    security profiles are those of the process. Makes a pool of less than a megabyte and removes it;
    changes nothing else. Exit code 1 when something fails.

    \b
    Example:
      shmcache doctor --needs 40GiB --strict
    """
    examined = examine_host(Host(needs_bytes=needs_bytes))
    finding = not examined.ok or (strict and examined.count(CheckStatus.WARN) > 0)
    document = {"ok": not finding, "needs_bytes": needs_bytes, "checks": examined.checks}
    return Answer(document, (*examination_text(examined), _summary(examined)), finding)


def examination_text(examined: Examination) -> tuple[str | Table, ...]:
    """A line per check, and what to do about some of them."""
    rows = ((check.status.value, check.name, check.found) for check in examined.checks)
    advice = tuple(f"{check.name}: {check.advice}" for check in examined.checks if check.advice)
    found = table("status check found", rows)
    return (found, "", *advice, "") if advice else (found, "")


def _summary(examined: Examination) -> str:
    worst_first = reversed(CheckStatus)
    return ", ".join(f"{status.value}: {examined.count(status)}" for status in worst_first)
