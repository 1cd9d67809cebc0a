"""The text of a call's tokens, where the engine makes none."""

from __future__ import annotations

from typing import Any

from agentkv.calls import Call, ChoiceEnded, TokensAdded
from agentkv.detokenizer import Detokenizer

__all__ = ["Written"]


class Written:
    """Makes text of one call's tokens when they are read, on the loop that reads them.

    The engine, for which all other calls wait, has no part in it, and a call that nobody reads has no text made.
    What the tokenizer raises is the reader's error. Costs what a `Detokenizer` for each choice does.
    """

    def __init__(self, call: Call, tokenizer: Any) -> None:
        assert not call.makes_text, "text would be made twice"
        self._call, self._tokenizer = call, tokenizer
        self._choices: dict[int, Detokenizer] = {}

    def added(self, update: TokensAdded) -> TokensAdded:
        """The same tokens, with the text that is certain with them."""
        ends = self._call.end_token_ids
        delta = self._choice(update.index).append(each for each in update.token_ids if each not in ends)
        return TokensAdded(update.call_id, update.index, update.token_ids, delta.text, update.logprobs)

    def rest(self, update: ChoiceEnded) -> TokensAdded:
        """No token, and the text that was held back until nothing could follow."""
        return TokensAdded(update.call_id, update.index, (), self._choice(update.index).finish())

    def text(self, index: int) -> str:
        """All text of a choice so far."""
        return self._choice(index).text

    def _choice(self, index: int) -> Detokenizer:
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = Detokenizer(self._tokenizer, keep=self._call.kept_special_tokens)
        return known
