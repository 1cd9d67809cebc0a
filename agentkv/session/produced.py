"""Turns that this runtime produced, found again when a caller sends a conversation back as messages."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xxhash import xxh3_128_digest

from agentkv.chat import Ledger, Message, to_openai, without_implicit

__all__ = ["ProducedTurns"]

_MOST_TOKENS = 4_000_000
"""Of all remembered ledgers together: 16 MB."""


class ProducedTurns:
    """Ledgers by the conversation that they hold, tools, template options and cache_salt included: of what one
    tenant was answered no other one learns how it was cut into tokens. The oldest is forgotten first.

    Only ledgers that follow the template are kept: what comes back as messages means what the template makes of it.
    Used from several threads.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._ledgers: OrderedDict[bytes, Ledger] = OrderedDict()
        self._num_tokens = 0
        self._most_tokens = most_tokens
        self._lock = threading.Lock()

    def remember(
        self,
        messages: Sequence[Message],
        ledger: Ledger,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """`messages` end with a reply, where the ledger ends. O(text of the conversation)."""
        if not ledger.follows_template:
            return
        *_, (_, key) = _keys(without_implicit(messages), tools, kwargs, cache_salt)
        with self._lock:
            former = self._ledgers.pop(key, None)
            self._num_tokens += len(ledger.token_ids) - (len(former.token_ids) if former is not None else 0)
            self._ledgers[key] = ledger
            while self._num_tokens > self._most_tokens:
                self._num_tokens -= len(self._ledgers.popitem(last=False)[1].token_ids)

    def find(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> Ledger:
        """The ledger of the longest beginning that was produced here; an empty one if none was."""
        with self._lock:
            if not self._ledgers:
                return Ledger()
        keys = [key for message, key in _keys(messages, tools, kwargs, cache_salt) if message.role == "assistant"]
        with self._lock:
            for key in reversed(keys):
                if (ledger := self._ledgers.get(key)) is not None:
                    self._ledgers.move_to_end(key)
                    return ledger
        return Ledger()


def _keys(
    messages: Iterable[Message],
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any] | None,
    cache_salt: str | None,
) -> Iterable[tuple[Message, bytes]]:
    """Each message with the key of the conversation up to it."""
    key = xxh3_128_digest(json.dumps([list(tools), sorted((kwargs or {}).items()), cache_salt], default=repr).encode())
    for message in messages:
        text = json.dumps(to_openai((message,)), sort_keys=True, default=repr)
        key = xxh3_128_digest(key + text.encode("utf-8", "surrogatepass"))
        yield message, key
