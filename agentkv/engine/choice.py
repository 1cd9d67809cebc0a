"""One of the answers of a call while it grows."""

from __future__ import annotations

from typing import Any

from agentkv.calls import Call, TokensAdded
from agentkv.detokenizer import Detokenizer
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import FinishReason, Reply
from agentkv.sampling import SamplingState
from agentkv.usage import Usage

__all__ = ["Choice"]


class Choice:
    """Takes sampled tokens one at a time; knows when the answer has ended, and the text so far if the call wants it."""

    def __init__(self, call: Call, index: int, tokenizer: Any) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self.first_token_at: float | None = None
        mask = call.make_mask(index) if call.make_mask is not None else None
        self.sampling = SamplingState(call.params, call.prompt_token_ids, choice=index, seed=call.seed, mask=mask)
        self._call = call
        if call.makes_text:
            self._detokenizer = Detokenizer(tokenizer, call.params.stop, keep=call.kept_special_tokens)
        else:
            self._detokenizer = Detokenizer(None, call.params.stop)
        self._logprobs: list[TokenLogprobs] = []

    def take(self, token_id: int, logprobs: TokenLogprobs | None, now: float) -> TokensAdded:
        """The next token, sampled at `now`; afterwards `finish_reason` says whether the answer has ended.

        What raises ends the call: no token is told of which the tokenizer could not make text.
        """
        call, text = self._call, ""
        ends = token_id in call.end_token_ids
        if not ends:
            delta = self._detokenizer.append([token_id])
            text, ends = delta.text, delta.finished
        self.sampling.append(token_id)
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if self.first_token_at is None:
            self.first_token_at = now
        if ends:
            self.finish_reason = "stop"
        elif call.params.max_tokens is not None and len(self.token_ids) >= call.params.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._detokenizer.finish()
        return TokensAdded(call.call_id, self.index, (token_id,), text, () if logprobs is None else (logprobs,))

    def cut_short(self) -> str:
        """End the answer here, as a caller asked; returns the text that was held back."""
        rest = self._detokenizer.finish()
        self.finish_reason = "cancelled"
        return rest

    @property
    def whole_tokens(self) -> int:
        """How many of token_ids lie wholly in the text; the end token does not."""
        before_stop = self._detokenizer.tokens_before_stop
        if before_stop is not None:
            return before_stop
        ended = bool(self.token_ids) and self.token_ids[-1] in self._call.end_token_ids
        return len(self.token_ids) - ended

    @property
    def cut_text(self) -> str:
        """The text behind the whole tokens."""
        return self._detokenizer.cut_text

    def reply(self, usage: Usage, prompt_logprobs: tuple[TokenLogprobs | None, ...] | None) -> Reply:
        """The finished answer."""
        assert self.finish_reason is not None, "a reply was asked of an unfinished choice"
        return Reply(
            text=self._detokenizer.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            usage=usage,
            logprobs=tuple(self._logprobs) if self._call.params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
        )
