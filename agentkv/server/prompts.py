"""What prompts are made of in requests: token ids, messages, and the tools that go with them."""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, WithJsonSchema

from agentkv.recent import Recent
from agentkv.tools import Tool, as_tools

from .errors import ApiError

__all__ = ["INT64", "Message", "TokenIds", "ToolField", "known_tools", "tools_of"]

INT64 = 2**63 - 1
_CHOICES = ("auto", "none", "required")
TokenId = Annotated[int, Field(strict=True, ge=0, le=INT64)]
TokenIds = list[TokenId]

_TEXT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_CALL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}


def _of_role(*roles: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", "content", *required],
        "properties": {"role": {"enum": list(roles)}, "content": _TEXT, "name": {"type": "string"}, **properties},
    }


Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                _of_role("system", "developer", "user"),
                _of_role(
                    "assistant",
                    content={"anyOf": [*_TEXT["anyOf"], {"type": "null"}]},
                    reasoning_content={"type": "string"},
                    tool_calls={"type": "array", "items": _CALL},
                ),
                _of_role("tool", required=["tool_call_id"], tool_call_id={"type": "string"}),
            ]
        }
    ),
]


class _Function(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolField(BaseModel):
    """One of `tools`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: _Function


_MOST_KNOWN = 64
_LONGEST_KNOWN = 2**16
"""Bytes of one request's tools as they are digested; all that are known together are some ten times 4 MiB at most."""

_known: Recent[tuple[Tool, ...]] = Recent(_MOST_KNOWN)
"""Tools of the latest requests by digest: agents send the same ones with each request, and what was checked, copied and
sorted once need not be again. Nobody changes them, and nobody can forge the digest of another's."""


def known_tools(tools: Sequence[ToolField] | None) -> tuple[Tool, ...] | None:
    """What `tools_of` gives, where that takes microseconds: of the tools of the latest requests; else None."""
    if not tools:
        return ()
    key = _key(tools)
    return None if key is None else _known.get(key)


def tools_of(tools: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """The tools of a call; 400 for what is none, and for names that `tool_choice` has another meaning for.

    What is in them is checked once: those that are refused are checked each time.
    """
    known = known_tools(tools)
    if known is not None:
        return known
    made, key = _checked(tools or ()), _key(tools or ())
    if key is not None:
        _known.put(key, made)
    return made


def _key(tools: Sequence[ToolField]) -> bytes | None:
    """By all that a Tool is made of; None for what is too long to be kept, or nested without end."""
    functions = [tool.function for tool in tools]
    try:
        # Says 1, 1.0, True and the infinities apart, as not every writer of JSON does. Version 2 has no references.
        data = marshal.dumps([(each.name, each.description, each.parameters) for each in functions], 2)
    except ValueError:
        return None
    return blake2b(data, digest_size=16).digest() if len(data) <= _LONGEST_KNOWN else None


def _checked(tools: Sequence[ToolField]) -> tuple[Tool, ...]:
    for tool in tools:
        if tool.function.name in _CHOICES:
            raise ApiError(
                400,
                f"a tool cannot be called {tool.function.name!r}, which is a word of tool_choice; give it another name",
                param="tools",
            )
    try:
        return as_tools([_tool_dict(tool) for tool in tools])
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(400, str(error), param="tools") from error


def _tool_dict(tool: ToolField) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}
