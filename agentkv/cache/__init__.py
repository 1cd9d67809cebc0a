"""The prefix cache: which prompt tokens are resident, where, and who holds them. Needs no torch."""

from agentkv_radix import Event, Listener, pack

from .ghosts import Ghosts, Remembered
from .lease import Lease, PageCopy
from .prefix_cache import CacheCounters, PrefixCache

__all__ = [
    "CacheCounters",
    "Event",
    "Ghosts",
    "Lease",
    "Listener",
    "PageCopy",
    "PrefixCache",
    "Remembered",
    "pack",
]
