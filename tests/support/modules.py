"""Modules imported anew within one test."""

from __future__ import annotations

import sys

import pytest

__all__ = ["forget"]


def forget(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> None:
    """Whoever imports modules with these names now gets new ones; after the test everybody has the former ones again.

    In `sys.modules`, and as attributes of their packages, where `import a.b` leaves the new one behind.
    """
    for name, module in [each for each in sys.modules.items() if each[0].startswith(prefixes)]:
        package, _, last = name.rpartition(".")
        if getattr(sys.modules.get(package), last, None) is module:
            monkeypatch.setattr(sys.modules[package], last, module)
        monkeypatch.delitem(sys.modules, name)
