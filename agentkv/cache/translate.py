"""The tree's own errors never leave the cache: they tell of a bug in agentkv, and are told as one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from agentkv.errors import InternalError
from agentkv_radix import InvariantError, RadixError

__all__ = ["translated"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def translated(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A broken invariant becomes AssertionError, as of every other check; any other RadixError an InternalError."""

    @functools.wraps(method)
    def call(*positional: _P.args, **named: _P.kwargs) -> _T:
        try:
            return method(*positional, **named)
        except InvariantError as error:
            raise AssertionError(str(error)) from error
        except RadixError as error:
            raise InternalError(f"the prefix tree was misused: {error}") from error

    return call
