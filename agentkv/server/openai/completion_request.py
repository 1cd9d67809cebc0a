"""`POST /v1/completions`: the request, and the calls that it is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr

from ..errors import ApiError
from ..prompts import INT64, TokenIds
from .fields import CompletionFields, refuse_what_is_not_followed

__all__ = ["CompletionRequest"]

_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(CompletionFields):
    """Fields as in OpenAI's API reference, "Create completion"."""

    prompt: (
        StrictStr
        | TokenIds
        | Annotated[list[StrictStr], Field(min_length=1, max_length=256)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256)]
    )
    max_tokens: Annotated[StrictInt, Field(ge=0, le=INT64)] | None = None
    """0 goes with echo: the prompt is given back, with its log-probabilities, and nothing is written."""
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1)] | None = None
    suffix: StrictStr | None = None

    def check(self) -> None:
        """Raise 400 for what cannot be followed."""
        refuse_what_is_not_followed(self, {"suffix": [""], "best_of": [self.choices], "logit_bias": [{}]})
        if not all(self.prompts):
            raise ApiError(400, "prompt is empty; a completion continues at least one token", param="prompt")
        if self.prompt_only and not self.echo:
            raise ApiError(400, "max_tokens 0 goes with echo; ask for at least one token", param="max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs comes whole: leave stream out", param="stream")

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, each of them text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [each for each in self.prompt if isinstance(each, int)]
        # No ids at all is an empty prompt, and not no prompts.
        return [ids] if ids or not self.prompt else [each for each in self.prompt if not isinstance(each, int)]

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is to be written behind the prompt."""
        return self.max_tokens == 0

    def options(self) -> dict[str, Any]:
        """Keywords of `Runtime.stream`, but for who calls."""
        sampling = self.sampling()
        sampling.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
        if self.prompt_only:  # A call writes at least one token, which is not given.
            sampling["max_tokens"] = 1
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            if self.echo:
                sampling["prompt_logprobs"] = self.logprobs
        return {**sampling, "n": self.choices // self.copies, "cache_salt": self.cache_salt}
