"""A call while it is in the engine: its choices, and the requests that compute them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentkv.calls import Call
from agentkv.logprobs import TokenLogprobs
from agentkv.scheduler import Request
from agentkv.usage import Usage

from .choice import Choice

__all__ = ["Live"]


class Live:
    """One call. With n = 1 one request computes everything.

    With n > 1 a first request, the stem, computes the prompt and ends as a call with one token does; each choice draws
    its first token from the stem's logits and goes on in a request of its own. Without the cache there is nothing to
    go on from, so each choice has its own request from the start, and the prompt is computed n times.
    """

    def __init__(self, call: Call, tokenizer: Any, request_ids: Iterator[int]) -> None:
        self.call = call
        self.choices = [Choice(call, index, tokenizer) for index in range(call.n)]
        self.admitted_at: float | None = None
        self.requests: dict[int, Request] = {}
        """By index of the choice, once the choice has a request of its own."""
        self._request_ids = request_ids
        wants_prompt = call.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] * len(call.prompt_token_ids) if wants_prompt else None
        )
        self.stem = self._request(call.prompt_token_ids, read_cache=not wants_prompt, all_logits=wants_prompt)
        self.branches = call.n > 1 and call.use_cache
        """Whether the stem ends when the prompt is computed."""
        if not self.branches:
            self.requests[0] = self.stem
            for index in range(1, call.n):
                self.requests[index] = self._further(call.prompt_token_ids)
            if call.n > 1:
                self.stem.group = call.call_id

    def first_requests(self) -> list[Request]:
        """What to queue when the call arrives."""
        return [self.stem] if self.branches else list(self.requests.values())

    def branch(self) -> list[Request]:
        """The prompt is computed and each choice has its first token: a request for each that has not ended."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self.requests[choice.index] = self._further((*self.call.prompt_token_ids, *choice.token_ids))
        return list(self.requests.values())

    def choices_behind(self, request_id: int, index: int) -> list[Choice]:
        """The choices that draw their next token from this request's logits."""
        if self.branches and request_id == self.stem.request_id:
            return self.choices
        return [self.choices[index]]

    def all_requests(self) -> list[Request]:
        """Every request that was ever made for the call."""
        return list({request.request_id: request for request in (self.stem, *self.requests.values())}.values())

    def usage(self, choice: Choice, now: float) -> Usage:
        """What the choice cost; the prompt is counted in the first choice alone."""
        call, own = self.call, self.requests.get(choice.index)
        usage = Usage(
            output_tokens=len(choice.token_ids),
            rerun_tokens=own.rerun_tokens if own is not None else 0,
            queue_time=(self.admitted_at if self.admitted_at is not None else now) - call.arrived,
            ttft=choice.first_token_at - call.arrived if choice.first_token_at is not None else None,
            duration=now - call.arrived,
        )
        if choice.index > 0 or self.admitted_at is None:
            return usage
        stem = self.stem
        return replace(
            usage,
            prompt_tokens=stem.prompt_tokens,
            cached_tokens=stem.cached_tokens,
            computed_tokens=stem.computed_tokens,
            rerun_tokens=usage.rerun_tokens + (stem.rerun_tokens if own is not stem else 0),
            cached_by_tier={"device": stem.cached_tokens},
            misses=dict(stem.misses),
        )

    def _further(self, token_ids: tuple[int, ...]) -> Request:
        """A request of a further choice: whatever of the prompt runs in it, runs again."""
        request = self._request(token_ids)
        request.group = self.call.call_id
        request.computed_end = len(self.call.prompt_token_ids)
        return request

    def _request(self, token_ids: tuple[int, ...], *, read_cache: bool = True, all_logits: bool = False) -> Request:
        return Request(
            request_id=next(self._request_ids),
            prompt_token_ids=list(token_ids),
            namespace=self.call.namespace,
            name=self.call.name,
            use_cache=self.call.use_cache,
            read_cache=read_cache,
            all_logits=all_logits,
        )
