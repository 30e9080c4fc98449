"""What a person at a terminal sees of a command."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess

from tests.support import PATIENCE_S, ROOT


def seen_on_a_terminal(command: list[str], columns: int = 120) -> tuple[str, str]:
    """Run with standard error a terminal: what went to standard output, and what was shown."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
    ) as running:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        os.close(ours)
        assert running.stdout is not None
        said = running.stdout.read()
        assert running.wait(PATIENCE_S) == 0
    return said.decode(), shown.decode()
