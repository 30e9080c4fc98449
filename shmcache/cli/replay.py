"""`shmcache replay`: run shmcache.workloads.replay on a file of recorded requests."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from typing import Any, Final

import click
from rich.progress import TimeElapsedColumn

from shmcache import bounds
from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.names import POOL_NAME
from shmcache.cli.progress import progress_bar
from shmcache.cli.signals import signals_as_exceptions
from shmcache.cli.sizes import SIZE, FiniteRange, format_size
from shmcache.cli.traffic import named_geometry, trace_reader
from shmcache.workloads.replay import run_replay
from shmcache.workloads.replay_books import ReplayOptions, ReplayProgress, ReplayReport
from shmcache.workloads.traces import BLOCK_TOKENS_DEFAULT, TraceReader

_BLOCK_BYTES_DEFAULT: Final = 4096
_POOL_BYTES_DEFAULT: Final = 256 << 20

_positive = FiniteRange(0, min_open=True)


@click.command(cls=Command)
@click.argument("trace", metavar="TRACE", type=click.Path())
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--private", is_flag=True, help="A pool per worker, a part of the memory each.")
@click.option("--limit", type=click.IntRange(1), help="Only so many requests, the first ones.")
@click.option(
    "--speed",
    type=_positive,
    help="Follow timestamps, so many times as fast; default: as fast as possible.",
)
@click.option("--geometry", "model", metavar="MODEL", help="Blocks as large as this model's.")
@click.option("--bytes-per-token", type=click.IntRange(1), help="Instead: bytes of one token.")
@click.option("--block-bytes", type=SIZE, help="Instead: bytes of one block; default: 4 KiB.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1, bounds.BLOCK_TOKENS_MAX),
    default=BLOCK_TOKENS_DEFAULT,
    show_default=True,
    help="Tokens of a block, as in the trace.",
)
@click.option("--pool-bytes", type=SIZE, help="Memory for blocks; default: 256 MiB.")
@click.option("--pool-blocks", type=click.IntRange(1), help="Instead: room for so many blocks.")
@click.option(
    "--policy",
    type=click.Choice(bounds.EVICTION_POLICIES),
    help="What decides which blocks go; default: as `create`.",
)
@click.option("--kill-every", type=_positive, metavar="SECONDS", help="Kill a worker so often.")
@click.option("--kill-after", type=click.IntRange(1), metavar="REQUESTS", help="Kill one, once.")
@click.option("--seed", type=click.IntRange(0), help="Repeats whom a run kills.")
@click.option("--name", type=POOL_NAME, help="Name of the pool to make; default: replay-PID.")
@click.option("--keep", is_flag=True, help="Leave the pool, with its blocks, to be looked at.")
def replay(trace: str, limit: int | None, **options: Any) -> Answer:
    """Serve recorded requests from a pool, and check every byte.

    TRACE has one JSON object a line, plain or gzip: timestamp in milliseconds, input_length and
    output_length in tokens, and hash_ids, one id per block of the prompt ("-": standard input).
    Independent workers take the requests in order, lease the prefix that the pool has, fill and
    publish what is missing, and check what they read. Makes a pool of its own, and removes it. Exit
    code 1 when a byte was wrong, anything was violated or leaked.

    \b
    Example:
      shmcache replay trace.jsonl.gz --workers 4 --pool-bytes 64MiB --kill-every 2
    """
    chosen = _options(**options)
    with contextlib.ExitStack() as stack:
        check = stack.enter_context(signals_as_exceptions())
        reader = stack.enter_context(trace_reader(trace, chosen.block_tokens, check))
        change = stack.enter_context(progress_bar("starting", TimeElapsedColumn()))

        def on_progress(at: ReplayProgress) -> None:
            check()
            if change is not None:
                change(**_shown(at, reader, limit))

        return _answer(run_replay(itertools.islice(reader, limit), chosen, on_progress), chosen)


def _options(
    *,
    name: str | None,
    seed: int | None,
    policy: str | None,
    kill_every: float | None,
    pool_bytes: int | None,
    pool_blocks: int | None,
    **options: Any,
) -> ReplayOptions:
    if pool_bytes is not None and pool_blocks is not None:
        raise click.UsageError("give --pool-bytes or --pool-blocks, not both")
    if pool_blocks is None:
        pool_bytes = _POOL_BYTES_DEFAULT if pool_bytes is None else pool_bytes
    sizes = {key: options.pop(key) for key in ("model", "bytes_per_token", "block_bytes")}
    block_bytes = _block_bytes(block_tokens=options["block_tokens"], **sizes)
    try:
        return ReplayOptions(
            name=name or f"replay-{os.getpid()}",
            seed=random.SystemRandom().getrandbits(32) if seed is None else seed,
            block_bytes=block_bytes,
            pool_bytes=pool_bytes,
            pool_blocks=pool_blocks,
            eviction=policy,
            kill_every_s=kill_every,
            **options,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _block_bytes(
    *, block_tokens: int, model: str | None, bytes_per_token: int | None, block_bytes: int | None
) -> int:
    if sum(size is not None for size in (model, bytes_per_token, block_bytes)) > 1:
        raise click.UsageError("give one of --geometry, --bytes-per-token and --block-bytes")
    if model is not None:
        bytes_per_token = named_geometry(model, "--geometry").bytes_per_token
        if not bytes_per_token:
            raise click.BadParameter(f"{model} keeps nothing per token", param_hint="--geometry")
    if bytes_per_token is not None:
        return bytes_per_token * block_tokens
    return block_bytes or _BLOCK_BYTES_DEFAULT


def _shown(at: ReplayProgress, reader: TraceReader, limit: int | None) -> dict[str, Any]:
    """What a bar shows; it pulses when no end is known."""
    parts = (reader.fraction_read, at.requests / limit if limit else None)
    done = max((part for part in parts if part is not None), default=None)
    rate = at.block_hits / at.block_references if at.block_references else 0.0
    text = f"{at.requests:,} requests, {rate:.1%} of blocks hit, {at.kills} kills"
    return {"total": None if done is None else 1.0, "completed": done, "description": text}


def _answer(report: ReplayReport, options: ReplayOptions) -> Answer:
    document = {name: getattr(report, name) for name in report.__struct_fields__}
    leaked = None if report.leaked_bytes is None else format_size(report.leaked_bytes)
    per_second = report.requests / max(report.seconds, 1e-9)
    rows = (
        ("requests", f"{report.requests:,}"),
        ("requests/s", f"{per_second:,.0f}"),
        ("blocks asked for", f"{report.block_references:,}"),
        ("blocks hit", f"{report.block_hits:,}"),
        ("hit rate", f"{report.block_hit_rate:.2%}"),
        ("ideal hit rate", f"{report.ideal_hit_rate:.2%}"),
        ("tokens saved", f"{report.tokens_saved:,} of {report.input_tokens:,}"),
        ("evictions", None if report.evictions is None else f"{report.evictions:,}"),
        ("blocks left out", f"{report.blocks_left_out:,}"),
        ("served", format_size(report.bytes_served)),
        ("stored", format_size(report.bytes_stored)),
        ("kills", report.kills),
        ("requests redone", report.redone),
        ("wrong bytes", report.wrong_bytes),
        ("leaked", leaked),
        ("seconds", f"{report.seconds:.1f}"),
        ("seed", report.seed),
    )
    lines = [f"violation: {text}" for text in report.violations]
    if options.keep:
        lines += [f"kept: pool {name!r}" for name in options.names]
    lines.append("every byte was right, nothing leaked" if report.ok else "FAILED")
    return Answer(document | {"ok": report.ok}, (table("what >value", rows), *lines), not report.ok)
