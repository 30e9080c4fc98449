"""Conversations about a project's documentation: a page as system prompt, questions about it.

Why         The demo needs prompts that real workers get: a few long beginnings that many share, and
            conversations that grow by what was asked and answered.
Contract    Equal options and pages give equal conversations, everywhere. The k-th page of the run
            is chosen with a chance in proportion to 1/k. Questions are about the page's headings.
            A prompt begins with the whole prompt before it and the answer as it came.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from shmcache.errors import WorkloadError
from shmcache.workloads.tokenizer import Tokenizer

DOCS: Final = Path(__file__).parents[2] / "docs"  # beside the package in a checkout

_SYSTEM: Final = "You answer questions about shmcache. This is its page {name}:\n\n{text}"
_QUESTIONS: Final = (
    'What does the page say under "{heading}"?',
    'Why does "{heading}" matter?',
    'Give an example of "{heading}".',
    'Explain "{heading}" to a newcomer, in one sentence.',
)
_HEADING: Final = re.compile(r"^#+ (?:[\d.]+ )?(.+)$", re.MULTILINE)


class Page(NamedTuple):
    """One file of the documentation."""

    name: str
    text: str

    @property
    def headings(self) -> list[str]:
        """What can be asked about; a page without headings is asked about as a whole."""
        return _HEADING.findall(self.text) or [self.name]


class Conversation(msgspec.Struct):
    """One conversation so far: the tokens up to the next answer."""

    number: int
    page: Page
    questions: list[str]  # still to be asked
    tokens: list[int]

    def ask(self, words: Tokenizer) -> None:
        """Append the next question, and what makes the model answer."""
        self.tokens += [*words.turn("user", self.questions.pop(0)), *words.reply()]

    def answered(self, words: Tokenizer, answer: Sequence[int]) -> None:
        """Append an answer and the end of its turn."""
        self.tokens += [*answer, words.turn_end, *words.encode("\n")]


def doc_pages(folder: Path) -> list[Page]:
    """The pages of a folder, by name. Errors: WorkloadError.PagesMissing."""
    paths = sorted(folder.glob("*.md"))
    if not paths:
        raise WorkloadError.PagesMissing(str(folder))
    return [Page(path.name, path.read_text(encoding="utf-8")) for path in paths]


def conversations(
    pages: Sequence[Page],
    words: Tokenizer,
    *,
    seed: int,
    count: int,
    turns: int,
    pages_max: int,
    page_tokens: int,
) -> list[Conversation]:
    """`count` conversations about at most `pages_max` pages, each cut after `page_tokens`."""
    rng = random.Random(seed)
    chosen = rng.sample(pages, min(pages_max, len(pages)))
    beginnings = [_beginning(page, words, page_tokens) for page in chosen]
    weights = [1 / rank for rank in range(1, len(chosen) + 1)]
    made = []
    for number in range(count):
        (at,) = rng.choices(range(len(chosen)), weights)
        page = chosen[at]
        questions = [
            rng.choice(_QUESTIONS).format(heading=rng.choice(page.headings)) for _ in range(turns)
        ]
        made.append(Conversation(number, page, questions, beginnings[at][:]))
    return made


def _beginning(page: Page, words: Tokenizer, tokens_max: int) -> list[int]:
    text = words.decode(words.encode(page.text)[:tokens_max])
    return words.turn("system", _SYSTEM.format(name=page.name, text=text))


def tokens_needed(chat: Conversation, words: Tokenizer, answer_tokens: int) -> int:
    """How long a conversation can become."""
    questions = sum(len(words.turn("user", text)) for text in chat.questions)
    turn = len(words.reply()) + answer_tokens + len(words.turn("", ""))
    return len(chat.tokens) + questions + len(chat.questions) * turn
