"""Text from token ids as they come: no broken character, nothing that is taken back, and stop strings.

What was handed out so far is at all times a prefix of the tokenizer's own decoding of all ids, special tokens
skipped, and after `finish` it is that decoding, or that decoding cut before the stop string. (For
transformers' tokenizers: with clean_up_tokenization_spaces=False. That clean-up drops spaces before
punctuation that were sent long ago; transformers itself ignores it for BPE.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.text_streams import decode_keeping, open_stream

__all__ = ["Delta", "Detokenizer", "StopChecker", "StopMatch"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that is final now, and whether a stop string ended the text with it."""

    text: str
    finished: bool


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that was found, and where it begins, in characters of the whole text."""

    stop: str
    start: int


class Detokenizer:
    """Turns one sequence's output ids into text. Amortised O(1) decoding per token, whatever the length.

    text                what was handed out so far
    finished            a stop string was found; later tokens are ignored
    match               which one, and where, or None
    tokens_before_stop  how many tokens lie wholly before the cut, or None while there is none: the most
                        tokens whose own decoding is a beginning of the text that is left

    tokenizer: a transformers tokenizer, a `tokenizers.Tokenizer`, anything with their `decode`, or None for
    no text.
    keep: special tokens that are text all the same, with their text, such as those that mark a call.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, keep: Mapping[int, str] | None = None) -> None:
        if tokenizer is None and stop:
            raise ValueError("stop strings need a tokenizer, and there is none; use stop_token_ids")
        self._decode = decode_keeping(tokenizer, keep or {})
        self._stream = open_stream(tokenizer, keep or {})
        self._checker = StopChecker(stop)
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self.tokens_before_stop: int | None = None

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def finished(self) -> bool:
        return self._checker.match is not None

    @property
    def match(self) -> StopMatch | None:
        return self._checker.match

    @property
    def cut_text(self) -> str:
        """The end of the text behind the whole tokens, where a stop string ended it inside a token; else ""."""
        if self.tokens_before_stop is None:
            return ""
        return self.text[len(self._decode(self._token_ids[: self.tokens_before_stop])) :]

    def append(self, token_ids: Iterable[int]) -> Delta:
        """Take the next tokens; what they make final, less what might be the beginning of a stop string."""
        released = ""
        for token_id in token_ids:
            if self.finished:
                break
            self._token_ids.append(token_id)
            released += self._checker.feed(self._stream.push(token_id))
            # A stop string made of byte tokens ends the text now, not when the run of byte tokens does.
            if self._checker.ends_with_stop(self._stream.trial):
                text = self._stream.peek()
                if self._checker.found_in(text):
                    released += self._checker.feed(text)
        return Delta(self._release(released), self.finished)

    def finish(self) -> str:
        """No token will follow: all that was held back, half a character as U+FFFD."""
        if self.finished:
            return ""
        released = self._checker.feed(self._stream.flush())
        return self._release(released + self._checker.flush())

    def _release(self, text: str) -> str:
        if text:
            self._parts.append(text)
        if self.finished and self.tokens_before_stop is None:
            self.tokens_before_stop = self._count_whole_tokens()
        return text

    def _count_whole_tokens(self) -> int:
        """Runs once, when a stop string was found: one decoding for each token that reaches past the cut."""
        text = self.text
        for count in range(len(self._token_ids), 0, -1):
            if text.startswith(self._decode(self._token_ids[:count])):
                return count
        return 0


class StopChecker:
    """Passes text on and ends it before the first stop string; what might become one is held back.

    First is the one whose last character comes first, and of those the longest, so the cut depends on the
    text alone and not on how it was divided. Costs O(total length of the stop strings) for each piece of
    text.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._prefixes = sorted({s[:n] for s in stop for n in range(1, len(s))}, key=len, reverse=True)
        self._held = ""
        self._num_released = 0
        self.match: StopMatch | None = None

    def feed(self, text: str) -> str:
        """What is now known to stand before any stop string, and was not released yet."""
        if self.match is not None or not text:
            return ""
        if not self._stop:
            self._num_released += len(text)
            return text
        buffer = self._held + text
        found = self._first(buffer)
        if found is not None:
            stop, start = found
            self.match = StopMatch(stop, self._num_released + start)
            keep = start
        else:
            keep = len(buffer) - next((len(p) for p in self._prefixes if buffer.endswith(p)), 0)
        self._held = "" if found else buffer[keep:]
        self._num_released += keep
        return buffer[:keep]

    def found_in(self, text: str) -> bool:
        """Whether feeding `text` would end the text; nothing changes."""
        return bool(self._stop) and self._first(self._held + text) is not None

    def ends_with_stop(self, text: str) -> bool:
        """Whether a stop string ends with the last character of `text`, were it fed now."""
        return bool(text and self._stop) and (self._held + text[-self._longest :]).endswith(self._stop)

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        self._num_released += len(held)
        return held

    def _first(self, buffer: str) -> tuple[str, int] | None:
        found = [(start + len(s), start, s) for s in self._stop if (start := buffer.find(s)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return stop, start
