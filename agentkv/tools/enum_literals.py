"""typing.Literal of members of an Enum, which pydantic matches against themselves and never against JSON."""

from __future__ import annotations

import enum
import functools
import operator
import types
import typing
from typing import Any

from pydantic import AfterValidator

__all__ = ["by_values"]


def by_values(annotation: Any) -> Any:
    """The same annotation with each such Literal in it as one of the members' values, turned into members once read.

    Those inside of models, dataclasses and TypedDicts stay: pydantic makes these by itself.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _of_values(annotation, arguments)
    if origin is typing.Annotated:
        return typing.Annotated[(by_values(arguments[0]), *annotation.__metadata__)]
    if origin is None or any(argument is None or isinstance(argument, list | str) for argument in arguments):
        return annotation
    inner = tuple(map(by_values, arguments))
    if all(new is old for new, old in zip(inner, arguments, strict=True)):
        return annotation
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, inner)
    return origin[inner]


def _of_values(annotation: Any, choices: tuple[Any, ...]) -> Any:
    plain = (str, int, bool, type(None))
    members = {_key(each.value): each for each in choices if isinstance(each, enum.Enum) and type(each.value) in plain}
    if not members:
        return annotation
    for each in choices:
        if not isinstance(each, enum.Enum):
            members.pop(_key(each), None)  # Of a value and a member that are written alike, the value is meant.
    values = tuple(
        each.value if isinstance(each, enum.Enum) and type(each.value) in plain else each for each in choices
    )
    return typing.Annotated[typing.Literal[values], AfterValidator(lambda value: members.get(_key(value), value))]


def _key(value: Any) -> tuple[type, Any]:
    """True is no 1 here."""
    return type(value), value
