"""Host side of the KV cache: a radix tree of hashed token prefixes, and the account of pages. Pure Python.

The tree says which pages hold which prefix and which may go; the pool says who owns a page. Neither knows tensors,
requests or sessions. Start reading at `RadixTree`.
"""

from .errors import HoldError, InvariantError, PageStateError, PoolExhausted, RadixError, StaleMatch
from .events import Event, EventKind, Listener, heard_kinds
from .hashing import HashPage, chain_hash, root_hash, xxh3_128
from .node import Extended, Inserted, Match, Node, Partial, TailAdded
from .policy import LRU, Policy
from .pool import PagePool
from .tokens import TokenIds, common_tokens, pack
from .tree import RadixTree

__all__ = [
    "LRU",
    "Event",
    "EventKind",
    "Extended",
    "HashPage",
    "HoldError",
    "Inserted",
    "InvariantError",
    "Listener",
    "Match",
    "Node",
    "PagePool",
    "PageStateError",
    "Partial",
    "Policy",
    "PoolExhausted",
    "RadixError",
    "RadixTree",
    "StaleMatch",
    "TailAdded",
    "TokenIds",
    "chain_hash",
    "common_tokens",
    "heard_kinds",
    "pack",
    "root_hash",
    "xxh3_128",
]
