"""`shmcache plan`: run shmcache.workloads.planning, and ask this host for the room."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from shmcache import bounds
from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.doctor import examination_text
from shmcache.cli.pools import sizes_document
from shmcache.cli.sizes import SIZE, FiniteRange, format_size
from shmcache.cli.traffic import named_geometry, trace_reader
from shmcache.doctor import ROOM_CHECKS, Host, examine_host
from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.geometries import Geometry, TokenLayers, geometry_names
from shmcache.workloads.model_config import NUMBER_BYTES, read_geometry
from shmcache.workloads.plan_drawing import require_drawable, text_curve, write_plot
from shmcache.workloads.planning import (
    CapacityPlan,
    PlanOptions,
    PlanPoint,
    PlanTraffic,
    plan_capacity,
)
from shmcache.workloads.traces import BLOCK_TOKENS_DEFAULT

# What is assumed where a hit rate is wanted and no trace is given.
_CHATS: Final = 300
_CHAT_BLOCK_TOKENS: Final = 128  # at least
_DTYPES: Final = (*NUMBER_BYTES, "fp8")

_tokens = click.IntRange(1, bounds.BLOCK_TOKENS_MAX)


@click.command(cls=Command)
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--bytes-per-token", type=click.IntRange(1), help="Instead of a model.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the cache; default: the model's.")
@click.option("--block-tokens", type=_tokens, default=16, show_default=True)
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(1, 1 << 30),
    multiple=True,
    default=(8192,),
    show_default=True,
    help="Tokens of a request; may be given several times, the longest counts.",
)
@click.option("--requests", type=click.IntRange(1), help="In flight at once; default: --workers.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--trace", metavar="FILE", help="Recorded requests, as `replay` reads them; - too.")
@click.option("--trace-block-tokens", type=_tokens, help="Of a block in the trace; default: 512.")
@click.option("--limit", type=click.IntRange(1), help="Only so many requests, the first ones.")
@click.option("--target", type=FiniteRange(0, 1, min_open=True), help="A hit rate, 0 to 1.")
@click.option("--arena", type=SIZE, help="A size to look at; default: what is needed.")
@click.option(
    "--policy",
    type=click.Choice(bounds.EVICTION_POLICIES),
    default=bounds.EVICTION_POLICIES[-1],
    show_default=True,
    help="lru is exact and instant, others are simulated in the engine.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curve: FILE.svg or .png.")
def plan(
    model: str | None,
    bytes_per_token: int | None,
    dtype: str | None,
    trace: str | None,
    limit: int | None,
    plot: Path | None,
    **options: Any,
) -> Answer:
    """Say how large a pool must be, and what it would be worth.

    MODEL is a built-in geometry such as llama-3.1-8b, a config.json, or a folder that has one. The
    pool holds every block that the requests in flight may lease; with --target as many as that hit
    rate takes on the trace (without one: on generated chats). Nothing is made; the command that
    makes the pool is the last line. Exit code 1 when no size reaches the target.

    \b
    Example:
      shmcache plan llama-3.1-8b --workers 4 --requests 32 --trace trace.jsonl.gz --target 0.3
    """
    geometry = _geometry(model, bytes_per_token, dtype)
    try:
        if plot is not None:
            require_drawable(plot)
        assumed = trace is None and options["target"] is not None
        chosen = _options(assumed, **options)
        prompts = _prompts(trace, limit, chosen) if trace or assumed else None
        with _progress() as tell:
            planned = plan_capacity(geometry, chosen, prompts, tell)
        if plot is not None:
            write_plot(planned, plot)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return _answer(planned, assumed)


def _geometry(model: str | None, bytes_per_token: int | None, dtype: str | None) -> Geometry:
    if (model is None) == (bytes_per_token is None):
        raise click.UsageError("give a MODEL or --bytes-per-token, one of the two")
    if bytes_per_token is not None:
        if dtype is not None:
            raise click.UsageError("--dtype is for a MODEL")
        return Geometry("custom", "", (TokenLayers(1, bytes_per_token, number_bytes=1),))
    name = model or ""
    is_path = "/" in name or name.endswith(".json") or Path(name).exists()
    if is_path and name.lower() not in map(str.lower, geometry_names()):
        found = read_geometry(name)
    else:
        found = named_geometry(name, "MODEL")
    return found.in_numbers_of(NUMBER_BYTES.get(dtype, 1)) if dtype else found


def _options(
    assumed: bool,
    *,
    requests: int | None,
    trace_block_tokens: int | None,
    target: float | None,
    arena: int | None,
    **options: Any,
) -> PlanOptions:
    default, block_tokens = BLOCK_TOKENS_DEFAULT, options["block_tokens"]
    if assumed:
        default = -(-_CHAT_BLOCK_TOKENS // block_tokens) * block_tokens
    return PlanOptions(
        requests=requests or options["workers"],
        trace_block_tokens=trace_block_tokens or default,
        target_rate=target,
        arena_bytes=arena,
        **options,
    )


def _prompts(trace: str | None, limit: int | None, options: PlanOptions) -> list[tuple[int, ...]]:
    if trace is None:
        chats = ConversationOptions(
            seed=1, conversations=_CHATS, block_tokens=options.trace_block_tokens
        )
        requests = conversation_trace(chats)
        return [request.block_ids for request in itertools.islice(requests, limit)]
    with trace_reader(trace, options.trace_block_tokens) as reader:
        return [request.block_ids for request in itertools.islice(reader, limit)]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A live line on a terminal's standard error, elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("reading the curve") as status:
        yield lambda what: status.update(f"simulating {what}")


# ---- the answer --------------------------------------------------------------------------------


def _answer(planned: CapacityPlan, assumed: bool) -> Answer:
    host = Host(needs_bytes=planned.segment_bytes)
    examined = examine_host(host, ROOM_CHECKS)
    command = ("shmcache", "create", "NAME", *planned.command)
    traffic = planned.traffic
    fields = {name: getattr(planned, name) for name in planned.__struct_fields__}
    document = fields | sizes_document(planned.geometry)
    document |= {
        "expected_hit_rate": None if traffic is None else traffic.planned.policy_rate,
        "command": " ".join(command),
        "assumed_traffic": assumed,
        "host": host.supply,
        "fits_here": examined.ok,
        "host_checks": examined.checks,
    }
    text: list[Any] = [*_sizes(planned), ""]
    if traffic is not None:
        text += [*_traffic(planned, traffic, assumed), ""]
    text += examination_text(examined)
    text += ["it fits this host" if examined.ok else "it does not fit this host", ""]
    text.append(" ".join(command))
    return Answer(document, tuple(text), finding=traffic is not None and not traffic.reached)


def _sizes(planned: CapacityPlan) -> Iterator[Any]:
    size = format_size
    yield (
        f"{planned.model}: {planned.bytes_per_token:,} bytes per token, {planned.block_bytes:,} "
        f"({size(planned.block_bytes)}) per block of {planned.block_tokens} tokens"
    )
    if planned.state_bytes:
        yield f"its recurrent state, {size(planned.state_bytes)} a sequence, is in no block"
    yield ""
    rows = ((f"{c.tokens:,}", size(c.sequence_bytes), f"{c.blocks:,}") for c in planned.contexts)
    yield table(">context >sequence >blocks", rows)
    yield ""
    longest = planned.contexts[-1].tokens
    yield (
        f"in flight at once: {planned.requests:,} x {longest:,} tokens, "
        f"which may lease {planned.in_flight_blocks:,} blocks"
    )
    yield (
        f"the pool: {planned.blocks:,} blocks, {size(planned.geometry.arena_bytes)} of arena, "
        f"a segment of {planned.segment_bytes:,} bytes"
    )
    if planned.blocks < planned.in_flight_blocks:
        yield "fewer than may be leased at once: some requests would go without"


def _traffic(planned: CapacityPlan, traffic: PlanTraffic, assumed: bool) -> Iterator[Any]:
    source = f"{_CHATS} generated chats, no trace was given" if assumed else "the trace"
    yield (
        f"{source}: {traffic.requests:,} requests, {traffic.trace_references:,} blocks asked for, "
        f"{traffic.trace_blocks:,} of them different"
    )
    if traffic.longest_tokens - planned.contexts[-1].tokens >= planned.block_tokens:
        yield f"its longest prompt has {traffic.longest_tokens:,} tokens: see --context"
    policy = planned.geometry.eviction
    columns = [">arena", ">blocks", ">lru"]
    columns += [f">{planned.workers}_private"] if planned.workers > 1 else []
    columns += [f">{policy}"] if policy != "lru" else []
    yield table(" ".join(columns), (_cells(planned, p) for p in (*traffic.points, traffic.planned)))
    yield ""
    yield from text_curve(traffic)
    yield ""
    yield f"the last line is the plan; no cache can hit more than {traffic.ideal_rate:.2%}"
    if traffic.target_rate is None:
        return
    if traffic.target_blocks is None:
        yield f"no size reaches {traffic.target_rate:.2%} on it"
    else:
        yield f"{traffic.target_rate:.2%} takes {traffic.target_blocks:,} blocks, with lru"


def _cells(planned: CapacityPlan, point: PlanPoint) -> Iterator[str]:
    yield format_size(point.arena_bytes)
    yield f"{point.blocks:,}"
    yield f"{point.lru_rate:.2%}"
    if planned.workers > 1:
        yield f"{point.private_rate:.2%}"
    if planned.geometry.eviction != "lru":
        yield f"{point.policy_rate:.2%}"
