"""Two JSON schemas as one, where the same value must fit both; and what no grammar of ours can express."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

__all__ = ["IGNORED", "Impossible", "Unsupported", "apart", "check_keywords", "merged"]

Schema = dict[str, Any]

IGNORED = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "format",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""What says nothing of the values."""

_UNSUPPORTED = (
    "$dynamicRef",
    "additionalItems",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "patternProperties",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LARGER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})


class Unsupported(Exception):
    """The schema uses something that a grammar does not express."""

    def __init__(self, feature: str, where: str) -> None:
        super().__init__(f"{feature} at {where}" if where else feature)


class Impossible(Exception):
    """No value fits, or none that ends. The text is where."""


def check_keywords(schema: Any, where: str) -> None:
    """Unsupported where a keyword restricts the values in a way that a grammar does not express."""
    if not isinstance(schema, dict):
        raise Unsupported("a schema that is no object", where)
    for keyword in _UNSUPPORTED:
        if keyword in schema and not (keyword.startswith("unevaluated") and schema[keyword] in (True, False)):
            raise Unsupported(repr(keyword), where)
    if not isinstance(schema.get("items", {}), dict | bool):
        raise Unsupported("'items' as a list (prefixItems says the same)", where)


def merged(one: Schema | bool, other: Schema, where: str) -> Schema:
    """A schema for what fits both. Unsupported where that would take more than laying keywords side by side."""
    if one is False:
        raise Impossible(where)
    made: Schema = {} if one is True else dict(one)
    if _closed_apart(made, other):
        raise Unsupported("additionalProperties: false within allOf, beside other properties", where)
    for keyword, value in other.items():
        if keyword in made and made[keyword] != value and keyword not in IGNORED:
            made[keyword] = _both(keyword, made[keyword], value, where)
        else:
            made[keyword] = value
    return made


def apart(branches: Sequence[Schema]) -> bool:
    """Whether surely no value fits two of them: by type, or by a required property that names its branch."""
    return all(_two_apart(one, other) for one, other in itertools.combinations(branches, 2))


def _both(keyword: str, one: Any, other: Any, where: str) -> Any:
    if keyword in _LARGER:
        return max(one, other)
    if keyword in _SMALLER:
        return min(one, other)
    if keyword == "required":
        return sorted({*one, *other})
    if keyword == "type":
        return _both_types(one, other, where)
    if keyword == "enum":
        return [value for value in one if value in other]
    if keyword in ("items", "additionalProperties"):
        return {"allOf": [one, other]}
    if keyword == "properties":
        return {**one, **other, **{name: {"allOf": [one[name], other[name]]} for name in one if name in other}}
    raise Unsupported(f"two different {keyword!r} for one value", where)


def _both_types(one: Any, other: Any, where: str) -> Any:
    kinds = [kind for kind in _types(one) if kind in _types(other)]
    if "integer" not in kinds and {"integer", "number"} <= _types(one) | _types(other):
        kinds.append("integer")
    if not kinds:
        raise Impossible(where)
    return sorted(kinds)


def _closed_apart(one: Schema, other: Schema) -> bool:
    """Whether one forbids what the other names."""
    names, others = set(one.get("properties", ())), set(other.get("properties", ()))
    if one.get("additionalProperties") is False and others - names:
        return True
    return other.get("additionalProperties") is False and bool(names - others)


def _two_apart(one: Schema, other: Schema) -> bool:
    kinds, others = _types(one.get("type", [])), _types(other.get("type", []))
    if kinds and others and not kinds & others and not {"integer", "number"} <= kinds | others:
        return True
    if _values(one) and _values(other):
        return not _values(one) & _values(other)
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        _values(one["properties"].get(name))
        and _values(other["properties"].get(name))
        and not _values(one["properties"][name]) & _values(other["properties"][name])
        for name in shared
        if "properties" in one and "properties" in other
    )


def _types(kinds: Any) -> set[str]:
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _values(schema: Any) -> set[str]:
    """The values of enum or const as text; empty where the schema has neither."""
    if not isinstance(schema, dict):
        return set()
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    return {json.dumps(value, sort_keys=True) for value in values}
