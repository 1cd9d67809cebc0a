"""Arguments as the model wrote them against what the tool takes, with errors that a small model can act on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkv.tool_calls import ToolFailure
from agentkv.tools.tool import Tool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jsonschema import ValidationError as SchemaViolation
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

__all__ = ["Validated", "exception_text", "validate"]

_MOST_ERRORS = 3
_LONGEST_VALUE = 60
_LONGEST_CHOICE = 400


@dataclass(frozen=True, slots=True)
class Validated:
    """Either what the function gets by keyword, or in one line why it cannot be called."""

    arguments: dict[str, Any] | None = None
    error: str | None = None
    failure: ToolFailure | None = None
    """Which kind of error it is; set where a call is checked."""


def validate(tool: Tool, arguments: dict[str, Any]) -> Validated:
    """Check arguments that came from JSON, and convert them to the types of the function.

    With types, as pydantic reads JSON: "5" is taken for an int, text for an Enum or a date. With a schema alone, as
    jsonschema reads it, nothing converted. An argument that the tool does not know is an error in both, unless
    the schema says that there may be more. A validator of the tool's own types that raises something is an error of
    the arguments too, whatever it raises: the call is lost, and not the reply that it stands in.
    """
    try:
        if tool.arguments_model is not None:
            return _by_types(tool.arguments_model, arguments)
        return _by_schema(tool.parameters, arguments)
    except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return Validated(error=f"checking them raised {exception_text(error)}")


def exception_text(error: BaseException) -> str:
    """Its kind and its text; the kind alone where it has none, or cannot be printed."""
    try:
        text = str(error)
    except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException:
        text = ""
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def _by_types(model: type[BaseModel], arguments: dict[str, Any]) -> Validated:
    from pydantic import ValidationError

    try:
        made = model.model_validate_json(json.dumps(arguments))
    except ValidationError as error:
        names = [str(field.alias) for field in model.model_fields.values()]
        return Validated(error=_in_one_line(_type_error(detail, names) for detail in error.errors(include_url=False)))
    # What was not given stays the function's own default.
    fields = model.model_fields
    return Validated({str(fields[name].alias): getattr(made, name) for name in fields if name in made.model_fields_set})


def _by_schema(schema: dict[str, Any], arguments: dict[str, Any]) -> Validated:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import relevance
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    known = schema.get("properties")
    open_ended = {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "$ref",
        "anyOf",
        "oneOf",
        "allOf",
    }
    if known is not None and not schema.keys() & open_ended:
        schema = {**schema, "additionalProperties": False}
    # An empty registry: a reference to elsewhere is an error, never a request over the network.
    validator = Draft202012Validator(schema, registry=Registry())
    try:
        found = sorted(validator.iter_errors(arguments), key=relevance, reverse=True)
    except Unresolvable as error:
        return Validated(error=f"the tool's schema is broken: it refers to {error.ref!r}, which is not there")
    if found:
        return Validated(error=_in_one_line(_schema_error(violation, list(known or ())) for violation in found))
    return Validated(dict(arguments))


def _type_error(detail: ErrorDetails, names: Sequence[str]) -> str:
    where = _path(detail["loc"])
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        return _unknown_argument(where, names)
    if detail["type"] == "missing":
        return f"{where} is missing"
    message = detail["msg"].removeprefix("Input ").removeprefix("Value error, ").partition(", unable to parse ")[0]
    return f"{where} {message}, not {_shown(detail['input'])}"


def _schema_error(violation: SchemaViolation, names: Sequence[str]) -> str:
    path = list(violation.absolute_path)
    where = _path(path) if path else "arguments"
    wanted = violation.validator_value
    if violation.validator == "required":
        missing = [name for name in wanted if name not in violation.instance]
        return ", ".join(f"{_path([*path, name])} is missing" for name in missing)
    if violation.validator == "additionalProperties" and wanted is False:
        known = violation.schema.get("properties", {})
        return ", ".join(
            _unknown_argument(_path([*path, name]), sorted(known)) for name in violation.instance if name not in known
        )
    texts = {
        "type": f"should be {' or '.join(wanted) if isinstance(wanted, list) else wanted}",
        "enum": f"should be one of {_shown(wanted, _LONGEST_CHOICE)}",
        "const": f"should be {_shown(wanted)}",
        "anyOf": "fits none of the allowed forms",
        "oneOf": "fits none, or more than one, of the allowed forms",
    }
    text = texts.get(violation.validator, f"breaks the rule {violation.validator}: {_shown(wanted)}")
    return f"{where} {text}, not {_shown(violation.instance)}"


def _unknown_argument(name: str, known: Sequence[str]) -> str:
    return f"{name} is no argument (there are: {', '.join(known) or 'none'})"


def _path(parts: Iterable[str | int]) -> str:
    """How the model would write the way to the value: tasks[2].name."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any, longest: int = _LONGEST_VALUE) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= longest else text[:longest] + "…"


def _in_one_line(errors: Iterable[str]) -> str:
    texts = [" ".join(error.split()) for error in errors]
    more = f"; and {len(texts) - _MOST_ERRORS} more" if len(texts) > _MOST_ERRORS else ""
    return "; ".join(texts[:_MOST_ERRORS]) + more
