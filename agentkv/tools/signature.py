"""From a function's types and docstring to a tool: pydantic makes the schema, docstring_parser the descriptions."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import typing
from collections.abc import Callable
from typing import Any, TypeGuard

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, create_model
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, SchemaError, core_schema

from agentkv.tools.enum_literals import by_values
from agentkv.tools.schema import inlined, without_titles
from agentkv.tools.tool import Tool
from agentkv.tools.typed_dicts import readable

__all__ = ["from_function", "is_function"]

_USE = (
    "Use str, int, float, bool, list, dict, Literal, Enum, Optional, a TypedDict, a dataclass or a pydantic model, "
    "or wrap the function as Tool(name, description, parameters, call=...)"
)


class _Schemas(GenerateJsonSchema):
    """Defaults that JSON cannot hold are left out, since the function has them; other doubts are errors."""

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        if kind != "non-serializable-default":
            raise PydanticInvalidForJsonSchema(detail)

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        """A class cannot come out of JSON, so every call would fail; pydantic's own schema allows anything."""
        return self.handle_invalid_for_json_schema(schema, "core_schema.IsSubclassSchema")

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        """pydantic shows it as any text, of which most is no number."""
        return self.handle_invalid_for_json_schema(schema, "complex; take two floats")

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        """A member of an Enum that is left here would be shown by its value and refused when it comes."""
        if any(isinstance(each, enum.Enum) for each in schema["expected"]):
            raise PydanticInvalidForJsonSchema("a Literal of members of an Enum; name their values, or the Enum itself")
        return super().literal_schema(schema)

    def encode_default(self, dft: Any) -> Any:
        """ValueError for NaN, infinities and half characters, which no prompt takes: they are left out."""
        default = super().encode_default(dft)
        try:
            json.dumps(default, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise PydanticSerializationError(str(error)) from error
        return default


def is_function(obj: object) -> TypeGuard[Callable[..., Any]]:
    """Whether it is a function, a bound method, or a partial of one; a class is none."""
    while isinstance(obj, functools.partial):
        obj = obj.func
    return inspect.isroutine(obj)


def from_function(function: Callable[..., Any]) -> Tool:
    """A tool that calls this function. What a partial has bound is no longer the model's to give.

    TypeError for a parameter without annotation, of a type that JSON cannot hold, positional-only, or variadic.
    """
    inner, bound = _unwrapped(function)
    name = getattr(inner, "__name__", "")
    documented = docstring_parser.parse(inspect.getdoc(inner) or "")
    texts = {p.arg_name.lstrip("*"): _joined(p.description) for p in documented.params if p.description}
    hints = _hints(name, inner)
    fields: dict[str, Any] = {}
    for parameter in _signature(name, function).parameters.values():
        if parameter.name not in bound:
            annotation = _annotation(name, parameter, hints)
            # Fields are numbered and the real name is an alias: no name a parameter can have clashes with pydantic's.
            fields[f"p{len(fields)}"] = (annotation, _field(parameter, annotation, texts.get(parameter.name)))
    model = create_model(f"arguments of {name}", __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(name, _joined(documented.description or ""), _parameters(model), call=function, arguments_model=model)


def _unwrapped(function: Callable[..., Any]) -> tuple[Callable[..., Any], set[str]]:
    """The function inside of partials, and the names of the keyword arguments that they have bound."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound |= function.keywords.keys()
        function = function.func
    return function, bound


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise TypeError(f"tool {name!r} shows no signature ({error}). Wrap it in a function with types") from None


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations, those written as text resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise TypeError(
            f"an annotation of tool {name!r} cannot be resolved: {error}. Define its types at a module's top level"
        ) from None


def _annotation(name: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> Any:
    """The parameter's type, tried out alone so that an error can name it."""
    where = f"parameter {parameter.name!r} of tool {name!r}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        instead = "a list" if stars == "*" else "a dict, or each argument by its name"
        raise TypeError(f"{where} is {stars}{parameter.name}, which no schema can describe. Take {instead} instead")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise TypeError(f"{where} is positional-only; arguments are given by name. Remove the '/' behind it")
    if parameter.name not in hints:
        raise TypeError(f"{where} has no annotation, so a model cannot be told what to give. {_USE}")
    annotation = by_values(readable(hints[parameter.name]))
    if parameter.default is None:
        annotation = typing.Optional[annotation]  # noqa: UP045 (a string or a special form knows no "|")
    try:
        TypeAdapter(annotation).json_schema(schema_generator=_Schemas)
    except (PydanticUserError, PydanticInvalidForJsonSchema, SchemaError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise TypeError(f"{where} has a type that JSON cannot hold: {annotation!r} ({reason}). {_USE}") from None
    return annotation


def _field(parameter: inspect.Parameter, annotation: Any, description: str | None) -> Any:
    has_own = any(getattr(extra, "description", None) for extra in getattr(annotation, "__metadata__", ()))
    described: dict[str, Any] = {} if has_own or description is None else {"description": description}
    default = ... if parameter.default is parameter.empty else parameter.default
    return Field(default=default, alias=parameter.name, **described)


def _parameters(model: type[BaseModel]) -> dict[str, Any]:
    """The model's schema without what says nothing: titles, single-use definitions, and that no more may be given."""
    schema = without_titles(inlined(model.model_json_schema(schema_generator=_Schemas)))
    del schema["additionalProperties"]
    assert isinstance(schema, dict)
    return schema


def _joined(text: str) -> str:
    """Lines of a paragraph as one line: how a docstring is wrapped is no matter of the model."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())
