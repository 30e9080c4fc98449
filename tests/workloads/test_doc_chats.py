"""Conversations about the documentation: the same from the same seed, each grows from its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmcache.errors import WorkloadError
from shmcache.workloads.doc_chats import (
    DOCS,
    Conversation,
    Page,
    conversations,
    doc_pages,
    tokens_needed,
)
from shmcache.workloads.tokenizer import byte_tokenizer

WORDS = byte_tokenizer()
PAGES = doc_pages(DOCS)


def talks(**changed: Any) -> list[Conversation]:
    options: dict[str, Any] = {
        "seed": 1,
        "count": 30,
        "turns": 2,
        "pages_max": 3,
        "page_tokens": 500,
    }
    return conversations(PAGES, WORDS, **{**options, **changed})


def test_this_project_is_what_is_talked_about() -> None:
    assert "architecture.md" in [page.name for page in PAGES]
    assert all(page.text and page.headings for page in PAGES)


def test_equal_seeds_make_equal_conversations() -> None:
    assert talks() == talks()
    assert talks() != talks(seed=2)


def test_many_share_few_beginnings() -> None:
    """The first page of the run is the most popular."""
    made = talks(count=300)
    counts = sorted(
        [made[-1].tokens, *(talk.tokens for talk in made)].count(page.tokens)
        for page in {talk.page: talk for talk in made}.values()
    )
    assert len(counts) == 3
    assert counts[-1] > 1.5 * counts[0]
    assert all(len(talk.tokens) < 700 for talk in made)


def test_questions_are_about_headings() -> None:
    for talk in talks():
        assert len(talk.questions) == 2
        for question in talk.questions:
            assert any(f'"{heading}"' in question for heading in talk.page.headings)


def test_a_prompt_begins_with_the_prompt_before_it_and_its_answer() -> None:
    talk = talks(count=1)[0]
    needed = tokens_needed(talk, WORDS, 5)
    system = list(talk.tokens)
    talk.ask(WORDS)
    first = list(talk.tokens)
    assert first[: len(system)] == system
    talk.answered(WORDS, [1, 2, 3, 4, 5])
    talk.ask(WORDS)
    assert talk.tokens[: len(first) + 5] == [*first, 1, 2, 3, 4, 5]
    assert talk.questions == []
    assert len(talk.tokens) <= needed - 5
    text = WORDS.decode(talk.tokens)
    assert [text.count(part) for part in ("<|im_start|>", "<|im_end|>")] == [5, 4]


def test_a_page_without_headings_is_asked_about_by_its_name() -> None:
    assert Page("notes.md", "Just text.").headings == ["notes.md"]


def test_pages_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError.PagesMissing) as caught:
        doc_pages(tmp_path)
    assert caught.value.folder == str(tmp_path)
    assert caught.value.hint
