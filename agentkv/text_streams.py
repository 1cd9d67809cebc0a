"""When the text of a token is final: one stream for each way in which tokenizers decode.

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
from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = [
    "ByteLevelStream",
    "KeepingStream",
    "SilentStream",
    "TextStream",
    "WindowStream",
    "decode_keeping",
    "open_stream",
]

_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
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


class KeepingStream:
    """Another stream, between whose tokens some special ones stand as text."""

    def __init__(self, stream: TextStream, keep: Mapping[int, str]) -> None:
        self._stream = stream
        self._keep = keep

    @property
    def trial(self) -> str:
        return self._stream.trial

    def push(self, token_id: int) -> str:
        kept = self._keep.get(token_id)
        return self._stream.push(token_id) if kept is None else self._stream.flush() + kept

    def peek(self) -> str:
        return self._stream.peek()

    def flush(self) -> str:
        return self._stream.flush()


def decode_keeping(tokenizer: Any, keep: Mapping[int, str]) -> Callable[[list[int]], str]:
    """All ids at once, the kept ones among them."""
    decode = _decode_with(tokenizer)

    def decode_keeping(token_ids: list[int]) -> str:
        if not any(token_id in keep for token_id in token_ids):
            return decode(token_ids)
        stream = open_stream(tokenizer, keep)
        return "".join(map(stream.push, token_ids)) + stream.flush()

    return decode_keeping if keep else decode


def open_stream(tokenizer: Any, keep: Mapping[int, str]) -> TextStream:
    """The stream that fits the tokenizer's decoder. O(added tokens)."""
    if keep:
        return KeepingStream(open_stream(tokenizer, {}), keep)
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
