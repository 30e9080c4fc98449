"""One process of the demo: answers prompts with the pool, and computes them again without it.

    python -m shmcache.workloads.demo_worker SETTINGS

Contract    Requests come in, one JSON object a line, and an answer goes out for each; standard
            input closes when there are no more. Only the first reply is timed as service; the
            second, from private memory alone, says whether every bit of the first was right.
            Any error ends the process with a traceback, which the launcher reports.
Death       May be killed anywhere. What it had found in the pool stays in a file that all map.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from shmcache import CacheResidencyPool
from shmcache.workloads.children import Counters, say_ready
from shmcache.workloads.serving import ModelServer, Reply
from shmcache.workloads.weights import load_model

# The columns of a worker's counts: the tokens that were found for the request that was looked up
# last, and its number plus one, written in this order before anything of it is computed.
FOUND_TOKENS, FOUND_REQUEST, COUNTS = range(3)


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told when it starts."""

    pool: str
    model: str
    cache: str
    block_tokens: int
    counters: int
    row: int
    rows: int


class WorkerRequest(msgspec.Struct, frozen=True):
    """One prompt, and whether its answer is to be computed without the pool too."""

    number: int
    prompt: list[int]
    answer_tokens: int
    check: bool


class WorkerAnswer(msgspec.Struct, frozen=True):
    """What was said with the pool, and without it."""

    number: int
    reply: Reply
    alone: Reply | None

    @property
    def same(self) -> bool:
        """Whether all logits of both have the same bits; true if there is nothing to compare."""
        return self.alone is None or self.reply.digest == self.alone.digest


def main(settings: str) -> None:
    """Serve until there are no more requests, then leave in order."""
    told = msgspec.json.decode(settings, type=WorkerSettings)
    counts = Counters(told.rows, COUNTS, told.counters).row(told.row)
    decoder = msgspec.json.Decoder(WorkerRequest)
    model = load_model(told.model, Path(told.cache))
    with CacheResidencyPool.attach(told.pool) as pool:
        server = ModelServer(pool, model, block_tokens=told.block_tokens)
        say_ready()
        for line in sys.stdin.buffer:
            request = decoder.decode(line)

            def note(known: int, number: int = request.number) -> None:
                counts[FOUND_TOKENS] = known
                counts[FOUND_REQUEST] = number + 1

            tokens_max = request.answer_tokens
            reply = server.answer(request.prompt, tokens_max=tokens_max, on_match=note)
            alone = None
            if request.check:
                alone = server.answer_alone(request.prompt, tokens_max=tokens_max)
            # Less than a pipe takes at once: a killed worker has answered, or has not.
            answer = WorkerAnswer(request.number, reply, alone)
            os.write(1, msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
