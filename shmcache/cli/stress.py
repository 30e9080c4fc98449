"""`shmcache stress`: run shmcache.workloads.stress and say what it found."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console

from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.names import POOL_NAME
from shmcache.cli.signals import signals_as_exceptions
from shmcache.cli.sizes import FiniteRange
from shmcache.workloads.stress import StressOptions, StressProgress, StressReport, run_stress


@click.command(cls=Command)
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--seconds", type=FiniteRange(0, min_open=True), default=10.0, show_default=True)
@click.option(
    "--kill-rate",
    type=FiniteRange(0, 1000),
    default=5.0,
    show_default=True,
    help="Workers killed with SIGKILL, and replaced, a second, at most.",
)
@click.option("--seed", type=click.IntRange(0), help="Repeats the decisions of a run.")
@click.option("--name", type=POOL_NAME, help="Name of the pool to make; default: stress-PID.")
@click.option("--no-supervisor", is_flag=True, help="Nobody watches: workers sweep by themselves.")
def stress(seed: int | None, name: str | None, no_supervisor: bool, **options: Any) -> Answer:
    """Prove the promises on this host.

    Kills worker processes at random while all accounts are audited from outside. Makes a pool of
    its own, without block memory, and removes it. Exit code 1 when anything was violated or leaked.

    \b
    Example:
      shmcache stress --workers 4 --seconds 10 --kill-rate 5
    """
    chosen = StressOptions(
        name=name or f"stress-{os.getpid()}",
        seed=random.SystemRandom().getrandbits(32) if seed is None else seed,
        workers=options["workers"],
        seconds=options["seconds"],
        kills_per_second=options["kill_rate"],
        supervisor=not no_supervisor,
    )
    with signals_as_exceptions() as check, _progress_line(chosen) as show:

        def on_progress(at: StressProgress) -> None:
            check()
            show(at)

        report = run_stress(chosen, on_progress)
    return _answer(report)


@contextlib.contextmanager
def _progress_line(options: StressOptions) -> Iterator[Callable[[StressProgress], None]]:
    """A live line on a terminal's standard error, elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda at: status.update(
            f"{at.elapsed_s:.0f} of {options.seconds:g} s: {at.operations:,} operations, "
            f"{at.kills} kills, {at.audits} audits, seed {options.seed}"
        )


def _answer(report: StressReport) -> Answer:
    document = {name: getattr(report, name) for name in report.__struct_fields__}
    leaked = "-" if report.leaked_bytes is None else f"{report.leaked_bytes}"
    owners = "-" if report.leaked_owners is None else f"{report.leaked_owners}"
    p50, p99, most = report.reclaim_p50_ms, report.reclaim_p99_ms, report.reclaim_max_ms
    rows = (
        ("operations", f"{report.operations:,}"),
        ("operations/s", f"{report.operations_per_second:,.0f}"),
        ("refusals for want of room", f"{report.refusals:,}"),
        ("kills", report.kills),
        ("audits", report.audits),
        ("violations", len(report.violations)),
        ("leaked bytes", leaked),
        ("leaked owners", owners),
        ("reclaims measured", report.reclaims_measured),
        ("reclaim p50, p99, max (ms)", None if p50 is None else f"{p50}, {p99}, {most}"),
        ("seed", report.seed),
    )
    verdict = "nothing violated, nothing leaked" if report.ok else "FAILED"
    lines = tuple(f"violation: {text}" for text in report.violations)
    return Answer(
        document | {"ok": report.ok}, (table("what >value", rows), *lines, verdict), not report.ok
    )
