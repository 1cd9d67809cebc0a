"""Turns that this runtime produced, found again when a caller sends a conversation back as messages."""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xxhash import xxh3_128_digest

from agentkv.chat import Ledger, Message, to_openai

__all__ = ["ProducedTexts", "ProducedTurns", "key_behind", "keys_of"]

_MOST_BYTES = 16 * 2**20
"""Of all remembered ledgers together, keys and all; of the texts as much again."""

_MOST_TEXTS = 256

_BYTES_AN_ENTRY = 128
"""Of a place in an OrderedDict and its share of what is not taken yet."""


class ProducedTurns:
    """Ledgers by the conversation that they hold, tools, template options and cache_salt included: of what one
    tenant was answered no other one learns how it was cut into tokens. The oldest is forgotten first.

    Only ledgers that follow the template are kept: what comes back as messages means what the template makes of it.
    A ledger is kept as one object, of four bytes an id. Used from several threads.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """most_bytes: a ledger that alone takes more is not kept."""
        self._packed: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of memory that is taken now."""
        return self._num_bytes

    def remember(self, key: bytes, ledger: Ledger) -> None:
        """key: by `keys_of` and `key_behind`, of a conversation that ends with a reply, where the ledger ends.

        Copies the ids, at once.
        """
        if not ledger.follows_template:
            return
        packed = ledger.packed()
        with self._lock:
            self._forget(key)
            self._packed[key] = packed
            self._num_bytes += _size(key, packed)
            while self._num_bytes > self._most_bytes:
                self._forget(next(iter(self._packed)))

    def _forget(self, key: bytes) -> None:
        packed = self._packed.pop(key, None)
        if packed is not None:
            self._num_bytes -= _size(key, packed)

    def find(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> Ledger:
        """The ledger of the longest beginning that was produced here; an empty one if none was.

        O(text of the conversation).
        """
        with self._lock:
            if not self._packed:
                return Ledger()
        return self.longest(messages, keys_of(messages, tools, kwargs, cache_salt))

    def longest(self, messages: Sequence[Message], keys: Sequence[bytes]) -> Ledger:
        """As `find`, by the keys that `keys_of` gives. O(messages), and one copy of the ids."""
        with self._lock:
            replies = (
                key for message, key in zip(reversed(messages), reversed(keys), strict=False)
                if message.role == "assistant"
            )  # fmt: skip
            found = next((key for key in replies if key in self._packed), None)
            if found is None:
                return Ledger()
            self._packed.move_to_end(found)
            packed = self._packed[found]
        return Ledger.unpacked(packed)


class ProducedTexts:
    """Texts that this runtime wrote, with the ids that it wrote them in, to tell where a text is cut otherwise.

    Of each tenant (cache_salt) the latest ones. Used from several threads.
    """

    def __init__(self, most_texts: int = _MOST_TEXTS, most_bytes: int = _MOST_BYTES) -> None:
        """most_bytes: a text that alone takes more, with its ids, is not kept."""
        self._texts: OrderedDict[tuple[str | None, str], array[int]] = OrderedDict()
        self._num_bytes = 0
        self._most_texts, self._most_bytes = most_texts, most_bytes
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of memory that is taken now."""
        return self._num_bytes

    def remember(self, text: str, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """O(text), and it is kept whole."""
        if not text:
            return
        key, ids = (cache_salt, text), array("i", token_ids)
        with self._lock:
            self._forget(key)
            self._texts[key] = ids
            self._num_bytes += _size(text, ids)
            while len(self._texts) > self._most_texts or self._num_bytes > self._most_bytes:
                self._forget(next(iter(self._texts)))

    def _forget(self, key: tuple[str | None, str]) -> None:
        ids = self._texts.pop(key, None)
        if ids is not None:
            self._num_bytes -= _size(key[1], ids)

    def seam_of_reply(self, text: str, encode: Callable[[str], Sequence[int]], cache_salt: str | None) -> int:
        """How many ids of a text that was produced as it is are others than were produced; 0 for any other text."""
        with self._lock:
            produced = self._texts.get((cache_salt, text))
        if produced is None:
            return 0
        token_ids = encode(text)
        return len(token_ids) - same if (same := _first_difference(produced, token_ids)) is not None else 0

    def differs(self, text: str, token_ids: Sequence[int], cache_salt: str | None) -> bool:
        """Whether `seam_of_prompt` is above 0, for which nothing is encoded. O(text) and O(texts that are known)."""
        return _first_difference(self._longest(text, cache_salt)[1], token_ids) is not None

    def seam_of_prompt(
        self, text: str, token_ids: Sequence[int], encode: Callable[[str], Sequence[int]], cache_salt: str | None
    ) -> int:
        """The same for the longest beginning of a prompt that was produced. O(texts that are known) comparisons."""
        longest, produced = self._longest(text, cache_salt)
        same = _first_difference(produced, token_ids)
        # Where the beginning ends among the prompt's ids is not known; by itself it has about as many.
        return 0 if same is None else max(1, min(len(encode(longest)), len(token_ids)) - same)

    def _longest(self, text: str, cache_salt: str | None) -> tuple[str, Sequence[int]]:
        """The longest beginning of a text that was produced, and its ids."""
        with self._lock:
            known = (each for salt, each in self._texts if salt == cache_salt and text.startswith(each))
            longest = max(known, key=len, default="")
            return longest, self._texts.get((cache_salt, longest), ())


def _size(key: bytes | str, kept: bytes | array[int]) -> int:
    return sys.getsizeof(key) + sys.getsizeof(kept) + _BYTES_AN_ENTRY


def _first_difference(produced: Sequence[int], token_ids: Sequence[int]) -> int | None:
    pairs = zip(produced, token_ids, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def keys_of(
    messages: Iterable[Message],
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any] | None,
    cache_salt: str | None,
) -> list[bytes]:
    """The key of a conversation of no message yet, and behind each message that of the conversation up to it."""
    head = json.dumps([list(tools), sorted((kwargs or {}).items()), cache_salt], default=repr)
    keys = [xxh3_128_digest(head.encode())]
    for message in messages:
        keys.append(key_behind(keys[-1], message))
    return keys


def key_behind(key: bytes, message: Message) -> bytes:
    """The key of a conversation with one more message. O(text of the message)."""
    text = json.dumps(to_openai((message,)), sort_keys=True, default=repr)
    return xxh3_128_digest(key + text.encode("utf-8", "surrogatepass"))
