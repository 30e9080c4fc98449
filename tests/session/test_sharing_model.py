"""Any order of operations of three sessions that share prefixes: no token is ever another's.

What a layer holds for a token is a hash of all tokens up to it, as with a real decoder; texts have
two letters, so that prefixes meet. The model keeps each layer's text and nothing else: whatever a
session adopts, computes or reads must hash to that text.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmcache import (
    AttentionPolicy,
    CacheResidencyError,
    CacheResidencyPool,
    CacheSession,
    LayerCachePolicy,
    NumpyBackend,
    PagedCacheOptions,
    PrefixSharing,
)
from shmcache.pool.values import CachePoolLimits
from tests.session.rig import FULL, Copies, model

BLOCK, WINDOW, SINKS = 4, 6, 3
LIMITS = CachePoolLimits(1 << 20, 8 << 20, 1 << 20, 0)
POLICIES = (
    LayerCachePolicy.key_value(FULL, 1, 2),
    LayerCachePolicy.key_value(AttentionPolicy.sliding(WINDOW), 1, 2),
    LayerCachePolicy.key_value(FULL, 1, 2),
)
WHAT = model(*POLICIES, sink_tokens=SINKS)
LAYERS = range(len(POLICIES))

sessions = st.integers(0, 2)
words = st.sampled_from(["aaaa", "bbbb", "abab", "b"])  # mostly whole blocks
texts = st.lists(words, min_size=1, max_size=6).map("".join)
picks = st.randoms(use_true_random=False)


def hashed(text: str, layer: int) -> int:
    """What a layer holds for the last token of a text; exact in float16."""
    return zlib.crc32(f"{layer}:{text}".encode()) % 2000


def computed(text: str, count: int, layer: int) -> list[Any]:
    """Keys and values of the last `count` tokens of a text."""
    values = [hashed(text[:end], layer) for end in range(len(text) - count + 1, len(text) + 1)]
    keys = np.broadcast_to(np.array(values, np.float16)[:, None], (1, 1, count, 2))
    return [keys, -keys]


def ids(text: str) -> list[int]:
    """Tokens are letters."""
    return [ord(letter) for letter in text]


class SharingModel(RuleBasedStateMachine):
    """The rules; see the module."""

    pool: CacheResidencyPool

    @initialize(
        reads_host=st.booleans(),
        device=st.sampled_from([3 * 3 * 32, 1 << 12]),
        publish=st.sampled_from(["on_seal", "on_demote"]),
        most=st.sampled_from([None, 1024]),
        blocks=st.sampled_from([12, 64]),
    )
    def start(
        self, reads_host: bool, device: int, publish: Any, most: int | None, blocks: int
    ) -> None:
        self.pool = CacheResidencyPool(LIMITS, arena_bytes=8 << 20, blocks_max=blocks)
        self.copies = Copies()
        self.sessions = [
            CacheSession(
                self.pool,
                model=WHAT,
                options=PagedCacheOptions(BLOCK, device, 4096, 1),
                backend=NumpyBackend(reads_host=reads_host, on_copy=self.copies),
                sharing=PrefixSharing(
                    checkpoint_fingerprint="model",
                    dtype="float16",
                    publish=publish,
                    leased_bytes_max=most,
                ),
            )
            for _ in range(3)
        ]
        self.texts = [[""] * len(LAYERS) for _ in self.sessions]
        self.known = [""] * len(self.sessions)  # what was fed

    @rule(who=sessions, text=texts)
    def match(self, who: int, text: str) -> None:
        """Only a text that goes on from what is known."""
        held = self.texts[who]
        if len(set(held)) != 1 or self.known[who] != held[0]:
            return
        text = held[0] + text
        found = self.sessions[who].match(ids(text))
        assert found == len(held[0]) or found % BLOCK == 0
        self.texts[who] = [text[:found]] * len(LAYERS)
        self.known[who] = text[:found]

    @rule(who=sessions, text=texts, steps=st.integers(1, 3))
    def compute(self, who: int, text: str, steps: int) -> None:
        """Layer by layer, in up to three steps; a refusal leaves some layers behind."""
        if len(set(self.texts[who])) != 1 or self.known[who] != self.texts[who][0]:
            return
        session = self.sessions[who]
        session.feed(ids(text), start=len(self.known[who]))
        self.known[who] += text
        step = -(-len(text) // steps)
        with contextlib.suppress(CacheResidencyError):
            for start in range(0, len(text), step):
                for layer in LAYERS:
                    self.append(who, layer, text[start : start + step])

    def append(self, who: int, layer: int, text: str) -> None:
        longer = self.texts[who][layer] + text
        self.sessions[who].append(layer, *computed(longer, len(text), layer))
        self.texts[who][layer] = longer

    @rule(who=sessions, part=st.floats(0, 1), whole=st.booleans(), order=picks)
    def truncate(self, who: int, part: float, whole: bool, order: Any) -> None:
        """All layers, in any order; or some of them, and nobody knows what follows."""
        end = int(min(map(len, self.texts[who])) * part)
        end -= end % BLOCK if whole else 0
        layers = list(LAYERS)
        order.shuffle(layers)
        for layer in layers:
            try:
                self.sessions[who].truncate(layer, end)
            except CacheResidencyError:
                return self.forget(who)  # a cut into what a window has dropped, or no room
            self.texts[who][layer] = self.texts[who][layer][:end]
            self.known[who] = self.known[who][:end]
        return None

    @rule(who=sessions, part=st.floats(0, 1), text=texts, layer=st.sampled_from(LAYERS))
    def diverge(self, who: int, part: float, text: str, layer: int) -> None:
        """One layer is cut and goes on with other tokens; then the others follow."""
        held = self.texts[who]
        if len(set(held)) != 1 or self.known[who] != held[0]:
            return
        end = int(len(held[0]) * part) // BLOCK * BLOCK
        session = self.sessions[who]
        try:
            for each in (layer, *(other for other in LAYERS if other != layer)):
                session.truncate(each, end)
                held[each] = held[each][:end]
                if each == layer:
                    self.known[who] = held[each]
                    session.feed(ids(text), start=end)
                    self.known[who] += text
                self.append(who, each, text)
        except CacheResidencyError:
            self.forget(who)

    @rule(who=sessions)
    def forget(self, who: int) -> None:
        self.sessions[who].clear()
        self.texts[who] = [""] * len(LAYERS)
        self.known[who] = ""

    @rule(who=sessions)
    def discard(self, who: int) -> None:
        for layer in LAYERS:
            self.sessions[who].discard_sliding(layer)

    @rule(who=sessions, pick=picks)
    def demote(self, who: int, pick: Any) -> None:
        session = self.sessions[who]
        if blocks := session.blocks():
            with contextlib.suppress(CacheResidencyError):
                session.demote(pick.choice(blocks))

    @rule(nbytes=st.integers(1, 4096))
    def evict(self, nbytes: int) -> None:
        self.pool.evict(nbytes)

    @rule(fails=st.booleans())
    def copies_fail(self, fails: bool) -> None:
        self.copies.fails = lambda to, id: fails

    @rule(who=sessions, layer=st.sampled_from(LAYERS))
    def read(self, who: int, layer: int) -> None:
        text = self.texts[who][layer]
        with contextlib.suppress(CacheResidencyError):
            for piece in self.sessions[who].scan(layer):
                assert piece.end <= len(text)
                keys, values = computed(text[: piece.end], piece.end - piece.start, layer)
                assert np.array_equal(piece.arrays[0], keys)
                assert np.array_equal(piece.arrays[1], values)

    @invariant()
    def every_position_agrees(self) -> None:
        for session, held in zip(self.sessions, self.texts, strict=True):
            assert [session.position(layer) for layer in LAYERS] == [len(text) for text in held]
            most = session._core.shared.options.leased_bytes_max  # type: ignore[union-attr]
            assert most is None or session.sharing_report().leased_bytes <= most

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.copies.fails = lambda to, id: False
        for who in range(len(self.sessions)):
            for layer in LAYERS:
                self.read(who, layer)
        for session in self.sessions:
            session.close()
        report = self.pool.arena_report()
        assert report.private_bytes == report.leased_bytes == 0
        assert self.pool.report().current_host_bytes == report.published_bytes
        assert not self.pool.verify().problems
        self.pool.close()


TestSharingModel = SharingModel.TestCase
TestSharingModel.settings = settings(max_examples=50, stateful_step_count=30)
