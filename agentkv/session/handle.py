"""What a session or a runtime is to whoever holds it: one thing, not copied, with no attributes that nothing reads."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import ClassVar, NoReturn

from .keywords import OF_SESSIONS, SAMPLING

__all__ = ["Handle", "SessionHandle"]


class Handle:
    """Refuses to be copied and pickled, and to be given public attributes of which it would make no use.

    Its own methods may be replaced, as tests do. Private names are free.
    """

    _advice: ClassVar[Mapping[str, str]] = {}
    """For attributes that are not set: what to do instead."""
    _copy_advice: ClassVar[str] = ""

    def __setattr__(self, name: str, value: object) -> None:
        own = getattr(type(self), name, None)
        read_only = isinstance(own, property) and own.fset is None
        if name.startswith("_") or (own is not None and not read_only):
            object.__setattr__(self, name, value)
            return
        kind = type(self).__name__
        if name in self._advice:
            raise AttributeError(f"{kind}.{name} cannot be set: {self._advice[name]}")
        if read_only:
            raise AttributeError(f"{kind}.{name} cannot be set: it tells what is, and nothing is changed by it")
        near = difflib.get_close_matches(name, [*self._advice, *filter(str.isidentifier, dir(type(self)))], n=1)
        meant = f" Did you mean {near[0]}?" if near and not near[0].startswith("_") else ""
        raise AttributeError(
            f"a {kind} has no attribute {name!r}, and nothing would read it.{meant} Keep what is your own beside it, "
            f"such as in a dict by {kind.lower()}"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # What copy.copy, copy.deepcopy and pickle all ask for.
        raise TypeError(f"a {type(self).__name__} is neither copied nor pickled: {self._copy_advice}")


def _given_once(name: str) -> str:
    return f"it is given once, as runtime.session({name}=...)"


class SessionHandle(Handle):
    """Advice that sessions with and without await share."""

    _advice: ClassVar[Mapping[str, str]] = {
        **{
            name: f"it goes to each call, as ask(..., {name}=...), or to runtime.session({name}=...)"
            for name in SAMPLING
        },
        **{name: _given_once(name) for name in OF_SESSIONS},
        "tool_choice": "it goes to each call, as ask(..., tool_choice=...), or to runtime.session(tool_choice=...)",
        "timeout": "it goes to each call, as ask(..., timeout=...)",
        "max_turns": "it goes to run(..., max_turns=...)",
        "messages": "it gives a copy of what was said. append(...) adds to it, rollback(mark) goes back, and "
        "runtime.session(messages=...) begins another session",
    }
    _copy_advice = (
        "fork() gives another session that goes on from here, and json.dumps(session.messages) stores one for "
        "runtime.session(messages=...)"
    )
