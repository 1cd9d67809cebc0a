"""What prompts are made of in requests: token ids, messages, and the tools that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, WithJsonSchema

from agentkv.tools import Tool, as_tools

from .errors import ApiError

__all__ = ["INT64", "Message", "TokenIds", "ToolField", "tools_of"]

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


def tools_of(tools: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """The tools of a call; 400 for what is none, and for names that `tool_choice` has another meaning for."""
    for tool in tools or ():
        if tool.function.name in _CHOICES:
            raise ApiError(
                400,
                f"a tool cannot be called {tool.function.name!r}, which is a word of tool_choice; give it another name",
                param="tools",
            )
    try:
        return as_tools([_tool_dict(tool) for tool in tools or ()])
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(400, str(error), param="tools") from error


def _tool_dict(tool: ToolField) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}
