"""A model's chat template, and what can be learnt of it by rendering.

Templates differ in what they can say: some know no tools and drop them silently, some want a call's arguments as JSON
and others as a dict, some add a system text of their own, some leave out the reasoning of earlier turns. None of that
is declared anywhere, so each trait is found by rendering a small conversation with words that can be found again.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from agentkv.errors import ConfigError, RequestError
from agentkv.recent import Recent
from agentkv.tool_calls import CallFormat

from .call_formats import CALL_FORMATS, closing_marker, format_of, markers, render_calls
from .messages import Message, MessageCall, without_implicit
from .reasoning import ReasoningMarkers, reasoning_markers, starts_inside

__all__ = ["ChatTemplate", "TemplateKwargs", "Traits"]

_log = logging.getLogger("agentkv")

_MOST_KWARGS = 64
"""Sets of kwargs whose traits are kept. Over HTTP any client sends what it likes, so something has to end them."""

_WORD, _OTHER = "Xqzvbword", "Xqzvbother"
_TOOL = "xqzvb_tool"
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Says a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_USER, _ASSISTANT = Message("user", "hello"), Message("assistant", _WORD)
_SYSTEM, _SAYS = {"role": "system", "content": _OTHER}, {"role": "user", "content": _WORD}
_PROBE_CALL = MessageCall("xqzvbcall", _TOOL, {"word": _OTHER})

_WAYS: tuple[tuple[Literal["dict", "json"], str | None], ...] = (
    ("dict", ""),
    ("dict", None),
    ("json", ""),
    ("json", None),
)
"""To write an assistant's call, the arguments and the content beside it; the first that a template shows is taken."""

_TOOLS_TEXT = """# Tools

You can call these tools:
{tools}

To call a tool, answer with its name and arguments as JSON, in this form and with nothing around it:
{form}

What it returns comes back to you between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can say, and how."""

    knows_tools: bool
    """It shows the tools that it is given; else they are described in the system text."""
    calls: Literal["dict", "json"] | None
    """It shows an assistant's calls, whose arguments it takes in this form; None: it does not."""
    empty_content: str | None
    """What the content of a message that only calls must be for the call to be shown."""
    calls_beside_text: bool
    """It shows the text and the calls of one message; else they go into two messages."""
    shows_results: bool
    """It shows messages of role "tool"; else they become the user's."""
    implicit_system: str | None
    """The system text that it adds where a conversation has none."""
    opening: str
    """What it puts before an assistant's answer."""
    end_of_turn: str
    """What it puts behind the text of an assistant's turn."""
    call_format: CallFormat
    reasoning: ReasoningMarkers | None
    raw_arguments: bool = True
    """It shows arguments that are a text and no JSON, as a malformed call has them; else they are left out."""
    knows_system: bool = True
    """It shows a system text; else that stands at the head of the user's first message."""

    @property
    def marks(self) -> frozenset[str]:
        """The texts that begin or end a call or the reasoning."""
        opening = markers(self.call_format)
        closing = (closing_marker(marker, self.call_format) for marker in opening)
        thoughts = () if self.reasoning is None else (self.reasoning.opening, self.reasoning.closing)
        return frozenset(mark.strip() for mark in (*opening, *closing, *thoughts) if mark.strip())

    @property
    def opens_reasoning(self) -> bool:
        """An answer begins inside the model's reasoning."""
        return starts_inside(self.opening, self.reasoning)


class TemplateKwargs(dict[str, Any]):
    """The kwargs of one call, which are looked up with every rendering: their digest is made once.

    Nothing in them changes meanwhile.
    """

    @functools.cached_property
    def digest(self) -> bytes:
        """Equal for equal kwargs in any order. No two that differ share it, on purpose neither."""
        if not self:
            return b""
        return blake2b(repr(sorted(self.items())).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ChatTemplate:
    """Renders conversations by one tokenizer's template, or by another given instead. Called from any thread."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._traits: Recent[Traits] = Recent(_MOST_KWARGS)
        self._learning = threading.Lock()
        """Around the renderings, so that many first calls at once learn once; what is known is had without it."""

    @property
    def exists(self) -> bool:
        """Whether there is a template at all."""
        return self._chat_template is not None or getattr(self._tokenizer, "chat_template", None) is not None

    def names(self, option: str) -> bool:
        """Whether the template has a word for this option, which else changes nothing of what it renders."""
        return re.search(rf"\b{re.escape(option)}\b", self._source()) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer: bool,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; `answer`: with the opening of the assistant's next turn.

        tools: in OpenAI's shape, in canonical order. Raises ConfigError where there is no template, RequestError with
        the template's own words where it refuses the conversation.
        """
        if self._tokenizer is None:
            raise ConfigError("this model has no tokenizer: pass token ids, or give Runtime a tokenizer=")
        if not self.exists:
            raise ConfigError("this model has no chat template: pass a str, or give Runtime a chat_template=")
        traits = self.traits(kwargs)
        shown: Sequence[Message] = without_implicit(messages)
        if tools and not (traits.knows_tools and traits.calls):
            shown, tools = _in_words(shown, tools, traits), ()
        if not traits.knows_system:
            shown = _system_as_user(shown)
        return self._apply(_as_known(shown, traits), tools, answer, kwargs)

    def traits(self, kwargs: Mapping[str, Any] | None = None) -> Traits:
        """What the template can say. What is known costs O(kwargs) and waits for nobody.

        The first time costs about ten small renderings for each set of kwargs, and waits while another one is learnt:
        beside the event loop, in a thread. The latest 64 sets are known.
        """
        key = (kwargs if isinstance(kwargs, TemplateKwargs) else TemplateKwargs(kwargs or {})).digest
        traits = self._traits.get(key)
        if traits is not None:
            return traits
        with self._learning:
            traits = self._traits.get(key)
            if traits is None:
                traits = self._learn(kwargs)
                self._traits.put(key, traits)
            return traits

    def after_turn(
        self,
        new: Sequence[Message],
        *,
        calls: Sequence[MessageCall] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        answer: bool,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """What follows the text of an assistant's turn when `new` messages come next, whatever came before.

        Found behind a fixed small conversation: for templates that render a turn differently once others follow.
        """
        before = (_USER, replace(_ASSISTANT, tool_calls=tuple(calls)))
        with_new = self.render((*before, *new), tools=tools, answer=answer, kwargs=kwargs).partition(_WORD)[2]
        if not calls:
            return with_new
        # Behind the text come the calls themselves, which the ledger holds as the model wrote them.
        without = self.render(before, tools=tools, answer=False, kwargs=kwargs).partition(_WORD)[2]
        end = self.traits(kwargs).end_of_turn
        if with_new.startswith(without):
            return end + with_new[len(without) :]
        return end + with_new.partition(end)[2]

    # -- learning -----------------------------------------------------------------------------------------------

    def _learn(self, kwargs: Mapping[str, Any] | None) -> Traits:
        def render(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
            try:
                return self._render(messages, tools, answer=False, kwargs=kwargs)
            except Exception as error:
                # A template is a program: whatever it raises here means that it cannot say this.
                _log.debug("the chat template refuses a conversation that it was tried with: %s", error)
                return ""

        user, assistant = {"role": "user", "content": "hello"}, {"role": "assistant", "content": _WORD}
        calls: Literal["dict", "json"] | None = None
        empty: str | None = ""
        call_text = ""
        for form, content in _WAYS:
            call = _call_of(_PROBE_CALL, form)
            call_text = render([user, {"role": "assistant", "content": content, "tool_calls": [call]}])
            if _TOOL in call_text and _OTHER in call_text:
                calls, empty = form, content
                break
        else:
            call_text = ""
        beside = result = raw = ""
        if calls is not None:
            call = _call_of(_PROBE_CALL, calls)
            beside = render([user, {**assistant, "tool_calls": [call]}])
            asking = {"role": "assistant", "content": empty, "tool_calls": [call]}
            answer = {"role": "tool", "content": _WORD, "tool_call_id": _PROBE_CALL.id, "name": _TOOL}
            result = render([user, asking, answer])
            malformed = _call_of(replace(_PROBE_CALL, arguments=f"{{{_OTHER}"), calls)
            raw = render([user, {"role": "assistant", "content": empty, "tool_calls": [malformed]}])
        source = self._source()
        return Traits(
            knows_tools=_TOOL in render([user], [_PROBE_TOOL]),
            calls=calls,
            empty_content=empty,
            calls_beside_text=_WORD in beside and _TOOL in beside,
            shows_results=_WORD in result,
            implicit_system=_implicit_system(render),
            opening=self._opening(user, kwargs),
            end_of_turn=render([user, assistant]).partition(_WORD)[2],
            call_format=format_of(call_text, _TOOL) if call_text else CALL_FORMATS[0],
            reasoning=reasoning_markers(source, self._added_tokens()),
            raw_arguments=_OTHER in raw,
            # One that shows no user either, or refuses all that is tried, tells nothing.
            knows_system=_WORD not in render([_SAYS]) or _OTHER in render([_SYSTEM, _SAYS]),
        )

    def _opening(self, user: dict[str, Any], kwargs: Mapping[str, Any] | None) -> str:
        try:
            without, with_it = (self._render([user], (), answer=answer, kwargs=kwargs) for answer in (False, True))
        except Exception as error:
            _log.info("what the chat template puts before an answer cannot be learnt: %s", error)
            return ""
        return with_it.removeprefix(without) if with_it.startswith(without) else ""

    def _source(self) -> str:
        template = self._chat_template or getattr(self._tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else json.dumps(template)

    def _added_tokens(self) -> frozenset[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        return frozenset(str(token) for token in added.values())

    def _apply(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        answer: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> str:
        try:
            return self._render(messages, tools, answer=answer, kwargs=kwargs)
        except Exception as error:
            # Templates raise whatever Jinja and Python do with a conversation that they were not written for.
            raise RequestError(f"the chat template refuses this conversation: {error}") from error

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        answer: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=answer,
            chat_template=self._chat_template,
            **(kwargs or {}),
        )
        return text


def _implicit_system(render: Any) -> str | None:
    """The text between the markers of a system turn where a conversation brings none."""
    without = render([_SAYS])
    with_one = render([_SYSTEM, _SAYS])
    opening, found, rest = with_one.partition(_OTHER)
    closing = rest.partition(_WORD)[0]
    head = without.partition(_WORD)[0]
    if not found or not head.startswith(opening) or not head.endswith(closing):
        return None
    text: str = head[len(opening) : len(head) - len(closing)]
    return text or None if len(head) > len(opening) + len(closing) else None


def _call_of(call: MessageCall, form: str) -> dict[str, Any]:
    arguments: Any = call.arguments
    if form == "json" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _as_known(messages: Sequence[Message], traits: Traits) -> list[dict[str, Any]]:
    """Messages in the shape that the template reads."""
    shaped: list[dict[str, Any]] = []
    for message in _lowered(messages, traits, calls=traits.calls is None, results=not traits.shows_results):
        if message.tool_calls:
            shape = _shape(message)
            calls = [
                replace(call, arguments={}) if isinstance(call.arguments, str) and not traits.raw_arguments else call
                for call in message.tool_calls
            ]
            shape["tool_calls"] = [_call_of(call, traits.calls or "dict") for call in calls]
            if not message.content:
                shape["content"] = traits.empty_content
            elif not traits.calls_beside_text:
                shaped.append(_shape(replace(message, tool_calls=())))
                shape["content"] = traits.empty_content
            shaped.append(shape)
        else:
            shaped.append(_shape(message))
    return shaped


def _shape(message: Message) -> dict[str, Any]:
    shape: dict[str, Any] = {"role": message.role, "content": message.content, **message.extra}
    if message.reasoning is not None:
        shape["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        shape["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shape["name"] = message.name
    return shape


def _in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], traits: Traits) -> list[Message]:
    """Tools described in the system text, calls and results as text, for a template that has no place for them."""
    if messages and messages[0].role == "system":
        system, rest = messages[0].content, messages[1:]
    else:
        system, rest = traits.implicit_system or "", messages
    text = "\n\n".join(part for part in (system, _tools_text(tools, traits)) if part)
    return [Message("system", text), *_lowered(rest, traits, calls=True, results=True)]


def _system_as_user(messages: Sequence[Message]) -> list[Message]:
    """The system texts that a conversation begins with as the head of the user's first message."""
    system = list(itertools.takewhile(lambda message: message.role == "system", messages))
    rest = list(messages[len(system) :])
    texts = [message.content for message in system if message.content]
    if not texts:
        return rest if rest else list(messages)
    if rest and rest[0].role == "user":
        first = rest.pop(0)
        return [replace(first, content="\n\n".join(part for part in (*texts, first.content) if part)), *rest]
    return [Message("user", "\n\n".join(texts)), *rest]


def _lowered(messages: Sequence[Message], traits: Traits, *, calls: bool, results: bool) -> list[Message]:
    """The same with calls, or results, as text.

    Results that follow each other, and what the user says behind them, are one turn of the user's: many templates
    want turns of user and assistant by turns.
    """
    lowered: list[Message] = []
    behind_results = False
    for message in messages:
        is_result = results and message.role == "tool"
        if is_result:
            message = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        elif calls and message.tool_calls:
            message = _calls_in_words(message, traits)
        if behind_results and message.role == "user":
            message = replace(message, content=f"{lowered.pop().content}\n{message.content}")
        lowered.append(message)
        behind_results = is_result
    return lowered


def _tools_text(tools: Sequence[Mapping[str, Any]], traits: Traits) -> str:
    form = traits.call_format
    shown = f'{form.before}{{"name": <name>, "{form.arguments_key}": <arguments>}}{form.after}'
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return _TOOLS_TEXT.format(tools=lines, form=shown)


def _calls_in_words(message: Message, traits: Traits) -> Message:
    form, calls = traits.call_format, message.tool_calls
    well_formed = [(call.name, call.arguments) for call in calls if not isinstance(call.arguments, str)]
    if len(well_formed) == len(calls):
        written = render_calls(well_formed, form)
    else:
        written = "\n".join(_one_in_words(call, form) for call in calls)
    return replace(message, content=f"{message.content}\n{written}" if message.content else written, tool_calls=())


def _one_in_words(call: MessageCall, form: CallFormat) -> str:
    if not isinstance(call.arguments, str):
        return render_calls([(call.name, call.arguments)], form)
    if call.name in call.arguments:  # All that the model wrote, and not the arguments alone.
        return f"{form.before}{call.arguments}{form.after}"
    head = f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{form.arguments_key}": '
    return f"{form.before}{head}{call.arguments}}}{form.after}"
