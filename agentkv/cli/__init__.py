"""The command line. Importing it brings in neither torch nor transformers; commands that need them do."""

from __future__ import annotations

from agentkv.cli.app import app, main, program

__all__ = ["app", "main", "program"]
