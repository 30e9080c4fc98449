"""The generated chats have the shape they claim: prefixes grow, system prompts are shared."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections import Counter, defaultdict

import msgspec
import pytest

from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.traces import TraceReader, TraceRequest
from tests.support import ROOT

OPTIONS = ConversationOptions(seed=3, conversations=400, block_tokens=64, system_tokens=256)
SHARED = 4  # whole blocks of a system prompt


def chats(requests: list[TraceRequest]) -> dict[int, list[TraceRequest]]:
    """Requests by the first block after the system prompt, which a conversation has to itself."""
    found: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        if request.input_tokens >= (SHARED + 1) * OPTIONS.block_tokens:
            found[request.block_ids[SHARED]].append(request)
    return found


def test_a_turn_extends_the_prompt_and_the_answer_before_it() -> None:
    requests = list(conversation_trace(OPTIONS))
    turns = 0
    for chat in chats(requests).values():
        for before, after in itertools.pairwise(chat):
            whole = before.input_tokens // OPTIONS.block_tokens
            assert after.block_ids[:whole] == before.block_ids[:whole]
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.timestamp_ms > before.timestamp_ms
            turns += 1
    assert turns > 400


def test_requests_are_a_trace() -> None:
    """In order of arrival; ids count up in order of appearance, and name one prefix each."""
    requests = list(conversation_trace(OPTIONS))
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    before: dict[int, tuple[int, ...]] = {}
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // OPTIONS.block_tokens)
        assert request.output_tokens > 0
        for place, number in enumerate(request.block_ids):
            assert number <= len(before)
            assert before.setdefault(number, request.block_ids[:place]) == request.block_ids[:place]


def test_system_prompts_are_shared_by_popularity_and_partial_blocks_by_nobody() -> None:
    requests = list(conversation_trace(OPTIONS))
    openings = Counter(chat[0].block_ids[0] for chat in chats(requests).values())
    ranked = [count for _, count in openings.most_common()]
    assert len(ranked) == OPTIONS.system_prompts
    assert ranked[0] > 1.5 * ranked[1] > ranked[-1]
    partial = [r.block_ids[-1] for r in requests if r.input_tokens % OPTIONS.block_tokens]
    assert len(set(partial)) == len(partial)
    assert not set(partial) & {n for r in requests for n in r.block_ids[:-1]}


def test_the_number_of_turns_has_a_heavy_tail() -> None:
    lengths = [len(chat) for chat in chats(list(conversation_trace(OPTIONS))).values()]
    assert sum(length == 1 for length in lengths) > len(lengths) / 3
    assert sum(length > 10 for length in lengths) > len(lengths) / 40


def test_a_seed_decides_everything() -> None:
    """In other processes too; another seed makes another trace."""
    one = list(conversation_trace(OPTIONS))
    assert one == list(conversation_trace(OPTIONS))
    assert one != list(conversation_trace(msgspec.structs.replace(OPTIONS, seed=4)))


def test_the_program_writes_a_trace_that_can_be_read() -> None:
    arguments = ["--seed", "3", "--conversations", "20", "--block-tokens", "64"]
    made = subprocess.run(
        [sys.executable, "-m", "shmcache.workloads.conversations", *arguments],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    stream = io.BufferedReader(io.BytesIO(made.stdout))
    options = ConversationOptions(seed=3, conversations=20, block_tokens=64)
    read = list(TraceReader(stream, "the pipe", block_tokens=64))
    assert read == list(conversation_trace(options))


@pytest.mark.parametrize("conversations", [0, 1])
def test_few_conversations(conversations: int) -> None:
    options = msgspec.structs.replace(OPTIONS, conversations=conversations)
    assert bool(list(conversation_trace(options))) == bool(conversations)
