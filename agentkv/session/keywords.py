"""Keywords that a call does not take: what was meant by them, or where they belong."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from typing import ParamSpec

from agentkv.sampling_params import SamplingParams

__all__ = ["OF_SESSIONS", "SAMPLING", "refuse_unknown", "with_advice"]

_P = ParamSpec("_P")

SAMPLING = tuple(field.name for field in fields(SamplingParams))

_OTHER_NAMES = {
    "max_completion_tokens": "it is max_tokens here",
    "max_new_tokens": "it is max_tokens here",
    "max_output_tokens": "it is max_tokens here",
    "max_length": "it is max_tokens here, of the answer alone",
    "do_sample": "a temperature above 0 draws, 0 (the default) does not",
    "num_return_sequences": "it is n here, of generate()",
    "stop_sequences": "it is stop here",
    "stop_strings": "it is stop here",
    "eos_token_id": "it is stop_token_ids here",
    "repeat_penalty": "it is repetition_penalty here",
    "top_logprobs": "logprobs is the number of them here",
    "stream": "call stream(...), which takes the same arguments",
    "user": "it is name here",
    "model": "a model goes to Runtime(model)",
}
"""As other libraries call it."""

OF_SESSIONS = ("system", "tools", "name", "tags", "history", "cache", "cache_salt", "chat_template_kwargs")

_ELSEWHERE = {
    **{name: f"{name} goes to runtime.session({name}=...), for all of its calls" for name in OF_SESSIONS},
    "messages": "they are the prompt of generate(messages), and what runtime.session(messages=...) goes on from",
    "n": "a session has one answer at a time: session.fork(n) gives n sessions that answer side by side, "
    "runtime.generate(..., n=...) n answers",
    "tool_choice": "tool_choice goes to a call, or to runtime.session(tool_choice=...)",
    "parallel_tool_calls": "parallel_tool_calls goes to runtime.generate() and runtime.stream()",
    "max_turns": "max_turns goes to session.run() or run_stream()",
    "timeout": "timeout goes to each call: generate(), ask(), run(), stream()",
}


def refuse_unknown(given: Iterable[str], own: Sequence[str], *, what: str = "keyword") -> None:
    """TypeError for keywords that are neither the call's own nor sampling parameters, with advice for each."""
    known = (*own, *SAMPLING)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError("; ".join(f"unknown {what} {name!r}: {_advice(name, known)}" for name in unknown))


def with_advice(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that says what was meant by a keyword that it does not take. Its signature stays what it was."""
    own = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def advising(*args: _P.args, **kwargs: _P.kwargs) -> None:
        unknown = [name for name in kwargs if name not in own]
        if unknown:
            raise TypeError("; ".join(f"unknown option {name!r}: {_of_constructor(name, own)}" for name in unknown))
        init(*args, **kwargs)

    return advising


def _of_constructor(name: str, own: Collection[str]) -> str:
    if name in SAMPLING:
        return (
            f"{name} goes to the call, as generate(..., {name}=...), or to runtime.session({name}=...) for all of its"
        )
    near = _near(name, own)
    if not near and name in _ELSEWHERE:
        return _ELSEWHERE[name]
    return near or _OTHER_NAMES.get(name) or f"known are {', '.join(own)}."


def _advice(name: str, known: Collection[str]) -> str:
    return _OTHER_NAMES.get(name) or _ELSEWHERE.get(name) or _near(name, known) or f"known are {', '.join(known)}."


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""
