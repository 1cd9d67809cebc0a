"""A tokenizer as grammars see it: the bytes of each token, and the tokens that stand for themselves."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from agentkv.errors import ConfigError
from agentkv.tools.scalar_grammar import literal

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Vocabulary", "matcher_fault", "vocabulary_of"]

_MOST_COMPILED = 64
_MOST_ITEMS = 8000
"""What may come next at one place, several for each property that may: 2,000 properties take 40 ms a token."""

_END = "\ue000end of the grammar\ue000"


class Vocabulary:
    """Made once for each tokenizer, in about a quarter of a second for 49,000 tokens. Safe in several threads."""

    def __init__(self, tokenizer_json: str) -> None:
        """Takes what `tokenizers.Tokenizer.to_str()` gives."""
        from llguidance import LLTokenizer

        described = json.loads(tokenizer_json)
        described.update(padding=None, truncation=None)
        added = described["added_tokens"]
        for token in added:
            # llguidance lets no text contain a special token. That holds for every added one here: a marker of the
            # template must not come up within an argument, and where a grammar wants it, it wants that one id.
            token["special"] = True
        self._markers = {token["content"]: int(token["id"]) for token in added}
        self.num_ids = 1 + max([*_ids(described["model"]), *self._markers.values()])
        # The end of a grammar is ours to allow, so llguidance gets an end token that no model has.
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": self.num_ids, "content": _END, "special": True, **plain})
        try:
            self._tokenizer = LLTokenizer(
                json.dumps(described), eos_token=self.num_ids, slices=LLTokenizer.json_slices()
            )
        except ValueError as error:
            raise ConfigError(
                f"this tokenizer cannot be used with grammars: {error}. Call without tool_choice"
            ) from None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; b"" for an id that is no token."""
        return bytes(self._tokenizer.decode_bytes([token_id])) if 0 <= token_id < self.num_ids else b""

    def as_lark(self, text: str) -> list[str]:
        """The text as literals, with each added token in it as that token."""
        if not text:
            return []
        markers = sorted(self._markers, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return [f"<[{self._markers[part]}]>" if part in self._markers else literal(part) for part in parts if part]

    def compiled(self, grammar: str, of: str) -> LLMatcher:
        """The grammar at its start, to be copied and never fed. ConfigError, which names `of`, where it is none."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if grammar not in self._compiled:
                limits = LLParserLimits(max_items_in_row=_MOST_ITEMS)
                matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
                tried = matcher.deep_copy()
                if not tried.is_error():
                    tried.compute_bitmask()  # Which finds limits that compiling does not.
                if tried.is_error():
                    raise ConfigError(f"{of} cannot be forced by a grammar: {matcher_fault(tried)}")
                self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return self._compiled[grammar]


def matcher_fault(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, in one line."""
    return re.sub(r"\s+", " ", matcher.get_error().strip().partition("\n")[0])


_vocabularies: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The tokenizer's vocabulary, kept as long as the tokenizer. ConfigError where it is no fast one."""
    with _making:
        made = _vocabularies.get(tokenizer)
        if made is None:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise ConfigError(
                    f"grammars need a fast tokenizer of transformers (with backend_tokenizer); this is a "
                    f"{type(tokenizer).__name__}. Load it with use_fast=True, or call without tool_choice"
                )
            made = _vocabularies[tokenizer] = Vocabulary(backend.to_str())
        return made


def _ids(model: dict[str, Any]) -> list[int]:
    """The ids of a tokenizer's own model; Unigram lists its pieces in the order of their ids."""
    vocab = model["vocab"]
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
