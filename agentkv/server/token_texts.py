"""What tokens look like, one by one, beside their log-probabilities."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable

__all__ = ["OffsetReader", "TokenTexts"]

_KEPT = 2**14
"""Tokens whose texts are known; most of an answer's tokens, and of their alternatives, are among them."""


class TokenTexts:
    """The bytes of a token, and the text that stands for it."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = functools.lru_cache(_KEPT)(token_bytes)
        self.of = functools.lru_cache(_KEPT)(self._read)
        """The text, with what is no whole character replaced, and the bytes, which nobody changes."""

    def _read(self, token_id: int) -> tuple[str, list[int]]:
        data = self._bytes(token_id)
        return data.decode("utf-8", errors="replace"), list(data)

    def reader(self, offset: int) -> OffsetReader:
        """For tokens whose text begins at `offset` characters."""
        return OffsetReader(self._bytes, offset)


class OffsetReader:
    """Where each token's text stands in the text of all of them, in characters.

    A token that holds but a part of a character stands where that character does.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], offset: int) -> None:
        self._bytes, self._offset = token_bytes, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, token_id: int) -> int:
        """Of this token, which follows those given before."""
        begins = self._offset
        self._offset += len(self._decoder.decode(self._bytes(token_id)))
        return begins
