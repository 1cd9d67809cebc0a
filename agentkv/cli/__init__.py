"""The command line. Importing it brings in neither torch nor transformers; commands that need them do.

The commands come in with the first use of `app` or `main`, so that `program` can catch a Ctrl-C that comes meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentkv.cli.entry import program

if TYPE_CHECKING:
    from agentkv.cli.commands import app, main

__all__ = ["app", "main", "program"]


def __getattr__(name: str) -> Any:
    if name not in ("app", "main"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentkv.cli import commands

    return getattr(commands, name)
