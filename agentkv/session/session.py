"""A conversation with one model: it grows, forks, goes back, and pays only for what is new."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self, overload

from agentkv.chat import Message, as_implicit, normalise, to_openai, without_implicit
from agentkv.counters import UNNAMED
from agentkv.errors import RequestError
from agentkv.reply import Reply
from agentkv.report import Rewritten, SessionReport, report_of_usages
from agentkv.sampling_params import SamplingParams
from agentkv.streams import CallStream
from agentkv.tool_calls import ToolCallCounts
from agentkv.tools import Tool
from agentkv.usage import Usage

from .handle import SessionHandle
from .holds import Hold, SessionRun
from .host import Host
from .keywords import refuse_unknown
from .marks import Mark
from .options import CallOptions, check_tool_choice
from .run import Run, RunStream
from .state import Place, SessionState
from .turns import Answered, ChatTurn, Conversation, PlainTurn, known

__all__ = ["Content", "Mark", "Session"]

_log = logging.getLogger("agentkv")

Content = str | Sequence[Any] | Mapping[str, Any] | None
"""Text, a list of text parts, a message, a list of messages, or None: go on from what is there."""


class Session(SessionHandle):
    """Made by `Runtime.session`. Holds messages and the exact token ids of what was said, and no pages.

    One call at a time; forks answer side by side. What only edits the conversation is a plain call and costs
    microseconds. A call that raises, times out or is cancelled leaves everything as it was before it.
    """

    def __init__(
        self,
        host: Host,
        *,
        messages: tuple[Message, ...] = (),
        options: CallOptions,
        history: Literal["exact", "template"],
        path: tuple[int, ...] = (),
        parent: Session | None = None,
        state: SessionState | None = None,
    ) -> None:
        if history not in ("exact", "template"):
            raise ValueError(f'history must be "exact" or "template", got {history!r}')
        self._host = host
        self._options = options
        self._exact = history == "exact"
        self._path = path
        self._parent = parent
        self._tools = {tool.name: tool for tool in options.tools}
        place = Place(Conversation(without_implicit(messages)))
        self._state = state if state is not None else SessionState(options.name or UNNAMED, place)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """Who speaks, in reports and rate limits; forks of "planner" are "planner/1", "planner/2"."""
        return self._options.name

    @property
    def parent(self) -> Session | None:
        """The session that this one was forked from."""
        return self._parent

    @property
    def busy(self) -> bool:
        """Whether a call is being answered."""
        return self._state.busy

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the conversation, in OpenAI's shape, that JSON can store; changing it changes nothing here.

        What the template adds by itself stands there too, as "implicit".
        """
        return to_openai(self._visible())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of all of it, as the next call will send them, without the opening of the next answer.

        Known once the runtime is started.
        """
        conversation = self._state.conversation
        if not conversation.messages:
            return ()
        if len(conversation.messages) == conversation.ledger.num_messages:
            return tuple(conversation.ledger.token_ids)
        return self._prompt_ids(conversation, answer=False)

    @property
    def system(self) -> str | None:
        """The system text; to set it raises, and says what to do instead."""
        first = self._visible()[:1]
        return first[0].content if first and first[0].role == "system" else None

    @system.setter
    def system(self, text: object) -> NoReturn:
        raise AttributeError(
            "system stands at the head of the prompt, before everything that is cached: another one computes the whole "
            "conversation again. For that, open runtime.session(system=…, messages=session.messages[1:]). To add an "
            'instruction and keep what is cached, append({"role": "system", "content": …}), which costs its own tokens.'
        )

    @property
    def tools(self) -> tuple[Tool, ...]:
        """In canonical order; to set them raises, and says what to do instead."""
        return self._options.tools

    @tools.setter
    def tools(self, tools: object) -> NoReturn:
        raise AttributeError(
            "tools stand at the head of the prompt, before everything that is cached: other ones compute the whole "
            "conversation again. For that, open runtime.session(tools=…, messages=session.messages). To take one away "
            "and keep what is cached, deny(tool, reason), which costs nothing."
        )

    @property
    def usage(self) -> Usage:
        """The sum over this session's own calls; a fork begins at nothing."""
        return sum(self._state.usages, Usage())

    @property
    def context_left(self) -> int:
        """Tokens of the context that are not taken. Known once the runtime is started."""
        return self._host.served_now().context_limit - len(self.token_ids)

    def report(self) -> SessionReport:
        """What this session's calls asked, what was cached of it, why the rest was not, and which tool calls failed.

        Where the chat template renders earlier turns otherwise, it says from which message on, and what that costs.
        """
        state = self._state
        usages = state.usages
        seconds = self._host.seconds_per_prompt_token() if usages else None
        return report_of_usages(
            state.label,
            usages,
            seconds_per_prompt_token=seconds,
            tool_calls=state.tool_calls,
            rewritten=state.rewritten,
        )

    def count_tokens(self, content: Content) -> int:
        """Tokens that the next prompt would have with this content. Known once the runtime is started."""
        conversation = self._state.conversation.then(*self._messages_of(content))
        return len(self._prompt_ids(conversation, answer=True))

    # -- asking -------------------------------------------------------------------------------------------------

    async def ask(
        self, content: Content = None, *, timeout: float | None = None, tool_choice: str | None = None, **sampling: Any
    ) -> Reply:
        """The model's next reply, which becomes part of the conversation.

        Raises SessionBusy, PendingToolCalls where the last reply's calls have no results yet, ContextOverflow with the
        numbers, TimeoutError, and what `Runtime.generate` raises; the session is then as it was.
        """
        async with self.stream(content, timeout=timeout, tool_choice=tool_choice, **sampling) as stream:
            return await stream.reply()

    def stream(
        self, content: Content = None, *, timeout: float | None = None, tool_choice: str | None = None, **sampling: Any
    ) -> CallStream:
        """As `ask`, as a stream of events; it begins when it is entered or first awaited."""
        hold = Hold(self._state, self._question(content), self._tools)
        options = self._call_options(tool_choice, sampling, ())

        def keep(answered: Answered) -> None:
            self._state.keep(answered.conversation)

        return CallStream(self._turn(hold.enter, options, keep, hold.leave), timeout)

    async def run(
        self,
        task: Content = None,
        *,
        max_turns: int = 16,
        timeout: float | None = None,
        tool_choice: str | None = None,
        **sampling: Any,
    ) -> Run:
        """Answer, run the tools that were called, answer again, until a reply calls none.

        Without a task it goes on from what is there: where the last reply's calls have no results yet, as after `ask`
        or in a session of stored messages, it begins by running those. With a task they raise PendingToolCalls.

        tool_choice "required" or a name holds until its first call has been answered. A turn is a reply and its
        results; what raises or is cancelled leaves the session as after the last finished one.
        """
        stream = self.run_stream(task, max_turns=max_turns, timeout=timeout, tool_choice=tool_choice, **sampling)
        async with stream:
            return await stream.run()

    def run_stream(
        self,
        task: Content = None,
        *,
        max_turns: int = 16,
        timeout: float | None = None,
        tool_choice: str | None = None,
        **sampling: Any,
    ) -> RunStream:
        """As `run`, as a stream of events, the results of the tools among them."""
        options = self._call_options(tool_choice, sampling, ("max_turns",))
        run = SessionRun(self._state, self._question(task), options, self._turn, self._count_errors)
        forced = options.tool_choice if options.tool_choice not in ("auto", "none") else None
        return RunStream(run, max_turns=max_turns, tool_choice=forced, timeout=timeout)

    async def prefill(self) -> Usage:
        """Compute what is there, so that the next call finds it cached. The conversation stays as it is."""
        if not self._state.conversation.messages:
            raise RequestError("there is nothing to prefill: the session has no messages")
        await self._host.serve()
        conversation = self._state.enter()
        try:
            turn = PlainTurn(
                self._host,
                lambda served: self._prompt_ids(conversation, answer=False),
                None,
                replace(self._options, tools=(), tool_choice="auto", params=SamplingParams(max_tokens=1)),
            )
            async with CallStream(turn, None) as stream:
                usage = (await stream.reply()).usage
        finally:
            self._state.leave()
        self._state.count(usage)
        return usage

    # -- editing ------------------------------------------------------------------------------------------------

    def append(self, *messages: Content) -> None:
        """Add messages without asking; a str is the user's. They are computed with the next call."""
        new = [one for message in messages for one in self._messages_of(message)]
        self._state.edit(lambda conversation: conversation.asked(*new))

    def mark(self) -> Mark:
        """This place. O(1)."""
        return self._state.mark()

    def rollback(self, mark: Mark) -> None:
        """Go back to a place that was marked here, or before this session was forked; forks are untouched.

        O(1): no token is copied, and no page changes hands. The cache is told, on the engine's thread, that what was
        taken back may go first; it stays cached until room is needed.
        """
        if not isinstance(mark, Mark):
            raise TypeError(f"rollback takes what mark() gave, got {type(mark).__name__}")
        left = self._state.go_back(mark)
        kept = len(mark.conversation.ledger.token_ids)
        if len(left.ledger.token_ids) > kept:
            self._host.supersede(left.ledger.token_ids, kept, self._options.cache_salt)

    @overload
    def fork(self) -> Session: ...

    @overload
    def fork(self, n: int) -> list[Session]: ...

    def fork(self, n: int | None = None) -> Session | list[Session]:
        """Another session, or n, that go on from here, each on its own. Nothing is copied or computed.

        Of a busy session, its last finished state is forked.
        """
        if n is None:
            return self._fork()
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"fork takes how many, an int of at least 1, got {n!r}")
        if n < 1:
            raise ValueError(f"fork takes how many, an int of at least 1, got {n!r}")
        return [self._fork() for _ in range(n)]

    def _fork(self) -> Session:
        number, state = self._state.fork(self._fork_name)
        self._host.session_opened()
        return Session(
            self._host,
            options=replace(self._options, name=self._fork_name(number)),
            history="exact" if self._exact else "template",
            path=(*self._path, number),
            parent=self,
            state=state,
        )

    def _fork_name(self, number: int) -> str | None:
        return f"{self.name}/{number}" if self.name is not None else None

    def deny(self, tool: str | Tool | Callable[..., Any], reason: str) -> None:
        """Answer this tool's calls with the reason instead of running it. It stays in the prompt, which stays cached.

        O(1): no token changes.
        """
        if not isinstance(reason, str):
            raise TypeError(f"the reason is what the model reads instead of a result, a str; got {reason!r}")
        self._state.deny(self._tool_name(tool), reason)

    def allow(self, tool: str | Tool | Callable[..., Any]) -> None:
        """Run a denied tool again."""
        self._state.deny(self._tool_name(tool), None)

    async def close(self) -> None:
        """Further calls raise SessionClosed. A forgotten session costs nothing but its ids."""
        self._state.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = vars(self).get("_state")
        name = vars(self).get("_options", CallOptions()).name
        return f"<Session{'' if name is None else f' {name!r}'}: {'not made' if state is None else state.described}>"

    # -- inside -------------------------------------------------------------------------------------------------

    def _visible(self) -> tuple[Message, ...]:
        """The messages, with the system text that the template adds by itself."""
        messages = self._state.conversation.messages
        if messages and messages[0].role == "system":
            return messages
        try:
            template = self._host.served_now().scribe.template
        except RuntimeError:
            return messages
        implicit = template.traits(self._options.template_kwargs).implicit_system if template.exists else None
        return messages if implicit is None else (as_implicit(implicit), *messages)

    def _prompt_ids(self, conversation: Conversation, *, answer: bool) -> tuple[int, ...]:
        served = self._host.served_now()
        conversation = known(conversation, served, self._options)
        prompt = served.scribe.prompt(
            conversation.ledger,
            conversation.messages,
            tools=self._options.schemas,
            kwargs=self._options.template_kwargs,
            exact=self._exact,
            answer=answer,
        )
        return prompt.token_ids

    def _question(self, content: Content) -> tuple[Message, ...]:
        """What is asked; ValueError for an empty list, by which nobody means to go on from what is there."""
        if isinstance(content, Sequence) and not isinstance(content, str) and not content:
            raise ValueError(
                "the content is an empty list: give a text or messages, or None to go on from what is there"
            )
        return self._messages_of(content)

    def _messages_of(self, content: Content) -> tuple[Message, ...]:
        if content is None:
            return ()
        if isinstance(content, str):
            return (Message("user", content),)
        if isinstance(content, Mapping) or not isinstance(content, Sequence):
            return self._normalised([content])
        parts = [isinstance(item, Mapping) and "role" not in item and "type" in item for item in content]
        if parts and all(parts):
            return self._normalised([{"role": "user", "content": content}])
        return self._normalised(content)

    def _normalised(self, messages: Sequence[Any]) -> tuple[Message, ...]:
        try:
            model = self._host.served_now().name
        except RuntimeError:
            model = "this model"
        return without_implicit(normalise(messages, model=model))

    def _call_options(self, tool_choice: str | None, sampling: dict[str, Any], own: tuple[str, ...]) -> CallOptions:
        refuse_unknown(sampling, (*own, "timeout", "tool_choice"))
        options = self._options
        if tool_choice is not None:
            check_tool_choice(tool_choice, options.tools)
            options = replace(options, tool_choice=tool_choice)
        return replace(options, params=SamplingParams.from_kwargs(options.params, **sampling)) if sampling else options

    def _turn(
        self,
        enter: Callable[[], Conversation],
        options: CallOptions,
        told: Callable[[Answered], None],
        left: Callable[[], None] = lambda: None,
    ) -> ChatTurn:
        def note(answered: Answered) -> None:
            self._note(answered)
            told(answered)

        return ChatTurn(
            self._host,
            enter,
            options,
            exact=self._exact,
            seed=lambda token_ids: self._host.seed_of(self._root_name(), self._path, self._state.place.turns),
            told=note,
            denied=self._state.denied,
            left=left,
        )

    def _note(self, answered: Answered) -> None:
        self._state.count(answered.reply.usage, ToolCallCounts.of_calls(answered.reply.tool_calls))
        prompt = answered.prompt
        tokens = prompt.surplus_tokens if self._exact else prompt.rewritten_tokens
        if prompt.change is None or tokens <= 0:
            return
        # A system text that the template adds by itself stands in `messages`, and in no conversation.
        place = prompt.change.message + len(self._visible()) - len(self._state.conversation.messages)
        rewritten = Rewritten(place, prompt.change.dropped, tokens, kept=self._exact)
        self._state.count_rewritten(rewritten)
        if self._exact and self._state.first_warning():
            _log.warning(
                "session %r keeps %d tokens that the chat template would have dropped from earlier turns, from message "
                "%d on, of which it renders the %s no more, so that what is cached stays the beginning of the prompt; "
                'history="template" follows the template instead',
                self._state.label,
                tokens,
                place,
                "same form" if rewritten.dropped == "form" else rewritten.dropped,
            )

    def _count_errors(self, counts: ToolCallCounts) -> None:
        self._state.count(tool_calls=counts)
        self._host.served_now().tool_calls.add(counts)

    def _root_name(self) -> str | None:
        root = self
        while root._parent is not None:
            root = root._parent
        return root.name

    def _tool_name(self, tool: str | Tool | Callable[..., Any]) -> str:
        name = tool if isinstance(tool, str) else getattr(tool, "name", None) or getattr(tool, "__name__", None)
        if name not in self._tools:
            raise ValueError(f"no tool {name!r} here; the tools are {', '.join(self._tools) or 'none'}")
        return str(name)
