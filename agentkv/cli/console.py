"""Where commands print: results on stdout, what is going on right now on stderr and only for a person."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from agentkv.cli.entry import leave_at_once
from agentkv.cli.streams import NOBODY_READS
from agentkv.errors import ConfigError

__all__ = ["console", "examples", "named_as_options", "progress_line"]

_WIDTH_OF_A_PIPE = 200
"""Columns of a table that goes to a file or pipe, where nothing is gained by folding."""


class _Console(Console):
    """Ends the program quietly when nobody reads what it prints any more, as after `| head`.

    rich raises SystemExit, which is no end where a task prints: asyncio shows it with a traceback, and raises it again.
    """

    def on_broken_pipe(self) -> None:
        leave_at_once(NOBODY_READS)


def examples(*commands: str) -> str:
    """The end of a command's help: command lines to copy, each a paragraph of its own, which is what help keeps."""
    return "\n\n".join(("Examples:" if len(commands) > 1 else "Example:", *commands))


def console() -> Console:
    """Stdout: as wide as the terminal, or wide enough for any table where it is a file or a pipe."""
    return _Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)


@contextmanager
def progress_line(on: Console | None = None) -> Iterator[Callable[[str], None]]:
    """One line with a spinner that says what is being done; gone at the end, and never drawn into a file or pipe.

    Drawn on stderr, or on the console that the same command prints on meanwhile, which then keeps the two apart.
    """
    where = on if on is not None else Console(stderr=True)
    if not where.is_terminal:
        yield lambda text: None
        return
    with where.status("") as status:
        yield lambda text: status.update(text)


@contextmanager
def named_as_options(*names: str) -> Iterator[None]:
    """What a runtime says of a setting is said of the option that brought it: --memory must be ..."""
    try:
        yield
    except ConfigError as error:
        for name in names:
            if str(error).startswith(name):
                raise ConfigError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from error
        raise
