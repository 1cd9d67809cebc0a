"""How one call wants its tokens drawn, when it ends, what it reports: plain, frozen, checked where made.

Names and meanings follow transformers' `GenerationConfig` (temperature, top_k, top_p, min_p,
repetition_penalty) and the OpenAI API (presence_penalty, frequency_penalty, seed, stop, logprobs). No torch
here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

__all__ = ["SamplingParams"]

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-5, 1e5
_MIN_REPETITION, _MAX_REPETITION = 1e-2, 1e2
_SEED_RANGE = (-(2**63), 2**64 - 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one call. The defaults are greedy decoding until the model ends its turn.

    max_tokens          at most this many output tokens, at least 1; None: the runtime's own limit
    temperature         0 is greedy (top_k, top_p and min_p then do nothing); else from 1e-5 to 1e5
    top_k, top_p, min_p filters, in this order; 0, 1.0 and 0.0 leave everything in
    seed                the draw at output position i depends on (seed, i) alone; None: chosen by the runtime
    stop                strings that end the text, not included in it; one string or several
    stop_token_ids      ids that end the output, besides the model's own end-of-sequence ids
    repetition_penalty  over prompt and output (transformers); 1.0 is none; from 0.01 to 100
    presence_penalty    logit - penalty, once for each id already in the output; from -2 to 2
    frequency_penalty   logit - penalty * (times the id is in the output); from -2 to 2
    logprobs            None: none; n: the chosen token's log-probability and the n most likely ones
    prompt_logprobs     the same for the tokens of the prompt
    ignore_eos          the model's end-of-sequence ids do not end the output

    ValueError for a value out of range, TypeError for a value of the wrong kind; bool is not a number here.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, minimum=1, optional=True)
        self._store("temperature", _number("temperature", self.temperature, 0.0, _MAX_TEMPERATURE))
        if 0.0 < self.temperature < _MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {_MIN_TEMPERATURE}, got {self.temperature!r}: "
                f"logits divided by it would overflow. Use 0."
            )
        self._store("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        _integer("top_k", self.top_k, minimum=0, hint="0 keeps every token")
        self._store("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        _integer("seed", self.seed, minimum=_SEED_RANGE[0], maximum=_SEED_RANGE[1], optional=True)
        self._store("stop", _stop_strings(self.stop))
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        penalty = _number("repetition_penalty", self.repetition_penalty, _MIN_REPETITION, _MAX_REPETITION)
        self._store("repetition_penalty", penalty)
        self._store("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._store("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        _integer("logprobs", self.logprobs, minimum=0, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, minimum=0, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    @classmethod
    def from_kwargs(cls, defaults: Self | None = None, /, **kwargs: Any) -> Self:
        """`defaults` (or the class's own) with the given keywords in their place.

        TypeError for a keyword that is no sampling parameter, naming the ones that look like it.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError("; ".join(_describe_unknown(name, known) for name in unknown))
        base: Mapping[str, Any] = {} if defaults is None else {name: getattr(defaults, name) for name in known}
        return cls(**{**base, **kwargs})

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether tokens seen so far change the scores."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _store(self, name: str, value: object) -> None:
        """Put the normal form of a value in place; the object is frozen for everyone else."""
        object.__setattr__(self, name, value)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    # Compared before it is made a float: an int may be too large to be one.
    if not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def _integer(
    name: str,
    value: object,
    *,
    minimum: int,
    maximum: int | None = None,
    optional: bool = False,
    hint: str = "",
) -> None:
    if value is None and optional:
        return
    wanted = f"{name} must be an int of at least {minimum}"
    if maximum is not None:
        wanted += f" and at most {maximum}"
    if optional:
        wanted += ", or None"
    if hint:
        wanted += f" ({hint})"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{wanted}; got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{wanted}; got {value!r}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    """One string or several, as a tuple without repeats. None, as APIs send it, is no stop string."""
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or isinstance(strings, (bytes, bytearray)):
        raise TypeError(f"stop must be a string or a sequence of strings, got {stop!r}")
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop must hold strings only, got {string!r}")
        if not string:
            raise ValueError(f"stop must not hold an empty string, which would end every text at once; got {stop!r}")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be a sequence of token ids, got {token_ids!r}")
    for token_id in token_ids:
        _integer(f"each of {name}", token_id, minimum=0)
    return tuple(dict.fromkeys(token_ids))


def _describe_unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}."
    return f"unknown sampling parameter {name!r}: {advice}"
