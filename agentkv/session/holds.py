"""A session while one of its calls is answered, or one of its tasks is worked on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from agentkv.chat import Message
from agentkv.errors import PendingToolCalls, RequestError
from agentkv.events import ToolResult
from agentkv.streams import CallStream
from agentkv.tool_calls import ToolCall
from agentkv.tools import run_tool_calls

from .options import CallOptions
from .turns import Answered, Conversation

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Hold", "SessionRun"]


class Hold:
    """A session while one of its calls is answered, with what the call adds to the conversation."""

    def __init__(self, session: Session, new: tuple[Message, ...]) -> None:
        self._session, self._new = session, new
        self._held = False

    def enter(self) -> Conversation:
        """The conversation to be answered; raises SessionBusy, PendingToolCalls, RequestError."""
        session = self._session
        conversation = session._enter()
        self._held = True
        try:
            conversation = conversation.then(*self._new)
            if conversation.unanswered:
                raise PendingToolCalls(session.name or "session", conversation.unanswered)
            if not conversation.messages:
                raise RequestError("there is nothing to answer: the session has no messages yet; ask(content)")
        except BaseException:
            self.leave()
            raise
        return conversation

    def leave(self) -> None:
        """Free the session, once, if it was this call that held it."""
        if self._held:
            self._held = False
            self._session._leave()


class SessionRun(Hold):
    """A session as its run sees it: held from the first turn to the last."""

    def __init__(self, session: Session, task: tuple[Message, ...], options: CallOptions) -> None:
        super().__init__(session, task)
        self._options = options

    def turn(self, conversation: Conversation, tool_choice: str | None, told: Callable[[Answered], None]) -> CallStream:
        options = self._options if tool_choice is None else replace(self._options, tool_choice=tool_choice)

        def note(answered: Answered) -> None:
            self._session._note(answered)
            told(answered)

        return CallStream(self._session._turn(lambda: conversation, options, note), None)

    def can_run(self, call: ToolCall) -> bool:
        tool = self._session._tools.get(call.name)
        return call.error is not None or tool is None or tool.call is not None

    async def answer(self, calls: tuple[ToolCall, ...], on_result: Callable[[ToolResult], None]) -> list[ToolResult]:
        session = self._session

        def told(result: ToolResult) -> None:
            if result.counts.failed:
                session._count_tool_calls(result.counts)
                session._host.served_now().tool_calls.add(result.counts)
            on_result(result)

        return await run_tool_calls(calls, session._tools, session._denied, on_result=told)

    def keep(self, conversation: Conversation) -> None:
        self._session._conversation = conversation
