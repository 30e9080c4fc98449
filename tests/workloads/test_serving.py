"""A server's answers have the same bits with the pool and without, whoever computed them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmcache import CachePoolLimits, CacheResidencyPool
from shmcache.workloads.decoder import ONE_BLAS_THREAD
from shmcache.workloads.serving import ModelServer, create_serving_pool, sequence_bytes
from shmcache.workloads.weights import TINY, tiny_model
from tests.support import PATIENCE_S, Worker, process_state, wait_until
from tests.workloads.test_decoder import SHAPES, some_tokens

BLOCK = 16
PROGRAM = "from tests.workloads.test_serving import answer_with"
ASK = "answer_with(tell, name, prompt, gate)"


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with make(pool_name) as made:
        yield made
    CacheResidencyPool.destroy(pool_name)


def make(name: str, arena_bytes: int = 1 << 24) -> CacheResidencyPool:
    return create_serving_pool(
        name, TINY, servers=3, tokens_max=512, arena_bytes=arena_bytes, block_tokens=BLOCK
    )


def server(pool: CacheResidencyPool, shape: str = "full", **options: float) -> ModelServer:
    return ModelServer(pool, tiny_model(SHAPES[shape]), block_tokens=BLOCK, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_second_answer_is_known_and_all_three_are_the_same(
    pool: CacheResidencyPool, shape: str
) -> None:
    prompt, serving = some_tokens(201), server(pool, shape)
    found: list[int] = []
    first = serving.answer(prompt, tokens_max=20, on_match=found.append)
    second = serving.answer(prompt, tokens_max=20, on_match=found.append)
    alone = serving.answer_alone(prompt, tokens_max=20)
    assert found == [first.known_tokens, second.known_tokens] == [0, 192]
    assert first.digest == second.digest == alone.digest
    assert first.tokens == second.tokens == alone.tokens
    assert 0 < len(alone.tokens) <= 20
    assert 0 < second.first_token_s <= second.seconds


def test_an_answer_ends_with_the_turn() -> None:
    """`tokens_max` or the token that ends a turn, which is not part of the answer."""
    model = tiny_model()
    limits = CachePoolLimits(1 << 24, 1 << 24, 1 << 24, 0)
    with CacheResidencyPool(limits, arena_bytes=1 << 22) as pool:
        serving = ModelServer(pool, model, block_tokens=BLOCK)
        for seed in range(200):
            reply = serving.answer_alone(some_tokens(30, seed), tokens_max=10)
            assert model.tokenizer.turn_end not in reply.tokens
            if len(reply.tokens) < 10:
                with_pool = serving.answer(some_tokens(30, seed), tokens_max=10)
                assert with_pool.tokens == reply.tokens
                return
    pytest.fail("no answer of this model ever ends by itself: the test needs other prompts")


def test_a_prompt_of_one_token(pool: CacheResidencyPool) -> None:
    serving = server(pool)
    assert (
        serving.answer([5], tokens_max=3).digest == serving.answer_alone([5], tokens_max=3).digest
    )


def test_no_prompt_is_refused(pool: CacheResidencyPool) -> None:
    with pytest.raises(ValueError, match="nothing to prefill"):
        server(pool).answer([], tokens_max=3)
    assert not pool.report().managers


def test_a_full_arena_costs_hits_and_no_answer(pool_name: str) -> None:
    """Room for a few blocks, all of them leased by the request itself."""
    with make(pool_name, arena_bytes=1 << 16) as pool:
        serving = server(pool)
        prompt = some_tokens(200)
        alone = serving.answer_alone(prompt, tokens_max=5)
        for _ in range(2):
            reply = serving.answer(prompt, tokens_max=5)
            assert reply.digest == alone.digest
        assert 0 < reply.known_tokens < 192
    CacheResidencyPool.destroy(pool_name)


def test_a_pool_has_room_for_its_servers() -> None:
    assert sequence_bytes(TINY, BLOCK, 1) == sequence_bytes(TINY, BLOCK, BLOCK) == BLOCK * 1024


# Two at once -------------------------------------------------------------------------------------


def answer_with(
    tell: Callable[..., object], name: str, prompt: list[int], gate: str
) -> list[object]:
    """One worker's answer; it waits at the gate after it has seen what the pool has."""

    def on_match(known: int) -> None:
        tell("matched", known)
        if gate:
            Path(gate).read_bytes()

    with CacheResidencyPool.attach(name) as pool:
        serving = server(pool, wait_s=PATIENCE_S)
        tell("asking")
        reply = serving.answer(prompt, tokens_max=5, on_match=on_match)
        same = reply.digest == serving.answer_alone(prompt, tokens_max=5).digest
        return [reply.known_tokens, same]


def two_at_once(name: str, gate: Path, first: Worker, second: Worker) -> None:
    """The first has begun with a prompt and stands at the gate, the second waits for its blocks."""
    os.mkfifo(gate)
    prompt = some_tokens(201)
    first.begin(ASK, name=name, prompt=prompt, gate=str(gate))
    first.expect("asking")
    assert first.expect("matched") == 0
    second.begin(ASK, name=name, prompt=prompt, gate="")
    second.expect("asking")
    wait_until(lambda: process_state(second.pid) == "S", "the second waits")
    assert not second.answered()


def test_a_worker_waits_for_what_another_is_computing(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    with Worker(PROGRAM, env=ONE_BLAS_THREAD) as one, Worker(PROGRAM, env=ONE_BLAS_THREAD) as two:
        assert pool.name is not None
        two_at_once(pool.name, tmp_path / "gate", one, two)
        (tmp_path / "gate").write_bytes(b"")
        assert two.expect("matched") == 192
        assert one.finish() == [0, True]
        assert two.finish() == [192, True]


def test_a_worker_does_not_wait_for_the_dead(pool: CacheResidencyPool, tmp_path: Path) -> None:
    """The claim passes on: the second computes all of it, long before its patience ends."""
    with Worker(PROGRAM, env=ONE_BLAS_THREAD) as one, Worker(PROGRAM, env=ONE_BLAS_THREAD) as two:
        assert pool.name is not None
        two_at_once(pool.name, tmp_path / "gate", one, two)
        one.kill()
        assert two.expect("matched") == 0
        assert two.finish() == [0, True]
    assert server(pool).answer(some_tokens(201), tokens_max=1).known_tokens == 192
