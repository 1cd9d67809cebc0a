"""Verdicts of the probe are kept in a folder of the session's own."""

from __future__ import annotations

from support.runtimes import own_cache, own_cache_folder

__all__ = ["own_cache", "own_cache_folder"]  # Fixtures are found by their names in this module.
