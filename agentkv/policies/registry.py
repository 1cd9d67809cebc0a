"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from agentkv.errors import ConfigError
from agentkv_radix import LRU, Policy

from .lfu import LFU
from .superseded import SupersededFirst

__all__ = ["known_policies", "make_policy"]

_POLICIES: dict[str, Callable[[], Policy]] = {"lfu": LFU, "lru": LRU, "superseded-first": SupersededFirst}


def known_policies() -> tuple[str, ...]:
    """Names that `policy=` takes."""
    return tuple(sorted(_POLICIES))


def make_policy(policy: str | Policy) -> Policy:
    """A policy from its name, or the given object if it has a `key` method. Raises ConfigError otherwise."""
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ConfigError(
                f"unknown policy {policy!r}; known: {', '.join(known_policies())}, or an object with key(node)"
            )
        return _POLICIES[policy]()
    if not callable(getattr(policy, "key", None)):
        raise ConfigError(f"a policy is a name or an object with key(node); got {type(policy).__name__}")
    return policy
