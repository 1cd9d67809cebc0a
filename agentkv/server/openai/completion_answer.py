"""Replies and events as plain completions and their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentkv.events import StreamEvent, TextDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply

from ..token_texts import TokenTexts
from .token_logprobs import completion_logprobs

__all__ = ["CompletionChunks", "Echo", "completion_choice"]


class Echo:
    """The prompt, given back in front of each answer to it."""

    def __init__(self, text: str, token_ids: Sequence[int]) -> None:
        self.text, self.token_ids = text, token_ids

    def offsets(self, texts: TokenTexts) -> list[int]:
        """Where each token stands in the text; a token that was added in front of a text stands at its beginning."""
        added = 0
        for token_id in self.token_ids:
            if self.text.startswith(texts.of(token_id)[0].rstrip("\ufffd")):
                break
            added += 1
        reader = texts.reader(0)
        return [0] * added + [reader.next(token_id) for token_id in self.token_ids[added:]]


def completion_choice(
    reply: Reply, index: int, texts: TokenTexts | None, *, echo: Echo | None, token_ids: bool
) -> dict[str, Any]:
    """One of `choices`. texts: where log-probabilities were asked for."""
    logprobs = None
    if texts is not None and reply.logprobs is not None:
        ids: list[int] = list(reply.token_ids)
        values: list[TokenLogprobs | None] = list(reply.logprobs)
        reader = texts.reader(len(echo.text) if echo is not None else 0)
        offsets = [reader.next(token_id) for token_id in ids]
        if echo is not None:
            ids, values = [*echo.token_ids, *ids], [*(reply.prompt_logprobs or ()), *values]
            offsets = [*echo.offsets(texts), *offsets]
        logprobs = completion_logprobs(values, ids, texts, offsets)
    choice: dict[str, Any] = {
        "index": index,
        "text": (echo.text if echo is not None else "") + reply.text,
        "finish_reason": reply.finish_reason,
        "logprobs": logprobs,
    }
    if token_ids:
        choice["token_ids"] = list(reply.token_ids)
    return choice


class CompletionChunks:
    """The chunks of one choice."""

    def __init__(self, index: int, texts: TokenTexts | None, *, echo: Echo | None, token_ids: bool) -> None:
        self._index, self._texts, self._echo, self._token_ids = index, texts, echo, token_ids
        self._offsets = texts.reader(len(echo.text) if echo is not None else 0) if texts is not None else None

    def first(self) -> dict[str, Any] | None:
        """The echo, where it was asked for."""
        return self._choice(self._echo.text) if self._echo is not None else None

    def of(self, event: StreamEvent, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The event's choice; None where it holds nothing that a client sees."""
        if isinstance(event, TurnEnd):
            return self._choice("", finish_reason=event.reply.finish_reason)
        if not isinstance(event, TextDelta):
            return None
        wanted = bool(event.text) or (self._texts is not None and bool(logprobs))
        if not wanted and not (self._token_ids and event.token_ids):
            return None
        choice = self._choice(event.text)
        if self._texts is not None and self._offsets is not None and logprobs:
            ids = [one.token_id for one in logprobs]
            offsets = [self._offsets.next(token_id) for token_id in ids]
            choice["logprobs"] = completion_logprobs(logprobs, ids, self._texts, offsets)
        if self._token_ids:
            choice["token_ids"] = list(event.token_ids)
        return choice

    def _choice(self, text: str, *, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": finish_reason}
