"""One call each: of a prompt as it is, or of a conversation."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from agentkv.calls import ChoiceEnded, TokensAdded
from agentkv.chat import (
    Ledger,
    Message,
    MessageCall,
    TemplateKwargs,
    Traits,
    TurnPrompt,
    TurnReader,
    in_call_order,
    normalise,
    to_openai,
)
from agentkv.errors import RequestError
from agentkv.events import TextDelta
from agentkv.reply import Reply
from agentkv.streams import Submitted
from agentkv.streams.turn import Delta
from agentkv.tool_calls import ToolCall, ToolCallCounts
from agentkv.tools import Tool, check_call

from .host import Host, Question, Served
from .options import CallOptions, refuse_too_long, with_max_tokens
from .produced import key_behind, keys_of
from .told_calls import ToldCalls

if TYPE_CHECKING:
    from agentkv.sampling import TokenMask

__all__ = ["Answered", "ChatTurn", "Conversation", "PlainTurn", "SessionTurn", "known"]

_CUT = "it was cut off at the limit of {} tokens (raise max_tokens, or write a shorter call)"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What has been said, and the ids of its beginning."""

    messages: tuple[Message, ...] = ()
    ledger: Ledger = Ledger()  # noqa: RUF009  # frozen, and shared on purpose

    @classmethod
    def given(cls, messages: Sequence[Message]) -> Conversation:
        """What was said before and elsewhere. RequestError for the result of a call that nobody made before it.

        Lenient where stored histories are untidy: results may come late, twice or not at all.
        """
        made: set[str | None] = set()
        for place, message in enumerate(messages):
            made.update(call.id for call in message.tool_calls)
            identity = message.tool_call_id
            if message.role == "tool" and identity is not None and identity not in made and None not in made:
                raise _no_such_call(identity, Conversation(tuple(messages[:place])).waiting)
        return cls(tuple(messages))

    def then(self, *messages: Message) -> Conversation:
        """With more messages behind; results of tools stand in the order of their calls, however they come."""
        if not any(message.role == "tool" for message in messages):
            return replace(self, messages=(*self.messages, *messages))
        known = self.ledger.num_messages
        # The reply whose calls are answered is the last that the ledger holds, or stands behind it.
        head, tail = self.messages[: max(0, known - 1)], self.messages[max(0, known - 1) :]
        return replace(self, messages=(*head, *in_call_order((*tail, *messages))))

    def asked(self, *messages: Message) -> Conversation:
        """As `then`; RequestError for the result of a call that waits for none, which the model would read as noise."""
        after = self
        for message in messages:
            identity = message.tool_call_id
            waiting = [call.id for call in after.waiting] if message.role == "tool" else []
            if message.role == "tool" and identity is not None and identity not in waiting and None not in waiting:
                raise _no_such_call(identity, after.waiting)
            after = replace(after, messages=(*after.messages, message))
        return self.then(*messages)

    @property
    def may_go_back(self) -> bool:
        """Whether a mark may lie behind the first message, so that going back to it makes the prompt shorter."""
        return sum(message.role != "system" for message in self.messages) > 1

    @property
    def waiting(self) -> tuple[MessageCall, ...]:
        """The calls of the last reply that have no result here."""
        answered: set[str | None] = set()
        for message in reversed(self.messages):
            if message.role == "tool":
                answered.add(message.tool_call_id)
            elif message.role == "assistant":
                return tuple(call for call in message.tool_calls if call.id not in answered)
        return ()


def _no_such_call(identity: str, waiting: Sequence[MessageCall]) -> RequestError:
    told = f"those that do are {', '.join(str(call.id) for call in waiting)}" if waiting else "none does"
    return RequestError(f"no call {identity!r} waits for a result; {told}. Leave this message out")


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply and the conversation that it makes."""

    reply: Reply
    conversation: Conversation
    prompt: TurnPrompt | None
    """What was asked; None where only whoever served it knows its ids."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One more reply to a session's conversation, as its host is asked to stream it."""

    enter: Callable[[], Conversation]
    """Holds the session and gives what is to be answered; called once, when the stream begins."""
    left: Callable[[], None]
    """Lets the session go; called once, however it ended, if `enter` was."""
    options: CallOptions
    exact: bool
    """What the model saw and wrote stays the beginning of the prompt, whatever the template makes of it."""
    seed: Callable[[], int]
    """Where the options have none: by the session's place, and nothing else."""
    told: Callable[[Answered], None]
    """Is given each answer as it ends, unless the stream was cancelled without keeping it."""
    denied: Mapping[str, str]
    timeout: float | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a turn of a conversation asks, as it is made beside the event loop."""

    before: Conversation
    prompt: TurnPrompt
    prompt_ids: array[int]
    key: bytes
    """Of the conversation, under which what is produced is kept; of no use where the ids leave the template."""
    seam_tokens: int
    traits: Traits
    marker_tokens: Mapping[int, str]
    id_seed: int
    seed: int


def known(conversation: Conversation, served: Served, options: CallOptions) -> Conversation:
    """A conversation that has no ids yet, with those of its longest beginning that this runtime produced."""
    if conversation.ledger.num_messages:
        return conversation
    ledger = served.produced.find(
        conversation.messages,
        tools=options.schemas,
        kwargs=options.template_kwargs,
        cache_salt=options.cache_salt,
    )
    return replace(conversation, ledger=ledger)


class PlainTurn:
    """A prompt that no template touches: its answer is text and nothing else."""

    def __init__(
        self,
        host: Host,
        encode: Callable[[Served], tuple[int, ...]],
        asked: object,
        options: CallOptions,
        *,
        encode_now: Callable[[], tuple[int, ...] | None] = lambda: None,
    ) -> None:
        """encode: called beside the event loop; encode_now: called on it first, None where it could not but wait."""
        self.n = options.n
        self._host, self._encode, self._encode_now, self._asked, self._options = (
            host,
            encode,
            encode_now,
            asked,
            options,
        )
        self._served: Served | None = None
        self._token_ids: tuple[int, ...] = ()
        self._seam_tokens = 0

    async def begin(self) -> Submitted:
        served = self._served = await self._host.serve()
        options, asked = self._options, self._asked
        encoded = self._encode_now()
        if encoded is None:
            token_ids, self._seam_tokens, seed = await asyncio.to_thread(self._write, served)
        else:
            token_ids, seed = encoded, self._seed(encoded)
            if isinstance(asked, str) and served.texts.differs(asked, token_ids, options.cache_salt):
                self._seam_tokens = await asyncio.to_thread(self._seam, served, token_ids)
        self._token_ids = token_ids
        params = with_max_tokens(options.params, len(token_ids), options.n, served, use_cache=options.cache)
        masks = served.scripted(lambda: self._asked, options.template_kwargs)
        if masks is None and options.answer_format is not None:
            masks = await asyncio.to_thread(served.formed_text, options.answer_format)
        return await self._host.submit(
            Question(
                token_ids, params, seed, options.n, options.cache, options.cache_salt, options.name, options.tags,
                make_mask=masks,
            )
        )  # fmt: skip

    def _write(self, served: Served) -> tuple[tuple[int, ...], int, int]:
        """The ids, how many of them are others than were produced, and the seed. Beside the event loop."""
        if isinstance(self._asked, str):
            refuse_too_long(self._options.params, served.scribe.fewest(self._asked), served)
        token_ids = self._encode(served)
        return token_ids, self._seam(served, token_ids), self._seed(token_ids)

    def _seed(self, token_ids: tuple[int, ...]) -> int:
        given = self._options.params.seed
        return given if given is not None else self._host.seed_of(array("q", token_ids).tobytes(), self._options.name)

    def _seam(self, served: Served, token_ids: tuple[int, ...]) -> int:
        if not isinstance(self._asked, str):
            return 0
        return served.texts.seam_of_prompt(self._asked, token_ids, served.scribe.encode, self._options.cache_salt)

    def read(self, update: TokensAdded) -> Sequence[Delta]:
        return (TextDelta(update.text, update.token_ids, update.index),)

    def end(self, update: ChoiceEnded, *, counts: bool) -> tuple[Sequence[Delta], Reply]:
        reply = update.reply
        if isinstance(self._asked, str) and self._served is not None:
            ids = (*self._token_ids, *reply.token_ids[: update.whole_tokens])
            self._served.texts.remember(self._asked + reply.text, ids, self._options.cache_salt)
        # As all that a prompt cost, it is counted in the first reply alone.
        seam = self._seam_tokens if update.index == 0 else 0
        return (), replace(reply, usage=replace(reply.usage, seam_tokens=seam))

    def left(self) -> None:
        """Holds nothing."""


class ChatTurn:
    """The next turn of a conversation, by the chat template.

    enter: gives the conversation; what it takes for the time of the call, `left` gives back
    read: makes the conversation of what `enter` gave, beside the event loop
    told: is given each choice's answer as it ends, unless the stream was cancelled without keeping it
    in_session: it can be rolled back; for the advice of errors

    A conversation without ids begins with those of what this runtime produced, where it is known.
    """

    def __init__(
        self,
        host: Host,
        enter: Callable[[], Conversation],
        options: CallOptions,
        *,
        exact: bool,
        in_session: bool = True,
        seed: Callable[[tuple[int, ...]], int],
        told: Callable[[Answered], None],
        denied: Mapping[str, str] | None = None,
        left: Callable[[], None] = lambda: None,
        read: Callable[[Conversation], Conversation] = lambda entered: entered,
    ) -> None:
        self.n = options.n
        self._host, self._enter, self._options, self._in_session = host, enter, options, in_session
        self._of_entered = read
        self._exact, self._seed, self._told, self._denied, self._left = exact, seed, told, dict(denied or {}), left
        self._tools: dict[str, Tool] = {tool.name: tool for tool in options.tools}
        self._asked: _Asked | None = None
        self._readers: list[TurnReader] = []
        self._told_calls: list[ToldCalls] = []
        """Of each choice, as are the readers."""
        self._served: Served | None = None

    async def begin(self) -> Submitted:
        served = self._served = await self._host.serve()
        entered = self._enter()
        # Beside the event loop, what grows with the conversation holds nobody up.
        asked = self._asked = await asyncio.to_thread(self._write, served, entered)
        options, token_ids, traits = self._options, asked.prompt.token_ids, asked.traits
        params = with_max_tokens(
            options.params,
            len(token_ids),
            options.n,
            served,
            use_cache=options.cache,
            in_session=self._in_session and asked.before.may_go_back,
        )
        masks = served.scripted(lambda: to_openai(asked.before.messages), options.template_kwargs)
        if masks is None:
            masks = await asyncio.to_thread(self._masks, served)
        reads_calls = bool(self._tools) and options.tool_choice != "none"
        formed = options.answer_format is not None and not options.forced_tools

        def reader(index: int) -> TurnReader:
            return TurnReader(
                reasoning=traits.reasoning,
                inside_reasoning=traits.opens_reasoning,
                call_format=traits.call_format if reads_calls else None,
                tool_names=self._tools,
                id_seed=asked.id_seed,
                index=index,
                is_call=self._fits if formed else None,
            )

        self._readers = [reader(index) for index in range(options.n)]
        self._told_calls = [ToldCalls(alone=not options.parallel_tool_calls) for _ in range(options.n)]
        if reads_calls and not options.parallel_tool_calls and not params.ignore_eos:
            masks = await asyncio.to_thread(served.one_call, lambda: reader(0), masks)
        return await self._host.submit(
            Question(
                token_ids,
                params,
                asked.seed,
                options.n,
                options.cache,
                options.cache_salt,
                options.name,
                options.tags,
                asked.marker_tokens,
                masks,
            )
        )

    def _masks(self, served: Served) -> Callable[[int], TokenMask] | None:
        """A forced call comes before a form: whoever forces a tool wants its call, and no other answer."""
        options = self._options
        if options.forced_tools:
            return served.forced_call(options.forced_tools, options.template_kwargs)
        if options.answer_format is not None:
            tools = options.tools if options.tool_choice != "none" else ()
            return served.formed(options.answer_format, tools, options.template_kwargs)
        return None

    def _fits(self, call: ToolCall) -> bool:
        """Whether JSON that reads as a call is one: it names a tool, with arguments that it takes."""
        return check_call(call, self._tools, {}).error is None

    def _write(self, served: Served, entered: Conversation) -> _Asked:
        options = self._options
        schemas, kwargs, salt = options.schemas, TemplateKwargs(options.template_kwargs), options.cache_salt
        before = self._of_entered(entered)
        in_session = self._in_session and before.may_go_back
        keys: list[bytes] = []
        if not before.ledger.num_messages:
            keys = keys_of(before.messages, schemas, kwargs, salt)
            before = replace(before, ledger=served.produced.longest(before.messages, keys))
        prompt = served.scribe.prompt(
            before.ledger,
            before.messages,
            tools=schemas,
            kwargs=kwargs,
            exact=self._exact,
            check=lambda at_least: refuse_too_long(options.params, at_least, served, in_session=in_session),
        )
        # Replies whose place in another conversation is not known are encoded as any other text.
        foreign = (
            m.content for m in before.messages[before.ledger.num_messages :] if m.role == "assistant" and m.content
        )
        seam = sum(served.texts.seam_of_reply(text, served.scribe.encode, salt) for text in foreign)
        if not keys and prompt.ledger.follows_template:
            keys = keys_of(before.messages, schemas, kwargs, salt)
        given, prompt_ids = options.params.seed, array("i", prompt.token_ids)
        return _Asked(
            before,
            prompt,
            prompt_ids,
            key=keys[-1] if keys else b"",
            seam_tokens=prompt.seam_tokens + seam,
            traits=served.scribe.template.traits(kwargs),
            marker_tokens=served.marker_tokens(kwargs),
            id_seed=xxh3_64_intdigest(prompt_ids.tobytes()),
            seed=given if given is not None else self._seed(prompt.token_ids),
        )

    def read(self, update: TokensAdded) -> Sequence[Delta]:
        deltas = self._readers[update.index].feed(update.text, update.token_ids)
        return self._told_calls[update.index].take(deltas)

    def end(self, update: ChoiceEnded, *, counts: bool) -> tuple[Sequence[Delta], Reply]:
        assert self._served is not None, "a choice ended before its call began"
        assert self._asked is not None, "a choice ended before it had a prompt"
        reply, asked, options = update.reply, self._asked, self._options
        cut = _CUT.format(len(reply.token_ids)) if reply.finish_reason == "length" else None
        deltas, turn = self._readers[update.index].finish(cut)
        told = self._told_calls[update.index]
        rest = told.take(deltas)
        calls = tuple(check_call(call, self._tools, self._denied) for call in told.given(turn.calls))
        reply = replace(
            reply,
            text=turn.text,
            reasoning=turn.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason,
            usage=replace(reply.usage, seam_tokens=asked.seam_tokens if update.index == 0 else 0),
        )
        if counts:
            self._served.tool_calls.add(ToolCallCounts.of_calls(calls))
            (said,) = normalise([reply.message])
            after = asked.before.then(said)
            whole = reply.token_ids[: update.whole_tokens]
            ledger = self._served.scribe.after_reply(
                asked.prompt, asked.prompt_ids, len(after.messages), whole, update.cut_text
            )
            after = replace(after, ledger=ledger)
            # A message that says less than the ids do is not what they are looked for by.
            if (reply.finish_reason != "cancelled" or reply.token_ids) and len(calls) == len(turn.calls):
                as_told = told.message(said)
                for message in (said,) if as_told == said else (said, as_told):
                    self._served.produced.remember(key_behind(asked.key, message), ledger)
            if not (reply.reasoning or reply.tool_calls or update.cut_text):
                self._served.texts.remember(reply.text, whole, options.cache_salt)
            self._told(Answered(reply, after, asked.prompt))
        return rest, reply

    def left(self) -> None:
        self._left()
