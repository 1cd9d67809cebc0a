"""What an answer that is no call of a tool has to be: JSON, by a schema or without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["AnswerFormat"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A JSON value that fits the schema; without one, any JSON object."""

    schema: Mapping[str, Any] | None = None

    @classmethod
    def given(cls, value: object) -> Self | None:
        """From `response_format=` as OpenAI's API has it; None, and type "text", are no demand.

        {"type": "json_object"} | {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}. TypeError and
        ValueError say what is wrong with anything else.
        """
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise TypeError(f'response_format must be a dict such as {{"type": "json_object"}}, got {value!r}')
        kind = value.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return cls()
        if kind != "json_schema":
            raise ValueError(f'response_format\'s type is "text", "json_object" or "json_schema", got {kind!r}')
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError('response_format of type "json_schema" needs {"json_schema": {"schema": {…}}}')
        return cls(schema)
