"""Eviction policies by name. A policy sees the fields of a node and nothing else."""

from agentkv_radix import LRU, Node, Policy

from .lfu import LFU
from .registry import known_policies, make_policy
from .superseded import SupersededFirst

__all__ = ["LFU", "LRU", "Node", "Policy", "SupersededFirst", "known_policies", "make_policy"]
