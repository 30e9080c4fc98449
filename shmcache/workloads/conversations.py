"""Makes a trace of chats: shared system prompts, turns that extend what was said before.

    python -m shmcache.workloads.conversations --seed 7 --conversations 50 | shmcache replay -

Why         A demonstration and a test need traffic with the reuse of real chats, of any size, from
            nothing but a seed.
Contract    A conversation opens with one of a few system prompts, the k-th most popular of them
            with a chance in proportion to 1/k. Each turn's prompt is the whole prompt before it,
            the answer to it, and something new. Conversations start as a Poisson process and
            overlap; turns follow after the time it takes to answer and to think. The number of
            turns has a heavy tail: one conversation in k has at least k. Requests come in the order
            of their arrival. Equal options give equal requests, everywhere.
Not here    Tokens. Equal block ids stand for equal tokens, as in recorded traces (traces.py).
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from shmcache.workloads.traces import BLOCK_TOKENS_DEFAULT, TraceRequest, trace_line

_MS_PER_OUTPUT_TOKEN: Final = 20
_TURNS_MAX: Final = 40


class ConversationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to make. Lengths of new text and of answers are exponential with the given mean."""

    seed: int
    conversations: int = 50
    conversations_per_second: float = 0.5
    system_prompts: int = 4
    system_tokens: int = 2048
    question_tokens: int = 400
    answer_tokens: int = 300
    think_seconds: float = 15.0
    block_tokens: int = BLOCK_TOKENS_DEFAULT


class _Conversation(msgspec.Struct):
    number: int
    system_prompt: int
    prompt_tokens: int
    turns_left: int


def conversation_trace(options: ConversationOptions) -> Iterator[TraceRequest]:
    """The requests, made while they are asked for."""
    rng = random.Random(options.seed)
    ids: dict[tuple[str, int, int], int] = {}
    arrivals: list[tuple[float, int, _Conversation]] = []
    start_ms, number = 0.0, 0
    while arrivals or number < options.conversations:
        # Start whoever comes before the next turn of those that talk already.
        while number < options.conversations and (not arrivals or start_ms <= arrivals[0][0]):
            heapq.heappush(arrivals, (start_ms, number, _started(options, rng, number)))
            start_ms += rng.expovariate(options.conversations_per_second) * 1000
            number += 1
        now_ms, _, talk = heapq.heappop(arrivals)
        talk.prompt_tokens += _some(rng, options.question_tokens)
        answer_tokens = _some(rng, options.answer_tokens)
        blocks = tuple(_block_ids(options, talk, ids))
        yield TraceRequest(float(round(now_ms)), talk.prompt_tokens, answer_tokens, blocks)
        talk.prompt_tokens += answer_tokens
        talk.turns_left -= 1
        if talk.turns_left:
            pause_ms = rng.expovariate(1 / options.think_seconds) * 1000
            next_ms = now_ms + answer_tokens * _MS_PER_OUTPUT_TOKEN + pause_ms
            heapq.heappush(arrivals, (next_ms, talk.number, talk))


def _started(options: ConversationOptions, rng: random.Random, number: int) -> _Conversation:
    ranks = range(1, options.system_prompts + 1)
    system_prompt = rng.choices(ranks, [1 / rank for rank in ranks])[0]
    turns = min(int(1 / (1 - rng.random())), _TURNS_MAX)
    return _Conversation(number, system_prompt, options.system_tokens, turns)


def _some(rng: random.Random, mean: int) -> int:
    return 1 + int(rng.expovariate(1 / mean))


def _block_ids(
    options: ConversationOptions, talk: _Conversation, ids: dict[tuple[str, int, int], int]
) -> Iterator[int]:
    """Ids count from 0 in the order of first appearance; a partial block is nobody else's."""
    size = options.block_tokens
    shared = options.system_tokens // size
    for place in range(talk.prompt_tokens // size):
        owner = ("system", talk.system_prompt) if place < shared else ("chat", talk.number)
        yield ids.setdefault((*owner, place), len(ids))
    if talk.prompt_tokens % size:
        yield ids.setdefault(("partial", talk.number, talk.prompt_tokens), len(ids))


def main(arguments: Sequence[str]) -> None:
    """Write a trace to standard output."""
    parser = argparse.ArgumentParser(prog="python -m shmcache.workloads.conversations")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS_DEFAULT)
    options = ConversationOptions(**vars(parser.parse_args(arguments)))
    for request in conversation_trace(options):
        sys.stdout.buffer.write(trace_line(request))


if __name__ == "__main__":
    main(sys.argv[1:])
