"""Text to tokens and back: byte-level BPE as SmolLM2 was trained with.

Why         The demo serves text. A token is a piece of UTF-8, each byte written as one printable
            letter; words are cut by a pattern, then pairs are joined in the order of the merges.
Contract    `encode` never yields control tokens, whatever the text says: only `turn` and `reply`
            do. A conversation grows by appending their tokens and the generated ones as they came;
            encoding its text anew could cut words elsewhere and would miss the cached prefix.
Source      The cutting pattern is GPT-2's with each digit alone; tokens and merges come with the
            weights. tests/workloads/test_tokenizer.py holds what a reference implementation gave.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

_WORDS_MAX = 1 << 16  # remembered; a conversation uses some thousands

# Works on a text's classes, see `_class`. White space before a word leaves it its last blank.
_WORD = re.compile(
    r"[0-9]|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+", re.ASCII
)


class Tokenizer:
    """A vocabulary in the order of its ids, and merges (`"l o"`), the most frequent first."""

    def __init__(self, vocabulary: Sequence[str], merges: Iterable[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._ids = {text: number for number, text in enumerate(vocabulary)}
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._words: dict[str, list[int]] = {}

    @property
    def turn_end(self) -> int:
        """The token that ends a turn: where a reply stops."""
        return self._ids[TURN_END]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without bytes that the vocabulary lacks (some control codes)."""
        classes = "".join(map(_class, text))
        words = (text[match.start() : match.end()] for match in _WORD.finditer(classes))
        return [token for word in words for token in self._word(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; a half character at an end becomes U+FFFD."""
        letters = "".join(self._vocabulary[token] for token in tokens)
        return bytes(map(_BYTES.__getitem__, letters)).decode("utf-8", errors="replace")

    def turn(self, role: str, text: str) -> list[int]:
        """One turn of a conversation; the roles are system, user and assistant."""
        start, end = self._ids[TURN_START], self._ids[TURN_END]
        return [start, *self.encode(f"{role}\n{text}"), end, *self.encode("\n")]

    def reply(self) -> list[int]:
        """What makes the model answer: the beginning of an assistant's turn."""
        return [self._ids[TURN_START], *self.encode("assistant\n")]

    def _word(self, word: str) -> list[int]:
        if word not in self._words:
            if len(self._words) == _WORDS_MAX:
                self._words.clear()
            self._words[word] = self._merged(word)
        return self._words[word]

    def _merged(self, word: str) -> list[int]:
        parts = [LETTERS[byte] for byte in word.encode("utf-8", errors="replace")]
        never = len(self._ranks)
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, never) for pair in pairwise(parts)]
            if (best := min(ranks)) == never:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts if part in self._ids]


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the two control tokens of a conversation."""
    return Tokenizer([*LETTERS, TURN_START, TURN_END])


def _class(char: str) -> str:
    """An ASCII character that the pattern treats as it must treat `char`.

    The letter x and not another one, because it begins none of the endings like 's.
    """
    if char.isascii():
        return char
    return {"L": "x", "N": "0"}.get(unicodedata.category(char)[0], "\t" if char.isspace() else "!")


def _letters() -> tuple[str, ...]:
    """Each byte's letter: itself where it prints, else the next one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in prints else next(others)) for byte in range(256))


LETTERS = _letters()
_BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}
