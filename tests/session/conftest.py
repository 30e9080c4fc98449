"""Copies and files that a test holds up or makes fail."""

from __future__ import annotations

import pytest

from tests.session.rig import Copies, Files


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


@pytest.fixture
def copies() -> Copies:
    return Copies()
