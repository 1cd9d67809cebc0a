"""Messages as OpenAI's SDKs make them, brought into one form and back.

content a string, None or a list of text parts     -> a string
arguments a JSON string or a dict                  -> a dict (a string that is no JSON object stays as it is, as does
                                                      one that holds NaN or is nested more than 100 deep)
results of one turn's calls, in any order          -> in the order of the calls
role "developer"                                   -> "system", which templates know; any other than these, "user",
                                                      "assistant" and "tool" is refused
name, and fields that we do not know               -> as they are, for the template to show or not
what SDKs add to an answer that they give back     -> left out: parsed, annotations, lists and dicts that are empty

What the model would never see is refused, and not left out: refusal, audio, images, function_call, role "function".
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentkv.errors import ContentUnsupported, RequestError

from .nesting import MAX_DEPTH, nested_too_deep

__all__ = [
    "Message",
    "MessageCall",
    "as_implicit",
    "in_call_order",
    "normalise",
    "plain_copy",
    "to_openai",
    "without_implicit",
]

_OWN_FIELDS = frozenset(
    ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "implicit", "reasoning")
)

_ROLES = ("system", "developer", "user", "assistant", "tool")

_OF_SDKS = frozenset(("annotations", "parsed"))
"""Made of an answer's content by those who read it."""

_OTHER_CONTENT = ("audio", "files", "images", "videos")


@dataclass(frozen=True, slots=True)
class MessageCall:
    """A call of a tool in an assistant's message."""

    id: str | None
    name: str
    arguments: dict[str, Any] | str

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's shape: the arguments as JSON."""
        arguments = self.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; two that say the same are equal, whatever shape they came in."""

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[MessageCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    implicit: bool = False
    """The template adds it by itself; it is shown, and not handed to the template."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that some templates know and we do not."""


def normalise(messages: Iterable[Any], *, model: str = "this model") -> tuple[Message, ...]:
    """Messages in one form. Each is a mapping, or an object with `model_dump()` as OpenAI's SDK returns it.

    Nothing of what is given is kept: changing it later changes no message. Raises RequestError for what is no message,
    ContentUnsupported for a part that is not text, by the message's index in the list and the part's type; nothing
    else, whatever is given.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(f"messages is a list of messages, got {type(messages).__name__}. Write messages=[...]")
    return in_call_order([_normalised(message, index, model) for index, message in enumerate(messages)])


def plain_copy(messages: Sequence[Any]) -> list[Any] | None:
    """A copy that `normalise` may read later and elsewhere, at a tenth of what that costs; texts are not copied.

    None where something in it is not what JSON gives, so that only its owner's code could copy it.
    """
    try:
        return [_plain_copy(message) for message in messages]
    except (TypeError, RecursionError):
        return None


def _plain_copy(value: Any) -> Any:
    kind = type(value)
    if kind is str or value is None or kind is int or kind is float or kind is bool:
        return value
    if kind is dict:
        return {key: _plain_copy(item) for key, item in value.items()}
    if kind is list:
        return [_plain_copy(item) for item in value]
    raise TypeError(f"{kind.__name__} is not what JSON gives")


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """OpenAI's shape, which `normalise` turns into equal messages again; the caller's own to change."""
    return [_to_openai(message) for message in messages]


def _to_openai(message: Message) -> dict[str, Any]:
    shape: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shape["content"] = message.content or None
        shape["tool_calls"] = [call.to_openai() for call in message.tool_calls]
    optional = {
        "reasoning_content": message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "implicit": message.implicit or None,
    }
    given = {key: value for key, value in optional.items() if value is not None}
    return shape | given | (copy.deepcopy(dict(message.extra)) if message.extra else {})


def _normalised(message: Any, index: int, model: str) -> Message:
    try:
        return _read(message, index, model)
    except RequestError:
        raise
    except Exception as error:
        # Mappings and objects of any kind are read here: what they raise is theirs.
        raise RequestError(f"message {index} cannot be read: {type(error).__name__}: {error}") from error


def _read(message: Any, index: int, model: str) -> Message:
    fields = _fields(message, index)
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"message {index} needs a role, got keys {sorted(map(str, fields))}")
    _refuse_what_is_not_shown(role, fields, index, model)
    if role not in _ROLES:
        raise RequestError(f"message {index} has role {role!r}; the roles are {', '.join(_ROLES)}")
    reasoning = fields.get("reasoning_content")
    if reasoning is None:
        reasoning = fields.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise RequestError(f"reasoning_content of message {index} must be a str, got {type(reasoning).__name__}")
    calls = _calls(fields.get("tool_calls"), index)
    if "content" not in fields and not (role == "assistant" and (calls or reasoning)):
        raise RequestError(_without_content(role, fields, index))
    return Message(
        role="system" if role == "developer" else role,
        content=_text(fields.get("content"), index, model),
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=_str_or_none(fields, "tool_call_id", f"message {index}"),
        name=_str_or_none(fields, "name", f"message {index}"),
        implicit=bool(fields.get("implicit", False)),
        extra=_extra(fields, index),
    )


def _refuse_what_is_not_shown(role: str, fields: Mapping[str, Any], index: int, model: str) -> None:
    """Fields of OpenAI's messages that say something and that no template knows: left out, they change the prompt."""
    if role == "function":
        raise RequestError(
            f'message {index} has role "function", OpenAI\'s former shape. Give it role "tool" and the tool_call_id of '
            f"the call that it answers"
        )
    if fields.get("function_call") is not None:
        raise RequestError(
            f'message {index} has a function_call, OpenAI\'s former shape. Give it tool_calls=[{{"id": ..., '
            f'"type": "function", "function": {{"name": ..., "arguments": ...}}}}]'
        )
    if fields.get("refusal"):
        raise ContentUnsupported(
            f"message {index} holds a refusal, which no template shows. Put its text into content, or leave it out"
        )
    for name in _OTHER_CONTENT:
        if fields.get(name):
            raise ContentUnsupported(f"message {index} holds {name}; {model} reads text only.")


def _without_content(role: str, fields: Mapping[str, Any], index: int) -> str:
    near = difflib.get_close_matches("content", [str(key) for key in fields if key not in _OWN_FIELDS], n=1)
    advice = f"Is it {near[0]!r}?" if near else 'Give it content, "" where there is nothing to say'
    return f"message {index} of role {role!r} has no content, got keys {sorted(map(str, fields))}. {advice}"


def _str_or_none(fields: Mapping[str, Any], name: str, where: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} of {where} must be a str, got {type(value).__name__}")
    return value


def _extra(fields: Mapping[str, Any], index: int) -> dict[str, Any]:
    extra = {key: value for key, value in fields.items() if key not in _OWN_FIELDS and value is not None}
    if fields.get("role") == "assistant":
        # The reply that comes back had none of these: they would make it another message than the one that was given.
        extra = {key: value for key, value in extra.items() if key not in _OF_SDKS and not _is_empty(value)}
    if nested_too_deep(extra):
        raise RequestError(f"fields {sorted(map(str, extra))} of message {index} are nested more than {MAX_DEPTH} deep")
    try:
        return copy.deepcopy(extra)
    except Exception as error:
        # Whatever objects stand in a field that we do not know: what they raise when they are copied is theirs.
        raise RequestError(f"fields {sorted(map(str, extra))} of message {index} cannot be copied: {error}") from error


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, dict)) and not value


def _fields(message: Any, index: int) -> Mapping[str, Any]:
    fields = _as_mapping(message)
    if fields is None:
        raise RequestError(f"message {index} must be a mapping with role and content, got {type(message).__name__}")
    return fields


def _as_mapping(obj: Any) -> Mapping[str, Any] | None:
    if isinstance(obj, Mapping):
        return obj
    dump = getattr(obj, "model_dump", None)
    fields: Mapping[str, Any] | None = dump() if callable(dump) else None
    return fields


def _text(content: Any, index: int, model: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ContentUnsupported(
            f"the content of message {index} must be text or a list of text parts, got {type(content).__name__}"
        )
    parts: list[str] = []
    for part in content:
        kind = part.get("type", "unnamed") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ContentUnsupported(f"message {index} holds {_a(str(kind))} part; {model} reads text only.")
        parts.append(part["text"])
    return "".join(parts)


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def _calls(calls: Any, index: int) -> tuple[MessageCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes, bytearray)):
        raise RequestError(f"tool_calls of message {index} must be a list of calls, got {type(calls).__name__}")
    return tuple(_call(call, index) for call in calls)


def _call(call: Any, index: int) -> MessageCall:
    fields = _as_mapping(call)
    if fields is None:
        raise RequestError(
            f"a tool call of message {index} must be a mapping with id and function, got {type(call).__name__}"
        )
    function = fields.get("function", fields)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"a tool call of message {index} has no function name")
    identity = _str_or_none(fields, "id", f"a tool call of message {index}")
    return MessageCall(identity, name, _arguments(function.get("arguments"), index))


def _arguments(arguments: Any, index: int) -> dict[str, Any] | str:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return _as_json(arguments, index)
    if not isinstance(arguments, str):
        raise RequestError(
            f"the arguments of a tool call of message {index} must be JSON or a dict, got {type(arguments).__name__}"
        )
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        # As it is, like all that is no JSON object: a model's own malformed call comes back this way.
        return arguments
    return parsed if isinstance(parsed, dict) and not nested_too_deep(parsed) else arguments


def _as_json(arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A copy that holds nothing but JSON, so that every template can write it and equal calls are equal."""
    if nested_too_deep(arguments):
        raise RequestError(f"the arguments of a tool call of message {index} are nested more than {MAX_DEPTH} deep")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the arguments of a tool call of message {index} are no JSON: {error}") from error
    return copied


def in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Results that follow one turn's calls, sorted into the calls' order; those of no known call stay behind them."""
    ordered: list[Message] = []
    order: dict[str | None, int] = {}
    run: list[Message] = []
    for message in [*messages, Message("end")]:
        if message.role == "tool":
            run.append(message)
            continue
        ordered += sorted(run, key=lambda result: order.get(result.tool_call_id, len(order)))
        run = []
        order = {call.id: place for place, call in enumerate(message.tool_calls) if call.id is not None}
        ordered.append(message)
    return tuple(ordered[:-1])


def without_implicit(messages: Sequence[Message]) -> tuple[Message, ...]:
    """What is handed to a template, which adds the implicit ones itself."""
    return tuple(message for message in messages if not message.implicit)


def as_implicit(content: str) -> Message:
    """A system text that a template adds by itself."""
    return replace(Message("system", content), implicit=True)
