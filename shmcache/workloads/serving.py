"""A model that answers prompts, with a pool that remembers what workers computed, or without.

    server = ModelServer(pool, smollm2_model(cache))
    reply = server.answer(prompt, tokens_max=64)
    model.tokenizer.decode(reply.tokens)

Why         What a worker of any kind does with a request: adopt the longest published prefix,
            compute the rest, publish it while going on, generate.
Contract    A prompt's steps and blocks begin at multiples of `block_tokens`, so `answer_alone`
            computes with the same split what `answer` takes from the pool, and both replies have
            the same bits: that is what `digest`, over the logits of every token, is compared for.
Concurrency One request at a time; as many servers on one pool as there are processes. Two that get
            the same prompt at once: one computes, the other waits for its blocks, `wait_s` long.
Death       A killed server's published blocks stay; the rest is given back by whoever comes next.
Errors      Those of the pool; ValueError for a prompt without tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from shmcache import (
    CachePoolLimits,
    CacheResidencyPool,
    CacheSession,
    NumpyBackend,
    PagedCacheOptions,
)
from shmcache.workloads.decoder import STEP_TOKENS, Decoder, DecoderShape, KeyValueStore
from shmcache.workloads.kv_blocks import BlockStore
from shmcache.workloads.session_store import SessionStore, cache_identity, prefix_sharing
from shmcache.workloads.weights import Model

WAIT_S: Final = 30.0  # for what another worker is computing


class Reply(msgspec.Struct, frozen=True):
    """Generated tokens, how many tokens of the prompt were known, and times since the call.

    `first_token_s` ends with the logits that the first token is chosen from. `digest`: SHA-256 over
    the logits that each token was chosen from, in order.
    """

    tokens: tuple[int, ...]
    known_tokens: int
    first_token_s: float
    seconds: float
    digest: str


class ModelServer:
    """One worker's model (see the module). `tokens_max` bounds a prompt with its answer."""

    def __init__(
        self,
        pool: CacheResidencyPool,
        model: Model,
        *,
        block_tokens: int = STEP_TOKENS,
        wait_s: float = WAIT_S,
    ) -> None:
        self._pool = pool
        self._model = model
        self._block_tokens = block_tokens
        self._wait_s = wait_s
        self._decoder = Decoder(model.shape, model.weights, step_tokens=block_tokens)
        self._identity = cache_identity(model, block_tokens)
        self._sharing = prefix_sharing(model, block_tokens)

    def answer(
        self,
        prompt: Sequence[int],
        *,
        tokens_max: int,
        on_match: Callable[[int], object] = lambda known: None,
    ) -> Reply:
        """What the model says; `on_match` hears first how many tokens of the prompt were known."""
        started = time.perf_counter()
        with CacheSession(
            self._pool,
            model=self._identity,
            options=self._options(len(prompt) + tokens_max),
            backend=NumpyBackend(reads_host=True),  # attention reads shared memory as it is
            sharing=self._sharing,
        ) as session:
            store = SessionStore(session, self._model.shape)
            on_match(store.match(prompt, timeout=self._wait_s))
            return self._generate(prompt, store, tokens_max, started)

    def answer_alone(self, prompt: Sequence[int], *, tokens_max: int) -> Reply:
        """The same without the pool."""
        started = time.perf_counter()
        store = BlockStore(self._model.shape, self._block_tokens)
        return self._generate(prompt, store, tokens_max, started)

    def _generate(
        self, prompt: Sequence[int], store: KeyValueStore, tokens_max: int, started: float
    ) -> Reply:
        decoder, known, made = self._decoder, store.tokens, list[int]()
        logits = decoder.prefill(prompt[known:], store)
        first_token_s = time.perf_counter() - started
        digest = hashlib.sha256(logits.tobytes())
        while (token := int(logits.argmax())) != self._model.tokenizer.turn_end:
            made.append(token)
            if len(made) == tokens_max:
                break
            logits = np.squeeze(decoder.logits(decoder.step([token], store)), 0)
            digest.update(logits.tobytes())
        seconds = time.perf_counter() - started
        return Reply(tuple(made), known, first_token_s, seconds, digest.hexdigest())

    def _options(self, tokens: int) -> PagedCacheOptions:
        """Room for the whole sequence in private memory: a full arena must not fail a request."""
        room = sequence_bytes(self._model.shape, self._block_tokens, tokens)
        return PagedCacheOptions(self._block_tokens, room, 0, 1)


def serving_pool_sizes(
    shape: DecoderShape,
    *,
    servers: int,
    tokens_max: int,
    arena_bytes: int,
    block_tokens: int = STEP_TOKENS,
) -> tuple[CachePoolLimits, dict[str, int]]:
    """Limits and options of a pool for so many servers at once, with sequences up to `tokens_max`.

    Blocks are as large as all layers that see equally far need.
    """
    private = servers * sequence_bytes(shape, block_tokens, tokens_max)
    options = {
        "arena_bytes": arena_bytes,
        "block_bytes_max": sequence_bytes(shape, block_tokens, block_tokens),
        "owners_max": 2 * servers + 2,  # the dead among them, until somebody sweeps
    }
    return CachePoolLimits(private, arena_bytes, private, 0), options


def create_serving_pool(name: str, shape: DecoderShape, **sizes: int) -> CacheResidencyPool:
    """A pool of the sizes that `serving_pool_sizes` works out.

    Errors: as `CacheResidencyPool.create`.
    """
    limits, options = serving_pool_sizes(shape, **sizes)
    return CacheResidencyPool.create(name, limits, **options)


def sequence_bytes(shape: DecoderShape, block_tokens: int, tokens: int) -> int:
    """Keys and values of so many tokens in all layers, in whole blocks."""
    blocks = -(-tokens // block_tokens)
    return blocks * block_tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
