"""What an answer that is no call of a tool has to be: JSON, by a schema or without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from agentkv.tools.schema import copied
from agentkv.tools.schema_check import schema_fault

__all__ = ["AnswerFormat"]

_KEYS: Mapping[object, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A JSON value that fits the schema; without one, any JSON object."""

    schema: Mapping[str, Any] | None = None

    @classmethod
    def given(cls, value: object) -> Self | None:
        """From `response_format=` as OpenAI's API has it; None, and type "text", are no demand.

        {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": {…}}}, where the inner one may hold
        a name, a description and `strict`, which change nothing: answers always fit. TypeError and ValueError say what
        is wrong with anything else; a key that is not known here is refused, for it may be a schema that was meant.
        """
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise TypeError(f'response_format must be a dict such as {{"type": "json_object"}}, got {value!r}')
        kind = value.get("type")
        known = _KEYS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise ValueError(f'response_format\'s type is "text", "json_object" or "json_schema", got {kind!r}')
        unknown = sorted(str(key) for key in value if key not in known)
        if unknown:
            raise ValueError(
                f"response_format of type {kind!r} has no {', '.join(unknown)}; a schema goes into "
                f'{{"type": "json_schema", "json_schema": {{"schema": {{…}}}}}}'
            )
        if kind == "text":
            return None
        return cls() if kind == "json_object" else cls(_schema_of(value.get("json_schema")))


def _schema_of(described: object) -> Mapping[str, Any]:
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError('response_format of type "json_schema" needs {"json_schema": {"schema": {…}}}')
    if fault := schema_fault(schema):
        raise ValueError(f"response_format holds no JSON schema: {fault}")
    # A copy: the grammar is made once the model is there, and what the caller does to his dict until then is not meant.
    schema_of_answer: Mapping[str, Any] = copied(dict(schema))
    return schema_of_answer
