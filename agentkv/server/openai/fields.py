"""What chat and plain completions have in common, and what is done with the fields that nobody here can follow.

OpenAI's API refuses fields that it does not know, and so does this one: a misspelt `temprature` must not silently be
the default. Of the fields that it knows there are three kinds: those followed here; those that change nothing of the
answer, which are taken and left (`user`, `store`, …); and those that would change it and cannot be followed, refused
with their name unless they hold the value that changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from ..errors import ApiError
from ..prompts import INT64, TokenIds

__all__ = ["CompletionFields", "Number", "StreamOptions", "refuse_what_is_not_followed"]

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="ignore")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False
    """Taken, and changes nothing: no padding is sent."""


class CompletionFields(BaseModel):
    """Fields of both kinds of completions."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = 1
    max_tokens: Annotated[StrictInt, Field(ge=1, le=INT64)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    """Absent: 1.0, as in OpenAI's API."""
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=INT64)] | None = None
    """Absent: drawn anew, so that a request asked again is answered anew."""
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=16)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Number] | None = None
    prompt_cache_key: Annotated[StrictStr, Field(max_length=512)] | None = None
    """Who calls, in reports."""

    # Taken, and changes nothing.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None

    # Not in OpenAI's API; servers of open models have them under these names.
    top_k: Annotated[StrictInt, Field(ge=-1, le=INT64)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: StrictBool = False
    cache_salt: StrictStr | None = None
    """Calls share pages only with calls of an equal salt."""
    return_token_ids: StrictBool = False
    """Also give each choice's ids, and each chunk's in a stream."""

    def sampling(self) -> dict[str, Any]:
        """The keywords of one call's SamplingParams; what is absent or null keeps its default.

        Each time with another seed where none is given: a Runtime's own would be the same for the same prompt, and
        who asks again, or asks for votes, wants another answer.
        """
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self._temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "seed": secrets.randbits(63) if self.seed is None else self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "ignore_eos": self.ignore_eos or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def choices(self) -> int:
        """n, where null is 1."""
        return 1 if self.n is None else self.n

    @property
    def copies(self) -> int:
        """How often each answer of the model is given: a greedy one is made once, for all n would be equal."""
        return self.choices if self._temperature == 0 else 1

    @property
    def _temperature(self) -> float:
        if self.temperature is None:
            return 1.0
        # Greedy for what would make logits overflow, as is meant by whoever sends 1e-9.
        return 0.0 if self.temperature < 1e-5 else self.temperature

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


_NOW = {"functions": "tools", "function_call": "tool_choice"}
"""What fields of former times are called today."""


def refuse_what_is_not_followed(body: BaseModel, neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raise 400 for a field that would change the answer and that nothing here follows.

    neutral: by field, the values that change nothing; None always is one.
    """
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            instead = f"use {_NOW[name]}" if name in _NOW else "leave it out"
            raise ApiError(400, f"{name} is not supported here; {instead}", param=name, code="unsupported_parameter")
