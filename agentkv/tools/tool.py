"""What a model may call: a name, a description, a schema of the arguments, and the function behind them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentkv.tools.schema import canonical, copied, references
from agentkv.tools.schema_check import schema_fault

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["DEFAULT_TIMEOUT", "Tool", "as_tool", "as_tools"]

DEFAULT_TIMEOUT = 60.0
"""Seconds that a tool may take where it names no other limit."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KINDS = (
    "a function with typed parameters, a coroutine function, a bound method, a functools.partial, a Tool, "
    'or a dict {"type": "function", "function": {"name": ..., "parameters": {...}}}'
)


@dataclass(frozen=True)
class Tool:
    """One tool; `as_tool` makes it from a function.

    name         1 to 64 letters, digits, "_" or "-": what templates and models agree on
    parameters   JSON schema (draft 2020-12) of an object: the arguments by name
    call         gets the arguments by keyword, and may be a coroutine function. None: whoever reads the reply
                 answers the call
    timeout      seconds until a call is answered with an error; None: no limit

    ValueError for a bad name, a bad timeout or a schema that is none, TypeError for a value of another type.
    """

    name: str
    description: str
    parameters: dict[str, Any] = field(hash=False)
    call: Callable[..., Any] | None = None
    timeout: float | None = DEFAULT_TIMEOUT
    arguments_model: type[BaseModel] | None = field(default=None, repr=False, compare=False, kw_only=True)
    """Where the schema was made from types: what turns arguments into the values that `call` expects."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_name(self.name)
        if self.timeout is not None and not (0 < self.timeout < math.inf):
            raise ValueError(f"the timeout of tool {self.name!r} is {self.timeout}; it takes seconds above 0, or None")
        _check_parameters(self.name, self.parameters)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's shape and canonical order, as a fresh dict: equal tools give equal JSON texts."""
        parameters = {"type": "object", **self.parameters}
        if not parameters.keys() & {"properties", "additionalProperties", "$ref", "anyOf", "oneOf", "allOf"}:
            parameters["properties"] = {}
        function = {"name": self.name, "description": self.description, "parameters": canonical(parameters)}
        return {"type": "function", "function": function}


def as_tool(obj: object) -> Tool:
    """One tool from any of the forms that `tools=[…]` takes.

    TypeError for anything else, and for a parameter that no schema can describe; it names the parameter.
    """
    if isinstance(obj, Tool):
        return obj
    if isinstance(obj, dict):
        return _from_openai(obj)
    from agentkv.tools.signature import from_function, is_function  # pydantic is slow to import, schemas need it not

    if is_function(obj):
        return from_function(obj)
    raise TypeError(f"a tool is {_KINDS}; this is {_described(obj)}")


def as_tools(objs: Iterable[object]) -> tuple[Tool, ...]:
    """The tools sorted by name, so that the same ones in any order give the same prompt.

    ValueError where two have one name. Otherwise as `as_tool`.
    """
    if isinstance(objs, dict | str | Tool) or callable(objs):
        raise TypeError(f"tools is a list of tools; this is {_described(objs)}. Write tools=[...]")
    tools = sorted((as_tool(obj) for obj in objs), key=lambda tool: tool.name)
    for one, other in itertools.pairwise(tools):
        if one.name == other.name:
            raise ValueError(f"two tools are called {one.name!r}; a model could not tell them apart. Rename one")
    return tuple(tools)


def _from_openai(obj: dict[Any, Any]) -> Tool:
    function = obj.get("function")
    if obj.get("type") != "function" or not isinstance(function, dict):
        raise TypeError(f'a dict as a tool is {{"type": "function", "function": {{...}}}}; this one has {sorted(obj)}')
    unknown = sorted(function.keys() - {"name", "description", "parameters", "strict"})
    if "name" not in function or unknown:
        wrong = f"unknown keys {unknown}" if unknown else "no name"
        raise ValueError(f"a tool's function has name, description and parameters; this one has {wrong}")
    # A copy: what the caller does to his dict later changes no tool.
    parameters = copied(function.get("parameters") or {})
    return Tool(function["name"], function.get("description") or "", parameters)


def _check_types(tool: Tool) -> None:
    """TypeError where a field holds something of another type: a dataclass does not look."""
    wanted: tuple[tuple[str, Any, type | tuple[type, ...]], ...] = (
        ("name", tool.name, str),
        ("description", tool.description, str),
        ("parameters", tool.parameters, dict),
        ("timeout", tool.timeout, (int, float, type(None))),
    )
    for name, value, kind in wanted:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name}= of tool {tool.name!r} cannot be {_described(value)}")
    if tool.call is not None and not callable(tool.call):
        raise TypeError(f"call= of tool {tool.name!r} is {_described(tool.call)}, which cannot be called")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name for a tool: it takes 1 to 64 letters, digits, '_' or '-'. "
            f"Rename it, or wrap it as Tool(name=...)"
        )


def _check_parameters(name: str, parameters: dict[str, Any]) -> None:
    if fault := schema_fault(parameters):
        raise ValueError(f"parameters of tool {name!r} are no JSON schema: {fault}")
    if parameters.get("type", "object") != "object":
        raise ValueError(f"parameters of tool {name!r} describe {parameters['type']!r}; arguments are an 'object'")
    for reference in references(parameters):
        if not reference.startswith("#"):
            raise ValueError(
                f"parameters of tool {name!r} refer to {reference!r}; only references inside ('#/...') work"
            )


def _described(obj: object) -> str:
    text = repr(obj)
    return f"{text[:60] + '…' if len(text) > 60 else text} ({type(obj).__name__})"
