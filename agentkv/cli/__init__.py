"""The command line. Importing it brings in neither torch nor transformers; commands that need them do.

The commands themselves come in when the program runs, so that it can catch a Ctrl-C that comes meanwhile.
"""

from agentkv.cli.entry import program

__all__ = ["program"]
