"""A session while one of its calls is answered, or one of its tasks is worked on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from agentkv.chat import Message, MessageCall
from agentkv.chat.call_reader import malformed_call
from agentkv.errors import PendingToolCalls, RequestError
from agentkv.events import ToolResult
from agentkv.streams import CallStream
from agentkv.tool_calls import ToolCall, ToolCallCounts
from agentkv.tools import Tool, check_call, run_tool_calls

from .options import CallOptions
from .state import SessionState
from .turns import Answered, ChatTurn, Conversation

__all__ = ["Hold", "MakeTurn", "SessionRun"]


class MakeTurn(Protocol):
    """Makes the next turn of a session's conversation."""

    def __call__(
        self, enter: Callable[[], Conversation], options: CallOptions, told: Callable[[Answered], None]
    ) -> ChatTurn: ...


class Hold:
    """A session's state while one call holds it, with what the call adds to the conversation."""

    def __init__(self, state: SessionState, new: tuple[Message, ...], tools: Mapping[str, Tool]) -> None:
        """tools: by name."""
        self._state, self._new, self._tools = state, new, tools
        self._held = False

    def enter(self) -> Conversation:
        """The conversation to be answered; raises SessionBusy, PendingToolCalls, RequestError."""
        conversation = self._state.enter()
        self._held = True
        try:
            conversation = conversation.asked(*self._new)
            if conversation.waiting:
                self._bear(conversation.waiting)
            if not conversation.messages:
                raise RequestError("there is nothing to answer: the session has no messages yet; ask(content)")
        except BaseException:
            self.leave()
            raise
        return conversation

    def leave(self) -> None:
        """Let the state go, once, if it was this call that held it."""
        if self._held:
            self._held = False
            self._state.leave()

    def can_run(self, call: ToolCall) -> bool:
        """There is something to run, or something to say instead."""
        tool = self._tools.get(call.name)
        return call.error is not None or tool is None or tool.call is not None

    def _bear(self, waiting: Sequence[MessageCall]) -> None:
        """Begin although calls wait for results; here PendingToolCalls, for the model would read none."""
        raise PendingToolCalls(self._state.label, [call.name for call in waiting], not_by_run=self._not_by_run(waiting))

    def _not_by_run(self, waiting: Sequence[MessageCall]) -> str:
        if any(call.id is None for call in waiting):
            return "calls without an id"
        silent = dict.fromkeys(call.name for call in self._read(waiting) if not self.can_run(call))
        return f"{', '.join(silent)} (no function was given)" if silent else ""

    def _read(self, waiting: Sequence[MessageCall]) -> tuple[ToolCall, ...]:
        return tuple(check_call(_tool_call(call), self._tools, self._state.denied) for call in waiting)


class SessionRun(Hold):
    """A session's state as its run sees it: held from the first turn to the last."""

    def __init__(
        self,
        state: SessionState,
        task: tuple[Message, ...],
        options: CallOptions,
        make_turn: MakeTurn,
        count: Callable[[ToolCallCounts], None],
    ) -> None:
        """make_turn: its answers are noted by whoever made it; count: hears of results that are errors."""
        super().__init__(state, task, {tool.name: tool for tool in options.tools})
        self._options, self._make_turn, self._count = options, make_turn, count

    def waiting(self, conversation: Conversation) -> tuple[ToolCall, ...]:
        """Calls that were made before this task and have no results yet."""
        return self._read(conversation.waiting)

    def turn(self, conversation: Conversation, tool_choice: str | None, told: Callable[[Answered], None]) -> CallStream:
        options = self._options if tool_choice is None else replace(self._options, tool_choice=tool_choice)
        return CallStream(self._make_turn(lambda: conversation, options, told), None)

    async def answer(self, calls: tuple[ToolCall, ...], on_result: Callable[[ToolResult], None]) -> list[ToolResult]:
        def told(result: ToolResult) -> None:
            if result.counts.failed:
                self._count(result.counts)
            on_result(result)

        return await run_tool_calls(calls, self._tools, self._state.denied, on_result=told)

    def keep(self, conversation: Conversation) -> None:
        self._state.keep(conversation)

    def keep_results(self, conversation: Conversation) -> None:
        self._state.keep_results(conversation)

    def _bear(self, waiting: Sequence[MessageCall]) -> None:
        """A run that is given no task begins with the calls, if it can answer all of them."""
        if self._new or self._not_by_run(waiting):
            super()._bear(waiting)


def _tool_call(call: MessageCall) -> ToolCall:
    """As the reply had it that made it, as far as its message tells."""
    if isinstance(call.arguments, str):
        return malformed_call(call.id or "", call.name, call.arguments, "the arguments are no JSON object", "arguments")
    return ToolCall(call.id or "", call.name, call.arguments)
