"""Verdicts of the probe are kept in a folder of the session's own; models for each template."""

from __future__ import annotations

from support.families import family
from support.runtimes import own_cache, own_cache_folder

__all__ = ["family", "own_cache", "own_cache_folder"]  # Fixtures are found by their names in this module.
