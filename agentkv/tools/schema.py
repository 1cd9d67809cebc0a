"""JSON schemas in one canonical form, so that one tool is always the same text and so the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["canonical", "copied", "inlined", "local_target", "references", "without_titles"]

Schema = dict[str, Any]

_FIRST = ("type", "description", "enum", "properties", "required")
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset(
    {
        "items",
        "additionalProperties",
        "additionalItems",
        "propertyNames",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)


def canonical(schema: Any) -> Any:
    """The same schema with its keys in one order, in fresh dicts: equal schemas give equal JSON texts.

    type, description, enum, properties and required stand first, the rest follows sorted; properties and `required`
    are sorted. The order of lists that mean something (enum, anyOf, prefixItems) stays.
    """
    if not isinstance(schema, dict):
        return copied(schema)
    made = {}
    for key in sorted(schema, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        value = schema[key]
        if key == "required" and isinstance(value, list | tuple):
            made[key] = sorted(set(value))
        elif _holds_schemas(key, value):
            made[key] = _mapped(key, value, canonical)
        else:
            made[key] = _sorted_data(value)
    return made


def copied(value: Any) -> Any:
    """A deep copy, several times as fast as copy.deepcopy where the value is what JSON gives."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None or kind is float:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    return copy.deepcopy(value)


def without_titles(schema: Any) -> Any:
    """The same schema without the `title`s that say a name once more; a property called title stays."""
    if not isinstance(schema, dict):
        return schema
    return {
        key: _mapped(key, value, without_titles) if _holds_schemas(key, value) else value
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def inlined(schema: Schema) -> Schema:
    """The same schema with each `$ref` into `$defs` replaced by what it names, save those that contain themselves."""
    definitions: dict[str, Schema] = schema.get("$defs", {})
    recursive = {name for name in definitions if _reaches(name, definitions)}
    made: Schema = _replaced({key: value for key, value in schema.items() if key != "$defs"}, definitions, recursive)
    kept = {name: _replaced(definitions[name], definitions, recursive) for name in sorted(recursive)}
    if kept:
        made["$defs"] = kept
    return made


def references(schema: Any) -> Iterator[str]:
    """Every `$ref` in the schema, wherever a schema may stand."""
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for key, value in schema.items():
        if _holds_schemas(key, value):
            for child in _children(key, value):
                yield from references(child)


def local_target(root: Schema, reference: str) -> Any:
    """What a `$ref` names within its own document. LookupError where it names nothing there."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        raise LookupError(reference)
    found: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise LookupError(reference)
    return found


def _holds_schemas(key: str, value: Any) -> bool:
    if key in _MAPS_OF_SCHEMAS:
        return isinstance(value, dict)
    if key in _LISTS_OF_SCHEMAS:
        return isinstance(value, list)
    return key in _SCHEMAS


def _children(key: str, value: Any) -> list[Any]:
    if key in _MAPS_OF_SCHEMAS:
        return list(value.values())
    if key in _LISTS_OF_SCHEMAS or isinstance(value, list):
        return list(value)
    return [value]


def _mapped(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to each schema that stands under `key`."""
    if key in _MAPS_OF_SCHEMAS:
        return {name: change(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [change(item) for item in value]
    return change(value)


def _sorted_data(value: Any) -> Any:
    """Plain data (a default, an enum) with the keys of its objects sorted."""
    if isinstance(value, dict):
        return {key: _sorted_data(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted_data(item) for item in value]
    return copied(value)


def _definition_of(reference: str) -> str:
    return reference.removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~")


def _reaches(name: str, definitions: dict[str, Schema]) -> bool:
    """Whether a definition contains itself, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for reference in references(definitions.get(waiting.pop(), {})):
            target = _definition_of(reference)
            if target == name:
                return True
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return False


def _replaced(schema: Any, definitions: dict[str, Schema], kept: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    target = _definition_of(schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
    if target in definitions and target not in kept:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _replaced({**definitions[target], **beside}, definitions, kept)
    return {
        key: _mapped(key, value, lambda child: _replaced(child, definitions, kept))
        if _holds_schemas(key, value)
        else value
        for key, value in schema.items()
    }
