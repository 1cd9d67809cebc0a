"""How long work is shown: to a callback that is given, else on a terminal, else not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["ProgressCallback", "shown_progress"]

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with (what is being done, bytes done, bytes in all or None where that is not known).

It is called often and from the thread that does the work. An error that it raises ends the work, and nothing
half-made stays behind: this is how a long fetch is cancelled.
"""


@contextmanager
def shown_progress(
    callback: ProgressCallback | None, still_wanted: Callable[[], None] = lambda: None
) -> Iterator[ProgressCallback]:
    """The given callback, or a bar on stderr where that is a terminal, or a callback that does nothing.

    `still_wanted` is asked before each call of it, and raises when the work is to end.
    """
    with _display(callback) as show:

        def checked(what: str, done: int, total: int | None) -> None:
            still_wanted()
            show(what, done, total)

        yield checked


@contextmanager
def _display(callback: ProgressCallback | None) -> Iterator[ProgressCallback]:
    if callback is not None:
        yield callback
    elif sys.stderr is not None and sys.stderr.isatty():
        with _terminal_bar() as bar:
            yield bar
    else:
        yield lambda what, done, total: None


@contextmanager
def _terminal_bar() -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    # Transient: the bar leaves the terminal as it found it.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        current = ""

        def show(what: str, done: int, total: int | None) -> None:
            nonlocal current
            if what != current:
                progress.reset(task, total=total, description=what)
                current = what
            progress.update(task, completed=done, total=total)

        yield show
