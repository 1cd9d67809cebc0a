"""Programs at a pseudo-terminal, watched and typed to."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.ctrl_c import heed_ctrl_c

__all__ = ["Terminal", "terminal"]

PATIENCE = 120.0
"""Seconds after which a terminal that shows nothing new is a failure."""


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process, self._screen = process, screen
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until this is shown; what stands up to its end counts as read."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.shown, re.MULTILINE)) is None:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} was not shown: {self.shown!r}"
            try:
                self.shown += os.read(self._screen, 4096).decode(errors="replace")
            except OSError:  # Linux says so when the other side is gone
                pytest.fail(f"{pattern!r} was not shown: {self.shown!r}")
        self.shown = self.shown[found.end() :]
        return found

    def rest(self) -> str:
        """Whatever is shown until the process ends."""
        try:
            while piece := os.read(self._screen, 4096):
                self.shown += piece.decode(errors="replace")
        except OSError:
            pass
        return self.shown


@contextmanager
def terminal(*words: object, kind: str = "dumb") -> Iterator[Terminal]:
    """`agentkv` with these words. kind: what TERM says; a dumb terminal is shown no line twice."""
    screen, keyboard = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": kind, "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "agentkv", *(str(word) for word in words)],
        env=environment, stdin=keyboard, stdout=keyboard, stderr=keyboard, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    os.close(keyboard)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
