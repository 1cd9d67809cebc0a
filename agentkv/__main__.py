"""`python -m agentkv` is `agentkv`."""

from agentkv.cli import program

program()
