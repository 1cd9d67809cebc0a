"""The names of `agentkv`, imported when the first of them is used.

Importing them takes a fifth of a second. The program must be running before that, or a Ctrl-C meanwhile would end in a
traceback of imports; and whoever wants one module of the package need not wait for the others.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["find", "listed"]

_HOMES = (
    "clients", "errors", "events", "logprobs", "reply", "report", "runtime", "sampling_params", "session", "streams",
    "tool_calls", "tools", "usage",
)  # fmt: skip
"""Modules whose own `__all__` has a public name; `agentkv` names them for type checkers, too."""


def find(name: str) -> Any:
    """`__getattr__` of the package (PEP 562), for a name that it does not have yet.

    All come at once, so that what is there does not depend on what was used before: `agentkv.errors`, too, is there
    without an import of its own.
    """
    names = vars(sys.modules["agentkv"])
    # Tools ask modules for names of their own, such as __wrapped__, and must not load anything by that.
    if not name.startswith("_"):
        for home in _HOMES:
            module = importlib.import_module(f"agentkv.{home}")
            names.update({each: getattr(module, each) for each in module.__all__ if each in names["__all__"]})
    if name not in names:
        raise AttributeError(f"module 'agentkv' has no attribute {name!r}")
    return names[name]


def listed() -> list[str]:
    """`__dir__` of the package: also what it does not have yet."""
    names = vars(sys.modules["agentkv"])
    return sorted({*names, *names["__all__"]})
