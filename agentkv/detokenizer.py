"""Text from token ids as they come: no broken character, nothing that is taken back, and stop strings.

What was handed out so far is at all times a prefix of the tokenizer's own decoding of all ids, special tokens
skipped, and after `finish` it is that decoding, or that decoding cut before the stop string. (For
transformers' tokenizers: with clean_up_tokenization_spaces=False. That clean-up drops spaces before
punctuation that were sent long ago; transformers itself ignores it for BPE.)

Three streams know when the text of a token is final:

    ByteLevelStream   byte-level BPE: a token is bytes, and text is final when its UTF-8 is complete
    WindowStream      SentencePiece and others: the decoding of the last few tokens minus that of the ones
                      before; with byte fallback a run of byte tokens is final only when it ends, because one
                      bad byte turns all characters of the run into U+FFFD
    SilentStream      no tokenizer, no text
"""

from __future__ import annotations

import codecs
import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Delta", "Detokenizer", "StopChecker", "StopMatch"]

_REPLACEMENT = "\ufffd"


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
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        if tokenizer is None and stop:
            raise ValueError("stop strings need a tokenizer, and there is none; use stop_token_ids")
        self._decode = _decode_with(tokenizer)
        self._stream = _open_stream(tokenizer)
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


class _Stream(Protocol):
    """push and flush: text that became final.  trial and peek: text that is final only if nothing follows."""

    @property
    def trial(self) -> str:
        """About the text of an unfinished run of byte tokens, or "" unless it is whole so far. O(1)."""

    def push(self, token_id: int) -> str: ...

    def peek(self) -> str:
        """What `flush` would give. O(open tokens)."""

    def flush(self) -> str: ...


class SilentStream:
    """No tokenizer: ids go in, and no text comes out."""

    trial = ""

    def push(self, token_id: int) -> str:
        return ""

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteLevelStream:
    """Byte-level BPE, as tokenizers' ByteLevel decodes it. `token_bytes`: none for a skipped token."""

    trial = ""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def peek(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Any tokenizer whose decoding of a + b begins with that of a, once a ends in whole characters.

        |------ settled ------|------ open ------|        the window: `settled` is there for its effect on
        `open` '----- decode(window)[len(decode(settled)):] is the text of the open tokens -----'

    The settled part holds at least one token, so what a decoder does to the first token only (dropping the
    space that SentencePiece put before it) happens there. `byte_of` names the byte of a byte-fallback token;
    None: it is none, or the tokenizer has no byte fallback. Where nothing is known of the decoder, a trailing
    U+FFFD may be an incomplete character and is waited for; ever longer waits are tried ever more rarely, so
    the cost stays linear.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        audible: Callable[[int], bool],
        byte_of: Callable[[int], int | None] | None,
    ) -> None:
        self._decode = decode
        self._audible = audible
        self._byte_of = byte_of
        self._window: list[int] = []
        self._num_settled = 0
        self._settled_text = ""
        self._next_try = 1
        self._run = _ByteRun()

    @property
    def trial(self) -> str:
        return self._run.text if self._run.whole else ""

    def push(self, token_id: int) -> str:
        if not self._audible(token_id):
            return ""
        self._window.append(token_id)
        byte = None if self._byte_of is None else self._byte_of(token_id)
        if byte is not None:
            self._run.append(byte)
            return ""
        num_open = len(self._window) - self._num_settled
        if num_open < self._next_try:
            return ""
        text = self.peek()
        if self._byte_of is None and text.endswith(_REPLACEMENT):
            self._next_try = num_open + max(1, num_open // 4)
            return ""
        self._settle()
        return text

    def peek(self) -> str:
        return self._decode(self._window)[len(self._settled_text) :]

    def flush(self) -> str:
        text = self.peek()
        self._settle()
        return text

    def _settle(self) -> None:
        if len(self._window) > self._num_settled:
            del self._window[: self._num_settled]
        self._num_settled = len(self._window)
        self._settled_text = self._decode(self._window)
        self._next_try = 1
        self._run = _ByteRun()


class _ByteRun:
    """Consecutive byte tokens: their text, and whether it is valid and ends in a whole character."""

    __slots__ = ("_decoder", "_valid", "text")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._valid = True
        self.text = ""

    @property
    def whole(self) -> bool:
        return self._valid and not self._decoder.getstate()[0]

    def append(self, byte: int) -> None:
        if not self._valid:
            return
        try:
            self.text += self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._valid = False


def _open_stream(tokenizer: Any) -> _Stream:
    """The stream that fits the tokenizer's decoder. O(added tokens)."""
    if tokenizer is None:
        return SilentStream()
    backend = _backend(tokenizer)
    if backend is None:
        special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        return WindowStream(_decode_with(tokenizer), lambda token_id: token_id not in special, None)
    skipped, kinds = _traits(backend)
    if kinds == ["ByteLevel"]:

        def token_bytes(token_id: int) -> bytes:
            token = backend.id_to_token(token_id)
            return b"" if token is None or token in skipped else _byte_level(token)

        return ByteLevelStream(token_bytes)

    def audible(token_id: int) -> bool:
        token = backend.id_to_token(token_id)
        return token is not None and token not in skipped

    def byte_of(token_id: int) -> int | None:
        return _fallback_byte(backend.id_to_token(token_id))

    return WindowStream(_decode_with(tokenizer), audible, byte_of if "ByteFallback" in kinds else None)


def _decode_with(tokenizer: Any) -> Callable[[list[int]], str]:
    """The tokenizer's decode without special tokens, and without clean-up where it has such a thing."""
    if tokenizer is None:
        return lambda token_ids: ""
    options = {"skip_special_tokens": True}
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        options["clean_up_tokenization_spaces"] = False
    return lambda token_ids: str(tokenizer.decode(token_ids, **options))


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that does the decoding, or None where it is another's work."""
    if hasattr(tokenizer, "get_added_tokens_decoder") and hasattr(tokenizer, "id_to_token"):
        return tokenizer
    decode = getattr(type(tokenizer), "_decode", None)
    if getattr(decode, "__module__", "") != "transformers.tokenization_utils_tokenizers":
        return None
    return tokenizer.backend_tokenizer


_known_traits: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[str], list[str]]] = weakref.WeakKeyDictionary()


def _traits(backend: Any) -> tuple[frozenset[str], list[str]]:
    """The special tokens that decoding skips, and the decoder's steps.

    O(added tokens) the first time, which is tens of milliseconds for a tokenizer with thousands of them; afterwards
    known until its vocabulary grows.
    """
    size = backend.get_vocab_size()
    known = _known_traits.get(backend)
    if known is None or known[0] != size:
        skipped = frozenset(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        known = _known_traits[backend] = (size, skipped, _decoder_kinds(backend.decoder))
    return known[1], known[2]


def _decoder_kinds(decoder: Any) -> list[str]:
    """The names of the steps: ["ByteLevel"], or ["Replace", "ByteFallback", "Fuse", "Strip"], or none."""
    if decoder is None:
        return []
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return [step["type"] for step in steps]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet, as an added one may have, stands for its own text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _fallback_byte(token: str | None) -> int | None:
    """The byte of a token like <0x0A>, by the rule that tokenizers' ByteFallback has."""
    if token is None or len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
