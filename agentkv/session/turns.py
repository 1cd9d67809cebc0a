"""One call each: of a prompt as it is, or of a conversation."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from agentkv.calls import ChoiceEnded, TokensAdded
from agentkv.chat import Ledger, Message, MessageCall, TurnPrompt, TurnReader, in_call_order, normalise, to_openai
from agentkv.errors import RequestError
from agentkv.events import TextDelta
from agentkv.reply import Reply
from agentkv.streams import Submitted
from agentkv.streams.turn import Delta
from agentkv.tool_calls import ToolCallCounts
from agentkv.tools import Tool, check_call

from .host import Host, Question, Served
from .options import CallOptions, with_max_tokens

__all__ = ["Answered", "ChatTurn", "Conversation", "PlainTurn", "known"]

_CUT = "it was cut off at the limit of {} tokens (raise max_tokens, or write a shorter call)"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What has been said, and the ids of its beginning."""

    messages: tuple[Message, ...] = ()
    ledger: Ledger = Ledger()  # noqa: RUF009  # frozen, and shared on purpose

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
                told = f"those that do are {', '.join(map(str, waiting))}" if waiting else "none does"
                raise RequestError(f"no call {identity!r} waits for a result; {told}. Leave this message out")
            after = replace(after, messages=(*after.messages, message))
        return self.then(*messages)

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


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply and the conversation that it makes."""

    reply: Reply
    conversation: Conversation
    prompt: TurnPrompt
    """What was asked."""


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
        token_ids = self._encode_now()
        if token_ids is None:
            token_ids = await asyncio.to_thread(self._encode, served)
        options = self._options
        self._token_ids = token_ids
        if isinstance(self._asked, str):
            self._seam_tokens = served.texts.seam_of_prompt(
                self._asked, token_ids, served.scribe.encode, options.cache_salt
            )
        params = with_max_tokens(options.params, len(token_ids), options.n, served, use_cache=options.cache)
        seed = params.seed
        if seed is None:
            seed = self._host.seed_of(array("q", token_ids).tobytes(), options.name)
        return await self._host.submit(
            Question(
                token_ids, params, seed, options.n, options.cache, options.cache_salt, options.name, options.tags,
                make_mask=served.scripted(self._asked, options.template_kwargs),
            )
        )  # fmt: skip

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
    ) -> None:
        self.n = options.n
        self._host, self._enter, self._options, self._in_session = host, enter, options, in_session
        self._exact, self._seed, self._told, self._denied, self._left = exact, seed, told, dict(denied or {}), left
        self._tools: dict[str, Tool] = {tool.name: tool for tool in options.tools}
        self._before = Conversation()
        self._prompt: TurnPrompt | None = None
        self._readers: list[TurnReader] = []
        self._seam_tokens = 0
        self._served: Served | None = None

    async def begin(self) -> Submitted:
        served = self._served = await self._host.serve()
        self._before = self._enter()
        # Beside the event loop, rendering and encoding a long conversation hold nobody up.
        self._before, prompt, self._seam_tokens = await asyncio.to_thread(self._write, served, self._before)
        self._prompt, options, token_ids = prompt, self._options, prompt.token_ids
        params = with_max_tokens(
            options.params,
            len(token_ids),
            options.n,
            served,
            use_cache=options.cache,
            in_session=self._in_session,
        )
        traits = served.scribe.template.traits(options.template_kwargs)
        masks = served.scripted(to_openai(self._before.messages), options.template_kwargs)
        if masks is None and options.forced_tools:
            masks = await asyncio.to_thread(served.forced_call, options.forced_tools, options.template_kwargs)
        reads_calls = bool(self._tools) and options.tool_choice != "none"
        id_seed = xxh3_64_intdigest(array("i", token_ids).tobytes())
        self._readers = [
            TurnReader(
                reasoning=traits.reasoning,
                inside_reasoning=traits.opens_reasoning,
                call_format=traits.call_format if reads_calls else None,
                tool_names=self._tools,
                id_seed=id_seed,
                index=index,
            )
            for index in range(options.n)
        ]
        return await self._host.submit(
            Question(
                token_ids,
                params,
                params.seed if params.seed is not None else self._seed(token_ids),
                options.n,
                options.cache,
                options.cache_salt,
                options.name,
                options.tags,
                served.marker_tokens(options.template_kwargs),
                masks,
            )
        )

    def _write(self, served: Served, before: Conversation) -> tuple[Conversation, TurnPrompt, int]:
        options = self._options
        before = known(before, served, options)
        prompt = served.scribe.prompt(
            before.ledger, before.messages, tools=options.schemas, kwargs=options.template_kwargs, exact=self._exact
        )
        # Replies whose place in another conversation is not known are encoded as any other text.
        salt = options.cache_salt
        foreign = (
            m.content for m in before.messages[before.ledger.num_messages :] if m.role == "assistant" and m.content
        )
        seam = sum(served.texts.seam_of_reply(text, served.scribe.encode, salt) for text in foreign)
        return before, prompt, prompt.seam_tokens + seam

    def read(self, update: TokensAdded) -> Sequence[Delta]:
        return self._readers[update.index].feed(update.text, update.token_ids)

    def end(self, update: ChoiceEnded, *, counts: bool) -> tuple[Sequence[Delta], Reply]:
        assert self._served is not None, "a choice ended before its call began"
        assert self._prompt is not None, "a choice ended before it had a prompt"
        reply, prompt, options = update.reply, self._prompt, self._options
        cut = _CUT.format(len(reply.token_ids)) if reply.finish_reason == "length" else None
        deltas, turn = self._readers[update.index].finish(cut)
        calls = tuple(check_call(call, self._tools, self._denied) for call in turn.calls)
        reply = replace(
            reply,
            text=turn.text,
            reasoning=turn.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason,
            usage=replace(reply.usage, seam_tokens=self._seam_tokens if update.index == 0 else 0),
        )
        if counts:
            self._served.tool_calls.add(ToolCallCounts.of_calls(calls))
            after = self._before.then(*normalise([reply.message]))
            whole = reply.token_ids[: update.whole_tokens]
            ledger = self._served.scribe.after_reply(prompt, len(after.messages), whole, update.cut_text)
            after = replace(after, ledger=ledger)
            if reply.finish_reason != "cancelled" or reply.token_ids:
                self._served.produced.remember(
                    after.messages,
                    ledger,
                    tools=options.schemas,
                    kwargs=options.template_kwargs,
                    cache_salt=options.cache_salt,
                )
            if not (reply.reasoning or reply.tool_calls or update.cut_text):
                self._served.texts.remember(reply.text, whole, options.cache_salt)
            self._told(Answered(reply, after, prompt))
        return deltas, reply

    def left(self) -> None:
        self._left()
