"""`shmcache demo`: run shmcache.workloads.demo, a real decoder in several processes."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import click
from rich.progress import TimeElapsedColumn

from shmcache import bounds
from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.names import POOL_NAME
from shmcache.cli.progress import progress_bar
from shmcache.cli.signals import signals_as_exceptions
from shmcache.cli.sizes import SIZE, format_size
from shmcache.errors import WorkloadError
from shmcache.workloads.demo import run_demo
from shmcache.workloads.demo_books import (
    ARENA_BYTES,
    DemoKill,
    DemoOptions,
    DemoProgress,
    DemoReport,
    DemoRow,
)
from shmcache.workloads.doc_chats import DOCS
from shmcache.workloads.weights import MODELS, load_model

_COLUMNS = (
    "worker >requests >computed >saved >hit_rate >tokens/s >first_token >without >checked >kills"
)


@click.command(cls=Command)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    help="Default: smollm2 where its package is installed, else tiny.",
)
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True)
@click.option("--conversations", type=click.IntRange(1, 10_000), default=4, show_default=True)
@click.option("--turns", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--pages", type=click.IntRange(1), default=2, show_default=True, help="Of the docs.")
@click.option(
    "--page-tokens",
    type=click.IntRange(1, 4096),
    default=768,
    show_default=True,
    help="Longer pages are cut.",
)
@click.option("--answer-tokens", type=click.IntRange(1, 128), default=16, show_default=True)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, bounds.BLOCK_TOKENS_MAX),
    default=64,
    show_default=True,
    help="Tokens of a block, and of a step.",
)
@click.option(
    "--pool-bytes", "arena_bytes", type=SIZE, default=ARENA_BYTES, help="Default: 256 MiB."
)
@click.option("--kills", type=click.IntRange(0), default=1, show_default=True, help="By SIGKILL.")
@click.option(
    "--check-every",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Compute every n-th request without the pool too; 0: none.",
)
@click.option("--seed", type=click.IntRange(0), help="Repeats what is asked; default: random.")
@click.option("--docs", type=click.Path(path_type=Path), default=DOCS, help="Folder of *.md files.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where weights are unpacked, once.")
@click.option("--name", type=POOL_NAME, help="A pool to use, or to make; default: demo-PID.")
@click.option("--keep", is_flag=True, help="Leave the pool: the next demo of that name hits.")
def demo(**options: Any) -> Answer:
    """Chat about the documentation with a real model in several processes that share a pool.

    Independent workers serve conversations that begin with the same pages. Each finds in the pool
    what any of them has computed, computes the rest and publishes it. Half-way one is killed.
    Every answer is computed a second time without the pool, and must have the same bits. Exit code
    1 when any bit was different, anything was violated or leaked.

    \b
    Example:
      shmcache demo --workers 4 --conversations 8 --kills 2
    """
    chosen, fallback = _options(**options)
    with contextlib.ExitStack() as stack:
        check = stack.enter_context(signals_as_exceptions())
        change = stack.enter_context(progress_bar("starting", TimeElapsedColumn()))

        def on_progress(at: DemoProgress) -> None:
            check()
            if change is not None:
                change(**_shown(at))

        return _answer(run_demo(chosen, on_progress), chosen, fallback)


def _options(
    *, model: str | None, name: str | None, seed: int | None, cache: Path | None, **options: Any
) -> tuple[DemoOptions, str | None]:
    """What to run, and why it is not the real model."""
    if cache is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = Path(home) / "shmcache"
    fallback = None
    if model is None:
        model = "smollm2"
        try:
            load_model(model, cache)
        except WorkloadError.PackageMissing as error:
            model, fallback = "tiny", f"a tiny random model is used instead of SmolLM2: {error}"
    try:
        return DemoOptions(
            name=name or f"demo-{os.getpid()}",
            seed=random.SystemRandom().getrandbits(32) if seed is None else seed,
            model=model,
            cache=cache,
            **options,
        ), fallback
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _shown(at: DemoProgress) -> dict[str, Any]:
    rate = at.tokens_saved / at.prompt_tokens if at.prompt_tokens else 0.0
    text = f"{at.requests} requests, {rate:.1%} of tokens saved, {at.kills} kills"
    return {"total": at.requests_total, "completed": at.requests, "description": text}


def _answer(report: DemoReport, options: DemoOptions, fallback: str | None) -> Answer:
    document = {name: getattr(report, name) for name in report.__struct_fields__}
    document |= {"fallback": fallback, "ok": report.ok}
    rows = [_cells(str(number), row) for number, row in enumerate(report.workers)]
    lines = [fallback] if fallback else []
    lines.append(f"model {report.model}, seed {report.seed}, {report.seconds:.1f} s")
    verdict = [f"violation: {text}" for text in report.violations]
    verdict += [_fate(kill) for kill in report.kills]
    if options.keep:
        verdict.append(f"kept: pool {options.name!r}")
    leaked = (
        "an unknown amount" if report.leaked_bytes is None else format_size(report.leaked_bytes)
    )
    total = report.total
    verdict.append(
        f"{total.checked - total.different} of {total.checked} checked answers have the bits of one"
        f" computed without the pool; {leaked} leaked"
    )
    verdict.append("verified" if report.ok else "FAILED")
    figures = table(_COLUMNS, [*rows, _cells("all", total)])
    return Answer(document, (*lines, figures, *verdict), not report.ok)


def _cells(name: str, row: DemoRow) -> tuple[str | int | None, ...]:
    return (
        name,
        row.requests,
        f"{row.tokens_computed:,}",
        f"{row.tokens_saved:,}",
        None if row.hit_rate is None else f"{row.hit_rate:.1%}",
        None if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        _milliseconds(row.first_token_ms),
        _milliseconds(row.first_token_alone_ms),
        row.checked,
        row.kills,
    )


def _milliseconds(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f} ms"


def _fate(kill: DemoKill) -> str:
    text = f"worker {kill.worker} was killed; {kill.reclaim_ms:.1f} ms later it held nothing"
    if kill.found_tokens is None:
        return text
    return (
        f"{text}; its successor found {kill.found_tokens:,} of {kill.prompt_tokens:,} tokens of the"
        " turn in the pool"
    )
