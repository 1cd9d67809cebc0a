"""typing.TypedDict for pydantic, which below Python 3.12 reads only the one of typing_extensions."""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from typing import Any

import typing_extensions

__all__ = ["readable"]


def readable(annotation: Any, _inside: tuple[Any, ...] = ()) -> Any:
    """The same annotation with each TypedDict in it made anew as typing_extensions' own, where Python needs that.

    One that contains itself stays as it is, and pydantic says what is wrong with it.
    """
    if sys.version_info >= (3, 12):
        return annotation
    if typing.is_typeddict(annotation):
        return annotation if annotation in _inside else _remade(annotation, _inside)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Required, typing.NotRequired):
        return readable(arguments[0], _inside)
    if origin is typing.Annotated:
        return typing.Annotated[(readable(arguments[0], _inside), *annotation.__metadata__)]
    if origin in (None, typing.Literal) or not all(_is_type(argument) for argument in arguments):
        return annotation
    inner = tuple(readable(argument, _inside) for argument in arguments)
    if inner == arguments:
        return annotation
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, inner)
    return origin[inner]


def _is_type(argument: Any) -> bool:
    return argument is not None and not isinstance(argument, list | str)


def _remade(typed_dict: Any, inside: tuple[Any, ...]) -> Any:
    hints = typing.get_type_hints(typed_dict, include_extras=True)
    fields = {}
    for name, hint in hints.items():
        made = readable(hint, (*inside, typed_dict))
        # A marker inside an annotation that was text is not in __optional_keys__: only the resolved hint shows it.
        marker = typing.get_origin(hint)
        optional = marker is typing.NotRequired or (
            name in typed_dict.__optional_keys__ and marker is not typing.Required
        )
        fields[name] = typing_extensions.NotRequired[made] if optional else made
    make: Any = typing_extensions.TypedDict  # As a function it takes names that are not written out.
    remade = make(typed_dict.__name__, fields)
    remade.__doc__ = typed_dict.__doc__
    remade.__module__ = typed_dict.__module__
    return remade
