"""The three streams that a process is given, as they are: closed ones, full disks behind them, other encodings."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["NOBODY_READS", "mend_streams"]

NOBODY_READS = 141
"""What a shell shows for a program that SIGPIPE has ended: 128 + 13."""
_LOST = 1
_ASKED_WRONGLY = 2


def mend_streams() -> None:
    """Make the process's streams such that no print can fail. For the program's own start, once.

    A closed stdin is an empty one, and with stderr closed nobody wants to be told. Without stdout nothing can be
    answered: the process ends with 2, before work is done for nobody. Where stdout takes no more later on, it ends
    with 1 and a line on stderr, and quietly with 141 where nobody reads it any more. Letters that the encoding of
    stdout does not have become question marks.
    """
    # In this order the files take the numbers of the streams that are missing, so that none is given to a file whose
    # contents a library would then print into.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # open until the process ends
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "strict":
        # A line that is no text is told as such by whoever reads it, and is not the end of the lines behind it.
        sys.stdin.reconfigure(errors="surrogateescape")
    closed = sys.stdout is None
    if closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = _over(sys.stderr, lambda error: None)
    if closed:
        print("agentkv: stdout is closed, and there is something to print: send it to a file", file=sys.stderr)
        sys.exit(_ASKED_WRONGLY)
    sys.stdout = _over(sys.stdout, _leave)


def _over(stream: TextIO, failed: Callable[[OSError], None]) -> TextIO:
    """The same stream with another answer to what cannot be written. One that is no file stays as it is."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Watched(stream.fileno(), failed)),
        encoding=stream.encoding,
        errors="replace" if stream.errors == "strict" else stream.errors,
        # Python's own -u leaves out the buffers altogether; whole lines at once are as good.
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _Watched(io.FileIO):
    """A file in which a write that fails is told here, below every library that prints.

    Further up an error is caught, shown with a traceback, or told when the process has already ended well: what is
    printed last is written when Python ends.
    """

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._failed = failed

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._failed(error)
            return memoryview(data).nbytes


def _leave(error: OSError) -> None:
    """Not by an exception: this runs in any task, thread or layer, and nothing that is left to do would be seen."""
    if isinstance(error, BrokenPipeError):
        os._exit(NOBODY_READS)
    print(f"agentkv: what it prints cannot be written ({error.strerror})", file=sys.stderr, flush=True)
    os._exit(_LOST)
