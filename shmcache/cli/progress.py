"""The progress bar of long commands: on a terminal's standard error, elsewhere nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn


@contextmanager
def progress_bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[..., Any] | None]:
    """A bar that pulses until a total is known, then is gone.

    Yields what changes it: `change(completed=, total=, description=)`; None without a terminal, so
    that nobody works out figures that nobody sees.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    shown = (BarColumn(), TextColumn("{task.description}"), *columns)
    with Progress(*shown, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda **changes: bar.update(task, **changes)
