"""A conversation whose messages stay here, and whose model is elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from agentkv.chat import normalise
from agentkv.errors import NotOverHTTP
from agentkv.reply import Reply
from agentkv.report import SessionReport
from agentkv.session import Answered, CallOptions, Conversation, Question, Session, SessionTurn
from agentkv.streams import Stream
from agentkv.tool_calls import ToolCallCounts
from agentkv.tools import Tool

from .asking import CHAT, chat_body, refuse_what_cannot_be_sent
from .connection import Connection
from .stream import RemoteStream

__all__ = ["ChatAsked", "RemoteHost", "RemoteSession"]


class ChatAsked:
    """One call over a conversation."""

    def __init__(
        self,
        model: Callable[[], Awaitable[str]],
        enter: Callable[[], Conversation],
        options: CallOptions,
        *,
        told: Callable[[Answered], None] = lambda answered: None,
        left: Callable[[], None] = lambda: None,
        denied: Mapping[str, str] | None = None,
    ) -> None:
        self.n = options.n
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in options.tools}
        self.denied: Mapping[str, str] = dict(denied or {})
        self._model, self._enter, self._options, self._told, self._left = model, enter, options, told, left
        self._before = Conversation()

    async def begin(self) -> tuple[str, dict[str, Any]]:
        model = await self._model()
        self._before = self._enter()
        return CHAT, chat_body(model, self._before.messages, self._options)

    def told(self, reply: Reply) -> None:
        self._told(Answered(reply, self._before.then(*normalise([reply.message])), None))

    def left(self) -> None:
        self._left()


class RemoteHost:
    """What a session needs of the runtime that it lives in, where that is a server's: of most of it, to be told no."""

    def __init__(
        self, connection: Connection, model: Callable[[], Awaitable[str]], timeout: float | None = None
    ) -> None:
        """model: the name to ask for, once it is known; timeout: of calls that have none of their own."""
        self._connection, self._model, self._timeout = connection, model, timeout

    async def serve(self) -> NoReturn:
        raise NotOverHTTP("prefill()", "ask with max_tokens=1, which leaves the conversation cached there")

    def served_now(self) -> NoReturn:
        raise NotOverHTTP(
            "what needs a session's token ids (token_ids, context_left, count_tokens)",
            "the server's POST /tokenize counts those of messages, and agentkv.Runtime has them in this process",
        )

    def seconds_per_prompt_token(self) -> None:
        """A server does not tell it."""

    def open_turn(self, turn: SessionTurn) -> Stream:
        refuse_what_cannot_be_sent(turn.options)
        asked = ChatAsked(self._model, turn.enter, turn.options, told=turn.told, left=turn.left, denied=turn.denied)
        return RemoteStream(self._connection, asked, self._timeout if turn.timeout is None else turn.timeout)

    def count_tool_calls(self, counts: ToolCallCounts) -> None:
        """The server does not hear what became of them."""

    async def submit(self, question: Question) -> NoReturn:
        raise NotOverHTTP("a prompt of token ids in a session", "ask with messages")

    def session_opened(self) -> None:
        """The server counts calls."""

    def seed_of(self, *parts: object) -> NoReturn:
        raise NotOverHTTP("a seed by the place in a session", "give seed=, or let the server choose")

    def supersede(self, token_ids: array[int], start: int, cache_salt: str | None) -> None:
        """The server is not told what was taken back; it goes as everything goes that is not asked for again."""


class RemoteSession(Session):
    """As `agentkv.Session`, over HTTP: messages, marks and tools are here, and each call sends the conversation."""

    def report(self) -> SessionReport:
        """As `Session.report`; what the server does not tell of its calls is None there, and "n/a"."""
        return replace(super().report(), tokens_only=True)
