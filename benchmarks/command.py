"""How every benchmark is asked and how it ends: in one line where what it was given cannot be, without a traceback.

| exit code | |
|---|---|
| 0 | measured |
| 1 | measured, and not as expected; a server that was named does not answer; stdout takes no more |
| 2 | cannot be measured here or so: one line on stderr says why |
| 130 | Ctrl-C |
| 141 | nobody reads what it prints any more, as after `| head` |
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

__all__ = ["as_program", "at_least_one", "watched", "writable"]

# Behind what is there: a checkout that is not installed runs its benchmarks, too.
sys.path.extend(str(Path(__file__).resolve().parents[1] / part) for part in ("kernels", "radix", "."))

_Row = TypeVar("_Row")


def as_program(main: Callable[[], None]) -> None:
    """Run a benchmark as the process's own command line."""
    from agentkv.cli.entry import INTERRUPTED, leave_at_once
    from agentkv.cli.streams import mend_streams
    from agentkv.errors import AgentKVError

    name = Path(sys.argv[0]).name
    mend_streams()
    try:
        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"{name}: stopped", file=sys.stderr)
        leave_at_once(INTERRUPTED)
    except Exception as error:
        # Asked by name: a benchmark that needs no kernels must not bring torch in for an error that it cannot raise.
        kernels = sys.modules.get("agentkv_kernels")
        if isinstance(error, AgentKVError) or (kernels is not None and isinstance(error, kernels.KernelError)):
            print(f"{name}: {error}", file=sys.stderr)
            sys.exit(2)
        if isinstance(error, OSError) and error.filename is not None:
            print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
            sys.exit(2)
        raise


def watched(rows: Iterable[_Row], what: str) -> Iterator[_Row]:
    """The same rows, each as it comes; until it does a terminal's stderr shows what is measured, and how far it is.

    Drawn once a row, by nobody beside: a spinner's thread would take part in what is timed.
    """
    left, done, drawn = iter(rows), 0, sys.stderr.isatty()
    while True:
        if drawn:
            print(f"measuring {what}, {done} rows done", end="", file=sys.stderr, flush=True)
        try:
            row = next(left)
        except StopIteration:
            return
        finally:
            if drawn:
                print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        done += 1
        yield row


def at_least_one(text: str) -> int:
    """A number of rounds, threads or the like, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def writable(text: str) -> Path:
    """A file to write figures to, for argparse; opened once, for nothing is worse to hear when they are measured."""
    path = Path(text).expanduser()
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    if not was_there:
        path.unlink()
    return path
