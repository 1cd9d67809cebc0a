"""What the user types: edited and remembered at a terminal, line by line from a pipe.

By the standard library's readline. A full-screen editor would be one dependency more, and what is wanted is there:
the arrow keys, the history, its search, and the user's own ~/.inputrc.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from platformdirs import user_state_path

__all__ = ["Lines", "history_file"]

_REMEMBERED = 1_000


def history_file() -> Path:
    """`chat_history` in the platform's folder for what programs remember."""
    return user_state_path("agentkv", appauthor=False) / "chat_history"


class Lines:
    """Lines of stdin that are not blank. commands: words that Tab completes at the beginning of a line."""

    def __init__(self, commands: Sequence[str] = ()) -> None:
        self._commands = commands
        self.from_terminal = sys.stdin.isatty()
        self._readline: Any = None

    def __enter__(self) -> Self:
        if self.from_terminal:
            try:
                import readline  # from here on input() edits lines
            except ImportError:  # a Python built without it reads plain lines
                return self
            self._readline = readline
            readline.set_history_length(_REMEMBERED)
            readline.set_completer(self.completed)
            readline.set_completer_delims(" \t\n")  # and not the slash that a command begins with
            # macOS has libedit behind the name readline, which is told in its own words.
            editline = "libedit" in (readline.__doc__ or "")
            readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")
            # There may be none yet, or one that is not ours to read: the session then begins without a history.
            with suppress(OSError, RuntimeError):
                readline.read_history_file(history_file())
        return self

    def __exit__(self, *exception: object) -> None:
        if self._readline is None:
            return
        self._readline.set_completer(None)
        try:
            file = history_file()
            file.parent.mkdir(parents=True, exist_ok=True)
            # What was said to a model is nobody else's to read.
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(file)
        except (OSError, RuntimeError) as error:  # The latter where no home is known.
            print(f"agentkv: the history is not kept: {error}", file=sys.stderr)

    def completed(self, word: str, state: int) -> str | None:
        """What Tab makes of a line's first word, as readline asks: the state-th of all, and None behind them."""
        if self._readline is not None and self._readline.get_begidx() > 0:
            return None
        fitting = [command for command in self._commands if word and command.startswith(word)]
        return fitting[state] + " " if state < len(fitting) else None

    def read(self, where: Callable[[], str]) -> Iterator[str]:
        """Until the end of the input. where: what stands before the prompt sign; nothing does in a pipe."""
        while True:
            try:
                line = input(f"{where()}> ") if self.from_terminal else sys.stdin.readline()
            except EOFError:
                print()
                return
            if not line and not self.from_terminal:
                return
            if line.strip():
                yield line.strip()
