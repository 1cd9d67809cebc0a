"""How few tokens a text can have, told by its length, so that what is far too long need not be encoded to be refused.

A token stands for so many bytes of text at most, if the tokenizer takes nothing away before it cuts, and has a token
for every byte. Both can be read from its parts; where one of them is of a kind that is not known here, nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["most_bytes_per_token"]

_NFC_SHRINKS = 4
"""Composed text is at most so many times shorter: three letters of Hangul, of 9 bytes, become a syllable of 3."""

_CUT_ONLY = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
"""Pre-tokenizers that leave every byte where it is, or put more there."""


def most_bytes_per_token(tokenizer: Any) -> int | None:
    """Of text in UTF-8; None where nothing bounds it. O(vocabulary)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    shrinks, cuts = _shrinks(_state(backend.normalizer)), _state(backend.pre_tokenizer)
    if shrinks is None or not _keeps(cuts):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        # It takes in all blanks beside it, of which there may be any number.
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    longest = None
    if backend.model.byte_fallback:
        longest = _longest_by_bytes(vocabulary)
    elif _writes_bytes_as_letters(cuts):
        longest = _longest_by_letters(vocabulary)
    if longest is None:
        return None
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _longest_by_letters(vocabulary: Mapping[str, int]) -> int | None:
    """Where each byte is written as a letter of its own, as GPT-2 does."""
    from tokenizers.pre_tokenizers import ByteLevel

    whole = all(letter in vocabulary for letter in ByteLevel.alphabet())
    return max(map(len, vocabulary)) if whole else None


def _longest_by_bytes(vocabulary: Mapping[str, int]) -> int | None:
    """Where letters that no token has are written as their bytes, as SentencePiece does."""
    whole = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return max(len(token.encode()) for token in vocabulary) if whole else None


def _shrinks(normalizer: Any) -> int | None:
    """How many times shorter it makes a text at most; None where that is not known."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        together = 1
        for each in normalizer["normalizers"]:
            factor = _shrinks(each)
            if factor is None:
                return None
            together *= factor
        return together
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")
        return 1 if replaced and len(normalizer["content"].encode()) >= len(replaced.encode()) else None
    return {"Prepend": 1, "NFC": _NFC_SHRINKS}.get(kind)


def _keeps(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer.get("behavior", "Removed") != "Removed")
    return kind in _CUT_ONLY


def _writes_bytes_as_letters(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", ())
    return pre_tokenizer.get("type") == "ByteLevel" or any(map(_writes_bytes_as_letters, parts))


def _state(part: Any) -> Any:
    """As it would be pickled, which is its part of tokenizer.json; one written in Python has no kind that is known."""
    if part is None:
        return None
    try:
        return json.loads(part.__getstate__())
    except Exception:
        return {}
